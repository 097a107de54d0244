/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_BENCH_BENCH_H
#define ARI_CLI_BENCH_BENCH_H

#include "cli/options/run.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"

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

/** Refuses options that the benchmark, one that there is, would ignore or cannot have. Errors: AR_ERR_ARG, those of
 *  ari_layout_check. */
AR_NODISCARD ar_status ari_bench_check(const ari_bench_options *v);

/* A benchmark that runs. */
typedef struct ari_bench_session {
    const ari_bench_options *v;
    ar_device_choice device;
    int threads;
    size_t repetitions;
    ari_progress progress;
    ar_config config;     /* of step and ddp, and of a block's model */
    const ari_rows *more; /* a second table, of what another key of the JSON holds; NULL: none */
    const char *more_key;
} ari_bench_session;

void ari_bench_progress(ari_bench_session *s, size_t done, size_t all);
/** Prints the table, `words`, how it is to be read, and the second table, and writes the JSON. threads 0: each row has
 *  its own. */
AR_NODISCARD ar_status ari_bench_end(ari_bench_session *s, const ari_rows *r, int threads, const char *words, ...)
    AR_PRINTF(4, 5);
/** bench block. */
AR_NODISCARD ar_status ari_bench_run_block(ari_bench_session *s);

#endif
