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
#include "verify/plan/planner.h"

/* --- judging ------------------------------------------------------------------------------------------------------ */

/* The rules of types on the operations of a user's module. */

enum { ACTIVATION_DIMS = 3 }; /* [b, s, features] */

/* Dimensions of records count from the end. */
static ar_placement from_start(ar_placement p)
{
    return p.kind == AR_SHARD && p.dim < 0 ? (ar_placement){AR_SHARD, p.dim + ACTIVATION_DIMS} : p;
}

static ar_placement from_end(ar_placement p)
{
    return p.kind == AR_SHARD ? (ar_placement){AR_SHARD, p.dim - ACTIVATION_DIMS} : p;
}

static bool broken(ari_lint_verdict *v, ar_lint_rule rule, ar_placement has, ar_placement needs)
{
    *v = (ari_lint_verdict){.broken = true, .rule = rule, .makes = needs, .has = has, .needs = needs};
    return true;
}

/* Taken as `needs`, and is not. */
static bool misplaced(ari_lint_verdict *v, ar_placement has, ar_placement needs)
{
    const bool sums = ari_lint_partial(needs);
    if (ari_lint_same(has, needs))
        return false;
    if (sums && !ari_lint_partial(has))
        return broken(v, ari_lint_whole(has) ? AR_LINT_redundant_reduction : AR_LINT_wrong_reduction, has, needs);
    *v = ari_lint_mismatch(has, needs);
    return true;
}

static bool incomplete(ari_lint_verdict *v, ar_placement has, ar_placement needs)
{
    if (ari_lint_same(has, needs))
        return false;
    if (ari_lint_whole(has))
        return broken(v, AR_LINT_redundant_reduction, has, needs);
    return broken(v, AR_LINT_unsummed_gradient, has, needs);
}

/* The verdict on an operation of a module, as a ledger has it. False: there is none, or what it takes is not
 *  known. */
static bool lint_noted(ari_lint_verdict *v, const ari_ledger_record *r)
{
    const ar_placement a = from_start(r->in[0].at), b = from_start(r->in[1].at), needs = from_start(r->needs);
    const bool both = r->in[0].known && r->in[1].known;
    bool found = false;
    if (r->kind == ARI_LEDGER_ADDS || r->kind == ARI_LEDGER_MULTIPLIES) {
        if (!both)
            return false;
        *v = ari_lint_add(a, b);
        found = v->broken;
        if (r->kind == ARI_LEDGER_MULTIPLIES)
            found = ari_lint_partial(a) && ari_lint_partial(b) && broken(v, AR_LINT_product_of_partials, a, b);
    } else if (!r->in[0].known) {
        return false;
    } else if (r->kind == ARI_LEDGER_TAKES) {
        found = misplaced(v, a, needs);
    } else if (r->kind == ARI_LEDGER_GRADIENT) {
        found = incomplete(v, a, needs);
    } else {
        *v = r->kind == ARI_LEDGER_ALONG ? ari_lint_along(a, ACTIVATION_DIMS - 1, false)
                                         : ari_lint_elementwise(a, false);
        found = v->broken;
    }
    if (found) {
        v->has = from_end(v->has);
        v->needs = from_end(v->needs);
    }
    return found;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Compares the memory of a run's ranks with a dry run of each, and the memory between steps with the list of parameters
 * and buckets. */

/* Makes each kind of memory the larger of the two. */
static void memory_raise(ar_rank_memory *most, const ar_rank_memory *m)
{
#define RAISE(field, json, title) most->field = m->field > most->field ? m->field : most->field;
    AR_RANK_MEMORY_TABLE(RAISE)
#undef RAISE
}

static void compare_rank(ar_check_run *run, int rank, const ar_rank_memory *counted, const ar_rank_memory *predicted)
{
#define COMPARE(field, json, title)                                                                                    \
    if (!run->memory_difference[0] && counted->field != predicted->field)                                              \
        snprintf(run->memory_difference, sizeof run->memory_difference,                                                \
                 "memory of rank %d, %s: %zu bytes are counted, the layout predicts %zu", rank, title, counted->field, \
                 predicted->field);
    AR_RANK_MEMORY_TABLE(COMPARE)
#undef COMPARE
}

/* Nobody predicts what is no model, batches of several sizes, masks, positions and documents of a batch's own. */
static bool is_predicted(const ari_cluster_options *o)
{
    bool plain = !o->body;
    if (o->module) /* a dry run has the batches themselves */
        return true;
    for (size_t i = 0; plain && i < ari_run_steps(&o->run); i++) {
        const ar_batch *b = &o->batch[i];
        plain = b->batch == o->batch->batch && b->seq == o->batch->seq && !b->padding_mask && !b->additive_mask &&
                !b->position_ids && !b->documents;
    }
    return plain;
}

/* like: whose operands and blocks the ranks have; NULL: the CPU device's. Activations of experts that ranks share out
 * depend on the routes, and so do a GPU's operands, whose parts are copies where an expert's rows begin inside a tile:
 * they are compared where the routes are the baseline's, and elsewhere not predicted. */
static ar_status check_ranks(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o,
                             const ar_rank_memory *counted, const ar_device *like)
{
    const ari_step_case c = {.run = o->run, .config = o->config};
    ari_routed_rank at = {.ref = ref, .c = &c};
    const ari_known_routes routes = {ari_check_read_routes, &at};
    const bool shared = o->run.numerics == AR_NUMERICS_EXACT && ari_expert_sequence(&o->run.parallel) > 1;
    const bool routed =
        !o->module && o->config && o->config->experts.n > 0 && (ari_experts_routed(&o->run.parallel) || shared || like);
    const bool known = routed && o->run.numerics == AR_NUMERICS_EXACT && run->tensors_different == 0;
    ari_cluster_options own = *o;
    own.routes = known ? &routes : NULL;
    for (int r = 0; r < ar_parallel_world(&o->run.parallel); r++) {
        ari_dry_memory dry;
        memory_raise(&run->memory, &counted[r]);
        if (!run->has_memory_predicted)
            continue;
        at.rank = r;
        AR_TRY(ari_cluster_dry(&dry, &own, r, like));
        memory_raise(&run->memory_predicted, &dry.rank);
        if (!routed || known)
            compare_rank(run, r, &counted[r], &dry.rank);
        if (o->module && dry.routed.rows + dry.routed.gradients > 0)
            run->has_memory_predicted = false;
        else if (o->module)
            run->bytes_predicted += dry.bytes;
    }
    if (routed && !known)
        run->has_memory_predicted = false;
    return AR_OK;
}

ar_status ari_check_memory(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o,
                           const ar_rank_memory *counted)
{
    ARI_OWNED_BY(ar_device_destroy) ar_device *like = NULL;
    run->has_memory_predicted = is_predicted(o);
    if (run->has_memory_predicted && o->run.device.kind != AR_DEVICE_CPU)
        AR_TRY(ar_device_create(&like, &o->run.device, 1));
    return check_ranks(run, ref, o, counted, like);
}

/* --- inspect module ----------------------------------------------------------------------------------------------- */

ARI_OWNER(ar_module_inspection, ar_module_inspection_destroy)

static const char *pass_of(const ari_ledger_record *r)
{
    return r->pass == 'b' ? "backward" : "forward";
}

/* --- findings ----------------------------------------------------------------------------------------------------- */

const char *ari_lint_finding_text(char *text, size_t cap, const ar_lint_finding *f)
{
    snprintf(text, cap, "%s, %s (%s): has %s, needs %s, %s: %s", f->module, f->operation, f->pass, f->has, f->needs,
             ari_lint_rule_name(f->rule), f->repair);
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
    if (!lint_noted(&v, op))
        return AR_OK;
    f.rule = v.rule;
    snprintf(f.module, sizeof f.module, "%s", op->name);
    ari_placement_name(f.has, v.has);
    ari_placement_name(f.needs, v.needs);
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
    snprintf(out, AR_LINT_PLACED, "%s", v->known ? ari_placement_name(text, v->at) : "?");
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
        memory_raise(&m->memory, &dry.rank);
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
    AR_TRY(ari_parallel_check_ranks(&run->parallel));
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
