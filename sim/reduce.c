/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/reduce.h"

#include "ref/core/half.h"

/* Every version of a kernel does the same operation per element, so the choice among them cannot change bits. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */

/* --- one operation on one element --------------------------------------------------------------------------------- */

#define SUM(type, x, y) ((type)((x) + (y)))
#define PROD(type, x, y) ((type)((x) * (y)))
#define MAX(type, x, y) ((type)((x) > (y) ? (x) : (y)))
#define MIN(type, x, y) ((type)((x) < (y) ? (x) : (y)))

/* 16 bits: one operation in fp32, then rounded. */
#define BF16_SUM(type, x, y) ari_bf16_of_f32(ari_f32_of_bf16(x) + ari_f32_of_bf16(y))
#define BF16_PROD(type, x, y) ari_bf16_of_f32(ari_f32_of_bf16(x) * ari_f32_of_bf16(y))
#define F16_SUM(type, x, y) ari_f16_of_f32(ari_f32_of_f16(x) + ari_f32_of_f16(y))
#define F16_PROD(type, x, y) ari_f16_of_f32(ari_f32_of_f16(x) * ari_f32_of_f16(y))

/* maximum and minimum of IEEE 754-2019. Of numbers that are equal only zeros differ in their bits: the sign is kept
 * where both have it (maximum) or where one has (minimum). Selects without branches, so that they vectorise. */
#define FLOAT_EXTREMES(name, type, bits_type, nan)                 \
    static inline type name##_extreme(type x, type y, bool larger) \
    {                                                              \
        const bits_type quiet = nan;                               \
        bits_type a, b, chosen;                                    \
        memcpy(&a, &x, sizeof a);                                  \
        memcpy(&b, &y, sizeof b);                                  \
        chosen = larger ? a & b : a | b;                           \
        chosen = (larger ? x > y : x < y) ? a : chosen;            \
        chosen = (larger ? x < y : x > y) ? b : chosen;            \
        chosen = x != x || y != y ? quiet : chosen;                \
        memcpy(&x, &chosen, sizeof x);                             \
        return x;                                                  \
    }
FLOAT_EXTREMES(f32, float, uint32_t, 0x7fc00000)
FLOAT_EXTREMES(f64, double, uint64_t, 0x7ff8000000000000)
#define F32_MAX(type, x, y) f32_extreme(x, y, true)
#define F32_MIN(type, x, y) f32_extreme(x, y, false)
#define F64_MAX(type, x, y) f64_extreme(x, y, true)
#define F64_MIN(type, x, y) f64_extreme(x, y, false)

/* The same on 16 bits: floats are ordered as their bits are as signed integers, once those below the sign of a negative
 * one are inverted. */
static inline int16_t half_key(uint16_t x)
{
    return (int16_t)(x ^ (x >> 15) * 0x7fff);
}

static inline uint16_t half_extreme(uint16_t x, uint16_t y, bool larger, uint16_t infinity, uint16_t nan)
{
    const uint16_t chosen = (half_key(x) > half_key(y)) == larger ? x : y;
    return (x & 0x7fff) > infinity || (y & 0x7fff) > infinity ? nan : chosen;
}
#define BF16_MAX(type, x, y) half_extreme(x, y, true, 0x7f80, 0x7fc0)
#define BF16_MIN(type, x, y) half_extreme(x, y, false, 0x7f80, 0x7fc0)
#define F16_MAX(type, x, y) half_extreme(x, y, true, 0x7c00, 0x7e00)
#define F16_MIN(type, x, y) half_extreme(x, y, false, 0x7c00, 0x7e00)

/* The mean of what was added: one division. */
#define FLOAT_MEAN(type, x, n) ((x) / (type)(n))
#define INTEGER_MEAN(type, x, n) ((type)((x) / (n)))
#define BF16_MEAN(type, x, n) ari_bf16_of_f32(ari_f32_of_bf16(x) / (float)(n))
#define F16_MEAN(type, x, n) ari_f16_of_f32(ari_f32_of_f16(x) / (float)(n))

/* --- arrays ------------------------------------------------------------------------------------------------------- */

/* ivdep: out is one of the inputs or apart from them, so no iteration depends on another. */
#define KERNEL(name, type, OP)                                                                                \
    CLONES static void name##_two(void *out, const void *pa, const void *pb, size_t n)                        \
    {                                                                                                         \
        type *o = out;                                                                                        \
        const type *a = pa, *b = pb;                                                                          \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) o[i] = OP(type, a[i], b[i]);                      \
    }                                                                                                         \
    CLONES static void name##_four(void *out, const void *pa, const void *pb, const void *pc, const void *pd, \
                                   size_t n)                                                                  \
    {                                                                                                         \
        type *o = out;                                                                                        \
        const type *a = pa, *b = pb, *c = pc, *d = pd;                                                        \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                                   \
        {                                                                                                     \
            const type two = OP(type, a[i], b[i]), three = OP(type, two, c[i]);                               \
            o[i] = OP(type, three, d[i]);                                                                     \
        }                                                                                                     \
    }
#define MEAN_KERNEL(name, type, OP)                                                       \
    CLONES static void name(void *out, size_t n, int ranks)                               \
    {                                                                                     \
        type *o = out;                                                                    \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) o[i] = OP(type, o[i], ranks); \
    }

/* A type's kernels. Integers wrap, so they are added and multiplied as the unsigned type `modulo`. */
#define KERNELS(name, type, modulo, OP_SUM, OP_PROD, OP_MAX, OP_MIN, OP_MEAN) \
    KERNEL(name##_sum, modulo, OP_SUM)                                        \
    KERNEL(name##_prod, modulo, OP_PROD)                                      \
    KERNEL(name##_max, type, OP_MAX)                                          \
    KERNEL(name##_min, type, OP_MIN)                                          \
    MEAN_KERNEL(name##_mean, type, OP_MEAN)                                   \
    static const ari_reduce name##_kernels[] = {                              \
        [AR_SUM] = {name##_sum_two, name##_sum_four, NULL},                   \
        [AR_PROD] = {name##_prod_two, name##_prod_four, NULL},                \
        [AR_MAX] = {name##_max_two, name##_max_four, NULL},                   \
        [AR_MIN] = {name##_min_two, name##_min_four, NULL},                   \
        [AR_AVG] = {name##_sum_two, name##_sum_four, name##_mean},            \
    };

KERNELS(f32, float, float, SUM, PROD, F32_MAX, F32_MIN, FLOAT_MEAN)
KERNELS(f64, double, double, SUM, PROD, F64_MAX, F64_MIN, FLOAT_MEAN)
KERNELS(bf16, uint16_t, uint16_t, BF16_SUM, BF16_PROD, BF16_MAX, BF16_MIN, BF16_MEAN)
KERNELS(f16, uint16_t, uint16_t, F16_SUM, F16_PROD, F16_MAX, F16_MIN, F16_MEAN)
KERNELS(i64, int64_t, uint64_t, SUM, PROD, MAX, MIN, INTEGER_MEAN)
KERNELS(i32, int32_t, uint32_t, SUM, PROD, MAX, MIN, INTEGER_MEAN)
KERNELS(u8, uint8_t, uint8_t, SUM, PROD, MAX, MIN, INTEGER_MEAN)
/* NOLINTEND(bugprone-macro-parentheses) */

ari_reduce ari_reduce_kernel(ar_dtype t, ar_op op)
{
    switch (t) {
    case AR_F64:
        return f64_kernels[op];
    case AR_BF16:
        return bf16_kernels[op];
    case AR_F16:
        return f16_kernels[op];
    case AR_I64:
        return i64_kernels[op];
    case AR_I32:
        return i32_kernels[op];
    case AR_U8:
        return u8_kernels[op];
    default: /* F32: the boundary lets no other type pass */
        return f32_kernels[op];
    }
}
