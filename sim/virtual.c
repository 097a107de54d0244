/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the duration of a collective on the simulated cluster from its members' arrival times and calls
 * (simulated-cluster.md). Real transfers and their times have no influence. */
#include <math.h>

#include "ref/comm/comm_private.h"
#include "ref/comm/moves.h"
#include "ref/comm/rendezvous_impl.h"
#include "sim/sim_impl.h"

enum { MOST_MEMBERS = 4096 }; /* ar_sim_run accepts no more ranks */

/* A time since the first member arrived, and the member whose arrival determined it. Times are rounded to nanoseconds
 * only once, at the end of a collective. */
typedef struct moment {
    double ns;
    int member;
} moment;

typedef struct timing {
    const ar_sim_cluster *cluster;
    const ari_gpu *gpu; /* the GPU's model; NULL: links have their full rates, and rings are simulated step by step */
    const ari_group *group;
    const ari_call *call; /* member 0's call, with which the other members' calls agree */
    int n;
    int node[MOST_MEMBERS];
    double latency[MOST_MEMBERS]; /* rings: latency of the link through which a member receives; otherwise of its
                                     slowest link */
    double byte_ns[MOST_MEMBERS], chunk[MOST_MEMBERS]; /* rings: that link's time per byte, and the chunk's bytes */
    moment clock[MOST_MEMBERS];                        /* when each member arrived; at the end, when it is done */
    /* For direct messages: when each member arrived, when its ports are free, and the members in order of arrival. */
    moment came[MOST_MEMBERS], sends[MOST_MEMBERS], gets[MOST_MEMBERS];
    int order[MOST_MEMBERS];
} timing;

/* Returns the later moment; for equal times the first argument. */
static moment later(moment a, moment b)
{
    return b.ns > a.ns ? b : a;
}

static moment plus(moment a, double ns)
{
    return (moment){a.ns + ns, a.member};
}

/* A known GPU's collectives reach a share of a link's rate. */
static ar_sim_link link_to(const timing *t, bool near)
{
    ar_sim_link l = near ? t->cluster->inside : t->cluster->between;
    l.bytes_per_s *= !t->gpu ? 1.0 : near ? t->gpu->inside : t->gpu->inter_node;
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
        ari_comm_slice(call->count, t->n, chunk, &start, &size);
    return size * ar_dtype_bytes(call->dtype);
}

/* Precomputes the times of n steps of a ring for each of n members. */
static void prepare_ring(timing *t)
{
    for (int r = 0; r < t->n; r++) {
        const ar_sim_link l = link_of(t, r > 0 ? r - 1 : t->n - 1, r);
        t->latency[r] = latency_ns(l);
        t->byte_ns[r] = 1e9 / l.bytes_per_s;
        t->chunk[r] = (double)chunk_bytes(t, r);
    }
}

/* Simulates n - 1 steps: in step s, member r receives chunk r + first_chunk - s from its left neighbour once both have
 * done the preceding step. An empty chunk also takes the latency. Reduce-scatter: partial sums of chunk c travel from
 * member c + 1 around the ring to c, so first_chunk is n - 1. All-gather: chunk c travels from c to c - 1, so
 * first_chunk is 0. */
static void ring(timing *t, int first_chunk)
{
    const int n = t->n;
    prepare_ring(t);
    for (int s = 1; s < n; s++) {
        moment left_clock = t->clock[n - 1];
        int chunk = (first_chunk - s + n) % n;
        for (int r = 0; r < n; r++) {
            const moment local_clock = t->clock[r];
            t->clock[r] = plus(later(local_clock, left_clock), t->latency[r] + t->chunk[chunk] * t->byte_ns[r]);
            left_clock = local_clock;
            chunk = chunk + 1 < n ? chunk + 1 : 0;
        }
    }
}

/* Simulates a pipelined broadcast from `start` to the right through all members. Data move in many small pieces, so
 * that each link's latency counts once and the slowest link determines the rate. */
static void chain(timing *t, int start, size_t bytes)
{
    moment head = t->clock[start], tail = head; /* first and last byte of the data at the preceding member */
    int before = start;
    for (int p = 1; p < t->n; p++) {
        const int r = (start + p) % t->n;
        const ar_sim_link l = link_of(t, before, r);
        const double latency = latency_ns(l), moving = moving_ns(l, bytes);
        t->clock[before] = later(tail, plus(head, moving)); /* the member has received and forwarded everything */
        head = plus(later(head, t->clock[r]), latency);
        tail = later(plus(head, moving), plus(tail, latency));
        before = r;
    }
    t->clock[before] = tail;
}

/* --- direct messages ---------------------------------------------------------------------------------------------- */

/* Returns the number of bytes that member i sends to member k. */
static size_t message_bytes(const timing *t, int i, int k)
{
    const ari_call *call = ari_group_call(t->group, i);
    return ari_sent_count(call, i, k) * ar_dtype_bytes(call->dtype);
}

/* Simulates a message, which occupies the sender's outgoing port and the receiver's incoming port; each port moves one
 * message at a time. Neither port waits for the other: a busy member serves a late one when that one arrives. A message
 * of 0 bytes is not sent. */
static void message(timing *t, int i, int k)
{
    const size_t bytes = message_bytes(t, i, k);
    if (bytes == 0)
        return;
    const ar_sim_link l = link_of(t, i, k);
    const moment begin = later(t->came[i], t->came[k]);
    t->sends[i] = plus(later(t->sends[i], begin), moving_ns(l, bytes));
    t->gets[k] = plus(later(t->gets[k], begin), moving_ns(l, bytes));
    const moment moved = later(t->sends[i], t->gets[k]);
    t->clock[i] = later(t->clock[i], moved);
    t->clock[k] = later(t->clock[k], moved);
    t->latency[i] = fmax(t->latency[i], latency_ns(l));
    t->latency[k] = fmax(t->latency[k], latency_ns(l));
}

/* Sorts members by arrival; members that arrived together are sorted by number. */
static void sort_by_coming(timing *t)
{
    for (int i = 0; i < t->n; i++) {
        int pos = i;
        for (; pos > 0 && t->came[t->order[pos - 1]].ns > t->came[i].ns; pos--)
            t->order[pos] = t->order[pos - 1];
        t->order[pos] = i;
    }
}

/* Simulates direct messages. Ports handle messages in the order in which both members have arrived. A member is done
 * when its last message has moved and the latency of its slowest link has passed. */
static void direct(timing *t)
{
    for (int i = 0; i < t->n; i++) {
        t->came[i] = t->sends[i] = t->gets[i] = t->clock[i];
        t->latency[i] = 0.0;
    }
    sort_by_coming(t);
    for (int arrival = 1; arrival < t->n; arrival++) {
        for (int before = 0; before < arrival; before++) {
            message(t, t->order[arrival], t->order[before]);
            message(t, t->order[before], t->order[arrival]);
        }
    }
    for (int i = 0; i < t->n; i++)
        t->clock[i] = plus(t->clock[i], t->latency[i]);
}

/* --- all kinds ---------------------------------------------------------------------------------------------------- */

/* Counts the nodes, and the members on the fullest node. */
static void count_nodes(const timing *t, int *nodes, int *width)
{
    int node_number[MOST_MEMBERS], count[MOST_MEMBERS]; /* for each node: its number and the number of its members */
    *nodes = *width = 0;
    for (int i = 0; i < t->n; i++) {
        int node_index = 0;
        while (node_index < *nodes && node_number[node_index] != t->node[i])
            node_index++;
        if (node_index == *nodes) {
            node_number[(*nodes)++] = t->node[i];
            count[node_index] = 0;
        }
        count[node_index]++;
        *width = count[node_index] > *width ? count[node_index] : *width;
    }
}

/* Simulates one or two rounds of a ring. On a known GPU the planner's formula applies: all members finish together,
 * timed from the last arrival. */
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
    int nodes, width;
    count_nodes(t, &nodes, &width);
    const ari_ring_links l = {
        t->n, width, nodes > 1, {near.latency_s, near.bytes_per_s}, {far.latency_s, far.bytes_per_s}};
    double bytes = 0.0;
    for (int r = 0; r < t->n; r++)
        bytes += (double)chunk_bytes(t, r);
    const double ns = 1e9 * ari_gpu_rings(&l, bytes, (double)reduces + (double)gathers);
    moment last_arrival = t->clock[0];
    for (int r = 1; r < t->n; r++)
        last_arrival = later(last_arrival, t->clock[r]);
    for (int r = 0; r < t->n; r++)
        t->clock[r] = plus(last_arrival, ns);
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
    case ARI_SPLIT: /* takes no time, but needs everybody's call */
        break;
    default: /* data that each pair of members exchanges */
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
    int first_member = 0, last_member = 0;
    for (int i = 0; i < t.n; i++) {
        first_member = g->slot[i].virtual_begin_ns < g->slot[first_member].virtual_begin_ns ? i : first_member;
        last_member = g->slot[i].virtual_begin_ns > g->slot[last_member].virtual_begin_ns ? i : last_member;
    }
    const uint64_t base = g->slot[first_member].virtual_begin_ns;
    for (int i = 0; i < t.n; i++) {
        const int per_node = t.cluster->ranks_per_node;
        t.node[i] = per_node > 0 ? ari_group_rank(g, i) / per_node : 0;
        t.clock[i] = (moment){(double)(g->slot[i].virtual_begin_ns - base), i};
    }
    if (t.call->kind == ARI_SPLIT) {
        for (int i = 0; i < t.n; i++)
            t.clock[i] = later(t.clock[i], t.clock[last_member]);
    }
    run_kind(&t);
    g->virtual_last = g->rank[last_member];
    g->virtual_begin_ns = g->slot[last_member].virtual_begin_ns;
    for (int i = 0; i < t.n; i++) {
        g->slot[i].virtual_end_ns = ari_virtual_after(base, t.clock[i].ns);
        g->slot[i].virtual_from = g->rank[t.clock[i].member];
    }
}
