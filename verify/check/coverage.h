/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_COVERAGE_H
#define ARI_VERIFY_CHECK_COVERAGE_H

#include "anyrank/check.h"
#include "verify/check/compare.h"

/** Fills `pattern` and `hint` for a tensor that the ranks' reports do not cover once: who holds the same part, or what
 *  is missing, and what kind of mistake does that. */
void ari_explain_coverage(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor);

#endif
