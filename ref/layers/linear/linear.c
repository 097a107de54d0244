/* SPDX-License-Identifier: Apache-2.0 */
/* A parallel linear layer: Y = X W^T + b, and the gradients of X, W and b. */
#include "ref/layers/linear/linear.h"

#include "ref/context/context_private.h"
#include "ref/core/param_private.h"
#include "ref/core/tensor_private.h"
#include "ref/layers/faults.h"
#include "ref/layers/linear/product.h"
#include "ref/layers/module_private.h"

static ar_tensor columns_of(const size_t *widths, const ar_tensor *y, int i)
{
    size_t column = 0;
    for (int k = 0; k < i; k++)
        column += widths[k];
    return ar_tensor_slice(y, y->ndim - 1, column, widths[i]);
}

ar_tensor ari_linear_part_of(const ari_linear *l, const ar_tensor *y, int i)
{
    return columns_of(l->output_width, y, i);
}

/* Returns the name in a record: the weight's if there is only one; otherwise NULL for the module's. */
static const char *name_of(const ari_linear *l)
{
    return l->n == 1 ? l->weight[0]->name : NULL;
}

/* Returns the group that shards W's columns, over which Y is a sum; NULL: every rank has all columns. */
static ar_comm *column_group(const ari_linear *l, const ar_ctx *ctx)
{
    return ari_is_rowwise(&l->split) ? ctx->tp : NULL;
}

/* Returns the group that shards W's rows, over which dX is a sum. */
static ar_comm *row_group(const ari_linear *l, const ar_ctx *ctx)
{
    return ari_is_colwise(&l->split) ? ctx->tp : NULL;
}

/* --- placements --------------------------------------------------------------------------------------------------- */

/* Returns the placement of X as the GEMM uses it. */
static ar_placement consumed_as(const ari_linear *l)
{
    return ari_is_rowwise(&l->split) ? ari_shard_features : ari_replicated;
}

/* Returns the placement of Y as the GEMM computes it: a sum over ranks is reduced to the required placement, unless
 * that is by features. */
static ar_placement produced_as(const ari_linear *l)
{
    if (ari_is_colwise(&l->split))
        return ari_shard_features;
    return ari_is_rowwise(&l->split) && !ari_placed_by_features(l->split.output) ? l->split.output : ari_replicated;
}

/* Returns the placement of dY as the GEMM uses it. */
static ar_placement gradient_consumed_as(const ari_linear *l)
{
    return ari_is_colwise(&l->split) ? ari_shard_features : ari_replicated;
}

/* Placement of dX: a sum over the ranks is reduced to X's placement, unless by features. */
static ar_placement gradient_produced_as(const ari_linear *l)
{
    if (ari_is_rowwise(&l->split))
        return ari_shard_features;
    return ari_is_colwise(&l->split) && ari_placed_by_tokens(l->split.input) ? ari_shard_tokens : ari_replicated;
}

static bool reduce_scatters(const ar_ctx *ctx, ar_placement folded)
{
    return ari_placed_by_tokens(folded) && ar_comm_size(ctx->tp) > 1;
}

/* Returns true if X is gathered for each GEMM, so that only the rank's part is saved between the passes. */
static bool regathers_input(const ari_linear *l, const ar_ctx *ctx)
{
    return l->split.input.kind == AR_SHARD && !ari_is_rowwise(&l->split) && !ctx->keep_gathered;
}

/* Returns true if a value with placement `from_placement` is gathered in chunks that overlap with the GEMM. */
static bool comes_in_chunks(ari_chunks *c, const ar_ctx *ctx, const ar_tensor *x, ar_placement from_placement,
                            ar_placement to_placement)
{
    *c = ari_chunks_of(ctx, x, true);
    return c->n > 1 && ari_placed_by_tokens(from_placement) && ari_placed_full(to_placement);
}

static ar_status place_input(const ari_linear *l, ar_ctx *ctx, ar_tensor *input, const ar_tensor *x,
                             bool releases_input)
{
    const ar_tp_redistribution change = {l->split.input, consumed_as(l)};
    return ari_tp_redistribute_of(ctx, input, x, &l->in_features, change, l->weight[0]->name, releases_input,
                                  name_of(l));
}

/* --- gathers overlapped with products ----------------------------------------------------------------------------- */

/* Gathers for the gradients of weights that overlap with the products of a backward pass: of the layer's own input x,
 * and of the input of the next layer (NULL: none), which `saved` has. */
typedef struct next_gathers {
    ari_input_prefetch *current, *after;
    const ar_tensor *x;
    ar_saved *saved;
} next_gathers;

/* Work overlapped with the gather of a value in chunks. */
typedef struct overlapped {
    const ari_product *product; /* product whose A has these rows; NULL: none */
    const ari_output *output;
    ar_tensor *gathered; /* tensor of the step with the whole value; NULL: not wanted */
    const next_gathers *next_gather;
} overlapped;

/* Enqueues the gather of an input that is needed in full later in this backward pass, but not of one needed after
 * it. */
static ar_status prefetch_input(ar_ctx *ctx, ari_input_prefetch *a, const ar_tensor *x)
{
    ari_chunks c;
    if (ctx->deferred || !regathers_input(a->layer, ctx) ||
        !comes_in_chunks(&c, ctx, x, a->layer->split.input, consumed_as(a->layer)))
        return AR_OK;
    c.chunk_seq = c.local_seq;
    c.n = 1;
    return ari_gather_begin(ctx, &a->gathering, x, &c, a->layer->weight[0]->name);
}

/* Starts gathering the layer's own input unless it is in progress, and that of the layer whose backward pass is
 * next. */
static ar_status gather_next(ar_ctx *ctx, const next_gathers *n)
{
    ar_tensor x;
    if (!n->current->gathering)
        AR_TRY(prefetch_input(ctx, n->current, n->x));
    if (!n->after)
        return AR_OK;
    AR_TRY(ari_saved_newest(n->saved, n->after->layer, 0, &x));
    return prefetch_input(ctx, n->after, &x);
}

/* Gathers x in chunks: one chunk is multiplied and copied to its position while the next one arrives. */
static ar_status gather_chunks(ar_ctx *ctx, const overlapped *b, const ari_chunks *c, const ar_tensor *x,
                               const char *tag)
{
    ari_gathering *g = NULL;
    AR_TRY(ari_gather_begin(ctx, &g, x, c, tag));
    if (b->gathered)
        AR_TRY(ari_like_tokens(ctx, b->gathered, x, c->ranks * c->local_seq, x->shape[x->ndim - 1]));
    for (size_t i = 0; i < c->n; i++) {
        ar_tensor rows;
        AR_TRY(ari_gather_chunk(ctx, g, i, &rows));
        if (b->next_gather && i + 2 == c->n) /* all of x's chunks are enqueued */
            AR_TRY(gather_next(ctx, b->next_gather));
        if (b->product)
            AR_TRY(ari_multiply_chunk(ctx, b->product, b->output, c, i, &rows));
        if (b->gathered)
            AR_TRY(ari_chunk_put(ctx, c, b->gathered, i, false, &rows));
    }
    ari_gather_end(ctx, g);
    return AR_OK;
}

/* Multiplies for a result that is a sum over ranks or complete here; its rows are scattered in chunks, or all at
 * once. */
static ar_status multiply_rows(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ar_tensor *input)
{
    const ari_chunks c = ari_chunks_of(ctx, input, false);
    return p->scattered && c.n > 1 ? ari_multiply_scattered(ctx, p, o, &c, input) : ari_multiply(ctx, p, o, input);
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The biases side by side, as the outputs are: of several, memory of the step. */
static ar_status joined_bias(ari_linear *l, ar_ctx *ctx, ar_buf *bias)
{
    *bias = l->has_bias ? l->bias[0].value.data : (ar_buf){NULL};
    if (!l->has_bias || l->n == 1)
        return AR_OK;
    size_t offset = 0;
    AR_TRY(ari_step_alloc(ctx, bias, l->local_total * sizeof(float)));
    for (int i = 0; i < l->n; i++) {
        AR_TRY(ARI_KERNEL(ctx, copy, ar_buf_at(*bias, offset * sizeof(float)), ar_const(l->bias[i].value.data),
                          l->local_width[i] * sizeof(float)));
        offset += l->local_width[i];
    }
    return AR_OK;
}

static ar_status save_input(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x)
{
    AR_TRY(ari_fault_saved_input(ctx, saved, l, x));
    return ar_saved_push(saved, l, 0, x);
}

/* Describes the product X W^T for an X with `width` features. */
static ar_status output_product(ari_linear *l, ar_ctx *ctx, ari_product *p, size_t width)
{
    const bool is_partial = l->split.output.kind == AR_PARTIAL_SUM;
    const size_t terms = is_partial ? width : l->in_features.width[0]; /* terms of the rounded sum */
    *p = (ari_product){.n = 1,
                       .width = {width},
                       .group = is_partial ? NULL : column_group(l, ctx),
                       .scattered = reduce_scatters(ctx, produced_as(l)),
                       .tag = l->weight[0]->name};
    return ctx->arith->param_operand(ctx, &p->b, l->weight, l->n, l->n, AR_USE_FORWARD, terms, p->group,
                                     row_group(l, ctx));
}

/* Creates the result of a GEMM of x with `features` features. gathered: chunks in which x, the local positions, is
 * gathered; NULL: x is multiplied. folded: placement of the sum. */
static ar_status new_result(ar_ctx *ctx, ar_tensor *y, const ar_tensor *x, size_t features, const ari_chunks *gathered,
                            ar_placement folded)
{
    if (gathered)
        return ari_like_tokens(ctx, y, x, gathered->ranks * gathered->local_seq, features);
    return reduce_scatters(ctx, folded) ? ari_like_own_tokens(ctx, y, x, features) : ari_like(ctx, y, x, features);
}

static ar_status new_outputs(ari_linear *l, ar_ctx *ctx, ari_output *o, const ar_tensor *x, const ari_chunks *gathered)
{
    ar_buf bias;
    AR_TRY(new_result(ctx, &o->y, x, l->local_total, gathered, produced_as(l)));
    if (o->act != AR_ACT_NONE)
        AR_TRY(new_result(ctx, &o->z, x, l->local_total, gathered, produced_as(l)));
    AR_TRY(joined_bias(l, ctx, &bias));
    o->bias = ar_const(bias);
    return AR_OK;
}

/* Records the product, the biases and the activation. */
static ar_status note_output(const ari_linear *l, ar_ctx *ctx, const ari_output *o, const ar_tensor *input, bool chunks)
{
    static const ar_placement rows = {AR_SHARD, 0}; /* replicated KV heads are sharded too */
    const ar_placement input_placement = chunks ? l->split.input : consumed_as(l), output_placement = produced_as(l);
    const ar_placement *placed = ari_is_colwise(&l->split) ? &rows : NULL;
    ar_param *bias[AR_MAX_PARTS];
    for (int i = 0; i < l->n; i++)
        bias[i] = (ar_param *)(uintptr_t)&l->bias[i];
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_PRODUCT, .name = l->weight[0]->name, .input = {input}, .out = {&o->y},
                    .param = l->weight, .params = (size_t)l->n, .placed = placed, .input_placement = &input_placement,
                    .output_placement = &output_placement));
    if (l->has_bias)
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_BIAS, .name = l->weight[0]->name, .input = {&o->y}, .out = {&o->y},
                        .param = bias, .params = (size_t)l->n, .placed = placed));
    return o->act == AR_ACT_NONE ? AR_OK
                                 : ARI_NOTE(ctx, .kind = ARI_LEDGER_ACTIVATION, .input = {&o->y}, .out = {&o->z});
}

/* Computes o from x, in chunks (NULL: as it arrives); *saved_input = what the backward pass needs of x. */
static ar_status output_of(ari_linear *l, ar_ctx *ctx, ari_output *o, ar_tensor *saved_input, const ar_tensor *x,
                           const ari_chunks *c)
{
    const bool regathers = regathers_input(l, ctx), releases_input = l->owns_input && !regathers;
    ar_tensor input = *x, gathered;
    ari_product p;
    if (!c)
        AR_TRY(place_input(l, ctx, &input, x, releases_input));
    AR_TRY(new_outputs(l, ctx, o, &input, c));
    AR_TRY(output_product(l, ctx, &p, input.shape[input.ndim - 1]));
    const overlapped b = {.product = &p, .output = o, .gathered = regathers ? NULL : &gathered};
    AR_TRY(c ? gather_chunks(ctx, &b, c, x, p.tag) : multiply_rows(ctx, &p, o, &input));
    ctx->arith->operand_done(ctx, p.b);
    AR_TRY(note_output(l, ctx, o, c ? x : &input, c));
    AR_TRY(ari_fault_linear_output(ctx, ari_is_rowwise(&l->split), o, &input));
    *saved_input = regathers ? *x : c ? gathered : input;
    if (regathers)
        ari_release_placed(ctx, &input, x);
    else if (c && releases_input)
        ar_ctx_release(ctx, &input);
    return AR_OK;
}

static ar_status apply_activation(ar_ctx *ctx, ar_tensor *z, const ar_tensor *y, ar_activation act)
{
    AR_TRY(ari_like(ctx, z, y, y->shape[y->ndim - 1]));
    const ar_tensor rows = ari_tensor_rows(y), z_rows = ari_tensor_rows(z);
    AR_TRY(ARI_KERNEL(ctx, bias_act, &rows, (ar_cbuf){NULL}, act, &z_rows));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_ACTIVATION, .input = {y}, .out = {z});
}

ar_status ari_linear_forward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                             ar_activation act, ar_tensor *z)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp);
    const size_t features =
        ari_placed_by_features(l->split.input) ? l->in_features.width[0] / n : l->in_features.width[0];
    const bool moved = n > 1 && !ari_placed_equal(produced_as(l), l->split.output);
    ari_output o = {.act = moved ? AR_ACT_NONE : act};
    ari_chunks c;
    ar_tensor saved_input;
    AR_TRY(ari_check_features(l->weight[0]->name, "input", x, features));
    const bool chunks = comes_in_chunks(&c, ctx, x, l->split.input, consumed_as(l));
    AR_TRY(output_of(l, ctx, &o, &saved_input, x, chunks ? &c : NULL));
    if (l->n > 1)
        ari_step_free(ctx, (ar_buf){(void *)(uintptr_t)o.bias.ptr});
    if (o.act != AR_ACT_NONE)
        *z = o.z;
    AR_TRY(ari_tp_redistribute_of(ctx, y, &o.y, &l->out, (ar_tp_redistribution){produced_as(l), l->split.output},
                                  l->weight[0]->name, true, name_of(l)));
    if (moved && act != AR_ACT_NONE)
        AR_TRY(apply_activation(ctx, z, y, act));
    return save_input(l, ctx, saved, &saved_input);
}

ar_status ari_linear_recompute(ari_linear *l, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x)
{
    ar_tensor input = *x;
    if (!regathers_input(l, ctx))
        AR_TRY(place_input(l, ctx, &input, x, l->owns_input));
    return save_input(l, ctx, saved, &input);
}

/* --- dX ----------------------------------------------------------------------------------------------------------- */

/* Returns the weights whose part of dX this rank counts, with their columns of dy first: of weights on several ranks
 * only the first rank counts. The other weights follow. Returns their number. */
static int counted_weights(const ari_linear *l, ar_param **weight, ari_product *p)
{
    int n = 0, uncounted = 0;
    size_t column = 0;
    for (int i = 0; i < l->n; column += l->local_width[i++]) {
        if (l->split.style != AR_STYLE_REPLICATE && l->weight[i]->layout.replica > 0)
            continue;
        p->column[n] = column;
        p->width[n] = l->local_width[i];
        weight[n++] = l->weight[i];
    }
    for (int i = 0; i < l->n; i++) {
        if (l->split.style != AR_STYLE_REPLICATE && l->weight[i]->layout.replica > 0)
            weight[n + uncounted++] = l->weight[i];
    }
    p->n = n;
    return n;
}

/* dX = sum over the group's weights and, column-parallel, over the ranks. */
static ar_status gradient_product(ari_linear *l, ar_ctx *ctx, ari_product *p)
{
    const bool partial = ari_is_colwise(&l->split);
    ar_param *weight[AR_MAX_PARTS];
    *p = (ari_product){.group = row_group(l, ctx),
                       .scattered = reduce_scatters(ctx, gradient_produced_as(l)),
                       .unreduced = partial && ari_faulty(ctx, "column_dx_not_reduced"),
                       .tag = l->weight[0]->name};
    const int counted = counted_weights(l, weight, p);
    const ar_operand_use use = l->peaked ? AR_USE_PEAKED : AR_USE_BACKWARD;
    return ctx->arith->param_operand(ctx, &p->b, weight, counted, l->n, use, ari_features_sum(&l->out),
                                     row_group(l, ctx), column_group(l, ctx));
}

/* A mistake leaves the reduce-scatter of a row-parallel layer without a backward pass. */
static bool gathers_nothing(const ari_linear *l, const ar_ctx *ctx)
{
    return ari_is_rowwise(&l->split) && reduce_scatters(ctx, ari_placed_gradient(l->split.output)) &&
           ari_faulty(ctx, "collective_not_differentiable");
}

/* Computes *gathered_dy = dY as the products use it, and *dx = dX as the product yields it (NULL: not needed). */
static ar_status gradient_of(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, ar_tensor *gathered_dy, const ar_tensor *dy,
                             const next_gathers *next_gather)
{
    const ar_tp_redistribution change = {ari_placed_gradient(l->split.output), gradient_consumed_as(l)};
    const size_t features = ari_param_matrix(l->weight[0]).shape[1];
    ari_output o = {.act = AR_ACT_NONE};
    ari_product p;
    ari_chunks c;
    const bool chunks = !gathers_nothing(l, ctx) && comes_in_chunks(&c, ctx, dy, change.src, change.dst);
    if (!chunks) {
        AR_TRY(gathers_nothing(l, ctx) ? ari_fault_own_gradient(ctx, gathered_dy, dy)
                                       : ari_tp_redistribute_of(ctx, gathered_dy, dy, &l->out, change,
                                                                l->weight[0]->name, false, name_of(l)));
        AR_TRY(gather_next(ctx, next_gather));
    }
    if (dx) {
        AR_TRY(new_result(ctx, &o.y, chunks ? dy : gathered_dy, features, chunks ? &c : NULL, gradient_produced_as(l)));
        AR_TRY(gradient_product(l, ctx, &p));
        *dx = o.y;
    }
    const overlapped b = {.product = dx ? &p : NULL, .output = &o, .gathered = gathered_dy, .next_gather = next_gather};
    if (chunks) {
        AR_TRY(gather_chunks(ctx, &b, &c, dy, l->weight[0]->name));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_REDISTRIBUTE, .name = name_of(l), .input = {dy}, .out = {gathered_dy},
                        .input_placement = &change.src, .output_placement = &change.dst));
    } else if (dx) {
        AR_TRY(multiply_rows(ctx, &p, &o, gathered_dy));
    }
    if (dx)
        ctx->arith->operand_done(ctx, p.b);
    const ar_placement input_placement = gradient_consumed_as(l), output_placement = gradient_produced_as(l);
    return dx ? ARI_NOTE(ctx, .kind = ARI_LEDGER_PRODUCT, .name = l->weight[0]->name, .input = {gathered_dy},
                         .out = {dx}, .param = l->weight, .params = (size_t)l->n, .input_placement = &input_placement,
                         .output_placement = &output_placement)
              : AR_OK;
}

/* Converts dx to the placement in which X arrived. */
static ar_status place_gradient(ari_linear *l, ar_ctx *ctx, ar_tensor *dx, const ar_tensor *made_dx)
{
    const ar_tp_redistribution change = {gradient_produced_as(l), ari_placed_gradient(l->split.input)};
    if (ari_is_rowwise(&l->split) && ari_placed_full(change.dst) && ari_faulty(ctx, "row_input_grad_not_gathered"))
        return ari_fault_narrow_dx(ctx, dx, made_dx);
    return ari_tp_redistribute_of(ctx, dx, made_dx, &l->in_features, change, l->weight[0]->name, true, name_of(l));
}

/* --- gradients of the parameters ---------------------------------------------------------------------------------- */

/* Returns true if this rank's biases were added only to its own rows of dY: Y is a sum scattered over the ranks. */
static bool biases_meet_own(const ari_linear *l)
{
    return ari_is_rowwise(&l->split) && ari_placed_by_tokens(ari_placed_gradient(l->split.output));
}

ar_status ari_linear_bias_sums(ar_ctx *ctx, ar_row_sum sum[AR_MAX_PARTS], ari_input_prefetch *prefetch)
{
    ari_linear *l = prefetch->layer;
    const bool as_given = ar_comm_size(ctx->tp) == 1 || biases_meet_own(l) ||
                          ari_placed_equal(ari_placed_gradient(l->split.output), gradient_consumed_as(l));
    prefetch->biases_summed = l->has_bias && as_given && !ari_fault_moves_bias_rows(ctx, ari_is_rowwise(&l->split));
    for (int i = 0; i < AR_MAX_PARTS; i++) {
        sum[i] = (ar_row_sum){.t = {NULL}};
        if (prefetch->biases_summed && i < l->n)
            AR_TRY(ctx->arith->grad_sum(ctx, &l->bias[i], &sum[i]));
    }
    return AR_OK;
}

static ar_status bias_gradient(ari_linear *l, ar_ctx *ctx, int i, ar_tensor dy)
{
    AR_TRY(ari_fault_bias_rows(ctx, ari_is_rowwise(&l->split), &dy));
    return ctx->arith->grad_rows(ctx, &l->bias[i], &dy, (ar_cbuf){NULL});
}

/* dy: of the positions to which this rank's biases were added. */
static ar_status bias_gradients(ari_linear *l, ar_ctx *ctx, const ar_tensor *dy)
{
    const ar_tensor rows = ari_tensor_rows(dy);
    for (int i = 0; i < l->n && l->has_bias; i++)
        AR_TRY(bias_gradient(l, ctx, i, columns_of(l->local_width, &rows, i)));
    return AR_OK;
}

/* A deferred dW = dY^T X, for which nothing in the backward pass waits. */
typedef struct weight_job {
    ari_linear *l;
    ar_tensor x, dy;                 /* x: as saved; dy: all positions */
    struct ari_gathering *gathering; /* gathering of x; NULL: not in flight */
} weight_job;

/* x, dy: all positions. */
static ar_status weight_gradients(ari_linear *l, ar_ctx *ctx, const ar_tensor *x, const ar_tensor *dy)
{
    size_t samples = ari_ctx_samples(ctx, x);
    ar_tensor x_rows = ari_tensor_rows(x), dy_rows = ari_tensor_rows(dy);
    ar_grad_terms terms[AR_MAX_PARTS];
    int n = 0;
    ari_fault_weight_rows(ctx, x, &x_rows, &dy_rows, &samples);
    for (int i = 0; i < l->n; i++) {
        const ar_tensor dy_i = columns_of(l->local_width, &dy_rows, i);
        if (ari_faulty(ctx, "unordered_param_grad"))
            AR_TRY(ari_fault_gradient_as_it_comes(ctx, l->weight[i], &dy_i, &x_rows));
        else if (l->weight[i]->uses == 1 || !ari_faulty(ctx, "tied_weight_untied"))
            terms[n++] = (ar_grad_terms){l->weight[i], dy_i};
    }
    AR_TRY(ctx->arith->grad_contract(ctx, terms, n, &x_rows, samples, column_group(l, ctx)));
    for (int i = 0; i < n; i++)
        AR_TRY(ari_note_gradient(ctx, terms[i].param, x, &terms[i].dy));
    return AR_OK;
}

static ar_status run_weight_job(ar_ctx *ctx, const void *job)
{
    const weight_job *j = job;
    ar_tensor input = j->x;
    if (j->gathering)
        AR_TRY(ari_gather_full(ctx, j->gathering, &input));
    else if (regathers_input(j->l, ctx))
        AR_TRY(place_input(j->l, ctx, &input, &j->x, false));
    AR_TRY(weight_gradients(j->l, ctx, &input, &j->dy));
    ari_release_placed(ctx, &input, &j->x);
    return AR_OK;
}

ar_status ari_linear_backward(ari_linear *l, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                              const char *name, ari_input_prefetch *prefetch)
{
    const bool prefetched = prefetch && prefetch->layer == l;
    ari_input_prefetch late = {.layer = l};
    ar_tensor x, made_dx, all_dy;
    AR_TRY(ar_saved_pop(saved, l, 0, &x));
    AR_TRY(ari_check_features(l->weight[0]->name, "gradient", dy, l->output_total));
    const next_gathers next_gather = {
        .current = prefetched ? prefetch : &late, .x = &x, .after = prefetched ? NULL : prefetch, .saved = saved};
    AR_TRY(gradient_of(l, ctx, dx ? &made_dx : NULL, &all_dy, dy, &next_gather));
    if (dx) {
        AR_TRY(place_gradient(l, ctx, dx, &made_dx));
        if (name)
            AR_TRY(
                ari_tap_placed(ctx, name, NULL, 'b', dx, l->in_features.width[0], ari_placed_gradient(l->split.input)));
    }
    AR_TRY(ari_fault_latents(ctx, l->shared, &all_dy));
    if (!prefetched || !prefetch->biases_summed)
        AR_TRY(bias_gradients(l, ctx, biases_meet_own(l) ? dy : &all_dy));
    for (int i = 0; i < l->n && l->has_bias; i++)
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_WEIGHT_GRADIENT, .name = l->bias[i].name,
                        .input = {biases_meet_own(l) ? dy : &all_dy}, .param = &(ar_param *){&l->bias[i]},
                        .params = 1));
    const weight_job job = {l, x, all_dy, next_gather.current->gathering};
    if (ctx->deferred && l->weight[0]->ends && ari_faulty(ctx, "zb_tied_counted_twice"))
        AR_TRY(run_weight_job(ctx, &job));
    AR_TRY(ari_defer(ctx, run_weight_job, &job, sizeof job, &x, &all_dy));
    ari_release_placed(ctx, &all_dy, dy);
    return AR_OK;
}
