/* SPDX-License-Identifier: Apache-2.0 */
/* Products with parameters: what they take, what they make, and what is moved to get from one placement to another. */
#include "sim/plan/ops_impl.h"

/* Longer sums take two int64 an element (docs/numerics.md, section 2). */
enum { TERMS_OF_ONE_INT64 = 8191 };

static const char weight_tag[] = ".weight";

static bool is(ar_placement a, ar_placement b)
{
    return ar_placement_same(a, b, 3);
}

static bool is_shard(ar_placement p)
{
    return p.kind == AR_SHARD;
}

/* --- redistribution ----------------------------------------------------------------------------------------------- */

/* From shards to the whole, or the own shard of it: one of the two. */
static void hop(ari_walk *w, size_t features, ar_placement from, ar_placement to, ari_role role, ari_role tagged,
                const char *tag)
{
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_REDISTRIBUTE, role);
    op->input[op->inputs++] = ari_walk_activation(w, features, from, 1);
    op->output[op->outputs++] = ari_walk_activation(w, features, to, 1);
    op->made = from;
    if (is_shard(from))
        ari_walk_call(w, ARI_CALL_ALL_GATHER, ARI_OVER_TP, ari_walk_mul(w, w->tokens, features), AR_F32, ARI_EACH_PASS,
                      tagged, tag);
    ari_walk_visit(w);
}

void ari_walk_redistribute(ari_walk *w, size_t features, ar_placement from, ar_placement to, ari_role role,
                           ari_role tagged, const char *tag)
{
    if (w->tp == 1 || is(from, to) || (!is_shard(from) && !is_shard(to)))
        return;
    if (is_shard(from) && is_shard(to)) {
        hop(w, features, from, ari_whole, role, tagged, tag);
        from = ari_whole;
    }
    hop(w, features, from, to, role, tagged, tag);
}

void ari_walk_exchange(ari_walk *w, size_t features, ar_placement from, ar_placement to, ari_role role)
{
    if (w->tp == 1 || is(from, to) || !is_shard(from) || !is_shard(to)) {
        ari_walk_redistribute(w, features, from, to, role, role, weight_tag);
        return;
    }
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_REDISTRIBUTE, role);
    op->input[op->inputs++] = ari_walk_activation(w, features, from, 1);
    op->output[op->outputs++] = ari_walk_activation(w, features, to, 1);
    op->made = from;
    ari_walk_call(w, ARI_CALL_ALL_TO_ALL, ARI_OVER_TP, ari_walk_mul(w, w->tokens, features), AR_F32, ARI_EACH_PASS,
                  role, weight_tag);
    ari_walk_visit(w);
}

/* Tokens are redistributed by the module outside where there is one, features by the layer itself. */
static void outside(ari_walk *w, const ari_linear_ops *l, size_t features, ar_placement from, ar_placement to)
{
    const bool tokens = is(from, ari_by_tokens), backward = w->pass == ARI_PASS_BACKWARD;
    const bool by_module = tokens && l->by_module, bare = by_module || (!tokens && !backward);
    ari_walk_redistribute(w, features, from, to, l->module, by_module ? l->module : l->part[0], bare ? "" : weight_tag);
}

/* --- partial sums ------------------------------------------------------------------------------------------------- */

void ari_walk_fold(ari_walk *w, const ari_fold_ops *f)
{
    const size_t n = ari_walk_mul(w, f->batch, ari_walk_mul(w, f->rows, f->cols));
    const size_t limbs = f->terms > TERMS_OF_ONE_INT64 ? 2 : 1;
    if (!w->exact) {
        ari_walk_call(w, f->scatter ? ARI_CALL_REDUCE_SCATTER : ARI_CALL_ALL_REDUCE, f->over, n, AR_F32, ARI_EACH_PASS,
                      f->role, f->tag);
        return;
    }
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, f->over, ari_walk_mul(w, f->batch, f->cols), AR_I32, f->b, f->role, f->tag);
    ari_walk_call(w, ARI_CALL_ALL_REDUCE, f->over, ari_walk_mul(w, f->batch, f->rows), AR_I32, ARI_EACH_PASS, f->role,
                  f->tag);
    ari_walk_call(w, ARI_CALL_REDUCE_SCATTER, f->over, ari_walk_mul(w, n, limbs), AR_I64, ARI_EACH_PASS, f->role,
                  f->tag);
    if (!f->scatter)
        ari_walk_call(w, ARI_CALL_ALL_GATHER, f->over, n, AR_F32, ARI_EACH_PASS, ARI_NO_ROLE, "rounded sums");
}

/* The product [tokens, cols] of a layer, of which every rank has a term. */
static void fold(ari_walk *w, const ari_linear_ops *l, size_t cols, size_t terms, ar_placement to)
{
    const ari_fold_ops f = {.over = ARI_OVER_TP,
                            .batch = 1,
                            .rows = w->tokens,
                            .cols = cols,
                            .terms = terms,
                            .b = ARI_EACH_VERSION,
                            .scatter = is_shard(to),
                            .role = l->part[0],
                            .tag = weight_tag};
    ari_walk_fold(w, &f);
}

/* Where B's rows are cut, the exponents of its columns, one for each of the `terms`, are those of all ranks. */
static void column_exponents(ari_walk *w, size_t terms, ari_call_often often, ari_role role)
{
    if (w->exact)
        ari_walk_call(w, ARI_CALL_ALL_REDUCE, ARI_OVER_TP, terms, AR_I32, often, role, weight_tag);
}

/* --- linear layers ------------------------------------------------------------------------------------------------ */

static size_t outputs(ari_walk *w, const ari_linear_ops *l)
{
    size_t out = 0;
    for (int i = 0; i < l->n; i++)
        out = ari_walk_add(w, out, ari_walk_param(w, l->part[i], false).shape[0]);
    return out;
}

/* The placement of the input that the product takes, and of the output that it makes. */
static ar_placement taken(const ari_linear_ops *l)
{
    return l->cut == ARI_CUT_NONE   ? ari_whole
           : l->cut == ARI_CUT_ROWS ? (ar_placement){AR_REPLICATE, 0}
                                    : ari_by_features;
}

static ar_placement made(const ari_linear_ops *l)
{
    return l->cut == ARI_CUT_NONE   ? ari_whole
           : l->cut == ARI_CUT_ROWS ? ari_by_features
                                    : (ar_placement){AR_PARTIAL_SUM, 0};
}

/* The outputs of all parts, or their gradients. */
static int part_values(ari_walk *w, ari_op_value *v, const ari_linear_ops *l, ar_placement at)
{
    for (int i = 0; i < l->n; i++) {
        const size_t out = ari_walk_param(w, l->part[i], false).shape[0];
        v[i] = ari_walk_activation(w, out, at, is_shard(at) ? ari_walk_copies(w, l->part[i]) : 1);
        v[i].role = l->part[i];
    }
    return l->n;
}

static ari_role role_of(const ari_linear_ops *l)
{
    return l->module == ARI_HEAD ? ARI_HEAD : l->part[0]; /* whose weight may be tied */
}

static double product(const ari_op_value *x, double out, double in)
{
    return (double)x->local[0] * (double)x->local[1] * out * in;
}

static void add_biases(ari_walk *w, const ari_linear_ops *l, ar_placement at)
{
    if (!ari_walk_has_bias(w, l->part[0]))
        return;
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_BIAS, l->part[0]);
    op->made = at;
    op->inputs = part_values(w, op->input, l, at);
    op->outputs = part_values(w, op->output, l, at);
    for (int i = 0; i < l->n; i++)
        op->weight[op->weights++] = ari_walk_param(w, l->part[i], true);
    ari_walk_visit(w);
}

void ari_walk_linear(ari_walk *w, const ari_linear_ops *l)
{
    const ari_op_value first = ari_walk_param(w, l->part[0], false);
    const size_t in = first.shape[1], out = outputs(w, l);
    const bool row = l->cut == ARI_CUT_COLUMNS;
    const ar_placement leaves = row && !l->partial ? l->to : made(l);
    outside(w, l, in, l->from, taken(l));
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_PRODUCT, role_of(l));
    op->input[op->inputs++] = ari_walk_activation(w, in, taken(l), 1);
    op->made = made(l);
    op->outputs = part_values(w, op->output, l, leaves);
    for (int i = 0; i < l->n; i++) {
        const ari_op_value weight = ari_walk_param(w, l->part[i], false);
        op->weight[op->weights++] = weight;
        op->multiply_adds += product(&op->input[0], (double)weight.local[0], (double)weight.local[1]);
    }
    if (row && !l->partial)
        fold(w, l, out, in, l->to);
    else if (l->cut == ARI_CUT_ROWS)
        column_exponents(w, in, ARI_EACH_VERSION, l->part[0]);
    ari_walk_visit(w);
    add_biases(w, l, leaves);
    outside(w, l, out, leaves, l->to);
}

/* dX from dY of all weights, one sum over them. Of ranks that hold the same part of one the first alone counts it. */
static void input_gradient(ari_walk *w, const ari_linear_ops *l, ar_placement dy)
{
    const size_t in = ari_walk_param(w, l->part[0], false).shape[1], out = outputs(w, l);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_PRODUCT, role_of(l));
    const bool partial = l->cut == ARI_CUT_ROWS;
    op->made = ari_gradient_of(taken(l));
    op->inputs = part_values(w, op->input, l, dy);
    op->output[op->outputs++] = ari_walk_activation(w, in, partial ? l->from : op->made, 1);
    for (int i = 0; i < l->n; i++) {
        const ari_op_value weight = ari_walk_param(w, l->part[i], false);
        op->weight[op->weights++] = weight;
        if (w->tp_rank % weight.copies == 0)
            op->multiply_adds += product(&op->input[0], (double)weight.local[0], (double)weight.local[1]);
    }
    if (partial)
        fold(w, l, in, out, l->from);
    else if (l->cut == ARI_CUT_COLUMNS)
        column_exponents(w, out, ARI_EACH_VERSION, l->part[0]);
    ari_walk_visit(w);
}

void ari_walk_weight_gradient(ari_walk *w, ari_role role, bool bias, const ari_op_value *x, const ari_op_value *dy)
{
    const ari_op_value param = ari_walk_param(w, role, bias);
    ari_operation *op = ari_walk_begin(w, ARI_OPERATION_WEIGHT_GRADIENT, role);
    if (x)
        op->input[op->inputs++] = *x;
    op->input[op->inputs++] = *dy;
    op->output[op->outputs++] = param;
    op->output[0].dtype = AR_F32;
    for (int i = 0; i < ARI_PLACED_AXES; i++)
        op->output[0].at[i] = ari_gradient_of(param.at[i]);
    op->made = op->output[0].at[ARI_AXIS_TP];
    if (x && x->ndim == 3 && param.ndim == 2) { /* dW = dY^T X: Y's and X's features, summed over the tokens */
        op->multiply_adds = product(x, (double)param.local[0], (double)param.local[1]);
        if (is(x->at[ARI_AXIS_TP], ari_by_features))
            column_exponents(w, w->tokens, ARI_EACH_PASS, role);
    }
    ari_walk_visit(w);
}

/* In the order of the weights, each with its bias, whose terms are those of the tokens that it was added to. */
static void weight_gradients(ari_walk *w, const ari_linear_ops *l, const ari_op_value *x, ar_placement dy,
                             ar_placement outer_dy)
{
    ari_op_value part[ARI_OP_VALUES], outer[ARI_OP_VALUES];
    part_values(w, part, l, dy);
    part_values(w, outer, l, outer_dy);
    for (int i = 0; i < l->n; i++) {
        ari_walk_weight_gradient(w, l->part[i], false, x, &part[i]);
        if (ari_walk_has_bias(w, l->part[i]))
            ari_walk_weight_gradient(w, l->part[i], true, NULL, &outer[i]);
    }
}

void ari_walk_linear_backward(ari_walk *w, const ari_linear_ops *l)
{
    const size_t in = ari_walk_param(w, l->part[0], false).shape[1], out = outputs(w, l);
    const ar_placement dy = ari_gradient_of(made(l)), dx = ari_gradient_of(taken(l));
    const ari_op_value x = ari_walk_activation(w, in, taken(l), 1);
    outside(w, l, out, l->to, dy);
    input_gradient(w, l, dy);
    if (l->cut != ARI_CUT_ROWS)
        outside(w, l, in, dx, l->from);
    w->again = true;
    if (l->cut == ARI_CUT_ROWS && !w->c->run.parallel.keep_gathered)
        outside(w, l, in, l->from, taken(l));
    w->again = false;
    weight_gradients(w, l, &x, dy, l->cut == ARI_CUT_COLUMNS ? l->to : dy);
}
