/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CHECKPOINT_H
#define ANYRANK_CHECKPOINT_H

#include "anyrank/arch.h"
#include "anyrank/context.h"
#include "anyrank/data.h"
#include "anyrank/optimizer.h"

AR_BEGIN_DECLS

struct ar_optimizer; /* train.h */
struct ar_param;     /* param.h */

/* Checkpoints of a training run. They hold full tensors, so that a run can resume under another parallel layout
 * (train.md).
 *   FOLDER/step-00000057/  config.json, model.safetensors     Hugging Face's format and names
 *                          optimizer.safetensors              tensors "<parameter>.<state>"
 *                          training.json                      the ar_checkpoint_state, and hashes
 *   FOLDER/latest          a symbolic link to the newest checkpoint
 * A checkpoint is written atomically, by one rename. */

#define AR_CHECKPOINT_LOSSES ((size_t)1 << 20) /* most losses that a checkpoint stores */
/** Progress and options of a run, as a checkpoint stores them. The struct does not own its arrays and strings. */
typedef struct ar_checkpoint_state {
    const char *model;        /* the model's name, for reports; NULL: none */
    uint64_t step;            /* steps done; the next is step + 1 */
    uint64_t optimizer_steps; /* updates done; fewer than `step` if loss scaling skipped some */
    uint64_t steps;           /* total steps planned; 0: not given */
    uint64_t seed;            /* ar_run.seed */
    ar_optimizer_options optimizer;
    double clip, dropout; /* largest gradient norm; dropout probability */
    ar_loss_options loss_options;
    ar_numerics numerics;
    ar_precision precision;    /* of native numerics */
    ar_dtype storage;          /* of 2-D parameters: AR_F32, AR_BF16 */
    double loss_scale;         /* current scale; 0: no loss scaling */
    uint64_t loss_scale_steps; /* updates since the scale last changed */
    bool loss_scale_static;    /* static loss scaling */
    size_t batch, seq;         /* of the global batch; 0: no ar_loader (data.h) */
    bool in_order;             /* ar_loader_options.in_order */
    ar_packing packing;        /* ar_loader_options.packing */
    const char *data_hash;     /* hash of the training data; NULL: no data, and the next three fields are unused */
    const char *data_path;     /* NULL: the bundled text */
    ar_data_format data_format;
    size_t data_tokens; /* tokens of the data */
    const float *loss;  /* [losses], of the last `losses` steps up to `step` */
    size_t losses;      /* at most AR_CHECKPOINT_LOSSES are stored */
} ar_checkpoint_state;

/* --- writing ------------------------------------------------------------------------------------------------------ */
/** Writes the checkpoints of a run; shared by all of its ranks. */
typedef struct ar_checkpoint_writer ar_checkpoint_writer;
/** Options of an ar_checkpoint_writer. */
typedef struct ar_checkpoint_options {
    const char *folder; /* created if missing */
    const char *config; /* path that ar_config_load read; its config.json is copied to every checkpoint; NULL: none */
    size_t max_checkpoints; /* number of newest checkpoints to keep; 0: all. An older one is deleted only after `latest`
                           points to a newer one, and only if it contains no foreign files */
    bool fresh;             /* a new run, not a resumed one: a folder that contains checkpoints is an error */
    struct ar_process *process; /* if each rank is a process: this process; each has a writer, and only process 0
                                   writes. Borrowed until the writer is destroyed. NULL: ranks are threads */
    const ar_config *changed;   /* config whose deviations from config.json are written to the copy; NULL: none */
} ar_checkpoint_options;

/** Creates a writer: creates the folder, locks it against other processes until ar_checkpoint_writer_destroy, and
 *  removes files that a killed process left unfinished. Copies the options. The caller releases *out. Errors: AR_ERR_IO
 *  (also: another process writes there), AR_ERR_ARG (`fresh`, but the folder has checkpoints), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_checkpoint_writer_create(ar_checkpoint_writer **out, const ar_checkpoint_options *o);
/** Unlocks the folder and frees the writer. Accepts NULL. */
void ar_checkpoint_writer_destroy(ar_checkpoint_writer *w);
/** Writes the checkpoint FOLDER/step-NNNNNNNN, replacing one of the same step, and points `latest` to it. Every rank
 *  passes its own parts of the n parameters and of the optimizer's state (NULL: weights only); copies of an element are
 *  compared, and rank 0 writes. state: rank 0's is written, other ranks may pass NULL. Collective over the context's
 *  world, which must be all ranks. All ranks get the same status and message; after an error the folder is as before,
 *  and training can continue. Errors: AR_ERR_DATA (copies differ; the message names tensor, element and two ranks),
 *  AR_ERR_IO, AR_ERR_MEMORY, AR_ERR_INTERNAL (the parts do not make up the whole tensor). */
AR_NODISCARD ar_status ar_checkpoint_save(ar_checkpoint_writer *w, ar_ctx *ctx, struct ar_param *const *params,
                                          size_t n, struct ar_optimizer *optimizer, const ar_checkpoint_state *state);

/* --- reading ------------------------------------------------------------------------------------------------------ */
typedef struct ar_checkpoint ar_checkpoint; /* an open checkpoint, to resume from */
/** Opens the checkpoint at `path`, or the one that `latest` in the folder `path` points to, and verifies the hashes of
 *  weights and optimizer state. Any thread may read an open checkpoint. The caller releases *out with
 *  ar_checkpoint_close. Errors: AR_ERR_NOT_FOUND (no checkpoint there), AR_ERR_FORMAT (malformed, or of a version that
 *  this library does not read), AR_ERR_DATA (damaged: a hash differs), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_checkpoint_open(ar_checkpoint **out, const char *path);
/** Closes a checkpoint. Accepts NULL. */
void ar_checkpoint_close(ar_checkpoint *c);
/** Returns progress and options of the run; the checkpoint owns them. */
const ar_checkpoint_state *ar_checkpoint_state_of(const ar_checkpoint *c);
/** Restores this rank's parts of n parameters and of the optimizer's state (NULL: weights only), under any layout. The
 *  checkpoint must have every parameter in its shape and no other (on a rank of a pipeline, those of other stages are
 *  allowed). Errors: AR_ERR_NOT_FOUND, AR_ERR_SHAPE, AR_ERR_DTYPE, AR_ERR_FORMAT (a tensor too many), each naming the
 *  tensor; those of ar_optimizer_load. */
AR_NODISCARD ar_status ar_checkpoint_load(const ar_checkpoint *c, ar_ctx *ctx, struct ar_param *const *params, size_t n,
                                          struct ar_optimizer *optimizer);

AR_END_DECLS
#endif
