/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_GRAD_H
#define ARI_BENCH_GRAD_H

#include <stddef.h>

#include "anyrank/device.h"

/* The price of a weight gradient in exact numerics, where each sequence is a contraction of its own whose rounded
 * values go into the order-independent accumulator: dW[out,in] = sum over sequences of dY^T X. */
typedef struct ar_bench_grad_row {
    size_t out, in, tokens, seq; /* in: tokens/seq sequences */
    double seconds;              /* median */
    double over_contraction;     /* median of (time)/(time of one exact contraction over all the tokens) */
    double over_native;          /* median of (time)/(time of sgemm) */
    double spread;               /* (largest - smallest)/median of the first ratio's repetitions */
} ar_bench_grad_row;

/* The MLP of width 768 and 3072, 1024 tokens in sequences of 512, 128 and 32. */
#define ARI_BENCH_GRAD_SHAPES 3
extern const ar_bench_grad_row ari_bench_grad_shapes[ARI_BENCH_GRAD_SHAPES];

/** Fills the last four fields of *row. A repetition runs sgemm, the contraction and the gradient one after the other;
 *  one more at the start is not counted. which NULL: the CPU. Call ar_cpu_select_kernels before.
 *  Errors: AR_ERR_ARG (a zero size, seq that does not divide tokens), AR_ERR_MEMORY, AR_ERR_OVERFLOW, those of the
 * device. */
AR_NODISCARD ar_status ari_bench_grad(ar_bench_grad_row *row, const ar_device_choice *which, int threads,
                                      size_t repetitions);

#endif
