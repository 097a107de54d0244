/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_STEP_OPTIONS_H
#define ARI_CLI_STEP_OPTIONS_H

#include "cli/args.h"

/* The options that say what a training step is given and does, beside its layout and its optimizer: the same for every
 * subcommand that trains. Rows of an option table; `values` is the subcommand's struct, with fields of these names. */

/* size_t batch, seq; 0: not given. */
#define ARI_BATCH_OPTIONS(values, seq_help)                                                                   \
    {.name = "batch",                                                                                         \
     .kind = ARI_OPT_SIZE,                                                                                    \
     .at = offsetof(values, batch),                                                                           \
     .min = 1,                                                                                                \
     .max = 1e9,                                                                                              \
     .value = "B",                                                                                            \
     .help = "sequences of a step, all ranks together (default 8)"},                                          \
    {                                                                                                         \
        .name = "seq", .kind = ARI_OPT_SIZE, .at = offsetof(values, seq), .min = 1, .max = 1e9, .value = "S", \
        .help = (seq_help)                                                                                    \
    }

/* double clip, dropout; NaN: not given. */
#define ARI_CLIP_OPTIONS(values)                                                                                      \
    {.name = "clip",                                                                                                  \
     .kind = ARI_OPT_DOUBLE,                                                                                          \
     .at = offsetof(values, clip),                                                                                    \
     .min = 0,                                                                                                        \
     .max = 1e30,                                                                                                     \
     .value = "X",                                                                                                    \
     .help = "largest norm of all gradients together; 0: no clipping (default 1)"},                                   \
    {                                                                                                                 \
        .name = "dropout", .kind = ARI_OPT_DOUBLE, .at = offsetof(values, dropout), .min = 0, .max = 1, .value = "P", \
        .help = "probability, below 1 (default 0, whatever the config says)"                                          \
    }

/* const char *inject; NULL: not given. */
#define ARI_INJECT_OPTION(values)                                                                 \
    {                                                                                             \
        .name = "inject", .kind = ARI_OPT_STRING, .at = offsetof(values, inject), .value = "BUG", \
        .help = "switch a known mistake on ('anyrank bugs' lists them)"                           \
    }

/** Refuses a dropout of 1 (AR_ERR_ARG); NaN is none. */
AR_NODISCARD ar_status ari_dropout_check(double dropout);
/** `given`, or `otherwise` where it is NaN. */
double ari_or_else(double given, double otherwise);

#endif
