/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Exact gradient sums in transit between ranks (numerics.md, "In bf16"): integers of `width` bytes, lowest byte first,
 * whose highest bit is the sign. */
#include <stddef.h>

#include "ref/numerics/accumulator.h"

ARI_FN void ari_sent_write(uint8_t *dst, int64_t v, size_t width)
{
    for (size_t b = 0; b < width; b++)
        dst[b] = (uint8_t)((uint64_t)v >> 8 * b);
}

ARI_FN int64_t ari_sent_read(const uint8_t *src, size_t width)
{
    const size_t above = 64 - 8 * width;
    uint64_t v = 0;
    for (size_t b = 0; b < width; b++)
        v |= (uint64_t)src[b] << 8 * b;
    return (int64_t)(v << above) >> above;
}

/** Sets a state of the accumulator whose value is v, rounded to bf16 if sums are stored so. An infinity from an
 *  overflowed sum, and with bf16 the -0 to which a negative sum rounded, are stored as such; any other -0 becomes
 *  +0. */
ARI_FN void ari_acc_put(uint8_t *t, int64_t *h, int64_t *l, float x, bool narrow)
{
    const float v = narrow ? ari_f32_of_bf16(ari_bf16_of_f32(x)) : x;
    const uint32_t bits = ari_bits32(v);
    const int infinite = (bits & 0x7fffffffu) == 0x7f800000u, highest = narrow ? 21 : 8;
    const int64_t beyond = (int64_t)1 << (278 - highest * ari_acc_bits(narrow)); /* 2^129 */
    *t = (uint8_t)(infinite ? highest : ari_acc_top(v, narrow));
    *h = infinite ? (bits >> 31 ? -beyond : beyond) : ari_acc_slice(v, *t, narrow);
    *l = narrow && bits == 0x80000000u ? -1 : ari_acc_slice(v, *t - 1, narrow); /* -1: -2^-162 */
}

#define ARI_SENT_WORD 8u       /* largest size in bytes of a state that fits in one word */
#define ARI_SENT_TOP 5u        /* bits of t in the state */
#define ARI_SENT_NONFINITE 31u /* value that represents ARI_ACC_NONFINITE */

/** Returns the bytes of a state that is the sum of at most `values` values: for one value that value as fp32; for a few
 *  narrow values one word with t in 5 bits and both sums in 17, 21 or 29 bits; otherwise t, H and L. */
ARI_FN size_t ari_sent_state_bytes(size_t values, bool narrow)
{
    if (values == 1)
        return sizeof(float);
    if (!narrow)
        return values <= (size_t)1 << 7 ? 11 : values <= (size_t)1 << 15 ? 13 : values <= (size_t)1 << 23 ? 15 : 17;
    if (values <= (size_t)1 << 7)
        return values <= 8 ? 5 : 6;
    return values <= (size_t)1 << 15 ? ARI_SENT_WORD : values <= (size_t)1 << 26 ? 11 : 13;
}

/** Write a state in `width` bytes, and merge such a state into another. */
ARI_FN void ari_sent_write_state(uint8_t *dst, uint8_t t, int64_t h, int64_t l, size_t width, bool narrow)
{
    const size_t sum_width = width / 2;
    if (width == sizeof(float)) {
        ari_sent_write(dst, (int64_t)ari_bits32(ari_acc_sum(t, h, l, narrow)), width);
    } else if (width <= ARI_SENT_WORD) {
        const uint32_t bits = (uint32_t)(8 * width - ARI_SENT_TOP) / 2;
        const uint64_t top = t == ARI_ACC_NONFINITE ? ARI_SENT_NONFINITE : t;
        const uint64_t low = (uint64_t)l & (((uint64_t)1 << bits) - 1);
        ari_sent_write(dst, (int64_t)((uint64_t)h << (ARI_SENT_TOP + bits) | low << ARI_SENT_TOP | top), width);
    } else {
        dst[0] = t;
        ari_sent_write(dst + 1, h, sum_width);
        ari_sent_write(dst + 1 + sum_width, l, sum_width);
    }
}

ARI_FN void ari_sent_merge_state(uint8_t *t, int64_t *h, int64_t *l, const uint8_t *src, size_t width, bool narrow)
{
    const size_t sum_width = width / 2;
    if (width == sizeof(float)) {
        ari_acc_add(t, h, l, ari_float32((uint32_t)ari_sent_read(src, width)), narrow);
    } else if (width <= ARI_SENT_WORD) {
        const uint32_t bits = (uint32_t)(8 * width - ARI_SENT_TOP) / 2, above = 64 - bits;
        const int64_t word = ari_sent_read(src, width);
        const uint32_t top = (uint32_t)word & ((1u << ARI_SENT_TOP) - 1);
        const int64_t low = (int64_t)((uint64_t)word << (above - ARI_SENT_TOP)) >> above;
        ari_acc_merge(t, h, l, (uint8_t)(top == ARI_SENT_NONFINITE ? ARI_ACC_NONFINITE : top),
                      word >> (ARI_SENT_TOP + bits), low);
    } else {
        ari_acc_merge(t, h, l, src[0], ari_sent_read(src + 1, sum_width),
                      ari_sent_read(src + 1 + sum_width, sum_width));
    }
}
