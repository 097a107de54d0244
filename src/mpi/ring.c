/* SPDX-License-Identifier: Apache-2.0 */

#include "mpi/mpi_impl.h"
#include "ref/comm/moves.h"
#include "ref/core/reduce.h"

/* Round the ring: a rank receives parts from its left neighbour, one after the other, combines each with its own input
 * or not, and passes it on to its right one. Part s of what it sends is part s - 1 of what it has received; part 0 is
 * its own. Chunks are numbered modulo N:
 *
 *   reduce_scatter  part s received: chunk r-2-s, combined; N - 1 parts. Chunk c is combined in the order c+1, ..., c
 *   all_gather      part s received: chunk r-1-s; N - 1 parts
 *   all_reduce      part s received: chunk r-2-s; the first N - 1 combined, N - 1 more complete
 *   reduce          from root+1 to root: one part, the whole, combined
 *   broadcast       from root to root-1: one part, the whole
 *
 * Parts travel in segments, so that one is combined and passed on while others are under way. */

enum { SEGMENT_BYTES = 1 << 18, WINDOW = 8 };

typedef struct ring {
    ari_mpi_comm *c;
    const ari_call *call;
    int n, r, left, right;
    size_t element;
    ari_reduce kernel;
    int received;           /* parts */
    int send_from, send_to; /* parts sent: [send_from, send_to) */
} ring;

/* A segment: of which part, where in it, and its number among all. */
typedef struct cursor {
    int part;
    size_t at;
    uint64_t number;
} cursor;

/* Segments under way: [done, posted) of each direction, request number modulo WINDOW. */
typedef struct flow {
    cursor received, asked, left, sent; /* left: what has left this rank */
    MPI_Request request[2 * WINDOW];    /* receptions, then what is sent */
} flow;

/* --- parts -------------------------------------------------------------------------------------------------------- */

/* A part as received; as sent, it was received as the one before. */
typedef struct part {
    size_t at, bytes; /* in the whole */
} part;

static part part_received(const ring *g, int s)
{
    const ari_call *call = g->call;
    const int back = (call->kind == ARI_ALL_GATHER ? 1 : 2) + s;
    const int c = ((g->r - back) % g->n + g->n) % g->n;
    part p = {.bytes = call->count};
    if (call->kind == ARI_ALL_REDUCE)
        ar_comm_slice(call->count, g->n, c, &p.at, &p.bytes);
    else if (call->counts)
        p = (part){ari_counts_before(call->counts, c), call->counts[c]};
    return (part){p.at * g->element, p.bytes * g->element};
}

static size_t segment_at(const part *p, size_t at)
{
    return p->bytes - at < SEGMENT_BYTES ? p->bytes - at : SEGMENT_BYTES;
}

/* From a place between two segments to the next segment; `back`: 1 for what is sent. */
static void settle(const ring *g, cursor *k, int end, int back)
{
    while (k->part < end && k->at >= part_received(g, k->part - back).bytes) {
        k->part++;
        k->at = 0;
    }
}

static void advance(const ring *g, cursor *k, int end, int back)
{
    k->at += SEGMENT_BYTES;
    k->number++;
    settle(g, k, end, back);
}

/* True if this rank adds its own input to the part that it receives. */
static bool combines(const ring *g, int s)
{
    const ari_kind kind = g->call->kind;
    return kind == ARI_REDUCE || kind == ARI_REDUCE_SCATTER || (kind == ARI_ALL_REDUCE && s < g->n - 1);
}

/* True if nothing is left to add then. */
static bool completes(const ring *g, int s)
{
    return g->call->kind == ARI_REDUCE ? g->send_to == 0 : s == g->n - 2;
}

/* --- places ------------------------------------------------------------------------------------------------------- */

static char *slot_at(const ring *g, uint64_t number)
{
    return (char *)g->c->scratch + number % WINDOW * SEGMENT_BYTES;
}

/* Partial sums of a reduce_scatter: two places in turn, since the output has room for the own chunk alone. */
static char *place_at(const ring *g, int s, size_t at)
{
    return (char *)g->c->scratch + (s % 2 ? g->c->scratch_bytes / 2 / 64 * 64 : 0) + at;
}

/* The destination of a segment. */
static char *arrival_of(const ring *g, const cursor *k)
{
    if (g->call->kind == ARI_REDUCE_SCATTER)
        return place_at(g, k->part, k->at);
    if (combines(g, k->part))
        return slot_at(g, k->number);
    return (char *)g->call->out.ptr + part_received(g, k->part).at + k->at;
}

/* The place of a combined segment, from which it is passed on. */
static char *result_of(const ring *g, const cursor *k)
{
    const bool complete = completes(g, k->part);
    if (g->call->kind == ARI_ALL_REDUCE)
        return (char *)g->call->out.ptr + part_received(g, k->part).at + k->at;
    return combines(g, k->part) && complete ? (char *)g->call->out.ptr + k->at : arrival_of(g, k);
}

static const char *source_of(const ring *g, const cursor *k)
{
    if (k->part > 0)
        return result_of(g, &(cursor){.part = k->part - 1, .at = k->at, .number = k->number});
    const bool own_alone = g->call->kind == ARI_ALL_GATHER; /* its input is its chunk */
    return (const char *)g->call->in.ptr + (own_alone ? 0 : part_received(g, -1).at) + k->at;
}

/* --- order -------------------------------------------------------------------------------------------------------- */

/* True if the next segment's destination is free: its former content has left. */
static bool may_ask(const ring *g, const flow *f)
{
    const cursor *k = &f->asked;
    if (k->part == g->received || k->number - f->received.number >= WINDOW)
        return false;
    switch (g->call->kind) {
    case ARI_ALL_REDUCE:
        return k->part < g->n - 1 || f->left.part > k->part - (g->n - 1);
    case ARI_REDUCE_SCATTER:
        return k->part < 2 || f->left.part > k->part - 1;
    case ARI_REDUCE:
        return g->send_to == 0 || k->number - f->left.number < WINDOW;
    default:
        return true;
    }
}

/* True if the next segment to be sent has arrived. */
static bool may_send(const ring *g, const flow *f)
{
    const cursor *k = &f->sent, *here = &f->received;
    if (k->part == g->send_to || k->number - f->left.number >= WINDOW)
        return false;
    return k->part == 0 || here->part > k->part - 1 || (here->part == k->part - 1 && here->at > k->at);
}

static ar_status ask_and_send(const ring *g, flow *f)
{
    const int tag = g->c->all.tag;
    while (may_ask(g, f)) {
        const part p = part_received(g, f->asked.part);
        AR_TRY(ari_mpi_receive(g->c->p, arrival_of(g, &f->asked), segment_at(&p, f->asked.at), g->left, tag,
                               &f->request[f->asked.number % WINDOW]));
        advance(g, &f->asked, g->received, 0);
    }
    while (may_send(g, f)) {
        const part p = part_received(g, f->sent.part - 1);
        AR_TRY(ari_mpi_send(g->c->p, source_of(g, &f->sent), segment_at(&p, f->sent.at), g->right, tag,
                            &f->request[WINDOW + f->sent.number % WINDOW]));
        advance(g, &f->sent, g->send_to, 1);
    }
    return AR_OK;
}

static void combine(const ring *g, const cursor *k, const part *p, size_t bytes)
{
    const size_t count = bytes / g->element;
    char *to = result_of(g, k);
    g->kernel.two(to, arrival_of(g, k), (const char *)g->call->in.ptr + p->at + k->at, count);
    if (completes(g, k->part) && g->kernel.finish)
        g->kernel.finish(to, count, g->n);
}

/* Combines arrived segments, in order. */
static void take_in(const ring *g, flow *f)
{
    while (f->received.number < f->asked.number && f->request[f->received.number % WINDOW] == MPI_REQUEST_NULL) {
        const part p = part_received(g, f->received.part);
        const size_t bytes = segment_at(&p, f->received.at);
        if (combines(g, f->received.part))
            combine(g, &f->received, &p, bytes);
        ari_moved_add(&g->c->base.moved, bytes, 0);
        advance(g, &f->received, g->received, 0);
    }
    while (f->left.number < f->sent.number && f->request[WINDOW + f->left.number % WINDOW] == MPI_REQUEST_NULL)
        advance(g, &f->left, g->send_to, 1);
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

static void fail_late(const ring *g, const flow *f, uint64_t waited_ns)
{
    const int left = (g->r + g->n - 1) % g->n, right = (g->r + 1) % g->n;
    const bool receives = f->received.part < g->received, sends = f->left.part < g->send_to;
    int members[2] = {receives ? left : right, right};
    const int n = receives && sends && left != right ? 2 : 1;
    if (n == 2 && right < left) {
        members[0] = right;
        members[1] = left;
    }
    ari_mpi_late(&g->c->all, waited_ns, members, n);
}

static ar_status move(const ring *g, flow *f)
{
    ari_mpi_wait w = {0};
    int index[2 * WINDOW];
    while (f->received.part < g->received || f->left.part < g->send_to) {
        int ended = 0;
        AR_TRY(ask_and_send(g, f));
        AR_TRY(ari_mpi_test(g->c->p, f->request, 2 * WINDOW, &ended, index));
        if (ended > 0) {
            take_in(g, f);
            w = (ari_mpi_wait){0};
            continue;
        }
        const ari_mpi_turn_end end = ari_mpi_turn(g->c->p, &w);
        if (end == ARI_MPI_LATE)
            fail_late(g, f, w.waited_ns);
        if (end != ARI_MPI_GO_ON)
            return AR_ERR_ABORTED;
    }
    return AR_OK;
}

static ring ring_of(ari_mpi_comm *c, const ari_call *call)
{
    const int n = c->base.size, r = c->base.rank;
    const int *rank = c->all.group->rank;
    ring g = {.c = c,
              .call = call,
              .n = n,
              .r = r,
              .left = rank[(r + n - 1) % n],
              .right = rank[(r + 1) % n],
              .element = ar_dtype_bytes(call->dtype),
              .kernel = ari_reduce_kernel(call->dtype, call->op)};
    const bool chain = call->kind == ARI_REDUCE || call->kind == ARI_BROADCAST;
    if (!chain) {
        g.received = g.send_to = call->kind == ARI_ALL_REDUCE ? 2 * (n - 1) : n - 1;
        return g;
    }
    const int first = call->kind == ARI_REDUCE ? (call->root + 1) % n : call->root, place = (r - first + n) % n;
    g.received = place > 0 ? 1 : 0;
    if (place < n - 1) {
        g.send_from = g.received;
        g.send_to = g.received + 1;
    }
    return g;
}

/* Fills the part of the output that comes from no other rank. */
static void keep(const ring *g)
{
    const ari_call *call = g->call;
    if (call->kind == ARI_ALL_GATHER) {
        const part own = part_received(g, -1);
        if (own.bytes > 0)
            ari_copy_bytes((char *)call->out.ptr + own.at, call->in.ptr, own.bytes);
    } else if (g->n == 1) {
        const size_t count = call->counts ? call->counts[0] : call->count;
        ari_copy_bytes(call->out.ptr, call->in.ptr, count * g->element);
    }
}

size_t ari_mpi_ring_scratch(const ari_mpi_comm *c, const ari_call *call)
{
    const bool slots = call->kind == ARI_ALL_REDUCE || call->kind == ARI_REDUCE;
    if (c->base.size == 1 || !(slots || call->kind == ARI_REDUCE_SCATTER))
        return 0;
    if (slots)
        return call->count > 0 ? (size_t)WINDOW * SEGMENT_BYTES : 0;
    return ari_two_parts(call, c->base.size);
}

ar_status ari_mpi_ring(ari_mpi_comm *c, const ari_call *call)
{
    const ring g = ring_of(c, call);
    flow f = {.sent.part = g.send_from, .left.part = g.send_from};
    keep(&g);
    if (g.n == 1)
        return AR_OK;
    for (int i = 0; i < 2 * WINDOW; i++)
        f.request[i] = MPI_REQUEST_NULL;
    settle(&g, &f.received, g.received, 0);
    settle(&g, &f.sent, g.send_to, 1);
    f.asked = f.received;
    f.left = f.sent;
    const ar_status st = move(&g, &f);
    if (st == AR_OK)
        return AR_OK;
    if (st != AR_ERR_ABORTED)
        ari_mpi_broken(&c->all, st);
    ari_mpi_drop(c->p, f.request, 2 * WINDOW);
    return st;
}
