/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/ring_impl.h"

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
static ari_ring ring_of(ari_sim_comm *c, ari_wire *wire, const ari_call *call)
{
    const int n = c->base.size, r = c->base.rank, left = (r + n - 1) % n;
    const bool chain = call->kind == ARI_REDUCE || call->kind == ARI_BROADCAST; /* segments stay in the cache */
    const size_t count = call->counts ? ari_counts_before(call->counts, n) : call->count;
    return (ari_ring){.c = c,
                      .wire = wire,
                      .call = call,
                      .left_call = ari_group_call(c->member.group, left),
                      .n = n,
                      .r = r,
                      .left = left,
                      .right = (r + 1) % n,
                      .element = ar_dtype_bytes(call->dtype),
                      .kernel = ari_reduce_kernel(call->dtype, call->op),
                      .past_cache = !chain && ari_stream_pays(count * ar_dtype_bytes(call->dtype), n)};
}

/* c modulo n for c >= -2n. */
static int wrap(const ari_ring *g, int c)
{
    return (c + 2 * g->n) % g->n;
}

/* Where chunk c of the whole buffer lies, in bytes. all_reduce cuts evenly, the others as the counts say. */
static void chunk_of(const ari_ring *g, int c, size_t *at, size_t *bytes)
{
    if (g->call->kind == ARI_ALL_REDUCE) {
        ar_comm_slice(g->call->count, g->n, c, at, bytes);
    } else {
        *at = ari_counts_before(g->call->counts, c);
        *bytes = g->call->counts[c];
    }
    *at *= g->element;
    *bytes *= g->element;
}

void ari_ring_step(const ari_ring *g, ari_moment since, uint64_t steps_done, ar_ring_step step)
{
    const ar_sim_options *o = g->c->options;
    if (g->past_cache)
        ari_stream_end();
    ari_member_advance(&g->c->member, steps_done);
    ari_record_transfer(since, ari_group_rank(g->c->member.group, g->left), step.bytes);
    step.rank = g->r;
    step.read_from = g->left;
    if (o->ring_trace)
        o->ring_trace(o->ring_trace_user, &step);
}

/* Step s of a round: the chunk that is sent is the one after the chunk received. */
static void round_step(const ari_ring *g, ari_moment since, int phase, int s, uint64_t steps_done, int received,
                       size_t bytes)
{
    ari_ring_step(
        g, since, steps_done,
        (ar_ring_step){
            .phase = phase, .step = s, .chunk = wrap(g, received + 1), .read_chunk = received, .bytes = bytes});
}

/* Partial sums of a reduce_scatter: two places in turn, since the output has room for the own chunk alone. Each is a
 * whole number of cache lines; the scratch memory is not, where something else has made it grow. */
static char *partial_place(const ari_sim_comm *c, int step)
{
    return (char *)c->scratch + (step % 2 ? c->scratch_bytes / 2 / 64 * 64 : 0);
}

static const char *left_partial(const ari_ring *g, int step, size_t at)
{
    if (step == 0)
        return (const char *)g->left_call->in.ptr + at;
    if (g->call->kind == ARI_ALL_REDUCE)
        return (const char *)g->left_call->out.ptr + at;
    const ari_sim_comm *left = (const ari_sim_comm *)ari_group_comm(g->c->member.group, g->left);
    return partial_place(left, step - 1);
}

static char *own_partial(const ari_ring *g, int step, size_t at)
{
    if (g->call->kind == ARI_ALL_REDUCE)
        return (char *)g->call->out.ptr + at;
    return step == g->n - 2 ? (char *)g->call->out.ptr : partial_place(g->c, step);
}

bool ari_ring_add(const ari_ring *g, void *to, const void *from, const void *own, size_t bytes, bool complete)
{
    const size_t piece = ARI_WIRE_PIECE_BYTES;
    _Alignas(64) char result[ARI_WIRE_PIECE_BYTES];
    for (size_t at = 0; at < bytes; at += piece) {
        const size_t now = bytes - at < piece ? bytes - at : piece, count = now / g->element;
        const void *left = ari_wire_read(g->wire, g->left, (const char *)from + at, now, 0);
        char *out = g->past_cache ? result : (char *)to + at;
        if (!left)
            return false;
        g->kernel.two(out, left, (const char *)own + at, count);
        if (complete && g->kernel.finish)
            g->kernel.finish(out, count, g->n);
        if (g->past_cache)
            ari_stream_bytes((char *)to + at, out, now);
    }
    return true;
}

/* Steps 0 .. N-2. A place of partial sums is written again only after the right neighbour has read it. */
static bool reduce_scatter_steps(const ari_ring *g)
{
    ari_member *m = &g->c->member;
    for (int s = 0; s < g->n - 1; s++) {
        const int received = wrap(g, g->r - 2 - s);
        size_t at, bytes;
        chunk_of(g, received, &at, &bytes);
        if (!ari_member_await(m, g->left, (uint64_t)s))
            return false;
        if (g->call->kind == ARI_REDUCE_SCATTER && s >= 2)
            if (!ari_member_await(m, g->right, (uint64_t)s))
                return false;
        const ari_moment since = ari_record_moment();
        if (bytes > 0 && !ari_ring_add(g, own_partial(g, s, at), left_partial(g, s, at),
                                       (const char *)g->call->in.ptr + at, bytes, s == g->n - 2))
            return false;
        round_step(g, since, 0, s, (uint64_t)s + 1, received, bytes);
    }
    return true;
}

/* Steps first .. first+N-2 of the call. In an all_reduce the chunk that arrives at step s takes the place of what the
 * right neighbour read at step s of the reduce-scatter. That is over: the left neighbour has done first+s = N-1+s
 * steps, so the one before it N-2+s, and so on round the ring to the right neighbour, which has done s+1. */
static void all_gather_steps(const ari_ring *g, int first)
{
    ari_member *m = &g->c->member;
    for (int s = 0; s < g->n - 1; s++) {
        const int received = wrap(g, g->r - 1 - s);
        size_t at, bytes;
        chunk_of(g, received, &at, &bytes);
        if (!ari_member_await(m, g->left, (uint64_t)first + (uint64_t)s))
            return;
        const ari_moment since = ari_record_moment();
        if (bytes > 0) {
            const bool own_of_left = s == 0 && first == 0;
            const char *from = own_of_left ? g->left_call->in.ptr : (const char *)g->left_call->out.ptr + at;
            if (!ari_wire_take(g->wire, (char *)g->call->out.ptr + at, g->left, from, bytes, g->past_cache))
                return;
        }
        round_step(g, since, 1, s, (uint64_t)first + (uint64_t)s + 1, received, bytes);
    }
}

static void all_reduce_part(const ari_ring *g)
{
    if (reduce_scatter_steps(g))
        all_gather_steps(g, g->n - 1);
}

static void all_gather_part(const ari_ring *g)
{
    size_t at, bytes;
    chunk_of(g, g->r, &at, &bytes);
    if (bytes > 0)
        ari_copy_bytes((char *)g->call->out.ptr + at, g->call->in.ptr, bytes);
    all_gather_steps(g, 0);
}

size_t ari_ring_scratch(const ari_sim_comm *c, const ari_call *call)
{
    size_t largest = 0;
    if (call->kind != ARI_REDUCE_SCATTER)
        return ari_chain_scratch(c, call);
    for (int i = 0; c->base.size > 2 && i < c->base.size; i++)
        largest = call->counts[i] > largest ? call->counts[i] : largest;
    /* Two places, each a whole number of cache lines. The sum of the counts fits, but twice the largest may not. */
    const size_t place = (largest * ar_dtype_bytes(call->dtype) + 63) / 64 * 64;
    return place > SIZE_MAX / 2 ? SIZE_MAX : 2 * place;
}

void ari_ring_part(ari_sim_comm *c, const ari_call *call)
{
    ari_wire wire = ari_wire_open(c);
    const ari_ring g = ring_of(c, &wire, call);
    if (call->kind == ARI_ALL_REDUCE)
        all_reduce_part(&g);
    else if (call->kind == ARI_REDUCE_SCATTER)
        (void)reduce_scatter_steps(&g);
    else if (call->kind == ARI_ALL_GATHER)
        all_gather_part(&g);
    else if (call->kind == ARI_BROADCAST)
        ari_chain_broadcast(&g);
    else
        ari_chain_reduce(&g);
    ari_wire_close(&wire);
}
