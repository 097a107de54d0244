/* SPDX-License-Identifier: Apache-2.0 */
#include "support/bits.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

size_t first_different_bits(const float *actual, const float *expected, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t a = 0, e = 0;
        memcpy(&a, &actual[i], sizeof a);
        memcpy(&e, &expected[i], sizeof e);
        if (a != e) {
            fprintf(stderr, "element %zu of %zu: 0x%08x (%.9g), expected 0x%08x (%.9g)\n", i, n, a, (double)actual[i],
                    e, (double)expected[i]);
            return i;
        }
    }
    return n;
}

void fill_values(float *x, size_t n, unsigned seed, double scale)
{
    uint64_t state = 0x9e3779b97f4a7c15u * (seed + 1u);
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(scale * ((double)(state >> 11) * 0x1p-52 - 1.0));
    }
}
