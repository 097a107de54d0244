/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <math.h>

#include "anyrank/run.h"
#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "ref/core/fault_private.h"
#include "ref/core/names.h"

/* Options of a run that subcommands share: how a step is split and what runs it (layout.c), its data and optimizer
 * (step.c), how it is watched (watch.c). The macros are rows of an option table. ARI_VALUES is the subcommand's struct,
 * whose fields have the names in the macros. */

/* Run as the options describe it, including values that a run represents differently. A value that is not given is 0
 * for a size, SIZE_MAX for bucket_bytes and warmup_steps, NaN for a double, NULL for a text, and -1 for the optimizer's
 * enumerations. */
typedef struct ari_run_values {
    ar_run run;
    const char *plan;        /* file */
    const char *schedule_pp; /* name or file */
    int collectives;         /* 0: direct, 1: ring */
    double timeout;          /* seconds */
    const char *device, *inject, *betas;
    ari_strings groups;
    bool muon; /* for plan, which has no other optimizer */
} ari_run_values;

#define ARI_NOT_GIVEN SIZE_MAX
/* Values for options that are not given; then any other fields. */
#define ARI_RUN_NOT_GIVEN(...)                                                                                       \
    {                                                                                                                \
        .timeout = 60.0, .run.ddp.bucket_bytes = ARI_NOT_GIVEN, .run.clip = (double)NAN, .run.dropout = (double)NAN, \
        .run.optimizer = {.kind = (ar_optimizer_kind)-1,                                                             \
                          .schedule = (ar_schedule)-1,                                                               \
                          .decay = (ar_decay)-1,                                                                     \
                          .lr = (double)NAN,                                                                         \
                          .momentum = (double)NAN,                                                                   \
                          .weight_decay = (double)NAN,                                                               \
                          .min_lr = (double)NAN,                                                                     \
                          .warmup_steps = ARI_NOT_GIVEN},                                                            \
        __VA_ARGS__                                                                                                  \
    }

extern const char *const ari_mlp_order_names[];

/* Options of an ari_run_values: the model's size and each module's split; data movement; the device; how a training
 * step is split besides tp; what ZeRO shards; how data-parallel ranks reduce gradients; the optimizer; the loss. */
extern const ari_option ari_plan_options[], ari_movement_options[], ari_device_options[], ari_step_layout_options[],
    ari_pipeline_options[], ari_zero_options[], ari_bucket_options[], ari_optimizer_options[], ari_loss_options[];

/* Rows whose help text the subcommand supplies; ARI_VALUES must have an ari_run_values named `r`. */
#define ARI_LAYOUT_OPTIONS(tp_help, numerics_help)                                                                 \
    ARI_OPTION_SECTION("layout"),                                                                                  \
        ARI_OPTION_INT("tp", r.run.parallel.tp, 1, 4096, "N", tp_help,                                             \
                       .details =                                                                                  \
                           "More than the model's KV heads are possible: then several ranks hold copies of one."), \
        ARI_OPTION_GROUP(ari_movement_options, r), ARI_OPTION_SECTION("numerics"),                                 \
        ARI_OPTION_ENUM("numerics", r.run.numerics, ari_numerics_names, numerics_help),                            \
        ARI_OPTION_GROUP(ari_device_options, r)
#define ARI_LAYOUT_DDP_OPTIONS(bytes_help)                                                  \
    ARI_OPTION_GROUP(ari_zero_options, r), ARI_OPTION_SECTION("buckets"),                   \
        ARI_OPTION_BYTES("bucket-bytes", r.run.ddp.bucket_bytes, 0, 0, "BYTES", bytes_help, \
                         .details = "The bits do not depend on it in exact numerics."),     \
        ARI_OPTION_GROUP(ari_bucket_options, r)
#define ARI_MUON_SHARDS_OPTION(field)                                                                       \
    ARI_OPTION_FLAG(                                                                                        \
        "muon-shards", field,                                                                               \
        "of muon: leave matrices cut that --tp cuts along their longer side, and sum X X^T over the ranks", \
        .details = "Less work and memory for each rank, mostly more bytes; with exact numerics the same bits.")
#define ARI_PRECISION_OPTION                                                                                        \
    ARI_OPTION_ENUM("precision", r.run.precision, ari_precision_names,                                              \
                    "f32; bf16: of activations and matrices, in memory and between ranks; tf32: of products, with " \
                    "--numerics native (default f32)",                                                              \
                    .details =                                                                                      \
                        "With tf32 what enters a product is rounded to 11 bits. With bf16 activations, matrices "   \
                        "and the gradients of both take 2 bytes an element; sums, vectors, statistics, the loss "   \
                        "and the optimizer's weights are fp32.")

/** True if any option splits a step over ranks or in time, which --sweep chooses by itself. */
bool ari_split_given(const ari_run_values *v);
/** Returns true if any option asks for a particular layout: for a split, or for recomputation. */
bool ari_layout_given(const ari_run_values *v);
/** Refuses a dropout or label smoothing of 1, options that have no effect without another one (AR_ERR_ARG), and what
 *  the device refuses. */
AR_NODISCARD ar_status ari_layout_check(const ari_run_values *v);
/** Refuses tf32 of exact numerics (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_precision_check(ar_precision precision, ar_numerics numerics);
/** Returns the run that the options describe, with process and threads, and buckets of AR_BUCKET_BYTES unless given.
 *  Call it after ari_layout_check. */
ar_run ari_run_of(const ari_run_values *v, const ari_common *common);
/** Parses a run's options again on top of `base`: an option that is not given keeps the base's value. An optimizer of a
 *  different kind starts with its own defaults. `v` is part of `values`. Errors: AR_ERR_ARG (options that contradict
 *  others, a malformed list or group, ari_optimizer_check). */
AR_NODISCARD ar_status ari_run_reparse(ari_run_values *v, const ar_run *base, const ari_args_spec *spec, void *values);
/** The device's name, and a GPU's own and number, into a result. */
void ari_device_json(json_t *o, const ar_device_choice *c);
/** Loads the files of --plan and --schedule-pp into a run that ari_run_of filled, and turns on sequence parallelism if
 *  the plan asks for it. The run owns both files' contents; call ari_layout_unload in every case. Errors: AR_ERR_ARG
 *  (with --mlp-order), those of ar_plan_load and ari_pipeline_schedule_read. */
AR_NODISCARD ar_status ari_layout_load(const ari_run_values *v, ar_run *run);
void ari_layout_unload(ar_run *run);
/* The parts of ari_layout_check, ari_run_of and ari_layout_load for pipelines. */
AR_NODISCARD ar_status ari_pipeline_check(const ari_run_values *v);
void ari_pipeline_complete(ar_parallel *p, const ari_run_values *v);
AR_NODISCARD ar_status ari_pipeline_load(ar_parallel *p, const ari_run_values *v);
/** Prints a line such as "plan p.json: 4 rules, sha256 0123456789ab", or the order of the MLPs. Prints nothing for the
 *  default plan. */
void ari_plan_print(FILE *out, const ar_plan *p);
/** Returns what a report needs to repeat a run with its plan: `file`, the given `rules` and their `sha256`, null for a
 *  default plan; `mlp_order`, null for a file's plan. A new reference; NULL if memory is short. */
json_t *ari_plan_json(const ar_plan *p);

enum { ARI_LAYOUT_TEXT = 128 };
/** Writes ari_parallel_text to text[0, ARI_LAYOUT_TEXT), followed by the samples of each data-parallel rank if they are
 *  not equal: "dp=3 (3+3+2)". Returns text. */
const char *ari_layout_text(char *text, const ar_parallel *p, size_t batch);
/* The same as an expression, whose storage lives to the end of the enclosing block. */
#define ARI_LAYOUT(p, batch) ari_layout_text((char[ARI_LAYOUT_TEXT]){0}, (p), (batch))
/** Returns the number of layers of each stage, an empty array if they are even. A new reference; NULL if memory is
 *  short. */
json_t *ari_stages_json(const ar_stages *s);
/* Members of a layout in the order in which results contain them: for a run, for plan's layouts, for a row of these,
 * and for a fault's case. */
extern const char ari_layout_of_run[], ari_layout_of_plan[], ari_layout_of_row[], ari_layout_of_fault[];
/** Returns the named members of a layout as an object, a new reference; NULL if memory is short. */
json_t *ari_layout_json(const ar_parallel *p, size_t batch, const char *members);

/* --- the training step -------------------------------------------------------------------------------------------- */

/* The single positional of most subcommands, for an ARI_VALUES whose ari_run_values is `r`. */
#define ARI_MODEL_POSITIONAL(help, must)          \
    static const ari_positional positionals[] = { \
        ARI_POSITIONAL("MODEL", FOLDER, r.run.model, help, .required = (must), .choices = ari_model_names), {0}}
#define ARI_MODEL_FOLDER "a folder with a Hugging Face config.json (and weights), or a bundled name"
#define ARI_MODEL_CONFIG "a folder with a Hugging Face config.json, that file, or a bundled name; no weights are read"

#define ARI_BATCH_OPTIONS(usual, seq_help)                                              \
    ARI_OPTION_SECTION("data"),                                                         \
        ARI_OPTION_SIZE("batch", r.run.batch, 1, 1e9, "B",                              \
                        "sequences of a step, all ranks together (default " usual ")"), \
        ARI_OPTION_SIZE("seq", r.run.seq, 1, 1e9, "S", seq_help)
#define ARI_CLIP_OPTIONS                                                                                       \
    ARI_OPTION_SECTION("training"),                                                                            \
        ARI_OPTION_DOUBLE("clip", r.run.clip, 0, 1e30, "X",                                                    \
                          "largest norm of all gradients together; 0: no clipping (default 1)"),               \
        ARI_OPTION_DOUBLE(                                                                                     \
            "dropout", r.run.dropout, 0, 1, "P", "probability, below 1 (default 0, whatever the config says)", \
            .details = "It is on the embedding's output (GPT-2), attention probabilities, and the outputs of " \
                       "attention and MLP. The dropout of a configuration is not used; a note says so.")
#define ARI_INJECT_OPTION                                                                                     \
    ARI_OPTION_SECTION("checks"),                                                                             \
        ARI_OPTION_STRING("inject", r.inject, "BUG", "switch a known mistake on ('anyrank bugs' lists them)", \
                          .choices = ari_fault_names)

/** Prints a line such as "AdamW (lr 0.001, cosine to 0.0001 after 5 steps of warm-up, weight decay 0.01 of matrices, 1
 *  group), clip 1, dropout 0.1". For 0 steps it describes a single forward and backward pass. */
void ari_step_print(FILE *out, const ar_run *run);
/** ", products in tf32", ", activations and matrices in bf16", ", matrices in bf16", or nothing. */
void ari_storage_print(FILE *out, ar_precision precision, ar_dtype storage);
/** ", label smoothing 0.1, z-loss 0.0001", as far as there is any. */
void ari_loss_print(FILE *out, const ar_loss_options *o);
/** Adds the same to a result. */
void ari_loss_json(json_t *result, const ar_loss_options *o);
/** Prints a note if the config has a dropout that the run does not use. */
void ari_dropout_note(FILE *out, const ar_config *c, const ar_run *run);
/** Returns the optimizer's options as an object, a new reference; NULL if memory is short. */
json_t *ari_optimizer_json(const ar_optimizer_options *o);

/* --- watching ----------------------------------------------------------------------------------------------------- */

/* Recording of a run in a file, and timing as on another cluster. The same for every subcommand that simulates a
 * run. */
typedef struct ari_watch_values {
    const char *trace, *cluster; /* NULL: not given */
} ari_watch_values;

extern const ari_option ari_watch_options[]; /* options of an ari_watch_values */

typedef struct ari_watch {
    ari_watch_values values;
    ar_trace *trace; /* NULL: nothing is recorded */
    bool timed;      /* true if there is a cluster */
    ar_sim_cluster cluster;
} ari_watch;

/** Sets up tracing and the simulated cluster of a run. Call ari_watch_fini in every case. Errors: AR_ERR_ARG (an
 *  impossible cluster), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_begin(ari_watch *w, const ari_watch_values *v);
/** Puts cluster and trace, which are borrowed, into a run. */
void ari_watch_run(ar_run *run, const ari_watch *w);
/** Writes the trace if one is requested, in the simulated cluster's time if there is a cluster. Model and layout are
 *  its title. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_watch_write(const ari_watch *w, const char *model, const ar_parallel *p, size_t batch);
/** Prints the line "trace.json: the run, for ui.perfetto.dev" if there is a trace. */
void ari_watch_print(FILE *out, const ari_watch *w);
/** Begins a table of predicted times: prints the line above it. Add a row for each run (s NULL: it did not finish). */
ari_table ari_predicted_begin(FILE *out, const ari_watch *w);
void ari_predicted_row(ari_table *t, const ar_parallel *p, size_t batch, const ar_trace_summary *s);
/** Prints the table of one run. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_predicted_print(FILE *out, const ari_watch *w, const ar_parallel *p, size_t batch,
                                           const ar_trace_summary *s);
/** Adds "cluster" and "trace" to a result, as far as they were given. */
void ari_watch_json(json_t *result, const ari_watch *w);
void ari_watch_fini(ari_watch *w);

/** Returns the virtual time of a run as JSON, a new reference; NULL if memory is short. */
json_t *ari_predicted_json(const ar_trace_summary *s);
