/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_PLAN_H
#define ARI_CLI_PLAN_H

#include <jansson.h>
#include <stdio.h>

#include "cli/options/run.h"
#include "plan/flow.h"

/* A step that is looked at without running it: rows of a table of options, whose ARI_VALUES has an ari_run_values called
 * `r`. */
#define ARI_PLANNED_OPTIONS                                                                                          \
    ARI_OPTION_INT("tp", r.run.parallel.tp, 1, 65536, "N", "tensor-parallel ranks (default 1)"),                     \
        ARI_OPTION_GROUP(ari_plan_options, r),                                                                       \
        ARI_OPTION_ENUM("mlp-order", r.run.plan.mlp_order, ari_mlp_order_names,                                      \
                        "how the MLP's two layers are split (default column-row)"),                                  \
        ARI_OPTION_GROUP(ari_step_layout_options, r),                                                                \
        ARI_OPTION_INT("zero", r.run.parallel.zero, 0, 1, "STAGE",                                                   \
                       "1: each rank of --dp keeps its share of the optimizer's state (ZeRO-1; default 0)"),         \
        ARI_OPTION_BYTES("bucket-bytes", r.run.ddp.bucket_bytes, 0, 0, "BYTES",                                      \
                         "capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default 25MiB)"),       \
        ARI_OPTION_GROUP(ari_bucket_options, r),                                                                     \
        ARI_BATCH_OPTIONS("tokens of each sequence (default: the model's longest, at most 4096)"), ARI_CLIP_OPTIONS, \
        ARI_OPTION_GROUP(ari_loss_options, r)

/** The step that they ask for, as a training step has it by default; *config is its model's. In every case
 *  ar_plan_fini(&c->run.plan). Errors: AR_ERR_ARG, those of ar_config_load, ar_plan_load and ar_run_check. */
AR_NODISCARD ar_status ari_planned_case(ari_step_case *c, ar_config *config, const ari_run_values *r,
                                        const ari_common *common);
/** What the JSON of such a command begins with: the model, its layout, plan and batch, and notes of its config. Gives;
 *  NULL without memory. */
json_t *ari_planned_json(const char *command, const ari_step_case *c);

/** The table, a line an operation, then what the passes come to; markdown: as a table of Markdown. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_flow_print(FILE *to, const ari_flow *f, const ari_step_case *c, bool markdown);
/** "flow", an array of operations, and "totals". Gives; NULL without memory. */
json_t *ari_flow_json(const ari_flow *f, const ari_step_case *c);

#endif
