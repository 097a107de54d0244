/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/reduce.h"

/* Every version of a kernel does the same operation per element, so the choice among them cannot change bits. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

/* ivdep: out is a, or b, or apart from both, so no iteration depends on another. */
#define KERNEL(name, type, expression)                                                \
    CLONES static void name(void *out, const void *left, const void *right, size_t n) \
    {                                                                                 \
        type *o = out;                                                                \
        const type *l = left, *r = right;                                             \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                           \
        {                                                                             \
            const type a = l[i], b = r[i];                                            \
            o[i] = (expression);                                                      \
        }                                                                             \
    }

KERNEL(sum_f32, float, a + b)
KERNEL(sum_f64, double, a + b)
KERNEL(sum_i64, uint64_t, a + b)
KERNEL(sum_i32, uint32_t, a + b)
KERNEL(sum_u8, uint8_t, (uint8_t)(a + b))
KERNEL(max_i64, int64_t, a > b ? a : b)
KERNEL(max_i32, int32_t, a > b ? a : b)
KERNEL(max_u8, uint8_t, a > b ? a : b)
KERNEL(min_i64, int64_t, a < b ? a : b)
KERNEL(min_i32, int32_t, a < b ? a : b)
KERNEL(min_u8, uint8_t, a < b ? a : b)

ari_reduce_fn ari_reduce_kernel(ar_dtype t, ar_op op)
{
    switch (t) {
    case AR_F32:
        return op == AR_SUM ? sum_f32 : NULL;
    case AR_F64:
        return op == AR_SUM ? sum_f64 : NULL;
    case AR_I64:
        return op == AR_SUM ? sum_i64 : op == AR_MAX ? max_i64 : min_i64;
    case AR_I32:
        return op == AR_SUM ? sum_i32 : op == AR_MAX ? max_i32 : min_i32;
    case AR_U8:
        return op == AR_SUM ? sum_u8 : op == AR_MAX ? max_u8 : min_u8;
    default:
        return NULL;
    }
}
