/* SPDX-License-Identifier: Apache-2.0 */
/* The public call, and what is kept of a finding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/placement/placement_private.h"
#include "verify/lint/lint.h"
#include "verify/lint/lint_private.h"

ARI_OWNER(ar_lint_report, ari_lint_report_destroy)

/* --- names -------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *name, *text;
} rules[] = {
#define LINT_RULE(name, text) {#name, text},
    AR_LINT_RULE_TABLE(LINT_RULE)
#undef LINT_RULE
};

const char *ari_lint_rule_name(ar_lint_rule r)
{
    return (unsigned)r < AR_LINT_RULES ? rules[r].name : "?";
}

const char *ari_lint_rule_text(ar_lint_rule r)
{
    return (unsigned)r < AR_LINT_RULES ? rules[r].text : "?";
}

const ari_over ari_lint_groups[ARI_LINT_AXES] = {
    [ARI_LINT_COPIES] = ARI_OVER_COPIES, [ARI_LINT_EP] = ARI_OVER_EP, [ARI_LINT_EDP] = ARI_OVER_EDP};

const char *ari_lint_axis_name(int axis)
{
    if (axis < ARI_PLACED_AXES)
        return ari_axis_name(axis);
    return axis == ARI_LINT_NO_AXIS ? "" : ari_over_name(ari_lint_groups[axis]);
}

/* "S(0)", "V". Returns out. */
static char *placed_text(char out[AR_PLACEMENT_TEXT], ar_placement p)
{
    if (p.kind == AR_SHARD && p.dim == ARI_LINT_BY_EXPERT)
        snprintf(out, AR_PLACEMENT_TEXT, "V");
    else
        (void)ari_placement_name(out, p);
    return out;
}

/* --- repairs ------------------------------------------------------------------------------------------------------ */

/* The collective that moves a value from one placement to another (parallelism.md). */
static void move_text(char *out, size_t cap, ar_placement has, ar_placement needs, int along)
{
    const char *axis = ari_lint_axis_name(along);
    const bool partial = ari_lint_partial(has), whole = ari_lint_whole(needs);
    char dim[32] = "";
    if (!whole)
        snprintf(dim, sizeof dim, " along dimension %d", needs.dim);
    if (along == ARI_LINT_EP && has.kind == AR_SHARD && !whole)
        snprintf(out, cap, "all-to-all over %s: rows %s", axis,
                 needs.dim == ARI_LINT_BY_EXPERT ? "to the ranks of their experts" : "back to those of their tokens");
    else if (partial)
        snprintf(out, cap, "%s over %s%s", whole ? "all-reduce" : "reduce-scatter", axis, dim);
    else if (has.kind == AR_SHARD && whole)
        snprintf(out, cap, "all-gather over %s along dimension %d", axis, has.dim);
    else if (has.kind == AR_SHARD)
        snprintf(out, cap, "all-to-all over %s: from dimension %d to %d", axis, has.dim, needs.dim);
    else
        snprintf(out, cap, "take the own part of %s%s", axis, dim);
}

void ari_lint_repair_text(char *out, size_t cap, const ari_lint_verdict *v, int along)
{
    const char *axis = ari_lint_axis_name(along);
    switch (v->rule) {
    case AR_LINT_redundant_reduction:
        snprintf(out, cap, "leave one of the reductions over %s out: each makes the value that many times as large",
                 axis);
        break;
    case AR_LINT_redundant_gather:
        snprintf(out, cap, "leave the all-gather over %s out", axis);
        break;
    case AR_LINT_wrong_reduction:
        snprintf(out, cap, "leave the reduction over %s out, or all-gather: the ranks have different elements", axis);
        break;
    case AR_LINT_whole_added_to_partial:
        snprintf(out, cap, "reduce over %s first and add then, once", axis);
        break;
    case AR_LINT_nonlinear_of_partial:
        snprintf(out, cap, "all-reduce over %s before it", axis);
        break;
    case AR_LINT_product_of_partials:
        snprintf(out, cap, "all-reduce one of the two over %s before the product", axis);
        break;
    case AR_LINT_unsummed_gradient:
        snprintf(out, cap, "all-reduce the gradient over %s: each rank has the terms of its own %s", axis,
                 along == ARI_AXIS_DP    ? "samples"
                 : along == ARI_AXIS_PP  ? "use of the weight"
                 : along == ARI_LINT_EDP ? "rows"
                                         : "tokens");
        break;
    default:
        move_text(out, cap, v->has, v->needs, along);
    }
}

/* --- findings ----------------------------------------------------------------------------------------------------- */

/* A finding of op's layer is one with that of the layers next to it. */
static bool joins(ari_lint_found *have, const ari_operation *op, const ari_lint_found *new)
{
    const ari_operation *first = &have->row.op;
    if (have->is.rule != new->is.rule || have->axis != new->axis || first->kind != op->kind ||
        first->pass != op->pass || first->recomputed != op->recomputed || first->role != op->role ||
        first->output[0].bias != op->output[0].bias || strcmp(have->is.has, new->is.has) != 0 ||
        strcmp(have->is.needs, new->is.needs) != 0 || strcmp(have->is.repair, new->is.repair) != 0)
        return false;
    if (op->layer == ARI_NO_LAYER || first->layer == ARI_NO_LAYER)
        return op->layer == first->layer;
    if (op->layer + 1 == first->layer) {
        have->row.op.layer--;
        have->row.layers++;
    } else if (op->layer == first->layer + have->row.layers) {
        have->row.layers++;
    }
    return op->layer >= have->row.op.layer && op->layer < have->row.op.layer + have->row.layers;
}

void ari_lint_find(ari_lint_findings *f, const ari_operation *op, int axis, ar_lint_rule rule, const char *has,
                   const char *needs, const char *repair)
{
    ari_lint_found new = {.row = {.op = *op, .layers = 1}, .is = {.rule = rule}, .axis = axis};
    snprintf(new.is.has, sizeof new.is.has, "%s", has);
    snprintf(new.is.needs, sizeof new.is.needs, "%s", needs);
    snprintf(new.is.repair, sizeof new.is.repair, "%s", repair);
    for (size_t i = 0; i < f->count; i++) {
        if (joins(&f->found[i], op, &new))
            return;
    }
    if (f->st == AR_OK)
        f->st = ARI_GROW(&f->found, &f->capacity, f->count, "the findings of lint");
    if (f->st == AR_OK)
        f->found[f->count++] = new;
}

void ari_lint_find_placed(ari_lint_findings *f, const ari_operation *op, int axis, const ari_lint_verdict *v)
{
    char has[AR_PLACEMENT_TEXT], needs[AR_PLACEMENT_TEXT], repair[AR_LINT_REPAIR];
    ari_lint_repair_text(repair, sizeof repair, v, axis);
    ari_lint_find(f, op, axis, v->rule, placed_text(has, v->has), placed_text(needs, v->needs), repair);
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

static void complete(ar_lint_finding *out, const ari_lint_found *found, const ar_config *config)
{
    const ari_operation *op = &found->row.op;
    *out = found->is;
    ari_flow_title(out->module, sizeof out->module, config, &found->row);
    out->operation = ari_operation_name(op->kind);
    out->pass = ari_operation_pass_name(op->pass);
    out->axis = ari_lint_axis_name(found->axis);
    out->first_layer = op->layer == ARI_NO_LAYER ? 0 : op->layer;
    out->layers = op->layer == ARI_NO_LAYER ? 0 : found->row.layers;
}

static ar_status report_of(ar_lint_report *r, const ari_step_case *c)
{
    ari_lint_findings f = {.st = AR_OK};
    ari_lint_state l;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_lint_begin(&l, &f, r, c));
    AR_TRY_TO(done, st, ari_operations(c, ARI_OPS_PIPELINE, 0, ari_lint_visit, &l));
    AR_TRY_TO(done, st, ari_lint_end(&l));
    AR_TRY_TO(done, st, ARI_ALLOC(&r->finding, f.count, "the findings of lint"));
    for (r->count = 0; r->count < f.count; r->count++)
        complete(&r->finding[r->count], &f.found[r->count], c->config);
done:
    ari_lint_fini(&l);
    free(f.found);
    return st;
}

ar_status ari_lint(ar_lint_report **gives, const ar_run *run, const ar_config *config)
{
    /* Types do not depend on what a sum is made of: native numerics have one collective where exact ones have four. */
    ari_step_case c = {.run = *run, .config = config};
    ARI_OWNED_BY(ari_lint_report_destroy) ar_lint_report *r = NULL;
    c.run.numerics = AR_NUMERICS_NATIVE;
    c.run.precision = AR_PRECISION_F32;
    c.run.steps = run->steps > 0 ? 1 : 0;
    /* Nor on when shares are reduced and gathered, which is what ZeRO's stages differ in. */
    c.run.parallel.zero = run->parallel.zero > 0;
    c.run.parallel.dp_replicate = 1;
    if (run->fault != AR_FAULT_NONE)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "lint types the list of operations, which has no faults; a check with %s injected shows it",
                            ari_fault_name(run->fault));
    AR_TRY(ar_run_check(&c.run, config));
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "the report of lint"));
    AR_TRY(report_of(r, &c));
    ARI_GIVE(gives, r);
    return AR_OK;
}

void ari_lint_report_destroy(ar_lint_report *r)
{
    if (!r)
        return;
    free(r->finding);
    free(r);
}
