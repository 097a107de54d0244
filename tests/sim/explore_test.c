/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>

#include "anyrank/comm.h"
#include "anyrank/queue.h"
#include "anyrank/sim.h"
#include "ref/core/clock.h"
#include "tests/support/test.h"

/* Schedules by seed: what differs between seeds, and what does not between runs of one. explore_main.c has what is
 * found by them. */
#define MS ((uint64_t)1000000)

/* --- seeds and runs ----------------------------------------------------------------------------------------------- */

typedef struct arrivals {
    int rank[3], n; /* the ranks' threads run one at a time */
} arrivals;

static ar_status arrive(ar_comm *c, void *arg)
{
    arrivals *a = arg;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_THREAD, "comm"));
    a->rank[a->n++] = ar_comm_rank(c);
    AR_TRY(ar_comm_barrier(c, q, ""));
    return ar_queue_sync(q, 0);
}

Test(explore, seeds_differ_in_their_orders_and_a_seed_does_not)
{
    static bool seen[27];
    uint64_t hash[100];
    int orders = 0, hashes = 0;
    for (uint64_t seed = 0; seed < 100; seed++) {
        arrivals a = {.n = 0}, b = {.n = 0};
        ar_sim_schedule of_a, of_b;
        ar_sim_options o = {.explore = true, .schedule_seed = seed, .schedule = &of_a};
        cr_assert_ok(ar_sim_run(3, &o, arrive, &a, NULL));
        o.schedule = &of_b;
        cr_assert_ok(ar_sim_run(3, &o, arrive, &b, NULL));
        cr_assert_eq(memcmp(&a, &b, sizeof a), 0);
        cr_assert_eq(memcmp(&of_a, &of_b, sizeof of_a), 0);
        const int order = 9 * a.rank[0] + 3 * a.rank[1] + a.rank[2];
        orders += !seen[order];
        seen[order] = true;
        bool known = false;
        for (int i = 0; i < hashes; i++)
            known |= hash[i] == of_a.hash;
        if (!known)
            hash[hashes++] = of_a.hash;
    }
    cr_assert_eq(orders, 6);
    cr_assert_geq(hashes, 90, "%d schedules of 100", hashes);
}

/* Sums of lengths at which the automatic choice asks whether every rank has a core. */
static ar_status sum_lengths(ar_comm *c, void *arg)
{
    (void)arg;
    float x[20000] = {1};
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "main"));
    ar_status st = AR_OK;
    for (size_t count = 1; count <= 20000 && st == AR_OK; count *= 3)
        st = ar_comm_all_reduce(c, q, (ar_buf){x}, (ar_cbuf){x}, count, AR_F32, AR_SUM, "");
    return st;
}

static void run_sums(ar_sim_schedule *schedules)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        const ar_sim_options o = {.explore = true, .schedule_seed = 7, .schedule = &schedules[ranks - 2]};
        cr_assert_ok(ar_sim_run(ranks, &o, sum_lengths, NULL, NULL));
    }
}

Test(explore, a_seed_is_the_same_run_on_one_core_and_on_several)
{
    ar_sim_schedule of_all[3], of_one[3];
    run_sums(of_all);
    cpu_set_t cores, one;
    cr_assert_eq(sched_getaffinity(0, sizeof cores, &cores), 0);
    CPU_ZERO(&one);
    for (size_t i = 0; CPU_COUNT(&one) == 0; i++) {
        if (CPU_ISSET(i, &cores))
            CPU_SET(i, &one);
    }
    cr_assert_eq(sched_setaffinity(0, sizeof one, &one), 0);
    run_sums(of_one);
    for (int i = 0; i < 3; i++) {
        cr_expect_eq(of_all[i].choices, of_one[i].choices, "%d ranks", i + 2);
        cr_expect_eq(of_all[i].hash, of_one[i].hash, "%d ranks", i + 2);
    }
}

static ar_status fail_at_third(void *arg)
{
    int *begun = arg;
    return ++*begun == 3 ? ar_error_set(AR_ERR_IO, "cannot begin") : AR_OK;
}

static ar_status nothing(ar_comm *c, void *arg)
{
    (void)c;
    (void)arg;
    return AR_OK;
}

Test(explore, begin_comes_before_each_run_and_its_error_ends_the_exploration)
{
    int begun = 0;
    uint64_t failing = 0;
    cr_assert_eq(ar_sim_explore(2, NULL, nothing, &begun, fail_at_third, 40, 10, &failing), AR_ERR_IO);
    cr_assert_eq(failing, 42);
    cr_assert_str_eq(ar_error_message(), "cannot begin");
}

Test(explore, arguments_are_checked)
{
    uint64_t failing = 0;
    OWNED(ar_trace_destroy) ar_trace *trace = NULL;
    cr_assert_ok(ar_trace_create(&trace));
    const ar_sim_options traced = {.trace = trace}, odd = {.algorithm = (ar_sim_algorithm)9};
    cr_assert_eq(ar_sim_explore(2, NULL, nothing, NULL, NULL, 1, 1, NULL), AR_ERR_ARG);
    cr_assert_eq(ar_sim_explore(2, NULL, nothing, NULL, NULL, 1, 0, &failing), AR_ERR_ARG);
    cr_assert_eq(ar_sim_explore(2, NULL, nothing, NULL, NULL, UINT64_MAX, 2, &failing), AR_ERR_ARG);
    cr_assert_eq(ar_sim_explore(2, &traced, nothing, NULL, NULL, 1, 2, &failing), AR_ERR_ARG);
    cr_assert_ok(ar_sim_explore(2, &traced, nothing, NULL, NULL, UINT64_MAX, 1, &failing));
    cr_assert_eq(ar_sim_explore(2, &odd, nothing, NULL, NULL, 1, 1, &failing), AR_ERR_ARG);
    cr_assert_eq(ar_sim_explore(0, NULL, nothing, NULL, NULL, 1, 1, &failing), AR_ERR_ARG);
    cr_assert_eq(ar_sim_explore(2, NULL, NULL, NULL, NULL, 1, 1, &failing), AR_ERR_ARG);
    /* Its groups are numbered as the first run's are: the two could not be told apart. */
    cr_assert_eq(ar_sim_run(2, &traced, nothing, NULL, NULL), AR_ERR_ARG, "a trace holds one run");
}

/* --- time --------------------------------------------------------------------------------------------------------- */

/* Each rank waits for the other in another group. poll: by asking a queue again and again. */
static ar_status cross_two_groups(ar_comm *c, void *arg)
{
    const bool polls = arg && *(const bool *)arg;
    const int r = ar_comm_rank(c);
    bool done = false;
    OWNED(ar_comm_destroy) ar_comm *other = NULL;
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    OWNED(ar_event_destroy) ar_event *e = NULL;
    AR_TRY(ar_comm_split(&other, c, 0, r));
    AR_TRY(ar_queue_create(&q, AR_QUEUE_THREAD, "comm"));
    AR_TRY(ar_event_create(&e));
    AR_TRY(ar_comm_barrier(r == 0 ? c : other, q, r == 0 ? "tp" : "dp"));
    AR_TRY(ar_event_record(e, q));
    while (polls && !done)
        AR_TRY(ar_event_test(e, &done));
    return ar_queue_sync(q, 0);
}

Test(explore, a_world_that_stalls_ends_at_once_with_the_report_of_a_world_that_waited)
{
    ar_sim_rank_report real[2], jumped[2];
    const ar_sim_options waits = {.timeout_ns = 3000 * MS}; /* longer than a split on a busy machine */
    ar_sim_options jumps = {.explore = true, .timeout_ns = 3600000 * MS};
    cr_assert_eq(ar_sim_run(2, &waits, cross_two_groups, NULL, real), AR_ERR_TIMEOUT);
    for (uint64_t seed = 0; seed < 20; seed++) {
        jumps.schedule_seed = seed;
        const uint64_t start = ari_now_ns();
        cr_assert_eq(ar_sim_run(2, &jumps, cross_two_groups, NULL, jumped), AR_ERR_TIMEOUT);
        cr_assert_lt(ari_now_ns() - start, 1800000 * MS, "the hour was waited for");
        cr_assert_says(" waited 3600.000 s in barrier() ");
        for (int r = 0; r < 2; r++) {
            cr_assert_str_eq(jumped[r].last, real[r].last);
            cr_assert_str_eq(jumped[r].current, real[r].current);
            cr_assert_eq(jumped[r].waiting_s, 3600.0);
        }
    }
}

Test(explore, a_rank_that_polls_still_hears_of_a_timeout)
{
    bool polls = true;
    for (uint64_t seed = 0; seed < 10; seed++) {
        const ar_sim_options o = {.explore = true, .schedule_seed = seed, .timeout_ns = 10 * MS};
        cr_assert_eq(ar_sim_run(2, &o, cross_two_groups, &polls, NULL), AR_ERR_TIMEOUT, "%s", ar_error_message());
    }
}

static ar_status sync_other(void *arg)
{
    return ar_queue_sync(arg, 0);
}

/* Each of two queues has a task that waits for all of the other's: without end, if both were enqueued before. */
static ar_status wait_in_circles(ar_comm *c, void *arg)
{
    (void)c;
    (void)arg;
    ar_queue *a = NULL, *b = NULL;
    AR_TRY(ar_queue_create(&a, AR_QUEUE_THREAD, "a"));
    ar_status st = ar_queue_create(&b, AR_QUEUE_THREAD, "b");
    if (st == AR_OK)
        st = ar_queue_host(a, sync_other, b);
    if (st == AR_OK)
        st = ar_queue_host(b, sync_other, a);
    if (st == AR_OK)
        st = ar_queue_sync(a, 0);
    if (st == AR_OK)
        st = ar_queue_sync(b, 0);
    const ar_status first = st;
    char message[256];
    snprintf(message, sizeof message, "%s", ar_error_message());
    if (a && b) { /* neither may be destroyed while the other's task looks at it */
        st = ar_queue_sync(a, 0);
        st = ar_queue_sync(b, 0);
    }
    ar_queue_destroy(a);
    ar_queue_destroy(b);
    return first == AR_OK ? AR_OK : ar_error_set(first, "%s", message);
}

Test(explore, queues_that_wait_for_each_other_end_in_an_error_instead_of_a_hang)
{
    uint64_t failing = 0;
    cr_assert_refused(ar_sim_explore(1, NULL, wait_in_circles, NULL, NULL, 1, 1000, &failing), AR_ERR_TIMEOUT,
                      "tasks are not done, and never will be: no rank can go on");
}

/* --- worlds inside worlds, queues without one --------------------------------------------------------------------- */

typedef struct nest {
    bool explores;
    ar_sim_schedule inner[2];
} nest;

static ar_status run_inner(ar_comm *c, void *arg)
{
    nest *n = arg;
    arrivals a = {.n = 0};
    const int r = ar_comm_rank(c);
    const ar_sim_options o = {.explore = n->explores, .schedule_seed = (uint64_t)(100 + r), .schedule = &n->inner[r]};
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    AR_TRY(ar_queue_create(&q, AR_QUEUE_INLINE, "host"));
    AR_TRY(ar_comm_barrier(c, q, "before"));
    AR_TRY(n->explores ? ar_sim_run(3, &o, arrive, &a, NULL) : ar_sim_run(3, &o, nothing, NULL, NULL));
    return ar_comm_barrier(c, q, "after");
}

Test(explore, a_world_inside_a_rank_has_a_schedule_of_its_own_or_none)
{
    for (int explores = 0; explores < 2; explores++) {
        nest n = {.explores = explores}, again = {.explores = explores};
        ar_sim_schedule outer[2];
        for (int i = 0; i < 2; i++) {
            const ar_sim_options o = {.explore = true, .schedule_seed = 5, .schedule = &outer[i]};
            cr_assert_ok(ar_sim_run(2, &o, run_inner, i ? &again : &n, NULL));
        }
        cr_assert_eq(memcmp(&outer[0], &outer[1], sizeof *outer), 0);
        cr_assert_eq(memcmp(&n, &again, sizeof n), 0);
        cr_assert_eq(n.inner[0].choices > 0, explores);
    }
}

static ar_status leave_queue_behind(ar_comm *c, void *arg)
{
    ar_queue **q = arg;
    return ar_queue_create(&q[ar_comm_rank(c)], AR_QUEUE_THREAD, "forgotten");
}

static ar_status count_up(void *arg)
{
    ++*(int *)arg;
    return AR_OK;
}

Test(explore, a_queue_that_a_rank_left_behind_works_on_without_the_world)
{
    ar_queue *q[2] = {NULL};
    int ran = 0;
    const ar_sim_options o = {.explore = true};
    cr_assert_ok(ar_sim_run(2, &o, leave_queue_behind, q, NULL));
    for (int r = 0; r < 2; r++) {
        cr_assert_ok(ar_queue_host(q[r], count_up, &ran));
        cr_assert_ok(ar_queue_sync(q[r], 0));
        ar_queue_destroy(q[r]);
    }
    cr_assert_eq(ran, 2);
}

static ar_status use_foreign_queue(ar_comm *c, void *arg)
{
    (void)c;
    int ran = 0;
    AR_TRY(ar_queue_host(arg, count_up, &ran));
    AR_TRY(ar_queue_sync(arg, 0));
    return ran == 1 ? AR_OK : AR_ERR_DATA;
}

Test(explore, a_queue_made_outside_the_world_can_be_waited_for_inside)
{
    OWNED(ar_queue_destroy) ar_queue *q = NULL;
    const ar_sim_options o = {.explore = true};
    cr_assert_ok(ar_queue_create(&q, AR_QUEUE_THREAD, "outside"));
    cr_assert_ok(ar_sim_run(1, &o, use_foreign_queue, q, NULL));
}
