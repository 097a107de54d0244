/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_TRAIN_STEP_H
#define ARI_TRAIN_STEP_H

#include "anyrank/train.h"

/* What a step trains: a model, or a module and its loss. */
typedef struct ari_trained {
    void *self;
    /* What the rows of a batch add to T, by which everything is divided. */
    size_t (*targets)(const void *self, const ar_batch *batch);
    /* Forward up to the loss's terms, which are added to those of earlier micro-batches; backward from them. */
    ar_status (*forward)(void *self, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
    ar_status (*backward)(void *self, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
    /* The loss of all micro-batches and data-parallel ranks. */
    ar_status (*loss)(void *self, ar_ctx *ctx, float *loss, size_t targets);
    /* Gradients and the loss's terms become zero. */
    ar_status (*zero)(void *self, ar_ctx *ctx);
    /* All parameters. Gives; free(). */
    ar_status (*list)(ar_param ***gives, size_t *n, void *self);
} ari_trained;

/** n numbers, each summed over the data-parallel ranks. */
AR_NODISCARD ar_status ari_sum_over_dp(int64_t *counts, ar_ctx *ctx, size_t n);
/** ar_train_step of anything that can be trained. */
AR_NODISCARD ar_status ari_train_step(ar_train_result *result, const ari_trained *what, ar_ctx *ctx,
                                      ar_optimizer *optimizer, const ar_batch *global, uint32_t step,
                                      const ar_train_options *o);

#endif
