/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials and quotients of rows: what softmax and the loss spend most of their time on, by faster arithmetic than
 * their definitions' wherever that is sure to round to the same bits, and by the definition elsewhere. */
#include <string.h>

#include "ref/cpu/gemm.h"
#include "ref/cpu/row_sum.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>
#elif ARI_HAVE_ARM_PATHS
#include <arm_neon.h>
#endif

ARI_ROW_KERNEL void define_exps(float *e, const float *x, float m, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        e[j] = ari_softmax_exp(x[j], m);
}

ARI_ROW_KERNEL void define_quotients(float *y, const float *x, double l, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_softmax_p(x[j], l);
}

#if ARI_HAVE_X86_PATHS || ARI_HAVE_ARM_PATHS
/* 2^(j/16), rounded to fp32, and the logarithm of what divided by that, less the error's bound. */
static const _Alignas(64) float roots[16] = {0x1p+0f,        0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f,
                                             0x1.306fep+0f,  0x1.3dea64p+0f, 0x1.4bfdaep+0f, 0x1.5ab07ep+0f,
                                             0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f,
                                             0x1.ae89fap+0f, 0x1.c199bep+0f, 0x1.d5818ep+0f, 0x1.ea4afap+0f};
static const _Alignas(64) float lost[16] = {-0x1p-33f,        0x1.8c96d4p-25f,  -0x1.a00c22p-27f, 0x1.954902p-25f,
                                            0x1.115002p-25f,  0x1.360be4p-25f,  -0x1.0b3552p-25f, -0x1.04d8acp-27f,
                                            0x1.24055cp-26f,  -0x1.06cb44p-25f, 0x1.5fa1cap-28f,  0x1.9bb5e4p-28f,
                                            -0x1.fdc306p-27f, -0x1.7161b4p-28f, -0x1.ad217cp-28f, 0x1.59428ep-28f};
#endif

#if ARI_HAVE_X86_PATHS
#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512dq")))
#define EXPS exps_avx512
#define QUOTIENTS quotients_avx512
#define ROOTS(of, t) (vec) _mm512_permutexvar_ps((__m512i)(t), _mm512_load_ps(of))
#define FMA(a, b, c) (vec) _mm512_fmadd_ps(a, b, c)
#define MASK __mmask16
#define LESS(a, b) _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)
#define SAME(a, b) _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ)
#define UNDER(a, b) _mm512_cmplt_epu32_mask((__m512i)(a), (__m512i)(b))
#define PICK(mask, a, b) (vec) _mm512_mask_blend_ps(mask, b, a)
#define SIGNS(mask) (uint32_t)(uint16_t)(mask)
#include "ref/cpu/exps.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define EXPS exps_avx2
#define QUOTIENTS quotients_avx2
#define HALF(of, t) _mm256_permutevar8x32_ps(_mm256_load_ps(of), (__m256i)(t))
#define ROOTS(of, t) (vec) _mm256_blendv_ps(HALF(of, t), HALF((of) + 8, t), (__m256)((words)(t) << 28))
#define FMA(a, b, c) (vec) _mm256_fmadd_ps(a, b, c)
#define SIGNS(mask) (uint32_t) _mm256_movemask_ps((__m256)(mask))
#include "ref/cpu/exps.h"
#elif ARI_HAVE_ARM_PATHS
#define LANES 4
#define TARGET
#define EXPS exps_neon
#define QUOTIENTS quotients_neon
/* The bytes of lane j's entry, 4*j + 0..3. */
#define BYTES(t) (uint8x16_t)(((words)(t)&15) * 0x04040404 + 0x03020100)
#define ROOTS(of, t) (vec) vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)(of)), BYTES(t))
#define FMA(a, b, c) (vec) vfmaq_f32(c, a, b)
#define SIGNS(mask) vaddvq_u32((uint32x4_t)(mask) & (uint32x4_t){1, 2, 4, 8})
#include "ref/cpu/exps.h"
#endif

const ari_row_way *ari_row_way_at(size_t i)
{
#if ARI_HAVE_X86_PATHS
    static const ari_row_way widest = {exps_avx512, quotients_avx512}, wide = {exps_avx2, quotients_avx2};
    if (i == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") ? &widest : NULL;
    if (i == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &wide : NULL;
#elif ARI_HAVE_ARM_PATHS
    static const ari_row_way wide = {exps_neon, quotients_neon};
    if (i == 0)
        return &wide;
#endif
    static const ari_row_way defined = {define_exps, define_quotients};
    return i == ARI_ROW_WAYS - 1 ? &defined : NULL;
}

static const ari_row_way *fastest(void)
{
    size_t i = 0;
    while (!ari_row_way_at(i))
        i++;
    return ari_row_way_at(i);
}

void ari_softmax_exps(float *e, const float *x, float m, size_t n)
{
    fastest()->exps(e, x, m, n);
}

void ari_quotients(float *y, const float *x, double l, size_t n)
{
    fastest()->quotients(y, x, l, n);
}
