/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of a model's layout on a cluster: memory of a rank by kind, bytes and time, by formulas of config, layout and
 * batch only (cost.c, step.c; planner.md). Nothing is run, except for the memory of anyrank itself, which a dry run
 * counts (own.c). */
#pragma once

#include "anyrank/sim.h"
#include "verify/bytes/bytes.h"

/* A layout of a model's step. */
typedef struct ari_planned {
    ari_step_case step; /* the run and its case: run.parallel has ZeRO stage 0 to 3; run.batch and run.seq are global */
    bool flash;         /* true: attention never stores its scores */
    /* Options of production's memory account: whether gradients that ranks do not shard are kept in fp32; bytes
     * reserved for contexts, NCCL's buffers and fragmentation, which the account does not compute. */
    bool fp32_gradients;
    double reserve;
} ari_planned;

/** Returns the number of chunks into which tp's token collectives are split to overlap them with matmuls; 1: no
 *  overlap. */
int ari_planned_overlap(const ari_planned *p);
/** Returns true if a dry run of a rank takes only seconds: fewer than millions of tokens per micro-batch and thousands
 *  of layers. */
bool ari_planned_quick(const ari_planned *p);
/** Returns the number of ranks over which ZeRO shards: those that reduce gradients, or with several replicas those of
 *  one replica. */
double ari_planned_shares(const ari_planned *p);
/** Returns the same for expert parameters: the number of ranks with the same parameters. */
double ari_planned_expert_shares(const ari_planned *p);
/** Returns the fraction of layers that have experts instead of an MLP. */
double ari_experts_share(const ar_config *c);
/** Returns the number of weight elements of all MLPs, routers and experts; active: only those that one token uses. */
double ari_mlp_matrices(const ar_config *c, bool active);
/** Elements of a layer's attention's matrices. */
double ari_attention_matrices(const ar_config *c);
/** Returns the fraction of layers that are recomputed, entirely or in their attention, from 0 to 1. */
double ari_recomputed_share(const ari_step_case *c);

/* Kinds of a rank's memory. */
/* clang-format off */
#define ARI_MEMORY_TABLE(X)                                                              \
    X(WEIGHTS, "weights")                                                                \
    X(OPERANDS, "kept operands")      /* for anyrank only: weights as integers */            \
    X(GRADIENTS, "gradients")                                                            \
    X(MASTER, "master weights")       /* fp32 copies of 16-bit weights */        \
    X(OPTIMIZER, "optimizer")         /* momentum, or both moments */                    \
    X(ATTENTION, "attention")         /* activations of attention kept for the backward pass */       \
    X(MLP, "mlp")                                                                        \
    X(BETWEEN, "norms and residuals") /* activations between the attentions and MLPs, and dropout masks: divided by
                                         sp */    \
    X(OUTER, "embedding and head")                                                       \
    X(LOGITS, "logits")                                                                  \
    X(UNITS, "units")                 /* ZeRO-2 and -3: gathered weights, gradients */   \
    X(BUCKETS, "buckets")                                                                \
    X(WORKSPACE, "workspace")         /* scratch of one operation at a time */                   \
    X(RESERVE, "reserve")             /* for memory that is not counted */
/* clang-format on */
typedef enum ari_memory_kind {
#define ARI_MEMORY_ENUM(name, text) ARI_MEMORY_##name,
    ARI_MEMORY_TABLE(ARI_MEMORY_ENUM)
#undef ARI_MEMORY_ENUM
        ARI_MEMORY_KINDS
} ari_memory_kind;
/** "weights". Static storage. */
const char *ari_memory_name(ari_memory_kind k);

/* Bytes of one rank at the peak of a step. binary64 represents every integer below 2^53. */
typedef struct ari_memory {
    double bytes[ARI_MEMORY_KINDS];
} ari_memory;
double ari_memory_sum(const ari_memory *m);
/** Returns the part of the memory that holds saved activations. */
double ari_memory_activations(const ari_memory *m);
/** Returns how many numbers an optimizer keeps per weight: 2 for two moments, 1 for momentum, or 0; Muon keeps one less
 *  for a matrix. */
double ari_optimizer_states(const ar_optimizer_options *o);

/* Two memory accounts of the same layout. */
/** Computes the memory of a production system: bf16 weights and gradients, fp32 master weights and moments (2 + 2 + 12
 *  bytes per parameter), and activations as Megatron-LM keeps them (Korthikanti et al. 2022, arXiv:2205.05198). The
 *  result is for the pipeline stage with the largest memory, at its first rank along dp, cp and tp. Errors:
 *  AR_ERR_INDIVISIBLE (fewer layers than stages), AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_memory_production(ari_memory *m, const ari_planned *p);
/** Computes the memory of anyrank itself for a rank of the world, in either numerics: the counted bytes of each kind
 *  and at the peak. Errors: those of ari_cluster_dry, AR_ERR_UNSUPPORTED for layouts that this version does not run. */
AR_NODISCARD ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int rank);
/** Computes anyrank's memory for the pipeline stage with the largest memory, at its first rank along dp, cp and tp.
 *  Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_most(ari_memory *m, const ari_planned *p);
/** Computes the bytes of all ranks together. Each rank counts as much as the largest rank with the same number of
 *  samples. Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_all(double *bytes, const ari_planned *p);
/* --- floating-point operations ------------------------------------------------------------------------------------ */

/* Formulas for the operations of a model per token of a training step, as published figures use them. N: parameters of
 * blocks and final norm; L, h, V, s: layers, width, vocabulary, sequence; a d: features of all query heads. */
/* clang-format off */
#define ARI_FLOPS_TABLE(X)                                                                                        \
    X(PRODUCTS, "6 (matrices of blocks + V h) + 12 L s a d")  /* Korthikanti et al. 2022, NeMo's GPT: 72 L h^2    \
                                                                 (1 + s/6h + V/12hL) of 4h-wide MLPs */           \
    X(PARAMETERS, "6 (N + V h) + 12 L s a d")                 /* NeMo until 2024 */                               \
    X(CAUSAL, "6 (N + V h) + 6 L s a d")                      /* Megatron Bridge: half of the scores are masked */ \
    X(TABLES, "6 (N + 2 V h) + 12 L s a d")                   /* torchtitan 2024: includes the embedding */
/* clang-format on */
typedef enum ari_flops_convention {
#define ARI_FLOPS_ENUM(name, text) ARI_FLOPS_##name,
    ARI_FLOPS_TABLE(ARI_FLOPS_ENUM)
#undef ARI_FLOPS_ENUM
        ARI_FLOPS_CONVENTIONS
} ari_flops_convention;
/** "6 (N + V h) + 12 L s a d". Static storage. */
const char *ari_flops_formula(ari_flops_convention k);

/** Computes the operations per token of a step, forward and backward, by a convention. With recomputation these are the
 *  hardware's operations by the same convention: full recomputation adds a third of the blocks' operations, selective
 *  recomputation attention's once more, as Korthikanti et al. count. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_flops_token(double *flops, const ar_config *c, size_t seq, ari_flops_convention k,
                                       ar_recompute recompute);
