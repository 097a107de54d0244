/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_STEP_H
#define ARI_BENCH_STEP_H

#include <stddef.h>

#include "anyrank/context.h"
#include "anyrank/parallel.h"
#include "anyrank/run.h"

/* What a training step costs under a layout, beside the step of one rank on the same cores and beside its matrix
 * products run alone. AdamW, gradients clipped to a norm of 1; no baseline, nobody listens. */
typedef struct ar_bench_step_options {
    ar_run run;
    const ar_config *config;
    const int64_t *input_ids; /* [batch, seq] */
    size_t repetitions;
} ar_bench_step_options;

typedef struct ar_bench_step_row {
    double seconds;       /* median of one step */
    double gflops;        /* rate of its matrix products' operations in that time */
    double gemm_fraction; /* median of (time of the whole model's products alone, by sgemm)/(time of the step) */
    double over_single;   /* median of (time)/(time of one rank's step) */
    double spread;        /* (largest - smallest)/median of that ratio; of the seconds in one rank's row */
} ar_bench_step_row;

/** row[0]: one rank, row[1]: the layout. A repetition makes the model on one rank, takes some steps, runs the matrix
 *  products, and does the same in the layout; the first step of each is not counted, nor is the first repetition. Call
 *  ar_cpu_select_kernels before. Errors: AR_ERR_ARG (repetitions of 0), those of the layout and of its ranks. */
AR_NODISCARD ar_status ari_bench_step(ar_bench_step_row row[2], const ar_bench_step_options *o);

#endif
