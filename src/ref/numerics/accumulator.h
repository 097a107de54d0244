/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_ACCUMULATOR_H
#define ARI_NUMERICS_ACCUMULATOR_H

/* The order-independent accumulator (numerics.md, section 3): a sum of fp32 values whose result depends only on
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
ARI_FN int64_t ari_acc_slice(float v, int32_t b)
{
    const uint32_t u = ari_bits32(v);
    const int32_t biased = (int32_t)((u >> 23) & 0xffu);
    const uint32_t implicit = biased != 0 ? 0x800000u : 0u;
    const uint32_t significand = biased == 255 ? 0u : (u & 0x7fffffu) | implicit;
    const int32_t up =
        (biased != 0 ? biased - 1 : 0) - 32 * b; /* the significand's lowest bit, seen from the slice's */
    /* From 32 places up and from 24 down nothing is left of the 24 bits in the slice: 63 stands for all such. */
    const uint32_t left = (uint32_t)ari_clamp32(up, 0, 63);
    const uint32_t right = (uint32_t)ari_clamp32(-up, 0, 63);
    const uint64_t bits = (((uint64_t)significand << left) >> right) & 0xffffffffu;
    const uint64_t negative = (uint64_t)0 - (u >> 31); /* all ones for a negative v: ~x + 1 = -x */
    return (int64_t)((bits ^ negative) - negative);
}

/** Raises the state to slice t_new; nothing where it is there already. */
ARI_FN void ari_acc_raise(uint8_t *t, int64_t *h, int64_t *l, uint8_t t_new)
{
    const int from = *t, to = t_new;
    const int64_t shifted = to == from + 1 ? *h : 0; /* from is 8 at most when to is ARI_ACC_NONFINITE */
    *l = to > from ? shifted : *l;
    *h = to > from ? 0 : *h;
    *t = (uint8_t)(to > from ? to : from);
}

/** Adds one value. A non-finite one absorbs everything: t = ARI_ACC_NONFINITE, h = l = 0, and every slice is 0
 *  there. */
ARI_FN void ari_acc_add(uint8_t *t, int64_t *h, int64_t *l, float v)
{
    ari_acc_raise(t, h, l, (uint8_t)ari_acc_top(v));
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
    const float value = (float)((ari_double64(h) * 0x1p32 + ari_double64(l)) * ari_pow2(exponent));
    return t == ARI_ACC_NONFINITE ? ari_nan32() : value;
}

#endif
