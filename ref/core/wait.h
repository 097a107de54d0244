/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Waits for a word of memory to change: by spinning while every waiting thread has a core, then by yielding, then by
 * sleeping; under a deterministic scheduler, by giving up the turn. Lanes wait nowhere else. */

/* Sleeping waiters of some words. */
typedef struct ari_sleepers {
    atomic_int count; /* written under `lock` */
    pthread_mutex_t lock;
    pthread_cond_t changed;
} ari_sleepers;
/** Returns an errno value. */
int ari_sleepers_init(ari_sleepers *s);
void ari_sleepers_fini(ari_sleepers *s);
/** Wakes sleepers. To be called after changing a word (sequentially consistent) on which a thread may sleep. */
void ari_wake(ari_sleepers *s);

typedef struct ari_wait {
    ari_sleepers *sleepers;
    const _Atomic uint64_t *other_word; /* a second word whose change also ends the wait; NULL: none */
    bool spins;                         /* true if every thread that may wait has a core */
    bool outside;        /* true if threads unknown to the scheduler change the words: the waiter then keeps its turn */
    bool gives_up;       /* true if the wait has no time limit, and its owner checks `stuck` */
    uint64_t timeout_ns; /* time limit after the first turn; 0: none */
    uint64_t awake_ns;   /* time before the thread sleeps; 0: a millisecond */
    bool stuck;          /* set under a deterministic scheduler if no lane will ever change the words */
    unsigned turns;
    uint64_t start_ns, now_ns; /* 0: the clock has not been read yet */
    uint64_t stopped_ns;       /* time for which the process was stopped, which does not count as lateness */
} ari_wait;

/** Tells the core that its thread is spinning. */
static inline void ari_wait_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
/** Waits one turn for `word` to change from `expected`, or the other word from other_seen; may return without a
 *  change. */
void ari_wait_turn(ari_wait *w, const _Atomic uint64_t *word, uint64_t expected, uint64_t other_seen);
/** True if the timeout is over. */
static inline bool ari_wait_is_over(const ari_wait *w)
{
    return w->timeout_ns && w->start_ns && w->now_ns - w->start_ns >= w->timeout_ns;
}

/** The monotonic clock; a lane under a deterministic scheduler sees the scheduler's. */
uint64_t ari_wait_now_ns(void);
/** Returns the same time, late by at most a few milliseconds, at a tenth of the cost: for messages, not for
 *  decisions. */
uint64_t ari_wait_coarse_ns(void);
/** The calling thread sleeps until then, or until *word != seen. */
void ari_wait_until(ari_sleepers *sleepers, const _Atomic uint64_t *word, uint64_t expected, uint64_t deadline_ns);
/** Marks a point at which other lanes may overtake the caller: a choice for a deterministic scheduler, otherwise
 *  nothing. */
void ari_wait_yield(void);
/** Called before a lane asks whether something is done, possibly in an endless loop. Acts like ari_wait_yield, and
 *  takes a microsecond of a deterministic scheduler's time, so that a polling lane lets others reach their
 *  deadlines. */
void ari_wait_poll(void);

/** Returns the requested number of threads; for 0 ari_cores. */
int ari_threads(int requested);

/** Returns how many of the process's `threads` the kernels of one of `ranks` rank threads may use: an equal share,
 *  rounded down, at least 1. If there are at least as many threads as ranks, ranks * share <= threads; otherwise each
 *  rank uses one thread. Rank threads and kernel threads together never oversubscribe the cores twice. */
int ari_core_budget(int threads, int ranks);
