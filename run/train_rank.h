/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_TRAIN_RANK_H
#define ARI_RUN_TRAIN_RANK_H

#include "anyrank/training.h"
#include "run/full_set.h"

/* What the ranks of a training run share. Only world rank 0 writes the report while they run. */
typedef struct ari_training {
    const ar_training_options *o;
    const ar_data *data;
    char *data_path;    /* from the root on, so that it is found from another folder too */
    char data_hash[65]; /* "": nobody saves */
    const float *(*weights)(void *, const char *, size_t); /* NULL: fresh */
    void *weights_user;
    ar_checkpoint_writer *writer; /* NULL: nobody saves */
    ari_full_set *full;           /* the weights at the end */
    ar_training_report *report;
} ari_training;

/** One rank's part of the run; user: the ari_training. */
AR_NODISCARD ar_status ari_train_rank(void *user, ar_ctx *ctx);

/** What a resumed run may not change, and a note on what it does. Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_train_check_resume(char *note, size_t cap, const ari_training *j);
/** The loader of a run's data. Gives; ar_loader_destroy. */
AR_NODISCARD ar_status ari_train_loader(ar_loader **gives, const ar_data *data, const ar_training_options *o,
                                        const ar_config *c);

#endif
