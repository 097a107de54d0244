/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/lint.h"
#include "anyrank/config.h"
#include "cli/options/args.h"
#include "cli/plan/plan.h"
#include "ref/core/fault_private.h"
#include "ref/core/text.h"
#include "verify/lint/lint_private.h"

ARI_OWNER(ar_lint_report, ari_lint_report_destroy)

typedef struct lint_values {
    ari_common common;
    ari_run_values r;
} lint_values;

#define ARI_VALUES lint_values
static const ari_option options[] = {
    ARI_PLANNED_OPTIONS(1, ARI_ZERO_HELP),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_INJECT_OPTION,
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_CONFIG, false);

static void print_lint(FILE *out, const ar_lint_report *r, const ari_step_case *c)
{
    const ar_run *run = &c->run;
    ari_plan_print(out, &run->plan);
    fprintf(out, "lint: %s, %s: ", c->config->name, ARI_LAYOUT(&run->parallel, run->batch));
    if (r->count == 0)
        fprintf(out,
                "nothing to find in %zu operations, %zu values\nlooked at, along each axis of the mesh: whether each "
                "value is held as its use needs, sums over ranks are made once and gradients reach every copy\n",
                r->operations, r->values);
    else
        fprintf(out, "%zu finding%s in %zu operations, %zu values\n", r->count, ARI_PLURAL(r->count), r->operations,
                r->values);
    for (size_t i = 0; i < r->count; i++) {
        const ar_lint_finding *f = &r->finding[i];
        const bool named = f->module[0] != '\0';
        fprintf(out, "\n%s: %s%s%s, %s\n", ari_lint_rule_name(f->rule), f->module, named ? ", " : "", f->operation,
                f->pass);
        fprintf(out, "  rule    %s\n", ari_lint_rule_text(f->rule));
        if (f->axis[0] != '\0')
            fprintf(out, "  axis    %s\n", f->axis);
        fprintf(out, "  has     %s\n  needs   %s\n  repair  %s\n", f->has, f->needs, f->repair);
    }
}

static json_t *finding_json(const ar_lint_finding *f)
{
    json_t *layers =
        f->layers == 0 ? json_null()
                       : json_pack("[I, I]", (json_int_t)f->first_layer, (json_int_t)(f->first_layer + f->layers - 1));
    return json_pack("{s:s, s:s, s:o, s:s, s:s, s:o, s:o, s:s, s:s, s:s}", "rule", ari_lint_rule_name(f->rule), "text",
                     ari_lint_rule_text(f->rule), "module", ari_json_text_or_null(f->module), "operation", f->operation,
                     "pass", f->pass, "layers", layers, "axis", ari_json_text_or_null(f->axis), "has", f->has, "needs",
                     f->needs, "repair", f->repair);
}

static json_t *as_json(const ar_lint_report *r, const ari_step_case *c)
{
    json_t *o = ari_planned_json("lint", c), *findings = json_array();
    for (size_t i = 0; i < r->count; i++)
        json_array_append_new(findings, finding_json(&r->finding[i]));
    const char *fault = c->run.fault ? c->run.fault : "";
    json_object_set_new(o, "fault", ari_json_text_or_null(fault));
    json_object_set_new(o, "result", json_string(r->count > 0 ? "findings" : "clean"));
    json_object_set_new(o, "operations", json_integer((json_int_t)r->operations));
    json_object_set_new(o, "values", json_integer((json_int_t)r->values));
    return ari_json_merge(o, json_pack("{s:o}", "findings", findings));
}

static ar_status run_lint(void *values, int *exit_code)
{
    lint_values *v = values;
    ar_config config;
    ARI_ENDED(ari_planned_end) ari_step_case c = {.run.plan = {0}};
    ARI_OWNED_BY(ari_lint_report_destroy) ar_lint_report *r = NULL;
    if (!v->r.run.model)
        return ar_error_set(AR_ERR_ARG, "MODEL is missing: a folder with a config.json, or a bundled name such as "
                                        "llama-demo");
    AR_TRY(ari_planned_case(&c, &config, &v->r, &v->common));
    c.run.fault = v->r.inject;
    AR_TRY(ari_fault_known(c.run.fault));
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &config));
    AR_TRY(ari_lint(&r, &c.run, &config));
    *exit_code = r->count > 0 ? ARI_EXIT_DIFFERENT : ARI_EXIT_SAME;
    if (ari_prints_text(&v->common))
        print_lint(stdout, r, &c);
    return v->common.json ? ari_json_end(as_json(r, &c), &v->common) : AR_OK;
}

static const lint_values defaults = {.r = ARI_RUN_NOT_GIVEN()};

const ari_args_spec ari_lint_spec = {
    .command = "lint",
    .summary = "Checks a layout without running numbers: types every value of a training step along each axis of the "
               "mesh, and finds missing, double and misplaced communication.",
    .example = "anyrank lint llama-demo --tp 4 --sp\n"
               "anyrank lint config.json --dp 2048 --tp 8 --sp --zero 1 --batch 4096",
    .options = options,
    .positionals = positionals,
    .size = sizeof(lint_values),
    .defaults = &defaults,
    .run = run_lint,
};
