/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Divides integers by a divisor known before the loop through the upper half of a product, because GPUs have no
 * instruction for integer division. n / d = floor(n*m / 2^(63 + l)) for every n below 2^63, with l = ceil(log2 d) and m
 * = floor(2^(63 + l) / d) + 1, which has 64 bits (Granlund and Montgomery 1994, theorem 4.2, for N = 63). */
#include <stddef.h>
#include <stdint.h>

#include "ref/core/float_bits.h"

__extension__ typedef unsigned __int128 ari_wide;

typedef struct ari_divisor {
    size_t divisor;
    uint64_t multiplier;
    uint32_t shift; /* l */
} ari_divisor;

/** Prepares a division by a number below 2^63. A divisor of 0, the extent of an empty dimension, is replaced by 1,
 *  since nothing is divided by it. */
static inline ari_divisor ari_divisor_of(size_t divisor)
{
    ari_divisor d = {divisor > 0 ? divisor : 1, 0, 0};
    while (((uint64_t)1 << d.shift) < d.divisor)
        d.shift++;
    d.multiplier = (uint64_t)(((ari_wide)1 << (63 + d.shift)) / d.divisor) + 1;
    return d;
}

/** n / d->by, n < 2^63. */
ARI_FN size_t ari_quotient(const ari_divisor *d, size_t n)
{
    return (size_t)((ari_wide)(2 * (uint64_t)n) * d->multiplier >> 64) >> d->shift;
}

/** The quotient; *n becomes the remainder. */
ARI_FN size_t ari_divide(const ari_divisor *d, size_t *n)
{
    const size_t quotient = ari_quotient(d, *n);
    *n -= quotient * d->divisor;
    return quotient;
}
