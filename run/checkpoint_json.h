/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_CHECKPOINT_JSON_H
#define ARI_RUN_CHECKPOINT_JSON_H

#include "anyrank/checkpoint.h"

/* training.json: a checkpoint's state, and hashes of all that is in its folder, its own text included. */

#define ARI_CHECKPOINT_VERSION 1

/** SHA-256, hexadecimal; "": the checkpoint has no such file. */
typedef struct ari_checkpoint_hashes {
    char config[65];    /* of config.json's bytes */
    char weights[65];   /* ari_tensors_hash of model.safetensors */
    char optimizer[65]; /* and of optimizer.safetensors */
} ari_checkpoint_hashes;

/** A state that was read, and what it borrows. */
typedef struct ari_checkpoint_read {
    ar_checkpoint_state state;
    ari_checkpoint_hashes hashes;
    char *model, *data_path;
    char data_hash[65];
    float *loss;
} ari_checkpoint_read;

/** Writes `path`. A data path that is not UTF-8, which JSON cannot hold, gets '?' for its bytes beyond ASCII. Errors:
 *  AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_write_json(const char *path, const ar_checkpoint_state *s,
                                                 const ari_checkpoint_hashes *hashes);
/** Reads it. End with ari_checkpoint_read_fini, also after an error. Errors: AR_ERR_IO; AR_ERR_FORMAT (malformed, not
 *  of a checkpoint, another version; the message names the key); AR_ERR_DATA (the text has not its own hash);
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_read_json(ari_checkpoint_read *r, const char *path);
void ari_checkpoint_read_fini(ari_checkpoint_read *r);

#endif
