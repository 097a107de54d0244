/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_MEASURE_H
#define ARI_BENCH_MEASURE_H

#include <stddef.h>
#include <stdint.h>

/* What the benchmarks share: repetitions that stand side by side in time, of which the medians are told. */

/** Seconds on the monotonic clock. */
double ari_bench_seconds(void);

/* The middle of some repetitions and how far apart they lie. */
typedef struct ari_bench_stat {
    double median;
    double spread; /* (largest - smallest)/median */
} ari_bench_stat;
/** Sorts values[0..n), n > 0. */
ari_bench_stat ari_bench_stat_of(double *values, size_t n);

/** Values of magnitudes up to 1 and both signs, the same for the same seed on every machine. */
void ari_bench_fill(float *x, size_t n, uint64_t seed);

#endif
