/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Splits a contraction's integers (numerics.md, section 2) into digits for int8 products. An integer q of magnitude at
 * most 2^25 - 1 is
 *    q = d0 + d1*2^7 + d2*2^14 + d3*2^21,  -64 <= d0, d1, d2 <= 63,  -16 <= d3 <= 16.
 * A sum of products of two integers needs the sums over digits i and j for each i + j: sixteen products of digits.
 * Karatsuba's method needs ten. With q = h*2^14 + l, where h and l have two digits each, it computes hh', ll' and (h +
 * l)(h' + l'). Each of the first two again takes three products of digits or of sums of two digits. The third takes
 * four, because sums of all four digits would need nine bits. The sums of two digits, d0+d1, d2+d3, d0+d2 and d1+d3,
 * have a magnitude of at most 128 and are never +128, so they fit in int8. int32 holds the sum of 131071 products of
 * either kind, 131071*128*128 < 2^31. */
#include "ref/numerics/bits.h"

/* q + 64*(1 + 2^7 + 2^14) + 16*2^21 is not negative, and its groups of 7 bits are d0 + 64, d1 + 64, d2 + 64, d3 +
 * 16. */
#define ARI_DIGITS_OFFSET 34611264u

/** Digit i of q. */
ARI_FN int32_t ari_digit(int32_t q, int i)
{
    const uint32_t bits = ((uint32_t)q + ARI_DIGITS_OFFSET) >> 7 * i;
    return i == 3 ? (int32_t)bits - 16 : (int32_t)(bits & 127u) - 64;
}
