/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of a rank's operations and collectives on a GPU, by their shapes. The planner sums them, and virtual time
 * advances by them. */
#pragma once

#include <stdbool.h>

typedef struct ari_gpu {
    double peak;      /* dense 16-bit operations a second */
    double product;   /* fraction of the peak that large products achieve */
    double sms;       /* number of processors, each of which computes one tile at a time */
    double memory;    /* bytes a second of element-wise kernels */
    double scores[2]; /* operations a second of flash attention, forward and backward, in long sequences with heads
                         of 128 features */
    double older;     /* maximum fraction achieved before 2024 */
    double half[2];   /* number of positions at which half of that is achieved */
    double inside, inter_node; /* fractions of a link's rate that collectives achieve */
    double sm_share;           /* fraction of the processors that a collective occupies while products run */
    double host;               /* factor for launches, jitter between ranks, and a clock below its boost */
} ari_gpu;

/* Speed of a rank's computation: a GPU's table; NULL: a number of operations per second for every shape, and no other
 * work. */
typedef struct ari_rates {
    double flops;
    const ari_gpu *gpu;
} ari_rates;
/** gpu: as in ar_sim_cluster; 0: none. */
ari_rates ari_rates_of(double flops, int gpu);

/* `count` products [m, k] x [k, n] side by side. */
typedef struct ari_gpu_product {
    double count, m, n, k;
    bool accumulates; /* into fp32 sums of gradients, read and written */
} ari_gpu_product;
double ari_rates_product(const ari_rates *r, const ari_gpu_product *p);
/* Scores of attention, and their products with the values. */
typedef struct ari_gpu_scores {
    double flops, positions, head; /* positions: queries of a kernel; head: features of a head */
    bool backward;
    bool older; /* true for flash attention from before 2024 */
} ari_gpu_scores;
double ari_rates_scores(const ari_rates *r, const ari_gpu_scores *s);
/** Returns the seconds of a kernel that moves this many bytes through memory. */
double ari_rates_moves(const ari_rates *r, double bytes);
/* Memory-bound kernels and the bytes that they move: forward for each element produced (for the loss, each logit),
 * backward for each element received, in 16 bits except for the loss's logits, with Megatron-LM's fusions: bias with
 * the following operation, both halves of a gated activation, dropout with the residual, rotation of queries and keys,
 * cross-entropy. */
/* clang-format off */
#define ARI_GPU_MOVES_TABLE(X)                                                                          \
    X(EMBEDDING, 4, 8) X(POSITIONS, 4, 0) X(NORM, 4, 6) X(ROPE, 4, 4) X(ACTIVATION, 4, 6) X(GATE, 6, 10) \
    X(ROUTE, 8, 8) X(DISPATCH, 4, 4) X(COMBINE, 4, 6) X(DROPOUT, 1, 1) X(RESIDUAL, 6, 6) X(LOSS, 12, 6)
/* clang-format on */
typedef enum ari_gpu_moves {
    ARI_GPU_MOVES_NOTHING,
#define ARI_GPU_MOVES_ENUM(name, forward, backward) ARI_GPU_MOVES_##name,
    ARI_GPU_MOVES_TABLE(ARI_GPU_MOVES_ENUM)
#undef ARI_GPU_MOVES_ENUM
        ARI_GPU_MOVES
} ari_gpu_moves;
double ari_rates_kernel(const ari_rates *r, ari_gpu_moves kernel_kind, bool backward, double elements);

/* The members of a group, and the links between them with the rates that collectives achieve. */
typedef struct ari_ring_links {
    double n, in_node;  /* number of members, and of members in a node */
    bool is_inter_node; /* the group spans nodes */
    struct {
        double latency_s, bytes_per_s;
    } near, far;
} ari_ring_links;
/** Returns the seconds of a collective of `bytes` bytes that passes the ring `rings` times: a reduce-scatter or an
 *  all-gather once, an all-reduce twice. */
double ari_gpu_rings(const ari_ring_links *l, double bytes, double rings);
