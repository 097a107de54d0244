/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of a training step under a planned layout: GEMMs at the rate of a rank, collectives by their closed forms
 * on the links of their group (simulated-cluster.md). planner.md has the formulas. */
#pragma once

#include "ref/core/gpu.h"
#include "verify/plan/planner.h"

typedef struct ari_time_options {
    ar_sim_cluster cluster;
    bool hierarchical; /* groups that span nodes: reduce-scatter inside, all-reduce between, all-gather inside */
    bool shared_links; /* collectives that are in flight at once on one kind of link share its rate */
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

/* Parts of a step's time: GEMMs, and what nothing hides. The sum is the step. */
/* clang-format off */
#define ARI_TIME_TABLE(X)                                                                         \
    X(PRODUCTS, "products")                                                                       \
    X(RECOMPUTE, "recomputation")                                                                 \
    X(MEMORY, "memory-bound") /* element-wise work and the optimizer, for a known GPU */   \
    X(TP, "tp")               /* collectives over tp, and over the copies of a KV head */         \
    X(CP, "cp")               /* keys and values that go round, or heads that are exchanged */    \
    X(EP, "ep")               /* tokens to experts of other ranks, and back */                    \
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

/* Traffic of one rank in a step, in calls of one kind over one group. */
typedef struct ari_traffic_row {
    ari_time_kind time_kind;
    const char *call; /* "all_reduce", "send"; static storage */
    double ranks;     /* of the group */
    bool inter_node;  /* the group spans nodes */
    double calls;
    double bytes;   /* that one rank sends */
    double seconds; /* with nothing to hide them */
} ari_traffic_row;

#define ARI_TRAFFIC_ROWS 24
typedef struct ari_traffic {
    ari_traffic_row row[ARI_TRAFFIC_ROWS];
    int n;
} ari_traffic;

typedef struct ari_time {
    double seconds[ARI_TIME_KINDS]; /* of a step */
    double hidden;                  /* seconds of communication overlapped with matmuls */
    ari_traffic traffic;
} ari_time;
double ari_time_step(const ari_time *t);

/** The time of a step of the rank that takes longest. The layout is a legal one (ari_planned_check). Errors:
 *  AR_ERR_OVERFLOW, AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o);
