/* SPDX-License-Identifier: Apache-2.0 */
/* What a layout of a model would take on a cluster: memory of a rank by kind, bytes and time. From config, layout and
 * batch alone, over the list of operations (sim/plan/ops.h). Layouts that no run of this version can take (context and
 * pipeline parallelism, ZeRO-2 and 3, recomputation) are planned by formulas (docs/planner.md). */
#ifndef ARI_PLANNER_H
#define ARI_PLANNER_H

#include "anyrank/sim.h"
#include "sim/plan/ops.h"

/* What of a block's forward pass is computed again in the backward pass instead of kept. */
typedef enum ari_recompute {
    ARI_RECOMPUTE_NONE,
    ARI_RECOMPUTE_SELECTIVE, /* scores, softmax and its dropout (Korthikanti et al. 2022, arXiv:2205.05198) */
    ARI_RECOMPUTE_FULL       /* all but the block's input */
} ari_recompute;

/* A layout on W = dp * pp * cp * tp ranks. */
typedef struct ari_planned {
    ari_step_case step; /* run.parallel: tp, dp, sp, micro-batches, ZeRO stage 0 to 3; run.batch, run.seq: of all ranks
                           together */
    int cp, pp;         /* ranks along the sequence, stages; 0 counts as 1 */
    int chunks;         /* parts of a stage that take turns with those of others (interleaving); 0 counts as 1 */
    ari_recompute recompute;
    bool flash; /* attention whose scores are never stored */
} ari_planned;

/* Kinds of a rank's memory. */
/* clang-format off */
#define ARI_MEMORY_TABLE(X)                                                              \
    X(WEIGHTS, "weights")                                                                \
    X(GRADIENTS, "gradients")                                                            \
    X(MASTER, "master weights")       /* fp32 copies beside weights of 16 bits */        \
    X(OPTIMIZER, "optimizer")         /* momentum, or both moments */                    \
    X(ATTENTION, "attention")         /* kept between the passes: of attentions */       \
    X(MLP, "mlp")                                                                        \
    X(BETWEEN, "norms and residuals") /* and dropout between them: what sp divides */    \
    X(OUTER, "embedding and head")                                                       \
    X(LOGITS, "logits")                                                                  \
    X(BUCKETS, "buckets")                                                                \
    X(WORKSPACE, "workspace")         /* of one operation at a time */
/* clang-format on */
typedef enum ari_memory_kind {
#define ARI_MEMORY_ENUM(name, text) ARI_MEMORY_##name,
    ARI_MEMORY_TABLE(ARI_MEMORY_ENUM)
#undef ARI_MEMORY_ENUM
        ARI_MEMORY_KINDS
} ari_memory_kind;
/** "weights". Static storage. */
const char *ari_memory_name(ari_memory_kind k);

/* Bytes of one rank at the peak of a step; binary64 has every integer below 2^53. */
typedef struct ari_memory {
    double of[ARI_MEMORY_KINDS];
} ari_memory;
double ari_memory_sum(const ari_memory *m);

/* Two accounts of the same layout. */
/** What a production system holds: bf16 weights and gradients, fp32 master weights and moments (2 + 2 + 12 bytes a
 *  parameter), activations as Megatron-LM keeps them. Of the rank that holds most. Errors: AR_ERR_OVERFLOW,
 *  AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_memory_production(ari_memory *m, const ari_planned *p);
/** What anyrank itself holds for rank (dp_rank, tp_rank), in either numerics: weights, gradients, optimizer, kept
 *  values and buckets are the counted ones to the byte. Errors: as above, and AR_ERR_UNSUPPORTED for what does not run
 *  in this version. */
AR_NODISCARD ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int dp_rank, int tp_rank);

#endif
