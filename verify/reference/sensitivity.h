/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/sensitivity.h"
#include "verify/reference/reference.h"

/** Safety factor of allowances. A tensor may differ by this factor times the largest difference that randomly drawn
 *  rounding errors caused over SEEDS draws, plus the distance of its largest element to the next number of its storage
 *  format. The probability that all n*SEEDS differences of n elements are SAFETY times smaller than a further one is
 *  about (0.8/SAFETY)^(n*SEEDS). For single values (loss, gradient norm) that would be one in 600, so their factor is
 *  larger and makes it one in a million. */
#define ARI_NOISE_SAFETY 8.0
#define ARI_NOISE_SEEDS 3

/** The unit round-offs of an arithmetic. */
ar_noise_units ari_sensitivity_noise(ar_sensitivity s);

/* Baseline runs of a sensitivity measurement. */
typedef struct ari_sensitivity_case {
    ar_sensitivity sensitivity;
    /* Arguments of ar_baseline_run. */
    const ar_config *config;
    const ar_batch *batch;
    /* runs something else as `o` says, or NULL; called on several threads at once */
    ar_status (*run)(void *user, const ar_baseline_options *o);
    void *user;
    ar_baseline_options options; /* options of all runs; mode, noise and listeners are set here */
    ar_baseline_emit heard;      /* NULL, or hears the run without noise too, with heard_user */
    void *heard_user;
    int threads;                                                      /* maximum number of threads; 0: one */
    void (*progress)(void *user, double fraction, const char *label); /* NULL: no progress */
    void *progress_user;
} ari_sensitivity_case;

/** Sets `allowed` of every tensor of `ref`, and `allowed_each` of weights after Adam: how far a run in that arithmetic
 *  may be off. `ref`: a run's tensors, or empty (zeroed): then those of the binary64 run in fp32. Errors: those of run,
 *  AR_ERR_INTERNAL (it emits other tensors than ref has), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sensitivity_allow(ari_reference *ref, const ari_sensitivity_case *c);

/* The difference allowed to a tensor, by its name in a dump. */
typedef struct ari_allowance {
    char name[ARI_REFERENCE_NAME];
    double value;
} ari_allowance;
/** Writes `extra` [n], then the allowances of a reference (of weights after Adam the largest element's), as a file with
 *  one F64 without dimensions per tensor, and their meaning as metadata. hash: of the reference's values. Errors: those
 *  of ari_st_write, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_allowances_write(const ari_reference *ref, const ari_allowance *extra, size_t n,
                                            const char *path, ar_sensitivity sensitivity, const char *hash);

/* --- Adam (adam_allowance.c) -------------------------------------------------------------------------------------- */

/* Adam divides a gradient by its own magnitude. A gradient that is pure rounding therefore moves its weight as far as
 * any other gradient, in either direction, and a few random runs do not show it. The allowance of a ':new' tensor is
 * derived element by element from the gradients' allowances (numerics.md, section 7). */

typedef struct ari_adam_case {
    const ar_optimizer_options *optimizer;
    int steps;
    double clip;   /* largest norm of all gradients; 0: no clipping */
    double stored; /* unit round-off of the storage format of matrices, next to the fp32 masters that are updated */
    uint8_t *const *rounds; /* [ref->count] for ':grad' tensors: marks elements that are nonzero in some run; an
                               element that is zero in all runs is exact */
} ari_adam_case;

/** Sets `allowed` and `allowed_each` of all ':new' tensors for Adam and AdamW; `allowed` of the gradients and of their
 *  norm must be known. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_adam_allow(ari_reference *ref, const ari_adam_case *c);

/** Returns the largest possible movement of a weight in step t = 1, 2, .. for any gradients, divided by the learning
 *  rate: the maximum of the quotient of Adam's two moments. */
double ari_adam_reach(const ar_optimizer_options *o, int t);
/** The distance of the tensor's largest finite element to the next fp32 number. */
double ari_step_of_largest(const ari_ref_tensor *t);
