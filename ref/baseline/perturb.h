/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/baseline.h"

/* One element of one parameter that is moved, and the loss that results. */
typedef struct ari_perturbation {
    const char *name; /* the parameter's */
    size_t element;   /* index of the element, row-major in the Hugging Face shape */
    double delta;
    double value; /* output: the element's perturbed value in binary64 */
    double loss;  /* out */
} ari_perturbation;

/** Computes the binary64 loss with each perturbation alone. Weights are loaded once, and everything before the block
 *  of a perturbation is computed once. o: mode, weights, seed, dropout and progress are used; the mode must be
 *  AR_MODE_F64. Errors: those of ar_baseline_run, AR_ERR_NOT_FOUND (no such parameter), AR_ERR_ARG (no such
 *  element). */
AR_NODISCARD ar_status ari_baseline_perturb(const ar_config *c, const ar_baseline_options *o, const ar_batch *batch,
                                            ari_perturbation *p, size_t n);
