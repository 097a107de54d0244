/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/slice.h"
#include "sim/sum.h"

/* `direct`: every rank reads the other ranks' buffers itself. Slice c is still added in the ring's order, ranks c+1,
 * c+2, ..., c modulo N, so the bits are the ring's.
 *
 *   all_reduce, N = 3:   in[0]  a0 b0 c0     rank 0 adds a, rank 1 adds b, rank 2 adds c, each reading three inputs
 *                        in[1]  a1 b1 c1     and writing its sum to three outputs: every input is read once and every
 *                        in[2]  a2 b2 c2     output written once, which is the least there is. */

typedef struct direct {
    ari_wire *wire;
    const ari_group *group;
    const ari_call *call;
    int n, r;
    size_t element;
} direct;

static const char *input(const direct *d, int i)
{
    return ari_group_call(d->group, i)->in.ptr;
}

static char *output(const direct *d, int i)
{
    return ari_group_call(d->group, i)->out.ptr;
}

/* The reduction of `size` elements from `start` on into the own output. */
static void reduce_range(const direct *d, size_t start, size_t size)
{
    const ari_sum sum = ari_sum_of(d->wire, d->r);
    const size_t piece = ari_sum_piece_count(&sum);
    for (size_t done = 0; done < size; done += piece) {
        const size_t count = size - done < piece ? size - done : piece;
        if (!ari_sum_piece(&sum, output(d, d->r) + done * d->element, (start + done) * d->element, count))
            return;
    }
}

/* Copies `bytes` of rank `from`; the pointers may be NULL where there are none. False: broken off. */
static bool take_to(const direct *d, char *to, int from, const char *at, size_t bytes, bool past_cache)
{
    if (bytes == 0 || to == at)
        return true;
    if (from != d->r)
        return ari_wire_take(d->wire, to, from, at, bytes, past_cache);
    (past_cache ? ari_stream_bytes : ari_copy_bytes)(to, at, bytes);
    return true;
}

static bool take(const direct *d, char *to, int from, const char *at, size_t bytes)
{
    return take_to(d, to, from, at, bytes, false);
}

/* outputs: of this size, over all ranks. */
static void gather_part(const direct *d, int outputs)
{
    const bool past_cache = ari_stream_pays(ari_counts_before(d->call->counts, d->n) * d->element, outputs);
    size_t at = 0;
    for (int i = 0; i < d->n; i++) {
        const size_t bytes = d->call->counts[i] * d->element;
        if (bytes > 0 && !take_to(d, output(d, d->r) + at, i, input(d, i), bytes, past_cache))
            break;
        at += bytes;
    }
    ari_stream_end();
}

static void scatter_part(const direct *d)
{
    const size_t bytes = d->call->counts[d->r] * d->element;
    const size_t at = ari_counts_before(d->call->counts, d->r) * d->element;
    if (bytes > 0)
        (void)take(d, output(d, d->r), d->call->root, input(d, d->call->root) + at, bytes);
}

static void all_to_all_part(const direct *d)
{
    size_t at = 0;
    for (int i = 0; i < d->n; i++) {
        const size_t bytes = d->call->recv_counts[i] * d->element;
        const size_t from = ari_counts_before(ari_group_call(d->group, i)->counts, d->r) * d->element;
        if (bytes > 0 && !take(d, output(d, d->r) + at, i, input(d, i) + from, bytes))
            return;
        at += bytes;
    }
}

static void broadcast_part(const direct *d)
{
    const size_t bytes = d->call->count * d->element;
    if (d->r != d->call->root)
        (void)take_to(d, output(d, d->r), d->call->root, input(d, d->call->root), bytes, ari_stream_pays(bytes, d->n));
    ari_stream_end();
}

/* The k-th receive from a rank meets that rank's k-th send to r. */
static bool exchange_with(const direct *d, int i)
{
    const ari_call *from = ari_group_call(d->group, i);
    size_t s = 0;
    for (size_t k = 0; k < d->call->count; k++) {
        const ar_p2p *receive = &d->call->p2p[k];
        if (receive->send || receive->peer != i)
            continue;
        while (!from->p2p[s].send || from->p2p[s].peer != d->r)
            s++;
        if (!take(d, receive->buf.ptr, i, from->p2p[s++].buf.ptr, receive->count * d->element))
            return false;
    }
    return true;
}

static void exchange_part(const direct *d)
{
    for (int i = 0; i < d->n; i++) {
        if (!exchange_with(d, i))
            return;
    }
}

static void move(const direct *d)
{
    const ari_call *call = d->call;
    switch (call->kind) {
    case ARI_ALL_REDUCE:
        (void)ari_slice_move(d->wire, d->r);
        break;
    case ARI_REDUCE_SCATTER:
        reduce_range(d, ari_counts_before(call->counts, d->r), call->counts[d->r]);
        break;
    case ARI_REDUCE:
        if (d->r == call->root)
            reduce_range(d, 0, call->count);
        break;
    case ARI_ALL_GATHER:
        gather_part(d, d->n);
        break;
    case ARI_GATHER:
        if (d->r == call->root)
            gather_part(d, 1);
        break;
    case ARI_SCATTER:
        scatter_part(d);
        break;
    case ARI_ALL_TO_ALL:
        all_to_all_part(d);
        break;
    case ARI_BROADCAST:
        broadcast_part(d);
        break;
    case ARI_RECV: /* of a channel: its member 1, from its member 0 */
        (void)take(d, output(d, 1), 0, input(d, 0), call->count * d->element);
        break;
    case ARI_EXCHANGE:
        exchange_part(d);
        break;
    case ARI_SEND:
    case ARI_BARRIER:
    case ARI_SPLIT:
    case ARI_KIND_COUNT:
        break;
    }
}

void ari_direct_part(ari_sim_comm *c, const ari_call *call)
{
    ari_wire wire = ari_wire_open(c);
    const direct d = {.wire = &wire,
                      .group = c->member.group,
                      .call = call,
                      .n = c->base.size,
                      .r = c->member.index,
                      .element = ar_dtype_bytes(call->dtype)};
    move(&d);
    ari_wire_close(&wire);
}
