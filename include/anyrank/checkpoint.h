/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECKPOINT_H
#define ANYRANK_CHECKPOINT_H

#include "anyrank/data.h"
#include "anyrank/train.h"

AR_BEGIN_DECLS

/* Checkpoints of a training run, independent of the layout that wrote them: full tensors on disk, train.md.
 *   FOLDER/step-00000057/  config.json, model.safetensors     Hugging Face's layout and names
 *                          optimizer.safetensors              "<parameter>.<state>"
 *                          training.json                      what ar_checkpoint_state has, and hashes
 *   FOLDER/latest          a symbolic link to the newest
 * A checkpoint appears whole, by one rename, or not at all. */

#define AR_CHECKPOINT_LOSSES ((size_t)1 << 20)
/** Progress of a run. Borrows its arrays and strings. */
typedef struct ar_checkpoint_state {
    const char *model;        /* its name, for reports; NULL: none */
    uint64_t step;            /* steps done; the next is step + 1 */
    uint64_t optimizer_steps; /* updates done (fewer, where loss scaling has left some out) */
    uint64_t steps;           /* that the run shall have in all; 0: not said */
    uint64_t seed;
    ar_optimizer_options optimizer;
    double clip, dropout;
    ar_loss_options loss_options;
    ar_numerics numerics;
    ar_precision precision;    /* of native numerics */
    ar_dtype storage;          /* of the matrices: AR_F32, AR_BF16 */
    double loss_scale;         /* 0: no loss scaling */
    uint64_t loss_scale_steps; /* since it last changed */
    bool loss_scale_static;    /* it never does */
    size_t batch, seq;         /* of a global batch; 0: no ar_loader */
    bool in_order;             /* of the loader */
    ar_packing packing;        /* of the loader */
    const char *data_hash;     /* of ar_data_hash; NULL: no data, and the three below mean nothing */
    const char *data_path;     /* NULL: the bundled text */
    ar_data_format data_format;
    size_t data_tokens;
    const float *loss; /* [losses], of the last `losses` steps up to `step`; a checkpoint keeps AR_CHECKPOINT_LOSSES */
    size_t losses;
} ar_checkpoint_state;

/* --- writing ------------------------------------------------------------------------------------------------------ */
/** One per run, shared by all its ranks. */
typedef struct ar_checkpoint_writer ar_checkpoint_writer;
typedef struct ar_checkpoint_options {
    const char *folder; /* made where it is missing */
    const char *config; /* what ar_config_load read: its config.json is copied into every checkpoint as it is now; NULL:
                           a model without one */
    size_t keep;        /* how many stay, the new one included; 0: all. An older one goes only when `latest` names a
                           newer one, and only if it holds nothing but what was written here */
    bool fresh;         /* a new run, not a resumed one: a folder with checkpoints in it is refused */
    struct ar_process *process; /* ranks are processes: each has a writer, and process 0's alone touches the folder.
                                   NULL: threads. Borrowed until destroy */
    const ar_config *changed;   /* what the model has otherwise than its config.json, which is written; NULL: nothing */
} ar_checkpoint_options;
/** Prepares the folder, and locks it against a second process until destroy; removes what a killed process left half
 *  written. Copies the options. Gives. Errors: AR_ERR_IO (also: another process writes there), AR_ERR_ARG (`fresh`, and
 *  there are checkpoints), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_checkpoint_writer_create(ar_checkpoint_writer **gives, const ar_checkpoint_options *o);
/** Accepts NULL. */
void ar_checkpoint_writer_destroy(ar_checkpoint_writer *w);
/** Writes FOLDER/step-NNNNNNNN and lets `latest` name it; a checkpoint of the same step is replaced. Every rank hands
 *  over its parts of the parameters and of the optimizer's state; rank 0 writes. All copies of an element are compared.
 *  optimizer NULL: no state. state: rank 0's is written, others may pass NULL. Experts are stacked where the family's
 *  files have them so (GPT-OSS). Collective over the context's world (which must be all ranks); all ranks get the same
 *  status and message, so that training can go on after a failure, which leaves the folder as it was. Errors: AR_ERR_DATA
 *  (copies differ: names the tensor, the element and two ranks), AR_ERR_IO, AR_ERR_MEMORY, AR_ERR_INTERNAL (parts that do
 *  not make a whole). */
AR_NODISCARD ar_status ar_checkpoint_save(ar_checkpoint_writer *w, ar_ctx *ctx, ar_param *const *params, size_t n,
                                          ar_optimizer *optimizer, const ar_checkpoint_state *state);
/** The folder of the last checkpoint written; "" before the first. Borrowed until the next save. */
const char *ar_checkpoint_written(const ar_checkpoint_writer *w);

/* --- reading ------------------------------------------------------------------------------------------------------ */
typedef struct ar_checkpoint ar_checkpoint;
/** Opens a checkpoint, or the one that `latest` in a folder of them names, and verifies all of it: hashes of weights
 * and optimizer state. Gives; ar_checkpoint_close. Errors: AR_ERR_IO; AR_ERR_NOT_FOUND (no checkpoint there);
 * AR_ERR_FORMAT (malformed; a version that this program does not read); AR_ERR_DATA ("damaged": a hash differs);
 * AR_ERR_MEMORY. Threads: an open checkpoint may be read by many. */
AR_NODISCARD ar_status ar_checkpoint_open(ar_checkpoint **gives, const char *path);
void ar_checkpoint_close(ar_checkpoint *c);
/** The folder with training.json in it, links resolved. Borrowed. */
const char *ar_checkpoint_path(const ar_checkpoint *c);
/** Borrowed, arrays and strings included. */
const ar_checkpoint_state *ar_checkpoint_state_of(const ar_checkpoint *c);
/** Hash of the weights; borrowed. */
const char *ar_checkpoint_weights_hash(const ar_checkpoint *c);
/** Puts this rank's parts of weights and optimizer state back, under any layout. Strict: the checkpoint has every
 *  parameter, of its shape, and nothing else (of a rank in a pipeline: but for other stages'). optimizer NULL: weights
 *  alone. Errors: AR_ERR_NOT_FOUND, AR_ERR_SHAPE,
 *  AR_ERR_DTYPE, AR_ERR_FORMAT (something else), each naming the tensor; those of ar_optimizer_load. */
AR_NODISCARD ar_status ar_checkpoint_load(const ar_checkpoint *c, ar_ctx *ctx, ar_param *const *params, size_t n,
                                          ar_optimizer *optimizer);
/** As ar_model_set's find: the full tensor of a parameter, or NULL. user: an ar_checkpoint. */
const float *ar_checkpoint_find(void *user, const char *name, size_t count);

AR_END_DECLS
#endif
