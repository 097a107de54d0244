/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <immintrin.h>

/* GELU (erf) and its derivative by polynomials, in vectors of AVX-512. */
#define AVX512 __attribute__((target("avx512f,avx512dq")))

enum { LOW = 6, HIGH = 4, INTERVALS = 16 };

/* Coefficients of polynomials in a - j*11/32, of magnitude at most 11/64, that are correct within 2^-34 of their
 * values: Phi(-a), and Phi(-a) - a*phi(a). Chebyshev fits by ref/numerics/coefficients.py for 15 intervals, of the 16
 * that a pair of registers holds. */
typedef struct curve {
    _Alignas(64) double low[LOW][INTERVALS];
    _Alignas(64) float high[HIGH][INTERVALS]; /* coefficients of terms for which fp32 suffices */
} curve;
static const curve gelu_tail = {
    .low = {{0x1p-1, 0x1.764a20e3bap-2, 0x1.f791f3bffcp-3, 0x1.35ae882b42p-3, 0x1.5a61963dcap-4, 0x1.5edceb3b3cp-5,
             0x1.40cccd8066p-6, 0x1.0810911134p-7, 0x1.86904349ecp-9, 0x1.030e4e7d72p-10, 0x1.33d0aab718p-12,
             0x1.473ee15072p-14, 0x1.36feaecd8cp-16, 0x1.07ffe7a4c6p-18, 0x1.901d0a9b2cp-21},
            {-0x1.9884533d44p-2, -0x1.81147e517p-2, -0x1.42886c270ep-2, -0x1.e0132dda08p-3, -0x1.3d771214fap-3,
             -0x1.7512f32706p-4, -0x1.858fbcf862p-5, -0x1.69713bb12ap-6, -0x1.29fa54c634p-7, -0x1.b48e9919aep-9,
             -0x1.1c26c98beap-10, -0x1.48ada188b6p-12, -0x1.51cfa5ec5cp-14, -0x1.3480af675p-16, -0x1.f4accdbfbep-19},
            {0.0, 0x1.08be16d7d8p-4, 0x1.bb7b94b59p-4, 0x1.ef13c748dap-4, 0x1.b483b8dcfp-4, 0x1.409c48f59cp-4,
             0x1.91bc3ae026p-5, 0x1.b2dc3bd102p-6, 0x1.99b8349052p-7, 0x1.51a64a69c8p-8, 0x1.e862aa68d4p-10,
             0x1.36b422b3ecp-11, 0x1.5c5e231cdap-13, 0x1.58a7c3f5b4p-15, 0x1.2d2ff3c242p-17},
            {0x1.1058377e2p-4, 0x1.c4c51885b6p-5, 0x1.c58fd81704p-6, -0x1.450cfc5fccp-9, -0x1.78fd6578ep-6,
             -0x1.e6042fc366p-6, -0x1.a6883ca178p-6, -0x1.208dc60792p-6, -0x1.45e9ccb8bep-7, -0x1.37d245504ap-8,
             -0x1.001ff62ad4p-9, -0x1.6c39e8f146p-11, -0x1.c2dacd1d84p-13, -0x1.e7af2d483ep-15, -0x1.ce4b0e7a14p-17},
            {0.0, -0x1.fca132fe22p-7, -0x1.759c710f84p-6, -0x1.3f93846704p-6, -0x1.42d6c1856ap-7, -0x1.39ee707386p-12,
             0x1.4fd3592b84p-8, 0x1.946cfd34dep-8, 0x1.378ebdbdeep-8, 0x1.71cc7feb02p-9, 0x1.66d127a83ap-10,
             0x1.24860d063ap-11, 0x1.96e1f1d724p-13, 0x1.e76468f5a6p-15, 0x1.f9ffa80ea4p-17},
            {-0x1.46d0422f4ap-7, -0x1.d96325e5c8p-8, -0x1.0a9aa806ep-10, 0x1.2007792216p-8, 0x1.93c159eefap-8,
             0x1.2a5abbeedp-8, 0x1.cbf70c36b6p-10, -0x1.57f62b6c46p-12, -0x1.2654ab2b28p-10, -0x1.0e88819c8cp-10,
             -0x1.53b2d0497ap-11, -0x1.4d2c951d42p-12, -0x1.0c0cc94bb4p-13, -0x1.6a74436ffp-15, -0x1.a1adff788ep-17}},
    .high = {{0.0f, 0x1.45811ep-9f, 0x1.9dc94cp-9f, 0x1.e3be2cp-10f, -0x1.9bcffep-14f, -0x1.4b649ap-10f,
              -0x1.51383ep-10f, -0x1.6a6c32p-11f, -0x1.f43d64p-14f, 0x1.470a9ep-13f, 0x1.8bbdecp-13f, 0x1.07ee0cp-13f,
              0x1.0411eep-14f, 0x1.99ef6ep-16f, 0x1.0b8aeep-17f},
             {0x1.373f0ap-10f, 0x1.82e6b8p-11f, -0x1.8c510ep-13f, -0x1.a0d672p-11f, -0x1.76697cp-11f, -0x1.e5a30cp-13f,
              0x1.64cd06p-13f, 0x1.221b94p-12f, 0x1.7a9298p-13f, 0x1.c47296p-15f, -0x1.04964ep-16f, -0x1.f9ec52p-16f,
              -0x1.65bbcp-16f, -0x1.5ece1p-17f, -0x1.0c6e4p-18f},
             {0.0f, -0x1.360e92p-12f, -0x1.4faad6p-12f, -0x1.8f967ap-14f, 0x1.149c42p-13f, 0x1.822fe6p-13f,
              0x1.89f26cp-14f, -0x1.22a1ecp-17f, -0x1.9a361p-15f, -0x1.3a85fp-15f, -0x1.c9271cp-17f, 0x1.732594p-21f,
              0x1.21e75p-18f, 0x1.b02f54p-19f, 0x1.a20cacp-20f},
             {-0x1.e1407cp-14f, -0x1.f7f05p-15f, 0x1.65501ep-15f, 0x1.6fc438p-14f, 0x1.9a9466p-15f, -0x1.a73e8p-17f,
              -0x1.3d6908p-15f, -0x1.998d0ep-16f, -0x1.5937a4p-19f, 0x1.fe4108p-18f, 0x1.bf79f2p-18f, 0x1.5f974cp-19f,
              0x1.824b54p-24f, -0x1.36e39cp-21f, -0x1.d92cb8p-22f}}};
static const curve gelu_slope = {
    .low = {{0x1p-1, 0x1.e3d62aef76p-3, 0x1.e0b2f8524ep-6, -0x1.72ca7e3b2ep-4, -0x1.0752edbdf4p-3, -0x1.d1ca1c4d74p-4,
             -0x1.418907800cp-4, -0x1.70d8178cd8p-5, -0x1.68e62c274ap-6, -0x1.3144809a2ep-7, -0x1.c1e8951196p-9,
             -0x1.2240349e34p-10, -0x1.48ee382ee6p-12, -0x1.4827c57b1ep-14, -0x1.20af0b707cp-16},
            {-0x1.9884533d44p-1, -0x1.6a54285aep-1, -0x1.ec9e5d2fa4p-2, -0x1.c199f630f2p-3, -0x1.15c82fd25cp-6,
             0x1.63f3547dfcp-4, 0x1.b7047c75eap-4, 0x1.56785a1f0cp-4, 0x1.9e601de3ap-5, 0x1.9d2994d556p-6,
             0x1.5cab180ecep-7, 0x1.f9412938aep-9, 0x1.3d071f7712p-10, 0x1.5a7b56ff44p-12, 0x1.4b12e46d72p-14},
            {0.0, 0x1.00ebf94adp-2, 0x1.87143a62eap-2, 0x1.6b73951d28p-2, 0x1.cc62ecf982p-3, 0x1.4f53754f4ap-4,
             -0x1.98032bce5ep-7, -0x1.85355d0a76p-5, -0x1.6ce80ed0f6p-5, -0x1.d6492d04acp-6, -0x1.dd2d66be84p-7,
             -0x1.8ff2904a54p-8, -0x1.1b63940faep-9, -0x1.5800d2b43p-11, -0x1.68acbc5da8p-13},
            {0x1.1058377e08p-2, 0x1.990f3e08c8p-3, 0x1.896893f6ap-5, -0x1.7231c0129ep-4, -0x1.2b7884fbf4p-3,
             -0x1.ee72768168p-4, -0x1.f2be8541fap-5, -0x1.6a21b07328p-7, 0x1.99e9de4a08p-7, 0x1.0436104c42p-6,
             0x1.689786a33p-7, 0x1.72f07d87ap-8, 0x1.32e24f520ap-9, 0x1.a696624692p-11, 0x1.ed34cea542p-13},
            {0.0, -0x1.70bee57a16p-4, -0x1.e1555b22c6p-4, -0x1.32a5fd3902p-4, -0x1.c4924fb52p-8, 0x1.343c26edfp-5,
             0x1.661f358f42p-5, 0x1.b8df16a07p-6, 0x1.110354b818p-7, -0x1.e6d299795ep-10, -0x1.194cbad9e6p-8,
             -0x1.a5bacca1fp-9, -0x1.b4c3bf66cap-10, -0x1.61d9fa67aep-11, -0x1.d606c728ap-13},
            {-0x1.ea3862ab04p-5, -0x1.39147b5d32p-5, 0x1.c58a8d0b74p-8, 0x1.358edc487ap-5, 0x1.282dad3c0ap-5,
             0x1.d3de2ec0dp-7, -0x1.6153a0476ap-8, -0x1.87843fef16p-7, -0x1.1d3a146c78p-7, -0x1.b02d09f21cp-9,
             0x1.2a5964d4d4p-18, 0x1.f16e4b4722p-11, 0x1.92819c6316p-11, 0x1.9f1eaa2f5cp-12, 0x1.4635a8d32ep-13}},
    .high = {{0.0f, 0x1.39e7ep-6f, 0x1.5b28e2p-6f, 0x1.d66c5p-8f, -0x1.ef7efep-8f, -0x1.7d42cp-7f, -0x1.ad28b2p-8f,
              -0x1.76f52cp-13f, 0x1.5a0a64p-9f, 0x1.282e62p-9f, 0x1.f09b2ep-11f, 0x1.5b3ee8p-14f, -0x1.7cf3cp-13f,
              -0x1.472952p-13f, -0x1.4b135p-14f},
             {0x1.373e72p-7f, 0x1.4d3b16p-8f, -0x1.ae48a4p-9f, -0x1.d4520ep-8f, -0x1.1657fap-8f, 0x1.6bcaf4p-11f,
              0x1.7d9ceep-9f, 0x1.0b03c2p-9f, 0x1.799b58p-12f, -0x1.053d78p-11f, -0x1.046d66p-11f, -0x1.c923ep-13f,
              -0x1.c4f70ep-16f, 0x1.08a81ap-15f, 0x1.d18e52p-16f},
             {0.0f, -0x1.74995ap-9f, -0x1.56a788p-9f, -0x1.77b688p-15f, 0x1.d5294p-10f, 0x1.7efa68p-10f,
              0x1.2da6acp-13f, -0x1.3d6bf4p-11f, -0x1.07f3cp-11f, -0x1.08408p-13f, 0x1.5dd476p-14f, 0x1.8fb2c8p-14f,
              0x1.6265f8p-15f, 0x1.803358p-18f, -0x1.53603p-18f},
             {-0x1.2c6b4cp-10f, -0x1.0790e4p-11f, 0x1.3aec5ap-11f, 0x1.c80e02p-11f, 0x1.eddc66p-13f, -0x1.83a77ep-12f,
              -0x1.980bc6p-12f, -0x1.611bbep-14f, 0x1.da5594p-14f, 0x1.bd9112p-14f, 0x1.eeceb4p-16f, -0x1.c6cf24p-17f,
              -0x1.13ea44p-16f, -0x1.d6573cp-18f, -0x1.cf19d6p-21f}}};

/* Computes 8 lanes of its table's function of x: x*Phi(x), or Phi(x) + x*phi(x), rounded, and the lanes in which 2^-34
 * in either direction could change the rounding. */
AVX512 static inline __m256 half_of_curve(__m256 x, __m512d q, bool slopes, __mmask8 *unsure)
{
    const __m512d wide = _mm512_cvtps_pd(x);
    const __mmask8 positive = _mm512_cmp_pd_mask(wide, _mm512_setzero_pd(), _CMP_GE_OQ);
    const __m512d factor = _mm512_mask_sub_pd(q, positive, _mm512_set1_pd(1.0), q);
    const __m512d value = slopes ? factor : _mm512_mul_pd(factor, wide);
    const __m512i moved = _mm512_add_epi64(_mm512_castpd_si512(value), _mm512_set1_epi64((1 << 28) + (1 << 19)));
    *unsure = _mm512_testn_epi64_mask(moved, _mm512_set1_epi64((1 << 29) - (1 << 20)));
    return _mm512_cvtpd_ps(value);
}

/* Computes 16 lanes, and which of them are certain. Lanes beyond the intervals, without a normal result, or next to the
 * derivative's zero, where its polynomial has few digits, are not. */
AVX512 static inline __attribute__((always_inline)) __m512 ari_curves(__m512 x, bool slopes, __mmask16 *sure)
{
    const curve *c = slopes ? &gelu_slope : &gelu_tail;
    const __m512 a = _mm512_abs_ps(x), magic = _mm512_set1_ps(0x1.8p23f);
    const __m512 t = _mm512_fmadd_ps(a, _mm512_set1_ps(32.0f / 11.0f), magic);
    const __m512 d = _mm512_fnmadd_ps(_mm512_sub_ps(t, magic), _mm512_set1_ps(11.0f / 32.0f), a);
    const __m512i j = _mm512_castps_si512(t), even = _mm512_cvtepu32_epi64(_mm512_castsi512_si256(j)),
                  odd = _mm512_cvtepu32_epi64(_mm512_extracti32x8_epi32(j, 1));
    const __m512d d0 = _mm512_cvtps_pd(_mm512_castps512_ps256(d)), d1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(d, 1));
    __m512 q = _mm512_permutexvar_ps(j, _mm512_load_ps(c->high[HIGH - 1]));
#pragma GCC unroll 4
    for (int i = HIGH - 2; i >= 0; i--)
        q = _mm512_fmadd_ps(q, d, _mm512_permutexvar_ps(j, _mm512_load_ps(c->high[i])));
    __m512d q0 = _mm512_cvtps_pd(_mm512_castps512_ps256(q)), q1 = _mm512_cvtps_pd(_mm512_extractf32x8_ps(q, 1));
#pragma GCC unroll 6
    for (int i = LOW - 1; i >= 0; i--) {
        const __m512d lower = _mm512_load_pd(c->low[i]), upper = _mm512_load_pd(c->low[i] + 8);
        q0 = _mm512_fmadd_pd(q0, d0, _mm512_permutex2var_pd(lower, even, upper));
        q1 = _mm512_fmadd_pd(q1, d1, _mm512_permutex2var_pd(lower, odd, upper));
    }
    __mmask8 low, high;
    const __m256 y0 = half_of_curve(_mm512_castps512_ps256(x), q0, slopes, &low),
                 y1 = half_of_curve(_mm512_extractf32x8_ps(x, 1), q1, slopes, &high);
    const __m512i before =
        _mm512_sub_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(1)); /* for 0: the largest number */
    const __m512 from_zero = _mm512_abs_ps(_mm512_sub_ps(a, _mm512_set1_ps(0x1.80ep-1f)));
    const __mmask16 inside = _mm512_cmp_ps_mask(a, _mm512_set1_ps(14.5f * 11.0f / 32.0f), _CMP_LT_OQ);
    const __mmask16 fine = slopes ? _mm512_mask_cmp_ps_mask(inside, from_zero, _mm512_set1_ps(0x1p-10f), _CMP_GT_OQ)
                                  : _mm512_mask_cmpge_epu32_mask(inside, before, _mm512_set1_epi32(0x04000000));
    *sure = (__mmask16)(fine & ~(low | high << 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(y0), y1, 1);
}
