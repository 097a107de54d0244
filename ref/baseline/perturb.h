/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/baseline.h"

/* One element of one parameter moved, and what becomes of the loss. */
typedef struct ari_perturbation {
    const char *name; /* the parameter's */
    size_t element;   /* row-major in its Hugging Face shape */
    double delta;
    double value; /* out: what the element became, in binary64 */
    double loss;  /* out */
} ari_perturbation;

/** The binary64 loss with each perturbation alone. Weights are loaded once, and what lies before the block that a
 *  perturbation touches is computed once. o: mode, weights, seed, dropout and progress are used; the mode must be
 *  AR_MODE_F64. Errors: those of ar_baseline_run; AR_ERR_NOT_FOUND (no such parameter), AR_ERR_ARG (no such
 *  element). */
AR_NODISCARD ar_status ari_baseline_perturb(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                                            ari_perturbation *p, size_t n);
