/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/baseline.h"
#include "anyrank/check.h"

typedef struct ari_gradcheck_case {
    const ar_config *config;
    ar_baseline_weights weights; /* the weights; NULL: fresh weights from `seed` */
    void *weights_user;
    const ar_batch
        *batch;    /* the batch; only its input_ids are used, without pads, and at most the first 2 samples and 16
                      positions */
    uint64_t seed; /* seed of fresh weights and of the sample */
    ar_loss_options loss;
    int threads; /* 1: one thread; more: two threads */
    /* Emits the gradients to be checked. NULL: ar_baseline_run. */
    ar_status (*gradients)(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch, double *loss);
    bool (*progress)(void *user, double fraction); /* NULL, or called on the calling thread; false ends the check */
    void *progress_user;
} ari_gradcheck_case;

/** Compares the gradients of the binary64 baseline with central differences of its loss, for eight step sizes. It draws
 *  two elements of each parameter among those with |g| > 1e-3*max|g|, and one element with g = 0 if there is one. Each
 *  element alone is moved up and down by the step times the larger of its own size and the tensor's root mean square,
 *  and by four times that step. Richardson extrapolation of the two differences has an error of order step^4. Errors
 *  are relative to max(|g|, 1e-3*max|g| of the tensor). A tensor whose gradients are all below 1e-12 of the model's
 *  largest (a key's bias, zero in exact arithmetic) is compared on the scale of 1e-2 of that largest gradient. A
 *  non-finite value counts as an infinite error.
 *  Memory: 4 bytes per parameter, plus the baseline's memory once per thread.
 *  Errors: those of ar_baseline_run, AR_ERR_ABORTED (progress returned false). */
AR_NODISCARD ar_status ari_gradcheck(ar_gradcheck *out, const ari_gradcheck_case *c);

/* Numbers of elements of a gradient that are compared with differences of the loss. */
enum { ARI_DRAWN = 2, ARI_MAX_DRAWN = ARI_DRAWN + 1 };
/* Bounds relative to the largest gradient: the smallest gradient that is sampled, and the scale for zero gradients. */
#define ARI_DRAWN_SMALL 1e-3

typedef struct ari_drawn {
    size_t n;
    size_t indices[ARI_MAX_DRAWN];
} ari_drawn;

/** Adds elements of gradient [count] until there are `target_count`: those with |g| > low, or with g = 0 if low is 0,
 *  drawn from the stream `key`. If drawing finds too few, adds the first ones from the last drawn position on. */
void ari_draw_elements(ari_drawn *d, uint64_t key, size_t target_count, double low, const double *gradient,
                       size_t count);
