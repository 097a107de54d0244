/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of a training step under a planned layout, by the clock of virtual time (simulated-cluster.md): products at
 * the rate of a rank, collectives by their closed forms on the links of their group. planner.md has the formulas. */
#pragma once

#include "ref/core/gpu.h"
#include "verify/plan/planner.h"

/* Whose bytes and products: those of a production system, 16-bit values and flash attention where that is asked for; or
 * anyrank's own, as the simulator counts them. */
typedef enum ari_cost_model { ARI_COST_PRODUCTION, ARI_COST_OWN, ARI_COST_MODELS } ari_cost_model;
extern const char *const ari_cost_model_names[]; /* ends with NULL */

typedef struct ari_time_options {
    ar_sim_cluster cluster;
    ari_cost_model cost_model;
    bool hierarchical; /* groups that span nodes: reduce-scatter inside, all-reduce between, all-gather inside */
    bool shared_links; /* collectives that are in flight at once on one kind of link share its rate */
    /* Of a system (system.c): gradients are summed in fp32; ZeRO-3 gathers a block's weights for its backward pass when
     * the block after it has gone through its own; flash attention is that of before 2024. */
    bool fp32_sums, late_gathers, flash_2;
} ari_time_options;

/** What a rank computes by. */
static inline ari_rates ari_time_rates(const ari_time_options *o)
{
    return ari_rates_of(o->cluster.flops, o->cluster.gpu);
}

/* Default of ar_ddp_options.bucket_bytes in each account's system. */
#define ARI_BUCKETS_USUAL SIZE_MAX

/* Parts of a step's time: GEMMs, and what nothing hides; a call counts in the first row whose axes contain its group.
 * The sum is the step. */
/* clang-format off */
#define ARI_TIME_TABLE(X)                                                                               \
    X(PRODUCTS, "products", 0)                                                                          \
    X(RECOMPUTE, "recomputation", 0)                                                                        \
    X(MEMORY, "memory-bound", 0) /* element-wise work and the optimizer, where the GPU is known */  \
    X(TP, "tp", ARI_CUTS_FEATURES)  /* collectives over tp, and over the copies of a KV head */         \
    X(CP, "cp", ARI_CUTS_POSITIONS) /* keys and values that go round */                                 \
    X(EP, "ep", 0)                  /* tokens to experts of other ranks, and back */                    \
    X(DP, "dp", ARI_CUTS_DATA)      /* gradients summed and weights gathered, over dp and cp */         \
    X(PP, "pp", ARI_CUTS_LAYERS)    /* activations between stages */                                    \
    X(BUBBLE, "bubble", 0)          /* a stage waits for the others */
/* clang-format on */
typedef enum ari_time_kind {
#define ARI_TIME_ENUM(name, text, axes) ARI_TIME_##name,
    ARI_TIME_TABLE(ARI_TIME_ENUM)
#undef ARI_TIME_ENUM
        ARI_TIME_KINDS
} ari_time_kind;
/** "products". Static storage. */
const char *ari_time_name(ari_time_kind k);

/* Traffic of one rank in a step, in calls of one kind over one group. */
typedef struct ari_traffic_row {
    ari_time_kind over;
    const char *call; /* "all_reduce", "send"; static storage */
    double ranks;     /* of the group */
    bool between;     /* the group spans nodes */
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
    double of[ARI_TIME_KINDS]; /* seconds of a step */
    double hidden;             /* seconds of communication beside products */
    ari_traffic moved;
} ari_time;
double ari_time_step(const ari_time *t);

/** The time of a step of the rank that takes longest. The layout is a legal one (ari_planned_check). Errors:
 *  AR_ERR_OVERFLOW, AR_ERR_MEMORY, AR_ERR_UNSUPPORTED (the plan). */
AR_NODISCARD ar_status ari_time_of(ari_time *t, const ari_planned *p, const ari_time_options *o);
