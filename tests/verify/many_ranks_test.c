/* SPDX-License-Identifier: Apache-2.0 */
/* Many more ranks than cores: 64 of them train, compare, and fail as two do. */
#include <sys/resource.h>
#include <time.h>

#include "tests/verify/support.h"

TestSuite(many_ranks, .timeout = 300);

enum { RANKS = 64, BATCH = 8, SEQ = 16 };

/* Eight ways to split its heads, and two KV heads that eight ranks share. */
static const char model[] = LLAMA(256, 64, 96, 1, 8, 2, 8, false);

static ar_check_options steps_of(const char *folder, const ar_parallel *p, size_t layouts)
{
    ar_check_options o = check_layouts(folder, p, layouts, BATCH, SEQ);
    o.steps = 2;
    o.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.clip = 1.0;
    o.threads = 2;
    return o;
}

Test(many_ranks, have_the_bits_of_one)
{
    static const ar_parallel layouts[] = {{.dp = 8, .tp = 8}, {.dp = 8, .tp = 8, .sp = true}};
    char folder[64];
    make_folder(folder);
    write_file(folder, "config.json", model);
    for (int algorithm = AR_SIM_DIRECT; algorithm <= AR_SIM_RING; algorithm++) {
        ar_check_options o = steps_of(folder, layouts, sizeof layouts / sizeof *layouts);
        if (small_only()) { /* one of them each */
            o.parallel += algorithm == AR_SIM_RING ? 1 : 0;
            o.layouts = 1;
        }
        o.algorithm = (ar_sim_algorithm)algorithm;
        cr_assert_eq(ar_parallel_world(&layouts[0]), RANKS);
        ar_check_report *r = check_or_fail(&o);
        expect_same(r, algorithm == AR_SIM_RING ? "ring" : "direct");
        ar_check_report_destroy(r);
    }
    remove_folder(folder);
}

Test(many_ranks, all_hear_what_two_disagree_about)
{
    const ar_parallel layout = {.dp = 8, .tp = 8};
    char folder[64];
    make_folder(folder);
    write_file(folder, "config.json", model);
    ar_check_options o = steps_of(folder, &layout, 1);
    o.fault = AR_FAULT_collective_size_mismatch;
    ar_check_report *r = check_or_fail(&o);
    const ar_check_run *run = &r->run[0];
    size_t meet = 0, told = 0;
    cr_assert_eq(run->result, AR_CHECK_ERROR);
    cr_expect(strstr(run->error, "'loss max'"), "%s", run->error);
    for (int k = 0; k < RANKS; k++) {
        meet += strcmp(run->reports[k].status, "AR_ERR_MISMATCH") == 0;
        told += strcmp(run->reports[k].status, "AR_ERR_ABORTED") == 0;
    }
    cr_expect(meet == 8 && told == RANKS - 8, "%zu met, %zu were told", meet, told);
    ar_check_report_destroy(r);
    remove_folder(folder);
}

enum { SLEEP_MS = 600 };

static ar_status one_sleeps(ar_comm *c, void *arg)
{
    ar_queue *q = arg;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    const struct timespec pause = {.tv_nsec = SLEEP_MS * 1000000L};
    if (ar_comm_rank(c) == RANKS / 2)
        nanosleep(&pause, NULL);
    const ar_status st = ar_comm_barrier(c, q, "late");
    ar_queue_destroy(q);
    return st;
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

/* Spinning or yielding, they would take all cores for as long as the last one sleeps. */
Test(many_ranks, leave_the_cores_alone_while_they_wait)
{
    const double before = cpu_seconds();
    cr_assert_eq(ar_sim_run(RANKS, NULL, one_sleeps, NULL, NULL), AR_OK, "%s", ar_error_message());
    const double used = cpu_seconds() - before;
    cr_expect(used < 0.5 * SLEEP_MS * 1e-3, "%.3f s of computing in a wait of %d ms", used, (int)SLEEP_MS);
}
