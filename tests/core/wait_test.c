/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/queue.h"
#include "ref/core/wait.h"

#include "anyrank/sim.h"
#include "tests/support/asleep.h"

/* Waiting costs little: whoever waits for long sleeps. */
#define MS ((uint64_t)1000000)

static ar_status wait_for_rank_3(ar_comm *c, void *arg)
{
    const ar_queue_kind kind = *(const ar_queue_kind *)arg;
    const char *wrong = "";
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, kind, "comm"));
    if (ar_comm_rank(c) == 3)
        wrong = others_stay_asleep();
    AR_TRY(wrong[0] ? ar_error_set(AR_ERR_DATA, "%s", wrong) : ar_comm_barrier(c, q, "late"));
    return ar_queue_sync(q, 0);
}

Test(wait, sixty_four_ranks_that_wait_for_one_leave_the_cores_alone)
{
    for (int kind = 0; kind < 2; kind++) {
        ar_queue_kind k = (ar_queue_kind)kind;
        const ar_sim_options o = {.timeout_ns = 600000 * MS};
        cr_assert_ok(ar_sim_run(64, &o, wait_for_rank_3, &k, NULL));
    }
}

Test(wait, a_queue_without_work_sleeps)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    cr_assert_ok(ar_queue_create(&q, AR_QUEUE_THREAD, "idle"));
    const char *wrong = others_stay_asleep();
    cr_assert_str_eq(wrong, "");
}

Test(wait, a_wait_that_is_over_says_so_after_its_timeout)
{
    SCOPED(ari_sleepers_fini) ari_sleepers s;
    _Atomic uint64_t word = 0;
    cr_assert_eq(ari_sleepers_init(&s), 0);
    ari_wait w = {.sleepers = &s, .timeout_ns = 20 * MS};
    const uint64_t start = ari_now_ns();
    while (!ari_wait_is_over(&w))
        ari_wait_turn(&w, &word, 0, 0);
    cr_assert_geq(ari_now_ns() - start, 20 * MS);
}

Test(wait, a_process_that_was_stopped_comes_not_too_late)
{
    SCOPED(ari_sleepers_fini) ari_sleepers s;
    _Atomic uint64_t word = 0;
    cr_assert_eq(ari_sleepers_init(&s), 0);
    const uint64_t before = ari_now_ns() - 3000 * MS; /* when it was stopped */
    ari_wait w = {.sleepers = &s, .timeout_ns = 2500 * MS, .start_ns = before, .now_ns = before};
    ari_wait_turn(&w, &word, 0, 0);
    cr_expect_not(ari_wait_is_over(&w));
}
