/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_SHIFTS_H
#define ARI_CPU_SHIFTS_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/** Gives the factors 2^(sign*c) of n = batch*k columns as binary64: 1 for a column with a NaN or an infinity (it counts
 *  as c = 0), 0 for an all-zero column (every product is zero, so it takes no part). c NULL: all 1. Free with free().
 *  Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_shift_factors(double **gives, const int32_t *c, int sign, size_t batch, size_t k);

#endif
