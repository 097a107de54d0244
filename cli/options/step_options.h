/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_STEP_OPTIONS_H
#define ARI_CLI_STEP_OPTIONS_H

#include <jansson.h>
#include <math.h>

#include "anyrank/run.h"
#include "cli/options/args.h"

/* The options that say what a training step is given and does, besides its layout: the same for every subcommand that
 * trains. The macros are rows of an option table; ARI_VALUES, the subcommand's struct, has fields of the names given. */

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
#define ARI_OPTIMIZER_NOT_GIVEN                                                              \
    {                                                                                        \
        .kind = -1, .schedule = -1, .decay = -1, .lr = (double)NAN, .momentum = (double)NAN, \
        .weight_decay = (double)NAN, .min_lr = (double)NAN, .warmup = ARI_WARMUP_NOT_GIVEN   \
    }

extern const char *const ari_optimizer_names[]; /* in the order of ar_optimizer_kind */
extern const char *const ari_schedule_names[];  /* in the order of ar_schedule */
extern const char *const ari_decay_names[];     /* in the order of ar_decay */
extern const char *const ari_fault_names[];     /* that --inject takes */

extern const ari_option ari_optimizer_options[]; /* of an ari_optimizer_values */

/* size_t batch, seq; 0: not given. */
#define ARI_BATCH_OPTIONS(seq_help)                                                                      \
    ARI_OPTION_SIZE("batch", batch, 1, 1e9, "B", "sequences of a step, all ranks together (default 8)"), \
        ARI_OPTION_SIZE("seq", seq, 1, 1e9, "S", seq_help)
/* double clip, dropout; NaN: not given. */
#define ARI_CLIP_OPTIONS                                                                                               \
    ARI_OPTION_DOUBLE("clip", clip, 0, 1e30, "X",                                                                      \
                      "largest norm of all gradients together; 0: no clipping (default 1)"),                           \
        ARI_OPTION_DOUBLE("dropout", dropout, 0, 1, "P", "probability, below 1 (default 0, whatever the config says)", \
                          .more =                                                                                      \
                              "It is on the embedding's output (GPT-2), attention probabilities, and the outputs of "  \
                              "attention and MLP. The dropout of a configuration is not used; a note says so.")
/* const char *inject; NULL: not given. */
#define ARI_INJECT_OPTION                                                                               \
    ARI_OPTION_STRING("inject", inject, "BUG", "switch a known mistake on ('anyrank bugs' lists them)", \
                      .choices = ari_fault_names)

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
/** "AdamW (lr 0.001, cosine to 0.0001 after 5 steps of warm-up, weight decay 0.01 of matrices, 1 group), clip 1,
 *  dropout 0.1"; of 0 steps what a single forward and backward is. */
void ari_step_print(FILE *to, const ar_run *run);
/** A line where the config has a dropout that the run does not use. */
void ari_dropout_note(FILE *to, const ar_config *c, const ar_run *run);
/** The options as an object. Gives; NULL without memory. */
json_t *ari_optimizer_json(const ar_optimizer_options *o);

/** Refuses a dropout of 1 (AR_ERR_ARG); NaN is none. */
AR_NODISCARD ar_status ari_dropout_check(double dropout);
/** `given`, or `otherwise` where it is NaN. */
double ari_or_else(double given, double otherwise);

#endif
