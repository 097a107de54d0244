/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/measure.h"

#include <stdlib.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"

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

ar_status ari_bench_series_create(ari_bench_series *s, size_t n)
{
    *s = (ari_bench_series){.n = n};
    AR_TRY(ari_alloc((void **)&s->times, n, 4 * sizeof(double), "the benchmark's times"));
    s->work = s->times + 3 * n;
    return AR_OK;
}

void ari_bench_series_destroy(ari_bench_series *s)
{
    free(s->times);
}

void ari_bench_series_put(ari_bench_series *s, size_t i, const double times[3])
{
    for (size_t k = 0; k < 3; k++)
        s->times[3 * i + k] = times[k];
}

ari_bench_summary ari_bench_series_summary(ari_bench_series *s, int side)
{
    const size_t own = side == 0 ? 0 : 2;
    ari_bench_summary of;
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[3 * i + 1] / s->times[3 * i + own];
    of.products = ari_bench_stat_of(s->work, s->n).median;
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[3 * i + own] / s->times[3 * i];
    of.ratio = ari_bench_stat_of(s->work, s->n);
    for (size_t i = 0; i < s->n; i++)
        s->work[i] = s->times[3 * i + own];
    of.seconds = ari_bench_stat_of(s->work, s->n);
    return of;
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
