/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/bugs/bugs.h"
#include "cli/options/run.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "ref/core/clock.h"
#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "verify/check/check_run.h"

typedef struct bugs_values {
    ari_common common;
    const char *fault; /* NULL: all */
    bool run, curves;
    ar_numerics numerics;
    ar_precision precision;
} bugs_values;

#define ARI_VALUES bugs_values
static const ari_option options[] = {
    ARI_OPTION_FLAG("run", run,
                    "run each fault, or FAULT, in a small case in which it matters, and the same case without it",
                    .details = "The first tensor that differs is told, the rank and the pass, what it looks like, and "
                               "whether it is caught."),
    ARI_OPTION_FLAG("curves", curves,
                    "with --run: what a loss curve of 20 steps and a gradient tolerance of 1e-3 would show of it",
                    .details = "The curve is told by its largest deviation in 10 and in 20 AdamW steps."),
    ARI_OPTION_ENUM("numerics", numerics, ari_numerics_names,
                    "with --run: exact: equal bits or not; native: how far outside of what rounding may do (default "
                    "exact)",
                    .details = "Native also tells how far outside the same case without the fault is: a mistake may be "
                               "smaller than rounding."),
    ARI_OPTION_ENUM("precision", precision, ari_precision_names,
                    "with --run: f32, bf16 (what it hides stays in f32), or with --numerics native tf32 (default f32)"),
    {0},
};
static const ari_positional positionals[] = {
    ARI_POSITIONAL("FAULT", STRING, fault, "a fault: what it does, how it shows and who had it",
                   .choices = ari_fault_names),
    {0},
};
enum { MOST_ERROR = 255, CASE_TEXT = 256, EXPLAINED = 2048 };

/* Made by cmake/Embed.cmake: a name on a line, followed by its indented text. */
extern const unsigned char ari_fault_texts[];

static ar_status print_bugs(void)
{
    static const ari_column columns[] = {{"fault", ARI_LEFT}, {"what goes wrong", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    for (const char *const *fault = ari_fault_names; *fault; fault++)
        ari_table_row(&t, "%s\t%s", *fault, ari_fault_text(*fault));
    const ar_status st = ari_table_end(&t, stdout, 0);
    printf("\n%zu faults; anyrank bugs FAULT explains one, anyrank check --inject FAULT switches it on\n",
           ari_fault_count);
    return st;
}

/* Writes the fault's effect in its case, its symptoms, and the systems that had it, from fault_texts.txt, in one
 * line. */
static const char *explain(char text[EXPLAINED], const char *fault)
{
    const char *cursor = (const char *)ari_fault_texts;
    const size_t n = strlen(fault);
    ari_text line = ari_plain_text_in(text, EXPLAINED);
    while (cursor && (strncmp(cursor, fault, n) != 0 || cursor[n] != '\n')) {
        cursor = strchr(cursor, '\n');
        cursor = cursor ? cursor + 1 : NULL;
    }
    for (cursor = cursor ? cursor + n + 1 : ""; *cursor == ' '; cursor += strcspn(cursor, "\n") + 1) {
        cursor += strspn(cursor, " ");
        ari_say(&line, "%s%.*s", line.used > 0 ? " " : "", (int)strcspn(cursor, "\n"), cursor);
    }
    return text;
}

static void print_one(const char *fault)
{
    char text[CASE_TEXT], explanation[EXPLAINED];
    const ari_fault_case fault_case = ari_fault_case_of(fault);
    printf("%s: %s\n\n", fault, ari_fault_text(fault));
    ari_print_wrapped(stdout, explain(explanation, fault), 0);
    printf("\nanyrank check --inject %s runs its case: %s\n", fault,
           ari_bugs_case_text(text, sizeof text, &fault_case));
}

/* Lists fault `fault`, or all if NULL, as JSON that the caller owns. */
static json_t *json_list(const char *fault)
{
    json_t *list = json_array();
    for (const char *const *f = ari_fault_names; *f; f++) {
        const ari_fault_case fault_case = ari_fault_case_of(*f);
        char text[CASE_TEXT], explanation[EXPLAINED];
        if (!fault || ari_fault_is(fault, *f))
            json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "name", *f, "text", ari_fault_text(*f),
                                                  "explained", explain(explanation, *f), "case",
                                                  ari_bugs_case_text(text, sizeof text, &fault_case)));
    }
    return list;
}

/* The result of either kind. Takes `faults`. */
static ar_status end(json_t *faults, const char *result, const ari_common *common)
{
    json_t *o = ari_json_begin("bugs");
    if (result)
        json_object_set_new(o, "result", json_string(result));
    return ari_json_end(ari_json_merge(o, json_pack("{s:o}", "faults", faults)), common);
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* Case without a fault, shared by all faults with an equal case. */
typedef struct clean_run {
    ari_fault_case fault_case;
    ar_check_result result;
    double ratio;
    ari_fault_trace trace;
} clean_run;

typedef struct session {
    const ari_common *common;
    ari_fault_bases bases;
    bool curves;
    clean_run *clean; /* [n], of which the first `count` are filled */
    size_t count;
} session;

static ar_status clean_of(session *s, const clean_run **result, const ari_fault_case *fault_case)
{
    for (size_t i = 0; i < s->count; i++) {
        if (ari_fault_case_equal(&s->clean[i].fault_case, fault_case)) {
            *result = &s->clean[i];
            return AR_OK;
        }
    }
    ar_check_run u;
    clean_run *c = &s->clean[s->count++];
    *c = (clean_run){.fault_case = *fault_case};
    const ar_status st = ari_fault_case_run(&u, &s->bases, fault_case, NULL);
    c->result = u.result;
    c->ratio = u.max_ratio;
    ari_check_run_fini(&u);
    AR_TRY(st);
    if (s->curves && !fault_case->module)
        AR_TRY(ari_fault_trace_run(&c->trace, fault_case, NULL, s->common->threads, s->common->seed));
    *result = c;
    return AR_OK;
}

static ar_status trace_fault(ari_bug_run *run, const session *s, const clean_run *clean)
{
    ari_fault_trace faulty;
    const ar_status st =
        ari_fault_trace_run(&faulty, &run->fault_case, run->fault, s->common->threads, s->common->seed);
    run->has_curve = st == AR_OK;
    run->curve_ended = faulty.ended && clean->trace.ended;
    if (run->has_curve && run->curve_ended)
        run->curve = ari_fault_curve_of(&clean->trace, &faulty);
    ari_fault_trace_fini(&faulty);
    return st;
}

static ar_status run_fault(ari_bug_run *run, session *s, const char *fault)
{
    const clean_run *clean = NULL;
    run->fault = fault;
    run->fault_case = ari_fault_case_of(fault);
    AR_TRY(clean_of(s, &clean, &run->fault_case));
    run->clean = clean->result;
    run->ratio_clean = clean->ratio;
    const uint64_t start = ari_now_ns();
    AR_TRY(ari_fault_case_run(&run->faulty, &s->bases, &run->fault_case, fault));
    run->seconds = (double)(ari_now_ns() - start) * 1e-9;
    if (run->faulty.error) { /* without the table of ranks, and as much as fits a line */
        const size_t line = strcspn(run->faulty.error, "\n");
        run->faulty.error[line < MOST_ERROR ? line : MOST_ERROR] = '\0';
    }
    return s->curves && !run->fault_case.module ? trace_fault(run, s, clean) : AR_OK;
}

/* run: [n] results for n faults. */
static ar_status run_faults(ari_bug_run *run, const char *const *fault, int n, const bugs_values *v)
{
    const ari_common *common = &v->common;
    session s = {.common = common,
                 .curves = v->curves,
                 .bases = {.threads = common->threads,
                           .seed = common->seed,
                           .explain = true,
                           .numerics = v->numerics,
                           .precision = v->precision}};
    ari_progress line;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&s.clean, (size_t)n, sizeof *s.clean, "clean runs"));
    ari_progress_begin(&line, common);
    for (int i = 0; i < n && st == AR_OK; i++) {
        ari_progress_update(&line, (double)i / n, fault[i]);
        st = run_fault(&run[i], &s, fault[i]);
    }
    ari_progress_end(&line);
    for (size_t i = 0; i < s.count; i++)
        ari_fault_trace_fini(&s.clean[i].trace);
    free(s.clean);
    ari_fault_bases_fini(&s.bases);
    return st;
}

/* True if each clean run of the native numerics is within the allowance: a fault may be smaller than rounding. */
static bool all_clean(const ari_bug_run *run, int n)
{
    for (int i = 0; i < n; i++)
        if (run[i].clean != AR_CHECK_SAME)
            return false;
    return true;
}

/* fault NULL: all faults. */
static ar_status run_bugs(const bugs_values *v, const char *fault, int *exit_code)
{
    const int n = fault ? 1 : (int)ari_fault_count;
    ARI_OWNED ari_bug_run *runs = NULL;
    const bool native = v->numerics == AR_NUMERICS_NATIVE;
    AR_TRY(ari_alloc_zero((void **)&runs, (size_t)n, sizeof *runs, "runs of the faults"));
    ar_status st = run_faults(runs, fault ? &fault : ari_fault_names, n, v);
    if (st == AR_OK && ari_prints_text(&v->common))
        st = native ? ari_bugs_print_native(stdout, runs, n, v->precision) : ari_bugs_print(stdout, runs, n, v->curves);
    if (st == AR_OK) {
        const bool well = native ? all_clean(runs, n) : ari_bugs_well(runs, n);
        *exit_code = well ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
        st = end(ari_bugs_json(runs, n), well ? "same" : "different", &v->common);
    }
    for (int i = 0; i < n; i++)
        ari_check_run_fini(&runs[i].faulty);
    return st;
}

static ar_status list_or_run(void *values, int *exit_code)
{
    const bugs_values *v = values;
    AR_TRY(ari_fault_known(v->fault));
    if (v->curves && !v->run)
        return ar_error_set(AR_ERR_ARG, "--curves tells more of what --run does: give --run too");
    if (!v->run && (v->numerics != AR_NUMERICS_EXACT || v->precision != AR_PRECISION_F32))
        return ar_error_set(AR_ERR_ARG, "--numerics and --precision are about --run: give --run too");
    if (v->curves && v->numerics != AR_NUMERICS_EXACT)
        return ar_error_set(AR_ERR_ARG, "--curves are of exact numerics: leave out --numerics native");
    AR_TRY(ari_precision_check(v->precision, v->numerics));
    if (v->run)
        return run_bugs(v, v->fault, exit_code);
    if (ari_prints_text(&v->common) && v->fault)
        print_one(v->fault);
    else if (ari_prints_text(&v->common))
        AR_TRY(print_bugs());
    return v->common.json ? end(json_list(v->fault), NULL, &v->common) : AR_OK;
}

const ari_args_spec ari_bugs_spec = {
    .command = "bugs",
    .summary = "Lists the faults that 'check --inject' can switch on, explains one, or shows that each is caught.",
    .example =
        "anyrank bugs\nanyrank bugs sp_norm_grad_local\nanyrank bugs --run\nanyrank bugs --run --numerics native "
        "--precision bf16\nanyrank check "
        "--inject column_dx_not_reduced",
    .options = options,
    .positionals = positionals,
    .size = sizeof(bugs_values),
    .run = list_or_run,
};
