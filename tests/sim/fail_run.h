/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/queue.h"
#include "ref/core/clock.h"
#include "tests/sim/batch.h"
#include "tests/support/test.h"

/* Runs of the simulated cluster that are to fail, for tests of what every rank hears of it. */

enum { MOST = 8 };
#define MS ((uint64_t)1000000)

typedef struct fail_run {
    ar_status (*body)(ar_comm *world, ar_queue *q, struct fail_run *run, int r);
    int variant;
    ar_queue_kind queue;
    ar_status st[MOST];
    char message[MOST][512];
    int32_t result[MOST][16];
} fail_run;

/* What rank r of a run does. */
#define UNUSED __attribute__((unused))
#define BODY(name) \
    static inline ar_status name(UNUSED ar_comm *c, UNUSED ar_queue *q, UNUSED fail_run *run, UNUSED int r)

static inline ar_status fail_rank_main(ar_comm *c, void *arg)
{
    fail_run *run = arg;
    const int r = ar_comm_rank(c);
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, run->queue, "test"));
    ar_status st = run->body(c, q, run, r);
    if (st == AR_OK)
        st = ar_queue_sync(q, 0);
    run->st[r] = st;
    snprintf(run->message[r], sizeof run->message[r], "%s", st == AR_OK ? "" : ar_error_message());
    return st;
}

/* Runs body on n ranks. Returns what ar_sim_run does. */
static inline ar_status run_with(fail_run *run, int n, const ar_sim_options *o, ar_sim_rank_report *reports)
{
    return ar_sim_run(n, o, fail_rank_main, run, reports);
}

/* The same, but this schedule decides who goes on, and no time passes except where all wait: how long one waited, and
 * for whom, is the same on every machine. */
static inline ar_status run_scheduled(fail_run *run, int n, ar_sim_options o, uint64_t seed)
{
    o.explore = true;
    o.schedule_seed = seed;
    return run_with(run, n, &o, NULL);
}

BODY(healthy)
{
    int32_t x = r + 1;
    AR_TRY(ar_comm_all_reduce(c, q, (ar_buf){&x}, (ar_cbuf){&x}, 1, AR_I32, AR_SUM, "healthy"));
    AR_TRY(ar_queue_sync(q, 0));
    const int n = ar_comm_size(c);
    return x == n * (n + 1) / 2 ? AR_OK : ar_error_set(AR_ERR_DATA, "sum %d", x);
}

static inline void assert_process_usable(void)
{
    fail_run run = {.body = healthy};
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT};
    cr_assert_ok(run_with(&run, 4, &o, NULL));
}
