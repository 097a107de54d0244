/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_RUN_H
#define ANYRANK_RUN_H

#include "anyrank/config.h"
#include "anyrank/ddp.h"
#include "anyrank/device.h"
#include "anyrank/optimizer.h"
#include "anyrank/parallel.h"
#include "anyrank/process.h"
#include "anyrank/sim.h"

AR_BEGIN_DECLS

/** A run: what is trained, how a step is split over ranks, in which arithmetic, and on what the ranks run. A check, a
 *  training run, a file of gradients and the estimate of any of them take one, and a few fields of their own. All zero
 *  is one forward and backward on one rank in exact numerics. Strings and pointers are borrowed. */
typedef struct ar_run {
    const char *model; /* folder, .json file or bundled name */
    size_t shrink; /* n: the model becomes about 1/n in each size (ari_config_shrink), with fresh weights; 0 or 1: it
                          is as it is */
    size_t mtp;    /* blocks for further tokens in place of the file's, as of `num_nextn_predict_layers`; 0: the
                          file's */
    double mtp_weight; /* of their losses; 0: 0.1 */
    ar_plan plan;
    ar_parallel parallel;
    size_t batch, seq; /* of a step, all ranks together: sequences, and tokens of each */
    uint64_t steps;    /* of training; 0: one forward and backward, no update */
    ar_optimizer_options optimizer;
    double clip;          /* largest gradient norm; 0: none */
    double dropout;       /* probability; 0: none */
    ar_loss_options loss; /* of a model with logits */
    ar_ddp_options ddp; /* how gradients are summed over dp; its `zero` comes from the layout. {0}: one bucket for each
                           parameter */
    ar_numerics numerics;
    ar_precision precision;       /* of exact numerics: AR_PRECISION_F32, AR_PRECISION_BF16 */
    ar_dtype storage;             /* of ar_ctx_options: alone AR_BF16 in native numerics; 0: what the precision says */
    ar_declared_check placements; /* of values that nobody listens to and no fault changes; else they are trusted */
    uint64_t seed;                /* of fresh weights, of dropout, and of the place in the data */
    ar_fault fault;
    ar_device_choice device; /* of the ranks: those of one process share it, unless its index is AR_GPU_EACH; ranks of
                                processes take the GPU of their local number. The baseline runs on the host */
    ar_process *process;     /* ranks are processes, and this is one of them: all of them make the same calls, a layout
                                has as many ranks, and process 0 gets the results. NULL: threads of this one */
    int threads;             /* of the whole process, shared by the ranks; 0: the cores of the machine */
    ar_sim_options sim;      /* how they communicate. timeout_ns 0: 60 s; algorithm AR_SIM_AUTO: direct */
} ar_run;

/** Refuses a run that no model with this config could take: sizes, optimizer, clipping, dropout, arithmetic, positions,
 *  layout. Errors: AR_ERR_ARG, AR_ERR_SHAPE (a sequence longer than the model's), AR_ERR_CONFIG (rotary angles out of
 *  range), AR_ERR_INDIVISIBLE and AR_ERR_UNSUPPORTED (the layout). */
AR_NODISCARD ar_status ar_run_check(const ar_run *r, const ar_config *c);

/* Kinds of a rank's memory: field, name in JSON, name in tables. */
/* clang-format off */
#define AR_RANK_MEMORY_TABLE(X)                                                                               \
    X(weights, "weights", "weights")       /* 4 bytes an element, of BF16 matrices 2 */                       \
    X(operands, "operands", "kept operands") /* exact: weights as integers with their exponents, kept for     \
                                                products until the weights change */                          \
    X(gradients, "gradients", "gradients") /* exact: accumulators, 17 bytes an element; native: as weights */ \
    X(optimizer, "optimizer", "optimizer") /* its state, and fp32 weights beside those of 16 bits */          \
    X(buckets, "buckets", "buckets")       /* gradients on their way between ranks */                         \
    X(stored, "activations_stored", "kept for backward") /* of a step: what forward passes leave */           \
    X(peak, "activations_peak", "most of a step")        /* of a step: the most at once, with the integers of \
                                                            its products */
/* clang-format on */

/** Bytes that a rank of a run holds: of parameters what outlives the steps, of a step the most. */
typedef struct ar_rank_memory {
#define AR_RANK_MEMORY_FIELD(field, json, title) size_t field;
    AR_RANK_MEMORY_TABLE(AR_RANK_MEMORY_FIELD)
#undef AR_RANK_MEMORY_FIELD
} ar_rank_memory;

AR_END_DECLS
#endif
