/* SPDX-License-Identifier: Apache-2.0 */
/* Duration of a collective on the cluster of virtual time: computed from its members' arrivals and calls alone
 * (simulated-cluster.md). The real transfers, and their times, do not matter. */
#include <math.h>

#include "ref/comm/moves.h"
#include "ref/comm/rendezvous_impl.h"
#include "sim/sim_impl.h"

enum { MOST_MEMBERS = 4096 }; /* ar_sim_run takes no more ranks */

/* A time since the first member came, and the member whose coming decided it. Not rounded: a collective is rounded to
 * nanoseconds once, at its end. */
typedef struct moment {
    double ns;
    int from;
} moment;

typedef struct timing {
    const ar_sim_cluster *cluster;
    const ari_gpu *gpu; /* NULL: links have their whole rates, and rings are gone through step by step */
    const ari_group *group;
    const ari_call *call; /* member 0's; the others' agree with it */
    int n;
    int node[MOST_MEMBERS];
    double latency[MOST_MEMBERS], byte_ns[MOST_MEMBERS]; /* rings: of the link that a member receives by */
    double chunk[MOST_MEMBERS];                          /* rings: bytes */
    moment at[MOST_MEMBERS];                             /* when each came; at the end when it is done */
    /* Direct messages: when a member's port is free; members in the order in which they came; how they lie on nodes. */
    moment sends[MOST_MEMBERS], gets[MOST_MEMBERS];
    int order[MOST_MEMBERS];
    int nodes, width;             /* width: members of the node that has most */
    int local[MOST_MEMBERS];      /* the number of each in its node */
    int member[2 * MOST_MEMBERS]; /* [nodes, width]; -1: the node has fewer. Other nodes' ranks fill it up at most. */
} timing;

/* At equal times the first decides. */
static moment later(moment a, moment b)
{
    return b.ns > a.ns ? b : a;
}

static moment plus(moment a, double ns)
{
    return (moment){a.ns + ns, a.from};
}

/* A known GPU's collectives reach a share of a link's rate. */
static ar_sim_link link_to(const timing *t, bool near)
{
    ar_sim_link l = near ? t->cluster->inside : t->cluster->between;
    l.bytes_per_s *= !t->gpu ? 1.0 : near ? t->gpu->inside : t->gpu->between;
    return l;
}

static ar_sim_link link_of(const timing *t, int a, int b)
{
    return link_to(t, t->node[a] == t->node[b]);
}

static double latency_ns(ar_sim_link l)
{
    return l.latency_s * 1e9;
}

static double moving_ns(ar_sim_link l, size_t bytes)
{
    return (double)bytes / l.bytes_per_s * 1e9;
}

/* --- rings -------------------------------------------------------------------------------------------------------- */

static size_t chunk_bytes(const timing *t, int chunk)
{
    const ari_call *call = t->call;
    size_t start = 0, size = 0;
    if (call->kind == ARI_BARRIER)
        return 0;
    if (call->counts)
        size = call->counts[chunk];
    else
        ar_comm_slice(call->count, t->n, chunk, &start, &size);
    return size * ar_dtype_bytes(call->dtype);
}

/* Times of a ring's steps, looked up once: n of them at each of n members. */
static void prepare_ring(timing *t)
{
    for (int r = 0; r < t->n; r++) {
        const ar_sim_link l = link_of(t, r > 0 ? r - 1 : t->n - 1, r);
        t->latency[r] = latency_ns(l);
        t->byte_ns[r] = 1e9 / l.bytes_per_s;
        t->chunk[r] = (double)chunk_bytes(t, r);
    }
}

/* n - 1 steps: in step s member r receives chunk r + first - s from its left neighbour, when both have done the step
 * before. An empty chunk takes the latency too: the step is made all the same. Reduce-scatter: partial sums of chunk c
 * go from c + 1 round to c, so first is n - 1; all-gather: chunk c goes from c round to c - 1, so first is 0. */
static void ring(timing *t, int first)
{
    const int n = t->n;
    prepare_ring(t);
    for (int s = 1; s < n; s++) {
        moment left = t->at[n - 1];
        int chunk = (first - s + n) % n;
        for (int r = 0; r < n; r++) {
            const moment own = t->at[r];
            t->at[r] = plus(later(own, left), t->latency[r] + t->chunk[chunk] * t->byte_ns[r]);
            left = own;
            chunk = chunk + 1 < n ? chunk + 1 : 0;
        }
    }
}

/* Everything goes from `start` to the right through all members, each passing on what has come so far: as many small
 * pieces, so that a link's latency counts once and the slowest link's rate decides. */
static void chain(timing *t, int start, size_t bytes)
{
    moment first = t->at[start], last = first; /* of the data, at the member before */
    int before = start;
    for (int p = 1; p < t->n; p++) {
        const int r = (start + p) % t->n;
        const ar_sim_link l = link_of(t, before, r);
        const double latency = latency_ns(l), moving = moving_ns(l, bytes);
        t->at[before] = later(last, plus(first, moving)); /* it has received, and sent */
        first = plus(later(first, t->at[r]), latency);
        last = later(plus(first, moving), plus(last, latency));
        before = r;
    }
    t->at[before] = last;
}

/* --- direct messages ---------------------------------------------------------------------------------------------- */

/* Bytes that member i sends to member k. */
static size_t message_bytes(const timing *t, int i, int k)
{
    const ari_call *call = ari_group_call(t->group, i);
    return ari_sent_count(call, i, k) * ar_dtype_bytes(call->dtype);
}

/* The message has the sender's port out and the receiver's port in to itself while it moves; both are done a latency
 * later. No message where there is nothing to send. */
static void message(timing *t, int i, int k)
{
    const size_t bytes = message_bytes(t, i, k);
    if (bytes == 0)
        return;
    const ar_sim_link l = link_of(t, i, k);
    const moment moved = plus(later(t->sends[i], t->gets[k]), moving_ns(l, bytes));
    const moment arrived = plus(moved, latency_ns(l));
    t->sends[i] = t->gets[k] = moved;
    t->at[i] = later(t->at[i], arrived);
    t->at[k] = later(t->at[k], arrived);
}

/* Members in the order in which they came, the lower first of those that came at once. */
static void sort_by_coming(timing *t)
{
    for (int i = 0; i < t->n; i++) {
        int at = i;
        for (; at > 0 && t->sends[t->order[at - 1]].ns > t->sends[i].ns; at--)
            t->order[at] = t->order[at - 1];
        t->order[at] = i;
    }
}

/* Numbers the nodes from 0 on as they occur, and the members of each. */
static void place_members(timing *t)
{
    int first[MOST_MEMBERS], count[MOST_MEMBERS]; /* of each node: a member's node as it was, its members */
    t->nodes = t->width = 0;
    for (int i = 0; i < t->n; i++) {
        int node = 0;
        while (node < t->nodes && first[node] != t->node[i])
            node++;
        if (node == t->nodes) {
            first[t->nodes++] = t->node[i];
            count[node] = 0;
        }
        t->node[i] = node;
        t->local[i] = count[node]++;
        t->width = count[node] > t->width ? count[node] : t->width;
    }
    if (t->nodes * t->width > 2 * MOST_MEMBERS) { /* a group of one's own, mostly on one node: by distance alone */
        t->nodes = 1;
        t->width = t->n;
        for (int i = 0; i < t->n; i++)
            t->member[i] = t->local[i] = i;
        return;
    }
    for (int k = 0; k < t->nodes * t->width; k++)
        t->member[k] = -1;
    for (int i = 0; i < t->n; i++)
        t->member[t->node[i] * t->width + t->local[i]] = i;
}

/* Whom member i sends to in round s (sign 1), or receives from (-1): so many nodes on, and so many members of a node. -1:
 * no member. */
static int partner(const timing *t, int i, int s, int sign)
{
    const int node = (t->node[i] + sign * (s / t->width) + t->nodes) % t->nodes;
    const int local = (t->local[i] + sign * (s % t->width) + t->width) % t->width;
    return t->member[node * t->width + local];
}

/* The messages of those that came at about one time, order[begin..end), with each other and with those before them: in
 * each round every port has one message, and all of them go over the same kind of link, so that none waits for a slower
 * one than its own (as NCCL pairs ranks: first within the node, then node by node). */
static void messages_of(timing *t, const double came[], int begin, int end)
{
    const double now = came[t->order[begin]], last = came[t->order[end - 1]];
    for (int s = 1; s < t->nodes * t->width; s++) {
        for (int j = begin; j < end; j++) {
            const int i = t->order[j], to = partner(t, i, s, 1), from = partner(t, i, s, -1);
            if (to >= 0 && came[to] <= last)
                message(t, i, to);
            if (from >= 0 && came[from] < now)
                message(t, from, i);
        }
    }
}

/* Of a member's messages: who comes while it moves finds that port taken, and is counted to those that came with it. */
static double longest_ns(const timing *t, int i)
{
    double longest = 0.0;
    for (int k = 0; k < t->n; k++)
        longest = k != i ? fmax(longest, moving_ns(link_of(t, i, k), message_bytes(t, i, k))) : longest;
    return longest;
}

static void direct(timing *t)
{
    double came[MOST_MEMBERS];
    for (int i = 0; i < t->n; i++) {
        t->sends[i] = t->gets[i] = t->at[i];
        came[i] = t->at[i].ns;
    }
    sort_by_coming(t);
    place_members(t);
    for (int begin = 0, end = 0; begin < t->n; begin = end) {
        const double until = came[t->order[begin]] + longest_ns(t, t->order[begin]);
        while (end < t->n && (end == begin || came[t->order[end]] < until))
            end++;
        messages_of(t, came, begin, end);
    }
}

/* --- all kinds ---------------------------------------------------------------------------------------------------- */

/* So many times round a ring. On a known GPU as the planner has it: for all at once when the last member has come. */
static void rings(timing *t, bool reduces, bool gathers)
{
    const ar_sim_link near = link_to(t, true), far = link_to(t, false);
    if (!t->gpu || t->n == 1) {
        if (reduces)
            ring(t, t->n - 1);
        if (gathers)
            ring(t, 0);
        return;
    }
    place_members(t);
    const ari_ring_links l = {
        t->n, t->width, t->nodes > 1, {near.latency_s, near.bytes_per_s}, {far.latency_s, far.bytes_per_s}};
    double bytes = 0.0;
    for (int r = 0; r < t->n; r++)
        bytes += (double)chunk_bytes(t, r);
    const double ns = 1e9 * ari_gpu_rings(&l, bytes, (double)reduces + (double)gathers);
    moment last = t->at[0];
    for (int r = 1; r < t->n; r++)
        last = later(last, t->at[r]);
    for (int r = 0; r < t->n; r++)
        t->at[r] = plus(last, ns);
}

static void run_kind(timing *t)
{
    const ari_call *call = t->call;
    const size_t bytes = call->count * ar_dtype_bytes(call->dtype);
    switch (call->kind) {
    case ARI_ALL_REDUCE:
    case ARI_BARRIER: /* an all-reduce of nothing */
        rings(t, true, true);
        break;
    case ARI_REDUCE_SCATTER:
        rings(t, true, false);
        break;
    case ARI_ALL_GATHER:
        rings(t, false, true);
        break;
    case ARI_BROADCAST:
        chain(t, call->root, bytes);
        break;
    case ARI_REDUCE:
        chain(t, (call->root + 1) % t->n, bytes);
        break;
    case ARI_SPLIT: /* takes no time, but needs what everybody called */
        break;
    default: /* what each pair has of its own */
        direct(t);
        break;
    }
}

void ari_virtual_cost(void *user, ari_group *g)
{
    timing t;
    t.cluster = user;
    t.gpu = ari_rates_of(t.cluster->flops, t.cluster->gpu).gpu;
    t.group = g;
    t.call = ari_group_call(g, 0);
    t.n = ari_group_size(g);
    int first = 0, last = 0;
    for (int i = 0; i < t.n; i++) {
        first = g->slot[i].virtual_begin_ns < g->slot[first].virtual_begin_ns ? i : first;
        last = g->slot[i].virtual_begin_ns > g->slot[last].virtual_begin_ns ? i : last;
    }
    const uint64_t base = g->slot[first].virtual_begin_ns;
    for (int i = 0; i < t.n; i++) {
        const int per_node = t.cluster->ranks_per_node;
        t.node[i] = per_node > 0 ? ari_group_rank(g, i) / per_node : 0;
        t.at[i] = (moment){(double)(g->slot[i].virtual_begin_ns - base), i};
    }
    if (t.call->kind == ARI_SPLIT) {
        for (int i = 0; i < t.n; i++)
            t.at[i] = later(t.at[i], t.at[last]);
    }
    run_kind(&t);
    g->virtual_last = g->rank[last];
    g->virtual_begin_ns = g->slot[last].virtual_begin_ns;
    for (int i = 0; i < t.n; i++) {
        g->slot[i].virtual_end_ns = ari_virtual_after(base, t.at[i].ns);
        g->slot[i].virtual_from = g->rank[t.at[i].from];
    }
}
