/* SPDX-License-Identifier: Apache-2.0 */
/* A user's module under a layout, by dry runs: findings, operations, bytes, memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/axis.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "ref/placement/placement_private.h"
#include "verify/check/check_run.h"
#include "verify/lint/lint_private.h"

/* --- inspect module ----------------------------------------------------------------------------------------------- */

ARI_OWNER(ar_module_inspection, ar_module_inspection_destroy)

/* --- findings ----------------------------------------------------------------------------------------------------- */

const char *ari_lint_finding_text(char *text, size_t cap, const ar_lint_finding *f)
{
    snprintf(text, cap, "%s, %s (%s): has %s, needs %s, %s: %s", f->module, f->operation, f->pass, f->has, f->needs,
             ari_lint_rule_name(f->rule), f->repair);
    return text;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

enum { ACTIVATION_DIMS = 3 }; /* [b, s, features]; dimensions are counted from the end */

static void placed_text(char out[AR_LINT_PLACED], bool is_known, const ari_lint_type *type)
{
    char text[AR_PLACEMENT_TEXT];
    ar_placement p = type->placement[ARI_AXIS_TP];
    if (p.kind == AR_SHARD)
        p.dim -= ACTIVATION_DIMS;
    if (p.kind == AR_INVARIANT)
        p.kind = AR_REPLICATE;
    snprintf(out, AR_LINT_PLACED, "%s", is_known ? ari_placement_name(text, p) : "?");
}

static void describe(ar_module_operation *o, const ari_ledger *l, const ari_ledger_operation *op,
                     const ari_lint_placed *placed)
{
    *o = (ar_module_operation){
        .operation = op->operation, .pass = op->pass == 'b' ? "backward" : "forward", .ndim = op->out[0].ndim};
    ari_ledger_module(o->name, sizeof o->name, op);
    memcpy(o->shape, op->out[0].shape, sizeof o->shape);
    placed_text(o->takes, placed->takes_known[0], &placed->input_types[0]);
    if (op->outputs > 0)
        placed_text(o->makes, placed->makes_known[0], &placed->output_types[0]);
    for (size_t i = 0; i < op->calls; i++)
        o->bytes += l->call[op->first_call + i].bytes;
}

/* Copies the operations of the passes, and omits reports whose placement is as declared. */
static ar_status take_operations(ar_module_inspection *m, const ari_ledger *l, const ari_lint_placed *placed)
{
    size_t capacity = m->operations;
    for (size_t i = 0; i < l->operations; i++) {
        const ari_ledger_operation *op = &l->operation[i];
        if (op->pass == 's' || op->is_recomputed || op->kind == ARI_LEDGER_REPORT)
            continue;
        AR_TRY(ARI_GROW(&m->operation, &capacity, m->operations, "operations"));
        describe(&m->operation[m->operations++], l, op, &placed[i]);
    }
    return AR_OK;
}

/* --- dry runs ----------------------------------------------------------------------------------------------------- */

/* Records one step of the first rank of each stage. All samples pass through a stage together if possible. record:
 * [stages]. */
static ar_status record_stages(ari_ledger *record, const ari_cluster_options *o)
{
    const ar_parallel *p = &o->run.parallel;
    const int stages = ari_at_least_one(p->pp), ranks = ar_parallel_world(p) / stages;
    ari_cluster_options options = *o;
    ari_dry_memory unused;
    options.run.steps = o->run.steps > 0;
    options.run.numerics = AR_NUMERICS_NATIVE; /* native numerics use one collective where exact sums need several */
    options.tap = NULL;
    if (stages == 1)
        options.run.parallel.micro_batches = 1;
    for (int i = 0; i < stages; i++) {
        record[i].pass = 's';
        options.ledger = &record[i];
        AR_TRY(ari_cluster_dry(&unused, &options, i * ranks, NULL));
    }
    return AR_OK;
}

/* A context that records operations does not report mistakes. */
static ar_status count_ranks(ar_module_inspection *m, const ari_cluster_options *o)
{
    ari_cluster_options options = *o;
    for (int r = 0; r < ar_parallel_world(&m->parallel); r++) {
        ARI_ENDED(ari_ledger_fini) ari_ledger unread = {.pass = 's'};
        ari_dry_memory dry;
        options.ledger = &unread;
        AR_TRY(ari_cluster_dry(&dry, &options, r, NULL));
        m->bytes += dry.bytes;
        ari_memory_raise(&m->memory, &dry.rank);
    }
    return AR_OK;
}

static ar_status lint_stages(ar_module_inspection *m, const ari_cluster_options *o, ari_arena *memory)
{
    const size_t stages = (size_t)ari_at_least_one(m->parallel.pp);
    const ari_lint_layout layout = ari_lint_layout_of(&m->parallel);
    ari_ledger *record = NULL;
    ari_lint_placed **placed = NULL;
    AR_TRY(ARI_TAKE(&record, memory, stages, "records"));
    AR_TRY(ARI_TAKE(&placed, memory, stages, "placements"));
    ar_status st = record_stages(record, o);
    for (size_t i = 0; i < stages && st == AR_OK; i++)
        st = ARI_TAKE(&placed[i], memory, record[i].operations, "placements");
    if (st == AR_OK)
        st = ari_lint_records(m->lint, placed, record, stages, &layout);
    for (size_t i = 0; i < stages; i++) {
        if (st == AR_OK)
            st = take_operations(m, &record[i], placed[i]);
        ari_ledger_fini(&record[i]);
    }
    return st;
}

ar_status ar_inspect_module(ar_module_inspection **out, const ar_module_case *c, const ar_run *run)
{
    const ar_check_module_options o = {.run = *run, .parallel = &run->parallel, .layouts = 1};
    ARI_OWNED_BY(ar_module_inspection_destroy) ar_module_inspection *m = NULL;
    ARI_OWNED ar_batch *batch = NULL;
    ARI_ENDED(ari_arena_free) ari_arena memory = {0};
    AR_TRY(ari_module_options_check(c, &o));
    AR_TRY(ari_parallel_check_ranks(&run->parallel));
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "an inspection"));
    AR_TRY(ARI_ALLOC_ZERO(&m->lint, 1, "the report of lint"));
    AR_TRY(ari_module_batches(&batch, c, ari_run_steps(run)));
    snprintf(m->name, sizeof m->name, "%s", c->name);
    m->parallel = run->parallel;
    const ari_cluster_options cluster = {.run = *run, .batch = batch, .module = c};
    AR_TRY(lint_stages(m, &cluster, &memory));
    AR_TRY(count_ranks(m, &cluster));
    ARI_GIVE(out, m);
    return AR_OK;
}

void ar_module_inspection_destroy(ar_module_inspection *m)
{
    if (!m)
        return;
    ari_lint_report_destroy(m->lint);
    free(m->operation);
    free(m);
}

/* --- in words ----------------------------------------------------------------------------------------------------- */

static size_t sum_of(const ar_rank_memory *m)
{
    return m->weights + m->gradients + m->optimizer + m->operands + m->buckets + m->peak;
}

void ar_inspect_module_text(const ar_module_inspection *m, bool flow, char *text, size_t cap)
{
    ari_text w = ari_plain_text_in(text, cap);
    char layout[96], line[512];
    ari_parallel_text(layout, sizeof layout, &m->parallel);
    ari_say(&w,
            "%s under %s: %zu findings in %zu operations; %zu bytes between ranks, at most %zu in a rank's memory\n",
            m->name, layout, m->lint->count, m->operations, (size_t)m->bytes, sum_of(&m->memory));
    for (size_t i = 0; i < m->lint->count; i++)
        ari_say(&w, "  %s\n", ari_lint_finding_text(line, sizeof line, &m->lint->finding[i]));
    for (size_t i = 0; flow && i < m->operations; i++) {
        const ar_module_operation *o = &m->operation[i];
        ari_say(&w, "  %-8s  %-24s %-24s %6s -> %-6s %-14s %zu bytes\n", o->pass, o->name, o->operation, o->takes,
                o->makes, o->ndim > 0 ? ARI_SHOW_SHAPE(o->ndim, o->shape) : "", (size_t)o->bytes);
    }
}
