/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_RUN_H
#define ANYRANK_RUN_H

#include "anyrank/arch.h"
#include "anyrank/ddp.h"
#include "anyrank/device.h"
#include "anyrank/optimizer.h"
#include "anyrank/parallel.h"
#include "anyrank/plan.h"
#include "anyrank/process.h"
#include "anyrank/sim.h"

AR_BEGIN_DECLS

/** A run: the model, the parallel layout, the arithmetic and the devices of a training run or a single step. Options of
 *  checks (check.h), training (training.h) and gradient files (grads.h) contain one. All zero means one forward and
 *  backward pass on one rank in exact numerics (ar_numerics in context.h). Strings and pointers are borrowed. */
typedef struct ar_run {
    const char *model;    /* folder, .json file or name of a bundled model (ar_model_path) */
    size_t shrink;        /* n > 1: layers, widths and vocabulary become about 1/n, with fresh weights */
    size_t mtp;           /* number of multi-token-prediction blocks, overriding num_nextn_predict_layers of
                             config.json; 0: that of the file */
    double mtp_weight;    /* factor of their losses; 0: 0.1 */
    ar_plan plan;         /* how modules are sharded over tensor-parallel ranks */
    ar_parallel parallel; /* the parallel layout */
    size_t batch, seq;    /* global batch of a step: sequences, and tokens of each */
    uint64_t steps;       /* training steps; 0: one forward and backward pass without update */
    ar_optimizer_options optimizer;
    double clip;          /* largest gradient norm; 0: no clipping */
    double dropout;       /* probability; 0: none */
    ar_loss_options loss; /* of models with logits */
    ar_ddp_options ddp;   /* how gradients are reduced over the data-parallel ranks; `zero` is ignored in favour of
                             parallel.zero. {0}: one bucket for each parameter */
    ar_numerics numerics;
    ar_precision precision;       /* exact numerics: AR_PRECISION_F32 or AR_PRECISION_BF16 */
    ar_dtype storage;             /* ar_ctx_options.storage: AR_BF16 with native numerics; 0: chosen by the precision */
    ar_declared_check placements; /* ar_ctx_options.placements; checked only without tap and fault */
    uint64_t seed;                /* of fresh weights, dropout masks and the choice of training data */
    const char *fault;            /* name of a bug to inject (anyrank bugs lists them), borrowed; NULL: none */
    ar_device_choice device; /* device of the ranks: shared by ranks that are threads unless index is AR_GPU_EACH; with
                                one process per rank, each process uses the GPU of its local rank. The baseline
                                (baseline.h) runs on the CPU */
    ar_process *process;     /* this process, if each rank is a process: all processes make the same calls, the layout
                                has as many ranks as there are processes, and process 0 gets the results. NULL: ranks
                                are threads */
    int threads;             /* compute threads of this process, shared by its ranks; 0: number of cores */
    ar_sim_options sim;      /* communication of ranks that are threads. timeout_ns 0: 60 s; AR_SIM_AUTO: DIRECT */
} ar_run;

/** Checks that a model with this config can be run as r says: sizes, optimizer, clipping, dropout, arithmetic,
 *  positions, layout. Errors: AR_ERR_ARG, AR_ERR_SHAPE (sequences longer than the model's maximum), AR_ERR_CONFIG (RoPE
 *  angles out of range), AR_ERR_INDIVISIBLE and AR_ERR_UNSUPPORTED (the layout), AR_ERR_NOT_FOUND
 *  (the fault). */
AR_NODISCARD ar_status ar_run_check(const ar_run *r, const ar_config *config);

/* Kinds of a rank's memory, X(field, name in JSON, name in tables). */
/* clang-format off */
#define AR_RANK_MEMORY_TABLE(X)                                                                               \
    X(weights, "weights", "weights")       /* parameters: 4 bytes an element, 2 of BF16 matrices */           \
    X(operands, "operands", "kept operands") /* exact: cached integer forms of the weights for matrix         \
                                                products */                                                   \
    X(gradients, "gradients", "gradients") /* exact: 4 bytes an element, while terms are added 17; native: as weights */ \
    X(optimizer, "optimizer", "optimizer") /* state, and fp32 copies of BF16 weights */                       \
    X(buckets, "buckets", "buckets")       /* buffers of gradient reductions */                               \
    X(stored, "activations_stored", "kept for backward") /* step memory saved for backward passes */          \
    X(peak, "activations_peak", "most of a step")        /* peak step memory, integer forms of matrix products \
                                                            included */
/* clang-format on */

/** Bytes of memory that a rank uses, by kind. Kinds of step memory are the maximum over a step. */
typedef struct ar_rank_memory {
#define AR_RANK_MEMORY_FIELD(field, json, title) size_t field;
    AR_RANK_MEMORY_TABLE(AR_RANK_MEMORY_FIELD)
#undef AR_RANK_MEMORY_FIELD
} ar_rank_memory;

AR_END_DECLS
#endif
