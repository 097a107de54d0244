/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_MEASURE_H
#define ARI_BENCH_MEASURE_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

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

/* Repetitions of three times each: of a reference, of its matrix products alone, and of what is compared with it. */
typedef struct ari_bench_series {
    size_t n;
    double *times; /* [n, 3] */
    double *work;  /* [n] */
} ari_bench_series;
typedef struct ari_bench_summary {
    ari_bench_stat seconds;
    ari_bench_stat ratio; /* of the reference's time, repetition by repetition */
    double products;      /* median of the products' share of the time */
} ari_bench_summary;
/** n > 0. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_bench_series_create(ari_bench_series *s, size_t n);
void ari_bench_series_destroy(ari_bench_series *s);
void ari_bench_series_put(ari_bench_series *s, size_t i, const double times[3]);
/** Of the reference (side 0) or of the other (side 1). */
ari_bench_summary ari_bench_series_summary(ari_bench_series *s, int side);

/** Values of magnitudes up to 1 and both signs, the same for the same seed on every machine. */
void ari_bench_fill(float *x, size_t n, uint64_t seed);

#endif
