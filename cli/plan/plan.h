/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdio.h>

#include "anyrank/config.h"
#include "cli/options/run.h"
#include "cli/shared/table.h"
#include "verify/bytes/bytes.h"
#include "verify/plan/search.h"

/* Options of a step that is analysed without running it: rows of an option table whose ARI_VALUES has an ari_run_values
 * called `r`. */
#define ARI_ZERO_HELP "1: each rank of --dp keeps its share of the optimizer's state (ZeRO-1; default 0)"
#define ARI_PLANNED_OPTIONS(most_zero, zero_help)                                                                     \
    ARI_OPTION_SECTION("layout"),                                                                                     \
        ARI_OPTION_INT("tp", r.run.parallel.tp, 1, 65536, "N", "tensor-parallel ranks (default 1)"),                  \
        ARI_OPTION_GROUP(ari_plan_options, r),                                                                        \
        ARI_OPTION_ENUM("mlp-order", r.run.plan.mlp_order, ari_mlp_order_names,                                       \
                        "how the MLP's two layers are split (default column-row)"),                                   \
        ARI_OPTION_GROUP(ari_step_layout_options, r), ARI_OPTION_SECTION("memory"),                                   \
        ARI_OPTION_INT("zero", r.run.parallel.zero, 0, most_zero, "STAGE", zero_help), ARI_OPTION_SECTION("buckets"), \
        ARI_OPTION_BYTES("bucket-bytes", r.run.ddp.bucket_bytes, 0, 0, "BYTES",                                       \
                         "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default 25MiB)"),        \
        ARI_OPTION_GROUP(ari_bucket_options, r),                                                                      \
        ARI_BATCH_OPTIONS("8; with --gpus at least one for each GPU",                                                 \
                          "tokens of each sequence (default: the model's longest, at most 4096)"),                    \
        ARI_CLIP_OPTIONS, ARI_OPTION_GROUP(ari_loss_options, r)

/** Sets the extents that a search varies to those of a single layout if none are given. */
void ari_planned_set_defaults(ar_parallel *p);
/** Reads the config and the step that the options describe, as a training step has them by default, unchecked. *config
 *  is the model's config. Call ari_planned_end in every case. Errors: AR_ERR_ARG, those of ar_config_load and
 *  ar_plan_load. */
AR_NODISCARD ar_status ari_planned_begin(ari_step_case *c, ar_config *config, const ari_run_values *r,
                                         const ari_common *common);
void ari_planned_end(ari_step_case *c);
/** Does the same as ari_planned_begin, with checks. Errors: also those of ari_layout_check and ar_run_check. */
AR_NODISCARD ar_status ari_planned_case(ari_step_case *c, ar_config *config, const ari_run_values *r,
                                        const ari_common *common);
/** Returns the first fields of a planning command's JSON: the model, its layout, plan and batch, and notes on its
 *  config. A new reference; NULL if memory is short. */
json_t *ari_planned_json(const char *command, const ari_step_case *c);

/* --- what layouts would take ------------------------------------------------------------------------------------- */

typedef enum ari_plan_table { ARI_PLAN_MEMORY, ARI_PLAN_SCALING, ARI_PLAN_DECISION } ari_plan_table;
extern const char *const ari_plan_table_names[];

/* Values of recompute.part and schedule in r.run.parallel with which a search tries all. */
#define ARI_RECOMPUTE_NOT_GIVEN ((ar_recompute)-1)
#define ARI_PP_SCHEDULE_NOT_GIVEN ((ar_pp_schedule)-1)
/* Options of `plan`; -1 in table, top, system and r.run.parallel.zero: not given. */
typedef struct ari_plan_values {
    ari_common common;
    ari_run_values r;
    bool pipeline, flow, backward, each_layer, markdown; /* options of --flow */
    int rank;
    int gpus, table, top, system;
    bool no_flash, hierarchical, shared_links, show_all;
    const char *cluster, *why, *csv;
} ari_plan_values;

/* A request: a model with its batch on a cluster. */
typedef struct ari_plan_request {
    const ari_plan_values *v;
    ar_config config;
    ari_search search;   /* without progress; given extents, stages and forms are fixed; borrows config */
    char cluster[200];   /* description of the cluster */
    const char *machine; /* GPU whose operations are timed by their shapes; NULL: none */
    size_t parameters;
} ari_plan_request;

/** Runs `plan --flow`: prints one line per operation, then the totals of the passes. Errors: AR_ERR_MEMORY, those of
 *  ari_planned_case. */
AR_NODISCARD ar_status ari_plan_flow(const ari_plan_values *v);
/** Runs `plan --pipeline`. Errors: AR_ERR_ARG (no pipeline), those of ari_planned_case and of files. */
AR_NODISCARD ar_status ari_plan_pipeline(const ari_plan_values *v);
/** Runs `plan` without --flow and --pipeline. Errors: AR_ERR_ARG, those of files, those of ari_search_run. */
AR_NODISCARD ar_status ari_plan_layouts(const ari_plan_values *v);
/** Prints a table of the layouts, and below it the advice for the best one. Errors: AR_ERR_MEMORY, those of
 *  ari_depth_of. */
AR_NODISCARD ar_status ari_ranking_print(FILE *to, const ari_plan_request *a, const ari_ranking *r);
AR_NODISCARD ar_status ari_depth_print(FILE *to, const ari_plan_request *a, const ari_depth *d);
/** Parses the extents of --why, such as "tp=8 pp=16", for a number of GPUs; 0: an extent is not given. Errors:
 *  AR_ERR_ARG. */
AR_NODISCARD ar_status ari_why_read(ari_choice *c, const char *text, int gpus);
/** Prints why the first layout is first, a line for each reason, next to the layout of --why. Errors: AR_ERR_ARG
 *  (--why), those of ari_ranking_print. */
AR_NODISCARD ar_status ari_why_print(FILE *out, const ari_plan_request *a, const ari_ranking *r);
/** Adds the same to the object as members `why` and `asked`. Errors: as above. */
AR_NODISCARD ar_status ari_why_json(json_t *object, const ari_plan_request *a, const ari_ranking *r);
/** Prints a table of a model's layouts and returns its rows for JSON, which the caller releases. Errors: as
 *  ari_search_run. */
AR_NODISCARD ar_status ari_plan_table_run(json_t **rows, FILE *out, const ari_plan_request *a);
/** Returns a layout's depth as JSON, a new reference; NULL if memory is short. */
json_t *ari_depth_json(const ari_depth *d);
json_t *ari_candidate_json(const ari_candidate *f, const ari_planned *p);
json_t *ari_plan_request_json(const ari_plan_request *a);
/** Rows of numbers, a line a layout, with a line of titles. Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ranking_csv(const char *path, const ari_planned *base, const ari_ranking *r);
/** Columns for a layout, one more if the model has experts, with the table's first column and their number; and the
 *  cells of a row. Errors: those of ari_throughput_of. */
enum { ARI_LAYOUT_COLUMNS = ARI_LAYOUT_AXES + 12 };
size_t ari_layout_columns(ari_column columns[ARI_LAYOUT_COLUMNS], const ar_config *config);
AR_NODISCARD ar_status ari_layout_cells(ari_table *t, const ari_plan_request *a, const ari_candidate *f);
/** Returns the number of layouts that a ranking shows. */
size_t ari_ranking_shown(const ari_plan_request *a, const ari_ranking *r);
/** Prints the line that describes what is planned: model, batch, cluster, account. up_to: the number of ranks is a
 *  maximum. */
void ari_plan_request_print(FILE *to, const ari_plan_request *a, int ranks, bool up_to);
