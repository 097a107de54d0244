/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "anyrank/checkpoint.h"
#include "anyrank/param.h"

/* --- a folder of checkpoints -------------------------------------------------------------------------------------- */
/* A new checkpoint is written to its own folder under a name that no reader uses, and gets its final name by one
 * rename. */

#define ARI_CHECKPOINT_CONFIG "config.json"
#define ARI_CHECKPOINT_WEIGHTS "model.safetensors"
#define ARI_CHECKPOINT_OPTIMIZER "optimizer.safetensors"
#define ARI_CHECKPOINT_TRAINING "training.json"
#define ARI_CHECKPOINT_LATEST "latest"

typedef struct ari_checkpoint_folder {
    char *path; /* links resolved */
    int fd;     /* of the folder, locked; -1: not open */
} ari_checkpoint_folder;

/** Creates the folder if it is missing, locks it (if the file system has locks), and removes half-written files of a
 *  killed process. fresh: it may hold no checkpoint yet. End with ari_checkpoint_folder_close, also after an error.
 *  Errors: AR_ERR_IO, AR_ERR_ARG (`fresh`), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_open(ari_checkpoint_folder *f, const char *path, bool fresh);
void ari_checkpoint_folder_close(ari_checkpoint_folder *f);
/** Begins a checkpoint. *out is the path of the empty folder for its files, to be released with free(). Errors:
 *  AR_ERR_IO (also if a checkpoint of the step exists with foreign files in it), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_begin(ari_checkpoint_folder *f, char **out, uint64_t step);
/** Syncs the new folder, gives it its name (instead of one of the same step) and lets `latest` name it. On an error
 *  everything is as it was before begin. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_checkpoint_folder_publish(ari_checkpoint_folder *f, uint64_t step);
/** Removes what begin has begun. */
void ari_checkpoint_folder_abandon(ari_checkpoint_folder *f);
/** Removes checkpoints older than `step` until `keep_count` are left, including that of `step`. Checkpoints with
 *  foreign files, or that cannot be removed, stay. */
void ari_checkpoint_folder_keep(ari_checkpoint_folder *f, uint64_t step, size_t keep_count);

/** "step-00000057". */
#define ARI_CHECKPOINT_NAME 32
void ari_checkpoint_name(char out[ARI_CHECKPOINT_NAME], uint64_t step);

/** True if an optimizer with these options keeps this kind of state for weights of this dtype. */
bool ari_checkpoint_keeps(const ar_optimizer_options *o, ar_dtype storage, const char *state);

/** Does the checks of ar_checkpoint_load, which come before any change: each of these parameters has its tensor, with
 *  `state` also its optimizer's, and with `all` nothing else exists. Errors: those of ar_checkpoint_load. */
AR_NODISCARD ar_status ari_checkpoint_check(const ar_checkpoint *c, ar_param *const *params, size_t n, bool state,
                                            bool is_complete);
/** False: of a model without one. */
bool ari_checkpoint_has_config(const ar_checkpoint *c);
/** Checks that every tensor is a parameter of this model or its state. It serves the ranks of a pipeline, none of which
 *  knows all parameters. Errors: AR_ERR_FORMAT (names one that is not), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_check_names(const ar_checkpoint *c, const ar_config *config);

/* --- training.json ------------------------------------------------------------------------------------------------ */
/* A checkpoint's state, and hashes of all that is in its folder, its own text included. */

#define ARI_CHECKPOINT_VERSION 1
#define ARI_CHECKPOINT_FORMAT "anyrank checkpoint"
#define ARI_CHECKPOINT_OWN_HASH "training_hash" /* over all other keys */

/** SHA-256, hexadecimal; "": the checkpoint has no such file. */
typedef struct ari_checkpoint_hashes {
    char config[65];    /* of config.json's bytes */
    char weights[65];   /* ari_tensors_hash of model.safetensors */
    char optimizer[65]; /* and of optimizer.safetensors */
} ari_checkpoint_hashes;

/** A state that was read, and what it borrows. */
typedef struct ari_checkpoint_read {
    ar_checkpoint_state state; /* its losses are to be freed */
    ari_checkpoint_hashes hashes;
    char data_hash[65];
    json_t *root;
} ari_checkpoint_read;

/** SHA-256 of the object's one canonical text: sorted keys, no spaces, numbers as they are read back. Errors:
 *  AR_ERR_MEMORY, AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_checkpoint_text_hash(char hex[65], const json_t *o);
/** Writes `path`. A data path that is not UTF-8, which JSON cannot hold, gets '?' for its bytes beyond ASCII. Errors:
 *  AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_write_json(const char *path, const ar_checkpoint_state *s,
                                                 const ari_checkpoint_hashes *hashes);
/** Reads it. End with ari_checkpoint_read_fini, also after an error. Errors: AR_ERR_IO; AR_ERR_FORMAT (malformed, not
 *  of a checkpoint, another version; the message names the key); AR_ERR_DATA (the text has not its own hash);
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_read_json(ari_checkpoint_read *r, const char *path);
void ari_checkpoint_read_fini(ari_checkpoint_read *r);
