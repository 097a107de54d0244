/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/reduce.h"

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

/* maximum and minimum of IEEE 754-2019. Floats are ordered as their bits are as signed integers, once those below the
 * sign of a negative one are inverted; -0 is then below +0. Selects without branches, so that they vectorise. */
#define EXTREME(name, bits_type, key_type, sign, infinity, nan)                                      \
    static inline key_type name##_key(bits_type x)                                                   \
    {                                                                                                \
        return (key_type)(x ^ (x / sign) * (sign - 1));                                              \
    }                                                                                                \
    static inline bits_type name##_extreme(bits_type x, bits_type y, bool larger)                    \
    {                                                                                                \
        const bits_type chosen = (name##_key(x) > name##_key(y)) == larger ? x : y;                  \
        return (x & (sign - 1)) > infinity || (y & (sign - 1)) > infinity ? (bits_type)nan : chosen; \
    }
EXTREME(f32, uint32_t, int32_t, 0x80000000u, 0x7f800000u, 0x7fc00000u)
EXTREME(f64, uint64_t, int64_t, 0x8000000000000000u, 0x7ff0000000000000u, 0x7ff8000000000000u)
EXTREME(bf16, uint16_t, int16_t, 0x8000u, 0x7f80u, 0x7fc0u)
EXTREME(f16, uint16_t, int16_t, 0x8000u, 0x7c00u, 0x7e00u)
#define BF16_MAX(type, x, y) bf16_extreme(x, y, true)
#define BF16_MIN(type, x, y) bf16_extreme(x, y, false)
#define F16_MAX(type, x, y) f16_extreme(x, y, true)
#define F16_MIN(type, x, y) f16_extreme(x, y, false)

static inline uint64_t f64_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double f64_of_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define F32_MAX(type, x, y) ari_f32_of_bits(f32_extreme(ari_f32_bits(x), ari_f32_bits(y), true))
#define F32_MIN(type, x, y) ari_f32_of_bits(f32_extreme(ari_f32_bits(x), ari_f32_bits(y), false))
#define F64_MAX(type, x, y) f64_of_bits(f64_extreme(f64_bits(x), f64_bits(y), true))
#define F64_MIN(type, x, y) f64_of_bits(f64_extreme(f64_bits(x), f64_bits(y), false))

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
