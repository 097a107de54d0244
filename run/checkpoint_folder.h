/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_CHECKPOINT_FOLDER_H
#define ARI_RUN_CHECKPOINT_FOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* A folder of checkpoints: a new one grows in a folder of its own under a name that nobody reads, and gets its name by
 * one rename. */

#define ARI_CHECKPOINT_CONFIG "config.json"
#define ARI_CHECKPOINT_WEIGHTS "model.safetensors"
#define ARI_CHECKPOINT_OPTIMIZER "optimizer.safetensors"
#define ARI_CHECKPOINT_TRAINING "training.json"
#define ARI_CHECKPOINT_LATEST "latest"

typedef struct ari_checkpoint_folder {
    char *path; /* links resolved */
    int fd;     /* of the folder, locked; -1: not open */
} ari_checkpoint_folder;

/** Makes the folder where it is missing, locks it (where the file system knows locks), removes what a killed process
 *  left half written. fresh: it may hold no checkpoint yet. End with ari_checkpoint_folder_close, also after an error.
 *  Errors: AR_ERR_IO, AR_ERR_ARG (`fresh`), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_open(ari_checkpoint_folder *f, const char *path, bool fresh);
void ari_checkpoint_folder_close(ari_checkpoint_folder *f);
/** Begins a checkpoint: *gives becomes the path of the empty folder to write its files to, to be freed. Errors:
 *  AR_ERR_IO (also: there is a checkpoint of the step with files of somebody else in it), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_begin(ari_checkpoint_folder *f, char **gives, uint64_t step);
/** Syncs the new folder, gives it its name (in place of one of the same step) and lets `latest` name it. On an error
 *  everything is as it was before begin. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_checkpoint_folder_publish(ari_checkpoint_folder *f, uint64_t step);
/** Removes what begin has begun. */
void ari_checkpoint_folder_abandon(ari_checkpoint_folder *f);
/** Removes checkpoints older than `step` until `keep` are left, that one included; those with files of somebody else in
 *  them, and what cannot be removed, stay. */
void ari_checkpoint_folder_keep(ari_checkpoint_folder *f, uint64_t step, size_t keep);

/** "step-00000057". */
#define ARI_CHECKPOINT_NAME 32
void ari_checkpoint_name(char out[ARI_CHECKPOINT_NAME], uint64_t step);
/** The inverse; false for any other name. */
bool ari_checkpoint_step_of(const char *name, uint64_t *step);

#endif
