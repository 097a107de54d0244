/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Order-independent accumulator (numerics.md, section 3): a sum of fp32 values whose result depends only on the
 * multiset of values. |v|*2^149 is an integer below 2^277, split into slices of 32 bits, or of 13 bits if the sum is
 * stored as bf16 (narrow). The state holds the sums of slice t and slice t-1 over all values so far, where t is the
 * highest slice that any value reaches. The identity is t = h = l = 0. It holds 2^31 values. */
#include <stdbool.h>

#include "ref/numerics/bits.h"

#define ARI_ACC_NONFINITE 255

/** Bits of a slice. */
ARI_FN int32_t ari_acc_bits(bool narrow)
{
    return narrow ? 13 : 32;
}

/** Returns the highest nonzero slice of v, 0..8 or 0..21; 0 for zeros; ARI_ACC_NONFINITE for NaN and infinities. */
ARI_FN int ari_acc_top(float v, bool narrow)
{
    const uint32_t magnitude = ari_bits32(v) & 0x7fffffffu;
    const int biased = (int)(magnitude >> 23);
    /* The leading bit of a normal value is bit biased + 22, which is below 277, where *79 >> 10 divides by 13. That of
     * a subnormal is below bit 23. */
    const int wide = biased == 0 ? 0 : (biased + 22) >> 5;
    const int thin = biased == 0 ? magnitude >> 13 != 0 : (biased + 22) * 79 >> 10;
    return biased == 255 ? ARI_ACC_NONFINITE : narrow ? thin : wide;
}

/** Returns slice b of v, bits [w*b, w*b + w) of |v|*2^149 for slices of w bits, with v's sign; 0 if there is no such
 *  slice, and for non-finite v. */
ARI_FN int64_t ari_acc_slice(float v, int32_t b, bool narrow)
{
    const uint32_t u = ari_bits32(v);
    const int32_t biased = (int32_t)((u >> 23) & 0xffu), bits = ari_acc_bits(narrow);
    const uint32_t implicit = biased != 0 ? 0x800000u : 0u;
    const uint32_t significand = biased == 255 ? 0u : (u & 0x7fffffu) | implicit;
    const int32_t up =
        (biased != 0 ? biased - 1 : 0) - bits * b; /* the significand's lowest bit, seen from the slice's */
    /* Nothing of the 24 bits remains in a slice that is a slice's width above or 24 below; 63 stands for all such
     * shifts. */
    const uint32_t left = (uint32_t)ari_clamp32(up, 0, 63);
    const uint32_t right = (uint32_t)ari_clamp32(-up, 0, 63);
    const uint64_t slice = (((uint64_t)significand << left) >> right) & (((uint64_t)1 << bits) - 1);
    const uint64_t negative = (uint64_t)0 - (u >> 31); /* all ones for a negative v: ~x + 1 = -x */
    return (int64_t)((slice ^ negative) - negative);
}

/** Raises the state to slice t_new; does nothing if it is there already. */
ARI_FN void ari_acc_raise(uint8_t *t, int64_t *h, int64_t *l, uint8_t t_new)
{
    const int old_slice = *t, new_slice = t_new;
    const int64_t shifted = new_slice == old_slice + 1 ? *h : 0; /* old_slice is at most 21 if new_slice is
                                                                    ARI_ACC_NONFINITE */
    *l = new_slice > old_slice ? shifted : *l;
    *h = new_slice > old_slice ? 0 : *h;
    *t = (uint8_t)(new_slice > old_slice ? new_slice : old_slice);
}

/** Adds one value. After a non-finite value the state stays t = ARI_ACC_NONFINITE, h = l = 0; every slice of such a
 *  value is 0. */
ARI_FN void ari_acc_add(uint8_t *t, int64_t *h, int64_t *l, float v, bool narrow)
{
    ari_acc_raise(t, h, l, (uint8_t)ari_acc_top(v, narrow));
    *h = ari_add64(*h, ari_acc_slice(v, *t, narrow));
    *l = ari_add64(*l, ari_acc_slice(v, *t - 1, narrow));
}

/** Adds the state (t2, h2, l2) to (t, h, l): the result equals that of adding all values of both to one state. */
ARI_FN void ari_acc_merge(uint8_t *t, int64_t *h, int64_t *l, uint8_t t2, int64_t h2, int64_t l2)
{
    ari_acc_raise(t, h, l, t2);
    ari_acc_raise(&t2, &h2, &l2, *t);
    *h = ari_add64(*h, h2);
    *l = ari_add64(*l, l2);
}

/** Returns fl32((fl64(h)*2^w + fl64(l))*2^(w(t-1)-149)) for slices of w bits; NaN for a non-finite state. */
ARI_FN float ari_acc_sum(uint8_t t, int64_t h, int64_t l, bool narrow)
{
    const int32_t exponent = ari_acc_bits(narrow) * ((t == ARI_ACC_NONFINITE ? 0 : (int32_t)t) - 1) - 149;
    const double scale = narrow ? 0x1p13 : 0x1p32;
    const float value = (float)((ari_double64(h) * scale + ari_double64(l)) * ari_pow2(exponent));
    return t == ARI_ACC_NONFINITE ? ari_nan32() : value;
}

/** Returns the state's value, rounded once more to bf16 if sums are stored as bf16. */
ARI_FN float ari_acc_value(uint8_t t, int64_t h, int64_t l, bool narrow)
{
    const float sum = ari_acc_sum(t, h, l, narrow);
    return narrow ? ari_f32_of_bf16(ari_bf16_of_f32(sum)) : sum;
}
