/* SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>

#include "ref/core/float_bits.h"
#include "ref/core/reduce.h"

/* Operations on one pair of elements: sum_f32(x, y), max_, min_, and the same for f64, bf16, f16, i64, i32, u8.
 * anyrank/comm.h defines them. They contain no branches, so that loops over them vectorise. */

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */

/* --- maximum and minimum of IEEE 754-2019 ------------------------------------------------------------------------- */

static inline uint16_t half_bits(uint16_t x)
{
    return x;
}

/* Floats are ordered like their bits as signed integers, after the bits below the sign of negative floats have been
 * inverted; -0 is then below +0. */
#define EXTREMES(name, type, bits_type, key_type, to_bits, of_bits, sign, infinity, nan)                          \
    static inline key_type order_##name(bits_type x)                                                              \
    {                                                                                                             \
        return (key_type)(x ^ (x / sign) * (sign - 1));                                                           \
    }                                                                                                             \
    static inline bits_type extreme_##name(bits_type x, bits_type y, bool larger)                                 \
    {                                                                                                             \
        const bits_type chosen = (order_##name(x) > order_##name(y)) == larger ? x : y;                           \
        return (bits_type)((x & (sign - 1)) > infinity || (y & (sign - 1)) > infinity ? (bits_type)nan : chosen); \
    }                                                                                                             \
    static inline type max_##name(type x, type y)                                                                 \
    {                                                                                                             \
        return of_bits(extreme_##name(to_bits(x), to_bits(y), true));                                             \
    }                                                                                                             \
    static inline type min_##name(type x, type y)                                                                 \
    {                                                                                                             \
        return of_bits(extreme_##name(to_bits(x), to_bits(y), false));                                            \
    }
EXTREMES(f32, float, uint32_t, int32_t, ari_bits32, ari_float32, 0x80000000u, 0x7f800000u, 0x7fc00000u)
EXTREMES(f64, double, uint64_t, int64_t, ari_bits64, ari_float64, 0x8000000000000000u, 0x7ff0000000000000u,
         0x7ff8000000000000u)
EXTREMES(bf16, uint16_t, uint16_t, int16_t, half_bits, half_bits, 0x8000u, 0x7f80u, 0x7fc0u)
EXTREMES(f16, uint16_t, uint16_t, int16_t, half_bits, half_bits, 0x8000u, 0x7c00u, 0x7e00u)

/* --- the rest, by kind of type ------------------------------------------------------------------------------------ */

#define FLOAT_REDUCTIONS(name, type)              \
    static inline type sum_##name(type x, type y) \
    {                                             \
        return x + y;                             \
    }
FLOAT_REDUCTIONS(f32, float)
FLOAT_REDUCTIONS(f64, double)

/* 16-bit floats: one operation in fp32, then rounding. */
#define HALF_REDUCTIONS(name)                                                    \
    static inline uint16_t sum_##name(uint16_t x, uint16_t y)                    \
    {                                                                            \
        return ari_##name##_of_f32(ari_f32_of_##name(x) + ari_f32_of_##name(y)); \
    }
HALF_REDUCTIONS(bf16)
HALF_REDUCTIONS(f16)

/* Integers wrap around: they are added as the unsigned type `modulo`. */
#define INTEGER_REDUCTIONS(name, type, modulo)        \
    static inline type sum_##name(type x, type y)     \
    {                                                 \
        return (type)(modulo)((modulo)x + (modulo)y); \
    }                                                 \
    static inline type max_##name(type x, type y)     \
    {                                                 \
        return x > y ? x : y;                         \
    }                                                 \
    static inline type min_##name(type x, type y)     \
    {                                                 \
        return x < y ? x : y;                         \
    }
INTEGER_REDUCTIONS(i64, int64_t, uint64_t)
INTEGER_REDUCTIONS(i32, int32_t, uint32_t)
INTEGER_REDUCTIONS(u8, uint8_t, uint8_t)

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* ivdep: out is one of the inputs or does not overlap with them, so no iteration depends on another. */
#define KERNEL(op, name, type)                                                                                         \
    ARI_SIMD static void name##_##op##_two(void *out, const void *pa, const void *pb, size_t n)                        \
    {                                                                                                                  \
        type *o = out;                                                                                                 \
        const type *a = pa, *b = pb;                                                                                   \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) o[i] = op##_##name(a[i], b[i]);                            \
    }                                                                                                                  \
    ARI_SIMD static void name##_##op##_four(void *out, const void *pa, const void *pb, const void *pc, const void *pd, \
                                            size_t n)                                                                  \
    {                                                                                                                  \
        type *o = out;                                                                                                 \
        const type *a = pa, *b = pb, *c = pc, *d = pd;                                                                 \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                                            \
        {                                                                                                              \
            const type two = op##_##name(a[i], b[i]), three = op##_##name(two, c[i]);                                  \
            o[i] = op##_##name(three, d[i]);                                                                           \
        }                                                                                                              \
    }

/* A type's kernels. */
#define KERNELS(name, type)                           \
    KERNEL(sum, name, type)                           \
    KERNEL(max, name, type)                           \
    KERNEL(min, name, type)                           \
    static const ari_reduce name##_kernels[] = {      \
        [AR_SUM] = {name##_sum_two, name##_sum_four}, \
        [AR_MAX] = {name##_max_two, name##_max_four}, \
        [AR_MIN] = {name##_min_two, name##_min_four}, \
    };

KERNELS(f32, float)
KERNELS(f64, double)
KERNELS(bf16, uint16_t)
KERNELS(f16, uint16_t)
KERNELS(i64, int64_t)
KERNELS(i32, int32_t)
KERNELS(u8, uint8_t)
/* NOLINTEND(bugprone-macro-parentheses) */

ari_reduce ari_reduce_kernel(ar_dtype t, ar_op op)
{
    static const ari_reduce
        *const kernels[AR_DTYPE_COUNT] = {[AR_F32] = f32_kernels, [AR_F64] = f64_kernels, [AR_BF16] = bf16_kernels,
                                          [AR_F16] = f16_kernels, [AR_I64] = i64_kernels, [AR_I32] = i32_kernels,
                                          [AR_U8] = u8_kernels}; /* public functions accept no other type */
    return kernels[t][op];
}
