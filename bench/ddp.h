/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_DDP_H
#define ARI_BENCH_DDP_H

#include <stddef.h>

#include "anyrank/context.h"
#include "anyrank/ddp.h"
#include "anyrank/parallel.h"
#include "anyrank/run.h"

/* What data parallelism adds to a training step: the same ranks, each with its share of the samples, once with their
 * gradients summed in buckets and once without, each rank for itself. AdamW; no clipping, nobody listens. */
typedef struct ar_bench_ddp_options {
    ar_run run; /* of the parallelism dp alone */
    const ar_config *config;
    const int64_t *input_ids; /* [batch, seq] */
    size_t repetitions;
} ar_bench_ddp_options;

typedef struct ar_bench_ddp_row {
    bool alone;          /* the step without DDP; what follows of buckets is 0 */
    size_t bucket_bytes; /* given: the option */
    ar_bucket_mode mode; /* given */
    size_t buckets;
    uint64_t all_reduces, bytes; /* of rank 0, in one step */
    double seconds;              /* median of one step */
    double over_alone;           /* median of (time)/(time of the step without DDP) */
    double spread;               /* (largest - smallest)/median of that ratio; of the seconds where alone */
} ar_bench_ddp_row;

/** Fills rows[0..n), whose first is made the step without DDP. A repetition takes some steps of every row, one row
 * after another; the first step of each is not counted. Call ar_cpu_select_kernels before. Errors: AR_ERR_ARG (no row,
 * no repetitions), those of the ranks. */
AR_NODISCARD ar_status ari_bench_ddp(ar_bench_ddp_row *rows, size_t n, const ar_bench_ddp_options *o);

#endif
