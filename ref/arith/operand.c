/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/arith/operand.h"

#include "ref/comm/comm_private.h"
#include "ref/context/context.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"

ar_status ari_parts_extents(ari_extents *x, const ar_parts *p)
{
    if (p->n < 1 || p->n > AR_MAX_PARTS)
        return ar_error_set(AR_ERR_ARG, "a contraction takes 1 to %d parts, not %d", AR_MAX_PARTS, p->n);
    *x = (ari_extents){.batch = 1};
    for (int i = 0; i < p->n; i++) {
        const ar_tensor *t = &p->part[i];
        if (t->dtype != AR_F32 && t->dtype != AR_BF16)
            return ar_error_set(AR_ERR_DTYPE, "a contraction takes F32 and BF16, part %d is %s", i,
                                ar_dtype_name(t->dtype));
        if (t->ndim < 2 || (p->n > 1 && t->ndim != 2))
            return ar_error_set(AR_ERR_SHAPE, "a contraction's operand has 2 to 4 dimensions (2 if in parts), not %d",
                                t->ndim);
        const size_t rows = t->shape[t->ndim - 2], k = t->shape[t->ndim - 1];
        if (i == 0) {
            x->rows = rows;
            x->k = k;
            x->batch_dims = t->ndim - 2;
            for (int d = 0; d < x->batch_dims; d++) {
                x->batch_shape[d] = t->shape[d];
                x->batch *= t->shape[d];
            }
            continue;
        }
        if (p->along_k ? rows != x->rows : k != x->k)
            return ar_error_set(AR_ERR_SHAPE, "a contraction's part %d is [%zu, %zu] beside [%zu, %zu]", i, rows, k,
                                x->rows, x->k);
        x->rows += p->along_k ? 0 : rows;
        x->k += p->along_k ? k : 0;
    }
    return AR_OK;
}

ar_status ari_check_fold(const ar_ctx *ctx, const ari_extents *a, const ar_queue *q, const ar_comm *group,
                         ar_fold method, const char *tag)
{
    const size_t n = (size_t)ar_comm_size(group);
    if (q != ctx->queue && method != AR_SCATTER_ROWS)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: a sum of which every rank wants all rows is folded on the "
                            "context's queue alone",
                            tag);
    if (method != AR_SCATTER_ROWS)
        return AR_OK;
    if (a->batch != 1)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: the rows of %zu products cannot be scattered, only of one", tag,
                            a->batch);
    if (a->rows % n != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: %zu rows cannot be scattered over %zu ranks; use a multiple of %zu", tag, a->rows, n,
                            n);
    return AR_OK;
}

ar_status ari_check_part(const ari_extents *x, const ar_part *part)
{
    AR_TRY(ari_part_check(part, x->batch, x->rows, x->k, "part of an operand"));
    if (part->matrices > 1 && (part->rows != x->rows || part->cols != x->k))
        return ar_error_set(AR_ERR_SHAPE,
                            "part of an operand: [%zu, %zu] of each of %zu matrices [%zu, %zu], not whole", part->rows,
                            part->cols, part->matrices, x->rows, x->k);
    return AR_OK;
}

ar_status ari_check_blocks(const ari_extents *b, const ar_blocks_options *o)
{
    const bool alone = !ari_has_peers(o->places) && !ari_has_peers(o->replicas);
    if (o->rows % ari_places(o) != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE, "%s: %zu rows cannot be cut into %zu equal parts", o->tag, o->rows,
                            ari_places(o));
    if (alone && b->k != o->k_full)
        return ar_error_set(AR_ERR_SHAPE, "%s: a contraction over %zu terms was given %zu", o->tag, o->k_full, b->k);
    return AR_OK;
}

ar_status ari_check_pair(const ari_extents *a, const ari_extents *b, const char *tag)
{
    if (a->k != b->k || a->batch != b->batch)
        return ar_error_set(AR_ERR_SHAPE, "%s: A is [%zu x %zu, %zu], B is [%zu x %zu, %zu]", tag, a->batch, a->rows,
                            a->k, b->batch, b->rows, b->k);
    return AR_OK;
}

ar_status ari_slice_counts(size_t **out, const ar_comm *group, size_t total, size_t width)
{
    const int n = ar_comm_size(group);
    AR_TRY(ari_alloc((void **)out, (size_t)n, sizeof **out, "slice sizes"));
    for (int i = 0; i < n; i++) {
        size_t start = 0, count = 0;
        ari_comm_slice(total, n, i, &start, &count);
        (*out)[i] = count * width;
    }
    return AR_OK;
}

ar_status ari_wide_begin(ar_ctx *ctx, ar_tensor *wide, const ar_tensor *y)
{
    *wide = *y;
    return y->dtype == AR_F32 ? AR_OK : ar_ctx_tensor(ctx, wide, AR_F32, y->ndim, y->shape);
}

ar_status ari_wide_end(ar_ctx *ctx, const ar_tensor *y, ar_tensor *wide)
{
    if (y->dtype == AR_F32)
        return AR_OK;
    AR_TRY(ARI_KERNEL(ctx, copy_strided, y, wide));
    ar_ctx_release(ctx, wide);
    return AR_OK;
}

ar_status ari_grad_begin(ar_ctx *ctx, bool *is_trained, ar_param *p, const ar_tensor *dy, const ar_tensor *x)
{
    if (dy->shape[0] != x->shape[0] || dy->shape[1] * x->shape[1] != ar_tensor_count(&p->value))
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient from dy [%zu, %zu] and x [%zu, %zu]", p->name, dy->shape[0],
                            dy->shape[1], x->shape[0], x->shape[1]);
    *is_trained = p->requires_grad;
    if (!p->requires_grad)
        return AR_OK;
    p->has_grad = true;
    return ctx->arith->grad_ensure(ctx, p);
}

void ari_operand_done(ar_ctx *ctx, const ar_operand *o)
{
    ari_step_disown(ctx, (void *)(uintptr_t)o); /* the const is for the layers; the step that created the operand
                                                   ends it */
}

void ari_work_of_product(const ari_extents *a, const ari_extents *b)
{
    ari_work_product(
        &(ari_gpu_product){(double)a->batch, (double)a->rows, (double)b->rows, (double)a->k, .accumulates = false});
}

void ari_work_of_gradient(size_t out, size_t in_features, size_t tokens)
{
    ari_work_product(&(ari_gpu_product){1.0, (double)out, (double)in_features, (double)tokens, .accumulates = true});
}
