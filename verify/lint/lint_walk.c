/* SPDX-License-Identifier: Apache-2.0 */
/* The walk: what every operation has in common. The list's own placements are claims: a value has the type that the
 * operations before have given it, and where the list says otherwise that is the finding. After it the walk goes on
 * with what the list says, so that one mistake is one finding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "verify/lint/lint.h"

static const ar_placement whole = {AR_INVARIANT, 0};

/* --- values ------------------------------------------------------------------------------------------------------- */

void ari_lint_over_dp(ari_lint_type *v, ar_placement p)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        v->at[axis] = ARI_CUTS_DATA >> axis & 1 ? p : v->at[axis];
}

int ari_lint_axis_of_copies(const ari_lint_state *l, const ari_op_value *v)
{
    if (v->by_expert)
        return l->size[ARI_LINT_EDP] > 1 ? ARI_LINT_EDP : ARI_LINT_NO_AXIS;
    return ari_lint_dp_axis(l);
}

int ari_lint_dp_axis(const ari_lint_state *l)
{
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++) {
        if (ARI_CUTS_DATA >> axis & 1 && l->size[axis] > 1)
            return axis;
    }
    return ARI_LINT_NO_AXIS;
}

ari_lint_type ari_lint_stated(const ari_op_value *v)
{
    static const ar_placement by_expert = {AR_SHARD, ARI_LINT_BY_EXPERT};
    ari_lint_type t;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        t.at[axis] = axis >= ARI_PLACED_AXES ? whole : v->by_expert >> axis & 1 ? by_expert : v->at[axis];
    if (v->by_expert) {
        t.at[ARI_LINT_EP] = by_expert;
        t.at[ARI_LINT_EDP] = v->at[ARI_AXIS_DP];
    }
    return t;
}

void ari_lint_judge(ari_lint_state *l, const ari_operation *op, int axis, ari_lint_type *out, ari_lint_verdict v)
{
    if (v.broken && l->size[axis] > 1)
        ari_lint_find_placed(l->f, op, axis, &v);
    out->at[axis] = v.makes;
}

ari_lint_type ari_lint_agree(ari_lint_state *l, const ari_operation *op, const ari_op_value *v, ari_lint_type has)
{
    const ari_lint_type stated = ari_lint_stated(v);
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (l->size[axis] == 1 || ari_lint_same(has.at[axis], stated.at[axis]))
            continue;
        ari_lint_verdict wrong = ari_lint_mismatch(has.at[axis], stated.at[axis]);
        const bool gradient = op->kind == ARI_OPERATION_WEIGHT_GRADIENT || op->kind == ARI_OPERATION_GRADIENT_SUM;
        if (gradient && wrong.rule == AR_LINT_missing_reduction && v == op->output)
            wrong.rule = AR_LINT_unsummed_gradient;
        ari_lint_find_placed(l->f, op, axis, &wrong);
    }
    return stated;
}

/* Ranks that hold one part along a dimension: copies are of heads, never of positions. */
static size_t copies_along(const ari_op_value *v, int dim)
{
    const bool positions = v->ndim == 3 && dim == 1;
    return v->copies > 0 && !positions ? v->copies : 1;
}

/* The rank's extents are those that its placements give it: along dp ranks share samples, of which not every
 * micro-batch has the same number. */
static void check_extent(ari_lint_state *l, const ari_operation *op, const ari_op_value *v)
{
    for (int d = 0; d < v->ndim; d++) {
        int cutting = ARI_AXIS_TP;
        size_t parts = 1, start = 0, own = v->shape[d];
        if (v->at[ARI_AXIS_DP].kind == AR_SHARD && d == 0)
            continue;
        for (int axis = ARI_AXIS_RING; axis < ARI_PLACED_AXES; axis++) {
            const bool cuts = l->size[axis] > 1 && v->at[axis].kind == AR_SHARD && v->at[axis].dim == d;
            parts *= cuts ? l->size[axis] : 1;
            cutting = cuts ? axis : cutting;
        }
        if (parts > 1)
            ari_split_uneven(v->shape[d], (int)(parts / copies_along(v, d)), 0, &start, &own);
        if (v->local[d] == own)
            continue;
        char has[AR_LINT_PLACED], needs[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
        snprintf(has, sizeof has, "%zu of %zu", v->local[d], v->shape[d]);
        snprintf(needs, sizeof needs, "%zu of %zu", own, v->shape[d]);
        snprintf(repair, sizeof repair, "dimension %d: divide by the %zu parts once, the first ones longer by the rest",
                 d, parts > 1 ? parts / copies_along(v, d) : 1);
        ari_lint_find(l->f, op, cutting, AR_LINT_wrong_extent, has, needs, repair);
    }
}

/* A collective that is cut into chunks has each of them of whole tokens: those of the value that the ranks have by
 * tokens. */
static void check_chunks(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const ari_op_value *v = call->kind == ARI_CALL_ALL_GATHER ? &op->input[0] : &op->output[0];
        const size_t tokens = v->local[1], each = tokens > 0 ? call->elements / tokens : 0;
        const bool cut = v->at[ARI_AXIS_TP].kind == AR_SHARD && v->at[ARI_AXIS_TP].dim == 1;
        char has[AR_LINT_PLACED], needs[AR_LINT_PLACED];
        if (call->chunk == call->elements || (cut && each > 0 && call->chunk > 0 && call->chunk % each == 0))
            continue;
        snprintf(has, sizeof has, "chunks of %zu", call->chunk);
        snprintf(needs, sizeof needs, cut ? "whole tokens of %zu" : "no chunks", each);
        ari_lint_find(l->f, op, ARI_AXIS_TP, AR_LINT_wrong_extent, has, needs,
                      "cut what is gathered or scattered along each rank's own tokens");
    }
}

static void check_extents(ari_lint_state *l, const ari_operation *op)
{
    check_chunks(l, op);
    for (int i = 0; i < op->inputs; i++)
        check_extent(l, op, &op->input[i]);
    for (int i = 0; i < op->weights; i++)
        check_extent(l, op, &op->weight[i]);
    for (int i = 0; i < op->outputs; i++)
        check_extent(l, op, &op->output[i]);
    l->counts->values += (size_t)(op->inputs + op->weights + op->outputs);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

/* True if the call's ranks differ along the axis. */
static bool goes_along(const ari_lint_state *l, const ari_op_call *call, int axis)
{
    const bool experts = call->over == ARI_OVER_EP || call->over == ARI_OVER_EDP;
    const bool has = axis >= ARI_PLACED_AXES ? call->over == ari_lint_groups[axis]
                                             : !experts && ari_over_axes(call->over) >> axis & 1;
    return has && l->size[axis] > 1;
}

/* The ranks of the group that a call names, for a value of so many copies. */
static size_t ranks_of(const ari_lint_state *l, const ari_op_call *call, const ari_op_value *v)
{
    size_t ranks = 1;
    if (call->over == ARI_OVER_COPIES)
        return v->copies > 0 ? v->copies : 1;
    if (call->over == ARI_OVER_ENDS)
        return l->size[ARI_AXIS_PP] > 1 ? 2 : 1;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        ranks *= goes_along(l, call, axis) ? l->size[axis] : 1;
    return ranks;
}

/* The first axis along which its ranks differ; of a group of one any that it is over. */
static int axis_of(const ari_lint_state *l, const ari_op_call *call)
{
    int any = ARI_LINT_COPIES;
    if (call->over == ARI_OVER_EP || call->over == ARI_OVER_EDP)
        return call->over == ARI_OVER_EP ? ARI_LINT_EP : ARI_LINT_EDP;
    for (int axis = ARI_PLACED_AXES; axis-- > 0;)
        any = ari_over_axes(call->over) >> axis & 1 && (l->size[axis] > 1 || any == ARI_LINT_COPIES) ? axis : any;
    return any;
}

/* True if the collective suits the value along one axis; then *p becomes its result. */
static bool serves_along(ar_placement *p, const ari_op_call *call, ar_placement to)
{
    const bool partial = ari_lint_partial(*p);
    if ((call->kind == ARI_CALL_ALL_REDUCE || call->kind == ARI_CALL_BROADCAST) && partial)
        *p = whole; /* the terms of the others are nothing where one of them broadcasts its own */
    else if (call->kind == ARI_CALL_REDUCE_SCATTER && partial)
        *p = to.kind == AR_SHARD ? to : (ar_placement){AR_SHARD, 0};
    else if ((call->kind == ARI_CALL_ALL_GATHER || call->kind == ARI_CALL_EXCHANGE) && p->kind == AR_SHARD)
        *p = whole;
    else if (call->kind == ARI_CALL_ALL_TO_ALL && p->kind == AR_SHARD && to.kind == AR_SHARD && p->dim != to.dim)
        *p = to;
    else
        return false;
    return true;
}

/* The first axis of the call along which it does not serve a value; ARI_LINT_NO_AXIS: it serves it along all, and the
 * value is what comes out. */
static int serves(const ari_lint_state *l, ari_lint_type *v, const ari_op_call *call, const ari_lint_type *to)
{
    ari_lint_type out = *v;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        if (goes_along(l, call, axis) && !serves_along(&out.at[axis], call, to->at[axis]))
            return axis;
    }
    *v = out;
    return ARI_LINT_NO_AXIS;
}

/* The axis along which a value waits for a sum that no call of the operation makes; -1: there is none. */
static int waiting(const ari_lint_state *l, const ari_operation *op, const ari_lint_type *v, int n)
{
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        bool pending = false, called = false;
        for (int i = 0; i < n; i++)
            pending = pending || ari_lint_partial(v[i].at[axis]);
        for (int i = 0; i < op->calls; i++)
            called = called || (goes_along(l, &op->call[i], axis) &&
                                op->call[i].ranks == ranks_of(l, &op->call[i], &op->output[op->outputs - 1]));
        if (l->size[axis] > 1 && pending && !called)
            return axis;
    }
    return -1;
}

static void find_group(ari_lint_state *l, const ari_operation *op, const ari_op_call *call, int right)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
    const bool more = call->ranks > ranks_of(l, call, &op->output[op->outputs - 1]);
    snprintf(has, sizeof has, "%zu ranks of %s", call->ranks,
             more && call->over != ARI_OVER_COPIES ? "the world" : ari_over_name(call->over));
    snprintf(needs, sizeof needs, "%zu ranks of %s", l->size[right], ari_lint_axis_name(right));
    snprintf(repair, sizeof repair, "%s over the value's %s group: tp ranks are neighbours%s, dp ranks %zu apart",
             ari_call_name(call->kind), ari_lint_axis_name(right),
             ari_axis_ranks(&l->c->run.parallel, ARI_AXIS_RING) * l->size[ARI_AXIS_INNER] > 1 ? ", then cp ranks" : "",
             l->size[ARI_AXIS_RING] * l->size[ARI_AXIS_INNER] * l->size[ARI_AXIS_TP]);
    ari_lint_find(l->f, op, right, AR_LINT_wrong_group, has, needs, repair);
}

/* A call that serves no value, along `axis` for one. */
static void misplaced(ari_lint_state *l, const ari_operation *op, const ari_op_call *call, ari_lint_type *v, int n,
                      const ari_lint_type *end, int axis)
{
    const int other = waiting(l, op, v, n);
    const ar_placement has = v[0].at[axis];
    if (call->ranks != ranks_of(l, call, &op->output[op->outputs - 1]) || other >= 0) {
        const int right = other >= 0 ? other : axis;
        find_group(l, op, call, right);
        for (int i = 0; i < n; i++)
            v[i].at[right] = end->at[right];
        return;
    }
    ari_lint_verdict wrong = {.broken = true, .has = has, .needs = end->at[axis]};
    if (call->kind == ARI_CALL_ALL_GATHER || call->kind == ARI_CALL_EXCHANGE)
        wrong.rule = ari_lint_whole(has) ? AR_LINT_redundant_gather : AR_LINT_missing_reduction;
    else if (call->kind == ARI_CALL_ALL_TO_ALL)
        wrong.rule = ari_lint_partial(has) ? AR_LINT_missing_reduction : AR_LINT_wrong_placement;
    else
        wrong.rule = ari_lint_whole(has) || op->kind == ARI_OPERATION_GRADIENT_SUM ? AR_LINT_redundant_reduction
                                                                                   : AR_LINT_wrong_reduction;
    ari_lint_find_placed(l->f, op, axis, &wrong);
    for (int i = 0; i < ARI_LINT_AXES; i++)
        v[0].at[i] = goes_along(l, call, i) ? end->at[i] : v[0].at[i];
}

void ari_lint_collectives_to(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n,
                             const char *const *tags, const ari_lint_type *end)
{
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const bool right = call->ranks == ranks_of(l, call, &op->output[op->outputs - 1]);
        int amiss = axis_of(l, call);
        bool served = false;
        for (int k = 0; k < n && !served && right; k++) {
            if (tags && strcmp(tags[k], call->tag) != 0)
                continue;
            const int unserved = serves(l, &v[k], call, end);
            served = unserved == ARI_LINT_NO_AXIS;
            amiss = k == 0 && !served ? unserved : amiss;
        }
        if (!served)
            misplaced(l, op, call, v, n, end, amiss);
    }
}

void ari_lint_collectives(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n, const char *const *tags,
                          const ari_op_value *to)
{
    const ari_lint_type end = ari_lint_stated(to);
    ari_lint_collectives_to(l, op, v, n, tags, &end);
}

/* --- parameters, values ------------------------------------------------------------------------------------------- */

/* A layer has a place for each role, and one for its bias. */
enum { PLACES = 2 * ARI_ROLES };

static size_t places(const ari_lint_state *l)
{
    return (ar_config_blocks(l->c->config) + 1) * PLACES;
}

size_t ari_lint_like(const ari_lint_state *l, ari_role role)
{
    const size_t ranks = (size_t)ari_at_least_one(l->c->run.parallel.ep);
    return ari_is_expert_part(role) ? l->c->config->experts.n / ranks : 1;
}

ari_lint_param *ari_lint_parameter(ari_lint_state *l, size_t layer, const ari_op_value *v)
{
    const size_t of = ari_section_of(v->role) == ARI_IN_BLOCKS ? layer : ARI_NO_LAYER; /* heads of blocks have one */
    ari_lint_param *p = &l->param[(of + 1) * PLACES + 2 * (size_t)v->role + v->bias];  /* ARI_NO_LAYER + 1 is 0 */
    if (!p->known) {
        *p = (ari_lint_param){.known = true, .layer = of, .role = v->role, .bias = v->bias, .is = ari_lint_stated(v)};
        const bool updated = ari_lint_axis_of_copies(l, v) != ARI_LINT_NO_AXIS && v->role != ARI_ROUTER_BIAS;
        l->params += updated ? ari_lint_like(l, v->role) : 0;
    }
    return p;
}

ari_lint_value *ari_lint_value_of(const ari_lint_state *l, size_t id)
{
    return &l->value[id % ari_operations_values(l->c)];
}

static void find_missing(ari_lint_state *l, const ari_operation *op, const ari_op_value *v, bool received)
{
    const bool forward = op->pass == ARI_PASS_FORWARD;
    if (received)
        ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_unmatched_message, "nothing", "what is sent",
                      forward ? "send it what the stage before makes"
                              : "send it the gradient of the input of the stage after it");
    else if (v->of > 0)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_missing_backward, "none", "its gradient",
                      "pass the gradient of its output on to its input");
    else
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_missing_forward, "none", "one",
                      "leave it out, or compute what it takes before it");
}

/* A value comes from another stage by a message alone. */
static void check_stage(ari_lint_state *l, const ari_operation *op, const ari_lint_value *v)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED];
    if (v->stage == op->stage)
        return;
    snprintf(has, sizeof has, "stage %zu", op->stage);
    snprintf(needs, sizeof needs, "stage %zu", v->stage);
    ari_lint_find(l->f, op, ARI_AXIS_PP, AR_LINT_wrong_stage, has, needs,
                  "leave it to the stage that has its layers: the first also has the embedding, the last the head and "
                  "the loss");
}

ari_lint_type ari_lint_input(ari_lint_state *l, const ari_operation *op, int i)
{
    const ari_op_value *v = &op->input[i];
    const ari_lint_value *value = ari_lint_value_of(l, v->id);
    const unsigned parts = ari_op_parts(v);
    const bool received = op->kind == ARI_OPERATION_RECEIVE;
    if ((value->parts & parts) != parts) {
        find_missing(l, op, v, received);
        return ari_lint_stated(v);
    }
    if (!received)
        check_stage(l, op, value);
    /* A recomputed chain begins with values that were judged at their first use. */
    return op->recomputed && !value->recomputed ? ari_lint_stated(v) : value->is;
}

void ari_lint_output(ari_lint_state *l, const ari_operation *op, int i, ari_lint_type is)
{
    const ari_op_value *v = &op->output[i];
    ari_lint_value *value = ari_lint_value_of(l, v->id);
    bool passed_on = false;
    for (int k = 0; k < op->inputs; k++)
        passed_on = passed_on || op->input[k].id == v->id;
    if ((value->parts & ari_op_parts(v)) && !passed_on)
        ari_lint_find(l->f, op, ARI_LINT_NO_AXIS, AR_LINT_repeated_operation, "twice", "once",
                      "leave one of the two out");
    *value = (ari_lint_value){.is = ari_lint_agree(l, op, v, is),
                              .parts = value->parts | ari_op_parts(v),
                              .recomputed = op->recomputed,
                              .stage = op->stage,
                              .terms = passed_on && value->terms};
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

static bool in_passes(ari_operation_pass pass)
{
    return pass == ARI_PASS_FORWARD || pass == ARI_PASS_BACKWARD;
}

void ari_lint_end_of_passes(ari_lint_state *l)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED];
    for (size_t i = 0; in_passes(l->pass) && i < places(l); i++) {
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
}

ar_status ari_lint_visit(void *user, const ari_operation *op)
{
    ari_lint_state *l = user;
    const bool passes = in_passes(op->pass), forward = op->pass == ARI_PASS_FORWARD;
    const bool begins = forward && (l->pass != ARI_PASS_FORWARD || l->micro != op->micro);
    if (op->counting) /* the same operations follow, and are judged then */
        return AR_OK;
    l->counts->operations++;
    if (begins || (!passes && in_passes(l->pass))) {
        ari_lint_end_of_passes(l);
        memset(l->value, 0, ari_operations_values(l->c) * sizeof *l->value);
    }
    check_extents(l, op);
    if (passes)
        ari_lint_pass_operation(l, op);
    else
        ari_lint_step_operation(l, op);
    l->pass = op->pass;
    l->micro = op->micro;
    return l->f->st;
}

ar_status ari_lint_begin(ari_lint_state *l, ari_lint_findings *f, ar_lint_report *counts, const ari_step_case *c)
{
    const ar_parallel *p = &c->run.parallel;
    const size_t kv = c->config->kv_heads, heads = ari_axis_ranks(p, ARI_AXIS_TP) * ari_axis_ranks(p, ARI_AXIS_INNER);
    *l = (ari_lint_state){.c = c,
                          .f = f,
                          .counts = counts,
                          .size = {[ARI_LINT_COPIES] = kv > 0 && heads > kv ? heads / kv : 1},
                          .apart = ari_experts_apart(p),
                          .head = c->config->arch != AR_ARCH_STACK,
                          .pass = ARI_PASS_START,
                          .step.summed = {AR_PARTIAL_SUM, 0}};
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        l->step.targets.at[axis] = l->step.loss.at[axis] = l->step.weights.at[axis] = whole;
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        l->size[axis] = ari_axis_ranks(p, axis);
    l->size[ARI_LINT_EP] = (size_t)ari_at_least_one(p->ep);
    l->size[ARI_LINT_EDP] = (size_t)ari_extent(p, ari_expert_axes(p)) / l->size[ARI_LINT_EP];
    ari_lint_over_dp(&l->step.targets, (ar_placement){AR_PARTIAL_SUM, 0});
    AR_TRY(ARI_ALLOC_ZERO(&l->param, places(l), "the parameters of lint"));
    return ARI_ALLOC_ZERO(&l->value, ari_operations_values(c), "the values of lint");
}

ar_status ari_lint_end(ari_lint_state *l)
{
    ari_lint_end_of_step(l);
    return l->f->st;
}

void ari_lint_fini(ari_lint_state *l)
{
    free(l->value);
    free(l->param);
}
