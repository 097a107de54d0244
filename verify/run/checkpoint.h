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
    int fd;     /* descriptor of the locked folder; -1: not open */
} ari_checkpoint_folder;

/** Creates the folder if it is missing, locks it (if the file system has locks), and removes half-written files of a
 *  killed process. fresh: it may hold no checkpoint yet. End with ari_checkpoint_folder_close, also after an error.
 *  Errors: AR_ERR_IO, AR_ERR_ARG (`fresh`), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_open(ari_checkpoint_folder *f, const char *path, bool fresh);
void ari_checkpoint_folder_close(ari_checkpoint_folder *f);
/** Begins a checkpoint. *out is the path of the empty folder for its files, to be released with free(). Errors:
 *  AR_ERR_IO (also if a checkpoint of the step exists with foreign files in it), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_folder_begin(ari_checkpoint_folder *f, char **out, uint64_t step);
/** Syncs the new folder, renames it to its step's name (replacing an older checkpoint of the same step) and points
 *  `latest` to it. After an error the folder is as it was before begin. Errors: AR_ERR_IO. */
AR_NODISCARD ar_status ari_checkpoint_folder_publish(ari_checkpoint_folder *f, uint64_t step);
/** Removes what begin created. */
void ari_checkpoint_folder_abandon(ari_checkpoint_folder *f);
/** Removes checkpoints older than `step` until `keep_count` are left, including that of `step`. Checkpoints with
 *  foreign files, or that cannot be removed, stay. */
void ari_checkpoint_folder_keep(ari_checkpoint_folder *f, uint64_t step, size_t keep_count);

/** "step-00000057". */
#define ARI_CHECKPOINT_NAME 32
void ari_checkpoint_name(char out[ARI_CHECKPOINT_NAME], uint64_t step);

/** Returns true if an optimizer with these options keeps this kind of state for weights of this dtype. */
bool ari_checkpoint_keeps(const ar_optimizer_options *o, ar_dtype storage, const char *state);

/** Does the checks of ar_checkpoint_load, which come before any change: each of these parameters has its tensor, with
 *  `state` also its optimizer's, and with `all` nothing else exists. Errors: those of ar_checkpoint_load. */
AR_NODISCARD ar_status ari_checkpoint_check(const ar_checkpoint *c, ar_param *const *params, size_t n, bool state,
                                            bool is_complete);
/** Returns false for a checkpoint of a model without a config. */
bool ari_checkpoint_has_config(const ar_checkpoint *c);
/** Checks that every tensor is a parameter of this model or its state. It serves the ranks of a pipeline, none of which
 *  knows all parameters. Errors: AR_ERR_FORMAT (names one that is not), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_check_names(const ar_checkpoint *c, const ar_config *config);

/* --- training.json ------------------------------------------------------------------------------------------------ */
/* A checkpoint's state with hashes of all files in its folder, including its own text. */

#define ARI_CHECKPOINT_VERSION 1
#define ARI_CHECKPOINT_FORMAT "anyrank checkpoint"
#define ARI_CHECKPOINT_OWN_HASH "training_hash" /* key of the hash over all other keys */

/** SHA-256 hashes in hexadecimal; "": the checkpoint lacks the file. */
typedef struct ari_checkpoint_hashes {
    char config[65];    /* hash of config.json's bytes */
    char weights[65];   /* ari_tensors_hash of model.safetensors */
    char optimizer[65]; /* hash of optimizer.safetensors */
} ari_checkpoint_hashes;

/** A state that was read, and the memory that it borrows. */
typedef struct ari_checkpoint_read {
    ar_checkpoint_state state; /* the state; the caller frees its losses */
    ari_checkpoint_hashes hashes;
    char data_hash[65];
    json_t *root;
} ari_checkpoint_read;

/** Computes the SHA-256 of the object's canonical text: keys sorted, no spaces, numbers as they are read back. Errors:
 *  AR_ERR_MEMORY, AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_checkpoint_text_hash(char hex[65], const json_t *o);
/** Writes the state to `path`. JSON cannot store a data path that is not UTF-8; its bytes beyond ASCII become '?'.
 *  Errors: AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_write_json(const char *path, const ar_checkpoint_state *s,
                                                 const ari_checkpoint_hashes *hashes);
/** Reads a state. The caller ends it with ari_checkpoint_read_fini, also after an error. Errors: AR_ERR_IO;
 *  AR_ERR_FORMAT (malformed, not a checkpoint, another version; the message names the key); AR_ERR_DATA (the text does
 *  not match its hash); AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_read_json(ari_checkpoint_read *r, const char *path);
void ari_checkpoint_read_fini(ari_checkpoint_read *r);
