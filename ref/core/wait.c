/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/wait.h"

#include <sched.h>

#include "ref/core/clock.h"
#include "ref/core/lane.h"
#include "ref/core/os/threads.h"

/* A waiter spins while every rank has a core, then yields, then sleeps. Measured on two cores: with more ranks than
 * cores any spinning before the first yield costs a time slice of the rank that is waited for, and so it does where
 * other processes want the cores: hence less than a microsecond. Sleeping at once costs ten times what yielding does;
 * after a millisecond the peer is busy and the core belongs to it. */
enum { SPIN_TURNS = 40 };
#define YIELD_NS ((uint64_t)1000000)
#define POLL_NS ((uint64_t)1000)
/* If other processes want the cores, a yield hands over a whole time slice, and a rank that yields repeatedly resumes
 * long after its peer arrived; one that sleeps is woken at once. A yield that took this long is the sign, after which
 * the next waits of the process sleep without one. Measured next to 12 busy processes on two cores, a program of small
 * worlds: 80 s without this, 38 s with it; alone 1.7 s both ways. */
#define DEAR_NS ((uint64_t)2000000)
enum { DEAR_WAITS = 256 };
static atomic_uint dear_waits;
/* Then a waiter whose peer has a core spins for about as long as a sleep costs, which is some twenty microseconds. */
enum { DEAR_SPIN_TURNS = 600 };
/* A sleeper looks again at least this often. Every change wakes it; this bounds the damage if one did not. */
#define SLEEP_NS ((uint64_t)1000000000)
/* A turn that took longer: the process was stopped (Ctrl-Z, a debugger), and with it those that are waited for. */
#define STOPPED_NS (2 * SLEEP_NS)

int ari_sleepers_init(ari_sleepers *s)
{
    atomic_init(&s->count, 0);
    int rc = pthread_mutex_init(&s->lock, NULL);
    if (rc != 0)
        return rc;
    rc = ari_cond_init(&s->changed);
    if (rc != 0)
        pthread_mutex_destroy(&s->lock);
    return rc;
}

void ari_sleepers_fini(ari_sleepers *s)
{
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
}

void ari_wake(ari_sleepers *s)
{
    /* Sequentially consistent with sleep_on: either the sleeper's count is seen here, or the change is seen there. */
    if (atomic_load(&s->count) == 0)
        return;
    pthread_mutex_lock(&s->lock);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

static void sleep_on(ari_sleepers *s, const _Atomic uint64_t *word, uint64_t seen, const _Atomic uint64_t *other,
                     uint64_t other_seen, uint64_t deadline_ns)
{
    pthread_mutex_lock(&s->lock);
    atomic_fetch_add(&s->count, 1);
    if (atomic_load(word) == seen && (!other || atomic_load(other) == other_seen))
        ari_cond_wait_until(&s->changed, &s->lock, deadline_ns);
    atomic_fetch_sub(&s->count, 1);
    pthread_mutex_unlock(&s->lock);
}

static uint64_t deadline_of(const ari_wait *w)
{
    return w->timeout_ns ? ari_deadline_ns(w->start_ns + w->stopped_ns, w->timeout_ns) : UINT64_MAX;
}

/* False: there is no deterministic scheduler, and the thread has to wait by itself. */
static bool turn_given(ari_wait *w, const _Atomic uint64_t *word, uint64_t seen, uint64_t other_seen)
{
    const ari_lane *lane = ari_lane_self();
    if (!lane || !lane->turn || w->outside)
        return false;
    if (w->start_ns == 0)
        w->start_ns = ari_turn_now_ns(lane->turn);
    const ari_turn_until until = {.word = word,
                                  .seen = seen,
                                  .other = w->other,
                                  .other_seen = other_seen,
                                  .deadline_ns = deadline_of(w),
                                  .gives_up = w->gives_up};
    const ari_turn_end end = ari_turn_wait(lane->turn, &until);
    w->now_ns = ari_turn_now_ns(lane->turn);
    w->stuck = end == ARI_TURN_STUCK;
    return end != ARI_TURN_FREE;
}

/* Counts down; two threads that count at once only make it one fewer. */
static bool yields_are_dear(void)
{
    const unsigned left = atomic_load_explicit(&dear_waits, memory_order_relaxed);
    if (left > 0)
        atomic_store_explicit(&dear_waits, left - 1, memory_order_relaxed);
    return left > 0;
}

void ari_wait_turn(ari_wait *w, const _Atomic uint64_t *word, uint64_t seen, uint64_t other_seen)
{
    if (turn_given(w, word, seen, other_seen))
        return;
    w->turns++;
    const bool dear = atomic_load_explicit(&dear_waits, memory_order_relaxed) > 0;
    if (w->spins && w->turns < (dear ? DEAR_SPIN_TURNS : SPIN_TURNS)) {
        ari_wait_relax();
        return;
    }
    if (w->start_ns == 0)
        w->start_ns = w->now_ns = ari_now_ns();
    if (w->now_ns - w->start_ns >= (w->awake_ns ? w->awake_ns : YIELD_NS) || yields_are_dear()) {
        const uint64_t slice = ari_deadline_ns(w->now_ns + w->stopped_ns, SLEEP_NS), deadline = deadline_of(w);
        sleep_on(w->at, word, seen, w->other, other_seen, slice < deadline ? slice : deadline);
    } else {
        sched_yield();
        if (ari_now_ns() - w->stopped_ns - w->now_ns > DEAR_NS)
            atomic_store_explicit(&dear_waits, DEAR_WAITS, memory_order_relaxed);
    }
    const uint64_t now = ari_now_ns() - w->stopped_ns; /* every time: a turn among thousands of ranks takes long */
    if (now - w->now_ns > STOPPED_NS)
        w->stopped_ns += now - w->now_ns;
    else
        w->now_ns = now;
}

uint64_t ari_wait_now_ns(void)
{
    const ari_lane *lane = ari_lane_self();
    return lane && lane->turn ? ari_turn_now_ns(lane->turn) : ari_now_ns();
}

/* The same clock as ari_now_ns, some milliseconds behind at most, for a tenth of the price. */
static uint64_t coarse_now_ns(void)
{
#if defined(CLOCK_MONOTONIC_COARSE)
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
#else
    return ari_now_ns();
#endif
}

uint64_t ari_wait_coarse_ns(void)
{
    const ari_lane *lane = ari_lane_self();
    return lane && lane->turn ? ari_turn_now_ns(lane->turn) : coarse_now_ns();
}

void ari_wait_until(ari_sleepers *at, const _Atomic uint64_t *word, uint64_t seen, uint64_t deadline_ns)
{
    const ari_lane *lane = ari_lane_self();
    const ari_turn_until until = {.word = word, .seen = seen, .deadline_ns = deadline_ns};
    while (atomic_load(word) == seen && ari_wait_now_ns() < deadline_ns) {
        if (!lane || !lane->turn || ari_turn_wait(lane->turn, &until) == ARI_TURN_FREE)
            sleep_on(at, word, seen, NULL, 0, deadline_ns);
    }
}

static void yield_for(uint64_t ns)
{
    const ari_lane *lane = ari_lane_self();
    if (lane && lane->turn)
        ari_turn_yield(lane->turn, ns);
}

void ari_wait_yield(void)
{
    yield_for(0);
}

void ari_wait_poll(void)
{
    yield_for(POLL_NS);
}

/* --- cores -------------------------------------------------------------------------------------------------------- */

int ari_threads(int asked)
{
    return asked > 0 ? asked : ari_cores();
}

int ari_core_budget(int threads, int ranks)
{
    const int share = ranks > 0 ? threads / ranks : 1;
    return share > 1 ? share : 1;
}
