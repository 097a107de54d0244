/* SPDX-License-Identifier: Apache-2.0 */
/* HMAC (RFC 2104) with SHA-256 (FIPS 180-4): in plain C, by the SHA instructions of x86-64 if the processor has them,
 * and by those of ARMv8 if the compiler may use them. */
#include <string.h>

#include "ref/io/hash.h"

/* Section 4.2.2: the first 32 bits of the fractions of the cube roots of the first 64 primes. */
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

enum { BLOCK = 64, LENGTH_BYTES = 8 };

static inline uint32_t rotate_right(uint32_t x, int bits)
{
    return x >> bits | x << (32 - bits);
}

static inline uint32_t big_endian(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

/* The 64 words of a block's message schedule, section 6.2.2, step 1. */
static void expand(uint32_t w[64], const unsigned char *block)
{
    for (int t = 0; t < 16; t++)
        w[t] = big_endian(block + 4 * t);
    for (int t = 16; t < 64; t++) {
        const uint32_t s0 = rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
        const uint32_t s1 = rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
        w[t] = s1 + w[t - 7] + s0 + w[t - 16];
    }
}

void ari_sha256_blocks_portable(uint32_t state[8], const unsigned char *data, size_t blocks)
{
    for (; blocks > 0; blocks--, data += BLOCK) {
        uint32_t w[64];
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        expand(w, data);
#pragma GCC unroll 8
        for (int t = 0; t < 64; t++) {
            const uint32_t sum1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
            const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + constants[t] + w[t];
            const uint32_t sum0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
            const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + t1;
            d = c, c = b, b = a, a = t1 + t2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

/* Block function by the instructions of either architecture: w[i % 4] holds words 4i to 4i + 3, and after their use
 * those 16 words further on. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* The state is in two registers in the order that the instructions require: (a b e f) and (c d g h), the last letter
 * lowest. */
__attribute__((target("sha,sse4.1"))) static void blocks_sha_ni(uint32_t state[8], const unsigned char *data,
                                                                size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)state), 0xb1);
    const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(const void *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);
    for (; blocks > 0; blocks--, data += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)(data + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const __m128i k = _mm_loadu_si128((const __m128i *)(const void *)(constants + 4 * i));
            const __m128i wk = _mm_add_epi32(w[i % 4], k);
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
            if (i >= 12)
                continue;
            const __m128i seven_back = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
            w[i % 4] = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), seven_back);
            w[i % 4] = _mm_sha256msg2_epu32(w[i % 4], w[(i + 3) % 4]);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    const __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static bool has_sha_ni(void)
{
    unsigned a, b, c, d;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA);
}

ari_sha256_blocks_fn *ari_sha256_fastest(void)
{
    return has_sha_ni() ? blocks_sha_ni : ari_sha256_blocks_portable;
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_SHA2)
#include <arm_neon.h>

static void blocks_armv8(uint32_t state[8], const unsigned char *data, size_t blocks)
{
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; blocks > 0; blocks--, data += BLOCK) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t w[4];
        for (int i = 0; i < 4; i++)
            w[i] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * i)));
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const uint32x4_t wk = vaddq_u32(w[i % 4], vld1q_u32(constants + 4 * i)), abcd_was = abcd;
            abcd = vsha256hq_u32(abcd, efgh, wk);
            efgh = vsha256h2q_u32(efgh, abcd_was, wk);
            if (i < 12)
                w[i % 4] = vsha256su1q_u32(vsha256su0q_u32(w[i % 4], w[(i + 1) % 4]), w[(i + 2) % 4], w[(i + 3) % 4]);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

ari_sha256_blocks_fn *ari_sha256_fastest(void)
{
    return blocks_armv8;
}
#else
ari_sha256_blocks_fn *ari_sha256_fastest(void)
{
    return ari_sha256_blocks_portable;
}
#endif

void ari_sha256_init(ari_sha256 *s)
{
    /* Section 5.3.3: the same of the square roots of the first 8 primes. */
    *s = (ari_sha256){
        .state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19},
        .blocks = ari_sha256_fastest()};
}

void ari_sha256_update(ari_sha256 *s, const void *data, size_t bytes)
{
    const unsigned char *cursor = data;
    const size_t buffered = (size_t)(s->bytes % BLOCK), missing = BLOCK - buffered;
    if (bytes == 0)
        return;
    s->bytes += bytes;
    if (bytes < missing) {
        memcpy(s->rest + buffered, cursor, bytes);
        return;
    }
    if (buffered > 0) {
        memcpy(s->rest + buffered, cursor, missing);
        s->blocks(s->state, s->rest, 1);
        cursor += missing;
        bytes -= missing;
    }
    s->blocks(s->state, cursor, bytes / BLOCK);
    memcpy(s->rest, cursor + bytes / BLOCK * BLOCK, bytes % BLOCK);
}

void ari_sha256_digest(ari_sha256 *s, unsigned char digest[ARI_SHA256_BYTES])
{
    static const unsigned char padding[BLOCK] = {0x80};
    const uint64_t bits = s->bytes * 8;
    const size_t buffered = (size_t)(s->bytes % BLOCK), capacity = BLOCK - LENGTH_BYTES;
    unsigned char length[LENGTH_BYTES];
    for (int i = 0; i < LENGTH_BYTES; i++)
        length[i] = (unsigned char)(bits >> (56 - 8 * i));
    ari_sha256_update(s, padding, buffered < capacity ? capacity - buffered : capacity + BLOCK - buffered);
    ari_sha256_update(s, length, LENGTH_BYTES);
    for (int i = 0; i < ARI_SHA256_BYTES; i++)
        digest[i] = (unsigned char)(s->state[i / 4] >> (24 - 8 * (i % 4)));
}

void ari_sha256_final(ari_sha256 *s, char hex[65])
{
    static const char digit[] = "0123456789abcdef";
    unsigned char digest[ARI_SHA256_BYTES];
    ari_sha256_digest(s, digest);
    for (int i = 0; i < 64; i++)
        hex[i] = digit[digest[i / 2] >> (4 - 4 * (i % 2)) & 15];
    hex[64] = '\0';
}

void ari_sha256_of(char hex[65], const void *data, size_t bytes)
{
    ari_sha256 s;
    ari_sha256_init(&s);
    ari_sha256_update(&s, data, bytes);
    ari_sha256_final(&s, hex);
}
