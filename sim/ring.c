/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/comm/comm_private.h"
#include "ref/comm/moves.h"
#include "ref/core/reduce.h"
#include "sim/wire.h"

/* `ring`: rank r reads rank r-1 only, one chunk a step. There are N chunks; indices are modulo N.
 *
 *   reduce-scatter, steps s = 0 .. N-2: r sends chunk r-1-s and receives chunk r-2-s, to which it adds its own input.
 *     Chunk c starts at rank c+1, passes c+2, ... and ends complete at rank c: the order of additions.
 *   all-gather, steps s = 0 .. N-2: r sends chunk r-s and receives chunk r-1-s, complete.
 *
 *   N = 3, what rank r holds of chunk 0 after each step (digits: whose inputs are in it):
 *     rank 1  1 --\        start
 *     rank 2       12 --\  after step 0
 *     rank 0            120 after step 1: complete at rank 0
 *
 * Sending is being read: a step ends by publishing the number of steps done, and the right neighbour waits for it. */
typedef struct ring {
    ari_wire *wire;
    const ari_call *left_call;
    int left_rank, right;
    ari_reduce kernel; /* kernel of reductions */
    bool past_cache;   /* true if the outputs are larger than the cache */
} ring;

static ring ring_of(ari_wire *w)
{
    const ari_call *call = w->call;
    const int left_rank = (w->self + w->n - 1) % w->n;
    const size_t count = call->counts ? ari_counts_before(call->counts, w->n) : call->count;
    return (ring){.wire = w,
                  .left_call = ari_group_call(w->group, left_rank),
                  .left_rank = left_rank,
                  .right = (w->self + 1) % w->n,
                  .kernel = ari_reduce_kernel(call->dtype, call->op),
                  .past_cache = call->kind != ARI_BROADCAST && /* segments of a broadcast stay in the cache */
                                ari_stream_pays(count * w->element, w->n)};
}

/* c modulo n for c >= -2n. */
static int wrap(const ring *g, int c)
{
    return (c + 2 * g->wire->n) % g->wire->n;
}

/* Computes the offset of chunk c in the whole buffer, in bytes. all_reduce divides evenly, other collectives by their
 * counts. */
static void chunk_of(const ring *g, int c, size_t *offset, size_t *bytes)
{
    if (g->wire->call->kind == ARI_ALL_REDUCE) {
        ari_comm_slice(g->wire->call->count, g->wire->n, c, offset, bytes);
    } else {
        *offset = ari_counts_before(g->wire->call->counts, c);
        *bytes = g->wire->call->counts[c];
    }
    *offset *= g->wire->element;
    *bytes *= g->wire->element;
}

/* Ends a step whose bytes have moved since `since`: publishes and records the step. chunk -1: nothing was sent. */
static void end_step(const ring *g, ari_moment since, uint64_t steps_done, ar_ring_step step)
{
    const ar_sim_options *o = g->wire->mover->options;
    if (g->past_cache)
        ari_stream_end();
    ari_member_advance(&g->wire->mover->member, steps_done);
    ari_record_transfer(since, ari_group_rank(g->wire->group, g->left_rank), step.bytes);
    step.rank = g->wire->self;
    step.read_from = g->left_rank;
    if (o->ring_trace)
        o->ring_trace(o->ring_trace_user, &step);
}

/* Ends step s of a round, in which the sent chunk is the one after the received chunk. */
static void round_step(const ring *g, ari_moment since, int phase, int s, uint64_t steps_done, int received,
                       size_t bytes)
{
    end_step(g, since, steps_done,
             (ar_ring_step){
                 .phase = phase, .step = s, .chunk = wrap(g, received + 1), .read_chunk = received, .bytes = bytes});
}

/* Returns the memory for partial sums of a reduce_scatter. Two areas alternate, because the output has space only for
 * the rank's chunk. Each area is a whole number of cache lines; the scratch memory may be larger. */
static char *partial_place(const ari_sim_comm *c, int step)
{
    return (char *)c->scratch + (step % 2 ? c->scratch_bytes / 2 / 64 * 64 : 0);
}

static const char *left_partial(const ring *g, int step, size_t offset)
{
    if (step == 0)
        return (const char *)g->left_call->input.ptr + offset;
    if (g->wire->call->kind == ARI_ALL_REDUCE)
        return (const char *)g->left_call->out.ptr + offset;
    const ari_sim_comm *left_comm = (const ari_sim_comm *)ari_group_comm(g->wire->group, g->left_rank);
    return partial_place(left_comm, step - 1);
}

static char *own_partial(const ring *g, int step, size_t offset)
{
    if (g->wire->call->kind == ARI_ALL_REDUCE)
        return (char *)g->wire->call->out.ptr + offset;
    return step == g->wire->n - 2 ? (char *)g->wire->call->out.ptr : partial_place(g->wire->mover, step);
}

/* Combines `bytes` at `src` in the left neighbour's memory with the local input, and writes the result. Returns false
 * if the collective was aborted. */
static bool add_piece(const ring *g, void *dst, const void *src, const void *local_input, size_t bytes)
{
    const size_t piece = ARI_WIRE_PIECE_BYTES;
    _Alignas(64) char result[ARI_WIRE_PIECE_BYTES];
    for (size_t offset = 0; offset < bytes; offset += piece) {
        const size_t piece_bytes = bytes - offset < piece ? bytes - offset : piece;
        const void *received = ari_wire_read(g->wire, g->left_rank, (const char *)src + offset, piece_bytes, 0);
        char *out = g->past_cache ? result : (char *)dst + offset;
        if (!received)
            return false;
        g->kernel.pair(out, received, (const char *)local_input + offset, piece_bytes / g->wire->element);
        if (g->past_cache)
            ari_stream_bytes((char *)dst + offset, out, piece_bytes);
    }
    return true;
}

/* Runs steps 0 .. N-2. An area for partial sums is overwritten only after the right neighbour has read it. */
static bool reduce_scatter_steps(const ring *g)
{
    ari_member *m = &g->wire->mover->member;
    for (int s = 0; s < g->wire->n - 1; s++) {
        const int received = wrap(g, g->wire->self - 2 - s);
        size_t offset, bytes;
        chunk_of(g, received, &offset, &bytes);
        if (!ari_member_await(m, g->left_rank, (uint64_t)s))
            return false;
        if (g->wire->call->kind == ARI_REDUCE_SCATTER && s >= 2)
            if (!ari_member_await(m, g->right, (uint64_t)s))
                return false;
        const ari_moment since = ari_record_moment();
        if (bytes > 0 && !add_piece(g, own_partial(g, s, offset), left_partial(g, s, offset),
                                    (const char *)g->wire->call->input.ptr + offset, bytes))
            return false;
        round_step(g, since, 0, s, (uint64_t)s + 1, received, bytes);
    }
    return true;
}

/* Runs steps first_step .. first_step+N-2 of the call. In an all_reduce the chunk that arrives at step s overwrites
 * what the right neighbour read at step s of the reduce-scatter. That read is complete: the left neighbour has done
 * first_step+s = N-1+s steps, hence its left neighbour N-2+s, and so on around the ring to the right neighbour, which
 * has done s+1. */
static void all_gather_steps(const ring *g, int first_step)
{
    ari_member *m = &g->wire->mover->member;
    for (int s = 0; s < g->wire->n - 1; s++) {
        const int received = wrap(g, g->wire->self - 1 - s);
        size_t offset, bytes;
        chunk_of(g, received, &offset, &bytes);
        if (!ari_member_await(m, g->left_rank, (uint64_t)first_step + (uint64_t)s))
            return;
        const ari_moment since = ari_record_moment();
        if (bytes > 0) {
            const bool own_of_left = s == 0 && first_step == 0;
            const char *src = own_of_left ? g->left_call->input.ptr : (const char *)g->left_call->out.ptr + offset;
            if (!ari_wire_take(g->wire, (char *)g->wire->call->out.ptr + offset, g->left_rank, src, bytes,
                               g->past_cache))
                return;
        }
        round_step(g, since, 1, s, (uint64_t)first_step + (uint64_t)s + 1, received, bytes);
    }
}

static void all_reduce(const ring *g)
{
    if (reduce_scatter_steps(g))
        all_gather_steps(g, g->wire->n - 1);
}

static void all_gather(const ring *g)
{
    size_t offset, bytes;
    chunk_of(g, g->wire->self, &offset, &bytes);
    if (bytes > 0)
        ari_copy_bytes((char *)g->wire->call->out.ptr + offset, g->wire->call->input.ptr, bytes);
    all_gather_steps(g, 0);
}

/* --- broadcast ---------------------------------------------------------------------------------------------------- */

/* The root's data travels along a chain of N-1 transfers, each to the right neighbour, segment after segment, so that
 * all transfers are busy at the same time: in step s, the rank p places behind the root receives segment s-p+1 and
 * sends segment s-p. */
enum { SEGMENT_BYTES = 1 << 18 };

static void broadcast(const ring *g)
{
    const ari_call *call = g->wire->call;
    const int n = g->wire->n, place = (g->wire->self - call->root + n) % n;
    const size_t total_bytes = call->count * g->wire->element;
    for (size_t k = 0, offset = 0; place > 0 && offset < total_bytes; k++, offset += SEGMENT_BYTES) {
        const size_t bytes = total_bytes - offset < SEGMENT_BYTES ? total_bytes - offset : SEGMENT_BYTES;
        const char *src = (const char *)g->left_call->out.ptr + offset;
        if (place > 1 && !ari_member_await(&g->wire->mover->member, g->left_rank, k + 1))
            return; /* the root has all segments from the start */
        const ari_moment since = ari_record_moment();
        if (!ari_wire_take(g->wire, (char *)call->out.ptr + offset, g->left_rank, src, bytes, false))
            return;
        end_step(g, since, k + 1,
                 (ar_ring_step){.phase = 1,
                                .step = (int)k + place - 1,
                                .chunk = k > 0 && place < n - 1 ? (int)k - 1 : -1,
                                .read_chunk = (int)k,
                                .bytes = bytes});
    }
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

/* Returns the number of bytes for partial sums. */
static size_t scratch_of(const ari_sim_comm *c, const ari_call *call)
{
    return call->kind == ARI_REDUCE_SCATTER && c->base.size > 2 ? ari_two_parts(call, c->base.size) : 0;
}

static void move_pieces(const ring *g)
{
    switch (g->wire->call->kind) {
    case ARI_ALL_REDUCE:
        all_reduce(g);
        break;
    case ARI_REDUCE_SCATTER:
        (void)reduce_scatter_steps(g);
        break;
    case ARI_ALL_GATHER:
        all_gather(g);
        break;
    default:
        broadcast(g);
        break;
    }
}

ar_status ari_ring_run(ar_comm *base, const ari_call *call)
{
    ari_sim_comm *c = (ari_sim_comm *)base;
    if (base->size == 1 || !ari_kind_of(call->kind)->ring)
        return ari_direct_run(base, call);
    AR_TRY(ari_sim_reserve(c, scratch_of(c, call)));
    AR_TRY(ari_member_enter(&c->member, base, call, NULL));
    ari_wire wire = ari_wire_open(c);
    const ring g = ring_of(&wire);
    move_pieces(&g);
    ari_wire_close(&wire);
    return ari_member_leave(&c->member);
}
