/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_CHECK_BASELINE_H
#define ARI_VERIFY_CHECK_CHECK_BASELINE_H

#include "anyrank/check.h"
#include "run/run.h"
#include "verify/reference/reference.h"

/* What a check learns from the baseline: the reference's tensors, its losses, how exact it is. */
typedef struct ari_baseline_case {
    const ar_check_options *check;
    const ar_config *config;
    ari_weights *weights;  /* NULL: fresh */
    const ar_batch *batch; /* [max(steps, 1)], global */
} ari_baseline_case;

/** Runs the exact baseline into `ref` (zeroed before) and `loss` [ari_run_steps]; unless o->skip_f64, the binary64
 * one for *max_error: the worst |exact - binary64| of a gradient of step 1 over its tensor's largest |binary64|, NaN
 * where it is not known, infinity where only one of the two is finite; in the native numerics, the binary64 one with
 * rounding errors for every tensor's `allowed`. Errors: those of ar_baseline_run, AR_ERR_INTERNAL (they emit other
 * tensors). */
AR_NODISCARD ar_status ari_check_baseline(ari_reference *ref, float *loss, double *max_error,
                                          const ari_baseline_case *c);

#endif
