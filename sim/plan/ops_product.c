/* SPDX-License-Identifier: Apache-2.0 */
/* Products with parameters: what they take, what they make, and what is moved to get from one placement to another. */
#include "ref/placement/placement_private.h"
#include "sim/plan/ops_impl.h"

/* Longer sums take two int64 an element, and 25 bits in bf16 (numerics.md, section 2). */
enum { TERMS_OF_ONE_INT64 = 8191, NARROW_TERMS = 16384 };

static const char weight_tag[] = ".weight";

void ari_op_builder_send_sums(ari_op_builder *w, ari_over over, size_t n, size_t width, ari_call_often often,
                              ari_role role, const char *tag)
{
    const size_t sent = width * (ari_op_builder_ranks(w, over) - 1); /* of each sum, by all but the rank that adds it */
    if (sent == 0)
        return;
    ari_op_builder_call(w, ARI_CALL_ALL_TO_ALL, over, ari_op_builder_mul(w, n, sent), AR_U8, often, role, tag);
    w->op.call[w->op.calls - 1].row = sent;
}

void ari_op_builder_gather_sums(ari_op_builder *w, ari_over over, size_t n, size_t width, ar_dtype dtype,
                                ari_call_often often, ari_role role, const char *tag)
{
    const int calls = w->op.calls;
    ari_op_builder_call(w, ARI_CALL_ALL_GATHER, over, ari_op_builder_mul(w, n, width), dtype, often, role, tag);
    if (w->op.calls > calls && width > 1)
        w->op.call[calls].row = width;
}

void ari_op_builder_scatter_sums(ari_op_builder *w, ari_over over, size_t n, size_t terms, bool narrow, ari_role role,
                                 const char *tag)
{
    const size_t limbs = narrow || terms <= TERMS_OF_ONE_INT64 ? 1 : 2;
    ari_op_builder_call(w, ARI_CALL_REDUCE_SCATTER, over, ari_op_builder_mul(w, n, limbs), AR_I64, ARI_EACH_PASS, role,
                        tag);
}

bool ari_op_builder_is_narrow(const ari_op_builder *w, size_t terms)
{
    return w->form.activations == AR_BF16 && terms <= NARROW_TERMS;
}

static bool is_shard(ar_placement p)
{
    return p.kind == AR_SHARD;
}

/* --- redistribution ----------------------------------------------------------------------------------------------- */

/* A value, or a gradient, placed otherwise over tp. */
static ari_op_value placed(ari_op_builder *w, const ari_op_value *v, ar_placement at)
{
    ari_op_value p = ari_op_builder_activation(
        w, v->shape[2], at, ari_op_builder_same(at, ari_by_features) ? ari_op_builder_copies(w, v->role) : 1);
    p.role = v->role;
    return p;
}

/* That value, held to be placed so. */
static ari_op_value held(ari_op_builder *w, const ari_op_value *v, ar_placement at)
{
    ari_op_value h = placed(w, v, at);
    h.id = v->id;
    h.of = v->of;
    return h;
}

/* The operation takes what there is, held to be placed so. */
static void add_inputs(ari_op_builder *w, ar_placement at)
{
    w->op.inputs = w->edges.now.n;
    for (int i = 0; i < w->edges.now.n; i++)
        w->op.input[i] = held(w, &w->edges.now.at[i], at);
}

/* It makes the same of it, placed so. */
static void add_outputs(ari_op_builder *w, ar_placement at)
{
    w->op.outputs = w->edges.now.n;
    for (int i = 0; i < w->edges.now.n; i++)
        w->op.output[i] = placed(w, &w->edges.now.at[i], at);
}

static size_t width_of(ari_op_builder *w, const ari_values *x)
{
    size_t width = 0;
    for (int i = 0; i < x->n; i++)
        width = ari_op_builder_add(w, width, x->at[i].shape[2]);
    return width;
}

/* The collective that has been added last is of tokens that a product takes or makes: where collectives go beside
 * products it does, cut into chunks of each rank's tokens, or whole. K chunks of n positions are of ceil(n/K), and
 * fewer than K where that many are enough. */
static void overlap_call(ari_op_builder *w, bool cut)
{
    const size_t n = ari_op_builder_positions(w), k = (size_t)w->c->run.parallel.overlap;
    if (w->op.calls == 0 || !w->form.overlaps)
        return;
    ari_op_call *call = &w->op.call[w->op.calls - 1];
    call->queue = ARI_ON_TP;
    call->chunk = cut ? call->elements / n * ((n + k - 1) / k) : call->elements;
}

/* To the whole by an all-gather or an all-reduce, or from it to the own part: one of the two. */
static void step(ari_op_builder *w, ar_tp_redistribution change, ari_role role, ari_role tagged, const char *tag)
{
    const size_t n = ari_op_builder_mul(w, w->tokens, width_of(w, &w->edges.now));
    ari_op_builder_begin(w, ARI_OPERATION_REDISTRIBUTE, role);
    add_inputs(w, change.from);
    add_outputs(w, change.to);
    w->op.produced_as = change.from;
    if (is_shard(change.from))
        ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP, n, w->form.activations, ARI_EACH_PASS, tagged, tag);
    else if (change.from.kind == AR_PARTIAL_SUM)
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, w->form.activations, ARI_EACH_PASS, tagged, tag);
    if (w->multiplied) /* what is gathered again is summed over all tokens */
        overlap_call(w, !w->regathered);
    ari_op_builder_make(w);
}

static bool is_whole(ar_placement p)
{
    return p.kind == AR_INVARIANT || p.kind == AR_REPLICATE;
}

/* By tokens and by features change into each other over the whole. */
static void redistribute(ari_op_builder *w, ar_tp_redistribution change, ari_role role, ari_role tagged,
                         const char *tag)
{
    const bool none = ari_op_builder_same(change.from, change.to) || (is_whole(change.from) && is_whole(change.to));
    if (w->ranks[ARI_AXIS_TP] == 1 || none)
        return;
    if (!is_whole(change.from))
        step(w, (ar_tp_redistribution){change.from, is_whole(change.to) ? change.to : ari_whole}, role, tagged, tag);
    if (!is_whole(change.to))
        step(w, (ar_tp_redistribution){is_whole(change.from) ? change.from : ari_whole, change.to}, role, tagged, tag);
}

void ari_op_builder_move(ari_op_builder *w, ar_tp_redistribution change, ari_role module)
{
    redistribute(w, change, module, module, "");
}

/* The gradient of a term of the forward pass is whole on each rank, as that of a whole value is. */
static ar_placement gradient_at(ar_placement p)
{
    return is_shard(p) ? p : ari_whole;
}

ar_tp_redistribution ari_op_builder_back(ar_tp_redistribution change)
{
    return (ar_tp_redistribution){gradient_at(change.to), gradient_at(change.from)};
}

void ari_op_builder_exchange(ari_op_builder *w, ar_placement from, ar_placement to)
{
    if (w->ranks[ARI_AXIS_TP] == 1 || ari_op_builder_same(from, to) || !is_shard(from) || !is_shard(to)) {
        redistribute(w, (ar_tp_redistribution){from, to}, ARI_TOKENS, ARI_TOKENS, weight_tag);
        return;
    }
    const size_t part =
        ari_op_builder_mul(w, w->tokens, width_of(w, &w->edges.now)) / w->ranks[ARI_AXIS_TP]; /* of each, one stays */
    ari_op_builder_begin(w, ARI_OPERATION_REDISTRIBUTE, ARI_TOKENS);
    add_inputs(w, from);
    add_outputs(w, to);
    w->op.produced_as = from;
    ari_op_builder_call(w, ARI_CALL_ALL_TO_ALL, ARI_OVER_TP, ari_op_builder_mul(w, part, w->ranks[ARI_AXIS_TP] - 1),
                        w->form.activations, ARI_EACH_PASS, ARI_TOKENS, weight_tag);
    ari_op_builder_make(w);
}

/* --- partial sums ------------------------------------------------------------------------------------------------- */

/* A collective of a product's rows in each pass. Those of all experts move together, under a name of their own. */
void ari_op_builder_call_for(ari_op_builder *w, ari_call_kind kind, ari_over over, size_t elements, ar_dtype dtype,
                             ari_role role)
{
    ari_op_builder_call(w, kind, over, elements, dtype, ARI_EACH_PASS, w->in_experts ? ARI_EXPERTS : role,
                        w->in_experts ? "" : weight_tag);
}

/* Exact numerics: the exponents of a weight's rows or columns, or of an activation's, are shared by all ranks. */
static void share_exponents(ari_op_builder *w, size_t n, ari_call_often often, ari_role role)
{
    if (w->form.exact && often == ARI_EACH_PASS)
        ari_op_builder_call_for(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, role);
    else if (w->form.exact)
        ari_op_builder_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n, AR_I32, often, role, weight_tag);
}

/* The product [tokens, cols] of a layer, of which every rank has a term. Exact numerics exchange the exponents of B's
 * rows, once for every version of the weights, and of A's, then partial sums of so many products. */
static void fold(ari_op_builder *w, const ari_linear_ops *l, size_t cols, size_t terms, bool narrow, ar_placement to)
{
    const size_t rows = ari_op_builder_rows(w), n = ari_op_builder_mul(w, rows, cols);
    const ari_role role = l->part[0];
    if (w->form.exact) {
        share_exponents(w, cols, ARI_EACH_VERSION, role);
        share_exponents(w, rows, ARI_EACH_PASS, role);
        ari_op_builder_scatter_sums(w, ARI_OVER_TP, n, terms, narrow, w->in_experts ? ARI_EXPERTS : role,
                                    w->in_experts ? "" : weight_tag);
    } else {
        ari_op_builder_call_for(w, is_shard(to) ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, ARI_OVER_TP, n,
                                w->form.activations, role);
    }
    if (is_shard(to))
        overlap_call(w, true);
    else if (w->form.exact)
        ari_op_builder_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP, n, w->form.activations, ARI_EACH_PASS, ARI_NO_ROLE,
                            "rounded sums");
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

static bool cuts_rows(const ari_linear_ops *l)
{
    return l->split.style == AR_STYLE_COLWISE;
}

static bool cuts_columns(const ari_linear_ops *l)
{
    return l->split.style == AR_STYLE_ROWWISE;
}

/* The placement of the input that the product takes, */
static ar_placement consumed_as(const ari_linear_ops *l)
{
    if (l->local)
        return l->split.from;
    return cuts_rows(l) ? (ar_placement){AR_REPLICATE, 0} : cuts_columns(l) ? ari_by_features : ari_whole;
}

/* of the output that it makes before collectives, */
static ar_placement produced_as(const ari_linear_ops *l)
{
    if (l->local)
        return l->split.from;
    return cuts_rows(l) ? ari_by_features : cuts_columns(l) ? (ar_placement){AR_PARTIAL_SUM, 0} : ari_whole;
}

/* and of a sum when it is folded: where it is wanted, or nowhere. */
static ar_placement folded(ar_placement made, ar_placement to)
{
    return made.kind != AR_PARTIAL_SUM ? made : ari_op_builder_same(to, ari_by_features) ? ari_whole : to;
}

/* Whose weight may be the table's, or another head's. */
static bool is_head(const ari_linear_ops *l)
{
    return l->module == ARI_HEAD || l->module == ARI_MTP_HEAD;
}

static ari_role role_of(const ari_linear_ops *l)
{
    return is_head(l) ? l->module : l->part[0];
}

static double product(const ari_op_value *x, double out, double in)
{
    return (double)x->local[0] * (double)x->local[1] * out * in;
}

static void add_biases(ari_op_builder *w, const ari_linear_ops *l, ar_placement at)
{
    if (!ari_op_builder_has_bias(w, l->part[0]))
        return;
    ari_op_builder_begin(w, ARI_OPERATION_BIAS, l->part[0]);
    add_inputs(w, at);
    add_outputs(w, at);
    w->op.produced_as = at;
    for (int i = 0; i < l->n; i++)
        w->op.weight[w->op.weights++] = ari_op_builder_param(w, l->part[i], true);
    ari_op_builder_make(w);
}

static bool gathers_tokens(ar_tp_redistribution change)
{
    return ari_op_builder_same(change.from, ari_by_tokens) && is_whole(change.to);
}

/* Collectives before or after the layer: the tag is that of its first weight. Gathered tokens are multiplied next,
 * except those gathered for deferred weight gradients, which nothing overlaps. */
static void around(ari_op_builder *w, const ari_linear_ops *l, ar_tp_redistribution change, ari_role role)
{
    w->multiplied = gathers_tokens(change) && !w->deferred;
    redistribute(w, change, role, l->part[0], weight_tag);
    w->multiplied = false;
}

/* A gathered input is not kept. */
static bool regathers_input(const ari_op_builder *w, const ari_linear_ops *l)
{
    return !l->local && !cuts_columns(l) && is_shard(l->split.from) && !w->c->run.parallel.keep_gathered;
}

/* The forward pass keeps that for the backward pass. */
static void keep_input(ari_op_builder *w, const ari_linear_ops *l, size_t id)
{
    ari_forward *f = ari_op_builder_forward_of(w, ARI_OPERATION_PRODUCT, role_of(l));
    if (f)
        f->in[0] = id;
}

void ari_op_builder_linear(ari_op_builder *w, const ari_linear_ops *l)
{
    const ar_placement leaves = folded(produced_as(l), l->split.to);
    const size_t before = ari_op_builder_now(w);
    w->stays = regathers_input(w, l);
    around(w, l, (ar_tp_redistribution){l->split.from, consumed_as(l)}, l->module);
    w->stays = false;
    const size_t x = ari_op_builder_now(w);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_PRODUCT, role_of(l));
    add_inputs(w, consumed_as(l));
    op->produced_as = produced_as(l);
    for (int i = 0; i < l->n; i++) {
        const ari_op_value weight = ari_op_builder_param(w, l->part[i], false);
        const ari_op_value y = {.role = l->part[i], .shape = {[2] = weight.shape[0]}};
        op->output[op->outputs++] = placed(w, &y, leaves);
        op->weight[op->weights++] = weight;
        op->multiply_adds += product(&op->input[0], (double)weight.local[0], (double)weight.local[1]);
    }
    const ari_values y = {.at = {op->output[0], op->output[1], op->output[2]}, .n = op->outputs};
    if (cuts_columns(l) && leaves.kind != AR_PARTIAL_SUM)
        fold(w, l, width_of(w, &y), op->input[0].shape[2], w->form.activations == AR_BF16, leaves);
    else if (cuts_rows(l))
        share_exponents(w, op->input[0].shape[2], ARI_EACH_VERSION, l->part[0]);
    ari_op_builder_make(w);
    keep_input(w, l, regathers_input(w, l) ? before : x);
    add_biases(w, l, leaves);
    around(w, l, (ar_tp_redistribution){leaves, l->split.to}, role_of(l));
}

/* Whole also where it came in chunks: no product follows. */
void ari_op_builder_linear_recompute(ari_op_builder *w, const ari_linear_ops *l)
{
    if (!regathers_input(w, l))
        redistribute(w, (ar_tp_redistribution){l->split.from, consumed_as(l)}, l->module, l->part[0], weight_tag);
    keep_input(w, l, ari_op_builder_now(w));
}

/* Placement of a gradient: whole and used by each rank for itself, it is a sum over them, and so on
 * (ari_placement_gradient). */
static ar_placement gradient_of(ar_placement p)
{
    ar_placement g = p;
    const ar_status st = ari_placement_gradient(&g, p);
    (void)st; /* no value of the list is a maximum */
    return g;
}

/* dX from dY of all weights, one sum over them. Of ranks that hold the same part of one the first alone counts it.
 * Where it is placed then. */
static ar_placement input_gradient(ari_op_builder *w, const ari_linear_ops *l, ar_placement dy)
{
    const ar_placement makes = gradient_of(consumed_as(l)), leaves = folded(makes, gradient_at(l->split.from));
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_PRODUCT, role_of(l));
    op->produced_as = makes;
    add_inputs(w, dy);
    for (int i = 0; i < l->n; i++) {
        const ari_op_value weight = ari_op_builder_param(w, l->part[i], false);
        op->weight[op->weights++] = weight;
        if (w->at[ARI_AXIS_TP] % weight.copies == 0)
            op->multiply_adds += product(&op->input[0], (double)weight.local[0], (double)weight.local[1]);
    }
    const ari_op_value x = {.shape = {[2] = op->weight[0].shape[1]}};
    op->output[op->outputs++] = placed(w, &x, leaves);
    const size_t terms = width_of(w, &w->edges.now);
    if (cuts_rows(l)) /* gradients of logits are of 25 bits whatever the activations are */
        fold(w, l, x.shape[2], terms, !is_head(l) && w->form.activations == AR_BF16, leaves);
    else if (cuts_columns(l))
        share_exponents(w, terms, ARI_EACH_VERSION, l->part[0]);
    ari_op_builder_make(w);
    return leaves;
}

void ari_op_builder_weight_gradient(ari_op_builder *w, ari_role role, bool bias, const ari_op_value *x,
                                    const ari_op_value *dy)
{
    const ari_op_value param = ari_op_builder_param(w, role, bias);
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_WEIGHT_GRADIENT, role);
    if (x)
        op->input[op->inputs++] = *x;
    op->input[op->inputs++] = *dy;
    op->output[op->outputs++] = param;
    for (int i = 0; i < ARI_PLACED_AXES; i++)
        op->output[0].at[i] = gradient_of(param.at[i]);
    op->produced_as = op->output[0].at[ARI_AXIS_TP];
    if (x && x->ndim == 3 && param.ndim == 2) { /* dW = dY^T X: Y's and X's features, summed over the tokens */
        op->multiply_adds = product(x, (double)param.local[0], (double)param.local[1]);
        if (ari_op_builder_same(x->at[ARI_AXIS_TP], ari_by_features) && !w->x_scaled)
            share_exponents(w, ari_op_builder_rows(w), ARI_EACH_PASS, role);
        ari_op_builder_share_rows(w, &param, x, dy, role);
    }
    ari_op_builder_visit(w);
}

void ari_op_builder_norm_gradient(ari_op_builder *w, ari_role role, const ari_op_value *dy)
{
    ari_op_value x = *dy;
    x.id = ari_op_builder_forward_of(w, ARI_OPERATION_NORM, role)->in[0];
    x.of = 0;
    ari_op_builder_weight_gradient(w, role, false, &x, dy);
}

/* A bias's terms are those of the tokens that it was added to: dY as it came, or as the product takes it. */
static void bias_gradients(ari_op_builder *w, const ari_linear_ops *l, const ari_values *came, const ari_values *dy)
{
    const bool own_tokens = cuts_columns(l) && ari_op_builder_same(l->split.to, ari_by_tokens);
    for (int i = 0; i < l->n; i++) {
        const ari_op_value part = own_tokens ? held(w, &came->at[i], l->split.to) : dy->at[i];
        if (ari_op_builder_has_bias(w, l->part[i]))
            ari_op_builder_weight_gradient(w, l->part[i], true, NULL, &part);
    }
}

/* True if the layer's second gather overlaps the products of an earlier layer. */
static bool comes_early(const ari_op_builder *w, const ari_linear_ops *l)
{
    return w->form.overlaps && w->part == AR_PP_BACKWARD && regathers_input(w, l) &&
           gathers_tokens((ar_tp_redistribution){l->split.from, consumed_as(l)});
}

/* The layer's input as its forward pass has kept it. */
static ari_op_value kept_input(ari_op_builder *w, const ari_linear_ops *l)
{
    const size_t width = ari_op_builder_param(w, l->part[0], false).shape[1];
    ari_op_value x = ari_op_builder_activation(w, width, regathers_input(w, l) ? l->split.from : consumed_as(l), 1);
    x.id = ari_op_builder_forward_of(w, ARI_OPERATION_PRODUCT, role_of(l))->in[0];
    return x;
}

/* That once more, for its weights' gradients: gathered, unless it is there already. */
static void regather_input(ari_op_builder *w, const ari_linear_ops *l)
{
    const ari_values gradients = w->edges.now;
    w->edges.now = (ari_values){.at = {kept_input(w, l)}, .n = 1};
    w->regathered = true;
    around(w, l, (ar_tp_redistribution){l->split.from, consumed_as(l)}, l->module);
    w->regathered = false;
    keep_input(w, l, ari_op_builder_now(w));
    w->edges.now = gradients;
}

/* That x and dy stay for the gradients of the weights, x as it was kept. */
static void defer_weight_gradient(ari_op_builder *w, const ari_linear_ops *l, const ari_values *dy)
{
    if (w->part != AR_PP_BACKWARD_INPUT || w->in_experts)
        return;
    ari_operation *op = ari_op_builder_begin(w, ARI_OPERATION_DEFERRED, role_of(l));
    op->produced_as = dy->at[0].at[ARI_AXIS_TP];
    op->input[op->inputs++] = kept_input(w, l);
    for (int i = 0; i < dy->n; i++)
        op->output[op->outputs++] = dy->at[i];
    ari_op_builder_visit(w);
}

/* The layer's input as its forward pass has made it, once more. */
static void remake_input(ari_op_builder *w, const ari_linear_ops *l)
{
    const ari_values gradients = w->edges.now;
    w->pass = ARI_PASS_FORWARD;
    w->recomputed = true;
    l->remake(w);
    w->recomputed = false;
    w->pass = ARI_PASS_BACKWARD;
    const size_t x = ari_op_builder_now(w);
    w->edges.now = gradients;
    keep_input(w, l, x);
}

/* The gradients of the weights, in their order. Nothing in the backward pass waits for them, but that those of experts,
 * whose rows are sorted, are made at once. */
static void weight_gradients(ari_op_builder *w, const ari_linear_ops *l, const ari_values *dy)
{
    ari_op_value x = kept_input(w, l);
    w->deferred = !w->in_experts;
    if (regathers_input(w, l) && !comes_early(w, l))
        regather_input(w, l);
    if (l->remake)
        remake_input(w, l);
    x.id = ari_op_builder_forward_of(w, ARI_OPERATION_PRODUCT, role_of(l))->in[0];
    x = held(w, &x, consumed_as(l));
    for (int i = 0; i < l->n; i++) {
        w->x_scaled = i > 0;
        ari_op_builder_weight_gradient(w, l->part[i], false, &x, &dy->at[i]);
    }
    w->x_scaled = w->deferred = false;
}

/* The gradients of the layer's outputs, those of the parts of one as one. */
static void take_gradients(ari_op_builder *w, const ari_linear_ops *l)
{
    const ari_op_value last = w->edges.now.at[w->edges.now.n - 1];
    if (w->edges.now.n > l->n)
        w->edges.now.at[0] = last;
    w->edges.now.n = l->n;
    for (int i = 0; i < l->n; i++) {
        w->edges.now.at[i].role = l->part[i];
        w->edges.now.at[i].shape[2] = ari_op_builder_param(w, l->part[i], false).shape[0];
    }
}

void ari_op_builder_linear_backward(ari_op_builder *w, const ari_linear_ops *l, const ari_linear_ops *before,
                                    const ari_linear_ops *after)
{
    const ar_placement dy = gradient_of(produced_as(l));
    take_gradients(w, l);
    const ari_values came = w->edges.now;
    around(w, l, (ar_tp_redistribution){gradient_at(l->split.to), dy}, role_of(l));
    if (!before && comes_early(w, l))
        regather_input(w, l);
    if (after && comes_early(w, after))
        regather_input(w, after);
    const ar_placement dx = input_gradient(w, l, dy);
    const ari_values taken_dy = {.at = {w->op.input[0], w->op.input[1], w->op.input[2]}, .n = w->op.inputs};
    around(w, l, (ar_tp_redistribution){dx, gradient_at(l->split.from)}, l->module);
    bias_gradients(w, l, &came, &taken_dy);
    defer_weight_gradient(w, l, &taken_dy);
    weight_gradients(w, l, &taken_dy);
}
