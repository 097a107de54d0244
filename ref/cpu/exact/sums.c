/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/exact/sums.h"

static const int64_t *sums_row(const ari_tile *t, size_t i)
{
    return (const int64_t *)t->words + i * ari_sums_ld(t->plan);
}

void ari_sums_round_row(const ari_tile *t, size_t i, float *y, double row)
{
    (t->plan->narrow ? ari_round_small_sums : ari_round_sums)(y, sums_row(t, i), row, t->scale, t->cols);
}

void ari_sums_row_to_int64(const ari_tile *t, size_t i, int64_t *s, bool add)
{
    const int64_t *sums = sums_row(t, i);
    for (size_t j = 0; j < t->cols; j++)
        s[j] = ari_add64(add ? s[j] : 0, sums[j]);
}

void ari_sums_row_to_limbs(const ari_tile *t, size_t i, int64_t *s, bool add)
{
    ari_sums_to_limbs(s, sums_row(t, i), add, t->cols);
}
