/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of the forward and the backward pass, each by the rule of its kind. Backward every operation is linear
 * in the gradients that it gets, and the gradient of a value that is invariant must be invariant. */
#include <stdio.h>

#include "plan/lint.h"

static const ar_placement whole = {AR_INVARIANT, 0};
enum { FEATURES = 2 }; /* the dimension of an activation */

static bool is_vector(const ari_op_value *v)
{
    return v->ndim == 1;
}

ari_lint_type ari_lint_by(ari_lint_state *l, const ari_operation *op, ari_lint_pair_rule rule, ari_lint_type a,
                          ari_lint_type b)
{
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, rule(a.at[axis], b.at[axis]));
    return out;
}

static ari_lint_type elementwise(ari_lint_state *l, const ari_operation *op, ari_lint_type x, bool linear)
{
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, ari_lint_elementwise(x.at[axis], linear));
    return out;
}

static ari_lint_type along(ari_lint_state *l, const ari_operation *op, ari_lint_type x, int dim, bool linear)
{
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, ari_lint_along(x.at[axis], dim, linear));
    return out;
}

static ari_lint_type add_parameter(ari_lint_state *l, const ari_operation *op, ari_lint_type x, const ari_op_value *w)
{
    ari_lint_type out, b = ari_lint_stated(w);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, ari_lint_add_parameter(x.at[axis], b.at[axis], is_vector(w) ? 0 : 1));
    return out;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* A use of the operation's weight i: it is placed as everywhere else, and equal on the data-parallel ranks. */
static ari_lint_type use(ari_lint_state *l, const ari_operation *op, int i)
{
    const ari_op_value *v = &op->weight[i];
    ari_lint_param *p = ari_lint_parameter(l, op->layer, v);
    if (!p)
        return ari_lint_stated(v);
    p->uses += !op->recomputed;
    const int axis = ari_lint_dp_axis(l);
    bool *broadcast = &p->broadcast[op->stage % l->size[ARI_AXIS_PP] > 0];
    if (!*broadcast && axis != ARI_LINT_NO_AXIS) {
        ari_lint_find(l->f, op, axis, AR_LINT_missing_broadcast, "V", "R",
                      "broadcast the parameter over dp from rank 0 before the first step");
        *broadcast = true;
    }
    return ari_lint_agree(l, op, v, p->is);
}

/* What is computed again is placed as it was before. */
static void keep_again(ari_lint_state *l, const ari_operation *op, ari_lint_record *before, ari_lint_type out)
{
    ari_lint_type ignored;
    if (!before || before->within != op->within)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one",
                      "leave it out, or add it to the forward pass");
    else if (before->recomputed)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_repeated_operation, "twice", "once",
                      "leave one of the two out");
    for (int axis = 0; before && axis < ARI_LINT_AXES; axis++) {
        before->recomputed = true;
        if (!ari_lint_same(out.at[axis], before->out.at[axis]))
            ari_lint_judge(l, op, axis, &ignored, ari_lint_mismatch(out.at[axis], before->out.at[axis]));
    }
}

static void keep(ari_lint_state *l, const ari_operation *op, ari_lint_type stored, ari_lint_type out)
{
    ari_lint_record *before = ari_lint_recorded(l, op->layer, op->kind, op->role);
    if (op->recomputed)
        keep_again(l, op, before, out);
    else if (before)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_repeated_operation, "twice", "once",
                      "leave one of the two out");
    else
        ari_lint_keep(l, op, stored, out);
}

static void embedding(ari_lint_state *l, const ari_operation *op)
{
    static const ar_placement positions = {AR_SHARD, 1};
    ari_lint_type ids = {.at = {[ARI_AXIS_DP] = {AR_SHARD, 0},
                                [ARI_AXIS_RING] = positions,
                                [ARI_AXIS_INNER] = positions,
                                [ARI_AXIS_TP] = whole,
                                [ARI_LINT_COPIES] = whole}};
    ids = ari_lint_agree(l, op, &op->input[0], ids);
    ari_lint_type out = ari_lint_by(l, op, ari_lint_lookup, ids, use(l, op, 0));
    ari_lint_collectives(l, op, &out, 1, NULL, &op->output[0]);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], out);
    keep(l, op, ids, l->at[0]);
}

static void positions(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type x = ari_lint_agree(l, op, &op->input[0], l->at[0]);
    use(l, op, 0);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], add_parameter(l, op, x, &op->weight[0]));
}

/* A norm of heads takes each of them as a row. */
static void norm(ari_lint_state *l, const ari_operation *op)
{
    const bool of_heads = ari_lint_norm_of_heads(l, op->role);
    const ari_lint_type x = ari_lint_agree(l, op, &op->input[0], l->at[0]);
    if (op->role == ARI_NORM1 || op->role == ARI_NORM2 || op->role == ARI_FINAL_NORM)
        l->skip = l->moved == op->role ? l->before : x; /* in a block */
    ari_lint_type out = of_heads ? x : along(l, op, x, FEATURES, false);
    for (int i = 0; i < op->weights; i++) {
        use(l, op, i);
        out = of_heads ? out : add_parameter(l, op, out, &op->weight[i]);
    }
    l->at[0] = ari_lint_agree(l, op, &op->output[0], out);
    keep(l, op, x, l->at[0]);
}

static bool gathers(const ari_operation *op)
{
    return op->calls > 0 && op->call[0].kind == ARI_CALL_ALL_GATHER;
}

/* Value i, by collectives, or without any by taking the own part. What is to be summed and is whole already is what the
 * collective is judged by. */
static ari_lint_type redistributed(ari_lint_state *l, const ari_operation *op, int i, ari_lint_type has)
{
    const ari_lint_type from = ari_lint_stated(&op->input[i]), to = ari_lint_stated(&op->output[i]);
    ari_lint_type v = has;
    bool summed_again = false;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        summed_again = summed_again || (ari_lint_partial(from.at[axis]) && ari_lint_whole(has.at[axis]));
    if (!summed_again)
        v = ari_lint_agree(l, op, &op->input[i], has);
    ari_lint_collectives(l, op, &v, 1, NULL, &op->output[i]);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (ari_lint_whole(v.at[axis]) && to.at[axis].kind == AR_SHARD)
            v.at[axis] = to.at[axis];
    }
    return ari_lint_agree(l, op, &op->output[i], v);
}

static void redistribute(ari_lint_state *l, const ari_operation *op)
{
    l->before = l->at[0];
    for (int i = 0; i < op->inputs; i++)
        l->at[i] = redistributed(l, op, i, l->at[i]);
}

/* What is kept of X for the weight gradients: the part before it was gathered, unless that is kept. */
static void product(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type x = ari_lint_agree(l, op, &op->input[0], l->at[0]);
    const bool again = l->gathered && !l->c->run.parallel.keep_gathered;
    ari_lint_type out = x;
    for (int i = 0; i < op->weights; i++)
        out = ari_lint_by(l, op, ari_lint_product, x, use(l, op, i));
    ari_lint_collectives(l, op, &out, 1, NULL, &op->output[0]);
    for (int i = 0; i < op->outputs; i++)
        l->at[i] = ari_lint_agree(l, op, &op->output[i], out);
    for (int i = op->outputs; i < ARI_OP_VALUES; i++) /* of one parameter, several may be taken out of it */
        l->at[i] = l->at[0];
    l->has_maker = ari_lint_partial(l->at[0].at[ARI_AXIS_TP]);
    if (l->has_maker)
        l->maker = *op;
    keep(l, op, again ? l->before : x, l->at[0]);
}

static void bias(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        const ari_lint_type x = ari_lint_agree(l, op, &op->input[i], l->at[i]);
        if (op->recomputed || !ari_lint_recorded(l, op->layer, op->kind, op->role))
            use(l, op, i);
        l->at[i] = add_parameter(l, op, x, &op->weight[i]);
    }
    ari_lint_collectives(l, op, l->at, op->outputs, NULL, &op->output[0]);
    for (int i = 0; i < op->outputs; i++)
        l->at[i] = ari_lint_agree(l, op, &op->output[i], l->at[i]);
    keep(l, op, l->at[0], l->at[0]);
}

/* Functions of each element, or of a head's features, of one value or of several that are placed alike. */
static void functions(ari_lint_state *l, const ari_operation *op, bool linear)
{
    ari_lint_type in[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++)
        in[i] = elementwise(l, op, ari_lint_agree(l, op, &op->input[i], l->at[i]), linear);
    for (int i = 0; i < op->outputs; i++)
        l->at[i] = ari_lint_agree(l, op, &op->output[i], in[i < op->inputs ? i : 0]);
    keep(l, op, in[0], l->at[0]);
}

static void linear_function(ari_lint_state *l, const ari_operation *op)
{
    functions(l, op, true);
}

static void other_function(ari_lint_state *l, const ari_operation *op)
{
    functions(l, op, false);
}

/* Queries, keys and values on their way, each by the operation's collectives unless it stays as it is. */
static void travel(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        const ari_lint_type from = ari_lint_stated(&op->input[i]), to = ari_lint_stated(&op->output[i]);
        bool moves = false;
        for (int axis = 0; axis < ARI_LINT_AXES; axis++)
            moves = moves || (l->size[axis] > 1 && !ari_lint_same(from.at[axis], to.at[axis]));
        l->at[i] = moves ? redistributed(l, op, i, l->at[i]) : ari_lint_agree(l, op, &op->input[i], l->at[i]);
    }
}

/* The keys and values of the forward pass once more, beside the gradients. */
static void travel_again(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type gradients[ARI_OP_VALUES];
    if (l->keys_again)
        ari_lint_find(l->f, op, ARI_AXIS_RING, AR_LINT_repeated_operation, "twice", "once", "leave one of the two out");
    l->keys_again = true;
    for (int i = 0; i < op->inputs; i++) {
        gradients[i] = l->at[i];
        l->at[i] = ari_lint_stated(&op->input[i]);
    }
    travel(l, op);
    for (int i = 0; i < op->inputs; i++)
        l->at[i] = gradients[i];
}

/* Every query sees the keys and the values of all tokens. */
static void attention(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type x[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++)
        x[i] = ari_lint_agree(l, op, &op->input[i], l->at[i]);
    ari_lint_type q = x[0];
    for (int i = op->inputs > 1; i < op->inputs; i++)
        q = ari_lint_by(l, op, ari_lint_attend, q, x[i]);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], q);
    keep(l, op, q, l->at[0]);
}

/* Whether terms of a sum go through the operation: it is linear and works on whatever there is, or adds them up. */
static bool takes_terms(const ari_operation *op)
{
    return op->kind == ARI_OPERATION_BIAS || op->kind == ARI_OPERATION_DROPOUT ||
           op->kind == ARI_OPERATION_REDISTRIBUTE;
}

/* Terms that nothing has added up where the sum is needed: the finding is where they are made, for the repair belongs
 * there. */
static void settle_terms(ari_lint_state *l, const ari_operation *op)
{
    if (takes_terms(op))
        return;
    for (int axis = 0; axis < ARI_LINT_AXES && l->has_maker; axis++) {
        const ar_placement has = l->at[0].at[axis];
        for (int i = 0; i < l->maker.outputs && ari_lint_partial(has); i++)
            ari_lint_judge(l, &l->maker, axis, &l->at[i], ari_lint_mismatch(has, whole));
    }
    l->has_maker = false;
}

static void residual(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type a = ari_lint_agree(l, op, &op->input[0], ari_lint_by(l, op, ari_lint_add, l->at[0], l->skip));
    l->at[0] = ari_lint_agree(l, op, &op->output[0], a);
    keep(l, op, a, l->at[0]);
}

/* A softmax over shards takes a maximum, a sum of exponentials and the target's logit of all of them. */
static ari_lint_type cross_entropy(ari_lint_state *l, const ari_operation *op, ari_lint_type logits)
{
    static const char *const tags[] = {"loss max", "loss sum", "loss target"};
    ari_lint_type v[3];
    for (int i = 0; i < 3; i++) {
        v[i] = elementwise(l, op, logits, false);
        for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
            if (logits.at[axis].kind == AR_SHARD && logits.at[axis].dim == FEATURES)
                v[i].at[axis] = (ar_placement){i == 0 ? AR_PARTIAL_MAX : AR_PARTIAL_SUM, 0};
        }
    }
    ari_lint_collectives(l, op, v, 3, tags, &op->output[0]);
    for (int i = 0; i < 2; i++)
        (void)ari_lint_agree(l, op, &op->output[0], v[i]);
    return ari_lint_agree(l, op, &op->output[0], v[2]);
}

static void check_count(ari_lint_state *l, const ari_operation *op)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        char repair[AR_LINT_REPAIR];
        snprintf(repair, sizeof repair, "all-reduce the number of targets over %s, and divide by the sum",
                 ari_axis_name(axis));
        if (ari_lint_partial(l->targets.at[axis]) && l->size[axis] > 1)
            ari_lint_find(l->f, op, axis, AR_LINT_local_count, "P(sum)", "I", repair);
    }
}

static void loss(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type x = ari_lint_agree(l, op, &op->input[0], l->at[0]);
    ari_lint_type terms = x;
    if (l->head) {
        terms = cross_entropy(l, op, x);
    } else {
        ari_lint_collectives(l, op, &terms, 1, NULL, &op->output[0]);
        terms = ari_lint_agree(l, op, &op->output[0], terms);
    }
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) /* each rank adds its own up */
        l->loss.at[axis] =
            ari_lint_whole(terms.at[axis]) && axis != ARI_AXIS_PP ? whole : (ar_placement){AR_PARTIAL_SUM, 0};
    if (l->head)
        check_count(l, op);
    keep(l, op, x, x);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* The operation's record of the forward pass, met for the first time. NULL: it has none. */
static ari_lint_record *comes_back(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_record *r = ari_lint_recorded(l, op->layer, op->kind, op->role);
    if (!r)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one",
                      "leave it out, or add it to the forward pass");
    else if (r->backward)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_repeated_operation, "twice", "once",
                      "leave one of the two out");
    else
        r->backward = true;
    return r;
}

/* The gradient of the output of an operation that takes and makes values placed alike: it is placed as the gradient of
 * that output is. */
static ari_lint_type arrives(ari_lint_state *l, const ari_operation *op, const ari_lint_record *r, int i)
{
    const ari_lint_type dy = ari_lint_agree(l, op, &op->input[i], l->at[i]);
    for (int axis = 0; r && axis < ARI_LINT_AXES; axis++) {
        ari_lint_verdict v = {.makes = r->out.at[axis]};
        const ar_status st = ar_placement_gradient(&v.makes, r->out.at[axis]);
        if (st == AR_OK && !ari_lint_same(dy.at[axis], v.makes))
            v = ari_lint_mismatch(dy.at[axis], v.makes);
        ari_lint_type ignored;
        ari_lint_judge(l, op, axis, &ignored, v);
    }
    return dy;
}

static void functions_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_record *r = comes_back(l, op);
    ari_lint_type dy[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++)
        dy[i] = arrives(l, op, r, i);
    for (int i = 0; i < op->outputs; i++)
        l->at[i] = ari_lint_agree(l, op, &op->output[i], dy[i < op->inputs ? i : 0]);
    l->dys = 0;
}

static void norm_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_record *r = comes_back(l, op);
    l->multiplied = NULL;
    l->dy[0] = arrives(l, op, r, 0);
    l->dys = 1;
    l->at[0] = ari_lint_agree(l, op, &op->output[0], l->dy[0]);
}

/* dK and dV of copies of a KV head, and on the places of a ring: each rank's are those of its own queries. */
static void attention_backward(ari_lint_state *l, const ari_operation *op)
{
    if (l->size[ARI_AXIS_RING] > 1 && !l->keys_again)
        ari_lint_find(l->f, op, ARI_AXIS_RING, AR_LINT_missing_gather, "S(1)", "R",
                      "pass keys and values round once more: the forward pass has kept the own ones");
    l->keys_again = false;
    const ari_lint_type dy = arrives(l, op, comes_back(l, op), 0);
    for (int i = 0; i < op->outputs; i++) {
        l->at[i] = dy;
        if (op->output[i].copies > 1)
            l->at[i].at[ARI_LINT_COPIES] = (ar_placement){AR_PARTIAL_SUM, 0};
        if (i > 0)
            l->at[i].at[ARI_AXIS_RING] = (ar_placement){AR_PARTIAL_SUM, 0};
    }
    ari_lint_collectives(l, op, l->at, op->outputs, NULL, &op->output[0]);
    for (int i = 0; i < op->outputs; i++)
        l->at[i] = ari_lint_agree(l, op, &op->output[i], l->at[i]);
    l->dys = 0;
}

static void product_backward(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type dx = l->at[0];
    l->multiplied = comes_back(l, op);
    for (int i = 0; i < op->inputs; i++) {
        l->dy[i] = ari_lint_agree(l, op, &op->input[i], l->at[i]);
        dx = ari_lint_by(l, op, ari_lint_product_dx, l->dy[i], ari_lint_stated(&op->weight[i]));
    }
    l->dys = op->inputs;
    ari_lint_collectives(l, op, &dx, 1, NULL, &op->output[0]);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], dx);
}

/* What a product takes is called as its first weight: of tied ones as the head. */
static ari_role product_of(const ari_operation *gather)
{
    return gather->role == ARI_HEAD || gather->calls == 0 ? gather->role : gather->call[0].role;
}

/* The input of a product of the forward pass, for its weights' gradients: right behind its dX, or before. */
static void gather_again(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_record *r = ari_lint_recorded(l, op->layer, ARI_OPERATION_PRODUCT, product_of(op));
    const ari_lint_type again = redistributed(l, op, 0, r ? r->stored : ari_lint_stated(&op->input[0]));
    if (!r)
        return;
    r->again = again;
    r->has_again = true;
}

static void redistribute_backward(ari_lint_state *l, const ari_operation *op)
{
    if (op->again) {
        gather_again(l, op);
        return;
    }
    if (!l->after_product)
        l->before = l->at[0];
    for (int i = 0; i < op->inputs; i++)
        l->at[i] = redistributed(l, op, i, l->at[i]);
}

static void residual_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type branch = arrives(l, op, comes_back(l, op), 0);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], ari_lint_by(l, op, ari_lint_add, branch, l->skip));
    l->skip = l->at[0];
    l->dys = 0;
}

static void loss_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_record *r = comes_back(l, op);
    l->at[0] = ari_lint_agree(l, op, &op->output[0], ari_lint_agree(l, op, &op->input[0], r ? r->out : l->at[0]));
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

typedef void (*judge)(ari_lint_state *l, const ari_operation *op);
static const judge judges[ARI_OPERATION_KINDS][2] = {
    [ARI_OPERATION_EMBEDDING] = {embedding, NULL},
    [ARI_OPERATION_POSITIONS] = {positions, NULL},
    [ARI_OPERATION_NORM] = {norm, norm_backward},
    [ARI_OPERATION_REDISTRIBUTE] = {redistribute, redistribute_backward},
    [ARI_OPERATION_PRODUCT] = {product, product_backward},
    [ARI_OPERATION_BIAS] = {bias, NULL},
    [ARI_OPERATION_ROPE] = {linear_function, functions_backward},
    [ARI_OPERATION_HEADS] = {travel, travel},
    [ARI_OPERATION_RING] = {travel, travel_again},
    [ARI_OPERATION_ATTENTION] = {attention, attention_backward},
    [ARI_OPERATION_ACTIVATION] = {other_function, functions_backward},
    [ARI_OPERATION_GATE] = {other_function, functions_backward},
    [ARI_OPERATION_DROPOUT] = {linear_function, functions_backward},
    [ARI_OPERATION_RESIDUAL] = {residual, residual_backward},
    [ARI_OPERATION_LOSS] = {loss, loss_backward},
    [ARI_OPERATION_WEIGHT_GRADIENT] = {NULL, ari_lint_weight_gradient},
    [ARI_OPERATION_SEND] = {ari_lint_send, ari_lint_send},
    [ARI_OPERATION_RECEIVE] = {ari_lint_receive, ari_lint_receive},
};

/* Without a norm of what they get: whether what the operation makes goes into a branch and past it. */
static bool begins_branch(const ari_operation *op)
{
    return op->layer == ARI_NO_LAYER || op->kind == ARI_OPERATION_RESIDUAL || op->kind == ARI_OPERATION_RECEIVE;
}

void ari_lint_pass_operation(ari_lint_state *l, const ari_operation *op)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD && !op->recomputed;
    const bool moves = op->kind == ARI_OPERATION_REDISTRIBUTE;
    const judge f = judges[op->kind][backward];
    if (op->pass == ARI_PASS_BACKWARD && l->layer == ARI_NO_LAYER && op->layer != ARI_NO_LAYER)
        l->skip = l->at[0]; /* the blocks begin: the last residual's gradient goes both ways */
    ari_lint_turn(l, op);
    if (!backward)
        settle_terms(l, op);
    if (moves && l->last == ARI_OPERATION_WEIGHT_GRADIENT)
        l->after_product = false;
    if (f)
        f(l, op);
    if (!backward && l->c->config->norm_place == AR_NORM_AFTER && begins_branch(op))
        l->skip = l->at[0];
    if (!moves && op->kind != ARI_OPERATION_WEIGHT_GRADIENT)
        l->after_product = op->kind == ARI_OPERATION_PRODUCT || op->kind == ARI_OPERATION_NORM;
    if (backward && !moves && op->kind != ARI_OPERATION_PRODUCT && op->kind != ARI_OPERATION_WEIGHT_GRADIENT)
        l->before = l->at[0];
    l->last = op->kind;
    l->moved = moves ? op->role : ARI_NO_ROLE;
    l->gathered = moves && gathers(op);
}

void ari_lint_end_of_passes(ari_lint_state *l)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED];
    for (size_t i = 0; i < l->records; i++) {
        const ari_lint_record *r = &l->record[i];
        const ari_operation op = {.kind = r->kind, .pass = ARI_PASS_BACKWARD, .layer = r->layer, .role = r->role};
        if (judges[r->kind][1] && !r->backward)
            ari_lint_find(l->f, &op, ARI_LINT_NO_AXIS, AR_LINT_missing_backward, "none", "its gradient",
                          "pass the gradient of its output on to its input");
    }
    for (size_t i = 0; l->records > 0 && i < l->params; i++) {
        ari_lint_param *p = &l->param[i];
        const ari_operation op = {.kind = ARI_OPERATION_WEIGHT_GRADIENT,
                                  .pass = ARI_PASS_BACKWARD,
                                  .layer = p->layer,
                                  .role = p->role,
                                  .output = {{.bias = p->bias}},
                                  .params = 1};
        snprintf(has, sizeof has, "%d of its uses", p->gradients);
        snprintf(needs, sizeof needs, "%d", p->uses);
        if (p->gradients != p->uses)
            ari_lint_find(l->f, &op, ARI_LINT_NO_AXIS, AR_LINT_missing_gradient, has, needs,
                          "add the gradients of all uses of the parameter");
        p->uses = p->gradients = 0;
    }
    ari_lint_forget(l);
}
