/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets in the exact arithmetic. One holds the accumulators of its elements, each kind in a run of its own, and room
 * for the largest t of all ranks, to which H and L are raised before they are added. */
#include "ref/arith/exact.h"
#include "ref/arith/operand.h"
#include "ref/core/context.h"
#include "ref/core/size.h"

/* Where the runs begin: hl int64 [2n] (all H, then all L) first, so that everything is aligned. */
typedef struct runs {
    ar_buf hl, t, most; /* t, most: u8 [n] */
} runs;

static runs runs_of(ar_buf bucket, size_t n)
{
    const size_t hl = 2 * n * sizeof(int64_t);
    return (runs){bucket, ar_buf_at(bucket, hl), ar_buf_at(bucket, hl + n)};
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
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), word = sizeof(int64_t);
    const runs r = runs_of(bucket, n);
    const ar_buf t = ar_buf_at(r.t, at), h = ar_buf_at(r.hl, at * word), l = ar_buf_at(r.hl, (n + at) * word);
    if (!p->grad || !p->has_grad) {
        AR_TRY(dev->zero(ctx->device, q, t, count));
        AR_TRY(dev->zero(ctx->device, q, h, count * word));
        return dev->zero(ctx->device, q, l, count * word);
    }
    const ar_cbuf hl = ar_const(p->grad->hl);
    AR_TRY(dev->copy(ctx->device, q, t, ar_const(p->grad->t), count));
    AR_TRY(dev->copy(ctx->device, q, h, hl, count * word));
    return dev->copy(ctx->device, q, l, ar_cbuf_at(hl, count * word), count * word);
}

ar_status ari_exact_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage, ar_comm *over,
                                  const size_t *counts, const char *tag)
{
    (void)storage;
    if (!ari_has_peers(over))
        return AR_OK;
    const runs r = runs_of(bucket, n);
    AR_TRY(ar_comm_all_reduce(over, q, r.most, ar_const(r.t), n, AR_U8, AR_MAX, tag));
    AR_TRY(ctx->device->ops->acc_raise(ctx->device, q, r.t, r.hl, ar_const(r.most), n));
    if (!counts)
        return ar_comm_all_reduce(over, q, r.hl, ar_const(r.hl), 2 * n, AR_I64, AR_SUM, tag);
    const ar_buf l = ar_buf_at(r.hl, n * sizeof(int64_t));
    const size_t own = ari_share_start(over, counts) * sizeof(int64_t);
    AR_TRY(ar_comm_reduce_scatter(over, q, ar_buf_at(r.hl, own), ar_const(r.hl), counts, AR_I64, AR_SUM, tag));
    return ar_comm_reduce_scatter(over, q, ar_buf_at(l, own), ar_const(l), counts, AR_I64, AR_SUM, tag);
}

ar_status ari_exact_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                  ar_dtype storage)
{
    (void)storage;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t word = sizeof(int64_t), first = p->own_start, count = p->own_count, from = at + first;
    const ar_cbuf t = ar_cbuf_at(bucket, 2 * n * word);
    const ar_buf l = ar_buf_at(p->grad->hl, p->grad->n * word);
    AR_TRY(dev->copy(ctx->device, q, ar_buf_at(p->grad->t, first), ar_cbuf_at(t, from), count));
    AR_TRY(
        dev->copy(ctx->device, q, ar_buf_at(p->grad->hl, first * word), ar_cbuf_at(bucket, from * word), count * word));
    return dev->copy(ctx->device, q, ar_buf_at(l, first * word), ar_cbuf_at(bucket, (n + from) * word), count * word);
}
