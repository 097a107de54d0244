/* SPDX-License-Identifier: Apache-2.0 */
/* The walk: what every operation has in common. The list's own placements are claims: a value has the type that the
 * operations before have given it, and where the list says otherwise that is the finding. After it the walk goes on
 * with what the list says, so that one mistake is one finding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plan/lint.h"
#include "ref/core/size.h"

static const ar_placement whole = {AR_INVARIANT, 0};

/* --- values ------------------------------------------------------------------------------------------------------- */

ari_lint_type ari_lint_stated(const ari_op_value *v)
{
    ari_lint_type t;
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        t.at[axis] = axis < ARI_PLACED_AXES ? v->at[axis] : whole;
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

/* The rank's extents are those that the placement over tp gives it: along dp ranks share samples, of which not every
 * micro-batch has the same number. */
static void check_extent(ari_lint_state *l, const ari_operation *op, const ari_op_value *v)
{
    const ar_placement tp = v->at[ARI_AXIS_TP];
    const int parts = (int)l->size[ARI_AXIS_TP] / (int)(v->copies > 0 ? v->copies : 1);
    for (int d = 0; d < v->ndim; d++) {
        const bool cut = tp.kind == AR_SHARD && tp.dim == d;
        size_t start = 0, own = v->shape[d];
        if (v->at[ARI_AXIS_DP].kind == AR_SHARD && d == 0)
            continue;
        if (cut)
            ar_split_uneven(v->shape[d], parts, 0, &start, &own);
        if (v->local[d] == own)
            continue;
        char has[AR_LINT_PLACED], needs[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
        snprintf(has, sizeof has, "%zu of %zu", v->local[d], v->shape[d]);
        snprintf(needs, sizeof needs, "%zu of %zu", own, v->shape[d]);
        snprintf(repair, sizeof repair, "dimension %d: divide by the %d parts once, the first ones longer by the rest",
                 d, cut ? parts : 1);
        ari_lint_find(l->f, op, ARI_AXIS_TP, AR_LINT_wrong_extent, has, needs, repair);
    }
}

static void check_extents(ari_lint_state *l, const ari_operation *op)
{
    for (int i = 0; i < op->inputs; i++)
        check_extent(l, op, &op->input[i]);
    for (int i = 0; i < op->weights; i++)
        check_extent(l, op, &op->weight[i]);
    for (int i = 0; i < op->outputs; i++)
        check_extent(l, op, &op->output[i]);
    l->counts->values += (size_t)(op->inputs + op->weights + op->outputs);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

static int axis_of(ari_call_group over)
{
    return over == ARI_OVER_DP ? ARI_AXIS_DP : over == ARI_OVER_TP ? ARI_AXIS_TP : ARI_LINT_COPIES;
}

/* Whether the collective does with a value what it is for; then the value is what comes out. */
static bool serves(ar_placement *p, const ari_op_call *call, ar_placement to)
{
    const bool partial = ari_lint_partial(*p);
    if (call->kind == ARI_CALL_ALL_REDUCE && partial)
        *p = whole;
    else if (call->kind == ARI_CALL_REDUCE_SCATTER && partial)
        *p = to.kind == AR_SHARD ? to : (ar_placement){AR_SHARD, 0};
    else if (call->kind == ARI_CALL_ALL_GATHER && p->kind == AR_SHARD)
        *p = whole;
    else if (call->kind == ARI_CALL_ALL_TO_ALL && p->kind == AR_SHARD && to.kind == AR_SHARD)
        *p = to;
    else
        return false;
    return true;
}

/* The axis along which a value waits for a sum that no call of the operation makes; -1: there is none. */
static int waiting(const ari_lint_state *l, const ari_operation *op, const ari_lint_type *v, int n)
{
    for (int axis = 0; axis < ARI_LINT_AXES; axis++) {
        bool pending = false, called = false;
        for (int i = 0; i < n; i++)
            pending = pending || ari_lint_partial(v[i].at[axis]);
        for (int i = 0; i < op->calls; i++)
            called = called || (axis_of(op->call[i].over) == axis && op->call[i].ranks == l->size[axis]);
        if (l->size[axis] > 1 && pending && !called)
            return axis;
    }
    return -1;
}

static void find_group(ari_lint_state *l, const ari_operation *op, const ari_op_call *call, int right)
{
    char has[AR_LINT_PLACED], needs[AR_LINT_PLACED], repair[AR_LINT_REPAIR];
    const int axis = axis_of(call->over);
    snprintf(has, sizeof has, "%zu ranks of %s", call->ranks,
             call->ranks > l->size[axis] && axis != ARI_LINT_COPIES ? "the world" : ari_lint_axis_name(axis));
    snprintf(needs, sizeof needs, "%zu ranks of %s", l->size[right], ari_lint_axis_name(right));
    snprintf(repair, sizeof repair, "%s over the value's %s group: rank = dp rank * %zu + tp rank",
             ari_call_name(call->kind), ari_lint_axis_name(right), l->size[ARI_AXIS_TP]);
    ari_lint_find(l->f, op, right, AR_LINT_wrong_group, has, needs, repair);
}

/* A call that serves no value. */
static void misplaced(ari_lint_state *l, const ari_operation *op, const ari_op_call *call, ari_lint_type *v, int n,
                      const ari_op_value *to)
{
    const int axis = axis_of(call->over), other = waiting(l, op, v, n);
    const ari_lint_type end = ari_lint_stated(to);
    const ar_placement has = v[0].at[axis];
    if (call->ranks != l->size[axis] || other >= 0) {
        const int right = other >= 0 ? other : axis;
        find_group(l, op, call, right);
        for (int i = 0; i < n; i++)
            v[i].at[right] = end.at[right];
        return;
    }
    ari_lint_verdict wrong = {.broken = true, .has = has, .needs = end.at[axis]};
    if (call->kind == ARI_CALL_ALL_GATHER)
        wrong.rule = ari_lint_whole(has) ? AR_LINT_redundant_gather : AR_LINT_missing_reduction;
    else
        wrong.rule = ari_lint_whole(has) || op->kind == ARI_OPERATION_GRADIENT_SUM ? AR_LINT_redundant_reduction
                                                                                   : AR_LINT_wrong_reduction;
    ari_lint_find_placed(l->f, op, axis, &wrong);
    v[0].at[axis] = end.at[axis];
}

void ari_lint_collectives(ari_lint_state *l, const ari_operation *op, ari_lint_type *v, int n, const char *const *tags,
                          const ari_op_value *to)
{
    const ari_lint_type end = ari_lint_stated(to);
    for (int i = 0; i < op->calls; i++) {
        const ari_op_call *call = &op->call[i];
        const int axis = axis_of(call->over);
        bool served = false;
        for (int k = 0; k < n && !served && call->ranks == l->size[axis]; k++) {
            if (!tags || strcmp(tags[k], call->tag) == 0)
                served = serves(&v[k].at[axis], call, end.at[axis]);
        }
        if (!served)
            misplaced(l, op, call, v, n, to);
    }
}

/* --- parameters, operations to come back to --------------------------------------------------------------------------- */

/* A layer has a place for each role, and one for what else is called by it: a bias, the rotary part of attention. */
enum { PLACES = 2 * ARI_ROLES };

static uint32_t *place(uint32_t *index, size_t layer, ari_role role, bool second)
{
    return &index[(layer == ARI_NO_LAYER ? 0 : layer + 1) * PLACES + 2 * (size_t)role + second];
}

ari_lint_param *ari_lint_parameter(ari_lint_state *l, size_t layer, const ari_op_value *v)
{
    uint32_t *at = place(l->param_at, layer, v->role, v->bias);
    if (*at > 0)
        return &l->param[*at - 1];
    if (l->st == AR_OK)
        l->st = ari_grow(&l->param, &l->param_capacity, l->params, sizeof *l->param, "the parameters of lint");
    if (l->st != AR_OK)
        return NULL;
    ari_lint_param *p = &l->param[l->params++];
    *at = (uint32_t)l->params;
    *p = (ari_lint_param){.layer = layer, .role = v->role, .bias = v->bias, .is = ari_lint_stated(v)};
    return p;
}

ari_lint_record *ari_lint_recorded(const ari_lint_state *l, size_t layer, ari_operation_kind kind, ari_role role)
{
    const bool second = kind == ARI_OPERATION_BIAS || kind == ARI_OPERATION_ROPE;
    const uint32_t at = *place(l->record_at, layer, role, second);
    return at > 0 ? &l->record[at - 1] : NULL;
}

void ari_lint_keep(ari_lint_state *l, const ari_operation *op, ari_lint_type stored, ari_lint_type out)
{
    const bool second = op->kind == ARI_OPERATION_BIAS || op->kind == ARI_OPERATION_ROPE;
    if (l->st == AR_OK)
        l->st = ari_grow(&l->record, &l->record_capacity, l->records, sizeof *l->record, "the operations of lint");
    if (l->st != AR_OK)
        return;
    l->record[l->records++] =
        (ari_lint_record){.layer = op->layer, .kind = op->kind, .role = op->role, .stored = stored, .out = out};
    *place(l->record_at, op->layer, op->role, second) = (uint32_t)l->records;
}

void ari_lint_forget(ari_lint_state *l)
{
    for (size_t i = 0; i < l->records; i++) {
        const ari_lint_record *r = &l->record[i];
        *place(l->record_at, r->layer, r->role, r->kind == ARI_OPERATION_BIAS || r->kind == ARI_OPERATION_ROPE) = 0;
    }
    l->records = 0;
}

/* --- the walk ----------------------------------------------------------------------------------------------------- */

ar_status ari_lint_visit(void *user, const ari_operation *op)
{
    ari_lint_state *l = user;
    const bool passes = op->pass == ARI_PASS_FORWARD || op->pass == ARI_PASS_BACKWARD;
    l->counts->operations++;
    if (passes && op->pass == ARI_PASS_FORWARD && (l->pass != ARI_PASS_FORWARD || l->micro != op->micro))
        ari_lint_end_of_passes(l);
    if (!passes && (l->pass == ARI_PASS_FORWARD || l->pass == ARI_PASS_BACKWARD))
        ari_lint_end_of_passes(l);
    check_extents(l, op);
    if (passes && op->kind != ARI_OPERATION_TARGETS)
        ari_lint_pass_operation(l, op);
    else
        ari_lint_step_operation(l, op);
    l->pass = op->pass;
    l->micro = op->micro;
    l->layer = op->layer;
    return l->st == AR_OK ? l->f->st : l->st;
}

ar_status ari_lint_begin(ari_lint_state *l, ari_lint_findings *f, ar_lint_report *counts, const ari_step_case *c)
{
    const ar_parallel *p = &c->run.parallel;
    const size_t tp = (size_t)ari_at_least_one(p->tp), kv = c->config->kv_heads;
    size_t places = 0;
    *l = (ari_lint_state){.c = c,
                          .f = f,
                          .counts = counts,
                          .size = {[ARI_AXIS_DP] = (size_t)ari_at_least_one(p->dp),
                                   [ARI_AXIS_TP] = tp,
                                   [ARI_LINT_COPIES] = kv > 0 && tp > kv ? tp / kv : 1},
                          .head = c->config->arch != AR_ARCH_STACK,
                          .layer = ARI_NO_LAYER,
                          .pass = ARI_PASS_START,
                          .summed = {AR_PARTIAL_SUM, 0}};
    for (int axis = 0; axis < ARI_LINT_AXES; axis++)
        l->targets.at[axis] = l->loss.at[axis] = l->weights.at[axis] = whole;
    l->targets.at[ARI_AXIS_DP] = (ar_placement){AR_PARTIAL_SUM, 0};
    AR_TRY(ari_mul_size(&places, c->config->layers + 1, PLACES));
    AR_TRY(ari_alloc_zero((void **)&l->param_at, places, sizeof *l->param_at, "the parameters of lint"));
    return ari_alloc_zero((void **)&l->record_at, places, sizeof *l->record_at, "the operations of lint");
}

ar_status ari_lint_end(ari_lint_state *l)
{
    ari_lint_end_of_step(l);
    return l->st == AR_OK ? l->f->st : l->st;
}

void ari_lint_fini(ari_lint_state *l)
{
    free(l->record_at);
    free(l->param_at);
    free(l->record);
    free(l->param);
}
