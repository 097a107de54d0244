/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/reduce.h"

/* NOLINTBEGIN(bugprone-macro-parentheses): types and names cannot be put in parentheses. */

/* ivdep: out is one of the inputs or apart from them, so no iteration depends on another. */
#define KERNEL(op, name, type)                                                                                         \
    ARI_SIMD static void name##_##op##_two(void *out, const void *pa, const void *pb, size_t n)                        \
    {                                                                                                                  \
        type *o = out;                                                                                                 \
        const type *a = pa, *b = pb;                                                                                   \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++) o[i] = ari_##op##_##name(a[i], b[i]);                      \
    }                                                                                                                  \
    ARI_SIMD static void name##_##op##_four(void *out, const void *pa, const void *pb, const void *pc, const void *pd, \
                                            size_t n)                                                                  \
    {                                                                                                                  \
        type *o = out;                                                                                                 \
        const type *a = pa, *b = pb, *c = pc, *d = pd;                                                                 \
        _Pragma("GCC ivdep") for (size_t i = 0; i < n; i++)                                                            \
        {                                                                                                              \
            const type two = ari_##op##_##name(a[i], b[i]), three = ari_##op##_##name(two, c[i]);                      \
            o[i] = ari_##op##_##name(three, d[i]);                                                                     \
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
                                          [AR_U8] = u8_kernels}; /* the boundary lets no other type pass */
    return kernels[t][op];
}
