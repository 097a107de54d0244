/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/** The contraction as numerics.md section 2 defines it, step by step in plain loops, summed in 128-bit integers:
 *    C[i,j] = round(sum over k of A[i,k]*B[j,k]), k = 0..K-1.
 *  What every fast path is compared with, bit for bit; slow on purpose.
 *  Shapes:   c [m,n] row-major; element A[i,k] at a[i*lda_row + k*lda_k], B[j,k] at b[j*ldb_row + k*ldb_k]. fp32.
 *  scale:    equilibrate by the columns of B (step 0); false takes every c_k = 0.
 *  narrow:   integers of 15 bits instead of 25.
 *  Numerics: a row with a NaN or an infinity makes all its results NaN (0x7fc00000); an all-zero one gives +0.
 *  Errors:   AR_ERR_ARG (NULL with a non-zero size), AR_ERR_OVERFLOW, AR_ERR_MEMORY; AR_ERR_INTERNAL where k <= 8191
 * and a sum leaves 63 bits, which would contradict the definition. c is untouched on the first three. Memory:   borrows
 * all arguments until return; c overlaps nothing. Threads:  safe for disjoint outputs. */
AR_NODISCARD ar_status ar_contract_definition(float *c, size_t m, size_t n, size_t k, const float *a, ptrdiff_t lda_row,
                                              ptrdiff_t lda_k, const float *b, ptrdiff_t ldb_row, ptrdiff_t ldb_k,
                                              bool scale, bool narrow);

AR_END_DECLS
