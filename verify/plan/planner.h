/* SPDX-License-Identifier: Apache-2.0 */
/* Cost of a model's layout on a cluster: memory of a rank by kind, bytes and time. Computed from config, layout and
 * batch alone, over the list of operations (sim/plan/ops.h) and the pipeline's schedule. Layouts that the list does not
 * cover (ZeRO-2 and 3, replicas) are planned by formulas too (planner.md). */
#pragma once

#include "anyrank/sim.h"
#include "sim/plan/ops.h"

/* A layout of a model's step. */
typedef struct ari_planned {
    ari_step_case step; /* run.parallel: of it ZeRO stage 0 to 3; run.batch, run.seq: of all ranks together */
    bool flash;         /* attention whose scores are never stored */
    /* The production account: gradients that ranks do not share out are sums in fp32; bytes for what it does not count,
     * contexts, buffers of NCCL and fragmentation. */
    bool fp32_gradients;
    double reserve;
} ari_planned;

/** Into how many chunks tp's collectives of tokens are cut, to go beside products; 1: they are not. */
int ari_planned_overlap(const ari_planned *p);
/** The step of a layout as one pipeline rank that has all layers would take it. */
ari_step_case ari_planned_whole(const ari_planned *p);
/** True if time and memory of a layout are sums over the list of operations. Gathers and scatters of ZeRO-2 and 3, and
 *  sums over replicas, are added by formulas. */
bool ari_planned_counted(const ari_planned *p);
/** True if a dry run of a rank takes seconds: no millions of tokens in a micro-batch, no thousands of layers. */
bool ari_planned_quick(const ari_planned *p);
/** Ranks among which ZeRO shares out: those that sum gradients, or of several replicas those of one. */
double ari_planned_shares(const ari_planned *p);
/** The same for the parameters of experts: those with the same ones. */
double ari_planned_expert_shares(const ari_planned *p);
/* The blocks that a walk over the operations goes through: one that stands for all layers if nothing distinguishes them;
 * if only experts do, one without and then one with experts; else each layer. */
typedef struct ari_walked {
    ar_config config; /* the model with these alone */
    size_t n;
    bool by_experts; /* two: which stands for a layer is whether that has experts */
} ari_walked;
/** Those of a case's model; each_kind: two are enough where only experts distinguish layers. */
ari_walked ari_walked_of(const ari_step_case *c, bool each_kind);
/** The block that stands for the config's layer. */
size_t ari_walked_block(const ari_walked *b, const ar_config *c, size_t layer);
/* Sections: a layer of each block, and behind them what is before the layers and what is after them; parts of a model. */
typedef enum ari_model_part { ARI_PART_BEFORE, ARI_PART_BLOCKS, ARI_PART_AFTER, ARI_MODEL_PARTS } ari_model_part;
/* A stage's share of each part, or that of all stages of a rank. */
typedef struct ari_stage {
    double share[ARI_MODEL_PARTS];
    double layers, experts; /* experts: of the layers, those that the second of two blocks stands for */
    size_t first;           /* layer, where each is walked; else 0 */
} ari_stage;
ari_stage ari_stage_of(const ari_walked *b, const ari_planned *p, size_t i);
/** The same of these layers of a model alone. */
ari_stage ari_stage_of_layers(const ari_walked *b, const ar_config *c, size_t first, size_t count);
/** That of all stages of a rank. */
ari_stage ari_stage_of_rank(const ari_walked *b, const ari_planned *p, size_t rank);
/** The first stage behind i that differs from it, and the rank if i is below pp. */
size_t ari_stage_unlike(const ari_walked *b, const ari_planned *p, size_t i);
/** How often a stage goes through one of the b->n + 2 sections. */
double ari_stage_times(const ari_walked *b, const ari_stage *s, size_t section);
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
    X(MASTER, "master weights")       /* fp32 copies beside weights of 16 bits */        \
    X(OPTIMIZER, "optimizer")         /* momentum, or both moments */                    \
    X(ATTENTION, "attention")         /* kept between the passes: of attentions */       \
    X(MLP, "mlp")                                                                        \
    X(BETWEEN, "norms and residuals") /* and dropout between them: what sp divides */    \
    X(OUTER, "embedding and head")                                                       \
    X(LOGITS, "logits")                                                                  \
    X(UNITS, "units")                 /* ZeRO-2 and -3: gathered weights, gradients */   \
    X(BUCKETS, "buckets")                                                                \
    X(WORKSPACE, "workspace")         /* of one operation at a time */                   \
    X(RESERVE, "reserve")             /* for what is not counted */
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
/** Of them what is kept of positions between the passes. */
double ari_memory_activations(const ari_memory *m);
/** Numbers that an optimizer keeps for each weight: 2 moments, 1 momentum, or 0; Muon one less of a matrix. */
double ari_optimizer_states(const ar_optimizer_options *o);

/* Two accounts of the same layout. */
/** Memory of a production system: bf16 weights and gradients, fp32 master weights and moments (2 + 2 + 12 bytes a
 *  parameter), activations as Megatron-LM keeps them (Korthikanti et al. 2022, arXiv:2205.05198). For the rank that
 *  holds most: of the pipeline rank with most, the first along dp, cp and tp. Errors: AR_ERR_INDIVISIBLE (fewer layers
 *  than stages), AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_memory_production(ari_memory *m, const ari_planned *p);
/* What the parts of a model keep of a micro-batch. A search walks the operations once for all layouts that differ in the
 * pipeline, but whether there is one, in data-parallel ranks and in ZeRO 0 or 1. */
typedef struct ari_sections ari_sections;
/** Gives. Errors: AR_ERR_OVERFLOW, AR_ERR_UNSUPPORTED (the plan), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sections_create(ari_sections **gives, const ari_planned *p);
/** Accepts NULL. */
void ari_sections_destroy(ari_sections *s);
/** The production account of such a layout; of one with more than `enough` bytes, that of some rank with more. schedule:
 *  of so many micro-batches as the next function says. */
ari_memory ari_sections_memory(const ari_sections *s, const ari_planned *p, const ar_pipeline_schedule *schedule,
                               double enough);
/** Bytes that a rank needs at least which has so many parameters, of which so many are of experts. */
double ari_memory_least(const ari_planned *p, double parameters, double experts);
/** Micro-batches of a schedule under which a rank holds as much as under that of all of them. */
int ari_memory_micro_batches(const ar_parallel *layout);
/** Memory of anyrank itself for a rank of the world, in either numerics: the counted bytes, of each kind and at the
 *  peak. Errors: those of ari_cluster_dry, and AR_ERR_UNSUPPORTED for what does not run in this version. */
AR_NODISCARD ar_status ari_memory_own(ari_memory *m, const ari_planned *p, int rank);
/** The same of the pipeline rank that holds most, the first along dp, cp and tp. Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_most(ari_memory *m, const ari_planned *p);
/** Bytes of all ranks together, each taken for the one of as many samples that holds most. Errors: as above. */
AR_NODISCARD ar_status ari_memory_own_all(double *bytes, const ari_planned *p);
/** The part of it that follows from the list alone: weights, gradients, master weights, optimizer and buckets; other
 *  kinds are 0. Errors: as of ari_operations_params. */
AR_NODISCARD ar_status ari_memory_states(ari_memory *m, const ari_step_case *c, int rank);

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

/** Operations for one token of a step, forward and backward, by a convention. With recomputation what the hardware does
 *  by the same one: full adds a third of the blocks' operations, selective those of attention once more, as Korthikanti
 *  et al. count. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_flops_token(double *flops, const ar_config *c, size_t seq, ari_flops_convention k,
                                       ar_recompute recompute);
