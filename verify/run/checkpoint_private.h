/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/checkpoint.h"
#include "anyrank/train.h"

/* Functions of anyrank/checkpoint.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** Prepares the folder, and locks it against a second process until destroy; removes what a killed process left half
 *  written. Copies the options. Gives. Errors: AR_ERR_IO (also: another process writes there), AR_ERR_ARG (`fresh`, and
 *  there are checkpoints), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_checkpoint_writer_create(ar_checkpoint_writer **gives, const ar_checkpoint_options *o);
/** Accepts NULL. */
void ari_checkpoint_writer_destroy(ar_checkpoint_writer *w);
/** Writes FOLDER/step-NNNNNNNN and lets `latest` name it; a checkpoint of the same step is replaced. Every rank hands
 *  over its parts of the parameters and of the optimizer's state; rank 0 writes. All copies of an element are compared.
 *  optimizer NULL: no state. state: rank 0's is written, others may pass NULL. Experts are stacked where the family's
 *  files have them so (GPT-OSS). Collective over the context's world (which must be all ranks); all ranks get the same
 *  status and message, so that training can go on after a failure, which leaves the folder as it was. Errors: AR_ERR_DATA
 *  (copies differ: names the tensor, the element and two ranks), AR_ERR_IO, AR_ERR_MEMORY, AR_ERR_INTERNAL (parts that do
 *  not make a whole). */
AR_NODISCARD ar_status ari_checkpoint_save(ar_checkpoint_writer *w, ar_ctx *ctx, ar_param *const *params, size_t n,
                                           ar_optimizer *optimizer, const ar_checkpoint_state *state);
/** The folder of the last checkpoint written; "" before the first. Borrowed until the next save. */
const char *ari_checkpoint_written(const ar_checkpoint_writer *w);
/** Opens a checkpoint, or the one that `latest` in a folder of them names, and verifies all of it: hashes of weights
 * and optimizer state. Gives; ari_checkpoint_close. Errors: AR_ERR_IO; AR_ERR_NOT_FOUND (no checkpoint there);
 * AR_ERR_FORMAT (malformed; a version that this program does not read); AR_ERR_DATA ("damaged": a hash differs);
 * AR_ERR_MEMORY. Threads: an open checkpoint may be read by many. */
AR_NODISCARD ar_status ari_checkpoint_open(ar_checkpoint **gives, const char *path);
/** Opens a checkpoint, or the one that `latest` in a folder of them names, and verifies all of it: hashes of weights
 * and optimizer state. Gives; ari_checkpoint_close. Errors: AR_ERR_IO; AR_ERR_NOT_FOUND (no checkpoint there);
 * AR_ERR_FORMAT (malformed; a version that this program does not read); AR_ERR_DATA ("damaged": a hash differs);
 * AR_ERR_MEMORY. Threads: an open checkpoint may be read by many. */
void ari_checkpoint_close(ar_checkpoint *c);
/** The folder with training.json in it, links resolved. Borrowed. */
const char *ari_checkpoint_path(const ar_checkpoint *c);
/** Borrowed, arrays and strings included. */
const ar_checkpoint_state *ari_checkpoint_state_of(const ar_checkpoint *c);
/** Hash of the weights; borrowed. */
const char *ari_checkpoint_weights_hash(const ar_checkpoint *c);
/** Puts this rank's parts of weights and optimizer state back, under any layout. Strict: the checkpoint has every
 *  parameter, of its shape, and nothing else (of a rank in a pipeline: but for other stages'). optimizer NULL: weights
 *  alone. Errors: AR_ERR_NOT_FOUND, AR_ERR_SHAPE,
 *  AR_ERR_DTYPE, AR_ERR_FORMAT (something else), each naming the tensor; those of ar_optimizer_load. */
AR_NODISCARD ar_status ari_checkpoint_load(const ar_checkpoint *c, ar_ctx *ctx, ar_param *const *params, size_t n,
                                           ar_optimizer *optimizer);
/** As ari_model_set's find: the full tensor of a parameter, or NULL. user: an ar_checkpoint. */
const float *ari_checkpoint_find(void *user, const char *name, size_t count);

AR_END_DECLS
