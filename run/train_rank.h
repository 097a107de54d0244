/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_TRAIN_RANK_H
#define ARI_RUN_TRAIN_RANK_H

#include "anyrank/training.h"
#include "run/full_weights.h"

/* What the ranks of a training run share. Only world rank 0 writes the report while they run. */
typedef struct ari_training {
    const ar_training_options *o;
    const unsigned char *text; /* [length] */
    size_t length;
    const float *(*weights)(void *, const char *, size_t); /* NULL: fresh */
    void *weights_user;
    ari_full_weights *full;
    ar_training_report *report;
} ari_training;

/** One rank's part of the run; user: the ari_training. */
AR_NODISCARD ar_status ari_train_rank(void *user, ar_ctx *ctx);

#endif
