/* SPDX-License-Identifier: Apache-2.0 */
#ifndef TEST_CPU_EMULATED_AVX512_H
#define TEST_CPU_EMULATED_AVX512_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The vector instructions of ref/cpu/gemm_ifma.c in plain C, written from the pseudocode of Intel's Intrinsics Guide
 * and under its names: tests run that file by them on any processor. Lane 0 is the lowest. */

typedef struct __m512i {
    uint64_t lane[8];
} __m512i;

typedef struct __m256i {
    uint32_t lane[8]; /* 64-bit lane i is lanes 2i (low) and 2i + 1 */
} __m256i;

typedef uint8_t __mmask8;

/* --- 8 lanes of 64 bits ------------------------------------------------------------------------------------------- */

static inline __m512i _mm512_set1_epi64(long long a)
{
    __m512i r;
    for (size_t i = 0; i < 8; i++)
        r.lane[i] = (uint64_t)a;
    return r;
}

static inline __m512i _mm512_setzero_si512(void)
{
    return _mm512_set1_epi64(0);
}

static inline __m512i _mm512_loadu_si512(const void *from)
{
    __m512i r;
    memcpy(r.lane, from, sizeof r.lane);
    return r;
}

static inline void _mm512_storeu_si512(void *to, __m512i a)
{
    memcpy(to, a.lane, sizeof a.lane);
}

static inline __m512i _mm512_add_epi64(__m512i a, __m512i b)
{
    for (size_t i = 0; i < 8; i++)
        a.lane[i] += b.lane[i];
    return a;
}

static inline __m512i _mm512_sub_epi64(__m512i a, __m512i b)
{
    for (size_t i = 0; i < 8; i++)
        a.lane[i] -= b.lane[i];
    return a;
}

static inline __m512i _mm512_slli_epi64(__m512i a, unsigned int count)
{
    for (size_t i = 0; i < 8; i++)
        a.lane[i] = count > 63 ? 0 : a.lane[i] << count;
    return a;
}

static inline __m512i _mm512_cvtepu32_epi64(__m256i a)
{
    __m512i r;
    for (size_t i = 0; i < 8; i++)
        r.lane[i] = a.lane[i];
    return r;
}

/* a + the low 52 bits of the product of the low 52 bits of b and c. The product's higher half is not needed for
 * them. */
static inline __m512i _mm512_madd52lo_epu64(__m512i a, __m512i b, __m512i c)
{
    const uint64_t low52 = ((uint64_t)1 << 52) - 1;
    for (size_t i = 0; i < 8; i++)
        a.lane[i] += ((b.lane[i] & low52) * (c.lane[i] & low52)) & low52;
    return a;
}

/* --- 8 lanes of 32 bits ------------------------------------------------------------------------------------------- */

static inline __m256i _mm256_set1_epi32(int a)
{
    __m256i r;
    for (size_t i = 0; i < 8; i++)
        r.lane[i] = (uint32_t)a;
    return r;
}

static inline __m256i _mm256_setzero_si256(void)
{
    return _mm256_set1_epi32(0);
}

static inline __m256i _mm256_loadu_si256(const __m256i *from)
{
    __m256i r;
    memcpy(r.lane, (const void *)from, sizeof r.lane);
    return r;
}

/* Reads nothing where the mask has a 0. */
static inline __m256i _mm256_maskz_loadu_epi32(__mmask8 mask, const void *from)
{
    __m256i r = _mm256_setzero_si256();
    for (size_t i = 0; i < 8; i++)
        if (mask >> i & 1)
            memcpy(&r.lane[i], (const char *)from + 4 * i, 4);
    return r;
}

static inline void _mm256_storeu_si256(__m256i *to, __m256i a)
{
    memcpy((void *)to, a.lane, sizeof a.lane);
}

static inline __m256i _mm256_add_epi32(__m256i a, __m256i b)
{
    for (size_t i = 0; i < 8; i++)
        a.lane[i] += b.lane[i];
    return a;
}

/* The four below work on each half of 128 bits by itself: at + 0 .. at + 3. */

static inline __m256i _mm256_unpacklo_epi32(__m256i a, __m256i b)
{
    __m256i r;
    for (size_t at = 0; at < 8; at += 4) {
        r.lane[at] = a.lane[at];
        r.lane[at + 1] = b.lane[at];
        r.lane[at + 2] = a.lane[at + 1];
        r.lane[at + 3] = b.lane[at + 1];
    }
    return r;
}

static inline __m256i _mm256_unpackhi_epi32(__m256i a, __m256i b)
{
    __m256i r;
    for (size_t at = 0; at < 8; at += 4) {
        r.lane[at] = a.lane[at + 2];
        r.lane[at + 1] = b.lane[at + 2];
        r.lane[at + 2] = a.lane[at + 3];
        r.lane[at + 3] = b.lane[at + 3];
    }
    return r;
}

static inline __m256i _mm256_unpacklo_epi64(__m256i a, __m256i b)
{
    __m256i r;
    for (size_t at = 0; at < 8; at += 4) {
        memcpy(&r.lane[at], &a.lane[at], 8);
        memcpy(&r.lane[at + 2], &b.lane[at], 8);
    }
    return r;
}

static inline __m256i _mm256_unpackhi_epi64(__m256i a, __m256i b)
{
    __m256i r;
    for (size_t at = 0; at < 8; at += 4) {
        memcpy(&r.lane[at], &a.lane[at + 2], 8);
        memcpy(&r.lane[at + 2], &b.lane[at + 2], 8);
    }
    return r;
}

/* Each half of the result is a half of a or b, by two bits of the control (b's above a's), or 0 by its bit 3 or 7. */
static inline __m256i _mm256_permute2x128_si256(__m256i a, __m256i b, int control)
{
    const uint32_t *halves[4] = {&a.lane[0], &a.lane[4], &b.lane[0], &b.lane[4]};
    __m256i r = _mm256_setzero_si256();
    for (size_t half = 0; half < 2; half++) {
        const unsigned int chosen = (unsigned int)control >> 4 * half & 15;
        if (!(chosen & 8))
            memcpy(&r.lane[4 * half], halves[chosen & 3], 16);
    }
    return r;
}

#endif
