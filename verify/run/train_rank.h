/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/training.h"
#include "verify/run/cluster_run.h"
#include "verify/run/full_set.h"
#include "verify/run/run.h"

/* State shared by the ranks of a training run. Only world rank 0 writes the report while they run. */
typedef struct ari_training {
    const ar_training_options *o;
    ar_data *data;
    char *data_path;    /* absolute path, so that it is found from another folder */
    char data_hash[65]; /* "": no checkpoints */
    ari_cluster_options cluster;
    ar_batch *batch;              /* [steps] batches of a module; NULL: a loader supplies the batches */
    ar_checkpoint_writer *writer; /* NULL: no checkpoints */
    uint64_t saved;               /* step that the writer's folder has already; 0: none */
    ari_full_set *full;           /* the weights at the end */
    ari_weights *weights;         /* weights of a folder; NULL: none */
    ar_training_report *report;
    ari_routed routed;
    size_t losses, norms, rates; /* capacity of the report's lists, in steps */
} ari_training;

/** Runs one rank's part of the training; user: the ari_training. */
AR_NODISCARD ar_status ari_train_rank(void *user, ar_ctx *ctx);

/** Checks options that a resumed run may not change, and writes a note about those that it changes. Errors:
 *  AR_ERR_ARG. */
AR_NODISCARD ar_status ari_train_check_resume(char *note, size_t cap, const ari_training *j);
/** Appends a step to the report. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_train_remember(ari_training *j, float loss, float norm, double lr);
/** Loads the config of the run's model, under the name that the model had when the run began, and its folder. Errors:
 *  those of ar_model_path and ar_config_load. */
AR_NODISCARD ar_status ari_train_config(ar_config *c, char *folder, size_t cap, const ar_training_options *o);
/** Creates the loader of a run's data. vocab: as in ar_loader_options, 0 if the ids have been checked. Release it with
 *  ari_loader_destroy. */
AR_NODISCARD ar_status ari_train_loader(ar_loader **out, const ar_data *data, const ar_training_options *o,
                                        size_t vocab);
