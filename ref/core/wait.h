/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* Waiting for a word of memory to change: spinning while every waiting thread has a core, then yielding, then asleep;
 * under a deterministic scheduler, giving the turn away. The only place in which lanes wait. */

/* Sleeping waiters of some words. */
typedef struct ari_sleepers {
    atomic_int count; /* written under `lock` */
    pthread_mutex_t lock;
    pthread_cond_t changed;
} ari_sleepers;
/** Returns an errno value. */
int ari_sleepers_init(ari_sleepers *s);
void ari_sleepers_fini(ari_sleepers *s);
/** To be called after a word was changed (sequentially consistent) for which somebody may sleep here. */
void ari_wake(ari_sleepers *s);

typedef struct ari_wait {
    ari_sleepers *sleepers;
    const _Atomic uint64_t *other_word; /* a second word whose change ends a turn; NULL: none */
    bool spins;                         /* every thread that may wait has a core */
    bool outside;        /* threads that no scheduler knows change the words: waits, its turn in its hands */
    bool gives_up;       /* it has no limit of its own, and its owner looks at `stuck` */
    uint64_t timeout_ns; /* turns do not last longer than that after the first; 0: no limit */
    uint64_t awake_ns;   /* then the thread sleeps; 0: a millisecond */
    bool stuck;          /* set under a deterministic scheduler: nobody will ever change the words */
    unsigned turns;
    uint64_t start_ns, now_ns; /* 0: the clock has not been read yet */
    uint64_t stopped_ns;       /* by which now_ns is behind the clock: while the process was stopped nobody came late */
} ari_wait;

/** Tells the core that its thread spins. */
static inline void ari_wait_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}
/** One turn of waiting for `word` to change from `expected`, or `other` from other_seen; may return for no reason. */
void ari_wait_turn(ari_wait *w, const _Atomic uint64_t *word, uint64_t expected, uint64_t other_seen);
/** True if the timeout is over. */
static inline bool ari_wait_is_over(const ari_wait *w)
{
    return w->timeout_ns && w->start_ns && w->now_ns - w->start_ns >= w->timeout_ns;
}

/** The monotonic clock; a lane under a deterministic scheduler sees the scheduler's. */
uint64_t ari_wait_now_ns(void);
/** The same, behind by some milliseconds at most, for a tenth of the price: for what is told, not for what decides. */
uint64_t ari_wait_coarse_ns(void);
/** The calling thread sleeps until then, or until *word != seen. */
void ari_wait_until(ari_sleepers *sleepers, const _Atomic uint64_t *word, uint64_t expected, uint64_t deadline_ns);
/** A point at which others may overtake the calling lane: a choice for a deterministic scheduler, else nothing. */
void ari_wait_yield(void);
/** The calling lane is about to ask whether something is done, and may ask without end: as above, and takes a
 *  microsecond of a deterministic scheduler's time, so that whoever asks in a loop lets others reach their
 *  deadlines. */
void ari_wait_poll(void);

/** Returns the requested number of threads; for 0 ari_cores. */
int ari_threads(int requested);

/** Threads that the kernels of one of `ranks` rank threads may use out of `threads` for the whole process: an equal
 * share, rounded down, at least 1. So ranks * share <= threads wherever there are at least as many threads as ranks,
 * and one thread a rank otherwise: rank threads and the threads of their kernels never oversubscribe on top of each
 * other. */
int ari_core_budget(int threads, int ranks);
