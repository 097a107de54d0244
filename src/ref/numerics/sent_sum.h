/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_SENT_SUM_H
#define ARI_NUMERICS_SENT_SUM_H

/* Exact sums on their way between ranks (numerics.md, "In bf16"): integers of `width` bytes, the lowest first, whose
 * highest bit is the sign. The receiver adds them up modulo 2^128, which no order changes. */
#include <stddef.h>

#include "ref/numerics/accumulator.h"

#define ARI_SENT_GRADIENT 11 /* bytes of H*2^32 + L; of up to 2^21 values L is exact in binary64 however it is split */

typedef struct ari_sent {
    uint64_t low, high;
} ari_sent;

ARI_FN ari_sent ari_sent_add(ari_sent a, ari_sent b)
{
    const uint64_t low = a.low + b.low;
    const ari_sent sum = {low, a.high + b.high + (low < a.low ? 1u : 0u)};
    return sum;
}

ARI_FN uint64_t ari_sent_sign(uint64_t word)
{
    return (uint64_t)0 - (word >> 63);
}

/** h*2^32 + l */
ARI_FN ari_sent ari_sent_of(int64_t h, int64_t l)
{
    const uint64_t top = (uint64_t)h, rest = (uint64_t)l;
    const ari_sent upper = {top << 32, (top >> 32) | (ari_sent_sign(top) << 32)}, lower = {rest, ari_sent_sign(rest)};
    return ari_sent_add(upper, lower);
}

/** That integer >> 32; what is left is its low 32 bits. */
ARI_FN int64_t ari_sent_high(ari_sent v)
{
    return (int64_t)((v.low >> 32) | (v.high << 32));
}

ARI_FN void ari_sent_write(uint8_t *to, ari_sent v, size_t width)
{
    for (size_t b = 0; b < width; b++)
        to[b] = (uint8_t)((b < 8 ? v.low : v.high) >> 8 * (b % 8));
}

ARI_FN ari_sent ari_sent_read(const uint8_t *from, size_t width)
{
    const uint64_t sign = ari_sent_sign((uint64_t)from[width - 1] << 56);
    ari_sent v = {width < 8 ? sign << 8 * (width % 8) : 0u, width < 8 ? sign : sign << 8 * (width % 8)};
    for (size_t b = 0; b < width; b++) {
        const uint64_t byte = (uint64_t)from[b] << 8 * (b % 8);
        v.low |= b < 8 ? byte : 0u;
        v.high |= b < 8 ? 0u : byte;
    }
    return v;
}

/** A state of the accumulator whose value is v: +0 for -0, and an infinity, which a sum overflowed to, for itself. */
ARI_FN void ari_acc_put(uint8_t *t, int64_t *h, int64_t *l, float v)
{
    const uint32_t bits = ari_bits32(v);
    const int infinite = (bits & 0x7fffffffu) == 0x7f800000u;
    *t = infinite ? 8 : (uint8_t)ari_acc_top(v);
    *h = infinite ? (bits >> 31 ? -((int64_t)1 << 22) : (int64_t)1 << 22) : ari_acc_slice(v, *t);
    *l = ari_acc_slice(v, *t - 1);
}

#endif
