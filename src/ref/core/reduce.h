/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_REDUCE_H
#define ARI_CORE_REDUCE_H

#include <stdbool.h>

#include "anyrank/comm.h"
#include "ref/core/float_bits.h"

/** Combines two or four arrays, element by element and from left to right: ((a op b) op c) op d. One operation at a
 *  time in the type's own arithmetic; BF16 and F16 in fp32, rounded after each; integers wrap (they are computed
 *  unsigned). out may be one of the inputs; other overlap is not allowed. */
typedef struct ari_reduce {
    void (*two)(void *out, const void *a, const void *b, size_t n);
    void (*four)(void *out, const void *a, const void *b, const void *c, const void *d, size_t n);
} ari_reduce;

/** The kernels for a type and operation that the public boundary accepts. */
ari_reduce ari_reduce_kernel(ar_dtype t, ar_op op);

/* The operations of reductions on one pair of elements, for every kernel: ari_sum_f32(x, y), ari_max_, ari_min_; f64,
 * bf16, f16, i64, i32, u8 likewise. What they do: anyrank/comm.h. Without branches, so that loops over them
 * vectorise. */

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */

/* --- maximum and minimum of IEEE 754-2019 ------------------------------------------------------------------------- */

ARI_FN uint16_t ari_half_bits(uint16_t x)
{
    return x;
}

/* Floats are ordered as their bits are as signed integers, once those below the sign of a negative one are inverted; -0
 * is then below +0. */
#define ARI_EXTREMES(name, type, bits_type, key_type, to_bits, of_bits, sign, infinity, nan)                      \
    ARI_FN key_type ari_order_##name(bits_type x)                                                                 \
    {                                                                                                             \
        return (key_type)(x ^ (x / sign) * (sign - 1));                                                           \
    }                                                                                                             \
    ARI_FN bits_type ari_extreme_##name(bits_type x, bits_type y, bool larger)                                    \
    {                                                                                                             \
        const bits_type chosen = (ari_order_##name(x) > ari_order_##name(y)) == larger ? x : y;                   \
        return (bits_type)((x & (sign - 1)) > infinity || (y & (sign - 1)) > infinity ? (bits_type)nan : chosen); \
    }                                                                                                             \
    ARI_FN type ari_max_##name(type x, type y)                                                                    \
    {                                                                                                             \
        return of_bits(ari_extreme_##name(to_bits(x), to_bits(y), true));                                         \
    }                                                                                                             \
    ARI_FN type ari_min_##name(type x, type y)                                                                    \
    {                                                                                                             \
        return of_bits(ari_extreme_##name(to_bits(x), to_bits(y), false));                                        \
    }
ARI_EXTREMES(f32, float, uint32_t, int32_t, ari_bits32, ari_float32, 0x80000000u, 0x7f800000u, 0x7fc00000u)
ARI_EXTREMES(f64, double, uint64_t, int64_t, ari_bits64, ari_float64, 0x8000000000000000u, 0x7ff0000000000000u,
             0x7ff8000000000000u)
ARI_EXTREMES(bf16, uint16_t, uint16_t, int16_t, ari_half_bits, ari_half_bits, 0x8000u, 0x7f80u, 0x7fc0u)
ARI_EXTREMES(f16, uint16_t, uint16_t, int16_t, ari_half_bits, ari_half_bits, 0x8000u, 0x7c00u, 0x7e00u)

/* --- the rest, by kind of type ------------------------------------------------------------------------------------ */

#define ARI_FLOAT_REDUCTIONS(name, type)       \
    ARI_FN type ari_sum_##name(type x, type y) \
    {                                          \
        return x + y;                          \
    }
ARI_FLOAT_REDUCTIONS(f32, float)
ARI_FLOAT_REDUCTIONS(f64, double)

/* 16 bits: one operation in fp32, then rounded. */
#define ARI_HALF_REDUCTIONS(name)                                                \
    ARI_FN uint16_t ari_sum_##name(uint16_t x, uint16_t y)                       \
    {                                                                            \
        return ari_##name##_of_f32(ari_f32_of_##name(x) + ari_f32_of_##name(y)); \
    }
ARI_HALF_REDUCTIONS(bf16)
ARI_HALF_REDUCTIONS(f16)

/* Integers wrap: they are added as the unsigned type `modulo`. */
#define ARI_INTEGER_REDUCTIONS(name, type, modulo)    \
    ARI_FN type ari_sum_##name(type x, type y)        \
    {                                                 \
        return (type)(modulo)((modulo)x + (modulo)y); \
    }                                                 \
    ARI_FN type ari_max_##name(type x, type y)        \
    {                                                 \
        return x > y ? x : y;                         \
    }                                                 \
    ARI_FN type ari_min_##name(type x, type y)        \
    {                                                 \
        return x < y ? x : y;                         \
    }
ARI_INTEGER_REDUCTIONS(i64, int64_t, uint64_t)
ARI_INTEGER_REDUCTIONS(i32, int32_t, uint32_t)
ARI_INTEGER_REDUCTIONS(u8, uint8_t, uint8_t)
/* NOLINTEND(bugprone-macro-parentheses) */

#endif
