/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank check: options in, rows out. What is compared and how is the library's (verify/). */
#include "anyrank/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/check_report.h"
#include "cli/command.h"
#include "cli/layout.h"
#include "cli/main.h"
#include "cli/progress.h"
#include "cli/table.h"
#include "verify/check_run.h"

enum { MOST_LAYOUTS = 4096, MOST_MODELS = 2 };

typedef struct check_values {
    ari_common common;
    const char *model, *text, *inject;
    ari_layout_values layout;
    int sweep, steps;
    size_t batch, seq;
    bool skip_f64;
} check_values;

static const ari_option options[] = {
    ARI_LAYOUT_OPTIONS(check_values,
                       "tensor-parallel ranks (default: those of 2, 3, 4, 6, 8, 12 that the model allows)"),
    {.name = "sweep",
     .kind = ARI_OPT_INT,
     .at = offsetof(check_values, sweep),
     .min = 1,
     .max = 4096,
     .value = "W",
     .help = "every legal number of ranks up to W"},
    {.name = "batch",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(check_values, batch),
     .min = 1,
     .max = 1e9,
     .value = "B",
     .help = "sequences (default 8)"},
    {.name = "seq",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(check_values, seq),
     .min = 1,
     .max = 1e9,
     .value = "S",
     .help = "tokens of each (default 64, or fewer if the model holds fewer)"},
    {.name = "text",
     .kind = ARI_OPT_STRING,
     .at = offsetof(check_values, text),
     .value = "FILE",
     .help = "any file, one byte one token (default: the project's own text)"},
    {.name = "steps",
     .kind = ARI_OPT_INT,
     .at = offsetof(check_values, steps),
     .min = 1,
     .max = 1e9,
     .value = "K",
     .help = "training steps (this version: 1, forward and backward)"},
    {.name = "inject",
     .kind = ARI_OPT_STRING,
     .at = offsetof(check_values, inject),
     .value = "BUG",
     .help = "switch a known mistake on ('anyrank bugs' lists them)"},
    {.name = "skip-f64",
     .kind = ARI_OPT_FLAG,
     .at = offsetof(check_values, skip_f64),
     .help = "do not run the binary64 baseline, which only measures the exact one's error"},
    {.name = "optimizer", .kind = ARI_OPT_LATER},
    {.name = "lr", .kind = ARI_OPT_LATER},
    {.name = "clip", .kind = ARI_OPT_LATER},
    {.name = "dropout", .kind = ARI_OPT_LATER},
    {.name = "gradcheck", .kind = ARI_OPT_LATER},
    {.name = "list-tensors", .kind = ARI_OPT_LATER},
    {0},
};

static const ari_positional positionals[] = {
    {.name = "MODEL",
     .at = offsetof(check_values, model),
     .help = "a folder with a Hugging Face config.json (and weights), or llama-demo, gpt2-demo, stack-demo; "
             "default: llama-demo and gpt2-demo"},
    {0},
};

static const ari_args_spec spec = {
    .command = "check",
    .summary =
        "Runs forward, loss and backward on N simulated ranks and compares every tensor with one rank's, bit for "
        "bit.",
    .example = "anyrank check\nanyrank check gpt2-demo --tp 3\nanyrank check llama-demo --tp 2 --inject "
               "column_dx_not_reduced",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(check_values, common),
};

/* Where each fault matters: the model and layout taken when --inject comes without them. */
typedef struct fault_case {
    ar_fault fault;
    const char *model;
    int tp;
    ar_mlp_order order;
} fault_case;

static const fault_case fault_cases[] = {
    {AR_FAULT_row_bias_every_rank, "gpt2-demo", 2, AR_MLP_COLUMN_ROW},
    {AR_FAULT_row_input_grad_not_gathered, "gpt2-demo", 2, AR_MLP_ROW_COLUMN},
    {AR_FAULT_bias_grad_wrong_axis, "gpt2-demo", 2, AR_MLP_COLUMN_ROW},
    {AR_FAULT_norm_backward_missing, "gpt2-demo", 2, AR_MLP_COLUMN_ROW},
    {AR_FAULT_NONE, "llama-demo", 2, AR_MLP_COLUMN_ROW}, /* every other one */
};

static const fault_case *case_of(ar_fault fault)
{
    const fault_case *c = fault_cases;
    while (c->fault != AR_FAULT_NONE && c->fault != fault)
        c++;
    return c;
}

static ar_status refuse(const check_values *v)
{
    if (v->steps > 1)
        return ar_error_set(AR_ERR_UNSUPPORTED, "--steps %d: more than one step is not in this version", v->steps);
    if (v->layout.tp > 0 && v->sweep > 0)
        return ar_error_set(AR_ERR_ARG, "--tp %d is one layout, --sweep %d is all up to it: give one of them",
                            v->layout.tp, v->sweep);
    return ari_layout_check(&v->layout);
}

/* A model's config, plan and layouts: --tp, --sweep, or the default set. */
static ar_status layouts_of(const check_values *v, const char *model, ar_config *c, ar_plan *plan, ar_parallel *p,
                            size_t *n)
{
    char folder[512];
    AR_TRY(ar_model_path(folder, sizeof folder, model));
    AR_TRY(ar_config_load(c, folder));
    AR_TRY(ari_layout_plan(&v->layout, c->arch, plan));
    AR_TRY(ari_estimate_layers(c));
    *n = 0;
    if (v->layout.tp > 0) {
        p[(*n)++] = (ar_parallel){.tp = v->layout.tp};
        return AR_OK;
    }
    if (v->sweep == 0) {
        *n = ar_check_default_layouts(c, plan, v->batch, v->seq, p, MOST_LAYOUTS);
        return AR_OK;
    }
    *n = ar_check_sweep(c, plan, v->batch, v->seq, v->sweep, p, MOST_LAYOUTS);
    *n = *n < MOST_LAYOUTS ? *n : MOST_LAYOUTS;
    return AR_OK;
}

/* Before long work: what it will take. */
static ar_status announce(const check_values *v, const ar_check_options *o, const ar_config *c)
{
    ari_estimate e;
    AR_TRY(ari_check_estimate(&e, o, c));
    if (e.seconds > 30.0 && e.bytes <= e.available && !v->common.quiet)
        fprintf(stderr, "%s: this will take about %s and %s of memory\n", c->name, ARI_SECONDS(e.seconds),
                ARI_BYTES(e.bytes));
    return AR_OK;
}

typedef struct progress_user {
    ari_progress line;
    const char *model;
} progress_user;

static void show_progress(void *user, double fraction, const char *what)
{
    progress_user *p = user;
    char text[128];
    snprintf(text, sizeof text, "%s: %s", p->model, what);
    ari_progress_update(&p->line, fraction, text);
}

static ar_status check_model(ar_check_report **gives, const check_values *v, const char *model, ar_fault fault)
{
    ar_parallel parallel[MOST_LAYOUTS];
    size_t layouts = 0;
    ar_config c;
    ar_plan plan;
    AR_TRY(layouts_of(v, model, &c, &plan, parallel, &layouts));
    const size_t longest = c.max_positions;
    progress_user p = {.model = model};
    ari_progress_begin(&p.line, v->common.quiet);
    const ar_check_options o = {
        .model = model,
        .parallel = parallel,
        .layouts = layouts,
        .batch = v->batch ? v->batch : 8,
        .seq = v->seq         ? v->seq
               : longest < 64 ? longest
                              : 64,
        .text = v->text,
        .seed = v->common.seed,
        .fault = fault,
        .plan = plan,
        .algorithm = ari_layout_algorithm(&v->layout),
        .threads = v->common.threads,
        .timeout_ns = ari_layout_timeout_ns(&v->layout),
        .skip_f64 = v->skip_f64,
        .progress = show_progress,
        .progress_user = &p,
    };
    AR_TRY(announce(v, &o, &c));
    const ar_status st = ar_check(gives, &o);
    ari_progress_end(&p.line);
    return st;
}

static int exit_code_of(ar_check_report *const *reports, size_t n)
{
    ar_check_result worst = AR_CHECK_SAME;
    for (size_t i = 0; i < n; i++)
        worst = reports[i]->result > worst ? reports[i]->result : worst;
    return worst == AR_CHECK_SAME ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
}

static ar_status run(const check_values *given, int *exit_code)
{
    check_values v = *given;
    ar_fault fault = AR_FAULT_NONE;
    const char *models[MOST_MODELS] = {v.model ? v.model : "llama-demo", "gpt2-demo"};
    size_t n_models = v.model ? 1 : MOST_MODELS;
    AR_TRY(refuse(&v));
    if (v.inject) {
        AR_TRY(ar_fault_parse(&fault, v.inject));
        if (!v.model && v.layout.tp == 0 && v.sweep == 0) {
            const fault_case *c = case_of(fault);
            models[0] = c->model;
            n_models = 1;
            v.layout.tp = c->tp;
            if (c->order != AR_MLP_COLUMN_ROW) /* else the one given stands */
                v.layout.mlp_order = (int)c->order;
        }
    }
    ar_check_report *reports[MOST_MODELS] = {NULL};
    size_t n = 0;
    ar_status st = AR_OK;
    for (; n < n_models && st == AR_OK; n += st == AR_OK) {
        st = check_model(&reports[n], &v, models[n], fault);
        if (st == AR_OK && ari_wants_text(&v.common))
            st = ari_check_print(stdout, reports[n]);
    }
    if (st == AR_OK && ari_wants_text(&v.common))
        ari_check_print_verdict(stdout, reports, n, fault);
    if (st == AR_OK)
        st = ari_json_end(ari_check_json(reports, n), &v.common);
    if (st == AR_OK)
        *exit_code = exit_code_of(reports, n);
    for (size_t i = 0; i < n_models; i++)
        ar_check_report_destroy(reports[i]);
    return st;
}

int ari_command_check(int argc, char **argv)
{
    check_values v = {.steps = 1, .layout = ARI_LAYOUT_DEFAULTS};
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&spec, argc, argv, &v, &exit_code))
        return exit_code;
    const ar_status st = run(&v, &exit_code);
    if (st != AR_OK) {
        ari_print_error("check", st);
        return ari_exit_code(st);
    }
    return exit_code;
}
