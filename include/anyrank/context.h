/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CONTEXT_H
#define ANYRANK_CONTEXT_H

#include "anyrank/batch.h"
#include "anyrank/comm.h"
#include "anyrank/device.h"
#include "anyrank/schedule.h"

AR_BEGIN_DECLS

/* A rank's context: its device, communicators, arithmetic, tap, and its step memory. Step memory is device memory for
 * activations, gradients of activations and temporaries; it is freed when the training step ends. Each rank has one
 * context, which only the rank's own thread uses. There is no global state. */
typedef struct ar_ctx ar_ctx;
typedef struct ar_arith_ops ar_arith_ops;

/* The arithmetic. EXACT: sums are order-independent, so that every parallel layout gives the same bits. NATIVE: the
 * usual fp32 or bf16 arithmetic of the device, whose rounding depends on the layout. numerics.md explains both. */
typedef enum ar_numerics { AR_NUMERICS_EXACT, AR_NUMERICS_NATIVE } ar_numerics;

/* ar_precision (device.h): the number format of native matrix products. With all of them products are accumulated in
 * fp32, and the optimizer updates fp32 weights. AR_PRECISION_TF32: operands are rounded to 11 bits of significand.
 * AR_PRECISION_BF16: activations, 2-D parameters, and the gradients of both are stored and communicated as bf16; 1-D
 * parameters (biases, gains of norms), row statistics and the loss are fp32. */

/* The part of a block's forward pass that the backward pass recomputes instead of saving its activations. */
typedef enum ar_recompute {
    AR_RECOMPUTE_NONE,
    AR_RECOMPUTE_SELECTIVE, /* attention except its output projection, and modules with ar_module_ops.selective; the
                               attention's input is saved, the output projection's input is not */
    AR_RECOMPUTE_FULL,      /* the whole block; only its input is saved (Chen et al. 2016, arXiv:1604.06174) */
    AR_RECOMPUTES
} ar_recompute;
/** Which blocks recompute what. */
typedef struct ar_recomputation {
    ar_recompute part;
    int every; /* blocks 0, every, 2*every, .. recompute, the others save all activations; 0 counts as 1 */
} ar_recomputation;

/** A complete value (never a partial sum) that a rank reports to its tap as soon as it is computed. The pointers are
 *  valid during the call only. */
typedef struct ar_tap_event {
    const char *name; /* Hugging Face path of the module or parameter (models.md), without a suffix for the pass */
    char pass;     /* 'i' initial parameter, 'f' forward, 'b' backward, 'g' gradient of a parameter, 'c' the gradients'
                       * norm, 'n' updated parameter, 'm' and 'v' the optimizer's moments */
    uint32_t step; /* 1 for the first training step, and before it */
    const ar_tensor *local;  /* this rank's part, fp32, in host memory (a copy if needed) */
    const ar_layout *layout; /* which elements of the full value `local` holds */
} ar_tap_event;
/** A tap: a user's callback for each reported value, on the rank's thread. It may not wait for ranks. An error ends the
 *  rank. */
typedef ar_status (*ar_tap_fn)(void *user, const ar_tap_event *event);

/** The context-parallel groups of a rank (ar_parallel.cp): each rank has some positions of the same sequences. The
 *  communicators are borrowed; all NULL: no context parallelism. ar_parallel_groups_begin creates these and all other
 *  groups of a layout; examples/train_dp.c uses it. */
typedef struct ar_context_groups {
    ar_comm *group; /* all context-parallel ranks */
    ar_comm *ring;  /* the subgroup of ring attention, which passes keys and values around; NULL: a group of one */
    ar_comm *inner; /* the subgroup of all-to-all attention, heads against positions; NULL: a group of one */
    bool zigzag;    /* ar_parallel.zigzag */
} ar_context_groups;

/** The collective that sends tokens to the experts of other ranks. The experts' outputs always return by an all-to-all:
 *  a reduce-scatter would add a token's outputs in an order that depends on the number of expert-parallel ranks. */
typedef enum ar_dispatch {
    AR_DISPATCH_ALL_TO_ALL, /* sends a token's row once for each of its k experts, to the rank that holds the expert */
    AR_DISPATCH_ALL_GATHER, /* sends each token's row once to every rank of the group: fewer bytes if a token has more
                               experts than the group has ranks */
    AR_DISPATCHES
} ar_dispatch;

/** The expert-parallel groups of a rank (ar_parallel.ep). Communicators are borrowed; NULL: every rank has all
 *  experts. */
typedef struct ar_expert_groups {
    ar_comm *group;     /* the expert-parallel group: its ranks hold equal runs of each layer's experts, in rank
                           order */
    ar_comm *copies;    /* the ranks that hold the same experts; their gradients are summed over it instead of dp */
    ar_comm *shard;     /* the subgroup of `copies` over which ZeRO shards; NULL: all of `copies` */
    ar_comm *replicate; /* the subgroup of `copies` that holds the same ZeRO shard; NULL: this rank alone */
    ar_comm *sequence;  /* the subgroup of `copies` that holds tokens of the same samples; NULL: this rank alone */
    ar_dispatch dispatch;
    bool whole; /* tensor-parallel ranks, which belong to `group`, do not shard experts (ar_parallel.etp 1) */
} ar_expert_groups;

/** Number of layers of each pipeline stage. Plain data. n = 0: equal numbers; if the stages do not divide the layers,
 *  the first and the last stage get fewer. */
typedef struct ar_stages {
    int n;                          /* entries of layers[] */
    uint16_t layers[AR_MAX_STAGES]; /* layers of stage 0, 1, .. */
} ar_stages;
/** The pipeline of a rank: the ranks that hold the other stages for the same samples. Of the P * virtual_stages stages
 *  rank r of P has stages r, r + P, .. The communicators are borrowed. All zero: no pipeline. */
typedef struct ar_context_pipeline {
    ar_comm *group;     /* all pipeline ranks, in stage order; NULL: a group of one */
    ar_comm *ends;      /* the ranks of the first and the last stage, on these two; NULL: on others, or no pipeline */
    int virtual_stages; /* stages of each rank; 0 counts as 1 */
    ar_stages stages;
} ar_context_pipeline;

/* Whether a forward or backward pass checks that each value is placed over the tensor-parallel ranks (placement.h) as
 * the layer or operator that uses it declares. A failed check ends the pass with AR_ERR_DATA, whose message names
 * module, rank and both placements. The placement of values of a user's module is known when it reports them. */
typedef enum ar_declared_check {
    AR_DECLARED_BY_BUILD, /* checked if the library was built without NDEBUG (the preset debug) */
    AR_DECLARED_CHECKED,  /* checked: the placement of every value of a step is recorded */
    AR_DECLARED_TRUSTED   /* not checked: a wrong placement gives wrong numbers */
} ar_declared_check;

/** Options of a context. Communicators are borrowed until ar_ctx_destroy; NULL is a group of one. */
typedef struct ar_ctx_options {
    ar_device *device;      /* borrowed until ar_ctx_destroy */
    ar_comm *tp;            /* tensor-parallel group */
    ar_comm *dp;            /* the group that sums gradients: data-parallel and (adjacent) context-parallel ranks */
    ar_comm *shard;         /* the subgroup of dp over which ZeRO shards; NULL: all of dp */
    ar_comm *replicate;     /* the subgroup of dp that holds the same ZeRO shard */
    ar_context_groups cp;   /* all zero: no context parallelism */
    ar_expert_groups ep;    /* all NULL: every rank holds all experts */
    ar_context_pipeline pp; /* all zero: this rank holds all layers */
    ar_comm *world;         /* all ranks; NULL (allowed if cp.inner and pp are groups of one): tp */
    ar_numerics numerics;
    ar_precision precision;       /* of native numerics; exact numerics have AR_PRECISION_F32 only */
    ar_dtype storage;             /* dtype of 2-D parameters and their gradients: AR_F32, or with native numerics
                                     AR_BF16, where the optimizer holds the fp32 weights; 0: chosen by `precision` */
    bool sp;                      /* sequence parallelism over tp (ar_parallel.sp); read when layers are created */
    bool keep_gathered;           /* ar_parallel.keep_gathered */
    int overlap;                  /* ar_parallel.overlap; below 2: none */
    ar_recomputation recompute;   /* activation recomputation; read when blocks are created */
    double dropout;               /* probability in [0, 1) */
    uint64_t seed;                /* of the dropout masks */
    ar_loss_options loss;         /* of every cross-entropy created in this context */
    ar_declared_check placements; /* whether declared placements are checked */
    const char *fault;            /* name of a bug to inject (anyrank bugs lists them), borrowed; NULL: none */
    uint64_t attempt;             /* number of this run among repeated runs; some faults depend on it */
    ar_tap_fn tap;                /* called for each reported value; NULL: none */
    void *tap_user;               /* first argument of tap */
} ar_ctx_options;

/** Creates a context. The caller releases *out with ar_ctx_destroy. The options are copied; device and communicators
 *  must outlive the context. Errors: AR_ERR_ARG (no device, a dropout outside [0, 1), loss options out of range, a
 *  storage or precision that the numerics do not support), AR_ERR_NOT_FOUND (no fault of this name), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_create(ar_ctx **out, const ar_ctx_options *options);
/** Frees a context and its step memory. Accepts NULL. */
void ar_ctx_destroy(ar_ctx *ctx);

/** Begins training step `step`, from 1: dropout masks depend on this number and the tap reports it. Before the first
 *  call the number is 1. */
void ar_ctx_begin_step(ar_ctx *ctx, uint32_t step);
/** Ends a step: waits for the communication of layers that is still in flight and frees all step memory. Tensors of
 *  the step and the activations in every ar_saved become invalid. Weights, gradients and optimizer state stay.
 *  ar_train_step and ar_module_train_step begin and end their step themselves. */
void ar_ctx_end_step(ar_ctx *ctx);

/* What a module needs of its context. The context owns or borrows the results; the caller does not destroy them. */
/** Returns the tensor-parallel group, in which ar_comm_rank and ar_comm_size are a layer's rank and number of ranks; a
 *  group of one if the options have none. */
ar_comm *ar_ctx_tp(const ar_ctx *ctx);
/** Returns the group over which gradients are summed: the data-parallel, and with context parallelism the
 *  context-parallel ranks; a group of one if the options have none. */
ar_comm *ar_ctx_dp(const ar_ctx *ctx);
/** Returns the device of the options. */
ar_device *ar_ctx_device(const ar_ctx *ctx);
/** Returns the main queue, on which layers enqueue their kernels and collectives. */
ar_queue *ar_ctx_queue(const ar_ctx *ctx);
/** Writes the bytes of step memory that are allocated now to *current, and the most that were allocated at once since
 *  the context was created to *peak. Either pointer may be NULL. */
void ar_ctx_memory(const ar_ctx *ctx, size_t *current, size_t *peak);

/** Allocates a contiguous tensor of `shape` [ndim] in step memory; its contents are undefined. It is freed when the
 *  step ends, or earlier by ar_ctx_release. Errors: AR_ERR_ARG (ndim), AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_tensor(ar_ctx *ctx, ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape);
/** Frees the step memory of a tensor before the step ends. t may be a view with another shape, but t->data must be the
 *  pointer that ar_ctx_tensor set; a NULL pointer is ignored. */
void ar_ctx_release(ar_ctx *ctx, ar_tensor *t);
/** ar_ctx_upload copies row-major host memory of t's dtype into the contiguous tensor t, ar_ctx_download copies t into
 *  host memory. `host` is borrowed until return. Errors: those of the device. */
AR_NODISCARD ar_status ar_ctx_upload(ar_ctx *ctx, const ar_tensor *t, const void *host);
AR_NODISCARD ar_status ar_ctx_download(ar_ctx *ctx, void *host, const ar_tensor *t);
/** As ar_ctx_upload, for a tensor t of AR_F32 or AR_BF16 and host[0, count), its elements as fp32 numbers; for AR_BF16
 *  they are rounded to nearest, ties to even. Errors: also AR_ERR_SHAPE (t does not have `count` elements),
 *  AR_ERR_DTYPE, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_upload_floats(ar_ctx *ctx, const ar_tensor *t, const float *host, size_t count);
/** As ar_ctx_download, for a tensor t of AR_F32 or AR_BF16: writes its elements as fp32 numbers to `host`, which has
 *  room for cap of them. Errors: also AR_ERR_SHAPE (t has more than cap elements; nothing is written), AR_ERR_DTYPE,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_ctx_download_floats(ar_ctx *ctx, float *host, size_t cap, const ar_tensor *t);

AR_END_DECLS
#endif
