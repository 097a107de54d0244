/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Floating-point values as bits: the canonical NaN, exponents, powers of two, and keys that have the values' order.
 * Compiled by the C compiler and by nvcc; nothing here depends on a library's rounding. numerics.md, section 1. */
#include <math.h>

#include "ref/core/float_bits.h"

/* Only NaN that is stored, tapped, hashed or compared. x86's default NaN has the sign bit set, a GPU's does not. */
#define ARI_NAN_BITS 0x7fc00000u
/* The exponent of a row of zeros and of a row with a NaN or an infinity: an integer maximum carries both. */
#define ARI_EXP_ZERO INT32_MIN
#define ARI_EXP_NONFINITE INT32_MAX
/* 1.5 * 2^52. Adding it rounds |x| <= 2^51 to the nearest integer, ties to even, and leaves the integer in the low
 * bits. */
#define ARI_ROUND_MAGIC 0x1.8p52
#define ARI_ROUND_MAGIC_BITS 0x4338000000000000u

ARI_FN float ari_nan32(void)
{
    return ari_float32(ARI_NAN_BITS);
}

/** Replaces any NaN by 0x7fc00000; other values are unchanged. */
ARI_FN float ari_canonical32(float x)
{
    return x != x ? ari_nan32() : x;
}

/** Round to nearest, ties to even. */
ARI_FN double ari_rint(double x)
{
    return rint(x);
}

ARI_FN int32_t ari_clamp32(int32_t k, int32_t low, int32_t high)
{
    const int32_t at_least = k < low ? low : k;
    return at_least > high ? high : at_least;
}

/** Returns 2^k for -1022 <= k <= 1023. */
ARI_FN double ari_pow2(int32_t k)
{
    return ari_float64((uint64_t)(uint32_t)(k + 1023) << 52);
}

/** Returns x*2^k for any k: exact if representable, otherwise rounded once. */
ARI_FN double ari_scale2(double x, int32_t k)
{
    /* steps of 2^-969 keep 53 bits above the subnormals, so that only the last product rounds; after three steps in
     * either direction every finite x has become 0 or infinity */
    if (k > 1023) {
        x *= 0x1p1023;
        k = k > 4000 ? 2977 : k - 1023;
        if (k > 1023) {
            x *= 0x1p1023;
            k -= 1023;
            k = k > 1023 ? 1023 : k;
        }
    } else if (k < -1022) {
        x *= 0x1p-969;
        k = k < -4000 ? -3031 : k + 969;
        if (k < -1022) {
            x *= 0x1p-969;
            k += 969;
            k = k < -1022 ? -1022 : k;
        }
    }
    return x * ari_pow2(k);
}

/** The smallest integer e with |x| < 2^e, from the bits, subnormals included; ARI_EXP_ZERO for zeros,
 *  ARI_EXP_NONFINITE for NaN and infinities. */
ARI_FN int32_t ari_exponent32(float x)
{
    const uint32_t magnitude = ari_bits32(x) & 0x7fffffffu;
    const uint64_t wide = ari_bits64((double)x); /* every fp32 value but 0 is a normal binary64 */
    const int32_t e = (int32_t)((wide >> 52) & 0x7ffu) - 1022;
    const int32_t finite = magnitude == 0 ? ARI_EXP_ZERO : e;
    return magnitude >= 0x7f800000u ? ARI_EXP_NONFINITE : finite;
}

/** Does the same for binary64. */
ARI_FN int32_t ari_exponent64(double x)
{
    const uint64_t magnitude = ari_bits64(x) & 0x7fffffffffffffffu;
    const int subnormal = magnitude < 0x0010000000000000u;
    const uint64_t wide = subnormal ? ari_bits64(x * 0x1p54) : magnitude;
    const int32_t e = (int32_t)((wide >> 52) & 0x7ffu) - (subnormal ? 1076 : 1022);
    const int32_t finite = magnitude == 0 ? ARI_EXP_ZERO : e;
    return magnitude >= 0x7ff0000000000000u ? ARI_EXP_NONFINITE : finite;
}

/** Returns an int32 with the value's order: -0 as +0; NaN and both infinities are INT32_MAX, so that a maximum keeps
 *  them. */
ARI_FN int32_t ari_key32(float x)
{
    const uint32_t u = ari_bits32(x);
    const int32_t magnitude = (int32_t)(u & 0x7fffffffu);
    const int32_t key = (u >> 31) != 0 ? -magnitude : magnitude;
    return magnitude >= 0x7f800000 ? INT32_MAX : key;
}

/** Returns the value of a key; NaN for INT32_MAX. */
ARI_FN float ari_key32_value(int32_t key)
{
    const uint32_t u = key < 0 ? 0x80000000u | (0u - (uint32_t)key) : (uint32_t)key;
    return key == INT32_MAX ? ari_nan32() : ari_float32(u);
}

/** The sum of two int64 modulo 2^64: signed overflow is undefined in C, and partial sums may wrap. */
ARI_FN int64_t ari_add64(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)a + (uint64_t)b);
}

/* Returns s - *high with *high and the result exact: the upper 32 bits times 2^32, and the lower 32 bits. Adding
 * 2^84 and 2^52 through the bits and subtracting them again vectorises without AVX-512; the conversion instruction
 * does not. */
ARI_FN double ari_halves64(int64_t s, double *high)
{
    const uint64_t biased = (uint64_t)s + 0x8000000000000000u;
    *high = ari_float64((biased >> 32) | 0x4530000000000000u) - (0x1p84 + 0x1p63);
    return ari_float64((biased & 0xffffffffu) | 0x4330000000000000u) - 0x1p52;
}

/** Returns fl64(s), correctly rounded: one addition of two exact halves. */
ARI_FN double ari_double64(int64_t s)
{
    double high;
    const double low = ari_halves64(s, &high);
    return high + low;
}
