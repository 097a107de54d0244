/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/bugs_run.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/options/layout.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "ref/io/json.h"
#include "verify/check/check_run.h"

enum { FAULTS = AR_FAULT_COUNT - 1 };

enum { CURVE_COLUMNS = 4 };

/* A gradient comparison with a relative tolerance of one thousandth, as many test suites have it, passes below. */
static const double TOLERANCE = 1e-3;

/* --- running ------------------------------------------------------------------------------------------------------ */

/* A case without a fault, shared by all faults whose case is alike. */
typedef struct clean_run {
    ari_fault_case at;
    ar_check_result result;
    double ratio;
    ari_fault_trace trace;
} clean_run;

typedef struct session {
    const ari_common *common;
    ari_fault_bases bases;
    bool curves;
    clean_run *clean; /* [FAULTS], of which the first `count` hold something */
    size_t count;
} session;

static ar_status clean_of(session *s, const clean_run **gives, const ari_fault_case *at)
{
    for (size_t i = 0; i < s->count; i++) {
        if (ari_fault_case_alike(&s->clean[i].at, at)) {
            *gives = &s->clean[i];
            return AR_OK;
        }
    }
    ar_check_run u;
    clean_run *c = &s->clean[s->count++];
    *c = (clean_run){.at = *at};
    const ar_status st = ari_fault_case_run(&u, &s->bases, at, AR_FAULT_NONE);
    c->result = u.result;
    c->ratio = u.max_ratio;
    ari_check_run_fini(&u);
    AR_TRY(st);
    if (s->curves && !at->module)
        AR_TRY(ari_fault_trace_run(&c->trace, at, AR_FAULT_NONE, s->common->threads, s->common->seed));
    *gives = c;
    return AR_OK;
}

static ar_status trace_fault(ari_bug_run *run, const session *s, const clean_run *clean)
{
    ari_fault_trace faulty;
    const ar_status st = ari_fault_trace_run(&faulty, &run->at, run->fault, s->common->threads, s->common->seed);
    run->has_curve = st == AR_OK;
    run->curve_ended = faulty.ended && clean->trace.ended;
    if (run->has_curve && run->curve_ended)
        run->curve = ari_fault_curve_of(&clean->trace, &faulty);
    ari_fault_trace_fini(&faulty);
    return st;
}

static ar_status run_fault(ari_bug_run *run, session *s, ar_fault fault)
{
    const clean_run *clean = NULL;
    ar_check_run u;
    *run = (ari_bug_run){.fault = fault, .at = ari_fault_case_of(fault)};
    AR_TRY(clean_of(s, &clean, &run->at));
    run->clean = clean->result;
    run->ratio_clean = clean->ratio;
    const uint64_t start = ari_now_ns();
    const ar_status st = ari_fault_case_run(&u, &s->bases, &run->at, fault);
    run->seconds = (double)(ari_now_ns() - start) * 1e-9;
    run->caught = u.result >= AR_CHECK_DIFFERENT;
    run->ratio = u.max_ratio;
    snprintf(run->ratio_tensor, sizeof run->ratio_tensor, "%s", u.ratio_tensor);
    run->bytes_counted = u.bytes_counted;
    run->bytes_predicted = u.bytes_predicted;
    if (u.has_difference)
        run->first = u.first;
    if (u.error)
        snprintf(run->error, sizeof run->error, "%.*s", (int)strcspn(u.error, "\n"), u.error);
    ari_check_run_fini(&u);
    AR_TRY(st);
    return s->curves && !run->at.module ? trace_fault(run, s, clean) : AR_OK;
}

ar_status ari_bugs_run(ari_bug_run *run, const ari_bugs_options *o)
{
    const ari_common *common = o->common;
    session s = {
        .common = common,
        .curves = o->curves,
        .bases = {
            .threads = common->threads, .seed = common->seed, .numerics = o->numerics, .precision = o->precision}};
    ari_progress line;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&s.clean, FAULTS, sizeof *s.clean, "clean runs"));
    ari_progress_begin(&line, common->quiet);
    for (int i = 0; i < FAULTS && st == AR_OK; i++) {
        ari_progress_update(&line, (double)i / FAULTS, ar_fault_name((ar_fault)(i + 1)));
        st = run_fault(&run[i], &s, (ar_fault)(i + 1));
    }
    ari_progress_end(&line);
    for (size_t i = 0; i < s.count; i++)
        ari_fault_trace_fini(&s.clean[i].trace);
    free(s.clean);
    ari_fault_bases_fini(&s.bases);
    return st;
}

static bool well(const ari_bug_run *run)
{
    return run->caught && run->clean == AR_CHECK_SAME;
}

bool ari_bugs_well(const ari_bug_run *run)
{
    for (int i = 0; i < FAULTS; i++) {
        if (!well(&run[i]))
            return false;
    }
    return true;
}

/* --- for people --------------------------------------------------------------------------------------------------- */

const char *ari_bug_case_text(char *text, size_t size, const ari_fault_case *c)
{
    char layout[ARI_LAYOUT_TEXT];
    const int n = snprintf(text, size, "%s %s", c->run.model, ari_layout_text(layout, &c->run.parallel, c->run.batch));
    size_t at = n > 0 && (size_t)n < size ? (size_t)n : size - 1;
    if (c->order != AR_MLP_COLUMN_ROW)
        at += (size_t)snprintf(text + at, size - at, " row-column");
    if (c->run.dropout > 0.0 && at < size)
        snprintf(text + at, size - at, " dropout %g", c->run.dropout);
    return text;
}
#define CASE_TEXT(c) ari_bug_case_text((char[256]){0}, 256, (c))

/* The first clause of a hint, or as much as fits. */
static const char *short_hint(char *text, size_t size, const char *hint)
{
    const size_t clause = strcspn(hint, ":;(");
    const size_t length = strlen(hint);
    size_t n = clause < length ? clause : length;
    while (n > 0 && hint[n - 1] == ' ')
        n--;
    const bool cut = n > size - 3;
    snprintf(text, size, "%.*s%s", (int)(cut ? size - 3 : n), hint, cut ? ".." : "");
    return text;
}
#define SHORT_HINT(hint) short_hint((char[80]){0}, 80, (hint))

static const char *verdict_of(const ari_bug_run *r)
{
    if (r->clean != AR_CHECK_SAME)
        return "DIFFERS WITHOUT IT";
    return r->caught ? "caught" : "NOT CAUGHT";
}

static const char *what_differs(const ari_bug_run *r)
{
    if (r->error[0])
        return "the run ended in an error";
    if (r->first.tensor[0])
        return r->first.tensor;
    return r->caught ? "only the bytes" : "";
}

static void percent_cell(ari_table *t, const ari_bug_run *r, double value)
{
    if (!r->curve_ended)
        ari_table_cell(t, "error");
    else if (isinf(value))
        ari_table_cell(t, "no number");
    else
        ari_table_cell(t, value < 0.1 ? "%.2g %%" : "%.0f %%", 100.0 * value);
}

static void curve_cells(ari_table *t, const ari_bug_run *r)
{
    for (int i = 0; i < CURVE_COLUMNS && !r->has_curve; i++)
        ari_table_cell(t, "-");
    if (!r->has_curve)
        return;
    percent_cell(t, r, r->curve.first_losses);
    percent_cell(t, r, r->curve.loss);
    percent_cell(t, r, r->curve.gradient);
    ari_table_cell(t, "%s", !r->curve_ended ? "error" : r->curve.gradient <= TOLERANCE ? "passes" : "fails");
}

/* Whether a fault that is caught cannot be seen in the losses of the first steps. */
static bool is_unseen(const ari_bug_run *r)
{
    return well(r) && r->has_curve && r->curve_ended && r->curve.first_losses < ARI_CURVE_UNSEEN;
}

static void print_curves(FILE *to, const ari_bug_run *run)
{
    size_t unseen = 0;
    for (int i = 0; i < FAULTS; i++)
        unseen += is_unseen(&run[i]);
    fprintf(to,
            "\n10 losses, 20 losses: the largest deviation of the loss in so many AdamW steps from those without the\n"
            "fault; gradients: the largest difference of a gradient at the first step, of its tensor's largest\n"
            "element; 1e-3 test: whether a comparison of gradients with that tolerance would pass.\n"
            "%zu faults that are caught at once leave each of the first %d losses within %g %% of the right one.\n",
            unseen, (int)ARI_CURVE_FIRST_STEPS, 100.0 * ARI_CURVE_UNSEEN);
}

ar_status ari_bugs_print(FILE *to, const ari_bug_run *run, bool curves)
{
    static const ari_column columns[] = {
        {"fault", ARI_LEFT},      {"model and layout", ARI_LEFT}, {"first tensor", ARI_LEFT}, {"rank", ARI_RIGHT},
        {"pass", ARI_LEFT},       {"looks like", ARI_LEFT},       {"verdict", ARI_LEFT},      {"time", ARI_RIGHT},
        {"10 losses", ARI_RIGHT}, {"20 losses", ARI_RIGHT},       {"gradients", ARI_RIGHT},   {"1e-3 test", ARI_LEFT}};
    ari_table *t = NULL;
    size_t caught = 0;
    AR_TRY(ari_table_create(&t, columns, sizeof columns / sizeof *columns - (curves ? 0 : CURVE_COLUMNS)));
    for (int i = 0; i < FAULTS; i++) {
        const ari_bug_run *r = &run[i];
        caught += well(r);
        ari_table_cell(t, "%s", ar_fault_name(r->fault));
        ari_table_cell(t, "%s", CASE_TEXT(&r->at));
        ari_table_cell(t, "%s", what_differs(r));
        if (r->first.tensor[0] && r->first.rank >= 0)
            ari_table_cell(t, "%d", r->first.rank);
        else
            ari_table_cell(t, "-");
        ari_table_cell(t, "%s", r->first.pass);
        ari_table_cell(t, "%s", SHORT_HINT(r->error[0] ? r->error : r->first.hint));
        ari_table_cell(t, "%s", verdict_of(r));
        ari_table_cell(t, "%s", ARI_SECONDS(r->seconds));
        if (curves)
            curve_cells(t, r);
    }
    const ar_status st = ari_table_print(t, to, 0);
    ari_table_destroy(t);
    if (curves)
        print_curves(to, run);
    fprintf(to, "\nbugs: %zu of %d faults are caught, and each of these layouts has the same bits without them\n",
            caught, FAULTS);
    return st;
}

/* --- for machines ------------------------------------------------------------------------------------------------- */

static json_t *json_first(const ari_bug_run *r)
{
    const ar_first_difference *f = &r->first;
    if (!f->tensor[0])
        return json_null();
    return json_pack("{s:i, s:s, s:s, s:i, s:i, s:s, s:s}", "step", f->step, "pass", f->pass, "tensor", f->tensor,
                     "layer", f->layer, "rank", f->rank, "pattern", f->pattern, "hint", f->hint);
}

static json_t *json_curve(const ari_bug_run *r)
{
    if (!r->has_curve || !r->curve_ended)
        return json_null();
    return json_pack("{s:i, s:o, s:o, s:b, s:o, s:s, s:b}", "steps", (int)ARI_CURVE_STEPS, "loss_deviation",
                     ari_json_number(r->curve.loss), "first_ten", ari_json_number(r->curve.first_losses), "unseen",
                     is_unseen(r), "gradient_deviation", ari_json_number(r->curve.gradient), "gradient_tensor",
                     r->curve.gradient_tensor, "tolerance_passes", r->curve.gradient <= TOLERANCE);
}

/* Of a module bytes are counted alone. */
static json_t *json_predicted(const ari_bug_run *r)
{
    return r->at.module ? json_null() : json_integer((json_int_t)r->bytes_predicted);
}

static json_t *json_bug(const ari_bug_run *r)
{
    const ar_parallel *p = &r->at.run.parallel;
    json_t *layout = json_pack("{s:i, s:i, s:i, s:b, s:i, s:i, s:b, s:s}", "world", ar_parallel_world(p), "tp",
                               ari_at_least_one(p->tp), "dp", ari_at_least_one(p->dp), "sp", p->sp, "zero", p->zero,
                               "micro_batches", ari_at_least_one(p->micro_batches), "forward_first", p->forward_first,
                               "mlp_order", ari_mlp_order_names[r->at.order]);
    return json_pack(
        "{s:s, s:s, s:s, s:b, s:o, s:I, s:I, s:i, s:f, s:b, s:b, s:o, s:o, s:o, s:o, s:{s:I, s:o}, s:f, s:o}", "name",
        ar_fault_name(r->fault), "text", ar_fault_text(r->fault), "model", r->at.run.model, "module", r->at.module,
        "layout", layout, "batch", (json_int_t)r->at.run.batch, "seq", (json_int_t)r->at.run.seq, "steps",
        (int)r->at.run.steps, "dropout", r->at.run.dropout, "caught", r->caught, "clean", r->clean == AR_CHECK_SAME,
        "ratio", ari_json_number(r->ratio), "ratio_clean", ari_json_number(r->ratio_clean), "first_difference",
        json_first(r), "error", r->error[0] ? ari_json_text(r->error) : json_null(), "bytes", "counted",
        (json_int_t)r->bytes_counted, "predicted", json_predicted(r), "seconds", r->seconds, "curve", json_curve(r));
}

json_t *ari_bugs_json(const ari_bug_run *run)
{
    json_t *list = json_array();
    for (int i = 0; i < FAULTS; i++)
        json_array_append_new(list, json_bug(&run[i]));
    if (json_array_size(list) == FAULTS)
        return list;
    json_decref(list);
    return NULL;
}
