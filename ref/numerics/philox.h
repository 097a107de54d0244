/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NUMERICS_PHILOX_H
#define ARI_NUMERICS_PHILOX_H

/* Counter-based random numbers: a value is a function of the seed, the full name of its parameter or site and the
 * element's index in the full, unsharded tensor; never of who computes it. docs/numerics.md, section 5. */
#include "anyrank/config.h"
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

/** The key of one stream: FNV-1a of the seed's eight bytes, lowest first, then of the name's. */
ARI_FN uint64_t ari_stream_key(uint64_t seed, const char *name)
{
    uint64_t hash = ARI_FNV1A_BASIS;
    for (int byte = 0; byte < 8; byte++)
        hash = (hash ^ ((seed >> (8 * byte)) & 0xffu)) * ARI_FNV1A_PRIME;
    for (; *name != '\0'; name++)
        hash = (hash ^ (unsigned char)*name) * ARI_FNV1A_PRIME;
    return hash;
}

/** Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. out may be
 *  ctr. */
ARI_FN void ari_philox4x32(const uint32_t ctr[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = ctr[0], c1 = ctr[1], c2 = ctr[2], c3 = ctr[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        const uint64_t p0 = (uint64_t)0xd2511f53u * c0;
        const uint64_t p1 = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* The block that holds element `index`: counter = (index >> 2 in 64 bits, step, use). */
ARI_FN void ari_random_block(uint64_t key, uint64_t index, uint32_t step, uint32_t use, uint32_t out[4])
{
    const uint32_t ctr[4] = {(uint32_t)(index >> 2), (uint32_t)(index >> 34), step, use};
    const uint32_t halves[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    ari_philox4x32(ctr, halves, out);
}

/** 32 uniform bits for one element: lane index & 3 of its block. */
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

/** fl32(bound*(2*unit - 1)), step and use 0. */
ARI_FN float ari_random_uniform(uint64_t key, uint64_t index, double bound)
{
    return (float)(bound * (2.0 * ari_random_unit(ari_random_u32(key, index, 0, 0)) - 1.0));
}

/** fl32(std*z), z standard normal by Box and Muller in binary64 from the element's pair of lanes: the even lane takes
 *  sqrt(-2 log u0)*cos(2 pi u1), the odd one the sine; step and use 0. */
ARI_FN float ari_random_normal(uint64_t key, uint64_t index, double std)
{
    uint32_t block[4];
    ari_random_block(key, index, 0, 0, block);
    const uint32_t pair = (uint32_t)index & 2u;
    const double radius = sqrt(-2.0 * ari_log64(ari_random_unit(block[pair])));
    const double angle = ARI_TWO_PI * ari_random_unit(block[pair + 1u]);
    const double direction = (index & 1u) != 0 ? ari_sin64(angle) : ari_cos64(angle);
    return (float)(std * (radius * direction));
}

/** floor(p*2^32) for 0 <= p < 1: an element is dropped where its bits are below. */
ARI_FN uint32_t ari_dropout_threshold(double p)
{
    return (uint32_t)(p * 0x1p32);
}

/** What is kept is multiplied by this: fl32(1/(1 - p)), the division in binary64. */
ARI_FN float ari_dropout_scale(double p)
{
    return (float)(1.0 / (1.0 - p));
}

/** Whether element `index` of the full tensor is kept in this step; use 0. */
ARI_FN bool ari_dropout_keep(uint64_t key, uint64_t index, uint32_t step, uint32_t threshold)
{
    return ari_random_u32(key, index, step, 0) >= threshold;
}

/** The initial value of element `index` (row-major in the full tensor's Hugging Face shape). Fans are the full
 * tensor's; range is the standard deviation of AR_INIT_NORMAL. Standard deviations and bounds are binary64. */
ARI_FN float ari_init_value(ar_init_scheme scheme, uint64_t key, uint64_t index, size_t fan_in, size_t fan_out,
                            double range)
{
    switch (scheme) {
    case AR_INIT_XAVIER_NORMAL:
        return ari_random_normal(key, index, sqrt(2.0 / ((double)fan_in + (double)fan_out)));
    case AR_INIT_KAIMING_UNIFORM:
    case AR_INIT_UNIFORM_BIAS:
        return ari_random_uniform(key, index, 1.0 / sqrt((double)fan_in));
    case AR_INIT_NORMAL:
        return ari_random_normal(key, index, range);
    case AR_INIT_ZEROS:
        return 0.0f;
    case AR_INIT_ONES:
        break;
    }
    return 1.0f;
}

#endif
