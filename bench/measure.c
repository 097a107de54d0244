/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/measure.h"

#include <stdlib.h>

#include "ref/core/clock.h"

double ari_bench_seconds(void)
{
    return 1e-9 * (double)ari_now_ns();
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

ari_bench_stat ari_bench_stat_of(double *values, size_t n)
{
    qsort(values, n, sizeof *values, by_value);
    const double median = 0.5 * (values[(n - 1) / 2] + values[n / 2]);
    return (ari_bench_stat){.median = median, .spread = (values[n - 1] - values[0]) / median};
}

/* A linear congruence (Knuth's MMIX constants); magnitudes lie within a factor of four of each other as blocks. */
void ari_bench_fill(float *x, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        const float unit = (float)((int64_t)(seed >> 40) - (1 << 23)) * 0x1p-23f;
        x[i] = unit * (float)(1 + (seed >> 62)) * 0.25f;
    }
}
