/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The vector instructions of ref/cpu/exact/k16.h and amx.c in plain C, written from the pseudocode of Intel's
 * Intrinsics Guide and under its names: tests run those files by them on any processor. Lane 0 is the lowest. The types
 * are those of the compilers' own <immintrin.h>: vectors whose lanes a cast chooses. */
#pragma GCC diagnostic ignored "-Wpsabi" /* how a vector is passed is of no interest: all of these are inlined */

typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef long long __m256i __attribute__((vector_size(32), may_alias));

typedef uint64_t emulated_u64x8 __attribute__((vector_size(64), may_alias));
typedef uint32_t emulated_u32x16 __attribute__((vector_size(64), may_alias));
typedef int32_t emulated_i32x16 __attribute__((vector_size(64), may_alias));
typedef uint32_t emulated_u32x8 __attribute__((vector_size(32), may_alias));
typedef int32_t emulated_i32x8 __attribute__((vector_size(32), may_alias));

#define EMULATED static inline __attribute__((always_inline))

EMULATED __m512i _mm512_set1_epi64(long long a)
{
    return (__m512i){a, a, a, a, a, a, a, a};
}

EMULATED __m512i _mm512_setzero_si512(void)
{
    return _mm512_set1_epi64(0);
}

EMULATED __m512i _mm512_loadu_si512(const void *from)
{
    __m512i r;
    memcpy(&r, from, sizeof r);
    return r;
}

EMULATED void _mm512_storeu_si512(void *to, __m512i a)
{
    memcpy(to, &a, sizeof a);
}

/* The products of two pairs of 16-bit integers with signs, and what was there, without saturation. */
EMULATED __m512i _mm512_dpwssd_epi32(__m512i sum, __m512i a, __m512i b)
{
    const emulated_i32x16 low = (emulated_i32x16)((emulated_u32x16)a << 16) >> 16, high = (emulated_i32x16)a >> 16;
    const emulated_i32x16 by_low = (emulated_i32x16)((emulated_u32x16)b << 16) >> 16,
                          by_high = (emulated_i32x16)b >> 16;
    return (__m512i)((emulated_u32x16)sum + (emulated_u32x16)(low * by_low) + (emulated_u32x16)(high * by_high));
}

/* Byte j of a lane of 64 bits: the 8 bits of the lane of x that begin at the bit that byte j of `from` names, the lane
 * being a ring; what was there where the mask has no bit for the byte. */
EMULATED __m512i _mm512_mask_multishift_epi64_epi8(__m512i was, uint64_t mask, __m512i from, __m512i x)
{
    uint8_t r[64], at[64];
    memcpy(r, &was, sizeof r);
    memcpy(at, &from, sizeof at);
    for (size_t j = 0; j < 64; j++) {
        const uint64_t lane = ((emulated_u64x8)x)[j / 8], bit = at[j] & 63;
        if (mask >> j & 1)
            r[j] = (uint8_t)(lane >> bit | lane << (64 - bit) % 64);
    }
    return _mm512_loadu_si512(r);
}

/* Words of a, or of b where bit 4 of the index is set. */
EMULATED __m512i _mm512_permutex2var_epi32(__m512i a, __m512i index, __m512i b)
{
    emulated_u32x16 r;
    for (size_t i = 0; i < 16; i++) {
        const uint32_t at = ((emulated_u32x16)index)[i] & 31;
        r[i] = at < 16 ? ((emulated_u32x16)a)[at] : ((emulated_u32x16)b)[at - 16];
    }
    return (__m512i)r;
}

EMULATED __m256i _mm256_set1_epi32(int a)
{
    return (__m256i)((emulated_u32x8){0} + (uint32_t)a);
}

EMULATED __m256i _mm256_setzero_si256(void)
{
    return _mm256_set1_epi32(0);
}

EMULATED __m256i _mm256_loadu_si256(const __m256i *from)
{
    __m256i r;
    memcpy(&r, (const void *)from, sizeof r);
    return r;
}

/* Reads nothing where the mask's lane has a 0 for its highest bit. */
EMULATED __m256i _mm256_maskload_epi32(const int *from, __m256i mask)
{
    emulated_u32x8 r = {0};
    for (size_t i = 0; i < 8; i++)
        if (((emulated_u32x8)mask)[i] >> 31)
            r[i] = (uint32_t)from[i];
    return (__m256i)r;
}

EMULATED void _mm256_storeu_si256(__m256i *to, __m256i a)
{
    memcpy((void *)to, &a, sizeof a);
}

EMULATED __m256i _mm256_add_epi32(__m256i a, __m256i b)
{
    return (__m256i)((emulated_u32x8)a + (emulated_u32x8)b);
}

/* _mm512_dpwssd_epi32 of half the width: for AVX-VNNI, and what AVX2 has, which adds nothing. */
EMULATED __m256i _mm256_dpwssd_avx_epi32(__m256i sum, __m256i a, __m256i b)
{
    const emulated_i32x8 low = (emulated_i32x8)((emulated_u32x8)a << 16) >> 16, high = (emulated_i32x8)a >> 16;
    const emulated_i32x8 by_low = (emulated_i32x8)((emulated_u32x8)b << 16) >> 16, by_high = (emulated_i32x8)b >> 16;
    return (__m256i)((emulated_u32x8)sum + (emulated_u32x8)(low * by_low) + (emulated_u32x8)(high * by_high));
}

EMULATED __m256i _mm256_madd_epi16(__m256i a, __m256i b)
{
    return _mm256_dpwssd_avx_epi32(_mm256_setzero_si256(), a, b);
}

/* Those below work on each half of 128 bits by itself: at + 0 .. at + 3. */

EMULATED __m256i emulated_unpack32(__m256i first, __m256i second, size_t from)
{
    const emulated_u32x8 a = (emulated_u32x8)first, b = (emulated_u32x8)second;
    emulated_u32x8 r = {0};
    for (size_t at = 0; at < 8; at += 4) {
        r[at] = a[at + from];
        r[at + 1] = b[at + from];
        r[at + 2] = a[at + from + 1];
        r[at + 3] = b[at + from + 1];
    }
    return (__m256i)r;
}

EMULATED __m256i _mm256_unpacklo_epi32(__m256i a, __m256i b)
{
    return emulated_unpack32(a, b, 0);
}

EMULATED __m256i _mm256_unpackhi_epi32(__m256i a, __m256i b)
{
    return emulated_unpack32(a, b, 2);
}

EMULATED __m256i _mm256_unpacklo_epi64(__m256i a, __m256i b)
{
    return (__m256i){a[0], b[0], a[2], b[2]};
}

EMULATED __m256i _mm256_unpackhi_epi64(__m256i a, __m256i b)
{
    return (__m256i){a[1], b[1], a[3], b[3]};
}

/* Each half of the result is a half of a or b, by two bits of the control (b's above a's), or 0 by its bit 3 or 7. */
EMULATED __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int control)
{
    const __m256i halves[2] = {a, b};
    __m256i r = {0};
    for (unsigned int half = 0; half < 2; half++) {
        const unsigned int chosen = (unsigned int)control >> 4 * half & 15, from = 2 * (chosen & 1);
        for (unsigned int i = 0; i < 2 && !(chosen & 8); i++)
            r[2 * half + i] = halves[chosen >> 1 & 1][from + i];
    }
    return r;
}
