/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>
#include <string.h>

/* Functions that the C compiler and nvcc both compile: for the host, and with nvcc also for the GPU. */
#if defined(__CUDACC__)
#define ARI_FN static __host__ __device__ inline
#else
#define ARI_FN static inline
#endif

/* ARI_SIMD before a function definition compiles the function once per x86-64 level; the loader chooses by CPUID. Every
 * level does the same IEEE operations in the same order (-ffp-contract=off), so the choice affects the time but not the
 * bits. Put it on leaf functions with a hot loop, not on functions with an OpenMP region, whose body is outlined before
 * the clones are made and would be compiled for the lowest level only. It is empty under sanitizers (the choice runs
 * before their runtime is initialised) and without optimisation. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED) && defined(__OPTIMIZE__)
#define ARI_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ARI_SIMD
#endif

/* Convert a floating-point value to its bits, and back. */

ARI_FN uint32_t ari_bits32(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

ARI_FN float ari_float32(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

ARI_FN uint64_t ari_bits64(double x)
{
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

ARI_FN double ari_float64(uint64_t u)
{
    double x;
    memcpy(&x, &u, sizeof x);
    return x;
}

/* IEEE 754 binary16 (F16) and bfloat16 (BF16): converted to fp32 exactly, and from fp32 by one rounding to nearest,
 * ties to even. NaN stays NaN (quiet after rounding), too large values become infinite, and subnormals are handled
 * exactly. Without branches, so that loops vectorise. */

ARI_FN float ari_f32_of_bf16(uint16_t b)
{
    return ari_float32((uint32_t)b << 16);
}

/* Adds half of the last kept bit's weight, less 1 if that bit is 0, so that a tie does not carry. A carry out of the
 * significand raises the exponent, up to infinity. A NaN keeps its upper bits and becomes quiet, because the bits that
 * are cut off may be the only nonzero ones. */
ARI_FN uint16_t ari_bf16_of_f32(float x)
{
    const uint32_t bits = ari_bits32(x);
    const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const uint32_t quiet = bits >> 16 | 0x40u;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/** Rounds x to the nearest number with `bits` bits of significand (1 < bits < 24), ties to even. The exponents are
 *  those of fp32, so 8 bits give a bf16 number. */
ARI_FN float ari_f32_to_bits(float x, int bits)
{
    const int cut = 24 - bits;
    const uint32_t u = ari_bits32(x), half = (UINT32_C(1) << (cut - 1)) - 1u, mask = ~((UINT32_C(1) << cut) - 1u);
    const uint32_t rounded = (u + half + (u >> cut & 1u)) & mask;
    const uint32_t quiet = (u & mask) | 0x400000u;
    return ari_float32((u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* The 15 lower bits, moved to fp32's positions, are the value times 2^(15-127), including subnormals (which are fp32's
 * subnormals): the product is exact. Infinities and NaN become numbers of exponent 31 - 15 and are replaced. */
ARI_FN float ari_f32_of_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)(h & 0x7fffu);
    const uint32_t number = ari_bits32(ari_float32(magnitude << 13) * 0x1p112f);
    return ari_float32(sign | number | (magnitude >= 0x7c00u ? 0x7f800000u : 0u));
}

/* Three cases of the magnitude:
 *  normal      as for BF16, but 13 bits are cut off; the exponent's bias decreases by 112. Beyond 65519 the carry gives
 * infinity.
 *  subnormal   0.5f + x: the sum's last bit has weight 2^-24, like a subnormal's, so the addition rounds.
 *  2^16 and more, infinities, NaN: set directly. */
ARI_FN uint16_t ari_f16_of_f32(float x)
{
    const uint32_t bits = ari_bits32(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t subnormal = ari_bits32(ari_float32(magnitude) + 0.5f) - ari_bits32(0.5f);
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t finite = magnitude < 113u << 23 ? subnormal : normal;
    return (uint16_t)(sign | (magnitude >= 143u << 23 ? special : finite));
}
