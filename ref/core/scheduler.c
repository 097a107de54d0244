/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/scheduler.h"

#include <sched.h>
#include <stdio.h>

#include "ref/core/clock.h"
#include "ref/core/lane.h"
#include "ref/core/os/threads.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"

/* Scheduler of lanes: one lane at a time holds the turn. A call that gives the turn away chooses the next holder among
 * the lanes that can run at that moment, and wakes only that one. Lanes are listed in order of creation, and only the
 * holder can create lanes, so the choice never depends on the speed of the system's threads.
 *
 * A seed draws one of two policies. Uniform: every lane that can run is equally likely. It finds failures that occur in
 * many orders, but passes over one of k lanes n times only with a probability of (1 - 1/k)^n. Priorities (Burckhardt,
 * Kothari, Musuvathi, Nagarakatte 2010, "A randomized scheduler with probabilistic guarantees of finding bugs"): lanes
 * have random priorities, the highest one that can run continues, and from time to time the lane that would continue
 * drops below all others. It starves lanes for long, and finds failures that need few but long delays. The rate is
 * drawn too, because a suitable one depends on the length of the run. */

/* With probability 1/n, a choice by priority lowers the chosen lane's priority; n = 1: uniform choices. The seed
 * determines n. */
static const uint64_t one_in[] = {1, 4, 16, 64, 256};
enum { WAYS = sizeof one_in / sizeof *one_in };

/* Initial time; 0 means "not read" to waiters. */
#define BEGIN_NS ((uint64_t)1000000000)
/* Minimum advance of the clock, so that a lane that polls with the shortest timeout cannot take forever to reach
 * another lane's deadline. */
#define TICK_NS ((uint64_t)1000)

struct ari_turn {
    ari_turn *next, **link; /* link: the pointer that points to this turn */
    ari_scheduler *scheduler;
    ari_semaphore chosen;
    /* guarded by the scheduler's lock */
    uint64_t id; /* 1, 2, ... in order of creation */
    uint64_t priority;
    enum { RUNS, WAITS, JOINS, LEFT } state;
    ari_turn_until until;        /* WAITS */
    const ari_turn *joined_turn; /* JOINS */
    bool stuck;
};

struct ari_scheduler {
    pthread_mutex_t lock;
    /* guarded by `lock` */
    ari_turn *turns, **tail; /* list, the oldest first */
    uint64_t created, choices, hash, random, now_ns;
    uint64_t lowest;  /* priority of the next lane to fall behind */
    uint64_t falls;   /* one_in of this seed */
    uint64_t holders; /* number of holders of this memory: the world and its turns */
    bool is_over;
};

static uint64_t draw(ari_scheduler *s)
{
    return ari_splitmix(&s->random);
}

ar_status ari_scheduler_create(ari_scheduler **out, uint64_t seed)
{
    ARI_OWNED ari_scheduler *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s || pthread_mutex_init(&s->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a scheduler");
    s->tail = &s->turns;
    s->hash = 0xcbf29ce484222325u; /* FNV-1a */
    s->random = seed;
    s->now_ns = BEGIN_NS;
    s->lowest = UINT64_MAX / 2;
    s->falls = one_in[draw(s) % WAYS];
    s->holders = 1;
    ARI_GIVE(out, s);
    return AR_OK;
}

/* Releases the turn; `lock` is held on entry and released. */
static void release_turn(ari_scheduler *s)
{
    const bool is_last = --s->holders == 0;
    pthread_mutex_unlock(&s->lock);
    if (!is_last)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void ari_scheduler_destroy(ari_scheduler *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->is_over = true;
    for (ari_turn *t = s->turns; t; t = t->next)
        ari_semaphore_post(&t->chosen);
    release_turn(s);
}

void ari_scheduler_choices(ari_scheduler *s, uint64_t *choices, uint64_t *hash)
{
    pthread_mutex_lock(&s->lock);
    *choices = s->choices;
    *hash = s->hash;
    pthread_mutex_unlock(&s->lock);
}

uint64_t ari_scheduler_now_ns(ari_scheduler *s)
{
    pthread_mutex_lock(&s->lock);
    const uint64_t now_ns = s->now_ns;
    pthread_mutex_unlock(&s->lock);
    return now_ns;
}

/* The scheduler's time. */
static uint64_t turn_now_ns(const ari_turn *t)
{
    return ari_scheduler_now_ns(t->scheduler);
}

/* --- choosing ----------------------------------------------------------------------------------------------------- */

static bool can_run(const ari_turn *t)
{
    const ari_turn_until *u = &t->until;
    switch (t->state) {
    case RUNS:
        return true;
    case WAITS:
        return t->stuck || atomic_load(u->word) != u->expected ||
               (u->other_word && atomic_load(u->other_word) != u->other_seen) || t->scheduler->now_ns >= u->deadline_ns;
    case JOINS:
        return t->joined_turn->state == LEFT;
    case LEFT:
        break;
    }
    return false;
}

static bool would_give_up(const ari_turn *t)
{
    return t->state == WAITS && t->until.gives_up;
}

static uint64_t count_turns(const ari_scheduler *s, bool (*predicate)(const ari_turn *))
{
    uint64_t n = 0;
    for (const ari_turn *t = s->turns; t; t = t->next)
        n += predicate(t);
    return n;
}

/* Draws one of the n turns that satisfy the predicate, with equal probability. */
static ari_turn *one_of(ari_scheduler *s, bool (*predicate)(const ari_turn *), uint64_t n)
{
    uint64_t skip = draw(s) % n;
    for (ari_turn *t = s->turns;; t = t->next) {
        if (predicate(t) && skip-- == 0)
            return t;
    }
}

static ari_turn *highest(const ari_scheduler *s)
{
    ari_turn *candidate = NULL;
    for (ari_turn *t = s->turns; t; t = t->next) {
        if ((!candidate || t->priority > candidate->priority) && can_run(t))
            candidate = t;
    }
    return candidate;
}

static ari_turn *pick(ari_scheduler *s, uint64_t n)
{
    if (s->falls == 1)
        return one_of(s, can_run, n);
    ari_turn *t = highest(s);
    if (n > 1 && draw(s) % s->falls == 0) {
        t->priority = s->lowest--;
        t = highest(s);
    }
    return t;
}

static uint64_t earliest_deadline(const ari_scheduler *s)
{
    uint64_t earliest = UINT64_MAX;
    for (const ari_turn *t = s->turns; t; t = t->next) {
        if (t->state == WAITS && t->until.deadline_ns < earliest)
            earliest = t->until.deadline_ns;
    }
    return earliest;
}

/* Advances virtual time to the moment at which a lane can run, if none can now. If nothing would ever happen, one lane
 * has to give up. Returns the number of lanes that can run then. */
static uint64_t move_on(ari_scheduler *s)
{
    const uint64_t deadline = earliest_deadline(s), tick = s->now_ns + TICK_NS;
    if (deadline < UINT64_MAX) {
        s->now_ns = deadline > tick ? deadline : tick;
    } else {
        const uint64_t n = count_turns(s, would_give_up);
        if (n > 0)
            one_of(s, would_give_up, n)->stuck = true;
    }
    return count_turns(s, can_run);
}

/* Chooses the next turn; `lock` is held. NULL: none, because the world is over, or because all lanes have ended except
 * idle queues that a rank did not destroy. */
static ari_turn *choose_turn(ari_scheduler *s)
{
    if (s->is_over)
        return NULL;
    uint64_t n = count_turns(s, can_run);
    if (n == 0)
        n = move_on(s);
    if (n == 0)
        return NULL;
    ari_turn *t = pick(s, n);
    s->choices++;
    s->hash = (s->hash ^ t->id) * 0x100000001b3u;
    return t;
}

/* --- lanes -------------------------------------------------------------------------------------------------------- */

/* Creates a turn for a lane that is about to start, runnable from now on. Called before the first lane runs, or by the
 * lane whose turn it is. The caller owns *out and destroys it after turn_leave. Errors: AR_ERR_MEMORY. */
static ar_status turn_create(ari_turn **out, ari_scheduler *s)
{
    ARI_OWNED ari_turn *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t || !ari_semaphore_init(&t->chosen))
        return ar_error_set(AR_ERR_MEMORY, "no memory for a lane's turn");
    t->scheduler = s;
    pthread_mutex_lock(&s->lock);
    t->id = ++s->created;
    t->priority = UINT64_MAX / 2 + draw(s) / 2; /* above all lanes with lowered priority */
    t->link = s->tail;
    *s->tail = t;
    s->tail = &t->next;
    s->holders++;
    pthread_mutex_unlock(&s->lock);
    ARI_GIVE(out, t);
    return AR_OK;
}

/* Accepts NULL. */
static void turn_destroy(ari_turn *t)
{
    if (!t)
        return;
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    *t->link = t->next;
    if (t->next)
        t->next->link = t->link;
    else
        s->tail = t->link;
    release_turn(s);
    ari_semaphore_fini(&t->chosen);
    free(t);
}

static void give_turn(ari_turn *turn)
{
    if (turn)
        ari_semaphore_post(&turn->chosen);
}

/* Gives up the turn; `lock` is held, and released before the turn is. Returns when it is this lane's turn again. */
static void pass_turn(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    ari_turn *next_turn = choose_turn(s);
    const bool parks = next_turn != t && !s->is_over;
    pthread_mutex_unlock(&s->lock);
    if (parks) {
        give_turn(next_turn);
        ari_semaphore_wait(&t->chosen);
    }
}

/* Returns when it is this lane's turn for the first time. */
static void turn_enter(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    /* the first thread to arrive chooses for all, whose turns exist by now */
    ari_turn *next_turn = s->choices == 0 ? choose_turn(s) : NULL;
    pthread_mutex_unlock(&s->lock);
    give_turn(next_turn);
    ari_semaphore_wait(&t->chosen);
}

/* Passes the turn on because the lane has ended. */
static void turn_leave(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = LEFT;
    ari_turn *next_turn = choose_turn(s);
    pthread_mutex_unlock(&s->lock);
    give_turn(next_turn);
}

/* Lets the scheduler choose among all runnable lanes, including this one, after `takes_ns` of its time (0: none). */
static void turn_yield(ari_turn *t, uint64_t takes_ns)
{
    pthread_mutex_lock(&t->scheduler->lock);
    t->scheduler->now_ns += takes_ns;
    pass_turn(t);
}

static ari_turn_end turn_wait(ari_turn *t, const ari_turn_until *until)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = WAITS;
    t->until = *until;
    t->stuck = false;
    pass_turn(t);
    pthread_mutex_lock(&s->lock);
    t->state = RUNS;
    const ari_turn_end end = s->is_over ? ARI_TURN_FREE : t->stuck ? ARI_TURN_STUCK : ARI_TURN_CHANGED;
    pthread_mutex_unlock(&s->lock);
    return end;
}

/* Lets other lanes run until another lane has left, before the caller waits for that lane's thread to end
 * (pthread_join). */
static void turn_join(ari_turn *t, const ari_turn *joined_turn)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = JOINS;
    t->joined_turn = joined_turn;
    pass_turn(t);
    pthread_mutex_lock(&s->lock);
    t->state = RUNS;
    pthread_mutex_unlock(&s->lock);
}

/* --- lanes -------------------------------------------------------------------------------------------------------- */

ARI_OWNER(ari_lane, ari_lane_destroy)

static _Thread_local ari_lane *self;

ari_lane *ari_lane_self(void)
{
    return self;
}

ar_status ari_lane_create(ari_lane **out, ari_lane *parent, const ari_instruments *instruments, int rank,
                          const char *name)
{
    ARI_OWNED_BY(ari_lane_destroy) ari_lane *l = calloc(1, sizeof *l);
    *out = NULL;
    if (!l)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a lane of rank %d", rank);
    *l = (ari_lane){.instruments = &l->instruments_copy, .rank = rank, .instruments_copy = *instruments};
    atomic_init(&l->tracks, 1);
    l->main = parent ? parent->main : l;
    if (parent) {
        l->track = atomic_fetch_add(&l->main->tracks, 1);
        l->virtual_ns = parent->virtual_ns;
    }
    snprintf(l->name, sizeof l->name, "%s", name);
    if (instruments->trace)
        AR_TRY(ari_recording_create(&l->recording, instruments->trace, l));
    if (instruments->scheduler)
        AR_TRY(turn_create(&l->turn, instruments->scheduler));
    ARI_GIVE(out, l);
    return AR_OK;
}

void ari_lane_destroy(ari_lane *l)
{
    if (!l)
        return;
    turn_destroy(l->turn);
    free(l);
}

void ari_lane_enter(ari_lane *l)
{
    if (!l)
        return;
    self = l;
    if (l->turn)
        turn_enter(l->turn);
}

void ari_lane_leave(ari_lane *l)
{
    if (!l)
        return;
    ari_recording_close(l->recording, l->virtual_ns);
    self = NULL;
    if (l->turn)
        turn_leave(l->turn);
}

void ari_lane_join(const ari_lane *l)
{
    if (l && l->turn && self && self->turn)
        turn_join(self->turn, l->turn);
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

/* A waiter spins while every rank has a core, then yields, then sleeps. Measured on two cores: with more ranks than
 * cores, any spinning before the first yield costs a time slice of the awaited rank, as it does when other processes
 * need the cores; hence spinning lasts less than a microsecond. Sleeping at once costs ten times as much as yielding.
 * After a millisecond the peer is busy, and the core should be left to it. */
enum { SPIN_TURNS = 40 };
#define YIELD_NS ((uint64_t)1000000)
#define POLL_NS ((uint64_t)1000)
/* If other processes need the cores, a yield gives up a whole time slice. A rank that yields repeatedly then resumes
 * long after its peer has arrived, while a sleeping rank is woken at once. A yield that took this long indicates that,
 * and the process's next waits sleep without yielding. Measured with a program of small worlds next to 12 busy
 * processes on two cores: 80 s without this, 38 s with it; alone 1.7 s in both cases. */
#define DEAR_NS ((uint64_t)2000000)
enum { DEAR_WAITS = 256 };
static atomic_uint dear_waits;
/* In that state a waiter whose peer has a core spins for about as long as a sleep costs, some twenty microseconds. */
enum { DEAR_SPIN_TURNS = 600 };
/* A sleeper checks at least this often. Every change wakes it; this only limits the damage if one did not. */
#define SLEEP_NS ((uint64_t)1000000000)
/* A longer turn means that the process was stopped (Ctrl-Z, a debugger) together with those for which it waits. */
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

static void sleep_on(ari_sleepers *s, const _Atomic uint64_t *word, uint64_t expected,
                     const _Atomic uint64_t *other_word, uint64_t other_seen, uint64_t deadline_ns)
{
    pthread_mutex_lock(&s->lock);
    atomic_fetch_add(&s->count, 1);
    if (atomic_load(word) == expected && (!other_word || atomic_load(other_word) == other_seen))
        ari_cond_wait_until(&s->changed, &s->lock, deadline_ns);
    atomic_fetch_sub(&s->count, 1);
    pthread_mutex_unlock(&s->lock);
}

static uint64_t deadline_of(const ari_wait *w)
{
    return w->timeout_ns ? ari_deadline_ns(w->start_ns + w->stopped_ns, w->timeout_ns) : UINT64_MAX;
}

/* Waits by giving up the turn. Returns false if there is no deterministic scheduler, and the thread has to wait
 * itself. */
static bool turn_given(ari_wait *w, const _Atomic uint64_t *word, uint64_t expected, uint64_t other_seen)
{
    const ari_lane *lane = ari_lane_self();
    if (!lane || !lane->turn || w->outside)
        return false;
    if (w->start_ns == 0)
        w->start_ns = turn_now_ns(lane->turn);
    const ari_turn_until until = {.word = word,
                                  .expected = expected,
                                  .other_word = w->other_word,
                                  .other_seen = other_seen,
                                  .deadline_ns = deadline_of(w),
                                  .gives_up = w->gives_up};
    const ari_turn_end end = turn_wait(lane->turn, &until);
    w->now_ns = turn_now_ns(lane->turn);
    w->stuck = end == ARI_TURN_STUCK;
    return end != ARI_TURN_FREE;
}

/* Counts down; a race between two threads only loses one count. */
static bool yields_are_dear(void)
{
    const unsigned remaining = atomic_load_explicit(&dear_waits, memory_order_relaxed);
    if (remaining > 0)
        atomic_store_explicit(&dear_waits, remaining - 1, memory_order_relaxed);
    return remaining > 0;
}

void ari_wait_turn(ari_wait *w, const _Atomic uint64_t *word, uint64_t expected, uint64_t other_seen)
{
    if (turn_given(w, word, expected, other_seen))
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
        sleep_on(w->sleepers, word, expected, w->other_word, other_seen, slice < deadline ? slice : deadline);
    } else {
        sched_yield();
        if (ari_now_ns() - w->stopped_ns - w->now_ns > DEAR_NS)
            atomic_store_explicit(&dear_waits, DEAR_WAITS, memory_order_relaxed);
    }
    const uint64_t now_ns = ari_now_ns() - w->stopped_ns; /* read every time, because a turn among thousands of ranks
                                                             takes long */
    if (now_ns - w->now_ns > STOPPED_NS)
        w->stopped_ns += now_ns - w->now_ns;
    else
        w->now_ns = now_ns;
}

uint64_t ari_wait_now_ns(void)
{
    const ari_lane *lane = ari_lane_self();
    return lane && lane->turn ? turn_now_ns(lane->turn) : ari_now_ns();
}

/* Returns the clock of ari_now_ns, late by at most a few milliseconds, at a tenth of the cost. */
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
    return lane && lane->turn ? turn_now_ns(lane->turn) : coarse_now_ns();
}

void ari_wait_until(ari_sleepers *sleepers, const _Atomic uint64_t *word, uint64_t expected, uint64_t deadline_ns)
{
    const ari_lane *lane = ari_lane_self();
    const ari_turn_until until = {.word = word, .expected = expected, .deadline_ns = deadline_ns};
    while (atomic_load(word) == expected && ari_wait_now_ns() < deadline_ns) {
        if (!lane || !lane->turn || turn_wait(lane->turn, &until) == ARI_TURN_FREE)
            sleep_on(sleepers, word, expected, NULL, 0, deadline_ns);
    }
}

static void yield_for(uint64_t ns)
{
    const ari_lane *lane = ari_lane_self();
    if (lane && lane->turn)
        turn_yield(lane->turn, ns);
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

int ari_threads(int requested)
{
    return requested > 0 ? requested : ari_cores();
}

int ari_core_budget(int threads, int ranks)
{
    const int share = ranks > 0 ? threads / ranks : 1;
    return share > 1 ? share : 1;
}
