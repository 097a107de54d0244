/* SPDX-License-Identifier: Apache-2.0 */
/* Checks outside the passes: parameters made equal, counts, sums of gradients, update. */
#include <stdio.h>

#include "verify/lint/lint.h"

static const ar_placement whole = {AR_INVARIANT, 0}, term = {AR_PARTIAL_SUM, 0};

static void add_finding(ari_lint_state *l, const ari_operation *op, int axis, ar_lint_rule rule, const char *has,
                        const char *needs, const char *repair)
{
    if (axis != ARI_LINT_NO_AXIS && l->size[axis] > 1)
        ari_lint_find(l->f, op, axis, rule, has, needs, repair);
}

/* The operation's one value after its collectives, as the list has it. */
static ari_lint_type through(ari_lint_state *l, const ari_operation *op, ari_lint_type v)
{
    ari_lint_collectives(l, op, &v, 1, NULL, &op->output[0]);
    return ari_lint_agree(l, op, &op->output[0], v);
}

/* --- the start ---------------------------------------------------------------------------------------------------- */

/* A parameter's ranks are those of dp, of an expert's those of edp; others have other parts of it, or other experts,
 * which a broadcast overwrites. */
static void lint_broadcast(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_param *p = ari_lint_parameter(l, op->layer, &op->output[0]);
    const bool expert = op->output[0].by_expert != 0;
    const size_t all = l->size[ARI_AXIS_DP] * l->size[ARI_AXIS_RING] * l->size[ARI_AXIS_INNER];
    const size_t holders = expert ? l->size[ARI_LINT_EDP] : all;
    const ari_over over = expert ? ARI_OVER_EDP : ARI_OVER_DP;
    char has[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
    p->broadcast[op->stage > 0] += op->calls > 0;
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        if (call->over == over && call->ranks == holders)
            continue;
        snprintf(has, sizeof has, "%zu ranks of %s", call->ranks,
                 call->over == over ? "the world" : ari_over_name(call->over));
        snprintf(
            repair, sizeof repair,
            "broadcast over the parameter's dp group: the ranks of one tp rank, %zu apart; others hold other parts",
            l->size[ARI_AXIS_TP]);
        if (expert)
            snprintf(repair, sizeof repair,
                     "broadcast over the expert's edp group, of one rank of each ep group; others hold other experts");
        char needs[AR_LINT_PLACED];
        snprintf(needs, sizeof needs, "%zu ranks of %s", holders, ari_over_name(over));
        add_finding(l, op, ari_lint_axis_of_copies(l, &op->output[0]), AR_LINT_wrong_group, has, needs, repair);
    }
}

/* --- counts and losses -------------------------------------------------------------------------------------------- */

static void targets(ari_lint_state *l, const ari_operation *op)
{
    const bool first = op->stage == 0; /* each rank of a pipeline counts them */
    ari_lint_type count = l->step.weights;
    ari_lint_over_dp(&count, term); /* what is left of that, the loss tells */
    ari_lint_collectives(l, op, &count, 1, NULL, &op->output[0]);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        l->step.targets.at[axis] =
            first || ari_lint_partial(count.at[axis]) ? count.at[axis] : l->step.targets.at[axis];
}

/* Of tokens that the ranks route, in integers, or of losses besides that of the next token; of a matrix of which each
 * rank has a part among zeros, or of terms of one that stays cut. */
static void sum_stated(ari_lint_state *l, const ari_operation *op)
{
    (void)through(l, op, ari_lint_stated(&op->input[0]));
}

/* The last stage has terms; the others hear of their sum. */
static void loss_sum(ari_lint_state *l, const ari_operation *op)
{
    if (op->stage + 1 < l->size[ARI_AXIS_PP]) {
        ari_lint_type none = l->step.weights;
        ari_lint_over_dp(&none, whole);
        none.at[ARI_AXIS_PP] = term;
        (void)through(l, op, ari_lint_agree(l, op, &op->input[0], none));
        return;
    }
    l->step.loss = through(l, op, ari_lint_agree(l, op, &op->input[0], l->step.loss));
}

/* A byte for each parameter: whether any rank has a gradient of it. */
static void unused(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type used = ari_lint_stated(&op->input[0]);
    ari_lint_over_dp(&used, (ar_placement){AR_PARTIAL_MAX, 0});
    (void)through(l, op, used);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static void gradient_sum(ari_lint_state *l, const ari_operation *op)
{
    const ari_lint_type in = ari_lint_stated(&op->input[0]);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (ari_lint_partial(in.at[axis]))
            l->step.reduced[axis] += op->params;
    }
    const ari_lint_type sum = through(l, op, in);
    l->step.summed = op->input[0].by_expert ? l->step.summed : sum.at[ARI_AXIS_DP];
}

/* Squares of the elements that a rank has: over pp and tp other ones than its neighbours', over dp where shares are
 * kept, or other experts. */
static void gradient_norm(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type v[2]; /* an exponent, then the squares */
    v[0] = l->step.weights;
    v[0].at[ARI_AXIS_TP] = v[0].at[ARI_AXIS_PP] = term;
    ari_lint_over_dp(&v[0], l->step.summed.kind == AR_SHARD || l->apart ? term : whole);
    v[0] = v[1] = ari_lint_agree(l, op, &op->input[0], v[0]);
    ari_lint_collectives(l, op, v, 2, NULL, &op->output[0]);
    for (int i = 0; i < 2; i++)
        (void)ari_lint_agree(l, op, &op->output[0], v[i]);
}

static void update(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type gradient = l->step.weights;
    ari_lint_over_dp(&gradient, l->step.summed);
    l->step.weights = ari_lint_agree(l, op, &op->output[0], ari_lint_agree(l, op, &op->input[0], gradient));
}

static void weight_gather(ari_lint_state *l, const ari_operation *op)
{
    ari_lint_type own = l->step.weights;
    if (op->input[0].by_expert) { /* what the update leaves of each rank's experts */
        own = ari_lint_stated(&op->input[0]);
        own.at[ARI_LINT_EDP] = l->step.weights.at[ARI_AXIS_DP];
    }
    l->step.gathers += op->params;
    (void)through(l, op, ari_lint_agree(l, op, &op->input[0], own));
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

void ari_lint_step_operation(ari_lint_state *l, const ari_operation *op)
{
    static void (*const judge[ARI_OPERATION_KINDS])(ari_lint_state *, const ari_operation *) = {
        [ARI_OPERATION_BROADCAST] = lint_broadcast,    [ARI_OPERATION_TARGETS] = targets,
        [ARI_OPERATION_LOSS_SUM] = loss_sum,           [ARI_OPERATION_GRADIENT_SUM] = gradient_sum,
        [ARI_OPERATION_GRADIENT_NORM] = gradient_norm, [ARI_OPERATION_MATRIX] = sum_stated,
        [ARI_OPERATION_MATRIX_PRODUCT] = sum_stated,   [ARI_OPERATION_UPDATE] = update,
        [ARI_OPERATION_WEIGHT_GATHER] = weight_gather, [ARI_OPERATION_UNUSED] = unused,
        [ARI_OPERATION_ROUTER_SUM] = sum_stated,       [ARI_OPERATION_LOGITS_MAX] = sum_stated,
        [ARI_OPERATION_FURTHER_SUM] = sum_stated};
    if (judge[op->kind]) /* the others are messages, whose values have no placement */
        judge[op->kind](l, op);
}

/* As many gradients as have terms along an axis are summed over it. */
static void count_sums(ari_lint_state *l, int axis)
{
    const ari_operation op = {
        .kind = ARI_OPERATION_GRADIENT_SUM, .pass = ARI_PASS_STEP, .layer = ARI_NO_LAYER, .params = 1};
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
    if (l->step.reduced[axis] == l->step.partial[axis])
        return;
    const bool few = l->step.reduced[axis] < l->step.partial[axis];
    snprintf(has, sizeof has, "%zu gradients in sums", l->step.reduced[axis]);
    snprintf(needs, sizeof needs, "%zu", l->step.partial[axis]);
    snprintf(repair, sizeof repair, "%s over %s", few ? "all-reduce the others" : "do not sum gradients that are whole",
             ari_lint_axis_name(axis));
    add_finding(l, &op, axis, few ? AR_LINT_unsummed_gradient : AR_LINT_redundant_reduction, has, needs, repair);
}

void ari_lint_end_of_step(ari_lint_state *l)
{
    const ari_operation loss = {.kind = ARI_OPERATION_LOSS_SUM, .pass = ARI_PASS_STEP, .layer = ARI_NO_LAYER},
                        weights = {.kind = ARI_OPERATION_UPDATE, .pass = ARI_PASS_STEP, .layer = ARI_NO_LAYER};
    ari_lint_end_of_passes(l);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        count_sums(l, axis);
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (ari_lint_partial(l->step.loss.at[axis]))
            add_finding(l, &loss, axis, AR_LINT_missing_reduction, "P(sum)", "I", "all-reduce the loss");
    }
    const bool copied =
        (l->c->config->tied || l->c->config->mtp > 0) && l->size[ARI_AXIS_PP] > 1; /* on the last stage */
    if (l->step.weights.at[ARI_AXIS_DP].kind == AR_SHARD && l->step.gathers < l->params + copied)
        add_finding(l, &weights, ari_lint_dp_axis(l), AR_LINT_missing_gather, "S(0)", "I",
                    "all-gather over dp what each rank has updated");
}
