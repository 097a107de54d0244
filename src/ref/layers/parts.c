/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/parts.h"

#include <stdio.h>

#include "ref/core/size.h"

ar_status ari_path(char *out, size_t cap, const char *base, const char *part)
{
    const int n = part ? snprintf(out, cap, "%s.%s", base, part) : snprintf(out, cap, "%s", base);
    if (n < 0 || (size_t)n >= cap)
        return ar_error_set(AR_ERR_ARG, "name '%s.%s' is longer than %zu bytes", base, part ? part : "", cap - 1);
    return AR_OK;
}

ar_status ari_check_features(const char *name, const char *what, const ar_tensor *t, size_t features)
{
    if (t->ndim >= 2 && t->shape[t->ndim - 1] == features && ar_tensor_is_contiguous(t))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: %s of %zu features (%d dimensions), expected %zu, contiguous", name, what,
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

ar_status ari_numbers(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, size_t n, const void *host)
{
    AR_TRY(ar_ctx_tensor(ctx, t, dtype, 1, &n));
    return ar_ctx_upload(ctx, t, host);
}

ar_status ari_cast(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_dtype dtype)
{
    *y = *x;
    if (x->dtype == dtype)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, y, dtype, x->ndim, x->shape));
    return ARI_KERNEL(ctx, copy_strided, y, x);
}

ar_status ari_part_pairs(ar_ctx *ctx, const ar_tensor *to, const ar_tensor *from, bool apart)
{
    const ar_tensor *halves = apart ? to : from, *pairs = apart ? from : to;
    const int d = from->ndim - 1;
    const size_t half = halves->shape[d] / 2;
    for (size_t i = 0; i < 2; i++) {
        const ar_tensor one = ar_tensor_slice(halves, d, i * half, half);
        ar_tensor other = ar_tensor_slice(pairs, d, i, half);
        other.stride[d] = 2;
        AR_TRY(ARI_KERNEL(ctx, copy_strided, apart ? &one : &other, apart ? &other : &one));
    }
    return AR_OK;
}

ar_status ari_equal_counts(size_t **gives, const ar_comm *over, size_t count)
{
    const size_t n = (size_t)ar_comm_size(over);
    AR_TRY(ARI_ALLOC(gives, n, "sizes of the ranks' parts"));
    for (size_t i = 0; i < n; i++)
        (*gives)[i] = count;
    return AR_OK;
}

ar_status ari_combine(ar_ctx *ctx, ar_comm *over, void *numbers, size_t n, ar_dtype type, ar_op op, const char *tag)
{
    ar_tensor t;
    AR_TRY(ari_numbers(ctx, &t, type, n, numbers));
    AR_TRY(ar_comm_all_reduce(over, ctx->queue, t.data, ar_const(t.data), n, type, op, tag));
    AR_TRY(ar_ctx_download(ctx, numbers, &t));
    ar_ctx_release(ctx, &t);
    return AR_OK;
}
