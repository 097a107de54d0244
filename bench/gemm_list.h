/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_GEMM_LIST_H
#define ARI_BENCH_GEMM_LIST_H

#include "anyrank/config.h"
#include "bench/on_device.h"

/* C[m,n] (+)= A[m,k] B[n,k]^T, `batch` times; a transposed operand has its rows side by side in memory. */
typedef struct ari_gemm_shape {
    size_t times; /* how often it occurs */
    size_t batch, m, n, k;
    bool a_transposed, b_transposed, add;
} ari_gemm_shape;

#define ARI_GEMM_LIST_MAX 32
/* The matrix products of some piece of a model, as its native arithmetic asks the device for them. All of them work on
 * the same three arrays. Zero it before use. */
typedef struct ari_gemm_list {
    ari_bench_device on; /* borrowed until destroy */
    size_t n;
    ari_gemm_shape shape[ARI_GEMM_LIST_MAX];
    ar_buf a, b, c;
} ari_gemm_list;

/** Forward and backward of one block of `config`, all parameters and the input's gradient included. Errors:
 *  AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_gemm_list_block(ari_gemm_list *list, const ari_bench_device *on, const ar_config *config,
                                           size_t batch, size_t seq);
/** The same of all blocks and the LM head. */
AR_NODISCARD ar_status ari_gemm_list_model(ari_gemm_list *list, const ari_bench_device *on, const ar_config *config,
                                           size_t batch, size_t seq);
/** Accepts a zeroed one. */
void ari_gemm_list_destroy(ari_gemm_list *list);
/** Runs all of them, one after the other. */
AR_NODISCARD ar_status ari_gemm_list_run(const ari_gemm_list *list, double *seconds);
/** Multiplications and additions. */
double ari_gemm_list_operations(const ari_gemm_list *list);

#endif
