/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_FAULTS_FAULT_CURVE_H
#define ARI_VERIFY_FAULTS_FAULT_CURVE_H

#include "verify/faults/fault_case.h"

/* What other means of looking for a mistake would see of an injected fault: a loss curve, and gradients compared within
 * a tolerance. Both compare a faulty run with a clean one of the same layout, so no baseline is needed. */

enum { ARI_CURVE_STEPS = 20, ARI_CURVE_FIRST_STEPS = 10 };
/* A loss that deviates by less is the same curve to the eye: a pixel of a plot that is 500 of them high. */
#define ARI_CURVE_UNSEEN 2e-3

/* A parameter's gradient on one rank, at the first step. */
typedef struct ari_traced_gradient {
    char name[176];
    size_t count;
    float *values;
} ari_traced_gradient;

typedef struct ari_traced_rank {
    ari_traced_gradient *gradient;
    size_t count, capacity;
} ari_traced_rank;

/* 20 AdamW steps of a fault's case. */
typedef struct ari_fault_trace {
    bool ended; /* false: an error of the ranks ended the run, and there is nothing else */
    float loss[ARI_CURVE_STEPS];
    ari_traced_rank *rank; /* [ranks] */
    int ranks;
} ari_fault_trace;

/** Runs the case with `fault`, or AR_FAULT_NONE. Gives; ari_fault_trace_fini, also after a failure. Errors: those of
 *  reading model and text, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_fault_trace_run(ari_fault_trace *t, const ari_fault_case *f, ar_fault fault, int threads,
                                           uint64_t seed);
void ari_fault_trace_fini(ari_fault_trace *t);

typedef struct ari_fault_curve {
    double loss; /* largest relative deviation of the loss from the clean run's over the steps; infinity: not finite */
    double first_losses; /* the same over the first ten */
    double gradient;     /* largest |difference| of a gradient over its tensor's largest element, at the first step */
    char gradient_tensor[176];
} ari_fault_curve;

/** Both runs must have ended. */
ari_fault_curve ari_fault_curve_of(const ari_fault_trace *clean, const ari_fault_trace *faulty);

#endif
