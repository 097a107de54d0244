/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_STEP_OPTIONS_H
#define ARI_CLI_STEP_OPTIONS_H

#include <jansson.h>

#include "anyrank/optimizer.h"
#include "cli/args.h"

/* The options that say what a training step is given and does, besides its layout: the same for every subcommand that
 * trains. The macros are rows of an option table; `values` is the subcommand's struct, with fields of the names
 * given. */

/* What updates the weights. */
typedef struct ari_optimizer_values {
    int kind, schedule, decay;                 /* -1: not given */
    double lr, momentum, weight_decay, min_lr; /* NaN: not given */
    size_t warmup;                             /* ARI_WARMUP_NOT_GIVEN */
    bool nesterov;
    const char *betas; /* NULL: not given */
    ari_strings groups;
} ari_optimizer_values;

#define ARI_WARMUP_NOT_GIVEN SIZE_MAX

extern const char *const ari_optimizer_names[]; /* in the order of ar_optimizer_kind */
extern const char *const ari_schedule_names[];  /* in the order of ar_schedule */
extern const char *const ari_decay_names[];     /* in the order of ar_decay */
extern const char *const ari_fault_names[];     /* that --inject takes */

#define ARI_OPTIMIZER_AT(values, field) (offsetof(values, optimizer) + offsetof(ari_optimizer_values, field))

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
        .help = "probability, below 1 (default 0, whatever the config says)",                                         \
        .more = "It is on the embedding's output (GPT-2), attention probabilities, and the outputs of attention and " \
                "MLP. The dropout of a configuration is not used; a note says so."                                    \
    }

/* const char *inject; NULL: not given. */
#define ARI_INJECT_OPTION(values)                                                                   \
    {                                                                                               \
        .name = "inject", .kind = ARI_OPT_STRING, .at = offsetof(values, inject), .value = "BUG",   \
        .help = "switch a known mistake on ('anyrank bugs' lists them)", .choices = ari_fault_names \
    }

/* ari_optimizer_values optimizer. */
#define ARI_OPTIMIZER_OPTIONS(values)                                                                             \
    {.name = "optimizer",                                                                                         \
     .kind = ARI_OPT_ENUM,                                                                                        \
     .at = ARI_OPTIMIZER_AT(values, kind),                                                                        \
     .choices = ari_optimizer_names,                                                                              \
     .help = "what updates the weights (default adamw)"},                                                         \
        {.name = "lr",                                                                                            \
         .kind = ARI_OPT_DOUBLE,                                                                                  \
         .at = ARI_OPTIMIZER_AT(values, lr),                                                                      \
         .min = 0,                                                                                                \
         .max = 1e6,                                                                                              \
         .value = "X",                                                                                            \
         .help = "learning rate (default 0.001)"},                                                                \
        {.name = "lr-schedule",                                                                                   \
         .kind = ARI_OPT_ENUM,                                                                                    \
         .at = ARI_OPTIMIZER_AT(values, schedule),                                                                \
         .choices = ari_schedule_names,                                                                           \
         .help = "how the learning rate goes on after the warm-up; cosine: down to --min-lr in the last step "    \
                 "(default constant)",                                                                            \
         .more = "The cosine is half a wave."},                                                                   \
        {.name = "warmup",                                                                                        \
         .kind = ARI_OPT_SIZE,                                                                                    \
         .at = ARI_OPTIMIZER_AT(values, warmup),                                                                  \
         .min = 0,                                                                                                \
         .max = 1e9,                                                                                              \
         .value = "STEPS",                                                                                        \
         .help = "steps in which the learning rate rises linearly to --lr (default 0)"},                          \
        {.name = "min-lr",                                                                                        \
         .kind = ARI_OPT_DOUBLE,                                                                                  \
         .at = ARI_OPTIMIZER_AT(values, min_lr),                                                                  \
         .min = 0,                                                                                                \
         .max = 1e6,                                                                                              \
         .value = "X",                                                                                            \
         .help = "learning rate at the end of a cosine (default 0)"},                                             \
        {.name = "momentum",                                                                                      \
         .kind = ARI_OPT_DOUBLE,                                                                                  \
         .at = ARI_OPTIMIZER_AT(values, momentum),                                                                \
         .min = 0,                                                                                                \
         .max = 1,                                                                                                \
         .value = "X",                                                                                            \
         .help = "of sgd, below 1 (default 0)"},                                                                  \
        {.name = "nesterov",                                                                                      \
         .kind = ARI_OPT_FLAG,                                                                                    \
         .at = ARI_OPTIMIZER_AT(values, nesterov),                                                                \
         .help = "of sgd with --momentum: Nesterov's variant"},                                                   \
        {.name = "betas",                                                                                         \
         .kind = ARI_OPT_STRING,                                                                                  \
         .at = ARI_OPTIMIZER_AT(values, betas),                                                                   \
         .value = "B1,B2",                                                                                        \
         .help = "of adam and adamw (default 0.9,0.999)"},                                                        \
        {.name = "weight-decay",                                                                                  \
         .kind = ARI_OPT_DOUBLE,                                                                                  \
         .at = ARI_OPTIMIZER_AT(values, weight_decay),                                                            \
         .min = 0,                                                                                                \
         .max = 1e6,                                                                                              \
         .value = "X",                                                                                            \
         .help = "added to the gradient by sgd and adam, decoupled in adamw (default 0; adamw 0.01)"},            \
        {.name = "decay",                                                                                         \
         .kind = ARI_OPT_ENUM,                                                                                    \
         .at = ARI_OPTIMIZER_AT(values, decay),                                                                   \
         .choices = ari_decay_names,                                                                              \
         .help = "which parameters decay: all, or matrices only, not norms and biases (default all)",             \
         .more = "Matrices are the parameters of two dimensions."},                                               \
    {                                                                                                             \
        .name = "group", .kind = ARI_OPT_STRINGS, .at = ARI_OPTIMIZER_AT(values, groups),                         \
        .value = "GLOB:lr=X,decay=Y",                                                                             \
        .help = "parameters whose names match the glob learn at X times the rate and decay by Y; the last group " \
                "that matches counts (up to 8 of them)",                                                          \
        .more = "The names are Hugging Face's, and globs are as of fnmatch(3), where '*' also matches dots. A "   \
                "group's decay counts whatever --decay says; lr or decay may be left out."                        \
    }

/** Nothing given. */
ari_optimizer_values ari_optimizer_values_defaults(void);
/** Refuses options that mean nothing with the others (AR_ERR_ARG). */
AR_NODISCARD ar_status ari_optimizer_values_check(const ari_optimizer_values *v);
/** What they ask for, in a training of total_steps steps. Errors: AR_ERR_ARG (a list or a group malformed,
 *  ar_optimizer_check). */
AR_NODISCARD ar_status ari_optimizer_values_options(ar_optimizer_options *o, const ari_optimizer_values *v,
                                                    uint64_t total_steps);
/** The same on top of the options that *o has, a checkpoint's: what was not given stays as it is; another kind of
 *  optimizer begins with its own defaults. Errors: those. */
AR_NODISCARD ar_status ari_optimizer_values_change(ar_optimizer_options *o, const ari_optimizer_values *v,
                                                   uint64_t total_steps);
/** "AdamW (lr 0.001, cosine to 0.0001 after 5 steps of warm-up, weight decay 0.01 of matrices, 1 group)" */
void ari_optimizer_print(FILE *to, const ar_optimizer_options *o);
/** The options as an object. Gives; NULL without memory. */
json_t *ari_optimizer_json(const ar_optimizer_options *o);

/** Refuses a dropout of 1 (AR_ERR_ARG); NaN is none. */
AR_NODISCARD ar_status ari_dropout_check(double dropout);
/** `given`, or `otherwise` where it is NaN. */
double ari_or_else(double given, double otherwise);

#endif
