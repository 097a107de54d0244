/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <immintrin.h>

#include "tests/cpu/emulated/steps.h"

#define LOAD256(i) _mm256_loadu_si256((const __m256i *)(const void *)in[i])
#define SAVE256(i, x) _mm256_storeu_si256((__m256i *)(void *)out[i], x)

__attribute__((target("avx2"))) static void avx2_steps(step_words out[STEPS], const step_words in[3])
{
    const __m256i a = LOAD256(0), b = LOAD256(1);
    SAVE256(0, _mm256_add_epi32(a, b));
    SAVE256(1, _mm256_madd_epi16(a, b));
    SAVE256(2, _mm256_unpacklo_epi32(a, b));
    SAVE256(3, _mm256_unpackhi_epi32(a, b));
    SAVE256(4, _mm256_unpacklo_epi64(a, b));
    SAVE256(5, _mm256_unpackhi_epi64(a, b));
    SAVE256(6, _mm256_permute2x128_si256(a, b, 0x20));
    SAVE256(7, _mm256_permute2x128_si256(a, b, 0x31));
    SAVE256(8, _mm256_permute2x128_si256(a, b, 0x83));
    SAVE256(9, _mm256_maskload_epi32((const int *)(const void *)in[2], a));
    SAVE256(10, _mm256_set1_epi32((int)in[0][0]));
    SAVE256(11, _mm256_setzero_si256());
}

__attribute__((target("avx2,avxvnni"))) static void avxvnni_steps(step_words out[STEPS], const step_words in[3])
{
    SAVE256(0, _mm256_dpwssd_avx_epi32(LOAD256(2), LOAD256(0), LOAD256(1)));
}

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))) static void
avx512_steps(step_words out[STEPS], const step_words in[3])
{
    const __m512i a = _mm512_loadu_si512(in[0]), b = _mm512_loadu_si512(in[1]), c = _mm512_loadu_si512(in[2]);
    _mm512_storeu_si512(out[0], _mm512_dpwssd_epi32(a, b, c));
    _mm512_storeu_si512(out[1], _mm512_set1_epi64((long long)in[0][1] << 20));
    _mm512_storeu_si512(out[2], _mm512_setzero_si512());
}

__attribute__((target("avx512f,avx512vbmi"))) static void avx512vbmi_steps(step_words out[STEPS],
                                                                           const step_words in[3])
{
    const __m512i a = _mm512_loadu_si512(in[0]), b = _mm512_loadu_si512(in[1]), c = _mm512_loadu_si512(in[2]);
    const uint64_t mask = (uint64_t)in[0][0] << 32 | in[0][1];
    _mm512_storeu_si512(out[0], _mm512_mask_multishift_epi64_epi8(a, mask, b, c));
    _mm512_storeu_si512(out[1], _mm512_permutex2var_epi32(a, b, c));
}

#define AVX_STEPS                                                                                         \
    {                                                                                                     \
        {"avx2", avx2_steps}, {"avx2 avx_vnni", avxvnni_steps}, {"avx512f avx512vbmi", avx512vbmi_steps}, \
        {                                                                                                 \
            "avx512f avx512bw avx512dq avx512vl avx512_vnni", avx512_steps                                \
        }                                                                                                 \
    }
