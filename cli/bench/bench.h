/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_BENCH_BENCH_H
#define ARI_CLI_BENCH_BENCH_H

#include "cli/options/run.h"

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
} ari_bench_options;

/** Refuses options that the benchmark, one that there is, would ignore or cannot have. Errors: AR_ERR_ARG, those of
 *  ari_layout_check. */
AR_NODISCARD ar_status ari_bench_check(const ari_bench_options *v);

#endif
