/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/grads.h"

#include <ftw.h>
#include <stdio.h>
#include <string.h>

#include "cli/options/args.h"
#include "cli/options/run.h"
#include "cli/options/transport.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "cli/verify/report.h"
#include "gpu/device_private.h"
#include "ref/core/device_private.h"
#include "ref/core/fault_private.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/compare/report.h"
#include "verify/grads/grads.h"
#include "verify/reference/sensitivity_private.h"

typedef struct grads_values {
    ari_common common;
    ar_grads_options o; /* all options except the run */
    ari_run_values r;
    ari_watch_values watch;
    int sensitivity_of;  /* -1: not given */
    const char *against; /* device to compare with; NULL: not given */
} grads_values;

#define ARI_VALUES grads_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("data"),
    ARI_OPTION_FILE("input", o.input, "FILE.safetensors",
                    "input_ids [b, s]; optional attention_mask ([b, s] of 0/1, or additive [b|1, heads|1, s, s]), "
                    "labels",
                    .details =
                        "labels are [b, s]. position_ids [b or 1, s] may be there too, and cu_seqlens, where packed "
                        "documents begin and the last one ends: [n + 1] of all b*s tokens, or [b, n + 1] of each "
                        "row. Attention then stays inside a document, positions restart in it unless "
                        "position_ids are given, and its last token predicts nothing. Without cu_seqlens and "
                        "attention_mask, position_ids that restart or jump keep documents apart, as in "
                        "transformers. Any other tensor is refused."),
    ARI_OPTION_FOLDER("block", o.block, "DIR", "a single block in place of a model: case.json and inputs.safetensors"),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FOLDER("out", o.out, "DIR", "where outputs.safetensors and grads.safetensors (or block.safetensors) go",
                      .details = "The outputs are logits, loss and hidden states. Each file is complete or not there."),
    ARI_OPTION_FILE("logprobs", o.logprobs, "FILE.safetensors",
                    "in place of --out: the exact log-probability of each token, or label, by forward passes alone",
                    .details =
                        "Each sequence, which is a row or a document without its padding, is computed at its own "
                        "length, so that its numbers have the same bits in every batch, padded or packed, and "
                        "every layout. The file has [b, s] of F64: logprobs, entropies and largest (of the row of "
                        "logits), fp32 numbers in natural logarithms, and lse, which is taken from a logit; NaN "
                        "where nothing is predicted, as of a sequence's first token. sequences [b, s] numbers "
                        "them, -1 is padding. With --sensitivity, rounding [3, b, s] is what rounding errors "
                        "drawn at random change in logprobs.",
                    .written = true),
    ARI_OPTION_FLAG("logits", o.logits,
                    "with --logprobs, write the logits of each label too: [labels, V], in the order of the labels"),
    ARI_OPTION_FLAG("binary64", o.binary64,
                    "with --logprobs, in binary64 throughout, by plain loops on one rank: slow, and within 1e-6 of any "
                    "other program's binary64",
                    .details =
                        "The numbers are the same for every batch and packing; there is no layout. logits are F64."),
    ARI_OPTION_GROUP(ari_plan_options, r),
    ARI_LAYOUT_OPTIONS("tensor-parallel ranks (default 1)",
                       "exact: the same bits in every layout; native: fp32 (default exact)"),
    ARI_PRECISION_OPTION,
    ARI_OPTION_STRING(
        "against", against, "DEVICE",
        "compute the same on DEVICE too, such as cpu, and compare: exit status 0 if they are the same, 1 if not",
        .choices = ari_device_kind_names,
        .details = "DEVICE has another name than --device. Both runs have the same weights, input and layout. In exact "
                   "numerics their bits are compared. In native numerics they may differ by what rounding explains, as "
                   "--sensitivity derives it. With --activations every tensor of the two passes is compared, and the "
                   "first that differs is named. --inject and --trace are about the run on --device. In --out DIR each "
                   "run has a folder of its device's name, such as DIR/cpu. Without --out the files are temporary, and "
                   "are kept only if the runs differ."),
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_LAYOUT_DDP_OPTIONS("capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default: 25MiB)"),
    ARI_OPTION_GROUP(ari_loss_options, r),
    ARI_INJECT_OPTION,
    ARI_OPTION_GROUP(ari_watch_options, watch),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FLAG("per-rank", o.per_rank,
                    "write what each rank holds to DIR/ranks too: weights, gradients and outputs, with their places",
                    .details = "The folder has a file of each rank, with --activations of every tensor; 'anyrank "
                               "verify' and PyTorch's distributed checkpoint read it. It replaces the ranks of an "
                               "earlier run, and no folder that holds anything else."),
    ARI_OPTION_FLAG("activations", o.activations,
                    "write every tensor of the two passes to activations.safetensors too, and to the ranks' files",
                    .details = "That includes the weights and the gradients, under the names that 'anyrank check "
                               "--list-tensors' prints, in the same bytes for every layout in exact numerics."),
    ARI_OPTION_FLAG("stacked", o.stacked,
                    "gradients of experts as transformers 5 has them in memory: one tensor of all of a layer's",
                    .details =
                        "These are mlp.experts.gate_up_proj and down_proj, and of Mixtral and MiniMax the router under "
                        "mlp too. By default names are those of checkpoints, a tensor of each expert."),
    ARI_OPTION_FLAG(
        "sensitivity", o.sensitivity, "write allowed.safetensors too: what rounding alone may change in each tensor",
        .details = "For every tensor it has one number, the largest difference that rounding alone may make "
                   "in it, for anyrank-verify(1). That takes some runs of the baseline on one rank, in "
                   "which errors are drawn at random."),
    ARI_OPTION_ENUM("sensitivity-of", sensitivity_of, ari_sensitivity_names,
                    "with --sensitivity, in which arithmetic: f32, tf32, bf16 (mixed precision), bf16-pure (all of it "
                    "stored in bf16), f16, f16-pure (default: that of --precision)",
                    .details = "It is that of the run that is to be verified. bf16 and f16 are mixed precision, as "
                               "autocast: what enters and leaves products, and what lies between two of them, has 16 "
                               "bits; parameters, the residual stream and norms are fp32."),
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_FOLDER, false);

static ar_status check_values(const grads_values *v)
{
    AR_TRY(ari_layout_check(&v->r));
    if (!v->r.run.model && !v->o.block)
        return ar_error_set(AR_ERR_ARG, "give a MODEL, or --block DIR");
    if (v->r.run.model && v->o.block)
        return ar_error_set(AR_ERR_ARG, "give a MODEL or --block, not both");
    if (v->r.run.model && !v->o.input)
        return ar_error_set(AR_ERR_ARG, "--input FILE.safetensors is missing: it holds the model's input_ids");
    if (v->o.block && v->o.input)
        return ar_error_set(AR_ERR_ARG, "--input goes with a MODEL; a block reads DIR/inputs.safetensors");
    if (v->o.block && v->r.run.shrink + v->r.run.mtp > 0)
        return ar_error_set(AR_ERR_ARG, "--scale and --mtp go with a MODEL; a block has the sizes of DIR/case.json");
    if (v->sensitivity_of >= 0 && !v->o.sensitivity)
        return ar_error_set(AR_ERR_ARG, "--sensitivity-of %s says of which arithmetic: give --sensitivity too",
                            ari_sensitivity_names[v->sensitivity_of]);
    if (v->o.out && v->o.logprobs)
        return ar_error_set(AR_ERR_ARG, "give --out DIR or --logprobs FILE, not both");
    if ((v->o.logits || v->o.binary64) && !v->o.logprobs)
        return ar_error_set(AR_ERR_ARG, "--%s goes with --logprobs FILE", v->o.logits ? "logits" : "binary64");
    if (!v->o.out && !v->o.logprobs && !v->against)
        return ar_error_set(AR_ERR_ARG, "--out DIR is missing: it says where the results go");
    return AR_OK;
}

/* --- the same on another device ----------------------------------------------------------------------------------- */

enum { OTHER, REFERENCE, RUNS }; /* the run on --device, and the run on the device of --against */

typedef struct comparison {
    const char *name[RUNS]; /* names of the devices */
    ar_device_choice device[RUNS];
    char folder[500];     /* folder of the dumps */
    char dump[RUNS][600]; /* "FOLDER/cuda" */
    bool temporary;       /* the folder is not named by the user */
    ar_grads_result reference;
    ar_verify_report *report; /* NULL: not compared */
    ari_verify_cause cause;
    bool differ;      /* or cannot be judged */
    bool keeps_files; /* keep the temporary files: the results differ, and the message names the folder */
} comparison;

static int remove_entry(const char *path, const struct stat *status, int kind, struct FTW *place)
{
    (void)status, (void)kind, (void)place;
    return remove(path);
}

static void comparison_fini(comparison *c)
{
    ari_verify_cause_fini(&c->cause);
    ar_verify_report_destroy(c->report);
    if (c->temporary && !c->keeps_files)
        (void)nftw(c->folder, remove_entry, 8, FTW_DEPTH | FTW_PHYS); /* files that no one else knows of */
}

static ar_status check_against(comparison *c, const grads_values *v)
{
    ar_device *device = NULL;
    c->name[OTHER] = v->r.device ? v->r.device : "cpu";
    c->name[REFERENCE] = v->against;
    for (int i = 0; i < RUNS; i++)
        AR_TRY(ari_device_choice_parse(&c->device[i], c->name[i]));
    if (c->device[OTHER].kind == c->device[REFERENCE].kind && c->device[OTHER].index == c->device[REFERENCE].index)
        return ar_error_set(AR_ERR_ARG,
                            "--against %s is the device of the run itself, so there is nothing to compare: give "
                            "another --device, such as cuda or emulated",
                            v->against);
    if (v->o.logprobs)
        return ar_error_set(AR_ERR_ARG, "--against compares outputs and gradients, and --logprobs has neither: leave "
                                        "one of the two out");
    if (v->o.per_rank && !v->o.out)
        return ar_error_set(AR_ERR_ARG, "--per-rank writes to DIR/%s/ranks: give --out DIR too", c->name[OTHER]);
    if (v->o.stacked && v->r.run.numerics == AR_NUMERICS_NATIVE)
        return ar_error_set(AR_ERR_ARG, "--against allows each tensor of native numerics a difference, which is not "
                                        "known of --stacked ones: leave --stacked out");
    AR_TRY(ar_device_create(&device, &c->device[REFERENCE], 1)); /* a missing device is refused before any work */
    ar_device_destroy(device);
    return AR_OK;
}

/* Files of an earlier run would be compared, too. */
static void remove_earlier(const char *dump)
{
    static const char *const names[] = {"outputs", "grads", "block", "activations", "allowed"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[700];
        snprintf(path, sizeof path, "%s/%s.safetensors", dump, names[i]);
        (void)remove(path); /* usually there is none */
    }
}

static ar_status comparison_begin(comparison *c, const grads_values *v)
{
    AR_TRY(check_against(c, v));
    if (v->o.out && strlen(v->o.out) >= sizeof c->folder)
        return ar_error_set(AR_ERR_ARG, "%s: the path is too long", ARI_SHOW(v->o.out));
    if (v->o.out)
        snprintf(c->folder, sizeof c->folder, "%s", v->o.out);
    else
        AR_TRY(ari_folder_make_temporary(c->folder, sizeof c->folder, "anyrank-grads"));
    c->temporary = !v->o.out;
    for (int i = 0; i < RUNS; i++) {
        AR_TRY(ari_folder_path(c->dump[i], sizeof c->dump[i], c->folder, c->name[i]));
        remove_earlier(c->dump[i]);
    }
    return AR_OK;
}

/* Compares, after the run of `base_options` on --device. */
static ar_status compare(comparison *c, const ar_grads_options *base_options, const ari_common *common)
{
    const bool native = base_options->run.numerics == AR_NUMERICS_NATIVE;
    ar_grads_options o = *base_options;
    o.out = c->dump[REFERENCE];
    o.per_rank = false;
    o.sensitivity = native;
    o.run.device = c->device[REFERENCE];
    o.run.fault = NULL;
    o.run.sim.trace = NULL;
    o.run.sim.cluster = NULL;
    AR_TRY(ar_grads(&c->reference, &o));
    const ar_verify_options verify_options = {.reference = c->dump[REFERENCE],
                                              .other = c->dump[OTHER],
                                              .rule = native ? AR_VERIFY_SENSITIVITY : AR_VERIFY_BITS,
                                              .allowed = native ? c->reference.file[ARI_ALLOWED_FILE] : NULL,
                                              .threads = base_options->run.threads,
                                              .progress = base_options->progress,
                                              .progress_user = base_options->progress_user};
    AR_TRY(ar_verify(&c->report, &verify_options));
    c->report->exact_numerics = !native; /* files of outputs and gradients do not record the numerics */
    c->differ = !c->report->same || c->report->unjudged > 0;
    c->keeps_files = c->differ && (!common->quiet || common->json);
    json_auto_t *report = ari_verify_report_json(c->report);
    return c->report->same ? AR_OK : ari_verify_ask(&c->cause, c->report, &verify_options, report, NULL, true);
}

static ar_status print_comparison(const comparison *c, const grads_values *v)
{
    enum { MOST_ROWS = 20 };
    char label[96];
    snprintf(label, sizeof label, "grads: %s against %s", c->name[OTHER], c->name[REFERENCE]);
    if (c->differ && !v->o.activations)
        printf("note: --activations compares every tensor of the two passes, and names the first that differs\n");
    if (c->differ)
        printf("note: 'anyrank verify %s %s%s%s' compares these files again\n", ARI_SHOW(c->dump[REFERENCE]),
               ARI_SHOW(c->dump[OTHER]), c->reference.file[ARI_ALLOWED_FILE][0] ? " --sensitivity " : "",
               ARI_SHOW(c->reference.file[ARI_ALLOWED_FILE]));
    return ari_verify_print(stdout, c->report, &c->cause, MOST_ROWS, NULL, label);
}

static json_t *comparison_json(const comparison *c)
{
    json_t *report = ari_verify_report_json(c->report);
    ari_verify_cause_json(report, c->report, &c->cause);
    return ari_json_merge(json_pack("{s:s}", "device", c->name[REFERENCE]), report);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

static json_t *notes_json(const ar_grads_result *r)
{
    json_t *notes = ari_config_notes(NULL, &r->config);
    for (size_t i = 0; notes && i < sizeof r->note / sizeof *r->note; i++) {
        if (r->note[i][0])
            json_array_append_new(notes, json_string(r->note[i]));
    }
    return notes;
}

static json_t *as_json(const ar_grads_result *r, const grads_values *v, const ar_run *run, const ari_watch *watch,
                       const comparison *c)
{
    json_t *files = json_array(), *o = ari_json_begin("grads");
    for (size_t i = 0; i < sizeof r->file / sizeof *r->file; i++) {
        if (r->file[i][0])
            json_array_append_new(files, ari_json_text(r->file[i]));
    }
    json_object_set_new(o, "result", json_string(c->differ ? "different" : "same"));
    json_object_set_new(o, "numerics", json_string(v->o.binary64 ? "binary64" : ari_numerics_names[run->numerics]));
    json_object_set_new(o, "precision", json_string(v->o.binary64 ? "f64" : ari_precision_name(run->precision)));
    ari_device_json(o, &run->device);
    json_object_set_new(o, "layout", ari_layout_json(&run->parallel, r->batch, ari_layout_of_run));
    json_object_set_new(o, "plan", ari_plan_json(&run->plan));
    if (v->r.inject)
        json_object_set_new(o, "fault", json_string(v->r.inject));
    json_object_set_new(o, "outputs_hash", json_string(r->outputs_hash));
    json_object_set_new(o, "tensors", json_integer((json_int_t)r->tensors));
    if (v->o.activations)
        json_object_set_new(o, "activations", json_integer((json_int_t)r->activations));
    json_object_set_new(o, "bytes", json_pack("{s:I}", "counted", (json_int_t)r->bytes));
    json_object_set_new(o, "seconds", ari_json_number(r->seconds));
    if (v->r.run.model)
        json_object_set_new(o, "weights", json_string(r->fresh ? "fresh" : "folder"));
    if (v->r.run.model)
        json_object_set_new(o, "notes", notes_json(r));
    if (v->r.run.model)
        json_object_set_new(o, "loss", json_pack("[o]", ari_json_number((double)r->loss)));
    if (v->r.run.model)
        ari_loss_json(o, &run->loss);
    ari_watch_json(o, watch);
    if (r->has_predicted)
        json_object_set_new(o, "predicted", ari_predicted_json(&r->predicted));
    if (c->report)
        json_object_set_new(o, "against", comparison_json(c));
    return ari_json_merge(o, json_pack("{s:o}", "files", files));
}

static ar_status print_result(const ar_grads_result *r, const grads_values *v, const ar_run *run,
                              const ari_watch *watch, const comparison *c)
{
    if (watch->timed) {
        AR_TRY(ari_predicted_print(stdout, watch, &run->parallel, r->batch, &r->predicted));
        printf("\n");
    }
    ari_watch_print(stdout, watch);
    for (size_t i = 0; i < sizeof r->file / sizeof *r->file; i++) {
        if (r->file[i][0])
            printf("%s\n", r->file[i]);
    }
    if (v->r.run.model) {
        printf("loss %.9g (%s", (double)r->loss, r->fresh ? "fresh weights" : "weights of the folder");
        ari_loss_print(stdout, &run->loss);
        printf(")\n");
    }
    ari_plan_print(stdout, &run->plan);
    ari_ranks_print(stdout, run, ar_parallel_world(&run->parallel));
    printf("%zu tensor%s in %s at %s; hash %s\n", r->tensors, ARI_PLURAL(r->tensors), ARI_SECONDS(r->seconds),
           ARI_LAYOUT(&run->parallel, r->batch), r->outputs_hash);
    return c->report ? print_comparison(c, v) : AR_OK;
}

static ar_status run_watched(const grads_values *v, ar_run *run, const ari_watch *watch, comparison *c)
{
    ar_grads_result r;
    ar_grads_options o = v->o;
    AR_TRY(ari_layout_load(&v->r, run));
    o.run = *run;
    o.run.seed = v->common.seed;
    o.sensitivity_of =
        v->sensitivity_of >= 0 ? (ar_sensitivity)v->sensitivity_of : ari_sensitivity_of_precision(v->r.run.precision);
    ari_watch_run(&o.run, watch);
    o.run.fault = v->r.inject;
    AR_TRY(ari_fault_known(o.run.fault));
    if (v->against) {
        AR_TRY(comparison_begin(c, v));
        o.out = c->dump[OTHER];
    }
    ari_progress progress;
    ari_progress_begin(&progress, &v->common);
    o.progress = ari_progress_show;
    o.progress_user = &progress;
    ar_status st = ar_grads(&r, &o);
    if (st == AR_OK && v->against)
        st = compare(c, &o, &v->common);
    ari_progress_end(&progress);
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &r.config));
    for (size_t i = 0; i < sizeof r.note / sizeof *r.note && !v->common.quiet; i++) {
        if (r.note[i][0])
            fprintf(stderr, "note: %s\n", r.note[i]);
    }
    AR_TRY(st);
    AR_TRY(ari_watch_write(watch, v->r.run.model ? v->r.run.model : v->o.block, &o.run.parallel, r.batch));
    if (c->temporary && !c->keeps_files)
        memset(r.file, 0, sizeof r.file); /* files removed together with the folder */
    if (ari_prints_text(&v->common))
        AR_TRY(print_result(&r, v, &o.run, watch, c));
    return ari_json_end(as_json(&r, v, &o.run, watch, c), &v->common);
}

static ar_status run_grads(void *values, int *exit_code)
{
    const grads_values *v = values;
    ARI_ENDED(ari_watch_fini) ari_watch watch = {0};
    ARI_ENDED(comparison_fini) comparison c = {.temporary = false};
    AR_TRY(check_values(v));
    ARI_ENDED(ari_layout_unload) ar_run run = ari_run_of(&v->r, &v->common);
    AR_TRY(ari_watch_begin(&watch, &v->watch));
    AR_TRY(run_watched(v, &run, &watch, &c));
    *exit_code = c.differ ? ARI_EXIT_DIFFERENT : ARI_EXIT_SAME;
    return AR_OK;
}

static const grads_values defaults = {.r = {.timeout = 60.0, .run.ddp.bucket_bytes = ARI_NOT_GIVEN},
                                      .sensitivity_of = -1};

const ari_args_spec ari_grads_spec = {
    .command = "grads",
    .summary = "Runs one forward and backward on given inputs and writes outputs and gradients.",
    .example = "anyrank grads MODEL --input batch.safetensors --out results --tp 2\n"
               "anyrank grads MODEL --input batch.safetensors --out results --dp 2 --tp 2 --per-rank --activations\n"
               "anyrank grads MODEL --input batch.safetensors --out results --sensitivity --sensitivity-of bf16-pure\n"
               "anyrank grads MODEL --input batch.safetensors --device cuda --against cpu\n"
               "anyrank grads MODEL --input batch.safetensors --logprobs logprobs.safetensors --tp 2\n"
               "anyrank grads --block DIR --out results --tp 4",
    .options = options,
    .positionals = positionals,
    .size = sizeof(grads_values),
    .defaults = &defaults,
    .run = run_grads,
};
