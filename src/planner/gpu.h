/* SPDX-License-Identifier: Apache-2.0 */
/* Seconds of one GPU's operations by their shapes, for the production account on a cluster that names its GPU. Virtual
 * time, and a cluster of a given rate, have every product at that rate and no other work. */
#ifndef ARI_PLANNER_GPU_H
#define ARI_PLANNER_GPU_H

#include "planner/time.h"

typedef struct ari_gpu {
    double peak;      /* dense 16-bit operations a second */
    double product;   /* share of it that large products reach */
    double sms;       /* processors, each of which computes a tile at a time */
    double memory;    /* bytes a second of element-wise kernels */
    double scores[2]; /* operations a second of flash attention, forward and backward, in long sequences with heads of
                         128 features */
    double older;     /* that it was at most before 2024 */
    double half[2];   /* positions at which it reaches half of that */
    double inside, between; /* shares of a link's rate that collectives reach */
    double taken;           /* share of the processors that a collective beside products takes from them */
    double host;            /* what launches, jitter between ranks and a clock below its boost add: a factor */
} ari_gpu;

/** The GPU by whose table an account's operations are timed; NULL: none, they run at the cluster's rate. */
const ari_gpu *ari_gpu_of(const ari_time_options *o);
/* `count` products [m, k] x [k, n] side by side. */
typedef struct ari_gpu_product {
    double count, m, n, k;
    bool accumulates; /* into fp32 sums of gradients, read and written */
} ari_gpu_product;
double ari_gpu_product_seconds(const ari_gpu *g, const ari_gpu_product *p);
/** flops of scores among so many positions of a kernel's queries; older: by flash attention of before 2024; head:
 *  features of a head. */
double ari_gpu_scores_seconds(const ari_gpu *g, bool older, double flops, double positions, double head, bool backward);
/** A kernel that moves so many bytes through memory. */
double ari_gpu_moves_seconds(const ari_gpu *g, double bytes);

#endif
