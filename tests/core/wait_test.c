/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/wait.h"

#include <criterion/criterion.h>
#include <sys/resource.h>
#include <unistd.h>

#include "anyrank/sim.h"
#include "ref/core/clock.h"

/* Waiting costs little: whoever waits for long sleeps. */
TestSuite(wait, .timeout = 300);

#define MS ((uint64_t)1000000)

static uint64_t cpu_ns(void)
{
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    const uint64_t s = (uint64_t)(use.ru_utime.tv_sec + use.ru_stime.tv_sec);
    return s * 1000 * MS + (uint64_t)(use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1000;
}

static ar_status wait_for_rank_3(ar_comm *c, void *arg)
{
    const ar_queue_kind kind = *(const ar_queue_kind *)arg;
    ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, kind, "comm"));
    if (ar_comm_rank(c) == 3)
        usleep(300000);
    ar_status st = ar_comm_barrier(c, q, "late");
    if (st == AR_OK)
        st = ar_queue_sync(q, 0);
    ar_queue_destroy(q);
    return st;
}

/* CPU time of a world of 64 ranks that wait 300 ms for one. */
static uint64_t waiting_costs(ar_queue_kind kind)
{
    const uint64_t start = cpu_ns();
    cr_assert_eq(ar_sim_run(64, NULL, wait_for_rank_3, &kind, NULL), AR_OK, "%s", ar_error_message());
    return cpu_ns() - start;
}

Test(wait, sixty_four_ranks_that_wait_for_one_leave_the_cores_alone)
{
    for (int kind = 0; kind < 2; kind++) {
        const uint64_t took = waiting_costs((ar_queue_kind)kind);
        cr_log_info("%s: %.1f ms", kind ? "queues" : "ranks", (double)took * 1e-6);
        cr_assert_lt(took, 100 * MS, "%.1f ms of CPU time in 300 ms", (double)took * 1e-6);
    }
}

Test(wait, a_queue_without_work_sleeps)
{
    ar_queue *q = NULL;
    cr_assert_eq(ar_queue_create(&q, AR_QUEUE_THREAD, "idle"), AR_OK);
    const uint64_t start = cpu_ns();
    usleep(300000);
    cr_assert_lt(cpu_ns() - start, 10 * MS);
    ar_queue_destroy(q);
}

Test(wait, a_wait_that_is_over_says_so_after_its_timeout)
{
    ari_sleepers s;
    _Atomic uint64_t word = 0;
    cr_assert_eq(ari_sleepers_init(&s), 0);
    ari_wait w = {.at = &s, .timeout_ns = 20 * MS};
    const uint64_t start = ari_now_ns();
    while (!ari_wait_is_over(&w))
        ari_wait_turn(&w, &word, 0, 0);
    cr_assert_geq(ari_now_ns() - start, 20 * MS);
    ari_sleepers_fini(&s);
}
