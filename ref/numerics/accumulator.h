/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_ACCUMULATOR_H
#define ARI_NUMERICS_ACCUMULATOR_H

/* The order-independent accumulator (docs/numerics.md, section 3): a sum of fp32 values whose result depends only on
 * the multiset of values. |v|*2^149 is an integer below 2^277, cut into nine 32-bit slices; the state keeps the sums of
 * slice t and slice t-1 of every value so far, t the highest slice that any of them reaches. The identity is t = h = l
 * = 0. It holds 2^31 values. */
#include "ref/numerics/bits.h"

#define ARI_ACC_NONFINITE 255

/** The highest non-zero slice of v, 0..8; 0 for zeros; ARI_ACC_NONFINITE for NaN and infinities. */
ARI_FN int ari_acc_top(float v)
{
    const uint32_t magnitude = ari_bits32(v) & 0x7fffffffu;
    const int biased = (int)(magnitude >> 23);
    /* The leading bit of a normal value stands at biased + 22; a subnormal lies in slice 0. */
    const int top = biased == 0 ? 0 : (biased + 22) >> 5;
    return biased == 255 ? ARI_ACC_NONFINITE : top;
}

/** Slice b of v, bits [32b, 32b + 32) of |v|*2^149, with v's sign; 0 outside 0..8 and for non-finite v. */
ARI_FN int64_t ari_acc_slice(float v, int b)
{
    const uint32_t u = ari_bits32(v);
    const int biased = (int)((u >> 23) & 0xffu);
    const uint64_t significand = (u & 0x7fffffu) | (biased != 0 ? 0x800000u : 0u);
    const int up = (biased != 0 ? biased - 1 : 0) - 32 * b; /* the significand's lowest bit, seen from the slice's */
    const int left = up < 0 ? 0 : up;
    const int right = up < 0 ? -up : 0;
    const uint64_t bits = ((significand << (left & 31)) >> (right & 31)) & 0xffffffffu;
    const int inside = left < 32 && right < 32 && biased != 255;
    const int64_t slice = inside ? (int64_t)bits : 0;
    return (u >> 31) != 0 ? -slice : slice;
}

/** Raises the state to slice t_new; nothing where it is there already. */
ARI_FN void ari_acc_raise(uint8_t *t, int64_t *h, int64_t *l, uint8_t t_new)
{
    if (t_new <= *t)
        return;
    *l = t_new == *t + 1 && t_new != ARI_ACC_NONFINITE ? *h : 0;
    *h = 0;
    *t = t_new;
}

/** Adds one value. A non-finite one absorbs everything: t = ARI_ACC_NONFINITE, h = l = 0. */
ARI_FN void ari_acc_add(uint8_t *t, int64_t *h, int64_t *l, float v)
{
    ari_acc_raise(t, h, l, (uint8_t)ari_acc_top(v));
    if (*t == ARI_ACC_NONFINITE)
        return;
    *h = ari_add64(*h, ari_acc_slice(v, *t));
    *l = ari_add64(*l, ari_acc_slice(v, *t - 1));
}

/** Adds the state (t2, h2, l2) to (t, h, l): as if every value of both had been added to one. */
ARI_FN void ari_acc_merge(uint8_t *t, int64_t *h, int64_t *l, uint8_t t2, int64_t h2, int64_t l2)
{
    ari_acc_raise(t, h, l, t2);
    ari_acc_raise(&t2, &h2, &l2, *t);
    *h = ari_add64(*h, h2);
    *l = ari_add64(*l, l2);
}

/** fl32((fl64(h)*2^32 + fl64(l))*2^(32(t-1)-149)); NaN for a non-finite state. */
ARI_FN float ari_acc_value(uint8_t t, int64_t h, int64_t l)
{
    const int32_t exponent = 32 * ((t == ARI_ACC_NONFINITE ? 0 : (int32_t)t) - 1) - 149;
    const float value = (float)(((double)h * 0x1p32 + (double)l) * ari_pow2(exponent));
    return t == ARI_ACC_NONFINITE ? ari_nan32() : value;
}

#endif
