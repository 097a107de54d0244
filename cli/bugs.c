/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/fault.h"
#include "cli/bugs_run.h"
#include "cli/command.h"
#include "cli/options/layout.h"
#include "cli/table.h"
#include "ref/core/size.h"

typedef struct bugs_values {
    ari_common common;
    bool run, curves;
    int numerics, precision;
} bugs_values;

#define ARI_VALUES bugs_values
static const ari_option options[] = {
    ARI_OPTION_FLAG("run", run, "run each in a small case in which it matters, and the same case without it",
                    .more = "The first tensor that differs is told, the rank and the pass, what it looks like, and "
                            "whether it is caught."),
    ARI_OPTION_FLAG("curves", curves,
                    "with --run: what a loss curve of 20 steps and a gradient tolerance of 1e-3 would show of it",
                    .more = "The curve is told by its largest deviation in 10 and in 20 AdamW steps."),
    ARI_OPTION_ENUM("numerics", numerics, ari_numerics_names,
                    "with --run: exact: equal bits or not; native: how far outside of what rounding may do (default "
                    "exact)",
                    .more = "Native also tells how far outside the same case without the fault is: a mistake may be "
                            "smaller than rounding."),
    ARI_OPTION_ENUM("precision", precision, ari_precision_names,
                    "with --numerics native, of products: f32, tf32 or bf16 (default f32)"),
    {0},
};
static ar_status print(void)
{
    static const ari_column columns[] = {{"fault", ARI_LEFT}, {"what goes wrong", ARI_LEFT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, 2));
    for (int i = 1; i < AR_FAULT_COUNT; i++) {
        ari_table_cell(t, "%s", ar_fault_name((ar_fault)i));
        ari_table_cell(t, "%s", ar_fault_text((ar_fault)i));
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf("\n%d faults; anyrank check --inject FAULT switches one on\n", AR_FAULT_COUNT - 1);
    return st;
}

static json_t *json_list(void)
{
    json_t *list = json_array();
    for (int i = 1; i < AR_FAULT_COUNT; i++)
        json_array_append_new(
            list, json_pack("{s:s, s:s}", "name", ar_fault_name((ar_fault)i), "text", ar_fault_text((ar_fault)i)));
    return list;
}

/* The result of either kind. Takes `faults`. */
static ar_status end(json_t *faults, const char *result, const ari_common *common)
{
    json_t *o = ari_json_begin("bugs");
    if (result)
        json_object_set_new(o, "result", json_string(result));
    if (json_object_set_new(o, "faults", faults) != 0) {
        json_decref(o);
        o = NULL;
    }
    return ari_json_end(o, common);
}

static ar_status run(const bugs_values *v, int *exit_code)
{
    ari_bug_run *runs = NULL;
    const bool native = v->numerics == AR_NUMERICS_NATIVE;
    const ari_bugs_options o = {.common = &v->common,
                                .curves = v->curves,
                                .numerics = (ar_numerics)v->numerics,
                                .precision = (ar_precision)v->precision};
    AR_TRY(ari_alloc_zero((void **)&runs, AR_FAULT_COUNT - 1, sizeof *runs, "runs of the faults"));
    ar_status st = ari_bugs_run(runs, &o);
    if (st == AR_OK && ari_wants_text(&v->common))
        st = native ? ari_bugs_print_native(stdout, runs, o.precision) : ari_bugs_print(stdout, runs, v->curves);
    if (st == AR_OK) {
        const bool well = native ? ari_bugs_clean(runs) : ari_bugs_well(runs);
        *exit_code = well ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
        st = end(ari_bugs_json(runs), well ? "same" : "different", &v->common);
    }
    free(runs);
    return st;
}

static ar_status list_or_run(void *values, int *exit_code)
{
    const bugs_values *v = values;
    if (v->curves && !v->run)
        return ar_error_set(AR_ERR_ARG, "--curves tells more of what --run does: give --run too");
    if (!v->run && (v->numerics != AR_NUMERICS_EXACT || v->precision != AR_PRECISION_F32))
        return ar_error_set(AR_ERR_ARG, "--numerics and --precision are about --run: give --run too");
    if (v->curves && v->numerics != AR_NUMERICS_EXACT)
        return ar_error_set(AR_ERR_ARG, "--curves are of exact numerics: leave out --numerics native");
    AR_TRY(ari_precision_check(v->precision, v->numerics));
    if (v->run)
        return run(v, exit_code);
    if (ari_wants_text(&v->common))
        AR_TRY(print());
    return end(json_list(), NULL, &v->common);
}

const ari_args_spec ari_bugs_spec = {
    .command = "bugs",
    .summary = "Lists the mistakes that 'check --inject' can switch on, or shows that each is caught.",
    .example = "anyrank bugs\nanyrank bugs --run\nanyrank bugs --run --numerics native --precision bf16\nanyrank check "
               "--inject column_dx_not_reduced",
    .options = options,
    .common_at = offsetof(bugs_values, common),
    .size = sizeof(bugs_values),
    .run = list_or_run,
};
