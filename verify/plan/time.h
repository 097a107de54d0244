/* SPDX-License-Identifier: Apache-2.0 */
/* Predicts the seconds of a training step for a planned layout: GEMMs at a rank's rate, collectives by their closed
 * forms on the links of their group (simulated-cluster.md). planner.md has the formulas. */
#pragma once

#include "ref/core/gpu.h"
#include "verify/plan/planner.h"

typedef struct ari_time_options {
    ar_sim_cluster cluster;
    bool hierarchical; /* true: groups that span nodes reduce-scatter within a node, all-reduce between nodes, and
                          all-gather within a node */
    bool shared_links; /* true: concurrent collectives on one kind of link share its rate */
    /* for a system (system.c): gradients are summed in fp32; ZeRO-3 gathers a block's weights for its backward pass
     * after the next block has finished its own; flash attention is the one before 2024 */
    bool fp32_sums, late_gathers, flash_2;
} ari_time_options;

/** Returns the speed of a rank's computation. */
static inline ari_rates ari_time_rates(const ari_time_options *o)
{
    return ari_rates_of(o->cluster.flops, o->cluster.gpu);
}

/* Megatron-LM's buckets, as ar_ddp_options.bucket_bytes. */
#define ARI_BUCKETS_USUAL SIZE_MAX

/* Parts of a step's time: GEMMs, and everything that does not overlap with them. The parts sum up to the step. */
/* clang-format off */
#define ARI_TIME_TABLE(X)                                                                         \
    X(PRODUCTS, "products")                                                                       \
    X(RECOMPUTE, "recomputation")                                                                 \
    X(MEMORY, "memory-bound") /* element-wise work and the optimizer, for a known GPU */   \
    X(TP, "tp")               /* collectives over tp, and over the copies of a KV head */         \
    X(CP, "cp")               /* keys and values sent around the ring, or exchanged heads */    \
    X(EP, "ep")               /* tokens sent to experts of other ranks, and back */                    \
    X(DP, "dp")               /* gradients summed and weights gathered, over dp and cp */         \
    X(PP, "pp")               /* activations between stages */                                    \
    X(BUBBLE, "bubble")       /* a stage waits for other stages */
/* clang-format on */
typedef enum ari_time_kind {
#define ARI_TIME_ENUM(name, text) ARI_TIME_##name,
    ARI_TIME_TABLE(ARI_TIME_ENUM)
#undef ARI_TIME_ENUM
        ARI_TIME_KINDS
} ari_time_kind;
/** "products". Static storage. */
const char *ari_time_name(ari_time_kind k);

/* Traffic of one rank in a step: calls of one kind over one group. */
typedef struct ari_traffic_row {
    ari_time_kind time_kind;
    const char *call; /* "all_reduce", "send"; static storage */
    double ranks;     /* number of ranks in the group */
    bool inter_node;  /* the group spans nodes */
    double calls;
    double bytes;   /* bytes that one rank sends */
    double seconds; /* seconds without any overlap */
} ari_traffic_row;

#define ARI_TRAFFIC_ROWS 24
typedef struct ari_traffic {
    ari_traffic_row row[ARI_TRAFFIC_ROWS];
    int n;
} ari_traffic;

typedef struct ari_time {
    double seconds[ARI_TIME_KINDS]; /* seconds of a step by kind */
    double hidden;                  /* seconds of communication overlapped with matmuls */
    ari_traffic traffic;
} ari_time;
double ari_time_step(const ari_time *t);

/** Computes the step time of the slowest rank. The layout must be legal (ari_planned_check). Errors: AR_ERR_OVERFLOW,
 *  AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o);
