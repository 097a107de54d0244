/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_PACKED_H
#define ARI_CPU_PACKED_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/device.h"

/* Quantised rows: [batch, rows, k] integers of at most ARI_QUANTISED_BITS bits and a sign, row-major. Four bytes an
 * element for either operand: the left one is split into halves, and both are widened to binary64, tile by tile while
 * the integers are in the cache (gemm_exact.c), so that a cached weight costs what the weight costs. */
struct ar_packed {
    size_t batch, rows, k;
    int32_t *q;
};

#define ARI_QUANTISED_BITS 25
#define ARI_QUANTISED_MAX ((1 << ARI_QUANTISED_BITS) - 1)

#endif
