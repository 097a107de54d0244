/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_GEMM_H
#define ARI_BENCH_GEMM_H

#include <stddef.h>

#include "anyrank/device.h"

/* The price of an exact product: Y[m,n] = X[m,k] W[n,k]^T on one device, exact against native (fp32), in one process
 * and, on the CPU, on the same number of threads. */
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
/* For a GPU: 4096^3; shapes of a block of width 4096 on 2048 tokens; attention's at 32 heads, 2 sequences of 1024. */
extern const ar_bench_gemm_row ari_bench_gemm_gpu_shapes[ARI_BENCH_GEMM_SHAPES];
/** Those of the two that take a device's time, not a user's. */
const ar_bench_gemm_row *ari_bench_gemm_shapes_for(const ar_device_choice *which);

/** Fills the last four fields of *row. A repetition runs native, exact and prepared one after the other, so that a
 *  machine that changes its speed changes it for all three; one more repetition at the start is not counted. Call
 *  ar_cpu_select_kernels before. which NULL: the CPU.
 *  Errors: AR_ERR_ARG (a zero size, threads < 1, repetitions < 1), AR_ERR_MEMORY, AR_ERR_OVERFLOW, those of the device.
 *  Prints nothing. */
AR_NODISCARD ar_status ari_bench_gemm(ar_bench_gemm_row *row, const ar_device_choice *which, int threads,
                                      size_t repetitions);

#endif
