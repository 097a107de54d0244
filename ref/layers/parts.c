/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/parts.h"
#include "ref/core/tensor_private.h"

#include <stdio.h>

ar_status ari_path(char *out, size_t cap, const char *base, const char *part)
{
    const int n = part ? snprintf(out, cap, "%s.%s", base, part) : snprintf(out, cap, "%s", base);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "name '%s.%s' is longer than %zu bytes", base, part ? part : "", cap - 1);
    return AR_OK;
}

ar_status ari_check_features(const char *name, const char *label, const ar_tensor *t, size_t features)
{
    if (t->ndim >= 2 && t->shape[t->ndim - 1] == features && ari_tensor_is_contiguous(t))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: %s of %zu features (%d dimensions), expected %zu, contiguous", name, label,
                        t->ndim > 0 ? t->shape[t->ndim - 1] : 0, t->ndim, features);
}

ar_status ar_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    return ar_ctx_tensor(ctx, y, x->dtype, x->ndim, x->shape);
}

ar_status ari_like(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features)
{
    ar_tensor shape = *x;
    shape.shape[x->ndim - 1] = features;
    return ar_ctx_tensor(ctx, y, x->dtype, x->ndim, shape.shape);
}

ar_status ari_like_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t positions, size_t features)
{
    ar_tensor shape = *x;
    shape.shape[x->ndim - 2] = positions;
    return ari_like(ctx, y, &shape, features);
}

ar_status ari_part_pairs(ar_ctx *ctx, const ar_tensor *dst, const ar_tensor *src, bool deinterleave)
{
    const ar_tensor *halves = deinterleave ? dst : src, *pairs = deinterleave ? src : dst;
    const int d = src->ndim - 1;
    const size_t half = halves->shape[d] / 2;
    for (size_t i = 0; i < 2; i++) {
        const ar_tensor half_view = ar_tensor_slice(halves, d, i * half, half);
        ar_tensor pair_view = ar_tensor_slice(pairs, d, i, half);
        pair_view.stride[d] = 2;
        AR_TRY(ARI_KERNEL(ctx, copy_strided, deinterleave ? &half_view : &pair_view,
                          deinterleave ? &pair_view : &half_view));
    }
    return AR_OK;
}
