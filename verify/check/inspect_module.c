/* SPDX-License-Identifier: Apache-2.0 */
/* A user's module under a layout, by dry runs: findings, operations, bytes, memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "verify/check/check_run.h"

ARI_OWNER(ar_module_inspection, ar_module_inspection_destroy)

static const char *pass_of(const ari_ledger_record *r)
{
    return r->pass == 'b' ? "backward" : "forward";
}

/* --- findings ----------------------------------------------------------------------------------------------------- */

const char *ari_lint_finding_text(char *text, size_t cap, const ar_lint_finding *f)
{
    snprintf(text, cap, "%s, %s (%s): has %s, needs %s, %s: %s", f->module, f->operation, f->pass, f->has, f->needs,
             ar_lint_rule_name(f->rule), f->repair);
    return text;
}

/* One that is there already, of another micro-batch or stage. */
static bool is_known(const ar_lint_report *r, const ar_lint_finding *f)
{
    for (size_t i = 0; i < r->count; i++) {
        const ar_lint_finding *k = &r->finding[i];
        if (k->rule == f->rule && k->pass == f->pass && strcmp(k->operation, f->operation) == 0 &&
            strcmp(k->module, f->module) == 0 && strcmp(k->has, f->has) == 0)
            return true;
    }
    return false;
}

static ar_status judge(ar_lint_report *r, size_t *room, const ari_ledger_record *op)
{
    ari_lint_verdict v;
    ar_lint_finding f = {.operation = op->operation, .pass = pass_of(op), .axis = ari_lint_axis_name(ARI_AXIS_TP)};
    r->operations++;
    r->values += op->out.known;
    if (!ari_lint_noted(&v, op))
        return AR_OK;
    f.rule = v.rule;
    snprintf(f.module, sizeof f.module, "%s", op->name);
    ar_placement_text(f.has, v.has);
    ar_placement_text(f.needs, v.needs);
    ari_lint_repair_text(f.repair, sizeof f.repair, &v, ARI_AXIS_TP);
    if (is_known(r, &f))
        return AR_OK;
    AR_TRY(ARI_GROW(&r->finding, room, r->count, "the findings of lint"));
    r->finding[r->count++] = f;
    return AR_OK;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static void placed_text(char out[AR_LINT_PLACED], const ari_ledger_value *v)
{
    char text[AR_PLACEMENT_TEXT];
    snprintf(out, AR_LINT_PLACED, "%s", v->known ? ar_placement_text(text, v->at) : "?");
}

static void describe(ar_module_operation *o, const ari_ledger_record *r)
{
    *o = (ar_module_operation){.operation = r->operation, .pass = pass_of(r), .ndim = r->out.ndim, .bytes = r->bytes};
    snprintf(o->name, sizeof o->name, "%s", r->name);
    memcpy(o->shape, r->out.shape, sizeof o->shape);
    placed_text(o->takes, &r->in[0]);
    if (r->out.ndim > 0)
        placed_text(o->makes, &r->out);
}

static ar_status take_operations(ar_module_inspection *m, const ari_ledger *w)
{
    size_t room = 0;
    AR_TRY(ARI_ALLOC_ZERO(&m->operation, w->records, "operations"));
    for (size_t i = 0; i < w->records; i++) {
        describe(&m->operation[m->operations++], &w->record[i]);
        AR_TRY(judge(m->lint, &room, &w->record[i]));
    }
    return AR_OK;
}

/* --- dry runs ----------------------------------------------------------------------------------------------------- */

/* One step of the first rank of each rank of the pipeline, whose samples go through it at once where they can. */
static ar_status note_ranks(ari_ledger *w, const ari_cluster_options *o)
{
    const ar_parallel *p = &o->run.parallel;
    const int stage = ar_parallel_world(p) / ari_at_least_one(p->pp);
    ari_cluster_options own = *o;
    ari_dry_memory unused;
    own.run.steps = o->run.steps > 0;
    own.ledger = w;
    own.tap = NULL;
    if (p->pp <= 1)
        own.run.parallel.micro_batches = 1;
    for (int i = 0; i < ari_at_least_one(p->pp); i++) {
        w->first = w->records;
        AR_TRY(ari_cluster_dry(&unused, &own, i * stage, NULL));
        w->values = 0;
    }
    return AR_OK;
}

/* A context that notes operations lets a mistake pass. */
static ar_status count_ranks(ar_module_inspection *m, const ari_cluster_options *o)
{
    ari_cluster_options own = *o;
    ARI_ENDED(ari_ledger_fini) ari_ledger unread = {.pass = 'f'};
    own.ledger = &unread;
    for (int r = 0; r < ar_parallel_world(&m->parallel); r++) {
        ari_dry_memory dry;
        unread.values = unread.records = 0;
        AR_TRY(ari_cluster_dry(&dry, &own, r, NULL));
        m->bytes += dry.bytes;
        ari_memory_raise(&m->memory, &dry.rank);
    }
    return AR_OK;
}

ar_status ar_inspect_module(ar_module_inspection **gives, const ar_module_case *c, const ar_run *run)
{
    const ar_check_module_options o = {.run = *run, .parallel = &run->parallel, .layouts = 1};
    ARI_OWNED_BY(ar_module_inspection_destroy) ar_module_inspection *m = NULL;
    ARI_OWNED ar_batch *batch = NULL;
    ARI_ENDED(ari_ledger_fini) ari_ledger w = {.pass = 'f'};
    AR_TRY(ari_module_options_check(c, &o));
    AR_TRY(ar_parallel_check_ranks(&run->parallel));
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "an inspection"));
    AR_TRY(ARI_ALLOC_ZERO(&m->lint, 1, "the report of lint"));
    AR_TRY(ari_module_batches(&batch, c, ari_run_steps(run)));
    snprintf(m->name, sizeof m->name, "%s", c->name);
    m->parallel = run->parallel;
    const ari_cluster_options cluster = {.run = *run, .batch = batch, .module = c};
    AR_TRY(note_ranks(&w, &cluster));
    AR_TRY(take_operations(m, &w));
    AR_TRY(count_ranks(m, &cluster));
    ARI_GIVE(gives, m);
    return AR_OK;
}

void ar_module_inspection_destroy(ar_module_inspection *m)
{
    if (!m)
        return;
    ar_lint_report_destroy(m->lint);
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
    ar_parallel_text(layout, sizeof layout, &m->parallel);
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
