/* SPDX-License-Identifier: Apache-2.0 */
/* Buckets in the native arithmetic: the numbers themselves, fp32 or bf16, summed in ring order. */
#include "ref/arith/native.h"
#include "ref/arith/operand.h"
#include "ref/core/context.h"

size_t ari_native_bucket_bytes(size_t n, ar_dtype storage)
{
    const size_t width = ar_dtype_bytes(storage);
    return n > SIZE_MAX / width ? SIZE_MAX : n * width;
}

ar_status ari_native_bucket_pack(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, size_t at, ar_dtype storage,
                                 const ar_param *p)
{
    (void)n;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t count = ar_tensor_count(&p->value), width = ar_dtype_bytes(storage);
    const ar_buf to = ar_buf_at(bucket, at * width);
    if (!p->grad || !p->has_grad)
        return dev->zero(ctx->device, q, to, count * width);
    if (storage == AR_BF16)
        return dev->narrow_bf16(ctx->device, q, to, ar_const(p->grad->sum), count);
    return dev->copy(ctx->device, q, to, ar_const(p->grad->sum), count * width);
}

ar_status ari_native_bucket_zero(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage)
{
    return ctx->device->ops->zero(ctx->device, q, bucket, ari_native_bucket_bytes(n, storage));
}

ar_status ari_native_bucket_reduce(ar_ctx *ctx, ar_queue *q, ar_buf bucket, size_t n, ar_dtype storage, ar_comm *over,
                                   const size_t *counts, const char *tag)
{
    (void)ctx;
    if (!ari_has_peers(over))
        return AR_OK;
    if (!counts)
        return ar_comm_all_reduce(over, q, bucket, ar_const(bucket), n, storage, AR_SUM, tag);
    const ar_buf own = ar_buf_at(bucket, ari_share_start(over, counts) * ar_dtype_bytes(storage));
    return ar_comm_reduce_scatter(over, q, own, ar_const(bucket), counts, storage, AR_SUM, tag);
}

ar_status ari_native_bucket_unpack(ar_ctx *ctx, ar_queue *q, ar_param *p, ar_cbuf bucket, size_t n, size_t at,
                                   ar_dtype storage)
{
    (void)n;
    const ar_device_ops *dev = ctx->device->ops;
    const size_t width = ar_dtype_bytes(storage);
    const ar_cbuf from = ar_cbuf_at(bucket, (at + p->own_start) * width);
    const ar_buf to = ar_buf_at(p->grad->sum, p->own_start * sizeof(float));
    if (storage == AR_BF16)
        return dev->widen_bf16(ctx->device, q, to, from, p->own_count);
    return dev->copy(ctx->device, q, to, from, p->own_count * width);
}
