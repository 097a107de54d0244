/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "anyrank/queue.h"
#include "ref/comm/comm_private.h"
#include "tests/sim/fail_run.h"

/* Whatever one rank does wrong, every rank hears of it, nobody hangs, and the report says who was where. What each way to
 * fail says is in message_test.c, reports of waits that are too long are in explore_test.c. */
static ar_status run_world(fail_run *run, int n, ar_sim_algorithm algorithm, uint64_t timeout_ns,
                           ar_sim_rank_report *reports)
{
    const ar_sim_options o = {.algorithm = algorithm, .timeout_ns = timeout_ns};
    return run_with(run, n, &o, reports);
}

/* --- disagreements: message_test.c has each kind of them ---------------------------------------------------------- */

BODY(write_then_disagree)
{
    float x[8];
    for (int i = 0; i < 8; i++)
        x[i] = (float)(r + i);
    const ar_status st = ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, r == 1 ? 7 : 8, AR_F32, AR_SUM, "x");
    for (int i = 0; i < 8; i++) {
        if (x[i] != (float)(r + i))
            return ar_error_set(AR_ERR_DATA, "rank %d element %d was touched", r, i);
    }
    return st;
}

Test(failure, a_disagreement_is_found_before_any_data_moves)
{
    for (int a = 0; a < 2; a++) {
        fail_run run = {.body = write_then_disagree};
        cr_assert_eq(run_world(&run, 4, (ar_sim_algorithm)a, 0, NULL), AR_ERR_MISMATCH);
        for (int r = 0; r < 4; r++)
            cr_assert_eq(run.st[r], AR_ERR_MISMATCH, "%s", run.message[r]);
    }
}

BODY(disagree_in_group)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    float x[8] = {0};
    AR_TRY(ar_comm_split(&g, c, r / 4, r));
    AR_TRY(ar_comm_all_reduce(g, q, (ar_buf){x}, (ar_cbuf){x}, r == 6 ? 7 : 8, AR_F32, AR_SUM, "x"));
    return ar_comm_barrier(c, q, "end");
}

Test(failure, a_disagreement_in_one_group_ends_the_others_as_well)
{
    fail_run run = {.body = disagree_in_group};
    cr_assert_refused(run_world(&run, 8, AR_SIM_DIRECT, 0, NULL), AR_ERR_MISMATCH,
                      "ranks 4 and 6 disagree in collective #1 of ranks 4-7");
    for (int r = 0; r < 8; r++)
        cr_assert_eq(run.st[r], r < 4 ? AR_ERR_ABORTED : AR_ERR_MISMATCH, "rank %d: %s", r, run.message[r]);
}

/* --- ranks that go away ------------------------------------------------------------------------------------------- */

BODY(leave_early)
{
    AR_TRY(ar_comm_barrier(c, q, "both"));
    return r == 2 ? AR_OK : ar_comm_barrier(c, q, "layers.3.mlp");
}

Test(failure, a_rank_that_returns_while_others_wait_ends_the_world_at_once)
{
    ar_sim_rank_report reports[4];
    fail_run run = {.body = leave_early};
    cr_assert_refused(run_world(&run, 4, AR_SIM_DIRECT, 0, reports), AR_ERR_MISMATCH, "rank 2 returned while rank ");
    cr_assert_says("barrier() 'layers.3.mlp', collective #2");
    for (int r = 0; r < 4; r++) {
        cr_assert_eq(run.st[r], r == 2 ? AR_OK : AR_ERR_MISMATCH, "rank %d: %s", r, run.message[r]);
        cr_assert_eq(reports[r].rank, r);
        cr_assert_str_eq(reports[r].status, r == 2 ? "AR_OK" : "AR_ERR_MISMATCH");
        /* A rank that the first barrier has let go, but that has not run since, is still in it. */
        const bool left = strcmp(reports[r].last, "barrier #1 both") == 0;
        cr_assert(left || strcmp(reports[r].current, "barrier #1 both") == 0, "rank %d was in %s", r,
                  reports[r].current);
    }
    cr_assert_str_eq(reports[2].last, "barrier #1 both");
    cr_assert_str_eq(reports[2].current, "returned");
    assert_process_usable();
}

BODY(return_at_different_times)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, r == 0 ? -1 : 0, r));
    ar_status st = AR_OK;
    for (int i = 0; g && i < 100 && st == AR_OK; i++)
        st = ar_comm_barrier(g, q, "without rank 0");
    return st;
}

Test(failure, returning_early_while_nobody_waits_is_fine)
{
    fail_run run = {.body = return_at_different_times};
    cr_assert_ok(run_world(&run, 4, AR_SIM_DIRECT, 0, NULL));
}

BODY(fail_and_leave_group)
{
    ar_comm *g = NULL;
    AR_TRY(ar_comm_split(&g, c, 0, r));
    if (r != 1) {
        const ar_status st = ar_comm_barrier(g, q, "group");
        ar_comm_destroy(g);
        return st;
    }
    ar_comm_destroy(g);
    const uint64_t start = ari_now_ns(); /* the rest of its way out takes a while, in which the others look for it */
    while (ari_now_ns() - start < 50 * MS)
        sched_yield();
    return ar_error_set(AR_ERR_DATA, "its own error");
}

Test(failure, a_rank_that_leaves_its_groups_on_the_way_out_tells_its_own_error)
{
    fail_run run = {.body = fail_and_leave_group};
    cr_assert_refused(run_world(&run, 3, AR_SIM_DIRECT, 0, NULL), AR_ERR_DATA, "its own error");
}

/* Ranks 0 to 2 wait for rank 3 in one barrier; of them rank 2 has finished another collective than its neighbours. */
BODY(wait_after_different_collectives)
{
    int32_t x = 0;
    OWNED(ar_comm_destroy) ar_comm *own = NULL;
    AR_TRY(ar_comm_split(&own, c, r, 0));
    AR_TRY(ar_comm_barrier(own, q, r == 2 ? "embed" : "head"));
    return r == 3 ? ar_comm_recv(c, q, (ar_buf){&x}, 1, AR_I32, 0, "never sent") : ar_comm_barrier(c, q, "end");
}

Test(failure, ranks_that_wait_in_one_place_share_a_line_only_where_they_finished_the_same)
{
    fail_run run = {.body = wait_after_different_collectives};
    cr_assert_refused(run_scheduled(&run, 4, (ar_sim_options){.algorithm = AR_SIM_DIRECT}, 0), AR_ERR_TIMEOUT,
                      "\n      0-1  barrier #1 head ");
    cr_assert_says("\n        2  barrier #1 embed ");
    cr_assert_says("\n        3  barrier #1 head ");
}

/* --- queues ------------------------------------------------------------------------------------------------------- */

BODY(two_queues_two_groups)
{
    OWNED(ar_comm_destroy) ar_comm *g = NULL;
    OWNED(ar_queue_destroy) ar_queue *other = NULL;
    AR_TRY(ar_comm_split(&g, c, 0, r));
    AR_TRY(ar_queue_create(&other, AR_QUEUE_THREAD, "other"));
    /* Opposite orders of enqueuing are no deadlock: each queue is in order by itself. */
    for (int i = 0; i < 100; i++)
        AR_TRY(i % 2 == r % 2 ? ar_comm_barrier(c, q, "world") : ar_comm_barrier(g, other, "group"));
    AR_TRY(ar_queue_sync(other, 0));
    return ar_queue_sync(q, 0);
}

Test(failure, two_groups_on_two_queues_may_be_entered_in_any_order)
{
    fail_run run = {.body = two_queues_two_groups, .queue = AR_QUEUE_THREAD};
    cr_assert_ok(run_world(&run, 4, AR_SIM_DIRECT, 0, NULL));
}

enum { IN_FLIGHT = 10 };

/* Each rank but the last waits for it in ten groups at once. */
BODY(many_in_flight)
{
    static const char *const tags[IN_FLIGHT] = {"t0", "t1", "t2", "t3", "t4", "t5", "t6", "t7", "t8", "t9"};
    ar_comm *g[IN_FLIGHT] = {NULL};
    ar_queue *own[IN_FLIGHT] = {NULL};
    ar_status st = AR_OK;
    for (int i = 0; i < IN_FLIGHT && st == AR_OK; i++) {
        st = ar_comm_split(&g[i], c, 0, r);
        if (st == AR_OK)
            st = ar_queue_create(&own[i], AR_QUEUE_THREAD, tags[i]);
    }
    for (int i = 0; i < IN_FLIGHT && st == AR_OK && r != 2; i++)
        st = ar_comm_barrier(g[i], own[i], tags[i]);
    while (st == AR_OK && r == 2 && ari_comm_error(c)[0] == '\0') {
        /* Looking moves the scheduler's time on. */
    }
    if (st == AR_OK)
        st = ar_comm_barrier(c, q, "end");
    for (int i = 0; i < IN_FLIGHT; i++) {
        ar_queue_destroy(own[i]);
        ar_comm_destroy(g[i]);
    }
    return st;
}

Test(failure, any_number_of_collectives_in_flight_is_in_the_report)
{
    ar_sim_rank_report reports[3];
    fail_run run = {.body = many_in_flight};
    const ar_sim_options o = {.algorithm = AR_SIM_DIRECT, .timeout_ns = MS, .explore = true};
    cr_assert_eq(run_with(&run, 3, &o, reports), AR_ERR_TIMEOUT);
    for (int i = 0; i < IN_FLIGHT; i++) {
        char line[32];
        snprintf(line, sizeof line, "  barrier #1 t%d ", i);
        cr_assert_says(line);
    }
    cr_assert_says("barrier #11 end");
    cr_assert(strstr(reports[0].current, "; ..."), "%s", reports[0].current);
    cr_assert_str_eq(reports[2].current, "running");
    assert_process_usable();
}

BODY(one_comm_two_queues)
{
    while (r == 1 && ari_comm_error(c)[0] == '\0')
        sched_yield(); /* keeps rank 0's first call waiting */
    AR_TRY(ar_comm_barrier(c, q, "first"));
    OWNED(ar_queue_destroy) ar_queue *other = NULL;
    AR_TRY(ar_queue_create(&other, AR_QUEUE_INLINE, "other"));
    return ar_comm_barrier(c, other, "second");
}

Test(failure, a_communicator_used_by_two_threads_at_once_is_reported)
{
    fail_run run = {.body = one_comm_two_queues, .queue = AR_QUEUE_THREAD};
    cr_assert_refused(run_world(&run, 2, AR_SIM_DIRECT, 0, NULL), AR_ERR_ARG,
                      "another of its threads is in a call of the same communicator");
}

/* --- the run itself ----------------------------------------------------------------------------------------------- */

BODY(swallow_errors)
{
    const ar_status st = r == 0 ? AR_OK : ar_comm_barrier(c, q, "x");
    (void)st;
    return AR_OK;
}

Test(failure, a_world_that_failed_is_not_ok_even_if_every_rank_says_so)
{
    fail_run run = {.body = swallow_errors};
    cr_assert_eq(run_world(&run, 3, AR_SIM_DIRECT, 0, NULL), AR_ERR_MISMATCH);
}

BODY(call_after_the_end)
{
    float x = 0;
    const ar_status first = r == 0 ? ar_error_set(AR_ERR_DATA, "first") : ar_comm_barrier(c, q, "x");
    if (r == 0)
        ari_comm_abort(c, AR_ERR_DATA, "first");
    ari_comm_abort(c, AR_ERR_IO, "second");
    ar_comm *g = NULL;
    ar_queue *fresh = NULL;
    AR_TRY(ar_queue_create(&fresh, AR_QUEUE_INLINE, "fresh"));
    const ar_status again = ar_comm_all_reduce(c, fresh, (ar_buf){&x}, (ar_cbuf){&x}, 1, AR_F32, AR_SUM, "y");
    const ar_status split = ar_comm_split(&g, c, 0, 0);
    ar_queue_destroy(fresh);
    if (again != first || split != first || g || !strstr(ari_comm_error(c), "rank 0 aborted: first\n"))
        return ar_error_set(AR_ERR_INTERNAL, "first %d again %d split %d: %s", (int)first, (int)again, (int)split,
                            ari_comm_error(c));
    return first;
}

Test(failure, the_first_failure_is_kept_and_every_later_call_returns_it)
{
    fail_run run = {.body = call_after_the_end};
    cr_assert_eq(run_world(&run, 4, AR_SIM_RING, 0, NULL), AR_ERR_DATA, "%s", ar_error_message());
    for (int r = 0; r < 4; r++)
        cr_assert_eq(run.st[r], r == 0 ? AR_ERR_DATA : AR_ERR_ABORTED, "rank %d: %s", r, run.message[r]);
}

static ar_status must_not_run(ar_comm *c, void *arg)
{
    (void)c;
    atomic_int *ran = arg;
    atomic_fetch_add(ran, 1);
    return AR_OK;
}

Test(failure, arguments_of_the_run_are_checked)
{
    atomic_int ran = 0;
    const ar_sim_options odd = {.algorithm = (ar_sim_algorithm)7};
    cr_assert_eq(ar_sim_run(0, NULL, must_not_run, &ran, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_sim_run(4097, NULL, must_not_run, &ran, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_sim_run(2, NULL, NULL, &ran, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_sim_run(2, &odd, must_not_run, &ran, NULL), AR_ERR_ARG);
    cr_assert_eq(atomic_load(&ran), 0);
}

#if !defined(ARI_SANITIZED)
/* Address space in use: the program alone may be large. */
static rlim_t mapped_bytes(void)
{
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    cr_assert(f && fscanf(f, "%lu", &pages) == 1);
    fclose(f);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

Test(failure, when_threads_run_out_no_rank_has_run)
{
    /* Room for a few threads' stacks, not for 200. */
    atomic_int ran = 0;
    struct rlimit before, small;
    getrlimit(RLIMIT_AS, &before);
    small = before;
    small.rlim_cur = mapped_bytes() + ((rlim_t)200 << 20);
    setrlimit(RLIMIT_AS, &small);
    void *more = mmap(NULL, (size_t)1 << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const ar_status st = ar_sim_run(200, NULL, must_not_run, &ran, NULL);
    setrlimit(RLIMIT_AS, &before);
    if (more != MAP_FAILED)
        cr_skip_test("no limit of address space is kept here: qemu's programs have none");
    cr_assert_eq(st, AR_ERR_MEMORY, "%s: %s", ar_status_name(st), ar_error_message());
    cr_assert_says("no thread for rank");
    cr_assert_eq(atomic_load(&ran), 0);
    assert_process_usable();
}
#endif
