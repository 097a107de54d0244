/* SPDX-License-Identifier: Apache-2.0 */
/* Output of `anyrank bugs --run`: each fault in exact numerics, its size next to rounding in native ones, and both as
 * JSON. */
#include "cli/bugs/bugs.h"

#include <math.h>
#include <string.h>

#include "cli/options/run.h"
#include "cli/shared/command.h"
#include "cli/shared/table.h"
#include "ref/core/device_private.h"
#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/io/json.h"

enum { CURVE_COLUMNS = 4 };

/* A gradient comparison with a relative tolerance of one thousandth, as many test suites have it, passes below. */
static const double TOLERANCE = 1e-3;

static bool caught(const ari_bug_run *r)
{
    return r->faulty.result == AR_CHECK_MISPREDICTED || r->faulty.result >= AR_CHECK_DIFFERENT;
}

static bool well(const ari_bug_run *r)
{
    return caught(r) && r->clean == AR_CHECK_SAME;
}

bool ari_bugs_well(const ari_bug_run *run, int n)
{
    for (int i = 0; i < n; i++) {
        if (!well(&run[i]))
            return false;
    }
    return true;
}

/* --- for people --------------------------------------------------------------------------------------------------- */

const char *ari_bugs_case_text(char *text, size_t size, const ari_fault_case *c)
{
    char layout[ARI_LAYOUT_TEXT];
    const int n = snprintf(text, size, "%s %s", c->run.model, ari_layout_text(layout, &c->run.parallel, c->run.batch));
    size_t at = n > 0 && (size_t)n < size ? (size_t)n : size - 1;
    if (c->order != AR_MLP_COLUMN_ROW)
        at += (size_t)snprintf(text + at, size - at, " row-column");
    if (c->documents > 1 && at < size)
        at += (size_t)snprintf(text + at, size - at, " documents %zu", c->documents);
    if (c->run.dropout > 0.0 && at < size)
        snprintf(text + at, size - at, " dropout %g", c->run.dropout);
    return text;
}
#define CASE_TEXT(c) ari_bugs_case_text((char[256]){0}, 256, (c))

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

static const char *hint_of(const ari_bug_run *r)
{
    const ar_check_run *u = &r->faulty;
    return u->error ? u->error : u->has_difference ? u->first.hint : u->call_cause ? u->call_cause : "";
}

static const char *verdict_of(const ari_bug_run *r)
{
    if (r->clean != AR_CHECK_SAME)
        return "DIFFERS WITHOUT IT";
    return caught(r) ? "caught" : "NOT CAUGHT";
}

static const char *what_differs(const ari_bug_run *r)
{
    if (r->faulty.error)
        return "the run ended in an error";
    if (r->faulty.has_difference)
        return r->faulty.first.tensor;
    return caught(r) ? "only the bytes" : "";
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
    if (!r->has_curve) {
        ari_table_row(t, "-\t-\t-\t-");
        return;
    }
    percent_cell(t, r, r->curve.first_losses);
    percent_cell(t, r, r->curve.loss);
    percent_cell(t, r, r->curve.gradient);
    ari_table_cell(t, "%s", !r->curve_ended ? "error" : r->curve.gradient <= TOLERANCE ? "passes" : "fails");
}

/* True if a fault that is caught cannot be seen in the losses of the first steps. */
static bool is_unseen(const ari_bug_run *r)
{
    return well(r) && r->has_curve && r->curve_ended && r->curve.first_losses < ARI_CURVE_UNSEEN;
}

static void print_curves(FILE *to, const ari_bug_run *run, int n)
{
    size_t unseen = 0;
    for (int i = 0; i < n; i++)
        unseen += is_unseen(&run[i]);
    fprintf(to,
            "\n10 losses, 20 losses: the largest deviation of the loss in so many AdamW steps from those without the\n"
            "fault; gradients: the largest difference of a gradient at the first step, of its tensor's largest\n"
            "element; 1e-3 test: whether a comparison of gradients with that tolerance would pass.\n"
            "%zu faults that are caught at once leave each of the first %d losses within %g %% of the right one.\n",
            unseen, (int)ARI_CURVE_FIRST_STEPS, 100.0 * ARI_CURVE_UNSEEN);
}

ar_status ari_bugs_print(FILE *to, const ari_bug_run *run, int n, bool curves)
{
    static const ari_column columns[] = {
        {"fault", ARI_LEFT},      {"model and layout", ARI_LEFT}, {"first tensor", ARI_LEFT}, {"rank", ARI_RIGHT},
        {"pass", ARI_LEFT},       {"looks like", ARI_LEFT},       {"verdict", ARI_LEFT},      {"time", ARI_RIGHT},
        {"10 losses", ARI_RIGHT}, {"20 losses", ARI_RIGHT},       {"gradients", ARI_RIGHT},   {"1e-3 test", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    size_t caught = 0;
    t.n -= curves ? 0 : CURVE_COLUMNS;
    for (int i = 0; i < n; i++) {
        const ari_bug_run *r = &run[i];
        caught += well(r);
        const ar_first_difference *f = &r->faulty.first;
        const bool ranked = r->faulty.has_difference && f->rank >= 0;
        ari_table_row(&t, "%s\t%s\t%s", r->fault, CASE_TEXT(&r->fault_case), what_differs(r));
        ari_table_cell(&t, ranked ? "%d" : "-", f->rank);
        ari_table_row(&t, "%s\t%s\t%s\t%s", f->pass, SHORT_HINT(hint_of(r)), verdict_of(r), ARI_SECONDS(r->seconds));
        if (curves)
            curve_cells(&t, r);
    }
    const ar_status st = ari_table_end(&t, to, 0);
    if (curves)
        print_curves(to, run, n);
    fprintf(to, "\nbugs: %zu of %d faults are caught, and each of these layouts has the same bits without them\n",
            caught, n);
    return st;
}

/* --- for people: native numerics -------------------------------------------------------------------------------- */

/* Trace of a fault in a native run. */
typedef enum trace { OUTSIDE, BYTES, ERROR, BELOW, EXACT, TRACES } trace;
static const char *const trace_names[TRACES] = {"outside", "only the bytes", "ends in an error", "below rounding",
                                                "exact alone"};

static trace trace_of(const ari_bug_run *r, ar_precision precision)
{
    if (ari_fault_case_is_exact(&r->fault_case, precision))
        return EXACT;
    if (r->faulty.error)
        return ERROR;
    if (r->faulty.has_difference)
        return OUTSIDE;
    return caught(r) ? BYTES : BELOW;
}

static void ratio_cell(ari_table *t, double ratio)
{
    ari_table_cell(t, isinf(ratio) ? "no number" : ratio < 1e4 ? "%.3g" : "%.0e", ratio);
}

static void add_rows(ari_table *t, const ari_bug_run *run, int n, ar_precision precision, size_t count[TRACES])
{
    for (int i = 0; i < n; i++) {
        const ari_bug_run *r = &run[i];
        const trace left = trace_of(r, precision);
        count[left]++;
        ari_table_row(t, "%s\t%s", r->fault, CASE_TEXT(&r->fault_case));
        ratio_cell(t, r->ratio_clean);
        ratio_cell(t, r->faulty.max_ratio);
        ari_table_row(t, "%s\t%s", left == OUTSIDE ? r->faulty.first.tensor : "",
                      r->clean != AR_CHECK_SAME ? "OUTSIDE WITHOUT IT" : trace_names[left]);
    }
}

ar_status ari_bugs_print_native(FILE *to, const ari_bug_run *run, int n, ar_precision precision)
{
    static const ari_column columns[] = {{"fault", ARI_LEFT},    {"model and layout", ARI_LEFT}, {"without", ARI_RIGHT},
                                         {"with it", ARI_RIGHT}, {"first outside", ARI_LEFT},    {"shows", ARI_LEFT}};
    size_t count[TRACES] = {0};
    double worst = 0.0;
    ari_table t = ARI_TABLE(columns);
    add_rows(&t, run, n, precision, count);
    const ar_status st = ari_table_end(&t, to, 0);
    for (int i = 0; i < n; i++)
        worst = ari_fault_case_is_exact(&run[i].fault_case, precision) ? worst : fmax(worst, run[i].ratio_clean);
    fprintf(
        to,
        "\nwithout, with it: the worst difference of a tensor, of what rounding of products in %s may make. Weights\n"
        "after Adam count where they are outside.\n"
        "\nbugs: of %d faults %zu leave the allowance, %zu end the run in an error, %zu show in the bytes alone, %zu "
        "are\nsmaller than rounding, %zu run in exact numerics alone; without a fault the worst is %.3g of what is "
        "allowed\n",
        ari_precision_name(precision), n, count[OUTSIDE], count[ERROR], count[BYTES], count[BELOW], count[EXACT],
        worst);
    return st;
}

/* --- for machines ------------------------------------------------------------------------------------------------- */

static json_t *json_first(const ari_bug_run *r)
{
    const ar_first_difference *f = &r->faulty.first;
    if (!r->faulty.has_difference)
        return json_null();
    return json_pack("{s:i, s:s, s:s, s:i, s:i, s:s, s:s, s:o, s:s}", "step", f->step, "pass", f->pass, "tensor",
                     f->tensor, "layer", f->layer, "rank", f->rank, "pattern", f->pattern, "hint", f->hint, "cause",
                     f->cause[0] ? json_string(f->cause) : json_null(), "look_at", f->look);
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

/* For a module only the bytes are counted. */
static json_t *json_predicted(const ari_bug_run *r)
{
    return r->fault_case.module ? json_null() : json_integer((json_int_t)r->faulty.bytes_predicted);
}

static json_t *json_bug(const ari_bug_run *r)
{
    json_t *layout = ari_layout_json(&r->fault_case.run.parallel, 0, ari_layout_of_fault);
    json_object_set_new(layout, "mlp_order", json_string(ari_mlp_order_names[r->fault_case.order]));
    return json_pack(
        "{s:s, s:s, s:s, s:s, s:b, s:o, s:I, s:I, s:I, s:i, s:f, s:b, s:b, s:o, s:o, s:o, s:o, s:{s:I, s:o}, s:s?, "
        "s:o, s:f, s:o}",
        "name", r->fault, "text", ari_fault_text(r->fault), "case", CASE_TEXT(&r->fault_case), "model",
        r->fault_case.run.model, "module", r->fault_case.module, "layout", layout, "batch",
        (json_int_t)r->fault_case.run.batch, "seq", (json_int_t)r->fault_case.run.seq, "documents",
        (json_int_t)(r->fault_case.documents > 0 ? r->fault_case.documents : 1), "steps", (int)r->fault_case.run.steps,
        "dropout", r->fault_case.run.dropout, "caught", caught(r), "clean", r->clean == AR_CHECK_SAME, "ratio",
        ari_json_number(r->faulty.max_ratio), "ratio_clean", ari_json_number(r->ratio_clean), "first_difference",
        json_first(r), "error", ari_json_text_or_null(r->faulty.error), "bytes", "counted",
        (json_int_t)r->faulty.bytes_counted, "predicted", json_predicted(r), "call_cause", r->faulty.call_cause,
        "call_difference", ari_json_text_or_null(r->faulty.call_difference), "seconds", r->seconds, "curve",
        json_curve(r));
}

json_t *ari_bugs_json(const ari_bug_run *run, int n)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_bug(&run[i]));
    if (json_array_size(list) == (size_t)n)
        return list;
    json_decref(list);
    return NULL;
}
