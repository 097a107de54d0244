/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_LAYOUT_H
#define ARI_CLI_LAYOUT_H

#include "anyrank/plan.h"
#include "anyrank/sim.h"
#include "cli/args.h"

/* The options that say how a model is split and what runs it: the same for every subcommand that runs one. */
typedef struct ari_layout_values {
    int tp; /* 0: not given */
    int mlp_order, algorithm, numerics, device;
    double timeout; /* seconds */
} ari_layout_values;

#define ARI_LAYOUT_DEFAULTS \
    {                       \
        .timeout = 60.0     \
    }

extern const char *const ari_mlp_order_names[];
extern const char *const ari_algorithm_names[];
extern const char *const ari_numerics_names[];
extern const char *const ari_device_names[];

#define ARI_LAYOUT_AT(values, field) (offsetof(values, layout) + offsetof(ari_layout_values, field))

/* Rows of an option table; `values` is the subcommand's struct, with an ari_layout_values called `layout`. */
#define ARI_LAYOUT_OPTIONS(values, tp_help)                                                        \
    {.name = "tp",                                                                                 \
     .kind = ARI_OPT_INT,                                                                          \
     .at = ARI_LAYOUT_AT(values, tp),                                                              \
     .min = 1,                                                                                     \
     .max = 4096,                                                                                  \
     .value = "N",                                                                                 \
     .help = (tp_help)},                                                                           \
        {.name = "mlp-order",                                                                      \
         .kind = ARI_OPT_ENUM,                                                                     \
         .at = ARI_LAYOUT_AT(values, mlp_order),                                                   \
         .choices = ari_mlp_order_names,                                                           \
         .help = "how the MLP's two layers are split (default column-row)"},                       \
        {.name = "collectives",                                                                    \
         .kind = ARI_OPT_ENUM,                                                                     \
         .at = ARI_LAYOUT_AT(values, algorithm),                                                   \
         .choices = ari_algorithm_names,                                                           \
         .help = "how the simulated cluster moves data; the bits are the same (default direct)"},  \
        {.name = "timeout",                                                                        \
         .kind = ARI_OPT_DOUBLE,                                                                   \
         .at = ARI_LAYOUT_AT(values, timeout),                                                     \
         .min = 0.01,                                                                              \
         .max = 86400,                                                                             \
         .value = "S",                                                                             \
         .help = "longest wait of a rank for another, in seconds (default 60)"},                   \
        {.name = "numerics",                                                                       \
         .kind = ARI_OPT_ENUM,                                                                     \
         .at = ARI_LAYOUT_AT(values, numerics),                                                    \
         .choices = ari_numerics_names,                                                            \
         .help = "exact (native: not in this version)"},                                           \
        {.name = "device",                                                                         \
         .kind = ARI_OPT_ENUM,                                                                     \
         .at = ARI_LAYOUT_AT(values, device),                                                      \
         .choices = ari_device_names,                                                              \
         .help = "cpu (cuda: not in this version)"},                                               \
        {.name = "dp", .kind = ARI_OPT_LATER}, {.name = "cp", .kind = ARI_OPT_LATER},              \
        {.name = "pp", .kind = ARI_OPT_LATER}, {.name = "sp", .kind = ARI_OPT_LATER},              \
        {.name = "zero", .kind = ARI_OPT_LATER}, {.name = "micro-batches", .kind = ARI_OPT_LATER}, \
        {.name = "trace", .kind = ARI_OPT_LATER},                                                  \
    {                                                                                              \
        .name = "timeline", .kind = ARI_OPT_LATER                                                  \
    }

/** Refuses the choices of later versions (AR_ERR_UNSUPPORTED), and what the device refuses. */
AR_NODISCARD ar_status ari_layout_check(const ari_layout_values *v);
ar_sim_algorithm ari_layout_algorithm(const ari_layout_values *v);
uint64_t ari_layout_timeout_ns(const ari_layout_values *v);
/** The default plan, or the one that --mlp-order asks for. */
AR_NODISCARD ar_status ari_layout_plan(const ari_layout_values *v, ar_arch arch, ar_plan *plan);

#endif
