/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/scheduler.h"
#include "ref/core/size.h"

#include "ref/core/os/threads.h"

/* One lane at a time holds the turn. Every call that gives it away chooses the next holder at once, among the lanes
 * that can run at that moment, and wakes that one alone. Lanes are looked at in the order of their creation, which only
 * the holder can extend, so nothing that is chosen from depends on how fast the system's threads are.
 *
 * How it is chosen. A seed draws one of two ways. Uniform: every lane that can run is as likely as any other; this
 * finds what goes wrong in many orders, but of k lanes that can run one is passed over n times with a chance of
 * (1 - 1/k)^n. Priorities (Burckhardt, Kothari, Musuvathi, Nagarakatte 2010, "A randomized scheduler with probabilistic
 * guarantees of finding bugs"): lanes have random priorities, the highest that can run goes on, and now and then the
 * one that would falls behind all others; this starves lanes for long, and finds what needs few, but long, delays. How
 * often is drawn, too, since what a run needs depends on its length. */

/* One in so many choices by priority makes the chosen lane fall behind; 1: uniform. A seed draws one of these. */
static const uint64_t one_in[] = {1, 4, 16, 64, 256};
enum { WAYS = sizeof one_in / sizeof *one_in };

/* Time begins here: 0 means "not read" to those who wait. */
#define BEGIN_NS ((uint64_t)1000000000)
/* Time moves at least so far when it moves: a program that asks again and again with the shortest timeout must not take
 * for ever to reach somebody else's. */
#define TICK_NS ((uint64_t)1000)

struct ari_turn {
    ari_turn *next, **at; /* at: the pointer that points here */
    ari_scheduler *scheduler;
    ari_semaphore chosen;
    /* guarded by the scheduler's lock */
    uint64_t id; /* 1, 2, ... in the order of creation */
    uint64_t priority;
    enum { RUNS, WAITS, JOINS, LEFT } state;
    ari_turn_until until; /* WAITS */
    const ari_turn *ends; /* JOINS */
    bool stuck;
};

struct ari_scheduler {
    pthread_mutex_t lock;
    /* guarded by `lock` */
    ari_turn *turns, **last; /* list, the oldest first */
    uint64_t made, choices, hash, random, now_ns;
    uint64_t lowest;  /* priority of the next lane to fall behind */
    uint64_t falls;   /* one_in of this seed */
    uint64_t holders; /* of this memory: the world and its turns */
    bool over;
};

static uint64_t draw(ari_scheduler *s)
{
    return ari_splitmix(&s->random);
}

ar_status ari_scheduler_create(ari_scheduler **gives, uint64_t seed)
{
    ARI_OWNED ari_scheduler *s = calloc(1, sizeof *s);
    *gives = NULL;
    if (!s || pthread_mutex_init(&s->lock, NULL) != 0)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a scheduler");
    s->last = &s->turns;
    s->hash = 0xcbf29ce484222325u; /* FNV-1a */
    s->random = seed;
    s->now_ns = BEGIN_NS;
    s->lowest = UINT64_MAX / 2;
    s->falls = one_in[draw(s) % WAYS];
    s->holders = 1;
    ARI_GIVE(gives, s);
    return AR_OK;
}

/* `lock` held, and given back. */
static void release_turn(ari_scheduler *s)
{
    const bool last = --s->holders == 0;
    pthread_mutex_unlock(&s->lock);
    if (!last)
        return;
    pthread_mutex_destroy(&s->lock);
    free(s);
}

void ari_scheduler_destroy(ari_scheduler *s)
{
    if (!s)
        return;
    pthread_mutex_lock(&s->lock);
    s->over = true;
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
    const uint64_t now = s->now_ns;
    pthread_mutex_unlock(&s->lock);
    return now;
}

uint64_t ari_turn_now_ns(const ari_turn *t)
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
        return t->stuck || atomic_load(u->word) != u->seen || (u->other && atomic_load(u->other) != u->other_seen) ||
               t->scheduler->now_ns >= u->deadline_ns;
    case JOINS:
        return t->ends->state == LEFT;
    case LEFT:
        break;
    }
    return false;
}

static bool would_give_up(const ari_turn *t)
{
    return t->state == WAITS && t->until.gives_up;
}

static uint64_t count_turns(const ari_scheduler *s, bool (*is)(const ari_turn *))
{
    uint64_t n = 0;
    for (const ari_turn *t = s->turns; t; t = t->next)
        n += is(t);
    return n;
}

/* One of n that are, each as likely. */
static ari_turn *one_of(ari_scheduler *s, bool (*is)(const ari_turn *), uint64_t n)
{
    uint64_t skip = draw(s) % n;
    for (ari_turn *t = s->turns;; t = t->next) {
        if (is(t) && skip-- == 0)
            return t;
    }
}

static ari_turn *highest(const ari_scheduler *s)
{
    ari_turn *best = NULL;
    for (ari_turn *t = s->turns; t; t = t->next) {
        if ((!best || t->priority > best->priority) && can_run(t))
            best = t;
    }
    return best;
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

/* Nobody can run: time jumps to where somebody can; where nothing ever would happen, somebody has to give up. Returns
 * how many can run then. */
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

/* `lock` held. NULL: nobody; the world is over, or all have ended, but for queues without work that a rank forgot. */
static ari_turn *choose_turn(ari_scheduler *s)
{
    if (s->over)
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

ar_status ari_turn_create(ari_turn **gives, ari_scheduler *s)
{
    ARI_OWNED ari_turn *t = calloc(1, sizeof *t);
    *gives = NULL;
    if (!t || !ari_semaphore_init(&t->chosen))
        return ar_error_set(AR_ERR_MEMORY, "no memory for a lane's turn");
    t->scheduler = s;
    pthread_mutex_lock(&s->lock);
    t->id = ++s->made;
    t->priority = UINT64_MAX / 2 + draw(s) / 2; /* above everybody who has fallen behind */
    t->at = s->last;
    *s->last = t;
    s->last = &t->next;
    s->holders++;
    pthread_mutex_unlock(&s->lock);
    ARI_GIVE(gives, t);
    return AR_OK;
}

void ari_turn_destroy(ari_turn *t)
{
    if (!t)
        return;
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    *t->at = t->next;
    if (t->next)
        t->next->at = t->at;
    else
        s->last = t->at;
    release_turn(s);
    ari_semaphore_fini(&t->chosen);
    free(t);
}

static void give_turn(ari_turn *to)
{
    if (to)
        ari_semaphore_post(&to->chosen);
}

/* `lock` held, and given back before the turn is. Returns when it is this lane's turn again. */
static void pass_turn(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    ari_turn *next = choose_turn(s);
    const bool parks = next != t && !s->over;
    pthread_mutex_unlock(&s->lock);
    if (parks) {
        give_turn(next);
        ari_semaphore_wait(&t->chosen);
    }
}

void ari_turn_enter(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    /* The first thread to come chooses for all, whose turns have been made by now. */
    ari_turn *first = s->choices == 0 ? choose_turn(s) : NULL;
    pthread_mutex_unlock(&s->lock);
    give_turn(first);
    ari_semaphore_wait(&t->chosen);
}

void ari_turn_leave(ari_turn *t)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = LEFT;
    ari_turn *next = choose_turn(s);
    pthread_mutex_unlock(&s->lock);
    give_turn(next);
}

void ari_turn_yield(ari_turn *t, uint64_t takes_ns)
{
    pthread_mutex_lock(&t->scheduler->lock);
    t->scheduler->now_ns += takes_ns;
    pass_turn(t);
}

ari_turn_end ari_turn_wait(ari_turn *t, const ari_turn_until *until)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = WAITS;
    t->until = *until;
    t->stuck = false;
    pass_turn(t);
    pthread_mutex_lock(&s->lock);
    t->state = RUNS;
    const ari_turn_end end = s->over ? ARI_TURN_FREE : t->stuck ? ARI_TURN_STUCK : ARI_TURN_CHANGED;
    pthread_mutex_unlock(&s->lock);
    return end;
}

void ari_turn_join(ari_turn *t, const ari_turn *ends)
{
    ari_scheduler *s = t->scheduler;
    pthread_mutex_lock(&s->lock);
    t->state = JOINS;
    t->ends = ends;
    pass_turn(t);
    pthread_mutex_lock(&s->lock);
    t->state = RUNS;
    pthread_mutex_unlock(&s->lock);
}
