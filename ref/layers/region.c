/* SPDX-License-Identifier: Apache-2.0 */
/* The conjugate operators: each is the transpose of its partner's map (layers.h). */
#include "ref/layers/parts.h"
#include "ref/layers/sequence.h"

static ar_status copy(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ctx->device->ops->copy(ctx->device, ctx->queue, y->data, ar_const(x->data),
                                  ar_tensor_count(x) * sizeof(float));
}

static ar_status sum(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ar_comm_all_reduce(ctx->tp, ctx->queue, y->data, ar_const(x->data), ar_tensor_count(x), AR_F32, AR_SUM, tag);
}

ar_status ar_copy_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return copy(ctx, y, x);
}

ar_status ar_copy_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return sum(ctx, dx, dy, "copy_to_region backward");
}

ar_status ar_reduce_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return sum(ctx, y, x, "reduce_from_region");
}

ar_status ar_reduce_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return copy(ctx, dx, dy);
}

ar_status ar_gather_from_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return ari_gather_features(ctx, y, x, "gather_from_region");
}

ar_status ar_gather_from_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return ari_own_features(ctx, dx, dy);
}

ar_status ar_scatter_to_region(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return ari_own_features(ctx, y, x);
}

ar_status ar_scatter_to_region_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return ari_gather_features(ctx, dx, dy, "scatter_to_region backward");
}

ar_status ar_gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return ari_gather_tokens(ctx, y, x, "gather_tokens");
}

ar_status ar_gather_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return ari_scatter_tokens(ctx, dx, dy, "gather_tokens backward");
}

ar_status ar_scatter_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return ari_scatter_tokens(ctx, y, x, "scatter_tokens");
}

ar_status ar_scatter_tokens_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy)
{
    return ari_gather_tokens(ctx, dx, dy, "scatter_tokens backward");
}
