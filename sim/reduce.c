/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/reduce.h"

/* Every version of a kernel does the same operation per element, so the choice among them cannot change bits. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */
#define SUM(type, x, y) ((type)((x) + (y)))
#define MAX(type, x, y) ((type)((x) > (y) ? (x) : (y)))
#define MIN(type, x, y) ((type)((x) < (y) ? (x) : (y)))

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
    }                                                                                                         \
    static const ari_reduce name = {name##_two, name##_four, NULL};

KERNEL(sum_f32, float, SUM)
KERNEL(sum_f64, double, SUM)
KERNEL(sum_i64, uint64_t, SUM)
KERNEL(sum_i32, uint32_t, SUM)
KERNEL(sum_u8, uint8_t, SUM)
KERNEL(max_i64, int64_t, MAX)
KERNEL(max_i32, int32_t, MAX)
KERNEL(max_u8, uint8_t, MAX)
KERNEL(min_i64, int64_t, MIN)
KERNEL(min_i32, int32_t, MIN)
KERNEL(min_u8, uint8_t, MIN)
/* NOLINTEND(bugprone-macro-parentheses) */

ari_reduce ari_reduce_kernel(ar_dtype t, ar_op op)
{
    switch (t) {
    case AR_F64:
        return sum_f64;
    case AR_I64:
        return op == AR_SUM ? sum_i64 : op == AR_MAX ? max_i64 : min_i64;
    case AR_I32:
        return op == AR_SUM ? sum_i32 : op == AR_MAX ? max_i32 : min_i32;
    case AR_U8:
        return op == AR_SUM ? sum_u8 : op == AR_MAX ? max_u8 : min_u8;
    default: /* F32: the boundary lets no other type pass, and of F32 sums alone */
        return sum_f32;
    }
}
