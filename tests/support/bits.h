/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

/** Index of the first element whose bits differ, n if none does. Prints index and both values in hex on a
 *  difference. */
size_t first_different_bits(const float *actual, const float *expected, size_t n);

/** Deterministic test data in [-scale, scale], depending on seed and index. */
void fill_values(float *x, size_t n, unsigned seed, double scale);
