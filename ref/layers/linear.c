/* SPDX-License-Identifier: Apache-2.0 */
/* A parallel linear layer: its parameters, Y = X W^T + b, and the gradients of X, W and b. */
#include "ref/layers/linear.h"

#include "ref/layers/faults.h"
#include "ref/layers/parts.h"

/* --- parameters --------------------------------------------------------------------------------------------------- */

/* The blocks of a dimension of a column-parallel part: each is cut by itself. Returns how many. */
static int blocks_of(size_t block[AR_MAX_PARTS], const ari_linear_part *part, size_t extent)
{
    const int blocks = part->blocks > 0 ? part->blocks : 1;
    for (int i = 0; i < blocks; i++)
        block[i] = extent / (size_t)blocks;
    return blocks;
}

/* The part of a column-parallel dimension that this rank holds, and which copy of it. */
static ar_status column_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_part *part, int ndim, const size_t *shape,
                               int dim)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp), copies = part->copies > 1 ? part->copies : 1;
    size_t block[AR_MAX_PARTS];
    const int blocks = blocks_of(block, part, shape[dim]);
    if (ar_layout_packed(o, ndim, shape, dim, block, blocks, r / copies, n / copies) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its output dimension of %zu cannot be split over %d ranks; use a tp that divides it",
            part->name, block[0], n / copies);
    o->replica = r % copies;
    o->replicas = copies;
    return AR_OK;
}

/* Shards the weight along its output (column) or input (row) dimension, wherever its storage has that. */
static ar_status weight_layout(ar_layout *o, ar_ctx *ctx, const ari_linear_spec *s, const ari_linear_part *part)
{
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    const size_t shape[2] = {s->transposed ? s->in : part->out, s->transposed ? part->out : s->in};
    const int dim = (s->style == ARI_COLUMN) == s->transposed ? 1 : 0;
    if (s->style == ARI_WHOLE)
        return ar_layout_replicate(o, 2, shape, r, n);
    if (s->uneven)
        return ar_layout_shard_uneven(o, 2, shape, dim, r, n);
    if (s->style == ARI_COLUMN)
        return column_layout(o, ctx, part, 2, shape, dim);
    if (ar_layout_shard(o, 2, shape, dim, r, n) != AR_OK)
        return ar_error_set(
            AR_ERR_INDIVISIBLE,
            "%s.weight: its input dimension of %zu cannot be split over %d ranks; use a tp that divides it", part->name,
            shape[dim], n);
    return AR_OK;
}

static ar_status init_weight(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    if (part->tied) {
        l->weight[i] = part->tied;
        part->tied->uses++;
        return AR_OK;
    }
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "weight"));
    AR_TRY(weight_layout(&layout, ctx, s, part));
    AR_TRY(ar_param_init(&l->own_weight[i], ctx, name, &layout, s->transposed));
    /* A rank without rows still has columns, or its matrix would be [0, 0]. */
    if (s->uneven && layout.nbox == 0)
        l->own_weight[i].value.shape[s->transposed ? 0 : 1] = s->in;
    l->weight[i] = &l->own_weight[i];
    l->weight[i]->init = AR_INIT_XAVIER_NORMAL;
    l->weight[i]->fan_in = s->in;
    l->weight[i]->fan_out = part->out;
    return AR_OK;
}

static ar_status init_bias(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    const int n = ar_comm_size(ctx->tp), r = ar_comm_rank(ctx->tp);
    char name[160];
    ar_layout layout;
    AR_TRY(ari_path(name, sizeof name, part->name, "bias"));
    AR_TRY(s->style == ARI_COLUMN ? column_layout(&layout, ctx, part, 1, &part->out, 0)
                                  : ar_layout_replicate(&layout, 1, &part->out, r, n));
    AR_TRY(ar_param_init(&l->bias[i], ctx, name, &layout, false));
    l->bias[i].init = AR_INIT_UNIFORM_BIAS;
    l->bias[i].fan_in = s->in;
    l->bias[i].fan_out = part->out;
    /* A row-parallel bias meets the rank's own positions only. */
    l->bias[i].spread = s->sequence && s->style == ARI_ROW && !ar_faulty(ctx, AR_FAULT_sp_row_bias_grad_local);
    return AR_OK;
}

ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s)
{
    *l = (ari_linear){.style = s->style,
                      .n = s->n,
                      .in = s->in,
                      .has_bias = s->bias,
                      .input_is_sharded = s->input_is_sharded || ar_comm_size(ctx->tp) == 1, /* all is the own part */
                      .leaves_partial = s->leaves_partial,
                      .sequence = s->sequence};
    ar_status st = AR_OK;
    for (int i = 0; i < s->n; i++) {
        AR_TRY_TO(failed, st, init_weight(l, ctx, s, i));
        l->out[i] = s->part[i].out;
        l->local_out[i] = s->style == ARI_COLUMN ? ar_param_matrix(l->weight[i]).shape[0] : s->part[i].out;
        l->local_total += l->local_out[i];
        if (s->bias)
            AR_TRY_TO(failed, st, init_bias(l, ctx, s, i));
    }
    return AR_OK;
failed:
    ari_linear_fini(l);
    return st;
}

void ari_linear_fini(ari_linear *l)
{
    for (int i = 0; i < l->n; i++) {
        ar_param_fini(&l->own_weight[i]);
        ar_param_fini(&l->bias[i]);
    }
}

size_t ari_linear_params(ari_linear *l, ar_param **out, size_t cap)
{
    size_t count = 0;
    for (int i = 0; i < l->n; i++) {
        if (count < cap)
            out[count] = l->weight[i];
        count++;
        if (!l->has_bias)
            continue;
        if (count < cap)
            out[count] = &l->bias[i];
        count++;
    }
    return count;
}

ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i)
{
    size_t at = 0;
    for (int k = 0; k < i; k++)
        at += l->local_out[k];
    return ar_tensor_slice(y, y->ndim - 1, at, l->local_out[i]);
}

/* The group that cuts W's columns, over which Y is a sum; NULL: every rank has all of them. */
static ar_comm *column_group(const ari_linear *l, const ar_ctx *ctx)
{
    return l->style == ARI_ROW ? ctx->tp : NULL;
}

/* The group that cuts W's rows, over which dX is a sum. */
static ar_comm *row_group(const ari_linear *l, const ar_ctx *ctx)
{
    return l->style == ARI_COLUMN ? ctx->tp : NULL;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The biases side by side, as the outputs are: of several, memory of the step. */
static ar_status joined_bias(ari_linear *l, ar_ctx *ctx, ar_buf *bias)
{
    *bias = l->has_bias ? l->bias[0].value.data : (ar_buf){NULL};
    if (!l->has_bias || l->n == 1)
        return AR_OK;
    size_t at = 0;
    AR_TRY(ari_step_alloc(ctx, bias, l->local_total * sizeof(float)));
    for (int i = 0; i < l->n; i++) {
        AR_TRY(ARI_KERNEL(ctx, copy, ar_buf_at(*bias, at * sizeof(float)), ar_const(l->bias[i].value.data),
                          l->local_out[i] * sizeof(float)));
        at += l->local_out[i];
    }
    return AR_OK;
}

/* Whether X is gathered for the product only, and what is kept for the backward pass is x. */
static bool gathered_for_now(const ari_linear *l, const ar_ctx *ctx)
{
    return l->sequence && l->style == ARI_COLUMN && !ctx->keep_gathered;
}

/* X as the product takes it: all positions, of a row-parallel group the own features. */
static ar_status product_input(ari_linear *l, ar_ctx *ctx, ar_tensor *in, const ar_tensor *x)
{
    const bool row = l->style == ARI_ROW;
    *in = *x;
    if (row && l->input_is_sharded)
        return AR_OK;
    if (l->sequence)
        AR_TRY(ari_gather_tokens(ctx, in, x, l->weight[0]->name));
    if (!row)
        return AR_OK;
    ar_tensor whole = *in;
    AR_TRY(ari_own_features(ctx, in, &whole));
    if (l->sequence)
        ar_ctx_release(ctx, &whole);
    return AR_OK;
}

static ar_status keep(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x)
{
    AR_TRY(ari_fault_saved_input(ctx, saved, l, x));
    return ar_saved_push(saved, l, 0, x);
}

static ar_status new_output(ari_linear *l, ar_ctx *ctx, ar_tensor *y, const ar_tensor *in)
{
    return l->sequence && l->style == ARI_ROW ? ari_like_own_tokens(ctx, y, in, l->local_total)
                                              : ari_like(ctx, y, in, l->local_total);
}

/* y = the product's sum over the ranks that share it, and what follows it. */
static ar_status multiply(ari_linear *l, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *in, const ar_epilogue *ep)
{
    ar_comm *over = l->leaves_partial ? NULL : column_group(l, ctx);
    const bool scattered = over && l->sequence;
    const size_t terms = l->leaves_partial ? in->shape[in->ndim - 1] : l->in; /* of the sum that is rounded */
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    ar_parts parts = {.n = 1, .part = {ar_tensor_rows(in)}};
    if (scattered)
        AR_TRY(ari_rank_major(ctx, &parts.part[0], in));
    AR_TRY(ctx->arith->param_operand(ctx, &b, l->weight, l->n, l->n, false, terms, over, row_group(l, ctx)));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, l->weight[0]->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    AR_TRY(ctx->arith->fold(ctx, s, over, scattered ? AR_SCATTER_ROWS : over ? AR_ALL : AR_KEEP, l->weight[0]->name));
    const ar_tensor rows = ar_tensor_rows(y);
    AR_TRY(ctx->arith->round(ctx, &rows, s, ep));
    ctx->arith->operand_done(ctx, a);
    ari_release_rows(ctx, &parts.part[0], in);
    return AR_OK;
}

ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             ar_activation act, ar_tensor *z)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const bool sharded = l->style == ARI_ROW && l->input_is_sharded;
    ar_tensor in;
    ar_epilogue epilogue = {.act = act};
    AR_TRY(ari_check_features(l->weight[0]->name, "input", x, sharded ? l->in / n : l->in));
    AR_TRY(product_input(l, ctx, &in, x));
    AR_TRY(new_output(l, ctx, y, &in));
    if (act != AR_ACT_NONE)
        AR_TRY(new_output(l, ctx, z, &in));
    const ar_tensor z_rows = ar_tensor_rows(act != AR_ACT_NONE ? z : y);
    epilogue.z = &z_rows;
    ar_buf bias;
    AR_TRY(joined_bias(l, ctx, &bias));
    epilogue.bias = ar_const(bias);
    AR_TRY(multiply(l, ctx, y, &in, &epilogue));
    AR_TRY(ari_fault_linear_output(ctx, l->style == ARI_ROW, y, &in, &epilogue));
    if (l->n > 1)
        ari_step_free(ctx, bias);
    if (!gathered_for_now(l, ctx))
        return keep(l, ctx, saved, &in);
    ar_ctx_release(ctx, &in);
    return keep(l, ctx, saved, x);
}

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
        if (l->style != ARI_WHOLE && l->weight[i]->layout.replica > 0)
            continue;
        dy_parts->part[n] = ari_linear_part_of(l, dy, i);
        weight[n++] = l->weight[i];
    }
    for (int i = 0; i < l->n; i++) {
        if (l->style != ARI_WHOLE && l->weight[i]->layout.replica > 0)
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
    const bool partial = l->style == ARI_COLUMN, scattered = partial && l->sequence;
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
    AR_TRY(ctx->arith->param_operand(ctx, &b, weight, counted, l->n, true, sum_of(l->out, l->n), row_group(l, ctx),
                                     column_group(l, ctx)));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, tag));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    const ar_tensor dx_rows = ar_tensor_rows(dx);
    AR_TRY(partial ? complete(ctx, &dx_rows, s, rows.shape[0], scattered, tag)
                   : ctx->arith->round(ctx, &dx_rows, s, NULL));
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
               : ari_gather_dim(ctx, &wide, &slice, slice.ndim - 1, l->weight[0]->name));
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
        if (l->weight[i]->uses == 1 || !ar_faulty(ctx, AR_FAULT_tied_weight_untied))
            AR_TRY(ctx->arith->grad_contract(ctx, l->weight[i], &dy_i, &x_rows, samples, column_group(l, ctx),
                                             l->weight[i]->name));
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
