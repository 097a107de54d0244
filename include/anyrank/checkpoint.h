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
    const char *data_hash;     /* of ari_data_hash; NULL: no data, and the three below mean nothing */
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

/* --- reading ------------------------------------------------------------------------------------------------------ */
typedef struct ar_checkpoint ar_checkpoint;

AR_END_DECLS
#endif
