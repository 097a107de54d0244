/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CONTEXT_H
#define ANYRANK_CONTEXT_H

#include "anyrank/batch.h"
#include "anyrank/comm.h"
#include "anyrank/device.h"
#include "anyrank/fault.h"
#include "anyrank/schedule.h"

AR_BEGIN_DECLS

/* A rank's context: its device, its groups, its arithmetic, its memory for one step, who listens. One per rank, used by
 * that rank's thread alone. Nothing of it is global. */
typedef struct ar_ctx ar_ctx;
typedef struct ar_arith_ops ar_arith_ops;

typedef enum ar_numerics { AR_NUMERICS_EXACT, AR_NUMERICS_NATIVE } ar_numerics;

/* ar_precision: what the native numerics multiply. Whatever it is, products are added up in fp32, and updates are made
 * of fp32 weights. AR_PRECISION_TF32: operands are rounded to 11 bits of significand. AR_PRECISION_BF16: activations
 * and parameters of two dimensions, and the gradients of both, lie in memory as bf16 numbers, 2 bytes each, and move so
 * between ranks; what has one dimension (biases, norms' gains), statistics of rows and the loss are fp32. */

/* The part of a block's forward pass that the backward pass recomputes instead of saving its activations. */
typedef enum ar_recompute {
    AR_RECOMPUTE_NONE,
    AR_RECOMPUTE_SELECTIVE, /* the attention: from its input on all but its last layer, whose input is kept no more; and
                               modules of one's own that say so (ar_module_ops.selective) */
    AR_RECOMPUTE_FULL,      /* all of a block, from its input (Chen et al. 2016, arXiv:1604.06174) */
    AR_RECOMPUTES
} ar_recompute;
typedef struct ar_recomputation {
    ar_recompute what;
    int every; /* of every so many blocks, counted from block 0, the first is computed again; 0 counts as 1 */
} ar_recomputation;

/** A complete value (never a partial sum) of a rank, at the moment it exists. `local`, fp32, lies in the host's memory
 * (a copy, where the host does not reach the device's, or the value has 16 bits) as `layout` says: box k copies
 * local[box.local ..] <-> global[box.global ..]. Valid during the call only. */
typedef struct ar_tap_event {
    const char *name; /* models.md, without the pass */
    char pass;        /* 'i' initial, 'f' forward, 'b' backward, 'g' gradient of a parameter, 'c' clipping, 'n' new,
                       * 'm', 'v' an optimizer's moments */
    uint32_t step;    /* of ari_ctx_begin_step; 1 before the first */
    const ar_tensor *local;
    const ar_layout *layout;
} ar_tap_event;
/** Called on the rank's own thread; may copy, must not wait for a peer. A failure ends the rank. */
typedef ar_status (*ar_tap_fn)(void *user, const ar_tap_event *event);

/** The context-parallel ranks of a sequence (ar_parallel), borrowed; NULL: this one alone. ar_parallel_groups_begin
 *  makes them and the other groups of a layout; examples/train_dp.c uses it. */
typedef struct ar_context_groups {
    ar_comm *all;
    ar_comm *ring;  /* of them, those that pass keys and values on; NULL: a group of one */
    ar_comm *inner; /* of them, those that exchange heads for positions; NULL: a group of one */
    bool zigzag;
} ar_context_groups;

/** How tokens reach the experts of other ranks. The experts' rows come back by an all-to-all either way: a
 *  reduce-scatter would add the rows of a token rank by rank, in an order that depends on ep. */
typedef enum ar_dispatch {
    AR_DISPATCH_ALL_TO_ALL, /* each row, a token's for one of its experts, goes to the rank that has the expert */
    AR_DISPATCH_ALL_GATHER, /* each token goes to all ranks of the group once: fewer bytes where it has more experts
                               than the group has ranks */
    AR_DISPATCHES
} ar_dispatch;

/** The expert-parallel ranks (ar_parallel.ep), borrowed; all NULL: every rank has all experts. */
typedef struct ar_expert_groups {
    ar_comm *all;       /* who share out the experts; its rank says which ones this rank has */
    ar_comm *copies;    /* who have the same experts: their gradients are summed over it, in place of dp */
    ar_comm *shard;     /* of copies, those that share out what ZeRO does not keep whole; NULL: all of them */
    ar_comm *replicate; /* of copies, those that have the same share; NULL: this one alone */
    ar_comm *sequence;  /* of copies, those that have tokens of the same samples; NULL: this one alone */
    ar_dispatch dispatch;
    bool whole; /* experts are not cut over the tensor-parallel ranks, which are among these (ar_parallel.etp) */
} ar_expert_groups;

/** Number of layers of each stage of a pipeline. Plain data; n = 0: evenly (ari_stage_layers). */
typedef struct ar_stages {
    int n;
    uint16_t layers[AR_MAX_STAGES];
} ar_stages;
/** The pipeline that a rank is in, borrowed: who has the other stages of the same samples. Stage s of the S = ranks *
 *  virtual_stages is rank s mod ranks's. All zero: no pipeline. */
typedef struct ar_context_pipeline {
    ar_comm *all;       /* its rank is the pipeline rank; NULL: a group of one */
    ar_comm *ends;      /* of them, those of the first and the last stage; NULL elsewhere, and without a pipeline */
    int virtual_stages; /* that each rank has; 0 counts as 1 */
    ar_stages stages;
} ar_context_pipeline;

/* Whether a value that is not placed over the tensor-parallel ranks as an operator or a layer declares it ends the pass
 * with AR_ERR_DATA, naming module, rank and both placements. What a module makes by itself is known by its reports. */
typedef enum ar_declared_check {
    AR_DECLARED_BY_BUILD, /* it does where the library was built without NDEBUG, as by the preset debug */
    AR_DECLARED_CHECKED,  /* it does: placements are kept of every value of the step */
    AR_DECLARED_TRUSTED   /* a wrong one is a difference of numbers */
} ar_declared_check;

typedef struct ar_ctx_options {
    ar_device *device;      /* borrowed until ar_ctx_destroy */
    ar_comm *tp;            /* tensor-parallel group, borrowed; NULL: a group of one */
    ar_comm *dp;            /* the group over which gradients are summed: the data-parallel ranks, and with them the
                          context-parallel ones, who are neighbours in it; borrowed; NULL: a group of one */
    ar_comm *shard;         /* of dp, the ranks that share out what ZeRO does not keep whole; NULL: all of them */
    ar_comm *replicate;     /* of dp, those that have the same share; NULL: this one alone */
    ar_context_groups cp;   /* who share a sequence; all zero: nobody */
    ar_expert_groups ep;    /* who share the experts; all NULL: nobody */
    ar_context_pipeline pp; /* who share the layers; all zero: this one has them all */
    ar_comm *world;         /* all ranks, borrowed; NULL: the tensor-parallel group, where neither cp.inner
                             nor pp has peers */
    ar_numerics numerics;
    ar_precision precision; /* of the native numerics; exact ones have F32 only */
    ar_dtype storage;       /* of the parameters of two dimensions and their gradients: AR_F32, or AR_BF16, in native
                         numerics: 2 bytes each, the fp32 ones are the optimizer's. 0: what the precision says */
    bool sp;                /* sequence parallelism over tp (ar_parallel); layers ask when they are made */
    bool keep_gathered;     /* of ar_parallel */
    int overlap;            /* of ar_parallel; below 2: not */
    ar_recomputation recompute; /* of ar_parallel; blocks ask when they are made */
    double dropout;             /* probability, below 1; 0: none */
    uint64_t seed;              /* of the dropout masks */
    ar_loss_options loss;       /* of every cross-entropy made in it: LM heads, ar_cross_entropy_create */
    ar_declared_check placements;
    ar_fault fault;   /* AR_FAULT_NONE */
    uint64_t attempt; /* of how many runs alike this is: what a fault does may differ from run to run */
    ar_tap_fn tap;    /* NULL: nobody listens */
    void *tap_user;
} ar_ctx_options;

/** Gives a context; ar_ctx_destroy. Borrows the device and the group of the options until then; the options themselves
 *  until return. Errors: AR_ERR_ARG (no device, a dropout outside [0, 1), ari_loss_options_check, a storage or a
 *  precision that the numerics do not have), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_create(ar_ctx **out, const ar_ctx_options *o);
/** Frees all memory of the step too. Accepts NULL. */
void ar_ctx_destroy(ar_ctx *c);

/** A fresh contiguous tensor, contents undefined, that lives until ari_ctx_end_step or ar_ctx_release.
 *  Errors: AR_ERR_ARG (ndim), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_tensor(ar_ctx *c, ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape);
/** Gives memory back before the end of the step. `t` may be a view of the whole; t->data must be what ar_ctx_tensor
 *  gave. NULL data is fine. */
void ar_ctx_release(ar_ctx *c, ar_tensor *t);
/** Copies all elements of a contiguous `t` from or to the host, where they have its size, row-major. Borrows `host`
 *  until return. Errors: those of the device. */
AR_NODISCARD ar_status ar_ctx_upload(ar_ctx *c, const ar_tensor *t, const void *host);
AR_NODISCARD ar_status ar_ctx_download(ar_ctx *c, void *host, const ar_tensor *t);
/** The same of a `t` of AR_F32 or AR_BF16 and fp32 numbers on the host: what goes to AR_BF16 is rounded to nearest,
 *  ties to even. Errors: also AR_ERR_DTYPE, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_upload_floats(ar_ctx *c, const ar_tensor *t, const float *host);
AR_NODISCARD ar_status ar_ctx_download_floats(ar_ctx *c, float *host, const ar_tensor *t);

AR_END_DECLS
#endif
