/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/faults.h"
#include "ref/layers/linear.h"
#include "ref/layers/parts.h"
#include "ref/layers/sequence.h"

static size_t sum_of(const size_t *v, int n)
{
    size_t total = 0;
    for (int i = 0; i < n; i++)
        total += v[i];
    return total;
}

/* --- dX ----------------------------------------------------------------------------------------------------------- */

/* The weights whose part of dX this rank counts: of those that several ranks hold, the first rank's alone. Gives their
 * parts of dy. Returns how many; the other weights come after them. */
static int counted_weights(ari_linear *l, ar_param **weight, ar_parts *dy_parts, const ar_tensor *dy)
{
    int n = 0, others = 0;
    for (int i = 0; i < l->n; i++) {
        if (l->weight[i]->layout.replica > 0)
            continue;
        dy_parts->part[n] = ari_linear_part_of(l, dy, i);
        weight[n++] = l->weight[i];
    }
    for (int i = 0; i < l->n; i++) {
        if (l->weight[i]->layout.replica > 0)
            weight[n + others++] = l->weight[i];
    }
    dy_parts->n = n;
    return n;
}

/* dX's rows from their sum over the group. scattered: the own rows of the `all` that there are. */
static ar_status complete(ar_ctx *ctx, const ar_tensor *dx_rows, ar_sum *s, size_t all, bool scattered, const char *tag)
{
    if (ar_faulty(ctx, AR_FAULT_column_dx_not_reduced))
        return ari_fault_partial_dx(ctx, dx_rows, s, all, tag);
    AR_TRY(ctx->arith->fold(ctx, s, ctx->tp, scattered ? AR_SCATTER_ROWS : AR_ALL, tag));
    return ctx->arith->round(ctx, dx_rows, s, NULL);
}

/* dX = sum over the group's weights and, column-parallel, over the ranks. */
static ar_status input_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, size_t features)
{
    const bool row = l->style == ARI_ROW, scattered = !row && l->sequence;
    const char *tag = l->weight[0]->name;
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    ar_parts parts = {.along_k = true};
    ar_param *weight[AR_MAX_PARTS];
    ar_tensor rows = ar_tensor_rows(dy);
    if (scattered)
        AR_TRY(ari_rank_major(ctx, &rows, dy));
    AR_TRY(scattered ? ari_like_own_tokens(ctx, dx, dy, features) : ari_like(ctx, dx, dy, features));
    const int counted = counted_weights(l, weight, &parts, &rows);
    AR_TRY(ctx->arith->param_operand(ctx, &b, weight, counted, l->n, true, sum_of(l->out, l->n), row ? NULL : ctx->tp,
                                     row ? ctx->tp : NULL));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, tag));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    const ar_tensor dx_rows = ar_tensor_rows(dx);
    AR_TRY(row ? ctx->arith->round(ctx, &dx_rows, s, NULL) : complete(ctx, &dx_rows, s, rows.shape[0], scattered, tag));
    ctx->arith->operand_done(ctx, a);
    ari_release_rows(ctx, &rows, dy);
    return AR_OK;
}

/* dx as X was given: of a row-parallel group whose input was whole, all features of (with `sequence`: the own)
 * positions. */
static ar_status whole_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, size_t features)
{
    ar_tensor slice, wide;
    AR_TRY(input_gradient(l, ctx, &slice, dy, features));
    AR_TRY(ar_faulty(ctx, AR_FAULT_row_input_grad_not_gathered)
               ? ari_fault_narrow_dx(ctx, &wide, &slice)
               : ari_gather_features(ctx, &wide, &slice, l->weight[0]->name));
    ar_ctx_release(ctx, &slice);
    *dx = wide;
    if (!l->sequence)
        return AR_OK;
    AR_TRY(ari_own_tokens(ctx, dx, &wide));
    ar_ctx_release(ctx, &wide);
    return AR_OK;
}

static ar_status tap_gradient(const ari_linear *l, ar_ctx *ctx, const char *name, const ar_tensor *dx)
{
    if (l->style == ARI_ROW && l->input_is_sharded)
        return ari_tap_shard(ctx, name, NULL, 'b', dx, dx->ndim - 1, l->in);
    return l->sequence ? ari_tap_tokens(ctx, name, NULL, 'b', dx) : ari_tap_whole(ctx, name, NULL, 'b', dx);
}

/* --- gradients of the parameters ---------------------------------------------------------------------------------- */

static ar_status bias_gradient(ari_linear *l, ar_ctx *ctx, int i, ar_tensor dy)
{
    AR_TRY(ari_fault_bias_rows(ctx, l->style == ARI_ROW, &dy));
    return ctx->arith->grad_rows(ctx, &l->bias[i], &dy, (ar_cbuf){NULL});
}

/* x, dy: all positions. bias_dy: those that this rank's biases have met. */
static ar_status parameter_gradients(ari_linear *l, ar_ctx *ctx, const ar_tensor *x, const ar_tensor *dy,
                                     const ar_tensor *bias_dy)
{
    size_t samples = ar_ctx_samples(ctx, x);
    ar_tensor x_rows = ar_tensor_rows(x), dy_rows = ar_tensor_rows(dy);
    ari_fault_weight_rows(ctx, x, &x_rows, &dy_rows, &samples);
    const ar_tensor bias_rows = ar_tensor_rows(bias_dy);
    for (int i = 0; i < l->n; i++) {
        const ar_tensor dy_i = ari_linear_part_of(l, &dy_rows, i);
        AR_TRY(ctx->arith->grad_contract(ctx, l->weight[i], &dy_i, &x_rows, samples,
                                         l->style == ARI_ROW ? ctx->tp : NULL, l->weight[i]->name));
        if (l->has_bias)
            AR_TRY(bias_gradient(l, ctx, i, ari_linear_part_of(l, &bias_rows, i)));
    }
    return AR_OK;
}

ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const char *name)
{
    const bool row = l->style == ARI_ROW, gather_dy = row && l->sequence;
    const bool gather_x = !row && l->sequence && !ctx->keep_gathered;
    ar_tensor x, all_dy = *dy;
    AR_TRY(ar_saved_pop(saved, l, 0, &x));
    AR_TRY(ari_check_features(l->weight[0]->name, "gradient", dy, l->local_total));
    if (gather_dy)
        AR_TRY(ari_gather_tokens(ctx, &all_dy, dy, l->weight[0]->name));
    if (dx) {
        const size_t features = x.shape[x.ndim - 1];
        AR_TRY(row && !l->input_is_sharded ? whole_gradient(l, ctx, dx, &all_dy, features)
                                           : input_gradient(l, ctx, dx, &all_dy, features));
        AR_TRY(tap_gradient(l, ctx, name, dx));
    }
    ar_tensor all_x = x;
    if (gather_x)
        AR_TRY(ari_gather_tokens(ctx, &all_x, &x, l->weight[0]->name));
    AR_TRY(parameter_gradients(l, ctx, &all_x, &all_dy, dy));
    if (gather_x)
        ar_ctx_release(ctx, &all_x);
    if (gather_dy)
        ar_ctx_release(ctx, &all_dy);
    return AR_OK;
}
