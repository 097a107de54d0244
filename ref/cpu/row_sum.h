/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/kernels.h"
#include "ref/cpu/rows/rows.h"
#include "ref/numerics/scalar.h"

/* Loops that row kernels share: exponents and quantised sums of a row (numerics.md, "Sums along a row"). They must be
 * inlined, so that they are compiled for the instruction set of the calling ARI_SIMD function. */
#if defined(__GNUC__)
#define ARI_ROW_LOOP static inline __attribute__((always_inline))
/* For a function with a hot loop: inlines everything that it calls, whatever gcc's size heuristics say. */
#define ARI_ROW_KERNEL ARI_SIMD __attribute__((flatten)) static
#else
#define ARI_ROW_LOOP static inline
#define ARI_ROW_KERNEL static
#endif

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* Returns the factor 2^(p-e) of a row sum; 0 for rows that are all zero or contain a non-finite value, whose sum is not
 * used. */
ARI_ROW_LOOP double ari_row_step(int32_t e, int32_t p)
{
    return e == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE ? 0.0 : ari_scale2(1.0, p - e);
}

/* Computes ari_rowsum_quantise with its power of two, `step`, hoisted out of the loop and biased by
 * ARI_ROUND_MAGIC_BITS, which ari_row_value subtracts from the whole sum; |x*step| < 2^40 for finite x. Adding the
 * magic number rounds and converts to an integer in one operation on every instruction set. NaN and infinity are never
 * converted: they leave arbitrary bits in a sum that is not used. */
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

/* Convert a value to an int32 key of the same order, and back. NaN is beyond the infinities, and -0 is below +0. */
ARI_ROW_LOOP int32_t ari_row_ordered(float x)
{
    const int32_t bits = (int32_t)ari_bits32(x);
    return bits ^ (int32_t)((uint32_t)(bits >> 31) >> 1);
}

ARI_ROW_LOOP float ari_row_of_ordered(int32_t ordered)
{
    return ari_float32((uint32_t)ordered ^ ((uint32_t)(ordered >> 31) >> 1));
}

/* Returns the largest key of a row, INT32_MAX if a number is not finite; n > 0. */
ARI_ROW_LOOP int32_t ari_row_largest_key(const float *x, size_t n)
{
    int32_t top = INT32_MIN;
    uint32_t magnitude = 0;
    for (size_t j = 0; j < n; j++) {
        const int32_t ordered = ari_row_ordered(x[j]);
        const uint32_t element_bits = ari_row_magnitude32(x[j]);
        top = ordered > top ? ordered : top;
        magnitude = element_bits > magnitude ? element_bits : magnitude;
    }
    return magnitude < 0x7f800000u ? ari_key32(ari_row_of_ordered(top)) : INT32_MAX;
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

/* Computes the integer sum, without bias, of numbers from 0 to 1, whose exponent is 1, in parts that fp32 holds: the
 * nearest multiples of 2^-20, and the remainders, in which halves round to even as those of the full number would. */
ARI_ROW_LOOP uint64_t ari_row_unit_integer(const float *x, size_t n, int32_t p)
{
    enum { BLOCK = 1024 }; /* number of terms whose partial sums stay below 2^31 */
    const float magic = (float)ari_pow2(24 - p) * 1.5f;
    uint64_t sum = 0;
    for (size_t begin = 0; begin < n; begin += BLOCK) {
        const size_t count = n - begin < BLOCK ? n - begin : BLOCK;
        uint32_t near = 0, rest = 0, top = 0;
        for (size_t j = begin; j < begin + count; j++) {
            const float shifted = x[j] + 12.0f, residual = x[j] - (shifted - 12.0f);
            near += ari_bits32(shifted);
            rest += ari_bits32(residual + magic);
            top = ari_bits32(x[j]) > top ? ari_bits32(x[j]) : top;
        }
        near -= (uint32_t)count * ari_bits32(12.0f);
        rest -= (uint32_t)count * ari_bits32(magic);
        sum += top <= ari_bits32(1.0f) && p > 21 ? ((uint64_t)near << (p - 21)) + (uint64_t)(int64_t)(int32_t)rest
                                                 : ari_row_unbiased(ari_row_integer(x + begin, count, 1, p), count);
    }
    return sum;
}
