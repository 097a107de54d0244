/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_BLOCK_H
#define ARI_BENCH_BLOCK_H

#include <stddef.h>

#include "anyrank/config.h"
#include "anyrank/device.h"

/* What a transformer block costs on one rank: forward and backward, native and exact, beside its matrix products run
 * alone. */
typedef struct ar_bench_block_row {
    double seconds;       /* median of one forward and backward pass */
    double gflops;        /* rate of its matrix products' operations in that time */
    double gemm_fraction; /* median of (time of the same matrix products alone, by sgemm)/(time of the block) */
    double over_native;   /* median of (time)/(time of the native block) */
    double spread;        /* (largest - smallest)/median of that ratio; of native's seconds in its own row */
} ar_bench_block_row;

/** The blocks that stand for the usual ones: width 768, 12 heads; "gpt2" with LayerNorm, GELU and an MLP of 3072,
 *  "llama" with RMSNorm, rotary positions and a gated MLP of 2048. NULL after the last. */
const ar_config *ari_bench_block_config(size_t i);

/** row[0]: native in this precision, row[1]: exact. A repetition runs the native block, the matrix products and the
 * exact block one after the other, so that a machine that changes its speed changes it for all three; two more at the
 * start are not counted. Weights count as changed before each pass: the exact arithmetic quantises them anew, as a
 * training step would. which NULL: the CPU. Call ar_cpu_select_kernels before. Errors: AR_ERR_ARG (a size or count of
 * 0), AR_ERR_MEMORY, AR_ERR_OVERFLOW, those of the device. */
AR_NODISCARD ar_status ari_bench_block(ar_bench_block_row row[2], const ar_config *config, size_t batch, size_t seq,
                                       const ar_device_choice *which, ar_precision precision, int threads,
                                       size_t repetitions);

#endif
