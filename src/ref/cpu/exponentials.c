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
#define ROOTS(of, t) (vec) _mm512_permutexvar_ps((__m512i)(t), _mm512_load_ps(of))
#define FMA(a, b, c) (vec) _mm512_fmadd_ps(a, b, c)
#define SIGNS(v) _mm512_movepi32_mask((__m512i)(v))
#include "ref/cpu/exps.h"

#define LANES 8
#define TARGET __attribute__((target("avx2,fma")))
#define EXPS exps_avx2
#define HALF(of, t) _mm256_permutevar8x32_ps(_mm256_load_ps(of), (__m256i)(t))
#define ROOTS(of, t) (vec) _mm256_blendv_ps(HALF(of, t), HALF((of) + 8, t), (__m256)((words)(t) << 28))
#define FMA(a, b, c) (vec) _mm256_fmadd_ps(a, b, c)
#define SIGNS(v) (uint32_t) _mm256_movemask_ps((__m256)(v))
#include "ref/cpu/exps.h"
#elif ARI_HAVE_ARM_PATHS
#define LANES 4
#define TARGET
#define EXPS exps_neon
/* The bytes of lane j's entry, 4*j + 0..3. */
#define BYTES(t) (uint8x16_t)(((words)(t)&15) * 0x04040404 + 0x03020100)
#define ROOTS(of, t) (vec) vqtbl4q_u8(vld1q_u8_x4((const uint8_t *)(of)), BYTES(t))
#define FMA(a, b, c) (vec) vfmaq_f32(c, a, b)
#define SIGNS(v) vaddvq_u32((uint32x4_t)(v) & (uint32x4_t){1, 2, 4, 8})
#include "ref/cpu/exps.h"
#endif

ari_exps_fn *ari_exps_way(size_t i)
{
#if ARI_HAVE_X86_PATHS
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
    const bool narrow = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    ari_exps_fn *const ways[ARI_EXPS_WAYS] = {wide ? exps_avx512 : NULL, narrow ? exps_avx2 : NULL, define_exps};
#elif ARI_HAVE_ARM_PATHS
    ari_exps_fn *const ways[ARI_EXPS_WAYS] = {exps_neon, NULL, define_exps};
#else
    ari_exps_fn *const ways[ARI_EXPS_WAYS] = {NULL, NULL, define_exps};
#endif
    return ways[i];
}

void ari_softmax_exps(float *e, const float *x, float m, size_t n)
{
    size_t i = 0;
    while (!ari_exps_way(i))
        i++;
    ari_exps_way(i)(e, x, m, n);
}

/* --- quotients ---------------------------------------------------------------------------------------------------- */

/* y = x/l, and whether one of them may differ from fl32(fl64(x/l)). 1/l is high + low within 2^-49, and so is the quotient
 * found + rest within 2^-46.4 where no product is subnormal: moved up and down by 2^-45 it rounds alike, or is unsure. */
ARI_ROW_KERNEL bool divide_block(float *y, const float *x, double l, size_t n)
{
    const float high = (float)(1.0 / l), low = (float)(1.0 / l - (double)high);
    const uint32_t least = 0x12800000u, most = 0x7f000000u; /* 2^-90, 2^127 */
    uint32_t unsure = 0;
    for (size_t j = 0; j < n; j++) {
        const float found = x[j] * high, rest = fmaf(x[j], low, fmaf(x[j], high, -found));
        const float below = found + fmaf(found, -0x1p-45f, rest), above = found + fmaf(found, 0x1p-45f, rest);
        const uint32_t outside = ari_row_magnitude32(found) - least >= most - least;
        unsure |= (ari_bits32(below) ^ ari_bits32(above)) | (outside & (uint32_t)(ari_bits32(x[j]) != 0));
        y[j] = below;
    }
    return unsure != 0;
}

ARI_ROW_KERNEL void define_quotients(float *y, const float *x, double l, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_softmax_p(x[j], l);
}

void ari_quotients(float *y, const float *x, double l, size_t n)
{
    enum { BLOCK = 256 };
    float q[BLOCK];
    for (size_t from = 0, count; from < n; from += count) {
        count = n - from < BLOCK ? n - from : BLOCK;
        if (divide_block(q, x + from, l, count))
            define_quotients(q, x + from, l, count);
        memcpy(y + from, q, count * sizeof *q);
    }
}
