/* SPDX-License-Identifier: Apache-2.0 */
/* The operations of the forward and the backward pass, each by the rule of its kind. Backward every operation is linear
 * in the gradients that it gets, and the gradient of a value that is invariant must be invariant. */
#include <stdio.h>

#include "ref/placement/placement_private.h"
#include "verify/lint/lint.h"

static const ar_placement whole = {AR_INVARIANT, 0};
enum { FEATURES = 2 }; /* the dimension of an activation */

static bool is_vector(const ari_op_value *v)
{
    return v->ndim == 1;
}

/* A type whose placement along each axis is the rule's, of two placements. */
typedef ari_lint_verdict (*pair_rule)(ar_placement a, ar_placement b);
static ari_lint_type by(ari_lint_state *l, const ari_operation *op, pair_rule rule, ari_lint_type a, ari_lint_type b)
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

static ari_lint_type along_features(ari_lint_state *l, const ari_operation *op, ari_lint_type x, bool linear)
{
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, ari_lint_along(x.at[axis], FEATURES, linear));
    return out;
}

static ari_lint_type add_parameter(ari_lint_state *l, const ari_operation *op, ari_lint_type x, const ari_op_value *w)
{
    ari_lint_type out, b = ari_lint_stated(w);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ari_lint_judge(l, op, axis, &out, ari_lint_add_parameter(x.at[axis], b.at[axis], is_vector(w) ? 0 : 1));
    return out;
}

/* --- what all have in common -------------------------------------------------------------------------------------- */

/* Input i, placed as the list says. */
static ari_lint_type taken(ari_lint_state *l, const ari_operation *op, int i)
{
    return ari_lint_agree(l, op, &op->input[i], ari_lint_input(l, op, i));
}

static void take_all(ari_lint_state *l, const ari_operation *op, ari_lint_type *x)
{
    for (int i = 0; i < op->inputs; i++)
        x[i] = taken(l, op, i);
}

/* All outputs, of which output i is what input i has become, or the first one. */
static void make_all(ari_lint_state *l, const ari_operation *op, const ari_lint_type *x)
{
    for (int i = 0; i < op->outputs; i++)
        ari_lint_output(l, op, i, x[i < op->inputs ? i : 0]);
}

/* A use of the operation's weight i: it is placed as everywhere else, and equal on the data-parallel ranks. */
static ari_lint_type use(ari_lint_state *l, const ari_operation *op, int i)
{
    const ari_op_value *v = &op->weight[i];
    ari_lint_param *p = ari_lint_parameter(l, op->layer, v);
    p->uses += !op->recomputed && v->role != ARI_ROUTER_BIAS; /* which has no gradient */
    const int axis = ari_lint_axis_of_copies(l, v);
    size_t *broadcast = &p->broadcast[op->stage % l->size[ARI_AXIS_PP] > 0];
    if (*broadcast < ari_lint_like(l, v->role) && axis != ARI_LINT_NO_AXIS) {
        ari_lint_find(l->f, op, axis, AR_LINT_missing_broadcast, "V", "R",
                      "broadcast the parameter over dp from rank 0 before the first step");
        *broadcast = ari_lint_like(l, v->role);
    }
    return ari_lint_agree(l, op, v, p->is);
}

/* True if terms of a sum may pass through the operation: it is linear and works on anything, or adds them up. */
static bool takes_terms(const ari_operation *op)
{
    return op->kind == ARI_OPERATION_BIAS || op->kind == ARI_OPERATION_DROPOUT ||
           op->kind == ARI_OPERATION_REDISTRIBUTE;
}

/* Terms that nothing has added up where the sum is needed: the finding is where they are made, for the repair belongs
 * there. */
static void settle_terms(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        ari_lint_value *v = ari_lint_value_of(l, op->input[i].id);
        for (int axis = 0; axis < ARI_LINT_AXES && v->terms; axis++) {
            if (ari_lint_partial(v->is.at[axis]))
                ari_lint_judge(l, &l->maker, axis, &v->is, ari_lint_mismatch(v->is.at[axis], whole));
        }
        v->terms = false;
    }
}

/* Checks that the forward pass has made a value. */
static void check_forward(ari_lint_state *l, const ari_operation *op, size_t value, const char *repair)
{
    if (ari_lint_value_of(l, value)->parts == 0)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one", repair);
}

/* A gradient that an operation takes is placed as that of what its forward pass has made. */
static ari_lint_type arrives(ari_lint_state *l, const ari_operation *op, int i)
{
    const ari_lint_type dy = taken(l, op, i);
    const ari_lint_value *made = ari_lint_value_of(l, op->input[i].of);
    check_forward(l, op, op->input[i].of, "leave it out, or add it to the forward pass");
    for (int axis = 0; made->parts > 0 && axis < ARI_LINT_AXES; axis++) {
        ari_lint_verdict v = {.makes = made->is.at[axis]};
        const ar_status st = ari_placement_gradient(&v.makes, made->is.at[axis]);
        if (st == AR_OK && !ari_lint_same(dy.at[axis], v.makes))
            v = ari_lint_mismatch(dy.at[axis], v.makes);
        ari_lint_type ignored;
        ari_lint_judge(l, op, axis, &ignored, v);
    }
    return dy;
}

/* --- both passes -------------------------------------------------------------------------------------------------- */

/* Value i, by collectives, or without any by taking the own part. What is to be summed and is whole already is what the
 * collective is judged by. */
static void redistribute_one(ari_lint_state *l, const ari_operation *op, int i)
{
    const ari_lint_type from = ari_lint_stated(&op->input[i]), to = ari_lint_stated(&op->output[i]);
    ari_lint_type v = ari_lint_input(l, op, i);
    bool summed_again = false;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        summed_again = summed_again || (ari_lint_partial(from.at[axis]) && ari_lint_whole(v.at[axis]));
    if (!summed_again)
        v = ari_lint_agree(l, op, &op->input[i], v);
    ari_lint_collectives(l, op, &v, 1, NULL, &op->output[i]);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (ari_lint_whole(v.at[axis]) && to.at[axis].kind == AR_SHARD)
            v.at[axis] = to.at[axis];
    }
    ari_lint_output(l, op, i, v);
}

static void redistribute(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++)
        redistribute_one(l, op, i);
}

/* Queries, keys and values on their way, each by the operation's collectives unless it stays as it is. */
static void travel(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        const ari_lint_type from = ari_lint_stated(&op->input[i]), to = ari_lint_stated(&op->output[i]);
        bool moves = false;
        for (int axis = 0; axis < ARI_LINT_AXES; axis++)
            moves = moves || (l->size[axis] > 1 && !ari_lint_same(from.at[axis], to.at[axis]));
        if (moves)
            redistribute_one(l, op, i);
        else
            ari_lint_output(l, op, i, taken(l, op, i));
    }
}

/* It is one call between two neighbours of the pipeline, of all that the rank has. */
static void message(ari_lint_state *l, const ari_operation *op)
{
    const ari_call_kind kind = op->kind == ARI_OPERATION_SEND ? ARI_CALL_SEND : ARI_CALL_RECV;
    const ari_op_call *call = &op->call[0];
    const double elements = ari_op_elements(&op->input[0]);
    char has[AR_LINT_PLACED] = "none", needs[AR_LINT_PLACED];
    ari_lint_output(l, op, 0, taken(l, op, 0));
    if (op->calls == 1 && call->kind == kind && call->over == ARI_OVER_PP && call->ranks == 2 &&
        (double)call->elements == elements)
        return;
    if (op->calls > 1)
        snprintf(has, sizeof has, "%d of them", op->calls);
    else if (op->calls == 1)
        snprintf(has, sizeof has, "%s of %zu, %zu ranks of %s", ari_call_name(call->kind), call->elements, call->ranks,
                 ari_over_name(call->over));
    snprintf(needs, sizeof needs, "%s of %.0f, 2 ranks of pp", ari_call_name(kind), elements);
    ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_unmatched_message, has, needs,
                  "move it from the one stage to the other, once");
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

static void embedding(ari_lint_state *l, const ari_operation *op)
{
    static const ar_placement positions = {AR_SHARD, 1};
    ari_lint_type ids = {.at = {[ARI_AXIS_DP] = {AR_SHARD, 0},
                                [ARI_AXIS_RING] = positions,
                                [ARI_AXIS_INNER] = positions,
                                [ARI_AXIS_TP] = whole,
                                [ARI_LINT_COPIES] = whole}};
    ids = ari_lint_agree(l, op, &op->input[0], ids);
    ari_lint_type out = by(l, op, ari_lint_lookup, ids, use(l, op, 0));
    ari_lint_collectives(l, op, &out, 1, NULL, &op->output[0]);
    ari_lint_output(l, op, 0, out);
}

static void positions(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type x = taken(l, op, 0);
    use(l, op, 0);
    ari_lint_output(l, op, 0, add_parameter(l, op, x, &op->weight[0]));
}

/* True if a norm takes each head as a row of its own. */
static bool norm_of_heads(const ari_lint_state *l, ari_role role)
{
    return (role == ARI_Q_NORM || role == ARI_K_NORM) && l->c->config->qk_norm == AR_QK_NORM_HEAD;
}

static void norm(ari_lint_state *l, const ari_operation *op)
{
    const bool of_heads = norm_of_heads(l, op->role);
    const ari_lint_type x = taken(l, op, 0);
    ari_lint_type out = of_heads ? x : along_features(l, op, x, false);
    for (int i = 0; i < op->weights; i++) {
        use(l, op, i);
        out = of_heads ? out : add_parameter(l, op, out, &op->weight[i]);
    }
    ari_lint_output(l, op, 0, out);
}

static void lint_product(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type x = taken(l, op, 0);
    ari_lint_type out = x;
    for (int i = 0; i < op->weights; i++)
        out = by(l, op, ari_lint_product, x, use(l, op, i));
    ari_lint_collectives(l, op, &out, 1, NULL, &op->output[0]);
    const bool terms = ari_lint_partial(op->output[0].at[ARI_AXIS_TP]);
    if (terms)
        l->maker = *op;
    for (int i = 0; i < op->outputs; i++) {
        ari_lint_output(l, op, i, out);
        ari_lint_value_of(l, op->output[i].id)->terms = terms;
    }
}

static void bias(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type x[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++) {
        x[i] = taken(l, op, i);
        use(l, op, i);
        x[i] = add_parameter(l, op, x[i], &op->weight[i]);
    }
    ari_lint_collectives(l, op, x, op->outputs, NULL, &op->output[0]);
    make_all(l, op, x);
}

/* Functions of each element, or of a head's features, of one value or of several that are placed alike. */
static void functions(ari_lint_state *l, const ari_operation *op, bool linear)
{
    ari_lint_type x[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++)
        x[i] = elementwise(l, op, taken(l, op, i), linear);
    make_all(l, op, x);
}

static void linear_function(ari_lint_state *l, const ari_operation *op)
{
    functions(l, op, true);
}

static void other_function(ari_lint_state *l, const ari_operation *op)
{
    functions(l, op, false);
}

/* Keys with what all heads share, which every rank has. */
static void join(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type x[ARI_OP_VALUES];
    take_all(l, op, x);
    if (op->role == ARI_JOINED) { /* side by side */
        ari_lint_output(l, op, 0, by(l, op, ari_lint_add, x[0], x[1]));
        return;
    }
    ari_lint_output(l, op, 0, x[0]);
    ari_lint_output(l, op, 1, by(l, op, ari_lint_by_routes, x[1], x[2]));
    ari_lint_output(l, op, 2, x[1]);
}

/* Every query sees the keys and the values of all tokens. */
static void attention(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type x[ARI_OP_VALUES];
    take_all(l, op, x);
    ari_lint_type q = x[0];
    for (int i = 0; i < op->weights; i++)
        use(l, op, i);
    for (int i = op->inputs > 1; i < op->inputs; i++)
        q = by(l, op, ari_lint_attend, q, x[i]);
    ari_lint_output(l, op, 0, q);
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

static const ar_placement own_tokens = {AR_SHARD, 0}, own_positions = {AR_SHARD, 1};

static void expect_whole(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n, int axis)
{
    for (int i = 0; i < n; i++) {
        if (!ari_lint_whole(v[i].at[axis]))
            ari_lint_judge(l, op, axis, &v[i], ari_lint_mismatch(v[i].at[axis], whole));
    }
}

/* The largest logits of a token are those of all experts. By the routes of all ranks that share experts out each knows
 * which rows come; a balance of each sequence is by the counts of all ranks that have positions of it. */
static void route(ari_lint_state *l, const ari_operation *op)
{
    const int n = ar_config_balance(l->c->config, &l->c->run.loss) == AR_BALANCE_SEQUENCE ? 2 : 1;
    const ari_lint_type x = taken(l, op, 0);
    ari_lint_type own[2] = {{.at = {[ARI_LINT_EP] = own_tokens}}}, all = {.at = {[ARI_LINT_EP] = whole}};
    for (int i = 0; i < op->weights; i++)
        use(l, op, i);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        own[1].at[axis].kind = ari_lint_same(x.at[axis], own_positions) ? AR_PARTIAL_SUM : AR_INVARIANT;
    ari_lint_output(l, op, 0, along_features(l, op, x, false));
    ari_lint_collectives_to(l, op, own, n, NULL, &all);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        expect_whole(l, op, own, n, axis);
}

/* Rows of each rank's own tokens, on their way to the ranks of their experts: along the axes of those they become what
 * the list says. */
static ari_lint_type send_rows(ari_lint_state *l, const ari_operation *op, ari_lint_type x)
{
    const bool gathered = l->c->run.parallel.dispatch == AR_DISPATCH_ALL_GATHER;
    const int n = gathered && op->kind == ARI_OPERATION_COMBINE ? 2 : 1; /* with the weights of the rows */
    const ari_lint_type end = ari_lint_stated(&op->output[0]);
    if (!op->output[0].by_expert)
        return x;
    x.at[ARI_LINT_EP] = x.at[ARI_LINT_EDP] = own_tokens;
    ari_lint_type sent[2] = {x, x};
    ari_lint_collectives_to(l, op, sent, n, NULL, &end);
    if (gathered) /* each takes its experts' rows of the tokens of all ranks, by their weights */
        expect_whole(l, op, sent, n, ARI_LINT_EP);
    sent[0].at[ARI_LINT_EP] = end.at[ARI_LINT_EP];
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        sent[0].at[axis] = op->output[0].by_expert >> axis & 1 ? end.at[axis] : sent[0].at[axis];
    return sent[0];
}

/* And back: they are placed as the tokens are then. */
static ari_lint_type return_rows(ari_lint_state *l, const ari_operation *op, ari_lint_type rows, ari_lint_type routes)
{
    const ari_axes axes = op->input[0].by_expert;
    ari_lint_type end = ari_lint_stated(&op->output[0]);
    if (!axes)
        return rows;
    end.at[ARI_LINT_EP] = own_tokens;
    ari_lint_collectives_to(l, op, &rows, 1, NULL, &end);
    if (!ari_lint_same(rows.at[ARI_LINT_EP], own_tokens))
        ari_lint_judge(l, op, ARI_LINT_EP, &rows, ari_lint_mismatch(rows.at[ARI_LINT_EP], own_tokens));
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        rows.at[axis] = axes >> axis & 1 ? routes.at[axis] : rows.at[axis];
    rows.at[ARI_LINT_EP] = rows.at[ARI_LINT_EDP] = whole;
    return rows;
}

/* To rows of experts, or from them; backward the second input is not a gradient. */
static void by_routes(ari_lint_state *l, const ari_operation *op)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD && !op->recomputed;
    const ari_lint_type x = backward ? arrives(l, op, 0) : taken(l, op, 0), routes = taken(l, op, 1);
    const ari_lint_type back = return_rows(l, op, x, routes);
    ari_lint_output(l, op, 0, send_rows(l, op, by(l, op, ari_lint_by_routes, back, routes)));
}

/* That of a token's weights is a sum over the features of what its experts have made. */
static void combine_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type dy = arrives(l, op, 0);
    ari_lint_output(l, op, 0, send_rows(l, op, dy));
    ari_lint_output(l, op, 1, along_features(l, op, dy, true));
}

/* --- the rest of both --------------------------------------------------------------------------------------------- */

static void residual(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type branch = ari_lint_input(l, op, 0), skip = ari_lint_input(l, op, 1);
    ari_lint_output(l, op, 0, ari_lint_agree(l, op, &op->input[0], by(l, op, ari_lint_add, branch, skip)));
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
    return v[2];
}

static void check_count(ari_lint_state *l, const ari_operation *op)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        char repair[AR_LINT_REPAIR];
        snprintf(repair, sizeof repair, "all-reduce the number of targets over %s, and divide by the sum",
                 ari_axis_name(axis));
        if (ari_lint_partial(l->step.targets.at[axis]) && l->size[axis] > 1)
            ari_lint_find(l->f, op, axis, AR_LINT_local_count, "P(sum)", "I", repair);
    }
}

static void loss(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type terms = taken(l, op, 0);
    if (l->head)
        terms = cross_entropy(l, op, terms);
    else
        ari_lint_collectives(l, op, &terms, 1, NULL, &op->output[0]);
    ari_lint_output(l, op, 0, terms);
    terms = ari_lint_stated(&op->output[0]);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) /* each rank adds its own up */
        l->step.loss.at[axis] =
            ari_lint_whole(terms.at[axis]) && axis != ARI_AXIS_PP ? whole : (ar_placement){AR_PARTIAL_SUM, 0};
    if (l->head)
        check_count(l, op);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static void functions_backward(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type dy[ARI_OP_VALUES];
    for (int i = 0; i < op->inputs; i++)
        dy[i] = arrives(l, op, i);
    make_all(l, op, dy);
}

/* That of what all heads share is a sum over them. */
static void join_backward(ari_lint_state *l, const ari_operation *op)
{
    if (op->role == ARI_JOINED) {
        functions_backward(l, op);
        return;
    }
    const ari_lint_type dq = arrives(l, op, 0), dk = arrives(l, op, 1), dv = arrives(l, op, 2);
    ari_lint_type shared = dk;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (dk.at[axis].kind == AR_SHARD && dk.at[axis].dim == FEATURES)
            shared.at[axis] = (ar_placement){AR_PARTIAL_SUM, 0};
    }
    ari_lint_collectives(l, op, &shared, 1, NULL, &op->output[2]);
    ari_lint_output(l, op, 0, dq);
    ari_lint_output(l, op, 1, by(l, op, ari_lint_add, dk, dv));
    ari_lint_output(l, op, 2, shared);
}

/* dK and dV of copies of a KV head, and on the places of a ring: each rank's are those of its own queries. */
static void attention_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type dy = arrives(l, op, 0);
    ari_lint_type x[ARI_OP_VALUES];
    for (int i = 0; i < op->outputs; i++) {
        x[i] = dy;
        if (op->output[i].copies > 1)
            x[i].at[ARI_LINT_COPIES] = (ar_placement){AR_PARTIAL_SUM, 0};
        if (i > 0)
            x[i].at[ARI_AXIS_RING] = (ar_placement){AR_PARTIAL_SUM, 0};
    }
    ari_lint_collectives(l, op, x, op->outputs, NULL, &op->output[0]);
    for (int i = 0; i < op->outputs; i++)
        ari_lint_output(l, op, i, x[i]);
}

static void product_backward(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type dx = ari_lint_stated(&op->output[0]);
    for (int i = 0; i < op->inputs; i++)
        dx = by(l, op, ari_lint_product_dx, taken(l, op, i), ari_lint_stated(&op->weight[i]));
    ari_lint_collectives(l, op, &dx, 1, NULL, &op->output[0]);
    ari_lint_output(l, op, 0, dx);
}

static void residual_backward(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type branch = arrives(l, op, 0), skip = ari_lint_input(l, op, 1);
    ari_lint_output(l, op, 0, by(l, op, ari_lint_add, branch, skip));
}

static void loss_backward(ari_lint_state *l, const ari_operation *op)
{
    check_forward(l, op, op->input[0].of, "leave it out, or add it to the forward pass");
    ari_lint_output(l, op, 0, taken(l, op, 0));
}

/* --- gradients of parameters -------------------------------------------------------------------------------------- */

/* Heads of a norm are summed over as tokens are; of the sinks inner neighbours, each of which has some of a rank's heads,
 * add zeros for the others. */
static ari_lint_type sum_over_tokens(ari_lint_state *l, const ari_operation *op, ari_lint_type dy)
{
    static const ar_placement tokens = {AR_SHARD, 1};
    const bool norm = norm_of_heads(l, op->role), sinks = op->role == ARI_SINKS;
    ari_lint_type out;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        const bool of_heads = norm || (sinks && axis == ARI_AXIS_INNER);
        const ar_placement at = of_heads && dy.at[axis].kind == AR_SHARD ? tokens : dy.at[axis];
        ari_lint_judge(l, op, axis, &out, ari_lint_sum_over_tokens(at, op->output[0].ndim == 1 ? 0 : 1));
    }
    return out;
}

static ari_lint_type weight_gradient_of(ari_lint_state *l, const ari_operation *op, const ari_lint_param *p)
{
    const ari_lint_type dy = taken(l, op, op->inputs - 1);
    if (op->inputs == 1)
        return sum_over_tokens(l, op, dy);
    if (op->input[0].ndim == 2) /* ids */
        return by(l, op, ari_lint_lookup_gradient, dy, p->is);
    const ari_lint_type x = taken(l, op, 0);
    return op->output[0].ndim == 1 ? sum_over_tokens(l, op, dy) : by(l, op, ari_lint_product_dw, x, dy);
}

static void weight_gradient(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_param *p = ari_lint_parameter(l, op->layer, &op->output[0]);
    p->gradients++;
    ari_lint_type out = weight_gradient_of(l, op, p);
    if (p->is.at[ARI_AXIS_PP].kind == AR_REPLICATE) /* of one use of a weight that stages share */
        out.at[ARI_AXIS_PP] = (ar_placement){AR_PARTIAL_SUM, 0};
    out = ari_lint_agree(l, op, &op->output[0], out);
    const size_t copies = ari_lint_partial(out.at[ARI_AXIS_PP]) ? 2 : 1; /* of a tied weight, at both ends */
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (!p->seen[axis] && ari_lint_partial(out.at[axis]))
            l->step.partial[axis] += copies * ari_lint_like(l, op->role);
        p->seen[axis] = p->seen[axis] || ari_lint_partial(out.at[axis]);
    }
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

typedef void (*judge)(ari_lint_state *l, const ari_operation *op);
static const judge judges[ARI_OPERATION_KINDS][2] = {
    [ARI_OPERATION_EMBEDDING] = {embedding, NULL},
    [ARI_OPERATION_POSITIONS] = {positions, NULL},
    [ARI_OPERATION_NORM] = {norm, functions_backward},
    [ARI_OPERATION_REDISTRIBUTE] = {redistribute, redistribute},
    [ARI_OPERATION_PRODUCT] = {lint_product, product_backward},
    [ARI_OPERATION_BIAS] = {bias, NULL},
    [ARI_OPERATION_JOIN] = {join, join_backward},
    [ARI_OPERATION_ROPE] = {linear_function, functions_backward},
    [ARI_OPERATION_HEADS] = {travel, travel},
    [ARI_OPERATION_RING] = {travel, travel},
    [ARI_OPERATION_ATTENTION] = {attention, attention_backward},
    [ARI_OPERATION_ACTIVATION] = {other_function, functions_backward},
    [ARI_OPERATION_GATE] = {other_function, functions_backward},
    [ARI_OPERATION_ROUTE] = {route, functions_backward},
    [ARI_OPERATION_DISPATCH] = {by_routes, by_routes},
    [ARI_OPERATION_COMBINE] = {by_routes, combine_backward},
    [ARI_OPERATION_DROPOUT] = {linear_function, functions_backward},
    [ARI_OPERATION_RESIDUAL] = {residual, residual_backward},
    [ARI_OPERATION_LOSS] = {loss, loss_backward},
    [ARI_OPERATION_WEIGHT_GRADIENT] = {NULL, weight_gradient},
    [ARI_OPERATION_SEND] = {message, message},
    [ARI_OPERATION_RECEIVE] = {message, message},
};

void ari_lint_pass_operation(ari_lint_state *l, const ari_operation *op)
{
    const bool backward = op->pass == ARI_PASS_BACKWARD && !op->recomputed, through = takes_terms(op);
    const judge f = judges[op->kind][backward];
    bool terms[ARI_OP_VALUES] = {false};
    if (!backward && !through)
        settle_terms(l, op);
    for (int i = 0; i < op->inputs && through; i++)
        terms[i] = ari_lint_value_of(l, op->input[i].id)->terms;
    for (int i = 0; i < op->saves; i++)
        check_forward(l, op, op->saved[i], "compute again what it reads: that has not been kept");
    if (f)
        f(l, op);
    for (int i = 0; i < op->outputs && through; i++)
        ari_lint_value_of(l, op->output[i].id)->terms = terms[i];
}
