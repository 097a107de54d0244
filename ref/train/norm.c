/* SPDX-License-Identifier: Apache-2.0 */
/* Computes the gradient norm. In either arithmetic it is a sum of integers, so the layout does not change it. */
#include <string.h>

#include "anyrank/param.h"
#include "anyrank/train.h"
#include "ref/context/context_private.h"
#include "ref/layers/parts.h"
#include "ref/record/ledger.h"
#include "ref/train/optimizer.h"

/* This rank's sum of squared gradients, on the device. */
typedef struct norm_sum {
    ar_tensor exponent; /* int32 [1] the largest exponent */
    ar_tensor squares;  /* int64 [2] */
    bool shares;        /* true if data-parallel ranks have shards of the gradients (ZeRO) or different experts */
} norm_sum;

typedef ar_status (*gradient_fn)(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g);

static ar_status raise_exponent(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g)
{
    const size_t shape[2] = {1, ar_tensor_count(g)};
    ar_tensor row;
    AR_TRY(ar_tensor_view(&row, AR_F32, 2, shape, g->data));
    return ARI_KERNEL(ctx, row_exponents, s->exponent.data, &row, (ar_cbuf){NULL}, +1, true, false);
}

static ar_status add_squares(const norm_sum *s, ar_ctx *ctx, const ar_tensor *g)
{
    return ARI_KERNEL(ctx, sum_squares, s->squares.data, g, ar_const(s->exponent.data));
}

/* Returns true if this rank counts a parameter's elements, or its shard of them: it is the first rank of a group with
 * the same elements. With the fault of taking shards for copies, only the group's first rank counts its elements. */
static bool counts(const ar_param *p, const ar_ctx *ctx)
{
    const bool copies = ari_faulty(ctx, "gradnorm_counts_replicas") || ari_faulty(ctx, "gradnorm_mean_of_ranks");
    if (ar_comm_rank(ctx->tp) > 0 && ari_faulty(ctx, "gradnorm_first_rank_only"))
        return false;
    if (strstr(p->name, ".experts.") && ari_faulty(ctx, "gradnorm_without_experts"))
        return false;
    if (p->ends && ar_comm_rank(ctx->pipeline) > 0) /* the first stage's copy counts */
        return false;
    return p->requires_grad && (p->layout.replica == 0 || copies);
}

/* Adds one parameter's gradient, or this rank's shard of it. */
static ar_status add_param_norm(const norm_sum *s, ar_ctx *ctx, const ar_param *p, gradient_fn f)
{
    ar_tensor g, share;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_param_grad_value(p, ctx, &g));
    if (!p->sharded) {
        AR_TRY(f(s, ctx, &g));
    } else {
        AR_TRY(ar_ctx_tensor(ctx, &share, AR_F32, 1, &p->own_count));
        AR_TRY(ari_share_get(ctx, share.data, p, &g, p->own_start, p->own_count));
        AR_TRY(f(s, ctx, &share));
        ar_ctx_release(ctx, &share);
    }
    ar_ctx_release(ctx, &g);
    return AR_OK;
}

/* Calls f for each gradient to be counted. Parameters that data-parallel ranks do not shard are equal on all ranks, or
 * on those with the same experts; if other parameters are sharded, only rank 0 of these ranks counts them. */
static ar_status for_each_gradient(const norm_sum *s, ar_ctx *ctx, ar_param *const *params, size_t n, gradient_fn f)
{
    for (size_t i = 0; i < n; i++) {
        const bool is_counted =
            params[i]->sharded || !s->shares || ar_comm_rank(ari_ctx_shard(ctx, params[i]->expert)) == 0;
        if (is_counted && counts(params[i], ctx))
            AR_TRY(add_param_norm(s, ctx, params[i], f));
    }
    return AR_OK;
}

static bool any_sharded(ar_param *const *params, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (params[i]->sharded)
            return true;
    }
    return false;
}

/* Reduces over the ranks that hold parts of the gradients. */
static ar_status reduce_norm(const norm_sum *s, ar_ctx *ctx, const ar_tensor *t, ar_op op)
{
    const bool is_local = ari_faulty(ctx, "gradnorm_mean_of_ranks") && op == AR_SUM;
    if (ari_faulty(ctx, "gradnorm_local_clip"))
        return AR_OK;
    const size_t count = ar_tensor_count(t);
    if (!is_local)
        AR_TRY(ar_comm_all_reduce(ctx->tp, ctx->queue, t->data, ar_const(t->data), count, t->dtype, op, "grad_norm"));
    AR_TRY(ar_comm_all_reduce(ctx->pipeline, ctx->queue, t->data, ar_const(t->data), count, t->dtype, op, "grad_norm"));
    if (!s->shares)
        return AR_OK;
    return ar_comm_all_reduce(ctx->shard, ctx->queue, t->data, ar_const(t->data), count, t->dtype, op, "grad_norm");
}

ar_status ar_gradient_norm(float *norm, ar_ctx *ctx, ar_param *const *params, size_t n)
{
    const size_t scalar_shape = 1, pair_shape = 2;
    int32_t e = ARI_EXP_ZERO;
    int64_t squares[2] = {0, 0};
    /* Pipeline stages add up their sums, and all do so in the same way, with or without experts. */
    norm_sum s = {.shares = any_sharded(params, n) || ctx->edp != ctx->dp};
    AR_TRY(ar_ctx_tensor(ctx, &s.exponent, AR_I32, 1, &scalar_shape));
    AR_TRY(ar_ctx_tensor(ctx, &s.squares, AR_I64, 1, &pair_shape));
    AR_TRY(ar_ctx_upload(ctx, &s.exponent, &e));
    AR_TRY(ar_ctx_upload(ctx, &s.squares, squares));
    AR_TRY(for_each_gradient(&s, ctx, params, n, raise_exponent));
    AR_TRY(reduce_norm(&s, ctx, &s.exponent, AR_MAX));
    AR_TRY(for_each_gradient(&s, ctx, params, n, add_squares));
    AR_TRY(reduce_norm(&s, ctx, &s.squares, AR_SUM));
    AR_TRY(ar_ctx_download(ctx, &e, &s.exponent));
    AR_TRY(ar_ctx_download(ctx, squares, &s.squares));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_GRADIENT_NORM, .name = "", .param = params, .params = n));
    ARI_RELEASE(ctx, &s.squares, &s.exponent);
    *norm = ari_norm_value(squares[0], squares[1], e);
    if (ari_faulty(ctx, "gradnorm_mean_of_ranks")) {
        AR_TRY(ari_combine(ctx, ctx->tp, norm, 1, AR_F32, AR_SUM, "grad_norm"));
        *norm /= (float)ar_comm_size(ctx->tp);
    }
    return AR_OK;
}
