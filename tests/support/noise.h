/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* In (-1, 1), never zero, with a full mantissa: depends on the index alone. */
static inline float noise(size_t i)
{
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 32;
    return ((float)(x & 0xffffffu) + 0.5f) / 8388608.0f - 1.0f;
}
