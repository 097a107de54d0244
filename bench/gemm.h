/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_GEMM_H
#define ARI_BENCH_GEMM_H

#include <stddef.h>

#include "anyrank/status.h"

/* The price of an exact product: Y[m,n] = X[m,k] W[n,k]^T on the CPU device, exact against native (sgemm), in one
 * process and on the same number of threads. */
typedef struct ar_bench_gemm_row {
    size_t batch, m, n, k;             /* in: the shape; batch matrices */
    double native_gflops;              /* median rate of the native product, 2*batch*m*n*k operations */
    double exact_over_native;          /* median ratio of times, everything included: c, e, f, both operands packed */
    double exact_over_native_prepared; /* the same with W's c, f and integers made before, as weights are */
    double spread;                     /* (largest - smallest)/median of the first ratio's repetitions */
} ar_bench_gemm_row;

/* Shapes of a transformer block of width 768 on 1024 tokens, then attention's at 12 heads, 2 sequences of 512. */
#define ARI_BENCH_GEMM_SHAPES 6
extern const ar_bench_gemm_row ari_bench_gemm_shapes[ARI_BENCH_GEMM_SHAPES];

/** Fills the last four fields of *row. A repetition runs native, exact and prepared one after the other, so that a
 *  machine that changes its speed changes it for all three; one more repetition at the start is not counted. Call
 *  ar_cpu_select_kernels before.
 *  Errors: AR_ERR_ARG (a zero size, threads < 1, repetitions < 1), AR_ERR_MEMORY, AR_ERR_OVERFLOW. Prints nothing. */
AR_NODISCARD ar_status ari_bench_gemm(ar_bench_gemm_row *row, int threads, size_t repetitions);

#endif
