/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/linear.h"

#include "ref/layers/parts.h"

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
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s.weight: its output dimension of %zu cannot be split over %d ranks; use a tp that "
                            "divides it",
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
    if (s->uneven)
        return ar_layout_shard_uneven(o, 2, shape, dim, r, n);
    if (s->style == ARI_COLUMN)
        return column_layout(o, ctx, part, 2, shape, dim);
    if (ar_layout_shard(o, 2, shape, dim, r, n) != AR_OK)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s.weight: its input dimension of %zu cannot be split over %d ranks; use a tp that "
                            "divides it",
                            part->name, shape[dim], n);
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
    if (s->style == ARI_ROW) {
        AR_TRY(ar_layout_replicate(&layout, 1, &part->out, r, n));
    } else {
        AR_TRY(column_layout(&layout, ctx, part, 1, &part->out, 0));
    }
    AR_TRY(ar_param_init(&l->bias[i], ctx, name, &layout, false));
    l->bias[i].init = AR_INIT_UNIFORM_BIAS;
    l->bias[i].fan_in = s->in;
    l->bias[i].fan_out = part->out;
    return AR_OK;
}

ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s)
{
    *l = (ari_linear){
        .style = s->style, .n = s->n, .in = s->in, .has_bias = s->bias, .input_is_sharded = s->input_is_sharded};
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

/* The biases side by side, as the outputs are. */
static ar_status joined_bias(ari_linear *l, ar_ctx *ctx, ar_cbuf *bias)
{
    *bias = (ar_cbuf){NULL};
    if (!l->has_bias)
        return AR_OK;
    if (l->n == 1) {
        *bias = ar_const(l->bias[0].value.data);
        return AR_OK;
    }
    ar_tensor all;
    size_t at = 0;
    AR_TRY(ar_ctx_tensor(ctx, &all, AR_F32, 1, &l->local_total));
    for (int i = 0; i < l->n; i++) {
        AR_TRY(ctx->device->ops->copy(ctx->device, ctx->queue, ar_buf_at(all.data, at * sizeof(float)),
                                      ar_const(l->bias[i].value.data), l->local_out[i] * sizeof(float)));
        at += l->local_out[i];
    }
    *bias = ar_const(all.data);
    return AR_OK;
}

static size_t sum_of(const size_t *v, int n)
{
    size_t total = 0;
    for (int i = 0; i < n; i++)
        total += v[i];
    return total;
}

/* What two mistakes do to a row-parallel output: the bias of every rank counted, the saved input overwritten. */
static ar_status faults_after_forward(ari_linear *l, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x, ar_cbuf bias)
{
    const ar_device_ops *dev = ctx->device->ops;
    if (l->style == ARI_ROW && bias.ptr && ar_faulty(ctx, AR_FAULT_row_bias_every_rank)) {
        const ar_tensor rows = ar_tensor_rows(y);
        for (int i = 1; i < ar_comm_size(ctx->tp); i++)
            AR_TRY(dev->bias_act(ctx->device, ctx->queue, &rows, bias, AR_ACT_NONE, NULL));
    }
    if (l->style == ARI_ROW && ar_comm_size(ctx->tp) > 1 && ar_faulty(ctx, AR_FAULT_allreduce_aliases_input)) {
        const size_t nx = ar_tensor_count(x), ny = ar_tensor_count(y);
        AR_TRY(dev->copy(ctx->device, ctx->queue, x->data, ar_const(y->data), (nx < ny ? nx : ny) * sizeof(float)));
    }
    return AR_OK;
}

ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             ar_activation act, ar_tensor *z)
{
    const bool row = l->style == ARI_ROW;
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    ar_tensor in = *x;
    AR_TRY(ari_check_features(l->weight[0]->name, "input", x, row && l->input_is_sharded ? l->in / n : l->in));
    if (row && !l->input_is_sharded)
        AR_TRY(ari_own_features(ctx, &in, x));
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    const ar_parts parts = {.n = 1, .part = {ar_tensor_rows(&in)}};
    ar_epilogue epilogue = {.act = act, .z = z};
    AR_TRY(ari_like(ctx, y, x, l->local_total));
    if (act != AR_ACT_NONE)
        AR_TRY(ari_like(ctx, z, x, l->local_total));
    AR_TRY(joined_bias(l, ctx, &epilogue.bias));
    AR_TRY(
        ctx->arith->param_operand(ctx, &b, l->weight, l->n, false, l->in, row ? ctx->tp : NULL, row ? NULL : ctx->tp));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, l->weight[0]->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    AR_TRY(ctx->arith->fold(ctx, s, row ? ctx->tp : NULL, row ? AR_ALL : AR_KEEP, l->weight[0]->name));
    const ar_tensor y_rows = ar_tensor_rows(y), z_rows = act != AR_ACT_NONE ? ar_tensor_rows(z) : y_rows;
    epilogue.z = &z_rows;
    AR_TRY(ctx->arith->round(ctx, &y_rows, s, &epilogue));
    ctx->arith->operand_done(ctx, a);
    AR_TRY(faults_after_forward(l, ctx, y, &in, epilogue.bias));
    return ar_saved_push(saved, l, 0, &in);
}

/* The weights whose part of dX this rank counts: of those that several ranks hold, the first rank's alone. Gives their
 * parts of dy. Returns how many. */
static int counted_weights(ari_linear *l, ar_param **weight, ar_parts *dy_parts, const ar_tensor *dy)
{
    int n = 0;
    for (int i = 0; i < l->n; i++) {
        if (l->weight[i]->layout.replica > 0)
            continue;
        dy_parts->part[n] = ari_linear_part_of(l, dy, i);
        weight[n++] = l->weight[i];
    }
    dy_parts->n = n;
    return n;
}

/* dX = sum over the group's weights and, column-parallel, over the ranks. */
static ar_status input_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x)
{
    const bool row = l->style == ARI_ROW;
    const ar_operand *a = NULL, *b = NULL;
    ar_sum *s = NULL;
    ar_parts parts = {.along_k = true};
    ar_param *weight[AR_MAX_PARTS];
    const ar_tensor rows = ar_tensor_rows(dy);
    const int counted = counted_weights(l, weight, &parts, &rows);
    AR_TRY(ari_like(ctx, dx, x, x->shape[x->ndim - 1]));
    AR_TRY(ctx->arith->param_operand(ctx, &b, weight, counted, true, sum_of(l->out, l->n), row ? NULL : ctx->tp,
                                     row ? ctx->tp : NULL));
    AR_TRY(ctx->arith->operand_a(ctx, &a, &parts, b, l->weight[0]->name));
    AR_TRY(ctx->arith->contract(ctx, &s, a, b));
    const bool reduce = !row && !ar_faulty(ctx, AR_FAULT_column_dx_not_reduced);
    AR_TRY(ctx->arith->fold(ctx, s, ctx->tp, reduce ? AR_ALL : AR_KEEP, l->weight[0]->name));
    const ar_tensor dx_rows = ar_tensor_rows(dx);
    AR_TRY(ctx->arith->round(ctx, &dx_rows, s, NULL));
    ctx->arith->operand_done(ctx, a);
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

static ar_status bias_gradient(ari_linear *l, ar_ctx *ctx, int i, ar_tensor dy)
{
    if (ar_faulty(ctx, AR_FAULT_bias_grad_wrong_axis)) {
        /* Sums over features: token t's sum lands in element t. */
        const size_t tokens = dy.shape[0] < dy.shape[1] ? dy.shape[0] : dy.shape[1];
        ar_tensor wrong, zeros;
        const size_t shape[2] = {dy.shape[1], dy.shape[1]};
        AR_TRY(ar_ctx_tensor(ctx, &zeros, AR_F32, 2, shape));
        AR_TRY(ctx->device->ops->fill(ctx->device, ctx->queue, zeros.data, 0.0f, shape[0] * shape[1]));
        const ar_tensor swapped = ar_tensor_transposed(&dy);
        const ar_tensor from = ar_tensor_slice(&swapped, 1, 0, tokens);
        wrong = ar_tensor_slice(&zeros, 1, 0, tokens);
        AR_TRY(ctx->device->ops->copy_strided(ctx->device, ctx->queue, &wrong, &from));
        dy = zeros;
    }
    return ctx->arith->grad_rows(ctx, &l->bias[i], &dy, (ar_cbuf){NULL});
}

ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const char *name)
{
    const bool row = l->style == ARI_ROW, narrow = row && !l->input_is_sharded;
    ar_tensor x;
    AR_TRY(ar_saved_pop(saved, l, 0, &x));
    AR_TRY(ari_check_features(l->weight[0]->name, "gradient", dy, l->local_total));
    if (dx) {
        ar_tensor own;
        AR_TRY(input_gradient(l, ctx, narrow ? &own : dx, dy, &x));
        if (narrow)
            AR_TRY(widen_gradient(ctx, dx, &own, l->weight[0]->name));
        if (row && !narrow)
            AR_TRY(ari_tap_shard(ctx, name, NULL, 'b', dx, dx->ndim - 1, l->in));
        else
            AR_TRY(ari_tap_whole(ctx, name, NULL, 'b', dx));
    }
    size_t samples = x.ndim > 2 ? x.shape[0] : 1;
    ar_tensor x_rows = ar_tensor_rows(&x), dy_rows = ar_tensor_rows(dy);
    if (samples > 1 && ar_faulty(ctx, AR_FAULT_weight_grad_leading_dims)) {
        x_rows = ar_tensor_slice(&x_rows, 0, 0, x.shape[x.ndim - 2]);
        dy_rows = ar_tensor_slice(&dy_rows, 0, 0, x.shape[x.ndim - 2]);
        samples = 1;
    }
    const ar_tensor all_dy = ar_tensor_rows(dy);
    for (int i = 0; i < l->n; i++) {
        const ar_tensor dy_i = ari_linear_part_of(l, &dy_rows, i);
        AR_TRY(ctx->arith->grad_contract(ctx, l->weight[i], &dy_i, &x_rows, samples, row ? ctx->tp : NULL,
                                         l->weight[i]->name));
        if (l->has_bias)
            AR_TRY(bias_gradient(l, ctx, i, ari_linear_part_of(l, &all_dy, i)));
    }
    return AR_OK;
}
