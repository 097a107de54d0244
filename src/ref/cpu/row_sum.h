/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_ROW_SUM_H
#define ARI_CPU_ROW_SUM_H

#include <stddef.h>
#include <stdint.h>

#include "ref/cpu/kernels.h"
#include "ref/numerics/scalar.h"

/* Loops that the row kernels share: exponents and quantised sums of a row (numerics.md, "Sums along a row"). They
 * must be inlined, so that they are compiled for the instruction set of the ARI_SIMD function that calls them. */
#if defined(__GNUC__)
#define ARI_ROW_LOOP static inline __attribute__((always_inline))
/* On a function with a hot loop: everything it calls is inlined into it, whatever gcc's size heuristics say. */
#define ARI_ROW_KERNEL ARI_SIMD __attribute__((flatten)) static
#else
#define ARI_ROW_LOOP static inline
#define ARI_ROW_KERNEL static
#endif

/* --- of a row (exponentials.c) ------------------------------------------------------------------------------------ */

/** e[j] = ari_softmax_exp(x[j], m). e may be x. */
typedef void ari_exps_fn(float *e, const float *x, float m, size_t n);
ari_exps_fn ari_softmax_exps;
/** The ways to compute them, the fastest first; NULL: not in this build, or not on this processor. */
enum { ARI_EXPS_WAYS = 3 };
ari_exps_fn *ari_exps_way(size_t i);
/** y[j] = ari_gelu_erf32(x[j]), or slopes: ari_dgelu_erf32(x[j]); n <= ARI_BLOCK (gelu.c). y may be x. */
void ari_gelus(float *y, const float *x, size_t n, bool slopes);
/** y[j] = ari_softmax_p(x[j], l), l and 1/l normal numbers. y may be x. */
void ari_quotients(float *y, const float *x, double l, size_t n);

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* The factor 2^(p-e) of a row sum. Rows that are all zero or hold a non-finite value get 0: their sum is not used. */
ARI_ROW_LOOP double ari_row_step(int32_t e, int32_t p)
{
    return e == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE ? 0.0 : ari_scale2(1.0, p - e);
}

/* ari_rowsum_quantise with its power of two, `step`, taken out of the loop, and biased by ARI_ROUND_MAGIC_BITS, which
 * ari_row_value takes off the whole sum; |x*step| < 2^40 for finite x. The addition of the magic number is rint and the
 * conversion to an integer in one, on every instruction set, and a NaN or an infinity that comes here is never
 * converted: it is only bits, of a sum that is not used. */
ARI_ROW_LOOP uint64_t ari_row_biased(double x, double step)
{
    return ari_bits64(x * step + ARI_ROUND_MAGIC);
}

/* The integer sum of n biased terms. */
ARI_ROW_LOOP uint64_t ari_row_unbiased(uint64_t sum, size_t n)
{
    return sum - (uint64_t)n * ARI_ROUND_MAGIC_BITS;
}

ARI_ROW_LOOP uint32_t ari_row_magnitude32(float x)
{
    return ari_bits32(x) & 0x7fffffffu;
}

ARI_ROW_LOOP uint64_t ari_row_magnitude64(double x)
{
    return ari_bits64(x) & 0x7fffffffffffffffull;
}

/* Largest key of a row (INT32_MIN where it is empty); places that hold `absent` do not count: -inf for a masked key,
 * NaN for none. The keys pass through a small array, since gcc turns the selections of key and maximum into a branch,
 * and then no longer vectorises, where it sees both in one loop. */
ARI_ROW_LOOP int32_t ari_row_largest_key(const float *x, size_t n, float absent)
{
    enum { BLOCK = 256 };
    int32_t keys[BLOCK], top = INT32_MIN;
    for (size_t from = 0; from < n; from += BLOCK) {
        const size_t length = n - from < BLOCK ? n - from : BLOCK;
        for (size_t j = 0; j < length; j++)
            keys[j] = x[from + j] == absent ? INT32_MIN : ari_key32(x[from + j]);
        for (size_t j = 0; j < length; j++)
            top = keys[j] > top ? keys[j] : top;
    }
    return top;
}

/* The row sum's value, from the sum of n biased terms. */
ARI_ROW_LOOP double ari_row_value(uint64_t sum, size_t n, int32_t e, int32_t p)
{
    return ari_rowsum_value((int64_t)ari_row_unbiased(sum, n), e, p);
}

/* Magnitude bits of the largest product; the products of two fp32 are exact in binary64. */
ARI_ROW_LOOP uint64_t ari_row_product_top(const float *a, const float *b, size_t n)
{
    uint64_t top = 0;
    for (size_t j = 0; j < n; j++) {
        const uint64_t bits = ari_row_magnitude64((double)a[j] * (double)b[j]);
        top = bits > top ? bits : top;
    }
    return top;
}

/* The integer sum, biased, of the n products, whose exponent is e. */
ARI_ROW_LOOP uint64_t ari_row_product_integer(const float *a, const float *b, size_t n, int32_t e, int32_t p)
{
    const double step = ari_row_step(e, p);
    uint64_t sum = 0;
    for (size_t j = 0; j < n; j++)
        sum += ari_row_biased((double)a[j] * (double)b[j], step);
    return sum;
}

/* The integer sum, biased, of n fp32 values whose exponent is e. */
ARI_ROW_LOOP uint64_t ari_row_integer(const float *x, size_t n, int32_t e, int32_t p)
{
    const double step = ari_row_step(e, p);
    uint64_t sum = 0;
    for (size_t j = 0; j < n; j++)
        sum += ari_row_biased((double)x[j], step);
    return sum;
}

#endif
