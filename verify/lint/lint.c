/* SPDX-License-Identifier: Apache-2.0 */
/* The public call, and what is kept of a finding. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/config.h"
#include "ref/core/size.h"
#include "verify/lint/lint.h"
#include "verify/lint/lint_private.h"
#include "verify/run/cluster_run.h"

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

/* --- layouts ------------------------------------------------------------------------------------------------------ */

ari_lint_layout ari_lint_layout_of(const ar_parallel *p)
{
    ari_lint_layout l = {.separate_experts = ari_experts_separate(p),
                         .expert_axes = ari_expert_axes(p),
                         .zero = p->zero > 0,
                         .replicates = ari_at_least_one(p->dp_replicate) > 1};
    for (int axis = 0; axis < ARI_PLACED_AXES; axis++)
        l.size[axis] = (size_t)ari_extent(p, 1u << axis);
    l.size[ARI_LINT_COPIES] = l.size[ARI_AXIS_TP] * l.size[ARI_AXIS_INNER];
    l.size[ARI_LINT_EP] = l.separate_experts ? (size_t)ari_at_least_one(p->ep) : 1;
    l.size[ARI_LINT_EDP] = l.separate_experts ? (size_t)ari_extent(p, l.expert_axes) / l.size[ARI_LINT_EP] : 1;
    return l;
}

/* --- repairs ------------------------------------------------------------------------------------------------------ */

/* Returns the collective that converts a value from one placement to another (parallelism.md). */
static void move_text(char *out, size_t cap, ar_placement actual, ar_placement required, int along)
{
    const char *axis = ari_lint_axis_name(along);
    const bool partial = ari_lint_partial(actual), is_replicated = ari_lint_replicated(required);
    char dim[32] = "";
    if (!is_replicated)
        snprintf(dim, sizeof dim, " along dimension %d", required.dim);
    if (along == ARI_LINT_EP && actual.kind == AR_SHARD && !is_replicated)
        snprintf(out, cap, "all-to-all over %s: rows %s", axis,
                 required.dim == ARI_LINT_BY_EXPERT ? "to the ranks of their experts"
                                                    : "back to those of their tokens");
    else if (partial)
        snprintf(out, cap, "%s over %s%s", is_replicated ? "all-reduce" : "reduce-scatter", axis, dim);
    else if (actual.kind == AR_SHARD && is_replicated)
        snprintf(out, cap, "all-gather over %s along dimension %d", axis, actual.dim);
    else if (actual.kind == AR_SHARD)
        snprintf(out, cap, "all-to-all over %s: from dimension %d to %d", axis, actual.dim, required.dim);
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
        move_text(out, cap, v->actual, v->required, along);
    }
}

/* --- the call ----------------------------------------------------------------------------------------------------- */

/* Simplifies the step that is recorded: placements do not depend on numerics, on when shards are reduced and gathered
 * (the difference between ZeRO's stages), on overlap, on the number of samples or, beyond divisibility by the ranks, on
 * the sequence length. */
static void simplify(ar_run *r, const ar_config *config)
{
    ar_parallel *p = &r->parallel;
    const int pp = ari_at_least_one(p->pp), stages = ari_at_least_one(p->virtual_stages);
    r->numerics = AR_NUMERICS_NATIVE;
    r->precision = AR_PRECISION_F32;
    r->steps = r->steps > 0;
    p->zero = p->zero > 0;
    p->dp_replicate = 1;
    p->overlap = 0;
    const int enough = pp == 1 ? 1 : stages > 1 ? pp : 2;
    if (!p->own_schedule && ari_at_least_one(p->micro_batches) > enough)
        p->micro_batches = enough;
    ar_run shorter = *r;
    shorter.batch = (size_t)ari_at_least_one(p->dp) * (size_t)ari_at_least_one(p->micro_batches);
    shorter.seq = 2 * (size_t)ari_at_least_one(p->cp) * (size_t)p->tp + (size_t)config->mtp;
    shorter.seq += r->seq % 2 == shorter.seq % 2 ? 0 : 1;
    if (shorter.seq < r->seq && ar_run_check(&shorter, config) == AR_OK)
        *r = shorter;
}

ar_status ari_lint_record(ari_ledger *record, ar_run *run, const ar_config *config)
{
    simplify(run, config);
    const int stages = ari_at_least_one(run->parallel.pp), ranks = ar_parallel_world(&run->parallel) / stages;
    ARI_OWNED int64_t *ids = NULL;
    size_t n = 0;
    AR_TRY(ari_mul_size(&n, run->batch, run->seq));
    AR_TRY(ARI_ALLOC_ZERO(&ids, n, "the tokens of a dry run"));
    const ar_batch batch = {.batch = run->batch, .seq = run->seq, .input_ids = ids};
    ari_cluster_options o = {.run = *run, .config = config, .batch = &batch, .faulty = true};
    for (int i = 0; i < stages; i++) {
        ari_dry_memory unused;
        record[i].pass = 's';
        o.ledger = &record[i];
        AR_TRY(ari_cluster_dry(&unused, &o, i * ranks, NULL));
    }
    return AR_OK;
}

ar_status ari_lint(ar_lint_report **out, const ar_run *run, const ar_config *config)
{
    ARI_OWNED_BY(ari_lint_report_destroy) ar_lint_report *r = NULL;
    ARI_ENDED(ari_arena_free) ari_arena memory = {0};
    ar_run run_copy = *run;
    ari_ledger *record = NULL;
    AR_TRY(ar_run_check(&run_copy, config));
    const size_t stages = (size_t)ari_at_least_one(run_copy.parallel.pp);
    ari_lint_layout layout = ari_lint_layout_of(&run_copy.parallel);
    layout.complete = true;
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "the report of lint"));
    AR_TRY(ARI_TAKE(&record, &memory, stages, "records"));
    ar_status st = ari_lint_record(record, &run_copy, config);
    if (st == AR_OK)
        st = ari_lint_records(r, NULL, record, stages, &layout);
    for (size_t i = 0; i < stages; i++)
        ari_ledger_fini(&record[i]);
    AR_TRY(st);
    ARI_GIVE(out, r);
    return AR_OK;
}

void ari_lint_report_destroy(ar_lint_report *r)
{
    if (!r)
        return;
    free(r->finding);
    free(r);
}
