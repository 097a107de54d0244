/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/scheduler.h"
#include "tests/support/test.h"

#include <pthread.h>

#include "ref/core/clock.h"
#include "ref/core/lane.h"
#include "ref/core/wait.h"

/* The scheduler by itself: lanes of plain threads. What a lane does between two of its calls is one step. */
enum { LANES = 3, LOG = 600 };

typedef struct world {
    ari_instruments with;
    ari_lane *lane[LANES];
    ari_sleepers sleepers;
    _Atomic uint64_t word;
    int inside; /* lanes in a step; not atomic: one at a time is the claim */
    bool overlapped;
    int log[LOG], n;
    ari_wait wait[LANES]; /* of the lanes that wait */
    uint64_t ends_ns[LANES];
} world;

typedef struct lane_run {
    world *w;
    int index;
    void (*body)(world *w, int index);
} lane_run;

static void *lane_main(void *arg)
{
    const lane_run *r = arg;
    ari_lane_enter(r->w->lane[r->index]);
    r->body(r->w, r->index);
    r->w->ends_ns[r->index] = ari_wait_now_ns();
    ari_lane_leave(r->w->lane[r->index]);
    return NULL;
}

/* Runs the body on every lane and returns the choices made. */
static void run_lanes(world *w, uint64_t seed, void (*body)(world *, int), uint64_t *choices, uint64_t *hash)
{
    pthread_t thread[LANES];
    lane_run run[LANES];
    *w = (world){.n = 0};
    cr_assert_eq(ari_sleepers_init(&w->sleepers), 0);
    cr_assert_ok(ari_scheduler_create(&w->with.scheduler, seed));
    for (int i = 0; i < LANES; i++)
        cr_assert_ok(ari_lane_create(&w->lane[i], NULL, &w->with, i, "main"));
    for (int i = 0; i < LANES; i++) {
        run[i] = (lane_run){w, i, body};
        cr_assert_eq(pthread_create(&thread[i], NULL, lane_main, &run[i]), 0);
    }
    for (int i = 0; i < LANES; i++)
        pthread_join(thread[i], NULL);
    ari_scheduler_choices(w->with.scheduler, choices, hash);
    for (int i = 0; i < LANES; i++)
        ari_lane_destroy(w->lane[i]);
    ari_scheduler_destroy(w->with.scheduler);
    ari_sleepers_fini(&w->sleepers);
}

static void take_steps(world *w, int index)
{
    for (int i = 0; i < 100; i++) {
        w->overlapped |= w->inside++ > 0;
        w->log[w->n++] = index;
        sched_yield(); /* the system may run another thread here; the scheduler lets none */
        w->inside--;
        ari_wait_yield();
    }
}

Test(scheduler, one_lane_runs_at_a_time_and_a_seed_gives_one_order)
{
    static world w, again;
    uint64_t choices, hash, same_choices, same_hash;
    for (uint64_t seed = 0; seed < 30; seed++) {
        run_lanes(&w, seed, take_steps, &choices, &hash);
        run_lanes(&again, seed, take_steps, &same_choices, &same_hash);
        cr_assert_not(w.overlapped);
        cr_assert_eq(w.n, 300);
        cr_assert_arr_eq(w.log, again.log, sizeof w.log);
        cr_assert_eq(choices, 303, "%llu", (unsigned long long)choices); /* every step, and where lanes begin */
        cr_assert_eq(choices, same_choices);
        cr_assert_eq(hash, same_hash);
    }
}

Test(scheduler, the_order_of_a_seed_is_the_same_on_every_machine)
{
    static world w;
    uint64_t choices, hash;
    run_lanes(&w, 12345, take_steps, &choices, &hash);
    /* Where this changes, seeds written down before mean something else. */
    cr_assert_eq(hash, 0xbfd09e667e0cb2c1u, "%llx", (unsigned long long)hash);
}

static void take_two_steps(world *w, int index)
{
    w->log[w->n++] = index;
    ari_wait_yield();
    w->log[w->n++] = index;
}

Test(scheduler, every_order_of_two_steps_of_three_lanes_comes_up)
{
    /* 6! / (2! 2! 2!) = 90 orders. */
    static world w;
    static bool seen[729];
    int orders = 0;
    for (uint64_t seed = 0; seed < 3000; seed++) {
        uint64_t choices, hash;
        run_lanes(&w, seed, take_two_steps, &choices, &hash);
        int order = 0;
        for (int i = 0; i < 6; i++)
            order = 3 * order + w.log[i];
        orders += !seen[order];
        seen[order] = true;
    }
    cr_assert_eq(orders, 90);
}

static void wait_for_nobody(world *w, int index)
{
    ari_wait *wait = &w->wait[index];
    wait->sleepers = &w->sleepers;
    wait->timeout_ns = (uint64_t)(index + 1) * 3600000000000u; /* hours */
    while (!ari_wait_is_over(wait))
        ari_wait_turn(wait, &w->word, 0, 0);
}

Test(scheduler, time_stands_still_until_all_wait_and_then_jumps_to_the_earliest_deadline)
{
    static world w;
    uint64_t choices, hash;
    const uint64_t start = ari_now_ns();
    run_lanes(&w, 7, wait_for_nobody, &choices, &hash);
    cr_assert_lt(ari_now_ns() - start, 5000000000u);
    for (int i = 0; i < LANES; i++)
        cr_assert_eq(w.wait[i].now_ns - w.wait[i].start_ns, w.wait[i].timeout_ns);
    cr_assert_eq(w.ends_ns[1] - w.ends_ns[0], 3600000000000u);
    cr_assert_eq(w.ends_ns[2] - w.ends_ns[1], 3600000000000u);
}

static void wait_or_change(world *w, int index)
{
    ari_wait *wait = &w->wait[index];
    wait->sleepers = &w->sleepers;
    wait->timeout_ns = 1000000000u;
    if (index == 2) {
        atomic_store(&w->word, 1);
        ari_wake(&w->sleepers);
    }
    while (atomic_load(&w->word) == 0 && !ari_wait_is_over(wait))
        ari_wait_turn(wait, &w->word, 0, 0);
}

Test(scheduler, a_changed_word_ends_a_wait_before_time_moves)
{
    static world w;
    for (uint64_t seed = 0; seed < 50; seed++) {
        uint64_t choices, hash;
        run_lanes(&w, seed, wait_or_change, &choices, &hash);
        for (int i = 0; i < LANES; i++)
            cr_assert_eq(w.ends_ns[i], w.ends_ns[0]);
    }
}

static void poll_or_wait(world *w, int index)
{
    ari_wait *wait = &w->wait[0];
    if (index == 0) {
        wait->sleepers = &w->sleepers;
        wait->timeout_ns = 1000000; /* 1,000 questions */
        while (!ari_wait_is_over(wait))
            ari_wait_turn(wait, &w->word, 0, 0);
        atomic_store(&w->word, 1);
    }
    while (atomic_load(&w->word) == 0) {
        ari_wait_poll();
        w->n++;
    }
}

Test(scheduler, lanes_that_ask_in_a_loop_let_others_reach_their_deadlines)
{
    static world w;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint64_t choices, hash;
        run_lanes(&w, seed, poll_or_wait, &choices, &hash);
        cr_assert_geq(w.n, 1000);
        cr_assert_eq(atomic_load(&w.word), 1);
    }
}

static void wait_without_limit(world *w, int index)
{
    ari_wait *wait = &w->wait[index];
    wait->sleepers = &w->sleepers;
    wait->gives_up = index != 1;
    while (atomic_load(&w->word) == 0 && !wait->stuck)
        ari_wait_turn(wait, &w->word, 0, 0);
    if (wait->stuck && w->n++ == 1)
        atomic_store(&w->word, 1); /* the second to give up lets the lane go that cannot */
}

Test(scheduler, where_all_wait_without_limit_those_who_can_give_up_one_after_the_other)
{
    static world w;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint64_t choices, hash;
        run_lanes(&w, seed, wait_without_limit, &choices, &hash);
        cr_assert_eq(w.n, 2);
        cr_assert(w.wait[0].stuck && w.wait[2].stuck && !w.wait[1].stuck);
    }
}
