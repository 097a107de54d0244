/* SPDX-License-Identifier: Apache-2.0 */
/* Products of user-defined layers with a weight that is whole, or cut over the tensor-parallel ranks. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

/* --- sums that an operator completes ------------------------------------------------------------------------------ */

/* A product whose terms are on several ranks. In exact numerics they are integers, which have no value of their own
 * until they are added up: the operator that follows does that. */
typedef struct ari_unsummed {
    struct ari_unsummed *next;
    void *ptr; /* memory of the tensor that stands for them */
    ar_sum *sum;
    const ar_operand *a;
    bool scattered; /* rows are in the order of the ranks that hold the positions */
} ari_unsummed;

static void unsummed_end(ar_ctx *ctx, void *object)
{
    ari_unsummed *t = object;
    for (ari_unsummed **at = &ctx->unsummed; *at; at = &(*at)->next) {
        if (*at == t) {
            *at = t->next;
            break;
        }
    }
    free(t);
}

/* y stands for the sum from here on: NaN until an operator takes it. */
static ar_status unsummed_begin(ar_ctx *ctx, const ar_tensor *y, ar_sum *sum, const ar_operand *a, bool scattered)
{
    ari_unsummed *t = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&t, 1, "terms of a product"));
    *t = (ari_unsummed){.next = ctx->unsummed, .ptr = y->data.ptr, .sum = sum, .a = a, .scattered = scattered};
    ctx->unsummed = t;
    AR_TRY(ari_step_own(ctx, t, unsummed_end));
    return ARI_KERNEL(ctx, scale, y, y, NAN);
}

static ar_status unsummed_fold(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ari_unsummed *t, ar_placement to,
                               const char *tag)
{
    const bool scatters = ari_placed_by_tokens(to);
    if (scatters != t->scattered || (!scatters && !ari_placed_whole(to)))
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the terms of a product are added up by ar_leave_region, those of its dX by "
                            "ar_enter_region_backward",
                            tag);
    AR_TRY(scatters ? ari_like_own_tokens(ctx, y, x, x->shape[x->ndim - 1]) : ar_like(ctx, y, x));
    const ar_tensor rows = ar_tensor_rows(y);
    AR_TRY(ctx->arith->fold(ctx, t->sum, ctx->queue, ctx->tp, scatters ? AR_SCATTER_ROWS : AR_ALL, tag));
    AR_TRY(ctx->arith->round(ctx, &rows, t->sum, NULL));
    ctx->arith->operand_done(ctx, t->a);
    ari_step_disown(ctx, t);
    return AR_OK;
}

ar_status ari_unsummed_take(bool *taken, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_placement to,
                            const char *tag)
{
    *taken = false;
    for (ari_unsummed *t = ctx->unsummed; t; t = t->next) {
        if (t->ptr != x->data.ptr)
            continue;
        *taken = true;
        return unsummed_fold(ctx, y, x, t, to, tag);
    }
    return AR_OK;
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The group over which dimension `dim` of a weight is cut; NULL: every rank has all of it. */
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

/* x, by rows, times W^T (forward) or W (back): K is W's input or output. */
static ar_status multiply_weight(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_param *w, bool back)
{
    const int k = back ? 0 : 1;
    const ar_placement whole = {AR_REPLICATE, 0}, terms = {AR_PARTIAL_SUM, 0};
    ar_comm *const over = cut_over(w, ctx, k), *const rows_over = cut_over(w, ctx, 1 - k);
    /* One that is cut sees all positions. */
    const ar_placement stream = x->ndim > 2 && !over && !rows_over ? ari_placed_stream(ctx) : whole;
    const ar_placement takes = over ? ari_shard_features : stream;
    const ar_placement makes = over ? terms : rows_over ? ari_shard_features : stream;
    const bool scattered = over && ari_ctx_sp(ctx) && x->ndim > 2;
    const ar_operand *a = NULL, *b = NULL;
    ar_tensor all = ar_tensor_rows(x);
    ar_sum *s = NULL;
    AR_TRY(ari_check_features(w->name, back ? "gradient" : "input", x, w->value.shape[k]));
    AR_TRY(ari_ledger_takes(ctx, w->name, "contract", x, takes, NULL, makes));
    AR_TRY(ari_like(ctx, y, x, w->value.shape[1 - k]));
    if (scattered)
        AR_TRY(ari_rank_major(ctx, &all, x));
    const ar_parts parts = {.n = 1, .part = {all}, .along_k = back};
    AR_TRY(ctx->arith->param_operand(ctx, &b, &w, 1, 1, back, w->layout.shape[k], over, rows_over));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, w->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    AR_TRY(ari_ledger_made(ctx, y, makes));
    if (over)
        return unsummed_begin(ctx, y, s, a, scattered);
    const ar_tensor rows = ar_tensor_rows(y);
    AR_TRY(ctx->arith->round(ctx, &rows, s, NULL));
    ctx->arith->operand_done(ctx, a);
    return AR_OK;
}

ar_status ar_contract(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, ar_param *w)
{
    AR_TRY(check_matrix(w, ctx));
    return multiply_weight(ctx, y, x, w, false);
}

/* All positions of a value of which this rank has its own: a sample's tokens are one exact sum. */
static ar_status all_positions(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, const ar_param *w)
{
    *y = *x;
    if (!ari_ctx_sp(ctx) || x->ndim < 3 || cut_over(w, ctx, 0) || cut_over(w, ctx, 1))
        return AR_OK;
    return ar_gather_tokens(ctx, y, x);
}

ar_status ar_contract_backward(ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x, ar_param *w)
{
    const ar_placement whole = {AR_REPLICATE, 0};
    ar_tensor x_all, dy_all;
    AR_TRY(check_matrix(w, ctx));
    if (dx)
        AR_TRY(multiply_weight(ctx, dx, dy, w, true));
    AR_TRY(ari_check_features(w->name, "gradient", dy, w->value.shape[0]));
    AR_TRY(all_positions(ctx, &x_all, x, w));
    AR_TRY(all_positions(ctx, &dy_all, dy, w));
    if (!dx)
        AR_TRY(ari_ledger_gradient(ctx, w->name, &dy_all, cut_over(w, ctx, 0) ? ari_shard_features : whole));
    const ar_grad_terms terms = {w, ar_tensor_rows(&dy_all)};
    const ar_tensor x_rows = ar_tensor_rows(&x_all);
    AR_TRY(ctx->arith->grad_contract(ctx, &terms, 1, &x_rows, ar_ctx_samples(ctx, &x_all), cut_over(w, ctx, 1)));
    ari_release_placed(ctx, &x_all, x);
    ari_release_placed(ctx, &dy_all, dy);
    return AR_OK;
}
