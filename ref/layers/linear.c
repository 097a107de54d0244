/* SPDX-License-Identifier: Apache-2.0 */
/* A parallel linear layer: its parameters, Y = X W^T + b, and the gradients of X, W and b. */
#include "ref/layers/linear.h"

#include "ref/layers/faults.h"
#include "ref/layers/parts.h"

static bool is_column(const ar_linear_split *s)
{
    return s->style == AR_STYLE_COLWISE;
}

static bool is_row(const ar_linear_split *s)
{
    return s->style == AR_STYLE_ROWWISE;
}

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
    const int dim = is_column(&s->split) == s->transposed ? 1 : 0;
    if (s->split.style == AR_STYLE_REPLICATE)
        return ar_layout_replicate(o, 2, shape, r, n);
    if (s->uneven && is_column(&s->split))
        return ar_layout_shard_uneven(o, 2, shape, dim, r, n);
    if (is_column(&s->split))
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
    AR_TRY(is_column(&s->split) ? column_layout(&layout, ctx, part, 1, &part->out, 0)
                                : ar_layout_replicate(&layout, 1, &part->out, r, n));
    AR_TRY(ar_param_init(&l->bias[i], ctx, name, &layout, false));
    l->bias[i].init = AR_INIT_UNIFORM_BIAS;
    l->bias[i].fan_in = s->in;
    l->bias[i].fan_out = part->out;
    /* The bias of a sum that is scattered along the sequence meets the rank's own positions only. */
    l->bias[i].spread = n > 1 && is_row(&s->split) && ari_placed_by_tokens(s->split.to) &&
                        !ar_faulty(ctx, AR_FAULT_sp_row_bias_grad_local);
    return AR_OK;
}

/* The widths of part i, and its blocks. The rows of a column-parallel weight may be copies of another rank's. */
static ar_status set_widths(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s, int i)
{
    const ari_linear_part *part = &s->part[i];
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const bool column = is_column(&s->split);
    size_t block[AR_MAX_PARTS], start = 0;
    const int blocks = blocks_of(block, part, part->out);
    for (int k = 0; k < blocks; k++)
        l->out.width[l->out.n++] = block[k];
    l->own[i] = column ? ar_param_matrix(l->weight[i]).shape[0] : part->out;
    l->left[i] = part->out;
    if (ari_placed_by_features(s->split.to) && column)
        l->left[i] = l->own[i];
    else if (ari_placed_by_features(s->split.to))
        ar_split_uneven(part->out, (int)n, ar_comm_rank(ctx->tp), &start, &l->left[i]);
    if (ari_placed_by_features(s->split.to) && !s->uneven && !column && block[0] % n != 0)
        return ar_error_set(AR_ERR_INDIVISIBLE,
                            "%s: its output of %zu features cannot be split over %zu ranks; use a tp that divides it",
                            part->name, block[0], n);
    l->own_total += l->own[i];
    l->left_total += l->left[i];
    return AR_OK;
}

ar_status ari_linear_init(ari_linear *l, ar_ctx *ctx, const ari_linear_spec *s)
{
    *l = (ari_linear){
        .split = s->split, .n = s->n, .in = {1, {s->in}}, .has_bias = s->bias, .ends_input = s->ends_input};
    ar_status st = AR_OK;
    if (!is_row(&s->split) && s->split.to.kind == AR_PARTIAL_SUM)
        return ar_error_set(AR_ERR_ARG, "%s: only a rowwise layer makes a partial sum; this one is %s", s->part[0].name,
                            ar_style_name(s->split.style));
    for (int i = 0; i < s->n; i++) {
        AR_TRY_TO(failed, st, init_weight(l, ctx, s, i));
        AR_TRY_TO(failed, st, set_widths(l, ctx, s, i));
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

static ar_tensor columns_of(const size_t *widths, const ar_tensor *y, int i)
{
    size_t at = 0;
    for (int k = 0; k < i; k++)
        at += widths[k];
    return ar_tensor_slice(y, y->ndim - 1, at, widths[i]);
}

ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i)
{
    return columns_of(l->left, y, i);
}

/* The group that cuts W's columns, over which Y is a sum; NULL: every rank has all of them. */
static ar_comm *column_group(const ari_linear *l, const ar_ctx *ctx)
{
    return is_row(&l->split) ? ctx->tp : NULL;
}

/* The group that cuts W's rows, over which dX is a sum. */
static ar_comm *row_group(const ari_linear *l, const ar_ctx *ctx)
{
    return is_column(&l->split) ? ctx->tp : NULL;
}

/* --- placements --------------------------------------------------------------------------------------------------- */

static const ar_placement whole = {AR_REPLICATE, 0};

/* Of X, as the product takes it. */
static ar_placement taken(const ari_linear *l)
{
    return is_row(&l->split) ? ari_shard_features : whole;
}

/* Of Y, as it comes out of the product: a sum over the ranks is folded where it is wanted, unless by features. */
static ar_placement made(const ari_linear *l)
{
    if (is_column(&l->split))
        return ari_shard_features;
    return is_row(&l->split) && !ari_placed_by_features(l->split.to) ? l->split.to : whole;
}

/* Of dY, as the product takes it. */
static ar_placement gradient_taken(const ari_linear *l)
{
    return is_column(&l->split) ? ari_shard_features : whole;
}

/* Of dX: a sum over the ranks is folded as X came, unless by features. */
static ar_placement gradient_made(const ari_linear *l)
{
    if (is_row(&l->split))
        return ari_shard_features;
    return is_column(&l->split) && ari_placed_by_tokens(l->split.from) ? ari_shard_tokens : whole;
}

static bool scatters(const ar_ctx *ctx, ar_placement folded)
{
    return ari_placed_by_tokens(folded) && ar_comm_size(ctx->tp) > 1;
}

/* Whether X is gathered for each product by itself: the rank's part is kept between the passes. */
static bool gathers_again(const ari_linear *l, const ar_ctx *ctx)
{
    return l->split.from.kind == AR_SHARD && !is_row(&l->split) && !ctx->keep_gathered;
}

static ar_status place_input(const ari_linear *l, ar_ctx *ctx, ar_tensor *in, const ar_tensor *x, bool ends)
{
    const ar_hop hop = {l->split.from, taken(l)};
    return (ends ? ari_place_on : ari_place)(ctx, in, x, &l->in, hop, l->weight[0]->name);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The biases side by side, as the outputs are: of several, memory of the step. */
static ar_status joined_bias(ari_linear *l, ar_ctx *ctx, ar_buf *bias)
{
    *bias = l->has_bias ? l->bias[0].value.data : (ar_buf){NULL};
    if (!l->has_bias || l->n == 1)
        return AR_OK;
    size_t at = 0;
    AR_TRY(ari_step_alloc(ctx, bias, l->own_total * sizeof(float)));
    for (int i = 0; i < l->n; i++) {
        AR_TRY(ARI_KERNEL(ctx, copy, ar_buf_at(*bias, at * sizeof(float)), ar_const(l->bias[i].value.data),
                          l->own[i] * sizeof(float)));
        at += l->own[i];
    }
    return AR_OK;
}

static ar_status keep(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x)
{
    AR_TRY(ari_fault_saved_input(ctx, saved, l, x));
    return ar_saved_push(saved, l, 0, x);
}

/* y = the product's sum over the ranks that share it, and what follows it. */
static ar_status multiply(ari_linear *l, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *in, const ar_epilogue *ep)
{
    const bool left = l->split.to.kind == AR_PARTIAL_SUM, scattered = scatters(ctx, made(l));
    ar_comm *over = left ? NULL : column_group(l, ctx);
    const size_t terms = left ? in->shape[in->ndim - 1] : l->in.width[0]; /* of the sum that is rounded */
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

static ar_status new_output(ari_linear *l, ar_ctx *ctx, ar_tensor *y, const ar_tensor *in)
{
    return scatters(ctx, made(l)) ? ari_like_own_tokens(ctx, y, in, l->own_total) : ari_like(ctx, y, in, l->own_total);
}

/* y as it comes out of the product; *z = act(y) where act is not AR_ACT_NONE. */
static ar_status make_output(ari_linear *l, ar_ctx *ctx, ar_tensor *y, const ar_tensor *in, ar_activation act,
                             ar_tensor *z)
{
    ar_epilogue epilogue = {.act = act};
    ar_buf bias;
    AR_TRY(new_output(l, ctx, y, in));
    if (act != AR_ACT_NONE)
        AR_TRY(new_output(l, ctx, z, in));
    const ar_tensor z_rows = ar_tensor_rows(act != AR_ACT_NONE ? z : y);
    epilogue.z = &z_rows;
    AR_TRY(joined_bias(l, ctx, &bias));
    epilogue.bias = ar_const(bias);
    AR_TRY(multiply(l, ctx, y, in, &epilogue));
    AR_TRY(ari_fault_linear_output(ctx, is_row(&l->split), y, in, &epilogue));
    if (l->n > 1)
        ari_step_free(ctx, bias);
    return AR_OK;
}

static ar_status activate(ar_ctx *ctx, ar_tensor *z, const ar_tensor *y, ar_activation act)
{
    AR_TRY(ari_like(ctx, z, y, y->shape[y->ndim - 1]));
    const ar_tensor rows = ar_tensor_rows(y), z_rows = ar_tensor_rows(z);
    return ARI_KERNEL(ctx, bias_act, &rows, (ar_cbuf){NULL}, act, &z_rows);
}

ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             ar_activation act, ar_tensor *z)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const size_t features = ari_placed_by_features(l->split.from) ? l->in.width[0] / n : l->in.width[0];
    const bool moved = n > 1 && !ari_placed_alike(made(l), l->split.to), again = gathers_again(l, ctx);
    ar_tensor in, product;
    AR_TRY(ari_check_features(l->weight[0]->name, "input", x, features));
    AR_TRY(place_input(l, ctx, &in, x, l->ends_input && !again));
    AR_TRY(make_output(l, ctx, &product, &in, moved ? AR_ACT_NONE : act, z));
    if (again)
        ari_release_placed(ctx, &in, x);
    AR_TRY(ari_place_on(ctx, y, &product, &l->out, (ar_hop){made(l), l->split.to}, l->weight[0]->name));
    if (moved && act != AR_ACT_NONE)
        AR_TRY(activate(ctx, z, y, act));
    return keep(l, ctx, saved, again ? x : &in);
}

/* --- dX ----------------------------------------------------------------------------------------------------------- */

/* The weights whose part of dX this rank counts: of those that several ranks hold, the first rank's alone. Gives their
 * parts of dy. Returns how many; the other weights come after them. */
static int counted_weights(ari_linear *l, ar_param **weight, ar_parts *dy_parts, const ar_tensor *dy)
{
    int n = 0, others = 0;
    for (int i = 0; i < l->n; i++) {
        if (l->split.style != AR_STYLE_REPLICATE && l->weight[i]->layout.replica > 0)
            continue;
        dy_parts->part[n] = columns_of(l->own, dy, i);
        weight[n++] = l->weight[i];
    }
    for (int i = 0; i < l->n; i++) {
        if (l->split.style != AR_STYLE_REPLICATE && l->weight[i]->layout.replica > 0)
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
    const bool partial = is_column(&l->split), scattered = scatters(ctx, gradient_made(l));
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
    AR_TRY(ctx->arith->param_operand(ctx, &b, weight, counted, l->n, true, ari_features_sum(&l->out), row_group(l, ctx),
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

/* dx as X came. */
static ar_status place_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *made_dx)
{
    const ar_hop hop = {gradient_made(l), ari_placed_gradient(l->split.from)};
    if (is_row(&l->split) && ari_placed_whole(hop.to) && ar_faulty(ctx, AR_FAULT_row_input_grad_not_gathered))
        return ari_fault_narrow_dx(ctx, dx, made_dx);
    return ari_place_on(ctx, dx, made_dx, &l->in, hop, l->weight[0]->name);
}

/* --- gradients of the parameters ---------------------------------------------------------------------------------- */

static ar_status bias_gradient(ari_linear *l, ar_ctx *ctx, int i, ar_tensor dy)
{
    AR_TRY(ari_fault_bias_rows(ctx, is_row(&l->split), &dy));
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
        const ar_tensor dy_i = columns_of(l->own, &dy_rows, i);
        if (l->weight[i]->uses == 1 || !ar_faulty(ctx, AR_FAULT_tied_weight_untied))
            AR_TRY(ctx->arith->grad_contract(ctx, l->weight[i], &dy_i, &x_rows, samples, column_group(l, ctx),
                                             l->weight[i]->name));
        if (l->has_bias)
            AR_TRY(bias_gradient(l, ctx, i, columns_of(l->own, &bias_rows, i)));
    }
    return AR_OK;
}

ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const char *name)
{
    const char *tag = l->weight[0]->name;
    const ar_placement to = ari_placed_gradient(l->split.to);
    ar_tensor x, made_dx, all_dy, in;
    AR_TRY(ar_saved_pop(saved, l, 0, &x));
    AR_TRY(ari_check_features(tag, "gradient", dy, l->left_total));
    AR_TRY(ari_place(ctx, &all_dy, dy, &l->out, (ar_hop){to, gradient_taken(l)}, tag));
    if (dx) {
        AR_TRY(input_gradient(l, ctx, &made_dx, &all_dy, ar_param_matrix(l->weight[0]).shape[1]));
        AR_TRY(place_gradient(l, ctx, dx, &made_dx));
        AR_TRY(ari_tap_placed(ctx, name, NULL, 'b', dx, l->in.width[0], ari_placed_gradient(l->split.from)));
    }
    in = x;
    if (gathers_again(l, ctx))
        AR_TRY(place_input(l, ctx, &in, &x, false));
    AR_TRY(parameter_gradients(l, ctx, &in, &all_dy, is_row(&l->split) && ari_placed_by_tokens(to) ? dy : &all_dy));
    ari_release_placed(ctx, &in, &x);
    ari_release_placed(ctx, &all_dy, dy);
    return AR_OK;
}
