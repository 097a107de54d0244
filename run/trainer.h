/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_TRAINER_H
#define ARI_RUN_TRAINER_H

#include "anyrank/model.h"
#include "anyrank/run.h"
#include "anyrank/train.h"

/* What a rank trains with: its part of a model, the data-parallel object over its parameters, the optimizer. */
typedef struct ari_trainer_options {
    ar_run run; /* steps 0: no optimizer */
    const ar_config *config;
    bool forward_only;                                     /* neither a DDP object nor an optimizer */
    const float *(*weights)(void *, const char *, size_t); /* as in ar_model_set; NULL: fresh */
    void *weights_user;
} ari_trainer_options;

typedef struct ari_trainer {
    ar_model *model;
    ar_param **params; /* [n], the model's, in the order of their first use */
    size_t n;
    ar_ddp *ddp;             /* NULL: forward only */
    ar_optimizer *optimizer; /* NULL: none */
    ar_train_options step;   /* of ar_train_step */
} ari_trainer;

/** Makes them. Collective over the groups of the context. The context must outlive it; the options are copied. What it
 *  has made when an error comes is destroyed, and *t is empty. Errors: those of the parts. */
AR_NODISCARD ar_status ari_trainer_create(ari_trainer *t, ar_ctx *ctx, const ari_trainer_options *o);
/** ar_train_step. step: 1 for the first. */
AR_NODISCARD ar_status ari_trainer_step(ar_train_result *result, ari_trainer *t, ar_ctx *ctx, const ar_batch *global,
                                        uint32_t step);
/** Accepts an empty one. */
void ari_trainer_destroy(ari_trainer *t);

#endif
