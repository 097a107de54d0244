/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets of the exact arithmetic, and their sums over ranks. */
#include <stdlib.h>

#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/size.h"
#include "ref/numerics/sent_sum.h"

/* A bucket holds the accumulators of its elements, each kind in a run of its own, and room for the largest t of all
 * ranks, to which H and L are raised before they are added. hl, int64 [2n] (all H, then all L), comes first, so that
 * everything is aligned. */
typedef struct runs {
    ar_buf hl, t, most; /* t, most: u8 [n] */
    bool narrow;
} runs;

static runs runs_of(ar_buf bucket, size_t n, ar_dtype storage)
{
    const size_t hl = 2 * n * sizeof(int64_t);
    return (runs){bucket, ar_buf_at(bucket, hl), ar_buf_at(bucket, hl + n), storage == AR_BF16};
}

size_t ari_exact_bucket_bytes(size_t n, ar_dtype storage)
{
    (void)storage;
    const size_t each = 2 * sizeof(int64_t) + 2;
    return n > SIZE_MAX / each ? SIZE_MAX : n * each;
}

ar_status ari_exact_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, ari_exact_bucket_bytes(n, storage));
}

ar_status ari_exact_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at, ar_dtype storage,
                                const ar_param *p)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), word = sizeof(int64_t);
    const runs r = runs_of(bucket, n, storage);
    const ar_buf t = ar_buf_at(r.t, at), h = ar_buf_at(r.hl, at * word), l = ar_buf_at(r.hl, (n + at) * word);
    if (!p->grad || p->grad->none) {
        AR_TRY(dev->zero(ctx->device, q, t, count));
        AR_TRY(dev->zero(ctx->device, q, h, count * word));
        return dev->zero(ctx->device, q, l, count * word);
    }
    const ar_cbuf hl = ar_const(p->grad->hl);
    AR_TRY(dev->copy(ctx->device, q, t, ar_const(p->grad->t), count));
    AR_TRY(dev->copy(ctx->device, q, h, hl, count * word));
    return dev->copy(ctx->device, q, l, ar_cbuf_at(hl, count * word), count * word);
}

/* n values as the one row of a matrix: a row is what the accumulator's kernels know. */
static ar_tensor one_row(ar_dtype dtype, ar_buf data, size_t n)
{
    return (ar_tensor){.dtype = dtype, .ndim = 2, .shape = {1, n}, .stride = {(ptrdiff_t)n, 1}, .data = data};
}

static ar_status states_narrow(ar_ctx *ctx, ar_queue *q, ar_buf to, const runs *r, size_t n, size_t from, size_t count,
                               size_t width)
{
    const ar_cbuf h = ar_cbuf_at(ar_const(r->hl), from * sizeof(int64_t)), l = ar_cbuf_at(h, n * sizeof(int64_t));
    return ctx->device->ops->states_narrow(ctx->device, q, to, ar_cbuf_at(ar_const(r->t), from), h, l, count, width);
}

/* The values of all elements, each summed up on one rank. room: 6n bytes. */
static ar_status gather_values(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                               ar_buf room, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = ari_share_start(over, shares), own = shares[ar_comm_rank(over)];
    const ar_buf rounded = ar_buf_at(room, n * sizeof(float)), mine = ar_buf_at(rounded, start * sizeof(uint16_t));
    const ar_tensor values = one_row(AR_F32, room, own), stored = one_row(AR_BF16, mine, own);
    const ar_tensor wide = one_row(AR_F32, room, n), all = one_row(AR_BF16, rounded, n);
    AR_TRY(dev->acc_value(ctx->device, q, &values, ar_cbuf_at(ar_const(r->t), start),
                          ar_cbuf_at(ar_const(r->hl), start * sizeof(int64_t)), n, true));
    AR_TRY(dev->copy_strided(ctx->device, q, &stored, &values));
    AR_TRY(ar_comm_all_gather(over, q, rounded, ar_const(mine), shares, AR_BF16, tag));
    AR_TRY(dev->copy_strided(ctx->device, q, &wide, &all));
    return dev->acc_put(ctx->device, q, r->t, r->hl, ar_const(room), n, true);
}

/* The states of all elements, in `width` bytes each. room: n of them. */
static ar_status gather_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                               ar_buf room, size_t width, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t start = ari_share_start(over, shares), ranks = (size_t)ar_comm_size(over);
    const ar_buf mine = ar_buf_at(room, start * width), l = ar_buf_at(r->hl, n * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL;
    AR_TRY(ARI_ALLOC(&bytes, ranks, "bytes of sums"));
    for (size_t i = 0; i < ranks; i++)
        bytes[i] = shares[i] * width;
    AR_TRY(states_narrow(ctx, q, mine, r, n, start, shares[ar_comm_rank(over)], width));
    AR_TRY(ar_comm_all_gather(over, q, room, ar_const(mine), bytes, AR_U8, tag));
    AR_TRY(dev->zero(ctx->device, q, r->t, n));
    AR_TRY(dev->zero(ctx->device, q, r->hl, 2 * n * sizeof(int64_t)));
    return dev->states_merge(ctx->device, q, r->t, r->hl, l, ar_const(room), 1, n, width);
}

/* Each rank sends the others its states of their shares, in `width` bytes each, and merges those that come with its own
 * share's. room: all that leaves and arrives. */
static ar_status exchange_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                                 ar_buf room, size_t width, const char *tag)
{
    const size_t ranks = (size_t)ar_comm_size(over), me = (size_t)ar_comm_rank(over);
    const size_t start = ari_share_start(over, shares), own = shares[me], end = start + own;
    const ar_buf came = ar_buf_at(room, (n - own) * width), h = ar_buf_at(r->hl, start * sizeof(int64_t));
    ARI_OWNED size_t *bytes = NULL; /* what goes to each rank, then what comes from it */
    AR_TRY(ARI_ALLOC(&bytes, 2 * ranks, "bytes of sums"));
    for (size_t i = 0; i < ranks; i++) {
        bytes[i] = i == me ? 0 : shares[i] * width;
        bytes[ranks + i] = i == me ? 0 : own * width;
    }
    AR_TRY(states_narrow(ctx, q, room, r, n, 0, start, width));
    AR_TRY(states_narrow(ctx, q, ar_buf_at(room, start * width), r, n, end, n - end, width));
    AR_TRY(ar_comm_all_to_all(over, q, came, ar_const(room), bytes, bytes + ranks, AR_U8, tag));
    return ctx->device->ops->states_merge(ctx->device, q, ar_buf_at(r->t, start), h, ar_buf_at(h, n * sizeof(int64_t)),
                                          ar_const(came), ranks - 1, own, width);
}

/* Of narrow states, in the bytes that so many values need. If all ranks need all (gathers) their values are gathered
 * then, or their states where more is added to them. No memory of the step: another queue has it. */
static ar_status reduce_states(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *shares,
                               bool gathers, const ar_most_terms *most, const char *tag)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t width = ari_sent_state_bytes(most->before), wider = ari_sent_state_bytes(most->after);
    const size_t own = shares[ar_comm_rank(over)], peers = (size_t)ar_comm_size(over) - 1;
    const size_t there = (n - own + peers * own) * width;
    const size_t back = n * (most->after > 0 ? wider : sizeof(float) + sizeof(uint16_t));
    ar_buf room = {NULL};
    AR_TRY(dev->alloc(ctx->device, q, &room, ari_larger(there, back)));
    ar_status st = exchange_states(ctx, q, r, n, over, shares, room, width, tag);
    if (st == AR_OK && gathers)
        st = most->after > 0 ? gather_states(ctx, q, r, n, over, shares, room, wider, tag)
                             : gather_values(ctx, q, r, n, over, shares, room, tag);
    dev->free(ctx->device, q, room);
    return st;
}

/* The one sum of gradients: of a bucket's runs, or of a gradient's own. counts and most as of bucket_reduce. */
static ar_status reduce_runs(ar_ctx *ctx, ar_queue *q, const runs *r, size_t n, ar_comm *over, const size_t *counts,
                             const ar_most_terms *most, const char *tag)
{
    if (r->narrow && most) {
        ARI_OWNED size_t *equal = NULL;
        AR_TRY(ari_slice_counts(&equal, over, n, 1));
        return reduce_states(ctx, q, r, n, over, counts ? counts : equal, !counts, most, tag);
    }
    AR_TRY(ar_comm_all_reduce(over, q, r->most, ar_const(r->t), n, AR_U8, AR_MAX, tag));
    AR_TRY(ctx->device->ops->acc_raise(ctx->device, q, r->t, r->hl, ar_const(r->most), n));
    if (!counts)
        return ar_comm_all_reduce(over, q, r->hl, ar_const(r->hl), 2 * n, AR_I64, AR_SUM, tag);
    const ar_buf l = ar_buf_at(r->hl, n * sizeof(int64_t));
    const size_t own = ari_share_start(over, counts) * sizeof(int64_t);
    AR_TRY(ar_comm_reduce_scatter(over, q, ar_buf_at(r->hl, own), ar_const(r->hl), counts, AR_I64, AR_SUM, tag));
    return ar_comm_reduce_scatter(over, q, ar_buf_at(l, own), ar_const(l), counts, AR_I64, AR_SUM, tag);
}

ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage, ar_comm *over,
                                  const size_t *counts, const ar_most_terms *most, const char *tag)
{
    const runs r = runs_of(bucket, n, storage);
    return ari_has_peers(over) ? reduce_runs(ctx, q, &r, n, over, counts, most, tag) : AR_OK;
}

ar_status ari_exact_grad_reduce(ar_ctx *ctx, ar_param *p, ar_comm *over, const char *tag)
{
    if (!ari_has_peers(over))
        return AR_OK;
    AR_TRY(ari_exact_grad_ensure(ctx, p));
    AR_TRY(ari_exact_grad_zeros(ctx, ctx->queue, p->grad));
    runs r = {.hl = p->grad->hl, .t = p->grad->t, .narrow = p->grad->narrow};
    AR_TRY(ari_step_alloc(ctx, &r.most, p->grad->n));
    AR_TRY(reduce_runs(ctx, ctx->queue, &r, p->grad->n, over, NULL, NULL, tag));
    ari_step_free(ctx, r.most);
    return AR_OK;
}

ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                  ar_dtype storage)
{
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t word = sizeof(int64_t), first = p->own_start, count = p->own_count, from = at + first;
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * word);
    const ar_buf l = ar_buf_at(p->grad->hl, p->grad->n * word);
    AR_TRY(ari_exact_grad_zeros(ctx, q, p->grad));
    AR_TRY(dev->copy(ctx->device, q, ar_buf_at(p->grad->t, first), ar_cbuf_at(t, from), count));
    AR_TRY(
        dev->copy(ctx->device, q, ar_buf_at(p->grad->hl, first * word), ar_cbuf_at(bucket, from * word), count * word));
    return dev->copy(ctx->device, q, ar_buf_at(l, first * word), ar_cbuf_at(bucket, (n + from) * word), count * word);
}

ar_status ari_exact_bucket_put(ar_ctx *ctx, ar_queue *q, ar_buf bucket, ar_cbuf x, size_t n, ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const runs r = runs_of(bucket, n, storage);
    ar_tensor terms = one_row(AR_F32, (ar_buf){(void *)(uintptr_t)x.ptr}, n);
    ar_buf rounded = {NULL};
    AR_TRY(ari_exact_bucket_zero(ctx, q, bucket, n, storage));
    ar_status st = AR_OK;
    if (r.narrow) { /* to the nearest: slices would cut them */
        AR_TRY(dev->alloc(ctx->device, q, &rounded, n * sizeof(uint16_t)));
        const ar_tensor wide = terms;
        terms = one_row(AR_BF16, rounded, n);
        st = dev->copy_strided(ctx->device, q, &terms, &wide);
    }
    if (st == AR_OK)
        st = dev->acc_add(ctx->device, q, r.t, r.hl, r.narrow, 1, &terms, (ar_cbuf){NULL});
    dev->free(ctx->device, q, rounded);
    return st;
}

ar_status ari_exact_bucket_take(ar_ctx *ctx, ar_queue *q, ar_buf y, ar_cbuf bucket, size_t n, size_t at, size_t count,
                                ar_dtype storage)
{
    const ar_device_ops *dev = ctx->device->ops;
    const ar_tensor values = one_row(AR_F32, y, count);
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * sizeof(int64_t) + at), hl = ar_cbuf_at(bucket, at * sizeof(int64_t));
    return dev->acc_value(ctx->device, q, &values, t, hl, n, storage == AR_BF16);
}
