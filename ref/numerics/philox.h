/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Counter-based random numbers: a value is a function of the seed, the full name of its parameter or site, and the
 * element's index in the full, unsharded tensor, independent of the rank that computes it. numerics.md, section 5. */
#include "anyrank/block.h"
#include "ref/numerics/elementary.h"

#define ARI_FNV1A_BASIS 0xcbf29ce484222325u
#define ARI_FNV1A_PRIME 0x100000001b3u

/** FNV-1a, 64 bits, of the bytes of a string without its end. */
ARI_FN uint64_t ari_fnv1a(const char *text)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (; *text != '\0'; text++)
        hash = (hash ^ (unsigned char)*text) * ARI_FNV1A_PRIME;
    return hash;
}

/** Returns the key of a stream: FNV-1a of the seed's eight bytes, lowest first, followed by the name's bytes. */
ARI_FN uint64_t ari_stream_key(uint64_t seed, const char *name)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (int byte = 0; byte < 8; byte++)
        hash = (hash ^ ((seed >> (8 * byte)) & 0xffu)) * ARI_FNV1A_PRIME;
    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * ARI_FNV1A_PRIME;
    return hash;
}

/* Computes one round on a block c0..c3. */
ARI_FN void ari_philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t k0, uint32_t k1)
{
    const uint64_t p0 = (uint64_t)0xd2511f53u * *c0;
    const uint64_t p1 = (uint64_t)0xcd9e8d57u * *c2;
    *c0 = (uint32_t)(p1 >> 32) ^ *c1 ^ k0;
    *c1 = (uint32_t)p1;
    *c2 = (uint32_t)(p0 >> 32) ^ *c3 ^ k1;
    *c3 = (uint32_t)p0;
}

/** Computes Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. out may
 *  be ctr. */
ARI_FN void ari_philox4x32(const uint32_t ctr[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        ari_philox_round(&c0, &c1, &c2, &c3, k0, k1);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Computes the block that contains element `index`: counter = (index >> 2 in 64 bits, step, use). */
ARI_FN void ari_random_block(uint64_t key, uint64_t index, uint32_t step, uint32_t use, uint32_t out[4])
{
    const uint32_t ctr[4] = {(uint32_t)(index >> 2), (uint32_t)(index >> 34), step, use};
    const uint32_t halves[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    ari_philox4x32(ctr, halves, out);
}

/* Blocks of initial values that are drawn together, side by side in the lanes of the processor's vectors. */
#define ARI_RANDOM_BLOCKS 8

/** Computes n blocks from `first_block` on, for elements from 4*first_block on, with step and use 0: c[lane*n +
 *  block]. */
ARI_FN void ari_random_blocks(uint32_t *c, uint32_t n, uint64_t key, uint64_t first_block)
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (uint32_t i = 0; i < n; i++) {
        c[i] = (uint32_t)(first_block + i);
        c[n + i] = (uint32_t)((first_block + i) >> 32);
        c[2 * n + i] = c[3 * n + i] = 0;
    }
    for (int round = 0; round < 10; round++) {
        for (uint32_t i = 0; i < n; i++)
            ari_philox_round(&c[i], &c[n + i], &c[2 * n + i], &c[3 * n + i], k0, k1);
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

/** Returns 32 uniform bits for one element: lane index & 3 of its block. */
ARI_FN uint32_t ari_random_u32(uint64_t key, uint64_t index, uint32_t step, uint32_t use)
{
    uint32_t block[4];
    ari_random_block(key, index, step, use, block);
    return block[index & 3u];
}

/** (u + 1/2)*2^-32, in (0, 1), exact. */
ARI_FN double ari_random_unit(uint32_t u)
{
    return ((double)u + 0.5) * 0x1p-32;
}

/* fl32(bound*(2*unit - 1)). */
ARI_FN float ari_uniform_of(uint32_t u, double bound)
{
    return (float)(bound * (2.0 * ari_random_unit(u) - 1.0));
}

/** Uniform in (-bound, bound); step and use 0. */
ARI_FN float ari_random_uniform(uint64_t key, uint64_t index, double bound)
{
    return ari_uniform_of(ari_random_u32(key, index, 0, 0), bound);
}

/* Returns fl32(std*z), where z is standard normal by the Box-Muller transform in binary64: sqrt(-2 log u0)*cos(2 pi
 * u1), or the sine for an odd element. */
ARI_FN float ari_normal_of(uint32_t u0, uint32_t u1, bool odd, double std)
{
    const double radius = sqrt(-2.0 * ari_log64(ari_random_unit(u0)));
    const double angle = ARI_TWO_PI * ari_random_unit(u1);
    return (float)(std * (radius * (odd ? ari_sin64(angle) : ari_cos64(angle))));
}

/** Returns a normal number with standard deviation std from the element's pair of lanes; step and use are 0. */
ARI_FN float ari_random_normal(uint64_t key, uint64_t index, double std)
{
    uint32_t block[4];
    ari_random_block(key, index, 0, 0, block);
    const uint32_t pair = (uint32_t)index & 2u;
    return ari_normal_of(block[pair], block[pair + 1u], (index & 1u) != 0, std);
}

/** Returns floor(p*2^32) for 0 <= p < 1: an element is dropped if its bits are below. */
ARI_FN uint32_t ari_dropout_threshold(double p)
{
    return (uint32_t)(p * 0x1p32);
}

/** Factor of the elements kept: fl32(1/(1 - p)), the division in binary64. */
ARI_FN float ari_dropout_scale(double p)
{
    return (float)(1.0 / (1.0 - p));
}

/** True if element `index` of the full tensor is kept in this step; use 0. */
ARI_FN bool ari_dropout_keep(uint64_t key, uint64_t index, uint32_t step, uint32_t threshold)
{
    return ari_random_u32(key, index, step, 0) >= threshold;
}

/* Returns a scheme's scale for its random numbers, a standard deviation or a bound, in binary64. */
ARI_FN double ari_init_spread(ar_init_scheme scheme, size_t fan_in, size_t fan_out, double range)
{
    switch (scheme) {
    case AR_INIT_XAVIER_NORMAL:
        return sqrt(2.0 / ((double)fan_in + (double)fan_out));
    case AR_INIT_KAIMING_UNIFORM:
    case AR_INIT_UNIFORM_BIAS:
        return 1.0 / sqrt((double)fan_in);
    case AR_INIT_NORMAL:
        return range;
    case AR_INIT_ZEROS:
    case AR_INIT_ONES:
        break;
    }
    return 0.0;
}

/* Computes initial values for the blocks from `first_block` on: those of ari_random_normal or ari_random_uniform, or 0
 * or 1. */
ARI_FN void ari_init_blocks(float out[4 * ARI_RANDOM_BLOCKS], ar_init_scheme scheme, uint64_t key, uint64_t first_block,
                            double spread)
{
    uint32_t c[4][ARI_RANDOM_BLOCKS];
    if (scheme == AR_INIT_ZEROS || scheme == AR_INIT_ONES) {
        for (int i = 0; i < 4 * ARI_RANDOM_BLOCKS; i++)
            out[i] = scheme == AR_INIT_ONES ? 1.0f : 0.0f;
        return;
    }
    ari_random_blocks(c[0], ARI_RANDOM_BLOCKS, key, first_block);
    float x[4][ARI_RANDOM_BLOCKS];
    const bool normal = scheme == AR_INIT_XAVIER_NORMAL || scheme == AR_INIT_NORMAL;
    for (int lane = 0; lane < 4; lane += 2) {
        for (int i = 0; normal && i < ARI_RANDOM_BLOCKS; i++) {
            x[lane][i] = ari_normal_of(c[lane][i], c[lane + 1][i], false, spread);
            x[lane + 1][i] = ari_normal_of(c[lane][i], c[lane + 1][i], true, spread);
        }
        for (int i = 0; !normal && i < ARI_RANDOM_BLOCKS; i++) {
            x[lane][i] = ari_uniform_of(c[lane][i], spread);
            x[lane + 1][i] = ari_uniform_of(c[lane + 1][i], spread);
        }
    }
    for (int i = 0; i < 4 * ARI_RANDOM_BLOCKS; i++)
        out[i] = x[i % 4][i / 4];
}

/** The initial values of `count` elements from `first_element` on (row-major in the full tensor's Hugging Face shape).
 *  Fans are the full tensor's; range is the standard deviation of AR_INIT_NORMAL. */
ARI_FN void ari_init_values(float *out, ar_init_scheme scheme, uint64_t key, uint64_t first_element, size_t count,
                            size_t fan_in, size_t fan_out, double range)
{
    const double spread = ari_init_spread(scheme, fan_in, fan_out, range);
    while (count > 0) {
        float drawn[4 * ARI_RANDOM_BLOCKS];
        const size_t skip = (size_t)(first_element % 4), max_count = sizeof drawn / sizeof *drawn - skip;
        const size_t n = count < max_count ? count : max_count;
        ari_init_blocks(drawn, scheme, key, first_element / 4, spread);
        memcpy(out, drawn + skip, n * sizeof *out);
        out += n;
        first_element += n;
        count -= n;
    }
}
