/* SPDX-License-Identifier: Apache-2.0 */
/* Transposes rows of quantised integers into the panels of the x86 kernels, whose vectors have one lane per row. */
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* 8 rows of integers from a common term on. */
typedef struct ari_strip {
    const void *row[8];       /* NULL: zeros */
    size_t prefetch_distance; /* distance in bytes from a row to a row that will be needed soon */
} ari_strip;

/* Prefetches the rows of the next strip while this one is packed, one cache line of 64 bytes at a time. The processor
 * does not predict 8 short rows next to each other: without the prefetch a product of 64 columns took half as long
 * again. A prefetch of an address after the last row is harmless. */
static inline __attribute__((always_inline)) void ari_fetch_ahead(const ari_strip *s, size_t offset)
{
    for (size_t i = 0; offset % 64 == 0 && i < 8; i++)
        __builtin_prefetch((const void *)((uintptr_t)s->row[i] + s->prefetch_distance + offset), 0, 3);
}

/* out[t] = word t of the 8 vectors, for t < 8. */
static inline __attribute__((always_inline, target("avx2"))) void ari_transpose_words(__m256i out[8],
                                                                                      const __m256i r[8])
{
    __m256i u[8], v[8];
    for (size_t i = 0; i < 8; i += 2) {
        u[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        u[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (size_t i = 0; i < 8; i += 4) {
        v[i] = _mm256_unpacklo_epi64(u[i], u[i + 2]);
        v[i + 1] = _mm256_unpackhi_epi64(u[i], u[i + 2]);
        v[i + 2] = _mm256_unpacklo_epi64(u[i + 1], u[i + 3]);
        v[i + 3] = _mm256_unpackhi_epi64(u[i + 1], u[i + 3]);
    }
    for (size_t i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x20);
        out[i + 4] = _mm256_permute2x128_si256(v[i], v[i + 4], 0x31);
    }
}

/* Computes out[t] = the values of term k + t in the 8 rows, for t < 8; 0 from term k + n on. */
static inline __attribute__((always_inline, target("avx2"))) void ari_transpose8(__m256i out[8], const ari_strip *s,
                                                                                 size_t k, size_t n)
{
    static const int32_t ones[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const __m256i mask = _mm256_loadu_si256((const __m256i *)(const void *)(ones + (n < 8 ? 8 - n : 0)));
    __m256i r[8];
    for (size_t i = 0; i < 8; i++)
        r[i] = s->row[i] ? _mm256_maskload_epi32((const int *)s->row[i] + k, mask) : _mm256_setzero_si256();
    ari_fetch_ahead(s, k * sizeof(int32_t));
    ari_transpose_words(out, r);
}

/* Computes out[t] = narrow terms k + 2*t and k + 2*t + 1 of the 8 rows, for t < 8; 0 from term k + n on. */
static inline __attribute__((always_inline, target("avx2"))) void
ari_transpose_pairs(__m256i out[8], const ari_strip *s, size_t k, size_t n)
{
    __m256i r[8];
    for (size_t i = 0; i < 8; i++) {
        const int16_t *q = (const int16_t *)s->row[i] + (s->row[i] ? k : 0);
        int16_t part[16] = {0};
        if (q && n < 16)
            memcpy(part, q, n * sizeof *q);
        r[i] = _mm256_loadu_si256((const __m256i *)(const void *)(q && n >= 16 ? q : part));
    }
    ari_fetch_ahead(s, k * sizeof(int16_t));
    ari_transpose_words(out, r);
}
