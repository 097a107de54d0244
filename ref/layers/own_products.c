/* SPDX-License-Identifier: Apache-2.0 */
/* Products of user-defined layers with a weight that is replicated or divided over the tensor-parallel ranks. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/tensor_private.h"
#include "ref/layers/module_private.h"
#include "ref/layers/parts.h"

/* --- sums that an operator completes ------------------------------------------------------------------------------ */

/* Product whose terms are on several ranks. In exact numerics they are integers without a value until they are summed,
 * which the following operator does. */
typedef struct ari_unsummed {
    struct ari_unsummed *next;
    const char *name; /* the weight's */
    void *ptr;        /* memory of the tensor that stands for the terms */
    ar_sum *sum;
    const ar_operand *a, *b;
    bool scattered; /* true if rows are ordered by the ranks that hold their positions */
} ari_unsummed;

static void unsummed_end(ar_ctx *ctx, void *object)
{
    ari_unsummed *t = object;
    for (ari_unsummed **link = &ctx->unsummed; *link; link = &(*link)->next) {
        if (*link == t) {
            *link = t->next;
            break;
        }
    }
    free(t);
}

/* Lets y stand for the sum: it is NaN until an operator uses it. */
static ar_status unsummed_begin(ar_ctx *ctx, const char *name, const ar_tensor *y, ar_sum *sum, const ar_operand *a,
                                const ar_operand *b, bool scattered)
{
    ari_unsummed *t = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&t, 1, "terms of a product"));
    *t = (ari_unsummed){
        .next = ctx->unsummed, .name = name, .ptr = y->data.ptr, .sum = sum, .a = a, .b = b, .scattered = scattered};
    ctx->unsummed = t;
    AR_TRY(ari_step_own(ctx, t, unsummed_end));
    return ARI_KERNEL(ctx, scale, y, y, NAN);
}

static ar_status unsummed_fold(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ari_unsummed *t,
                               ar_placement to_placement, const char *tag)
{
    const bool scatters = ari_placed_by_tokens(to_placement);
    if (scatters != t->scattered || (!scatters && !ari_placed_full(to_placement)))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the terms of a product are added up by ar_leave_region, those of its dX by "
                            "ar_enter_region_backward",
                            tag);
    AR_TRY(scatters ? ari_like_own_tokens(ctx, y, x, x->shape[x->ndim - 1]) : ar_like(ctx, y, x));
    const ar_tensor rows = ari_tensor_rows(y);
    AR_TRY(ctx->arith->fold(ctx, t->sum, ctx->queue, ctx->tp, scatters ? AR_SCATTER_ROWS : AR_ALL, tag));
    AR_TRY(ctx->arith->round(ctx, &rows, t->sum, NULL));
    ctx->arith->operand_done(ctx, t->a);
    ctx->arith->operand_done(ctx, t->b);
    ari_step_disown(ctx, t);
    return AR_OK;
}

ar_status ari_unsummed_take(bool *is_folded, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_placement to_placement,
                            const char *tag)
{
    *is_folded = false;
    for (ari_unsummed *t = ctx->unsummed; t; t = t->next) {
        if (t->ptr != x->data.ptr)
            continue;
        *is_folded = true;
        return unsummed_fold(ctx, y, x, t, to_placement, tag);
    }
    return AR_OK;
}

ar_status ari_unsummed_refuse(const ar_ctx *ctx, const ar_tensor *x, const char *operation)
{
    for (const ari_unsummed *t = ctx->unsummed; t && x && !(ctx->ledger && !ctx->ledger->strict); t = t->next) {
        if (t->ptr == x->data.ptr)
            return ar_error_set(
                AR_ERR_ARG,
                "%s takes the product with %s, whose terms have no value until ar_leave_region, or of a "
                "dX ar_enter_region_backward, has added them up (the dX of several weights: ar_contract_backward_all)",
                operation, t->name);
    }
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Returns the group over which dimension `dim` of a weight is sharded; NULL: every rank has all of it. */
static ar_comm *cut_over(const ar_param *w, const ar_ctx *ctx, int dim)
{
    return w->value.shape[dim] != w->layout.shape[dim] ? ctx->tp : NULL;
}

static ar_status check_matrix(const ar_param *w, const ar_ctx *ctx)
{
    if (w->value.ndim == 2 && w->layout.nbox == 1 && !w->transposed && !(cut_over(w, ctx, 0) && cut_over(w, ctx, 1)))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: a product takes a matrix that is whole, or cut along one dimension",
                        w->name);
}

static ar_status check_matrices(ar_param *const *w, const ar_tensor *dy, size_t n, const ar_ctx *ctx)
{
    if (n < 1 || n > AR_MAX_PARTS)
        return ar_error_set(AR_ERR_ARG, "a product with %zu weights, expected 1 to %d", n, AR_MAX_PARTS);
    for (size_t i = 0; i < n; i++) {
        AR_TRY(check_matrix(w[i], ctx));
        if (w[i]->value.shape[1] != w[0]->value.shape[1] || cut_over(w[i], ctx, 0) != cut_over(w[0], ctx, 0) ||
            cut_over(w[i], ctx, 1) != cut_over(w[0], ctx, 1))
            return ar_error_set(AR_ERR_SHAPE, "%s and %s: expected weights of one input, cut in the same way or not",
                                w[0]->name, w[i]->name);
        AR_TRY(ari_check_features(w[i]->name, "gradient", &dy[i], w[i]->value.shape[0]));
    }
    return AR_OK;
}

/* Multiplies x, by rows, with W^T (forward) or W (back); K is W's input or output. back: the sum of n such products
 * x[i] w[i], computed as one product over all K. */
static ar_status multiply_weight(ar_ctx *ctx, ar_tensor *y, const ar_tensor *xs, ar_param *const *ws, size_t n,
                                 bool back)
{
    ar_param *const w = ws[0];
    const ar_tensor *const x = &xs[0];
    const int k = back ? 0 : 1;
    const ar_placement terms = {AR_PARTIAL_SUM, 0};
    ar_comm *const group = cut_over(w, ctx, k), *const rows_over = cut_over(w, ctx, 1 - k);
    /* a divided weight multiplies all positions */
    const ar_placement stream = x->ndim > 2 && !group && !rows_over ? ari_placed_stream(ctx) : ari_replicated;
    const ar_placement input_placement = group ? ari_shard_features : stream;
    const ar_placement output_placement = group ? terms : rows_over ? ari_shard_features : stream;
    const bool scattered = group && ari_ctx_sp(ctx) && x->ndim > 2;
    const ar_operand *a = NULL, *b = NULL;
    ar_parts parts = {.n = (int)n, .along_k = back};
    size_t k_full = 0;
    ar_sum *s = NULL;
    for (size_t i = 0; i < n; i++) {
        AR_TRY(ari_check_features(ws[i]->name, back ? "gradient" : "input", &xs[i], ws[i]->value.shape[k]));
        AR_TRY(ari_unsummed_refuse(ctx, &xs[i], "a product"));
        parts.part[i] = ari_tensor_rows(&xs[i]);
        if (scattered)
            AR_TRY(ari_rank_major(ctx, &parts.part[i], &xs[i]));
        k_full += ws[i]->layout.shape[k];
    }
    AR_TRY(ari_like(ctx, y, x, w->value.shape[1 - k]));
    AR_TRY(ctx->arith->param_operand(ctx, &b, ws, (int)n, (int)n, back ? AR_USE_BACKWARD : AR_USE_FORWARD, k_full,
                                     group, rows_over));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, w->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_PRODUCT, .operation = "contract", .name = w->name,
                    .input = {x, n > 1 ? &xs[1] : NULL, n > 2 ? &xs[2] : NULL}, .out = {y}, .param = ws, .params = n,
                    .input_placement = &input_placement, .output_placement = &output_placement));
    if (group)
        return unsummed_begin(ctx, w->name, y, s, a, b, scattered);
    const ar_tensor rows = ari_tensor_rows(y);
    AR_TRY(ctx->arith->round(ctx, &rows, s, NULL));
    ctx->arith->operand_done(ctx, a);
    ctx->arith->operand_done(ctx, b);
    return AR_OK;
}

ar_status ar_contract(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_param *w)
{
    const ar_tensor input = *x; /* y may be x */
    AR_TRY(check_matrix(w, ctx));
    return multiply_weight(ctx, y, &input, &w, 1, false);
}

/* Gathers all positions of a value of which this rank has its own, because a sample's tokens form one exact sum. */
static ar_status all_positions(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ar_param *w)
{
    *y = *x;
    if (!ari_ctx_sp(ctx) || x->ndim < 3 || cut_over(w, ctx, 0) || cut_over(w, ctx, 1))
        return AR_OK;
    return ar_gather_tokens(ctx, y, x);
}

/* Adds dY^T X to W's gradient. alone: no product has declared how dY is placed. */
static ar_status add_gradient(ar_ctx *ctx, const ar_tensor *dy, const ar_tensor *x, ar_param *w, bool alone)
{
    ar_tensor x_all, dy_all;
    AR_TRY(all_positions(ctx, &x_all, x, w));
    AR_TRY(all_positions(ctx, &dy_all, dy, w));
    const ar_placement dy_placement = cut_over(w, ctx, 0) ? ari_shard_features : ari_replicated;
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_WEIGHT_GRADIENT, .name = w->name, .input = {&dy_all, &x_all}, .param = &w,
                    .params = 1, .input_placement = alone ? &dy_placement : NULL));
    const ar_grad_terms terms = {w, ari_tensor_rows(&dy_all)};
    const ar_tensor x_rows = ari_tensor_rows(&x_all);
    AR_TRY(ctx->arith->grad_contract(ctx, &terms, 1, &x_rows, ari_ctx_samples(ctx, &x_all), cut_over(w, ctx, 1)));
    ari_release_placed(ctx, &x_all, x);
    ari_release_placed(ctx, &dy_all, dy);
    return AR_OK;
}

ar_status ar_contract_backward_all(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                                   ar_param *const *w, size_t n)
{
    ar_tensor gradient[AR_MAX_PARTS];
    const ar_tensor input = *x; /* dx may be x or of dy */
    AR_TRY(check_matrices(w, dy, n, ctx));
    memcpy(gradient, dy, n * sizeof *dy);
    if (dx)
        AR_TRY(multiply_weight(ctx, dx, gradient, w, n, true));
    for (size_t i = 0; i < n; i++)
        AR_TRY(add_gradient(ctx, &gradient[i], &input, w[i], dx == NULL));
    return AR_OK;
}

ar_status ar_contract_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x, ar_param *w)
{
    return ar_contract_backward_all(ctx, dx, dy, x, &w, 1);
}
