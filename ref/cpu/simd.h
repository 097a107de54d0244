/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_SIMD_H
#define ARI_CPU_SIMD_H

/* ARI_SIMD before a function definition compiles it once per x86-64 level; the loader picks by CPUID. Every level does
 * the same IEEE operations in the same order (-ffp-contract=off), so the choice changes the time and never the bits.
 * Put it on leaf functions that hold a hot loop, not on functions with an OpenMP region: the region's body is outlined
 * before the clones are made and would be compiled for the lowest level only.
 * Empty under sanitizers (the choice runs before their runtime is up) and without optimisation. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ARI_SANITIZED) && defined(__OPTIMIZE__)
#define ARI_SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ARI_SIMD
#endif

#endif
