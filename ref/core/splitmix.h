/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_SPLITMIX_H
#define ARI_CORE_SPLITMIX_H

#include <stdint.h>

/** The next number of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): for
 *  choices that a seed repeats on every machine. Tensors are drawn by Philox. */
static inline uint64_t ari_splitmix(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

#endif
