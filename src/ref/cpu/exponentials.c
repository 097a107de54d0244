/* SPDX-License-Identifier: Apache-2.0 */
/* Exponentials and quotients of rows: what softmax and the loss spend most of their time on, by faster arithmetic than
 * their definitions' wherever that is sure to round to the same bits, and by the definition elsewhere. */
#include <string.h>

#include "ref/cpu/row_sum.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX512 __attribute__((target("avx512f")))
#endif

ARI_ROW_KERNEL void define_exps(float *e, const float *x, float m, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        e[j] = ari_softmax_exp(x[j], m);
}

#if defined(AVX512)
enum { LANES = 16 };

/* 2^(j/16) = root[0][j] + root[1][j], each rounded to fp32. */
static const _Alignas(64) float root[2][LANES] = {
    {0x1.000000p+0f, 0x1.0b5586p+0f, 0x1.172b84p+0f, 0x1.2387a6p+0f, 0x1.306fe0p+0f, 0x1.3dea64p+0f, 0x1.4bfdaep+0f,
     0x1.5ab07ep+0f, 0x1.6a09e6p+0f, 0x1.7a1148p+0f, 0x1.8ace54p+0f, 0x1.9c4918p+0f, 0x1.ae89fap+0f, 0x1.c199bep+0f,
     0x1.d5818ep+0f, 0x1.ea4afap+0f},
    {0.0f, 0x1.9f3122p-25f, -0x1.c15742p-27f, 0x1.ceac48p-25f, 0x1.4636e2p-25f, 0x1.824684p-25f, -0x1.593abcp-25f,
     -0x1.5bd5ecp-27f, 0x1.9fcef4p-26f, -0x1.829fd0p-25f, 0x1.15506ep-27f, 0x1.51f848p-27f, -0x1.a94b14p-26f,
     -0x1.3d56b2p-27f, -0x1.822dbcp-27f, 0x1.52486cp-27f}};

/* e^x in pairs of fp32 numbers, and which lanes are sure to be ari_exp32's bits. With x = k*ln(2)/16 + r, where r - rest
 * is exact and |r| < 2^-5.5, e^x = 2^(k/16) * (1 + r + p), and of p, at most 2^-12, fp32 keeps what lies above 2^-35:
 * the sum of the pair is right within 2^-33. Where it rounds alike moved so far up and down, nothing between does
 * otherwise. tests/extended/exps_sweep.c compares all inputs. */
AVX512 static __mmask16 exps(__m512 *e, __m512 x)
{
    const __m512 magic = _mm512_set1_ps(0x1.8p23f), error = _mm512_set1_ps(0x1p-33f);
    const __m512 t = _mm512_fmadd_ps(x, _mm512_set1_ps(0x1.715476p+4f), magic), k = _mm512_sub_ps(t, magic);
    const __m512 most = _mm512_fnmadd_ps(k, _mm512_set1_ps(0x1.62e430p-5f), x);
    const __m512 rest = _mm512_mul_ps(k, _mm512_set1_ps(0x1.05c610p-33f)), r = _mm512_add_ps(most, rest);
    __m512 q = _mm512_fmadd_ps(r, _mm512_set1_ps(0x1.111112p-7f), _mm512_set1_ps(0x1.555556p-5f));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0x1.555556p-3f));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(0.5f));
    const __m512 p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), q, rest);
    const __m512 high = _mm512_permutexvar_ps(_mm512_castps_si512(t), _mm512_load_ps(root[0]));
    const __m512 low = _mm512_permutexvar_ps(_mm512_castps_si512(t), _mm512_load_ps(root[1]));
    const __m512 product = _mm512_mul_ps(high, most), sum = _mm512_add_ps(high, product);
    __m512 tail = _mm512_fmadd_ps(high, p, _mm512_fmadd_ps(low, most, low));
    tail = _mm512_add_ps(tail, _mm512_fmsub_ps(high, most, product));
    tail = _mm512_add_ps(tail, _mm512_sub_ps(product, _mm512_sub_ps(sum, high)));
    const __m512 below = _mm512_add_ps(sum, _mm512_sub_ps(tail, error));
    const __m512 above = _mm512_add_ps(sum, _mm512_add_ps(tail, error));
    /* Below -104 it rounds to 0; between are subnormal numbers, and whatever is no number at all. */
    const __mmask16 none = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_LT_OQ);
    const __mmask16 normal = _mm512_cmp_ps_mask(_mm512_abs_ps(x), _mm512_set1_ps(87.0f), _CMP_LT_OQ);
    *e = _mm512_maskz_scalef_ps((__mmask16)~none, below, _mm512_mul_ps(k, _mm512_set1_ps(0.0625f)));
    return (__mmask16)(none | (normal & _mm512_cmp_ps_mask(below, above, _CMP_EQ_OQ)));
}

AVX512 static void exps_row(float *e, const float *x, float m, size_t n)
{
    for (size_t j = 0; j < n; j += LANES) {
        const __mmask16 lanes = (__mmask16)(n - j < LANES ? (1u << (n - j)) - 1u : 0xffffu);
        const __m512 given = _mm512_maskz_loadu_ps(lanes, x + j);
        __m512 found;
        if ((exps(&found, _mm512_sub_ps(given, _mm512_set1_ps(m))) & lanes) == lanes) {
            _mm512_mask_storeu_ps(e + j, lanes, found);
        } else {
            float again[LANES]; /* x may be e */
            _mm512_storeu_ps(again, given);
            define_exps(e + j, again, m, n - j < LANES ? n - j : LANES);
        }
    }
}
#endif

void ari_softmax_exps(float *e, const float *x, float m, size_t n)
{
#if defined(AVX512)
    if (__builtin_cpu_supports("avx512f")) {
        exps_row(e, x, m, n);
        return;
    }
#endif
    define_exps(e, x, m, n);
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
