/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A contraction's integer (numerics.md, section 2) in digits for products of int8. An integer q of at most 2^25 - 1
 * in magnitude is
 *     q = d0 + d1*2^7 + d2*2^14 + d3*2^21,  -64 <= d0, d1, d2 <= 63,  -16 <= d3 <= 16.
 * The sum of products of two integers takes the sums over digits i of the one and j of the other with i + j alike:
 * sixteen products of digits. Karatsuba's rule makes ten of them: with q = h*2^14 + l of two digits each it takes hh',
 * ll' and (h + l)(h' + l'), and each of the first two again from three products of digits or of sums of two; of the
 * third, whose sums of all four digits would need nine bits, it takes four. Those sums of two, d0+d1, d2+d3, d0+d2 and
 * d1+d3, are at most 128 in magnitude and never +128: int8 too. int32 holds the sum of 131071 products of either kind,
 * 131071*128*128 < 2^31. */
#include "ref/numerics/bits.h"

/* q + 64*(1 + 2^7 + 2^14) + 16*2^21 is not negative; its groups of 7 bits are d0 + 64, d1 + 64, d2 + 64, d3 + 16. */
#define ARI_DIGITS_OFFSET 34611264u

/** Digit i of q. */
ARI_FN int32_t ari_digit(int32_t q, int i)
{
    const uint32_t bits = ((uint32_t)q + ARI_DIGITS_OFFSET) >> 7 * i;
    return i == 3 ? (int32_t)bits - 16 : (int32_t)(bits & 127u) - 64;
}
