/* SPDX-License-Identifier: Apache-2.0 */
/* Operations of a step, each checked by the rule of its kind (lint_rules.c), and its collectives by their effect. If an
 * operation declares a different placement than the previous operations produced, that is a finding, and the walk
 * continues with the declared placement: one bug is one finding. */
#include <stdio.h>
#include <string.h>

#include "ref/comm/call.h"
#include "ref/core/size.h"
#include "ref/placement/placement_private.h"
#include "verify/lint/lint_impl.h"

static const ar_placement invariant = {AR_INVARIANT, 0}, term = {AR_PARTIAL_SUM, 0}, samples = {AR_SHARD, 0},
                          positions = {AR_SHARD, 1}, by_expert = {AR_SHARD, ARI_LINT_BY_EXPERT};
enum { FEATURES = 2, ACTIVATION_DIMS = 3 }; /* activations are [b, s, features] */

/* Records a rule's verdict along an axis: the output's placement, and any finding. */
static ar_status judge(ari_lint_walk *w, const ari_ledger_operation *op, int axis, ar_placement *output,
                       ari_lint_verdict v)
{
    *output = v.output;
    return v.broken && ari_lint_size(w, axis) > 1 ? ari_lint_find(w, op, axis, &v) : AR_OK;
}
/* --- values ------------------------------------------------------------------------------------------------------- */

/* An activation of this rank's samples and positions, over tp as said. */
static ari_lint_type activation(ar_placement over_tp)
{
    ari_lint_type t;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        t.placement[axis] = invariant;
    t.placement[ARI_AXIS_DP] = samples;
    t.placement[ARI_AXIS_RING] = t.placement[ARI_AXIS_INNER] = positions;
    t.placement[ARI_AXIS_TP] = over_tp;
    return t;
}

/* Placements of a record count dimensions from the end. */
static ar_placement from_start(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim < 0 ? (ar_placement){AR_SHARD, p.dim + ACTIVATION_DIMS} : p;
}

static void make_value(ari_lint_walk *w, const ari_ledger_value *v, const ari_lint_type *type)
{
    ari_lint_value *value = ari_lint_value_of(w, v);
    *value = (ari_lint_value){.type = *type, .is_known = true, .is_produced = value->is_produced};
}

/* True if a call's ranks differ along an axis. */
bool ari_lint_goes_along(const ari_lint_walk *w, const ari_ledger_call *call, int axis)
{
    const bool experts = call->group == ARI_OVER_EP || ari_over_experts((ari_over)call->group);
    if (call->group < 0 || ari_lint_size(w, axis) == 1)
        return false;
    if (axis == ARI_LINT_COPIES)
        return call->group == ARI_OVER_COPIES;
    if (axis == ARI_LINT_EP)
        return call->group == ARI_OVER_EP;
    if (axis == ARI_LINT_EDP)
        return experts && call->group != ARI_OVER_EP;
    return !experts && call->group != ARI_OVER_COPIES && ari_over_axes((ari_over)call->group) >> axis & 1;
}

static const ari_ledger_call *call_of(const ari_lint_walk *w, const ari_ledger_operation *op, size_t i)
{
    return &ari_lint_walked(w)->ledger->call[op->first_call + i];
}

static size_t calls_along(const ari_lint_walk *w, const ari_ledger_operation *op, int axis)
{
    size_t n = 0;
    for (size_t i = 0; i < op->calls; i++)
        n += ari_lint_goes_along(w, call_of(w, op, i), axis);
    return n;
}

/* Applies a collective along its axis. target: declared result. Returns false if it does not apply. */
static bool moved(ar_placement *p, const ari_ledger_call *call, ar_placement target)
{
    const bool partial = ari_lint_partial(*p), cut = p->kind == AR_SHARD;
    if ((call->kind == ARI_ALL_REDUCE || call->kind == ARI_BROADCAST) && partial)
        *p = invariant;
    else if (call->kind == ARI_REDUCE_SCATTER && partial)
        *p = target.kind == AR_SHARD ? target : samples;
    else if ((call->kind == ARI_ALL_GATHER || call->kind == ARI_EXCHANGE) && cut)
        *p = invariant;
    else if (call->kind == ARI_ALL_TO_ALL && cut && target.kind == AR_SHARD)
        *p = target;
    else
        return false;
    return true;
}

/* Reports a collective that does not fit the value that it communicates. */
static ar_status refuse_call(ari_lint_walk *w, const ari_ledger_operation *op, const ari_ledger_call *call, int axis,
                             ar_placement actual, ar_placement target)
{
    ari_lint_verdict v = {.broken = true, .actual = actual, .required = target};
    if (call->kind == ARI_ALL_GATHER || call->kind == ARI_EXCHANGE)
        v.rule = ari_lint_replicated(actual) ? AR_LINT_redundant_gather : AR_LINT_missing_reduction;
    else if (call->kind == ARI_ALL_TO_ALL)
        v.rule = ari_lint_partial(actual) ? AR_LINT_missing_reduction : AR_LINT_wrong_placement;
    else
        v.rule = ari_lint_replicated(actual) ? AR_LINT_redundant_reduction : AR_LINT_wrong_reduction;
    if (!ari_lint_partial(v.required) && v.rule == AR_LINT_redundant_reduction)
        v.required = term;
    return ari_lint_find(w, op, axis, &v);
}

/* Applies the operation's collectives to a value and compares the result with the operation's declaration. A rank may
 * take its part of a replicated value without a collective. Each of several outputs has its own collective. */
static ar_status move_value(ari_lint_walk *w, const ari_ledger_operation *op, ari_lint_type *type,
                            const ari_lint_type *target_type)
{
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        ar_placement *p = &type->placement[axis], target = target_type->placement[axis];
        bool is_moved = false;
        for (size_t i = 0; i < op->calls; i++) {
            const ari_ledger_call *call = call_of(w, op, i);
            if (!ari_lint_goes_along(w, call, axis) || (is_moved && op->outputs > 1))
                continue;
            if (!(is_moved && call->kind == ARI_EXCHANGE) && !moved(p, call, target))
                AR_TRY(refuse_call(w, op, call, axis, *p, target));
            is_moved = true;
        }
        if (ari_lint_replicated(*p) && target.kind == AR_SHARD) /* each rank keeps its part */
            *p = target;
        if (ari_lint_size(w, axis) > 1 && !ari_lint_same(*p, target)) {
            const ari_lint_verdict v = ari_lint_mismatch(*p, target);
            AR_TRY(ari_lint_find(w, op, axis, &v));
        }
        *p = target;
    }
    return AR_OK;
}

/* Handles an input that the operation declares as placed over tp. */
static ar_status take_declared(ari_lint_walk *w, const ari_ledger_operation *op, ari_lint_type *type)
{
    ar_placement *actual = &type->placement[ARI_AXIS_TP], required = from_start(op->input_placement);
    if (!op->needs_so || ari_lint_size(w, ARI_AXIS_TP) == 1 || ari_lint_same(*actual, required))
        return AR_OK;
    ari_lint_verdict v = ari_lint_mismatch(*actual, required);
    if (ari_lint_partial(required) && !ari_lint_partial(*actual))
        v.rule = ari_lint_replicated(*actual) ? AR_LINT_redundant_reduction : AR_LINT_wrong_reduction;
    AR_TRY(ari_lint_find(w, op, ARI_AXIS_TP, &v));
    *actual = required;
    return AR_OK;
}

/* The outputs of an operation are `type`, or over tp as it declares. */
static ar_status make_outputs(ari_lint_walk *w, const ari_ledger_operation *op, const ari_lint_type *type)
{
    for (int i = 0; i < op->outputs; i++)
        make_value(w, &op->out[i], type);
    return AR_OK;
}

/* --- parameters --------------------------------------------------------------------------------------------------- */

static ari_lint_param *param_of(const ari_lint_walk *w, const ari_ledger_operation *op, size_t i)
{
    return &ari_lint_walked(w)->param[ari_lint_walked(w)->ledger->use[op->first_use + i]];
}

static const ari_ledger_param *recorded_param(const ari_lint_walk *w, const ari_ledger_operation *op, size_t i)
{
    return &ari_lint_walked(w)->ledger->param[ari_lint_walked(w)->ledger->use[op->first_use + i]];
}

void ari_lint_place_param(ari_lint_type *type, const ari_ledger_param *p, const ari_lint_layout *layout)
{
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        type->placement[axis] = invariant;
    for (int axis = 0; axis < ARI_PLACED_AXES && p->expert && layout->separate_experts; axis++)
        type->placement[axis] = layout->expert_axes >> axis & 1 ? by_expert : invariant;
    if (p->expert && layout->separate_experts)
        type->placement[ARI_LINT_EP] = by_expert;
    if (p->placement.kind == AR_SHARD)
        type->placement[ARI_AXIS_TP] = p->placement;
}

/* Returns the axis along which a parameter has copies. */
int ari_lint_copies_axis(const ari_lint_walk *w, const ari_ledger_param *p)
{
    if (p->expert && w->layout->separate_experts)
        return ARI_LINT_EDP;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (ARI_CUTS_DATA >> axis & 1 && ari_lint_size(w, axis) > 1)
            return axis;
    }
    return ARI_LINT_NO_AXIS;
}

/* Checks that parameters which ranks share are equal on all of them before use. */
static ar_status use_params(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (size_t i = 0; i < op->uses && op->pass != 's'; i++) {
        ari_lint_param *p = param_of(w, op, i);
        const int axis = ari_lint_copies_axis(w, recorded_param(w, op, i));
        if (!p->used && !p->broadcast && w->layout->complete && axis != ARI_LINT_NO_AXIS && ari_lint_size(w, axis) > 1)
            AR_TRY(ari_lint_find_in_words(w, op, axis, AR_LINT_missing_broadcast, "V", "R",
                                          "broadcast the parameter over dp from rank 0 before the first step"));
        p->used = true;
        p->uses += op->pass == 'f' && !op->is_recomputed;
    }
    return AR_OK;
}

/* Reports an expert's weight that multiplies local tokens instead of the rows sent to the expert. */
static ar_status check_experts(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const ari_lint_type *input_type = op->inputs > 0 ? &ari_lint_value_of(w, &op->input[0])->type : NULL;
    for (size_t i = 0; i < op->uses && op->pass == 'f' && op->inputs > 0 && ari_lint_is_known(w, &op->input[0]); i++) {
        ari_ledger_param copied = *recorded_param(w, op, i);
        char actual[AR_PLACEMENT_TEXT], repair[AR_LINT_REPAIR];
        if (!ari_lint_by_expert(param_of(w, op, i)->type.placement[ARI_LINT_EP]) ||
            ari_lint_by_expert(input_type->placement[ARI_LINT_EP]))
            continue;
        ari_placement_name(actual, input_type->placement[ARI_LINT_EP]);
        snprintf(
            repair, sizeof repair,
            "send the rows to the ranks of their experts, or, if every rank has a copy of %.80s, do not mark it as an "
            "expert's",
            copied.name);
        AR_TRY(ari_lint_find_in_words(w, op, ARI_LINT_EP, AR_LINT_wrong_placement, actual, "rows by expert", repair));
        copied.expert = false;
        ari_lint_place_param(&param_of(w, op, i)->type, &copied, w->layout);
    }
    return AR_OK;
}

/* --- operations of the passes ------------------------------------------------------------------------------------- */

static bool is_backward(const ari_ledger_operation *op)
{
    return op->pass == 'b' && !op->is_recomputed;
}

/* Requires reduced partial sums of a layer's product; the finding names the product. */
static ar_status settle_terms(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        ari_lint_value *v = ari_lint_value_of(w, &op->input[i]);
        for (int axis = 0; axis < ARI_LINT_AXES && op->input[i].id > 0 && v->maker > 0; axis++) {
            if (ari_lint_partial(v->type.placement[axis]))
                AR_TRY(judge(w, &ari_lint_walked(w)->ledger->operation[v->maker - 1], axis, &v->type.placement[axis],
                             ari_lint_mismatch(v->type.placement[axis], invariant)));
        }
        v->maker = 0;
    }
    return AR_OK;
}

/* Returns the outputs' declared placements over tp, combined with `type` over the other axes. */
static ari_lint_type declared(const ari_ledger_operation *op, const ari_lint_type *type)
{
    ari_lint_type t = *type;
    if (op->makes_so)
        t.placement[ARI_AXIS_TP] = from_start(op->output_placement);
    return t;
}

static ar_status lint_product(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type input_type = ari_lint_value_of(w, &op->input[0])->type, out = input_type;
    AR_TRY(take_declared(w, op, &input_type));
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        for (size_t i = 0; i < op->uses; i++)
            AR_TRY(judge(w, op, axis, &out.placement[axis],
                         (is_backward(op) ? ari_lint_product_dx : ari_lint_product)(
                             input_type.placement[axis], param_of(w, op, i)->type.placement[axis])));
    }
    ari_lint_type target_type = declared(op, &out);
    for (int axis = 0; axis < ARI_LINT_AXES && !op->makes_so; axis++) {
        if (ari_lint_partial(target_type.placement[axis]))
            target_type.placement[axis] = invariant;
    }
    AR_TRY(move_value(w, op, &out, &target_type));
    AR_TRY(make_outputs(w, op, &out));
    for (int i = 0; i < op->outputs; i++)
        ari_lint_value_of(w, &op->out[i])->maker = strcmp(op->operation, ari_ledger_kind_name(op->kind)) == 0 &&
                                                           ari_lint_partial(out.placement[ARI_AXIS_TP]) &&
                                                           !is_backward(op)
                                                       ? ari_lint_walked(w)->next_op + 1
                                                       : 0;
    return AR_OK;
}

static ar_status lint_redistribute(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    AR_TRY(take_declared(w, op, &type));
    const ari_lint_type target_type = declared(op, &type);
    AR_TRY(move_value(w, op, &type, &target_type));
    return make_outputs(w, op, &type);
}

static ar_status lint_add_parameter(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    const size_t maker = ari_lint_value_of(w, &op->input[0])->maker;
    for (size_t i = 0; i < op->uses; i++) {
        const int features = recorded_param(w, op, i)->ndim - 1;
        for (int axis = 0; axis < ARI_LINT_AXES; axis++)
            AR_TRY(judge(
                w, op, axis, &type.placement[axis],
                ari_lint_add_parameter(type.placement[axis], param_of(w, op, i)->type.placement[axis], features)));
    }
    AR_TRY(make_outputs(w, op, &type));
    for (int i = 0; i < op->outputs; i++)
        ari_lint_value_of(w, &op->out[i])->maker = maker;
    return AR_OK;
}

/* Checks an elementwise function. All inputs have one placement; of partial sums it is unknown. */
static ar_status lint_elementwise(ari_lint_walk *w, const ari_ledger_operation *op, bool linear)
{
    const ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    const size_t maker = ari_lint_value_of(w, &op->input[0])->maker;
    bool broken = false;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        const ari_lint_verdict v = ari_lint_elementwise(type.placement[axis], linear);
        ar_placement output;
        broken = broken || (v.broken && ari_lint_size(w, axis) > 1);
        AR_TRY(judge(w, op, axis, &output, v));
    }
    if (broken)
        return AR_OK;
    AR_TRY(make_outputs(w, op, &type));
    for (int i = 0; i < op->outputs && linear; i++)
        ari_lint_value_of(w, &op->out[i])->maker = maker;
    return AR_OK;
}

static ar_status lint_linear(ari_lint_walk *w, const ari_ledger_operation *op)
{
    return lint_elementwise(w, op, true);
}

static ar_status lint_function(ari_lint_walk *w, const ari_ledger_operation *op)
{
    return lint_elementwise(w, op, is_backward(op));
}

/* Checks a norm over heads, in which each head is a separate row. */
static ar_status lint_norm(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    const bool of_heads = op->input[0].ndim == 4;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        AR_TRY(judge(w, op, axis, &type.placement[axis],
                     of_heads ? ari_lint_elementwise(type.placement[axis], is_backward(op))
                              : ari_lint_along(type.placement[axis], FEATURES, is_backward(op))));
    return make_outputs(w, op, &type);
}

/* Checks an elementwise operation on two values, one of which may be unknown. */
static ar_status lint_two(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const bool multiplies = op->kind == ARI_LEDGER_MULTIPLY;
    const bool both_known = ari_lint_is_known(w, &op->input[0]) && ari_lint_is_known(w, &op->input[1]);
    const ari_lint_type a = ari_lint_value_of(w, &op->input[!ari_lint_is_known(w, &op->input[0])])->type,
                        b = ari_lint_value_of(w, &op->input[1])->type;
    ari_lint_type type = a;
    for (int axis = 0; axis < ARI_LINT_AXES && both_known; axis++) {
        ari_lint_verdict v = ari_lint_add(a.placement[axis], b.placement[axis]);
        if (multiplies)
            v = (ari_lint_verdict){.broken = ari_lint_partial(a.placement[axis]) && ari_lint_partial(b.placement[axis]),
                                   .rule = AR_LINT_product_of_partials,
                                   .output = a.placement[axis],
                                   .actual = a.placement[axis],
                                   .required = b.placement[axis]};
        AR_TRY(judge(w, op, axis, &type.placement[axis], v));
    }
    return make_outputs(w, op, &type);
}

/* Checks the exchange between sequence shards and head shards among context-parallel neighbours. */
static ar_status lint_travel(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const bool ring = op->kind == ARI_LEDGER_RING;
    const int axis = ring ? ARI_AXIS_RING : ARI_AXIS_INNER;
    for (int i = 0; i < op->inputs && i < op->outputs; i++) {
        ari_lint_type type = ari_lint_value_of(w, &op->input[i])->type, target_type = type;
        const bool together = type.placement[axis].kind == AR_SHARD && type.placement[axis].dim == FEATURES;
        target_type.placement[axis] = ring ? invariant : together ? positions : (ar_placement){AR_SHARD, FEATURES};
        AR_TRY(move_value(w, op, &type, &target_type));
        make_value(w, &op->out[i], &type);
    }
    return AR_OK;
}

/* Expects `calls` reductions along an axis whose ranks each have a part of the sum. */
static ar_status expect_calls(ari_lint_walk *w, const ari_ledger_operation *op, int axis, size_t calls)
{
    const ari_lint_verdict few = ari_lint_mismatch(term, invariant);
    const ari_lint_verdict excess = {
        .broken = true, .rule = AR_LINT_redundant_reduction, .actual = invariant, .required = term};
    const size_t actual_calls = calls_along(w, op, axis);
    if (ari_lint_size(w, axis) == 1 || actual_calls == calls)
        return AR_OK;
    return ari_lint_find(w, op, axis, actual_calls < calls ? &few : &excess);
}

/* Checks attention: every query needs the keys and values of all tokens. In the backward pass, the gradients of keys
 * and values are partial sums over the queries of each ring position and of each rank that has a copy of their head. */
static ar_status lint_attention(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    if (!is_backward(op)) {
        for (int i = 1; i < op->inputs; i++) {
            for (int axis = 0; axis < ARI_LINT_AXES; axis++)
                AR_TRY(judge(
                    w, op, axis, &type.placement[axis],
                    ari_lint_attend(type.placement[axis], ari_lint_value_of(w, &op->input[i])->type.placement[axis])));
        }
        return make_outputs(w, op, &type);
    }
    for (int axis = ARI_AXIS_RING; axis < ARI_LINT_AXES; axis++) {
        const bool sums = axis == ARI_AXIS_RING || (axis == ARI_LINT_COPIES && op->copies > 1);
        if (sums && op->outputs == 3) /* gradients of keys and of values */
            AR_TRY(expect_calls(w, op, axis, 2));
    }
    for (int i = 0; i < op->outputs; i++) {
        ari_lint_type output_type = type;
        if (i > 0) {
            output_type.placement[ARI_AXIS_RING] =
                ari_lint_size(w, ARI_AXIS_RING) > 1 ? term : output_type.placement[ARI_AXIS_RING];
            output_type.placement[ARI_LINT_COPIES] = op->copies > 1 ? term : invariant;
            AR_TRY(move_value(w, op, &output_type, &type));
        }
        make_value(w, &op->out[i], &output_type);
    }
    return AR_OK;
}

static ar_status lint_embedding(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const ari_lint_type ids = activation(invariant);
    ari_lint_type type = ids;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        AR_TRY(judge(w, op, axis, &type.placement[axis],
                     ari_lint_lookup(ids.placement[axis], param_of(w, op, 0)->type.placement[axis])));
    const ari_lint_type target_type = declared(op, &type);
    AR_TRY(move_value(w, op, &type, &target_type));
    return make_outputs(w, op, &type);
}

/* Checks keys joined with a part that all heads share, whose gradient is a sum over heads. */
static ar_status lint_join(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    if (is_backward(op)) {
        ari_lint_type target_type = type;
        for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
            if (type.placement[axis].kind == AR_SHARD && type.placement[axis].dim == FEATURES) {
                type.placement[axis] = term;
                target_type.placement[axis] = invariant;
            }
        }
        AR_TRY(move_value(w, op, &type, &target_type));
    }
    return make_outputs(w, op, &type);
}

/* Checks a softmax over shards: it needs maximum, sum of exponentials and target's logit of all. */
static ar_status lint_loss(ari_lint_walk *w, const ari_ledger_operation *op)
{
    enum { REDUCTIONS = 3 };
    ari_lint_type type =
        op->inputs > 0 ? ari_lint_value_of(w, &op->input[0])->type : activation(from_start(op->output_placement));
    ari_lint_walked(w)->losses += is_backward(op) ? -1 : 1;
    if (is_backward(op))
        return make_outputs(w, op, &type);
    AR_TRY(take_declared(w, op, &type));
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        const bool cut = type.placement[axis].kind == AR_SHARD && type.placement[axis].dim == FEATURES;
        if (ari_lint_size(w, axis) == 1 || (!cut && !ari_lint_partial(type.placement[axis])))
            continue;
        if (!cut || calls_along(w, op, axis) < REDUCTIONS) {
            ari_lint_verdict v = ari_lint_mismatch(cut ? term : type.placement[axis], invariant);
            AR_TRY(ari_lint_find(w, op, axis, &v));
        }
        type.placement[axis] = invariant;
    }
    return make_outputs(w, op, &type);
}

static ar_status lint_report(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_value *v = ari_lint_value_of(w, &op->input[0]);
    if (!v->is_known) {
        const ari_lint_type type = activation(from_start(op->input_placement));
        make_value(w, &op->input[0], &type);
        return AR_OK;
    }
    ari_lint_type type = v->type;
    const bool terms = ari_lint_partial(type.placement[ARI_AXIS_TP]) || ari_lint_partial(op->input_placement);
    if (terms && w->layout->complete) /* bundled models report partial sums with the placement that they have after
                                         the reduction */
        return AR_OK;
    return take_declared(w, op, &type);
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

/* Rows of tokens on their way to the ranks of their experts, and back. */
static ar_status lint_dispatch(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type, target_type = type;
    if (!w->layout->separate_experts)
        return make_outputs(w, op, &type);
    const bool back =
        type.placement[ARI_LINT_EP].kind == AR_SHARD && type.placement[ARI_LINT_EP].dim == ARI_LINT_BY_EXPERT;
    if (!back) {
        ari_lint_walked(w)->tokens = type;
        type.placement[ARI_LINT_EP] = samples;
    }
    target_type.placement[ARI_LINT_EP] = back ? samples : by_expert;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (axis != ARI_LINT_EP)
            type.placement[axis] = target_type.placement[axis];
    }
    const bool gathered = !back && op->calls > 0 && call_of(w, op, 0)->kind == ARI_ALL_GATHER;
    if (gathered) { /* each rank takes its experts' rows out of the tokens of all ranks, by the routing weights */
        type.placement[ARI_LINT_EP] = by_expert;
        AR_TRY(expect_calls(w, op, ARI_LINT_EP, (size_t)op->inputs));
    }
    if (!gathered)
        AR_TRY(move_value(w, op, &type, &target_type));
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (w->layout->expert_axes >> axis & 1)
            type.placement[axis] = back ? ari_lint_walked(w)->tokens.placement[axis] : by_expert;
    }
    type.placement[ARI_LINT_EP] = back ? invariant : by_expert;
    type.placement[ARI_LINT_EDP] = back ? invariant : samples;
    return make_outputs(w, op, &type);
}

/* Checks the weighted sum of a token's rows. Each rank has the weights of its own tokens. */
static ar_status lint_combine(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    const bool weighted = op->inputs > 1 && ari_lint_is_known(w, &op->input[1]) && !is_backward(op);
    for (int axis = 0; axis < ARI_LINT_AXES && weighted; axis++)
        AR_TRY(
            judge(w, op, axis, &type.placement[axis],
                  ari_lint_by_routes(type.placement[axis], ari_lint_value_of(w, &op->input[1])->type.placement[axis])));
    return make_outputs(w, op, &type);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static ari_lint_verdict gradient_along(const ari_lint_walk *w, const ari_ledger_operation *op,
                                       const ari_ledger_param *p, const ari_lint_type *of_param, int axis)
{
    const ar_placement dy = ari_lint_value_of(w, &op->input[0])->type.placement[axis];
    const bool of_heads = op->input[0].ndim == 4 && p->ndim == 1 && dy.kind == AR_SHARD && dy.dim == FEATURES;
    if (p->ndim == 1 || op->inputs == 1)
        return ari_lint_sum_over_tokens(of_heads && of_param->placement[axis].kind != AR_SHARD ? positions : dy,
                                        p->ndim - 1);
    if (op->input[1].dtype == AR_I64)
        return ari_lint_lookup_gradient(dy, of_param->placement[axis]);
    return ari_lint_is_known(w, &op->input[1])
               ? ari_lint_product_dw(ari_lint_value_of(w, &op->input[1])->type.placement[axis], dy)
               : (ari_lint_verdict){.output = of_param->placement[axis]};
}

/* Checks that a vector's gradient is complete: its terms are placed over tp as its layer declares. */
static ar_status check_declared_sum(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const ar_placement actual = ari_lint_value_of(w, &op->input[0])->type.placement[ARI_AXIS_TP],
                       required = from_start(op->input_placement);
    const ari_lint_verdict v = {.broken = true,
                                .rule = ari_lint_replicated(actual) ? AR_LINT_redundant_reduction
                                                                    : AR_LINT_unsummed_gradient,
                                .actual = actual,
                                .required = required};
    if (!op->needs_so || op->input[0].ndim == 4 || recorded_param(w, op, 0)->expert ||
        ari_lint_size(w, ARI_AXIS_TP) == 1 || ari_lint_same(actual, required))
        return AR_OK;
    param_of(w, op, 0)->judged = true;
    return ari_lint_find(w, op, ARI_AXIS_TP, &v);
}

/* Checks that a gradient has its parameter's placement, or is a partial sum that is reduced later. */
static ar_status lint_weight_gradient(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (size_t i = 0; i < op->uses; i++)
        param_of(w, op, i)->gradients++;
    if (!ari_lint_is_known(w, &op->input[0]))
        return AR_OK;
    const ari_ledger_param *recorded = recorded_param(w, op, 0);
    AR_TRY(check_declared_sum(w, op));
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        ar_placement output;
        const ari_lint_type *of_param = &param_of(w, op, 0)->type;
        AR_TRY(judge(w, op, axis, &output, gradient_along(w, op, recorded, of_param, axis)));
        const bool of_ends = axis == ARI_AXIS_PP && recorded->is_tied;
        const bool partial = (ari_lint_partial(output) || of_ends) && ari_lint_size(w, axis) > 1;
        if (!partial && ari_lint_size(w, axis) > 1 && !ari_lint_same(output, of_param->placement[axis])) {
            const ari_lint_verdict v = ari_lint_mismatch(output, of_param->placement[axis]);
            AR_TRY(ari_lint_find(w, op, axis, &v));
        }
        for (size_t i = 0; i < op->uses; i++)
            param_of(w, op, i)->partial[axis] = param_of(w, op, i)->partial[axis] || partial;
    }
    return AR_OK;
}

/* Checks a gradient reduction: once, over all axes along which ranks hold partial sums. */
static ar_status lint_gradient_sum(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (size_t i = 0; i < op->uses; i++) {
        ari_lint_param *p = param_of(w, op, i);
        ari_ledger_operation param_op = *op;
        snprintf(param_op.name, sizeof param_op.name, "%s", recorded_param(w, op, i)->name);
        for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
            for (size_t k = 0; k < op->calls; k++) {
                const ari_ledger_call *call = call_of(w, op, k);
                const bool sums = call->kind == ARI_ALL_REDUCE || call->kind == ARI_REDUCE_SCATTER;
                if (!sums || !ari_lint_goes_along(w, call, axis))
                    continue;
                const ari_lint_verdict v = {.broken = true,
                                            .rule = AR_LINT_redundant_reduction,
                                            .actual = p->partial[axis] ? term : invariant,
                                            .required = term};
                if ((!p->partial[axis] && !p->judged && w->layout->complete) || p->summed[axis] >> call->group & 1)
                    AR_TRY(ari_lint_find(w, &param_op, axis, &v));
                p->judged = p->judged || !p->partial[axis];
                p->summed[axis] |= 1u << call->group;
            }
        }
    }
    return AR_OK;
}

static ar_status lint_broadcast(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_param *p = param_of(w, op, 0);
    const int axis = ari_lint_copies_axis(w, recorded_param(w, op, 0));
    p->broadcast = op->calls > 0;
    for (size_t i = 0; i < op->calls; i++) {
        const ari_ledger_call *call = call_of(w, op, i);
        char actual[AR_LINT_PLACED], required[AR_LINT_PLACED];
        if (axis == ARI_LINT_NO_AXIS || ari_lint_goes_along(w, call, axis))
            continue;
        snprintf(actual, sizeof actual, "%d ranks of %s", call->ranks,
                 call->group < 0 ? "the world" : ari_over_name((ari_over)call->group));
        snprintf(required, sizeof required, "%zu ranks of %s", ari_lint_size(w, axis), ari_lint_axis_name(axis));
        AR_TRY(ari_lint_find_in_words(w, op, axis, AR_LINT_wrong_group, actual, required,
                                      "broadcast over the ranks that have copies of the parameter"));
    }
    return AR_OK;
}

static ar_status lint_update(ari_lint_walk *w, const ari_ledger_operation *op)
{
    (void)op;
    ari_lint_walked(w)->updated = true;
    return AR_OK;
}

static ar_status lint_targets(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        char repair[AR_LINT_REPAIR];
        snprintf(repair, sizeof repair, "all-reduce the number of targets over %s, and divide by the sum",
                 ari_axis_name(axis));
        if (ARI_CUTS_DATA >> axis & 1 && ari_lint_size(w, axis) > 1 && calls_along(w, op, axis) == 0)
            AR_TRY(ari_lint_find_in_words(w, op, axis, AR_LINT_local_count, "P(sum)", "I", repair));
    }
    return AR_OK;
}

/* Checks the gradient norm: first the exponent is reduced, then the squares of each rank's elements. */
static ar_status lint_norm_of_gradients(ari_lint_walk *w, const ari_ledger_operation *op)
{
    enum { SUMS = 2 };
    AR_TRY(expect_calls(w, op, ARI_AXIS_TP, SUMS));
    AR_TRY(expect_calls(w, op, ARI_AXIS_PP, SUMS));
    const bool shared = w->layout->zero || w->layout->separate_experts;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (ARI_CUTS_DATA >> axis & 1)
            AR_TRY(expect_calls(w, op, axis, shared ? SUMS : 0));
    }
    return AR_OK;
}

static ar_status lint_unused(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (ARI_CUTS_DATA >> axis & 1 && calls_along(w, op, ARI_AXIS_TP) == 0)
            AR_TRY(expect_calls(w, op, axis, 1));
    }
    return AR_OK;
}

/* Checks ZeRO's gather of parameter shards, each updated by its rank. */
static ar_status lint_weight_gather(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (size_t i = 0; i < op->uses; i++) {
        for (size_t k = 0; k < op->calls; k++) {
            const int axis = ari_lint_copies_axis(w, recorded_param(w, op, i));
            param_of(w, op, i)->gathered |= axis != ARI_LINT_NO_AXIS &&
                                            ari_lint_goes_along(w, call_of(w, op, k), axis) &&
                                            call_of(w, op, k)->kind == ARI_ALL_GATHER;
        }
    }
    return AR_OK;
}

/* Checks routing: logits of all experts, and for ranks that share experts the routes of all tokens. */
static ar_status lint_route(ari_lint_walk *w, const ari_ledger_operation *op)
{
    ari_lint_type type = ari_lint_value_of(w, &op->input[0])->type;
    for (int axis = 0; axis < ARI_LINT_AXES && ari_lint_is_known(w, &op->input[0]); axis++)
        AR_TRY(
            judge(w, op, axis, &type.placement[axis], ari_lint_along(type.placement[axis], FEATURES, is_backward(op))));
    if (op->pass == 'f' && ari_lint_size(w, ARI_LINT_EP) > 1 && calls_along(w, op, ARI_LINT_EP) == 0) {
        const ari_lint_verdict v = ari_lint_mismatch(samples, invariant);
        AR_TRY(ari_lint_find(w, op, ARI_LINT_EP, &v));
    }
    return ari_lint_is_known(w, &op->input[0]) ? make_outputs(w, op, &type) : AR_OK;
}

/* The loss is a sum over all samples and, in sequence parallelism, over the positions of each rank. */
static ar_status lint_loss_sum(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const bool shared = calls_along(w, op, ARI_AXIS_PP) > 0; /* including the stages without a loss */
    for (int axis = 0; axis < ARI_PLACED_AXES && !shared; axis++) {
        if (ARI_CUTS_DATA >> axis & 1 && ari_lint_size(w, axis) > 1 && calls_along(w, op, axis) == 0)
            AR_TRY(
                ari_lint_find_in_words(w, op, axis, AR_LINT_missing_reduction, "P(sum)", "I", "all-reduce the loss"));
    }
    return AR_OK;
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static size_t elements_of(const ari_ledger_value *v)
{
    size_t n = 1;
    for (int d = 0; d < v->ndim; d++)
        n *= v->shape[d];
    return n;
}

/* Returns the rank in the records to which a message goes, or from which it comes. */
static size_t peer_of(const ari_lint_walk *w, char pass, bool sends)
{
    const size_t n = w->ranks, forward = (pass == 'f') == sends;
    return (w->current_rank + (forward ? 1 : n - 1)) % n;
}

/* Checks that a message is one call between two stages. */
static ar_status check_message(ari_lint_walk *w, const ari_ledger_operation *op, unsigned kind)
{
    size_t calls = 0;
    for (size_t i = 0; i < op->calls; i++)
        calls += call_of(w, op, i)->kind == kind && call_of(w, op, i)->group == ARI_OVER_PP;
    if (calls == 1 || !w->layout->complete)
        return AR_OK;
    char actual[AR_LINT_PLACED];
    snprintf(actual, sizeof actual, "%zu calls", calls);
    return ari_lint_find_in_words(w, op, ARI_AXIS_PP, AR_LINT_unmatched_message, actual, "one call",
                                  "move it from the one stage to the other, once");
}

static ar_status lint_send(ari_lint_walk *w, const ari_ledger_operation *op)
{
    AR_TRY(check_message(w, op, ARI_SEND));
    const ari_lint_message m = {.pass = op->pass,
                                .src_rank = w->current_rank,
                                .dst_rank = peer_of(w, op->pass, true),
                                .type = ari_lint_value_of(w, &op->input[0])->type,
                                .count = elements_of(&op->input[0])};
    AR_TRY(ARI_GROW(&w->message, &w->message_room, w->messages, "messages of lint"));
    w->message[w->messages++] = m;
    return AR_OK;
}

/* Checks a receive. It may be enqueued before its send; the user of the value waits. */
static ar_status lint_receive(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const ari_lint_type type = activation(from_start(op->output_placement));
    AR_TRY(check_message(w, op, ARI_RECV));
    make_value(w, &op->out[0], &type);
    ari_lint_value_of(w, &op->out[0])->receive = w->ranks > 1 ? ari_lint_walked(w)->next_op + 1 : 0;
    return AR_OK;
}

/* Takes a received value's type. Returns false if nothing has been sent yet. */
static bool receive(ari_lint_walk *w, const ari_ledger_operation *op, ari_lint_type *type)
{
    for (size_t i = 0; i < w->messages; i++) {
        const ari_lint_message m = w->message[i];
        if (m.pass != op->pass || m.dst_rank != w->current_rank || m.src_rank != peer_of(w, op->pass, false))
            continue;
        *type = m.type;
        memmove(&w->message[i], &w->message[i + 1], (--w->messages - i) * sizeof *w->message);
        return true;
    }
    return false;
}

/* --- all ---------------------------------------------------------------------------------------------------------- */

/* The rule of each kind; NULL: the operation has no placed value. opaque: the rule also applies to unknown inputs. */
static const struct {
    ar_status (*judge)(ari_lint_walk *w, const ari_ledger_operation *op);
    bool opaque, takes_terms;
} rules[ARI_LEDGER_KINDS] = {
    [ARI_LEDGER_BROADCAST] = {lint_broadcast, true, true},
    [ARI_LEDGER_TARGETS] = {lint_targets, true, true},
    [ARI_LEDGER_EMBEDDING] = {lint_embedding, true, true},
    [ARI_LEDGER_POSITIONS] = {lint_add_parameter, false, false},
    [ARI_LEDGER_NORM] = {lint_norm, false, false},
    [ARI_LEDGER_REDISTRIBUTE] = {lint_redistribute, false, true},
    [ARI_LEDGER_PRODUCT] = {lint_product, false, false},
    [ARI_LEDGER_BIAS] = {lint_add_parameter, false, true},
    [ARI_LEDGER_JOIN] = {lint_join, false, false},
    [ARI_LEDGER_ROPE] = {lint_linear, false, false},
    [ARI_LEDGER_HEADS] = {lint_travel, false, false},
    [ARI_LEDGER_RING] = {lint_travel, false, false},
    [ARI_LEDGER_ATTENTION] = {lint_attention, false, false},
    [ARI_LEDGER_ACTIVATION] = {lint_function, false, false},
    [ARI_LEDGER_GATE] = {lint_function, false, false},
    [ARI_LEDGER_ROUTE] = {lint_route, true, false},
    [ARI_LEDGER_GRADIENT_NORM] = {lint_norm_of_gradients, true, true},
    [ARI_LEDGER_UPDATE] = {lint_update, true, true},
    [ARI_LEDGER_UNUSED] = {lint_unused, true, true},
    [ARI_LEDGER_WEIGHT_GATHER] = {lint_weight_gather, true, true},
    [ARI_LEDGER_DISPATCH] = {lint_dispatch, false, false},
    [ARI_LEDGER_COMBINE] = {lint_combine, false, false},
    [ARI_LEDGER_DROPOUT] = {lint_linear, false, true},
    [ARI_LEDGER_RESIDUAL] = {lint_two, true, false},
    [ARI_LEDGER_SUM] = {lint_two, true, false},
    [ARI_LEDGER_MULTIPLY] = {lint_two, true, false},
    [ARI_LEDGER_LOSS] = {lint_loss, false, false},
    [ARI_LEDGER_WEIGHT_GRADIENT] = {lint_weight_gradient, true, true},
    [ARI_LEDGER_SEND] = {lint_send, false, false},
    [ARI_LEDGER_RECEIVE] = {lint_receive, true, true},
    [ARI_LEDGER_REPORT] = {lint_report, true, true},
    [ARI_LEDGER_LOSS_SUM] = {lint_loss_sum, true, true},
    [ARI_LEDGER_GRADIENT_SUM] = {lint_gradient_sum, true, true},
};

/* Returns true if the placement of some input of the operation is known. */
static bool takes_known(const ari_lint_walk *w, const ari_ledger_operation *op)
{
    bool has_known_input = false;
    for (int i = 0; i < op->inputs; i++)
        has_known_input = has_known_input || ari_lint_is_known(w, &op->input[i]);
    return op->kind == ARI_LEDGER_RESIDUAL || op->kind == ARI_LEDGER_SUM || op->kind == ARI_LEDGER_MULTIPLY
               ? has_known_input
               : rules[op->kind].opaque || op->inputs == 0 || ari_lint_is_known(w, &op->input[0]);
}

/* Gives values computed from unknown inputs the placements that their operation declares. */
static void make_opaque(ari_lint_walk *w, const ari_ledger_operation *op)
{
    const ari_lint_type type = activation(from_start(op->output_placement));
    for (int i = 0; i < op->outputs && op->makes_so; i++)
        make_value(w, &op->out[i], &type);
}

ar_status ari_lint_operation(ari_lint_walk *w, const ari_ledger_operation *op)
{
    w->report->operations++;
    w->report->values += (size_t)(op->inputs + op->outputs);
    AR_TRY(use_params(w, op));
    AR_TRY(check_experts(w, op));
    if (!rules[op->kind].judge)
        return AR_OK;
    if (!takes_known(w, op)) {
        make_opaque(w, op);
        return AR_OK;
    }
    if (!rules[op->kind].takes_terms)
        AR_TRY(settle_terms(w, op));
    return rules[op->kind].judge(w, op);
}

/* Receives the messages for an operation's inputs. Returns false if one has not been sent yet. */
bool ari_lint_await_inputs(ari_lint_walk *w, const ari_ledger_operation *op)
{
    for (int i = 0; i < op->inputs; i++) {
        ari_lint_value *v = ari_lint_value_of(w, &op->input[i]);
        ari_lint_type type;
        if (v->receive == 0)
            continue;
        if (!receive(w, &ari_lint_walked(w)->ledger->operation[v->receive - 1], &type))
            return false;
        make_value(w, &op->input[i], &type);
    }
    return true;
}
