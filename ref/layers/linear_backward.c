/* SPDX-License-Identifier: Apache-2.0 */
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

/* dx from a sum over the group, or, a mistake, from this rank's part of it alone. scattered: dx has the own rows. */
static ar_status finish(ar_ctx *ctx, const ar_tensor *dx, ar_sum *s, size_t rows, bool scattered, const char *tag)
{
    const ar_tensor own = ar_tensor_rows(dx);
    const bool partial = ar_faulty(ctx, AR_FAULT_column_dx_not_reduced);
    const ar_fold how = scattered ? AR_SCATTER_ROWS : AR_ALL;
    AR_TRY(ctx->arith->fold(ctx, s, ctx->tp, partial ? AR_KEEP : how, tag));
    if (!partial || !scattered)
        return ctx->arith->round(ctx, &own, s, NULL);
    const size_t shape[2] = {rows, own.shape[1]}, bytes = ar_tensor_count(&own) * sizeof(float);
    ar_tensor all;
    AR_TRY(ar_ctx_tensor(ctx, &all, AR_F32, 2, shape));
    AR_TRY(ctx->arith->round(ctx, &all, s, NULL));
    return ctx->device->ops->copy(ctx->device, ctx->queue, dx->data,
                                  ar_cbuf_at(ar_const(all.data), (size_t)ar_comm_rank(ctx->tp) * bytes), bytes);
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
    if (row) {
        const ar_tensor dx_rows = ar_tensor_rows(dx);
        AR_TRY(ctx->arith->round(ctx, &dx_rows, s, NULL));
    } else {
        AR_TRY(finish(ctx, dx, s, rows.shape[0], scattered, tag));
    }
    ctx->arith->operand_done(ctx, a);
    ari_release_rows(ctx, &rows, dy);
    return AR_OK;
}

/* The full gradient of a replicated input: every rank's slice, or (a mistake) only the own one among zeros. */
static ar_status widen_gradient(ar_ctx *ctx, ar_tensor *dx, ar_tensor *slice, const char *tag)
{
    if (!ar_faulty(ctx, AR_FAULT_row_input_grad_not_gathered))
        return ari_gather_features(ctx, dx, slice, tag);
    const size_t n = (size_t)ar_comm_size(ctx->tp), width = slice->shape[slice->ndim - 1];
    AR_TRY(ari_like(ctx, dx, slice, n * width));
    AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, dx->data, 0.0f, ar_tensor_count(dx)));
    const ar_tensor to = ar_tensor_rows(dx), from = ar_tensor_rows(slice);
    const ar_tensor own = ar_tensor_slice(&to, 1, (size_t)ar_comm_rank(ctx->tp) * width, width);
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &own, &from);
}

/* dx as X was given: of a row-parallel group whose input was whole, all features of (with `sequence`: the own)
 * positions. */
static ar_status whole_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, size_t features)
{
    ar_tensor slice, wide;
    AR_TRY(input_gradient(l, ctx, &slice, dy, features));
    AR_TRY(widen_gradient(ctx, &wide, &slice, l->weight[0]->name));
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

/* A mistake sums over features: token t's sum lands in element t. */
static ar_status sum_features(ar_ctx *ctx, ar_tensor *dy)
{
    const size_t tokens = dy->shape[0] < dy->shape[1] ? dy->shape[0] : dy->shape[1];
    const size_t shape[2] = {dy->shape[1], dy->shape[1]};
    ar_tensor zeros;
    AR_TRY(ar_ctx_tensor(ctx, &zeros, AR_F32, 2, shape));
    AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, zeros.data, 0.0f, shape[0] * shape[1]));
    const ar_tensor swapped = ar_tensor_transposed(dy);
    const ar_tensor from = ar_tensor_slice(&swapped, 1, 0, tokens), wrong = ar_tensor_slice(&zeros, 1, 0, tokens);
    *dy = zeros;
    return ctx->device->ops->copy_strided(ctx->device, ctx->queue, &wrong, &from);
}

/* A mistake takes a row-parallel bias for one that each rank has a part of. */
static ar_status divide_by_ranks(ar_ctx *ctx, ar_tensor *dy)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t n = ar_tensor_count(dy);
    ar_tensor part, factor;
    AR_TRY(ari_like(ctx, &part, dy, dy->shape[1]));
    AR_TRY(ari_like(ctx, &factor, dy, dy->shape[1]));
    AR_TRY(dev->copy_strided(ctx->device, ctx->queue, &part, dy));
    AR_TRY(dev->fill(ctx->device, ctx->queue, factor.data, 1.0f / (float)ar_comm_size(ctx->tp), n));
    *dy = part;
    return dev->mul(ctx->device, ctx->queue, part.data, ar_const(part.data), ar_const(factor.data), n);
}

static ar_status bias_gradient(ari_linear *l, ar_ctx *ctx, int i, ar_tensor dy)
{
    if (ar_faulty(ctx, AR_FAULT_bias_grad_wrong_axis))
        AR_TRY(sum_features(ctx, &dy));
    if (l->style == ARI_ROW && ar_faulty(ctx, AR_FAULT_row_bias_partial_grad))
        AR_TRY(divide_by_ranks(ctx, &dy));
    return ctx->arith->grad_rows(ctx, &l->bias[i], &dy, (ar_cbuf){NULL});
}

/* x, dy: all positions. bias_dy: those that this rank's biases have met. */
static ar_status parameter_gradients(ari_linear *l, ar_ctx *ctx, const ar_tensor *x, const ar_tensor *dy,
                                     const ar_tensor *bias_dy)
{
    size_t samples = ar_ctx_samples(ctx, x);
    ar_tensor x_rows = ar_tensor_rows(x), dy_rows = ar_tensor_rows(dy);
    if (samples > 1 && x->ndim > 2 && ar_faulty(ctx, AR_FAULT_weight_grad_leading_dims)) {
        x_rows = ar_tensor_slice(&x_rows, 0, 0, x->shape[x->ndim - 2]);
        dy_rows = ar_tensor_slice(&dy_rows, 0, 0, x->shape[x->ndim - 2]);
        samples = 1;
    }
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
