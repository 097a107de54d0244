/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_BENCH_ALLREDUCE_H
#define ARI_BENCH_ALLREDUCE_H

#include <stddef.h>

#include "anyrank/sim.h"

/* What an all-reduce (sum, not in place) between simulated ranks costs, beside a copy with the same traffic: each
 * rank's thread copies its input to its output, so that, as in the all-reduce, every input is read once and every
 * output written once. */
typedef struct ar_bench_allreduce_row {
    int ranks;
    size_t bytes;   /* of one rank's input */
    ar_dtype dtype; /* AR_F32 or AR_I64 */
    ar_sim_algorithm algorithm;
    double seconds;      /* median of one all-reduce */
    double bus_gbps;     /* 2(N-1)/N * bytes in that time: what each link of a ring would carry */
    double over_copy;    /* median of (time)/(time of the copy) */
    double spread;       /* (largest - smallest)/median of that ratio */
    double copy_seconds; /* median of the copy */
    const char *copy;    /* the fastest of the simple copies. Static storage */
} ar_bench_allreduce_row;

enum { ARI_BENCH_ALLREDUCE_SIZES = 7 };
/** 1 KiB to 100 MiB. */
extern const size_t ari_bench_allreduce_sizes[ARI_BENCH_ALLREDUCE_SIZES];

/** Fills in what was measured; the first four fields say what to measure. A repetition is a block of all-reduces, one
 *  right after the other, and a block of each kind of copy, each block long enough to be timed, from the moment in
 * which its first rank begins to that in which its last one ends. All work on the same memory; what was summed is
 * compared with what it must be. Errors: AR_ERR_ARG (no ranks, bytes that are no whole elements, no repetitions),
 * AR_ERR_DTYPE, AR_ERR_MEMORY, AR_ERR_DATA (a wrong sum), those of the ranks. */
AR_NODISCARD ar_status ari_bench_allreduce(ar_bench_allreduce_row *row, uint64_t timeout_ns, size_t repetitions);

#endif
