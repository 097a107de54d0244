/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of a rank's operations and collectives on a GPU, by their shapes. The planner sums them, and virtual time
 * advances by them. */
#pragma once

#include <stdbool.h>

typedef struct ari_gpu {
    double peak;      /* dense 16-bit operations a second */
    double product;   /* share of it that large products reach */
    double sms;       /* processors, each of which computes a tile at a time */
    double memory;    /* bytes a second of element-wise kernels */
    double scores[2]; /* operations a second of flash attention, forward and backward, in long sequences with heads
                         of 128 features */
    double older;     /* that it was at most before 2024 */
    double half[2];   /* positions at which it reaches half of that */
    double inside, inter_node; /* shares of a link's rate that collectives reach */
    double sm_share;           /* share of the processors that a collective beside products takes from them */
    double host;               /* what launches, jitter between ranks and a clock below its boost add: a factor */
} ari_gpu;

/* Speed of a rank's computation: a GPU's table; NULL: a number of operations per second for every shape, and no other
 * work. */
typedef struct ari_rates {
    double flops;
    const ari_gpu *gpu;
} ari_rates;
/** gpu: of ar_sim_cluster; 0: none. */
ari_rates ari_rates_of(double flops, int gpu);

/* `count` products [m, k] x [k, n] side by side. */
typedef struct ari_gpu_product {
    double count, m, n, k;
    bool accumulates; /* into fp32 sums of gradients, read and written */
} ari_gpu_product;
double ari_rates_product(const ari_rates *r, const ari_gpu_product *p);
/* Scores of attention, and their products with the values. */
typedef struct ari_gpu_scores {
    double flops, positions, head; /* positions: of a kernel's queries; head: features of a head */
    bool backward;
    bool older; /* by flash attention of before 2024 */
} ari_gpu_scores;
double ari_rates_scores(const ari_rates *r, const ari_gpu_scores *s);
/** A kernel that moves so many bytes through memory. */
double ari_rates_moves(const ari_rates *r, double bytes);
/* Kernels bound by memory, and the bytes that pass through it: forward for each element that one makes (of the loss, of
 * the logits), backward for each that comes, in 16 bits but for the loss's logits, under Megatron-LM's fusions: bias
 * with what follows, both halves of a gated activation, dropout with the residual, queries' and keys' rotation,
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

/* Members of a group, and the links between them at the rates that collectives reach. */
typedef struct ari_ring_links {
    double n, in_node;  /* members; of them in a node */
    bool is_inter_node; /* the group spans nodes */
    struct {
        double latency_s, bytes_per_s;
    } near, far;
} ari_ring_links;
/** Returns the seconds of a collective of `bytes` bytes that passes the ring `rings` times: a reduce-scatter or an
 *  all-gather once, an all-reduce twice. */
double ari_gpu_rings(const ari_ring_links *l, double bytes, double rings);
