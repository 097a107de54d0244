/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_DIAGNOSE_PATTERN_H
#define ARI_VERIFY_DIAGNOSE_PATTERN_H

#include "anyrank/tensor.h"

/* Says in words where a tensor of N ranks differs from its reference and what kind of mistake leaves that trace. It
 * looks at the values, the layouts, the name and the pass, and at nothing else. */

/* What one rank holds: contiguous, row-major in the local shape. */
typedef struct ari_rank_copy {
    const float *local; /* NULL is fine where the layout has no element */
    size_t shape[AR_MAX_DIMS];
    int ndim;
    const ar_layout *layout; /* all ranks': of the full tensor's shape, or of one other of the same count, [b, s, H, d]
                                for [b, s, H*d] */
} ari_rank_copy;

/* Fields from `allowed` on may be left zero: what is not known is not used. */
typedef struct ari_difference {
    const char *name;    /* docs/names.md, without the pass: "model.layers.3.mlp.down_proj" */
    char pass;           /* 'i' initial, 'f' forward, 'b' backward, 'g' gradient of a parameter, 'c' clipping, 'n' new
                            weights, 'w' weights of no known step, '?' not known */
    int ndim;            /* 0 .. AR_MAX_DIMS */
    const size_t *shape; /* [ndim], of the full tensor */
    const float *reference;    /* the full tensor, row-major */
    int ranks;                 /* N >= 1 */
    const ari_rank_copy *copy; /* [ranks] */
    double allowed;            /* largest |difference| that is none; 0: equal bits or different */
    double noise;              /* largest |value| that rounding makes of a zero */
    const float *beside;       /* what is allowed beside that, an element at a time; NULL: nothing */
    int step;                  /* 1, 2, .. */
    int tp, dp;                /* the layout: rank = dp_rank * tp + tp_rank; 0: tp is all ranks */
    int micro_batches;         /* of each rank; 0: one */
    bool forward_first;        /* all micro-batches go forward before the first goes back */
    bool sp;                   /* positions are spread over tp between the tensor-parallel regions */
    size_t batch, seq;         /* of the run */
    const int64_t *ids;        /* [batch, seq] of this step, or NULL */
    size_t head_dim;           /* of a tensor whose features are heads side by side */
    const float *before;       /* of new weights: the reference's before the step, or NULL */
    const float *last;         /* of a gradient: the reference's of the step before, or NULL */
    double beta1, beta2;       /* of Adam; both 0: another optimizer */
    bool zero;                 /* each dp rank updates its share of the weights */
    bool hidden;               /* the one rank stands for a run whose ranks are not seen */
} ari_difference;

typedef struct ari_pattern {
    char pattern[256]; /* where: how many elements, of which ranks, samples, tokens, features; what they look like */
    char hint[512];    /* what kind of mistake does that, and the numbers that say so */
} ari_pattern;

/** Fills both lines; texts that do not fit end in "...". The same input gives the same text.
 *  Memory:  borrows `given` until return; needs about count/8 bytes, 20 bytes a column and 8 bytes an index of each
 *           dimension, and up to 16 bytes an element of one sample.
 *  Errors:  AR_ERR_ARG (a layout that is not the tensor's, a box outside it, no ranks), AR_ERR_OVERFLOW, AR_ERR_MEMORY.
 *           On error *out is untouched.
 *  Threads: safe. */
AR_NODISCARD ar_status ari_pattern_find(ari_pattern *out, const ari_difference *given);

#endif
