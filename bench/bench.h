/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "cli/options/run.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"

/* anyrank bench. Each measurement times what it compares side by side, in repetitions that run one after the other, so
 * that a machine that changes its speed changes it for all; what only warms caches, page tables and BLIS's buffers is
 * not counted. A row's seconds and ratios are medians over the repetitions; its spread is (largest - smallest)/median
 * of its ratio, or of its seconds where that ratio is 1. */

typedef struct ari_bench_options {
    ari_common common;
    const char *what, *model;
    ari_run_values r;
    size_t m, n, k, bytes;
    int ranks, repetitions; /* 0: not given */
    int dtype;              /* -1: not given */
    int algorithm;          /* ar_sim_algorithm */
    const char *cluster;
    bool paced;
    int block_size; /* 0 small, 1 large; -1: not given */
    bool profile;
} ari_bench_options;

/* Names of the values of --dtype, and of --algorithm in the order of ar_sim_algorithm. */
extern const char *const ari_bench_dtype_names[], *const ari_bench_algorithm_names[];

/* A benchmark that runs. */
typedef struct ari_bench_session {
    const ari_bench_options *v;
    ar_device_choice device;
    int threads;
    size_t repetitions;
    ari_progress progress;
    ar_config config;     /* of ddp, and of a block's model */
    const ari_rows *more; /* a second table, of what another key of the JSON holds; NULL: none */
    const char *more_key;
} ari_bench_session;

void ari_bench_progress(ari_bench_session *s, size_t done, size_t all);
/** Prints the table, `words`, how it is to be read, and the second table, and writes the JSON. threads 0: each row has
 *  its own. */
AR_NODISCARD ar_status ari_bench_end(ari_bench_session *s, const ari_rows *r, int threads, const char *words, ...)
    AR_PRINTF(4, 5);

/* The benchmarks, which print their rows by ari_bench_end. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW, those of the device
 * and of the ranks. */

/** The price of an exact product: Y[m,n] = X[m,k] W[n,k]^T on one device, exact against native (fp32), in one process
 *  and, on the CPU, on the same number of threads. */
AR_NODISCARD ar_status ari_bench_gemm(ari_bench_session *s);
/** Time of a memory-bound kernel, next to a copy of as many bytes by the same device and threads. Errors: also
 *  AR_ERR_ARG (one column). */
AR_NODISCARD ar_status ari_bench_kernels(ari_bench_session *s);
/** Time of a transformer block on one rank, forward and backward, native and exact. Weights count as changed before
 *  each pass: the exact arithmetic quantises them anew, as in a training step. */
AR_NODISCARD ar_status ari_bench_block(ari_bench_session *s);
/** Overhead of data parallelism in a training step: the same ranks, each with its share of the samples, with and
 *  without summing gradients in buckets. AdamW; no clipping, no taps. A repetition takes some steps of every row, one
 *  row after another. */
AR_NODISCARD ar_status ari_bench_ddp(ari_bench_session *s);
/** Time of an all-reduce (sum, not in place) between simulated ranks, next to a copy with the same traffic: each rank's
 *  thread copies its input to its output, so that, as in the all-reduce, every input is read once and every output
 *  written once. A repetition is a block of consecutive all-reduces and a block of each kind of copy, each long enough
 *  to be timed, from the start of its first rank to the end of its last. All use the same memory; the sums are compared
 *  with their expected values. Errors: also AR_ERR_ARG (bytes that are no whole elements), AR_ERR_DATA (a wrong sum).
 *  */
AR_NODISCARD ar_status ari_bench_allreduce(ari_bench_session *s);
