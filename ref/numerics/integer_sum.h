/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Element steps of the two sums whose largest term is known in advance: row sums and contractions. Between these steps
 * there is only integer addition, which no order or grouping changes. numerics.md, sections 2 and 4. */
#include <stddef.h>

#include "ref/numerics/bits.h"

/* The integer nearest to x, ties to even, |x| <= 2^51, from the low bits of the magic sum; never an undefined
 * conversion, whatever x is. */
ARI_FN int64_t ari_nearest_integer(double x)
{
    return (int64_t)(ari_bits64(x + ARI_ROUND_MAGIC) - ARI_ROUND_MAGIC_BITS);
}

/* --- row sums ----------------------------------------------------------------------------------------------------- */

/** P' = min(40, 62 - ceil(log2(n + 1))): n integers of P' bits add up within int64. */
ARI_FN int32_t ari_rowsum_bits(size_t n)
{
    int32_t length = 0; /* number of bits of n: ceil(log2(n + 1)) */
    for (; n != 0; n >>= 1)
        length++;
    return length > 22 ? 62 - length : 40;
}

/** Returns rint(x*2^(p-e)); 0 if the row's exponent e marks an all-zero or non-finite row, and for a non-finite x.
 *  Every |x| < 2^e. */
ARI_FN int64_t ari_rowsum_quantise(double x, int32_t e, int32_t p)
{
    const int has_exponent = e != ARI_EXP_ZERO && e != ARI_EXP_NONFINITE;
    const int32_t shift = ari_clamp32(p - (has_exponent ? ari_clamp32(e, -1200, 1200) : 0), -2000, 2000);
    const int32_t half = shift / 2; /* two exact factors, because the shift of tiny doubles exceeds one exponent */
    const double y = x * ari_pow2(half) * ari_pow2(shift - half);
    const int finite = (ari_bits64(x) & 0x7fffffffffffffffu) < 0x7ff0000000000000u;
    return has_exponent && finite ? ari_nearest_integer(y) : 0;
}

/** Returns the row sum S*2^(e-p); +0 for a row of zeros, NaN for a row with a non-finite element. */
ARI_FN double ari_rowsum_value(int64_t s, int32_t e, int32_t p)
{
    if (e == ARI_EXP_NONFINITE)
        return (double)ari_nan32();
    return e == ARI_EXP_ZERO ? 0.0 : ari_scale2(ari_double64(s), e - p);
}

/* --- contractions ------------------------------------------------------------------------------------------------- */

#define ARI_CONTRACT_BITS 25
#define ARI_CONTRACT_LIMIT 33554431     /* 2^25 - 1 */
#define ARI_CONTRACT_NARROW_BITS 15     /* for products of bf16 numbers, */
#define ARI_CONTRACT_NARROW_LIMIT 32639 /* 127*2^8 + 127: two digits of int8 */
#define ARI_CONTRACT_NARROW_TERMS 16384 /* for longer sums whose right matrix is not a weight, 15 bits are too few */
#define ARI_CONTRACT_BLOCK 8191         /* number of terms whose exact sum fits in int64: 8191*(2^25 - 1)^2 < 2^63 */

/** Returns the number of int64 for a sum of that many terms: two if it may not fit one. */
ARI_FN int ari_contract_limbs(size_t terms)
{
    return terms > ARI_CONTRACT_BLOCK ? 2 : 1;
}

/** Returns clamp(rint(a*2^c*2^(25-e)), +-(2^25 - 1)); 0 if e marks an all-zero or non-finite row. c is the shift of
 *  this element, +c_k in A and -c_k in B; e is the exponent of its shifted row. */
ARI_FN int32_t ari_contract_quantise(float a, int32_t c, int32_t e)
{
    const int has_exponent = e != ARI_EXP_ZERO && e != ARI_EXP_NONFINITE;
    const uint32_t exponent = has_exponent ? (uint32_t)e : 0u;
    /* fp32 exponents and sums of two of them are within +-700, so the power of two is a normal binary64 */
    const int32_t shift = ari_clamp32((int32_t)((uint32_t)c + ARI_CONTRACT_BITS - exponent), -1000, 1000);
    const double x = (double)a * ari_pow2(shift);
    const double low = x < -(double)ARI_CONTRACT_LIMIT ? -(double)ARI_CONTRACT_LIMIT : x;
    const double y = low > (double)ARI_CONTRACT_LIMIT ? (double)ARI_CONTRACT_LIMIT : low;
    return has_exponent ? (int32_t)ari_nearest_integer(y) : 0;
}

/** Does the same with the limit of a narrow operand, whose exponents are larger by 25 - 15. */
ARI_FN int32_t ari_contract_quantise_narrow(float a, int32_t c, int32_t e)
{
    return ari_clamp32(ari_contract_quantise(a, c, e), -ARI_CONTRACT_NARROW_LIMIT, ARI_CONTRACT_NARROW_LIMIT);
}

/** Returns the shift for a column's exponent c, sign +1 in A and -1 in B: 0 for a column with NaN or infinity;
 *  ARI_EXP_ZERO for a column of zeros, which is left out. */
ARI_FN int32_t ari_contract_shift(int32_t c, int32_t sign)
{
    const uint32_t shift = c == ARI_EXP_NONFINITE ? 0u : (uint32_t)c * (uint32_t)sign;
    return c == ARI_EXP_ZERO ? ARI_EXP_ZERO : (int32_t)shift;
}

/** Returns the exponent of a*2^shift; with shift = ARI_EXP_ZERO the exponent of zero, unless a is NaN or infinite. */
ARI_FN int32_t ari_contract_exponent(float a, int32_t shift)
{
    const int32_t e = ari_exponent32(a);
    const int32_t scaled =
        e == ARI_EXP_ZERO || shift == ARI_EXP_ZERO ? ARI_EXP_ZERO : (int32_t)((uint32_t)e + (uint32_t)shift);
    return e == ARI_EXP_NONFINITE ? ARI_EXP_NONFINITE : scaled;
}

/** Returns the exponent of a narrow operand's row: 25 - 15 more than the smallest e with |x| < (1 - 2^-8 - 2^-16)*2^e
 *  for all elements, so that no integer exceeds the limit. A group's largest |x| has the largest exponent: they combine
 *  by max. */
ARI_FN int32_t ari_narrow_exponent(double x)
{
    const uint64_t significand = ari_bits64(x) & 0xfffffffffffffu, limit = (uint64_t)0x7eff00u << 29;
    const int32_t e = ari_exponent64(x), high = significand >= limit ? 1 : 0;
    const int number = e != ARI_EXP_ZERO && e != ARI_EXP_NONFINITE;
    return number ? e + high + ARI_CONTRACT_BITS - ARI_CONTRACT_NARROW_BITS : e;
}

/** Does the same for a*2^shift, like ari_contract_exponent. */
ARI_FN int32_t ari_contract_exponent_narrow(float a, int32_t shift)
{
    const int32_t e = ari_contract_exponent(a, shift), narrow_exponent = ari_narrow_exponent((double)a);
    const int number = e != ARI_EXP_ZERO && e != ARI_EXP_NONFINITE;
    return number ? (int32_t)((uint32_t)narrow_exponent + (uint32_t)shift) : e;
}

/* y*2^(e+f-50) rounded to fp32, with the flags of the two rows. */
ARI_FN float ari_contract_round(double y, int32_t e, int32_t f)
{
    const int nonfinite = e == ARI_EXP_NONFINITE || f == ARI_EXP_NONFINITE;
    const int zero = e == ARI_EXP_ZERO || f == ARI_EXP_ZERO;
    const uint32_t sum = nonfinite || zero ? 0u : (uint32_t)e + (uint32_t)f;
    const int32_t shift = ari_clamp32((int32_t)(sum - 2u * ARI_CONTRACT_BITS), -900, 900);
    const float value = zero ? 0.0f : (float)(y * ari_pow2(shift));
    return nonfinite ? ari_nan32() : value;
}

/** Returns fl32(fl64(s)*2^(e+f-50)); NaN if e or f is ARI_EXP_NONFINITE, else +0 if either is ARI_EXP_ZERO. */
ARI_FN float ari_contract_value(int64_t s, int32_t e, int32_t f)
{
    return ari_contract_round(ari_double64(s), e, f);
}

/* Returns fl64(hi*2^32 + lo), 0 <= lo < 2^32, correctly rounded. The remainder of the first addition (Knuth's two-sum)
 * is a multiple of 2^32 below 2^43. Adding lo to it is therefore exact, and only the last addition rounds. */
ARI_FN double ari_double96(int64_t hi, uint64_t lo)
{
    double upper;
    const double lower = ari_halves64(hi, &upper);
    const double a = upper * 0x1p32, b = lower * 0x1p32;
    const double sum = a + b;
    const double b_seen = sum - a;
    const double rest = (a - (sum - b_seen)) + (b - b_seen);
    return sum + (rest + (ari_float64(lo | 0x4330000000000000u) - 0x1p52));
}

/** Returns ari_contract_value of the exact integer hi*2^32 + lo for any lo: the limbs of a sum longer than one
 *  block. */
ARI_FN float ari_contract_value2(int64_t hi, int64_t lo, int32_t e, int32_t f)
{
    const uint64_t rest = (uint64_t)lo & 0xffffffffu;
    const uint64_t carry = (((uint64_t)lo + 0x8000000000000000u) >> 32) - 0x80000000u; /* lo >> 32 as a signed value */
    return ari_contract_round(ari_double96(ari_add64(hi, (int64_t)carry), rest), e, f);
}
