/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_ROUND_H
#define ARI_CPU_ROUND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Row loops from exact integer sums to fp32 and to int64 limbs. A sum arrives as two binary64 halves that are integers,
 * S = hi*2^13 + lo (gemm_portable.c), or as an int64 (gemm_ifma.c). No loop's result depends on where a row is cut. */

/** scale[j] = 2^f[j]: 0 for ARI_EXP_ZERO, NaN for ARI_EXP_NONFINITE. */
void ari_round_factors(double *scale, const int32_t *f, size_t n);
/** 2^(e-50), with the same two exceptions. */
double ari_round_row_factor(int32_t e);

/** y[j] = fl32(fl64(S_j)*row*scale[j]) for |hi|, |lo| <= 2^53. */
void ari_round_halves(float *y, const double *hi, const double *lo, double row, const double *scale, size_t n);
/** s[j] = S_j, or s[j] += S_j; S and the sum must fit int64. */
void ari_halves_to_int64(int64_t *s, const double *hi, const double *lo, bool add, size_t n);
/** s[2j] = S_j >> 32, s[2j+1] = S_j & 0xffffffff, or added to what s holds. |hi|, |lo| <= 2^53. */
void ari_halves_to_limbs(int64_t *s, const double *hi, const double *lo, bool add, size_t n);

/** ari_round_halves and ari_halves_to_limbs of sums that are int64. */
void ari_round_sums(float *y, const int64_t *s, double row, const double *scale, size_t n);
void ari_sums_to_limbs(int64_t *s, const int64_t *sums, bool add, size_t n);

#endif
