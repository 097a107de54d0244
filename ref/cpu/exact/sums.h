/* SPDX-License-Identifier: Apache-2.0 */
/* Sums that a kernel keeps as int64, modulo 2^64, at the start of a tile's words. */
#pragma once

#include "ref/cpu/gemm.h"
#include "ref/numerics/integer_sum.h"

/** Returns the distance between rows: whole register tiles of any kernel, and not a power of two, for which rows would
 *  share cache sets. A multiple of 8. */
static inline size_t ari_sums_ld(const ari_tile_plan *p)
{
    return (p->tile_cols + 31) / 32 * 32 + 8;
}

/* Operations of a path on a row of them (ari_exact_path). */
void ari_sums_round_row(const ari_tile *t, size_t i, float *y, double row);
void ari_sums_row_to_int64(const ari_tile *t, size_t i, int64_t *s, bool add);
void ari_sums_row_to_limbs(const ari_tile *t, size_t i, int64_t *s, bool add);

#define ARI_SUMS_PATH                                                                                    \
    .terms = ARI_CONTRACT_BLOCK, .round_row = ari_sums_round_row, .row_to_int64 = ari_sums_row_to_int64, \
    .row_to_limbs = ari_sums_row_to_limbs
