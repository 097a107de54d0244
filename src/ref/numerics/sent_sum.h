/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_SENT_SUM_H
#define ARI_NUMERICS_SENT_SUM_H

/* Exact sums on their way between ranks (numerics.md, "In bf16"): integers of `width` bytes, at most 8, the lowest first,
 * whose highest bit is the sign. */
#include <stddef.h>

#include "ref/numerics/accumulator.h"

ARI_FN void ari_sent_write(uint8_t *to, int64_t v, size_t width)
{
    for (size_t b = 0; b < width; b++)
        to[b] = (uint8_t)((uint64_t)v >> 8 * b);
}

ARI_FN int64_t ari_sent_read(const uint8_t *from, size_t width)
{
    const uint64_t sign = (uint64_t)0 - (uint64_t)(from[width - 1] >> 7);
    uint64_t v = width < 8 ? sign << 8 * (width % 8) : 0u;
    for (size_t b = 0; b < width; b++)
        v |= (uint64_t)from[b] << 8 * b;
    return (int64_t)v;
}

/** Bytes of a state that is the sum of at most so many values, each slice of which is below 2^32: t, then H and L; of
 *  one value that value. */
ARI_FN size_t ari_sent_state_bytes(size_t values)
{
    const size_t more = (values > (size_t)1 << 7 ? 2u : 0u) + (values > (size_t)1 << 15 ? 2u : 0u) +
                        (values > (size_t)1 << 23 ? 2u : 0u);
    return values == 1 ? sizeof(float) : 11 + more;
}

/** The state in so many bytes, and one that is merged with it. */
ARI_FN void ari_sent_write_state(uint8_t *to, uint8_t t, int64_t h, int64_t l, size_t width)
{
    const size_t each = width / 2;
    if (width == sizeof(float)) {
        ari_sent_write(to, (int64_t)ari_bits32(ari_acc_value(t, h, l)), width);
        return;
    }
    to[0] = t;
    ari_sent_write(to + 1, h, each);
    ari_sent_write(to + 1 + each, l, each);
}

ARI_FN void ari_sent_merge_state(uint8_t *t, int64_t *h, int64_t *l, const uint8_t *from, size_t width)
{
    const size_t each = width / 2;
    if (width == sizeof(float))
        ari_acc_add(t, h, l, ari_float32((uint32_t)ari_sent_read(from, width)));
    else
        ari_acc_merge(t, h, l, from[0], ari_sent_read(from + 1, each), ari_sent_read(from + 1 + each, each));
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
