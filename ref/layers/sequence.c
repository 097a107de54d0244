/* SPDX-License-Identifier: Apache-2.0 */
/* What moves between the tensor-parallel regions. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

size_t ari_sequence_ranks(const ar_ctx *ctx)
{
    return ari_ctx_sp(ctx) ? (size_t)ar_comm_size(ctx->tp) : 1;
}

size_t ari_token_at(const ar_ctx *ctx, const ar_batch *batch, size_t i)
{
    const size_t own = batch->seq / ari_sequence_ranks(ctx), sample = i / own % batch->batch;
    return sample * batch->seq + i / own / batch->batch * own + i % own;
}

/* x [.., s, f]: samples, the positions of a rank, features. */
typedef struct token_extents {
    size_t ranks, samples, own, features;
} token_extents;

/* Of an x with a rank's own positions. */
static token_extents own_extents(const ar_ctx *ctx, const ar_tensor *x)
{
    token_extents e = {.ranks = (size_t)ar_comm_size(ctx->tp), .samples = 1, .features = x->shape[x->ndim - 1]};
    for (int d = 0; d < x->ndim - 2; d++)
        e.samples *= x->shape[d];
    e.own = x->shape[x->ndim - 2];
    return e;
}

/* Of an x with all positions. */
static ar_status extents_of(token_extents *e, const ar_ctx *ctx, const ar_tensor *x)
{
    *e = own_extents(ctx, x);
    if (e->own % e->ranks != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "a sequence of %zu positions cannot be split over tp=%zu; use a multiple of %zu", e->own,
                            e->ranks, e->ranks);
    e->own /= e->ranks;
    return AR_OK;
}

/* Memory in the order of the sequences [samples, ranks, own, f] and of the ranks [ranks, samples, own, f], both as
 * views [ranks, samples, own, f]. */
static ar_tensor sequence_view(const token_extents *e, ar_buf data)
{
    const ptrdiff_t position = (ptrdiff_t)e->features, run = position * (ptrdiff_t)e->own;
    return (ar_tensor){.dtype = AR_F32,
                       .ndim = 4,
                       .shape = {e->ranks, e->samples, e->own, e->features},
                       .stride = {run, run * (ptrdiff_t)e->ranks, position, 1},
                       .data = data};
}

static ar_tensor rank_view(const token_extents *e, ar_buf data)
{
    ar_tensor t = sequence_view(e, data);
    t.stride[1] = t.stride[0];
    t.stride[0] *= (ptrdiff_t)e->samples;
    return t;
}

ar_status ari_like_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features)
{
    token_extents e;
    size_t shape[AR_MAX_DIMS] = {0};
    AR_TRY(extents_of(&e, ctx, x));
    for (int d = 0; d < x->ndim; d++)
        shape[d] = x->shape[d];
    shape[x->ndim - 2] = e.own;
    shape[x->ndim - 1] = features;
    return ar_ctx_tensor(ctx, y, x->dtype, x->ndim, shape);
}

ar_status ari_own_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    token_extents e;
    AR_TRY(extents_of(&e, ctx, x));
    AR_TRY(ari_like_own_tokens(ctx, y, x, e.features));
    const ar_tensor all = sequence_view(&e, x->data);
    const ar_tensor from = ar_tensor_slice(&all, 0, (size_t)ar_comm_rank(ctx->tp), 1);
    e.ranks = 1;
    const ar_tensor to = rank_view(&e, y->data);
    return ARI_KERNEL(ctx, copy_strided, &to, &from);
}

static ar_status new_rows(ar_ctx *ctx, ar_tensor *rows, const token_extents *e)
{
    const size_t shape[2] = {e->ranks * e->samples * e->own, e->features};
    return ar_ctx_tensor(ctx, rows, AR_F32, 2, shape);
}

ar_status ari_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x)
{
    token_extents e;
    AR_TRY(extents_of(&e, ctx, x));
    *rows = ar_tensor_rows(x);
    if (e.samples == 1)
        return AR_OK;
    AR_TRY(new_rows(ctx, rows, &e));
    const ar_tensor to = rank_view(&e, rows->data), from = sequence_view(&e, x->data);
    return ARI_KERNEL(ctx, copy_strided, &to, &from);
}

void ari_release_rows(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x)
{
    if (rows->data.ptr != x->data.ptr)
        ar_ctx_release(ctx, rows);
}

ar_status ari_gather_rank_major(ar_ctx *ctx, ar_tensor *rows, const ar_tensor *x, const char *tag)
{
    const token_extents e = own_extents(ctx, x);
    size_t *counts = NULL;
    AR_TRY(new_rows(ctx, rows, &e));
    AR_TRY(ari_equal_counts(&counts, ctx->tp, ar_tensor_count(x)));
    const ar_status st = ar_comm_all_gather(ctx->tp, ctx->queue, rows->data, ar_const(x->data), counts, AR_F32, tag);
    free(counts);
    return st;
}

ar_status ari_gather_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    const token_extents e = own_extents(ctx, x);
    size_t shape[AR_MAX_DIMS] = {0};
    ar_tensor rows;
    for (int d = 0; d < x->ndim; d++)
        shape[d] = x->shape[d];
    shape[x->ndim - 2] *= e.ranks;
    AR_TRY(ari_gather_rank_major(ctx, &rows, x, tag));
    if (e.samples == 1 || ar_faulty(ctx, AR_FAULT_gather_batch_order))
        return ar_tensor_view(y, AR_F32, x->ndim, shape, rows.data);
    AR_TRY(ar_ctx_tensor(ctx, y, AR_F32, x->ndim, shape));
    const ar_tensor to = sequence_view(&e, y->data), from = rank_view(&e, rows.data);
    AR_TRY(ARI_KERNEL(ctx, copy_strided, &to, &from));
    ar_ctx_release(ctx, &rows);
    return AR_OK;
}

/* The own rows of the sum over ranks: y has their number. */
static ar_status scatter_rows(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *rows, ar_dtype as, const char *tag)
{
    size_t *counts = NULL;
    AR_TRY(ari_equal_counts(&counts, ctx->tp, ar_tensor_count(y)));
    const ar_status st =
        ar_comm_reduce_scatter(ctx->tp, ctx->queue, y->data, ar_const(rows->data), counts, as, AR_SUM, tag);
    free(counts);
    return st;
}

/* y [.., s/N, f] = the own positions of the fp32 sum over ranks of x [.., s, f]: a reduce-scatter. */
static ar_status scatter_tokens(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    ar_tensor rows;
    AR_TRY(ari_rank_major(ctx, &rows, x));
    AR_TRY(ari_like_own_tokens(ctx, y, x, x->shape[x->ndim - 1]));
    AR_TRY(scatter_rows(ctx, y, &rows, AR_F32, tag));
    ari_release_rows(ctx, &rows, x);
    return AR_OK;
}

ar_status ari_select_tokens(ar_ctx *ctx, const ar_tensor *y, const ar_tensor *rows, const char *tag)
{
    return scatter_rows(ctx, y, rows, AR_I32, tag);
}

/* --- the conjugate operators: each is the transpose of its partner's map (layers.h) ------------------------------- */

static ar_status copy(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ARI_KERNEL(ctx, copy, y->data, ar_const(x->data), ar_tensor_count(x) * sizeof(float));
}

static ar_status sum(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const char *tag)
{
    AR_TRY(ari_like(ctx, y, x, x->shape[x->ndim - 1]));
    return ar_comm_all_reduce(ctx->tp, ctx->queue, y->data, ar_const(x->data), ar_tensor_count(x), AR_F32, AR_SUM, tag);
}

#define CONJUGATE(name, forward, backward)                                        \
    ar_status ar_##name(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)            \
    {                                                                             \
        return forward;                                                           \
    }                                                                             \
    ar_status ar_##name##_backward(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x) \
    {                                                                             \
        return backward;                                                          \
    }
CONJUGATE(copy_to_region, copy(ctx, y, x), sum(ctx, y, x, "copy_to_region backward"))
CONJUGATE(reduce_from_region, sum(ctx, y, x, "reduce_from_region"), copy(ctx, y, x))
CONJUGATE(gather_from_region, ari_gather_features(ctx, y, x, "gather_from_region"), ari_own_features(ctx, y, x))
CONJUGATE(scatter_to_region, ari_own_features(ctx, y, x), ari_gather_features(ctx, y, x, "scatter_to_region backward"))
CONJUGATE(gather_tokens, ari_gather_tokens(ctx, y, x, "gather_tokens"),
          scatter_tokens(ctx, y, x, "gather_tokens backward"))
CONJUGATE(scatter_tokens, scatter_tokens(ctx, y, x, "scatter_tokens"),
          ari_gather_tokens(ctx, y, x, "scatter_tokens backward"))
