/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of a model's layout on a cluster: memory of a rank by kind, bytes and time, by formulas of config, layout and
 * batch only (cost.c, step.c; planner.md). Nothing is run, except for the memory of anyrank itself, which a dry run
 * counts (own.c). */
#pragma once

#include "anyrank/sim.h"
#include "verify/bytes/bytes.h"

/* A layout of a model's step. */
typedef struct ari_planned {
    ari_step_case step; /* run.parallel: of it ZeRO stage 0 to 3; run.batch, run.seq: of all ranks together */
    bool flash;         /* attention whose scores are never stored */
    /* The production account: gradients that ranks do not share out are sums in fp32; bytes for what it does not count,
     * contexts, buffers of NCCL and fragmentation. */
    bool fp32_gradients;
    double reserve;
} ari_planned;

/** Returns the number of chunks into which tp's token collectives are split to overlap them with matmuls; 1: no
 *  overlap. */
int ari_planned_overlap(const ari_planned *p);
/** True if a dry run of a rank takes seconds: no millions of tokens in a micro-batch, no thousands of layers. */
bool ari_planned_quick(const ari_planned *p);
/** Returns the number of ranks over which ZeRO shards: those that reduce gradients, or with several replicas those of
 *  one replica. */
double ari_planned_shares(const ari_planned *p);
/** The same for the parameters of experts: those with the same ones. */
double ari_planned_expert_shares(const ari_planned *p);
/** The share of layers that have experts in the place of an MLP. */
double ari_experts_share(const ar_config *c);
/** Elements of the weights of all MLPs, routers and experts; active: of those that one token meets. */
double ari_mlp_matrices(const ar_config *c, bool active);
/** Elements of a layer's attention's matrices. */
double ari_attention_matrices(const ar_config *c);
/** The share of layers that are recomputed, in whole or their attention, from 0 to 1. */
double ari_recomputed_share(const ari_step_case *c);

/* Kinds of a rank's memory. */
/* clang-format off */
#define ARI_MEMORY_TABLE(X)                                                              \
    X(WEIGHTS, "weights")                                                                \
    X(OPERANDS, "kept operands")      /* anyrank itself: weights as integers */            \
    X(GRADIENTS, "gradients")                                                            \
    X(MASTER, "master weights")       /* fp32 copies of 16-bit weights */        \
    X(OPTIMIZER, "optimizer")         /* momentum, or both moments */                    \
    X(ATTENTION, "attention")         /* kept between the passes: of attentions */       \
    X(MLP, "mlp")                                                                        \
    X(BETWEEN, "norms and residuals") /* and dropout between them: what sp divides */    \
    X(OUTER, "embedding and head")                                                       \
    X(LOGITS, "logits")                                                                  \
    X(UNITS, "units")                 /* ZeRO-2 and -3: gathered weights, gradients */   \
    X(BUCKETS, "buckets")                                                                \
    X(WORKSPACE, "workspace")         /* of one operation at a time */                   \
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

/* Bytes of one rank at the peak of a step; binary64 has every integer below 2^53. */
typedef struct ari_memory {
    double bytes[ARI_MEMORY_KINDS];
} ari_memory;
double ari_memory_sum(const ari_memory *m);
/** Returns the part of the memory that holds saved activations. */
double ari_memory_activations(const ari_memory *m);
/** Numbers that an optimizer keeps for each weight: 2 moments, 1 momentum, or 0; Muon one less of a matrix. */
double ari_optimizer_states(const ar_optimizer_options *o);

/* Two accounts of the same layout. */
/** Memory of a production system: bf16 weights and gradients, fp32 master weights and moments (2 + 2 + 12 bytes a
 *  parameter), activations as Megatron-LM keeps them (Korthikanti et al. 2022, arXiv:2205.05198). For the rank that
 *  holds most: of the pipeline rank with most, the first along dp, cp and tp. Errors: AR_ERR_INDIVISIBLE (fewer layers
 *  than stages), AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_memory_production(ari_memory *m, const ari_planned *p);
/** Computes the memory of anyrank itself for a rank of the world, in either numerics: the counted bytes of each kind
 *  and at the peak. Errors: those of ari_cluster_dry, AR_ERR_UNSUPPORTED for layouts that this version does not run. */
AR_NODISCARD ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int rank);
/** The same of the pipeline rank that holds most, the first along dp, cp and tp. Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_most(ari_memory *m, const ari_planned *p);
/** Bytes of all ranks together, each taken for the one of as many samples that holds most. Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_all(double *bytes, const ari_planned *p);
/* --- floating-point operations ------------------------------------------------------------------------------------ */

/* Operations of a model for one token of a training step, as published figures count them. N: parameters of blocks and
 * final norm; L, h, V, s: layers, width, vocabulary, sequence; a d: features of all query heads. */
/* clang-format off */
#define ARI_FLOPS_TABLE(X)                                                                                        \
    X(PRODUCTS, "6 (matrices of blocks + V h) + 12 L s a d")  /* Korthikanti et al. 2022, NeMo's GPT: 72 L h^2    \
                                                                 (1 + s/6h + V/12hL) of 4h-wide MLPs */           \
    X(PARAMETERS, "6 (N + V h) + 12 L s a d")                 /* NeMo until 2024 */                               \
    X(CAUSAL, "6 (N + V h) + 6 L s a d")                      /* Megatron Bridge: half of the scores are masked */ \
    X(TABLES, "6 (N + 2 V h) + 12 L s a d")                   /* torchtitan 2024: the embedding too */
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
