/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Deterministic scheduling: the lanes of a world run one at a time, and wherever a lane could wait or be overtaken, a
 * seed determines which lane continues. Two runs with the same seed make the same choices, so a rare order of events
 * can be replayed by its seed.
 *
 * The scheduler has its own clock, which stands still while any lane can run and jumps to the earliest deadline when
 * all lanes wait. A timeout is therefore reached at once, and only if nothing else can happen.
 *
 * A lane must not give up its turn while it holds a lock that another lane may need: that lane would wait for the lock
 * with the turn, unnoticed by the scheduler. */
typedef struct ari_scheduler ari_scheduler;
typedef struct ari_turn ari_turn; /* one lane's state in the scheduler */

AR_NODISCARD ar_status ari_scheduler_create(ari_scheduler **out, uint64_t seed);
/** Ends the scheduler. Remaining lanes (of queues that a rank did not destroy) continue under the operating system. The
 *  last of them frees the memory. Accepts NULL. */
void ari_scheduler_destroy(ari_scheduler *s);
/** Gets the number of choices so far and a hash of them, which are equal for equal runs. */
void ari_scheduler_choices(ari_scheduler *s, uint64_t *choices, uint64_t *hash);
/** The scheduler's time; never 0. */
uint64_t ari_scheduler_now_ns(ari_scheduler *s);

/* The condition for which a lane waits: *word != seen, or *other_word != other_seen, or the scheduler's clock reaches
 * the deadline. Only lanes of the same scheduler change the words. */
typedef struct ari_turn_until {
    const _Atomic uint64_t *word, *other_word; /* other_word may be NULL: ignored */
    uint64_t expected, other_seen;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    bool gives_up;        /* true if the waiter can handle a word that no lane will ever change */
} ari_turn_until;
typedef enum ari_turn_end {
    ARI_TURN_CHANGED, /* a word, or the time */
    ARI_TURN_STUCK,   /* no lane can continue, and none has a deadline; this lane was chosen to give up */
    ARI_TURN_FREE     /* the world is over, and the lane has to wait itself */
} ari_turn_end;

/** Returns the next number of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"),
 *  for choices that a seed reproduces on every machine. Tensors use Philox. */
static inline uint64_t ari_splitmix(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
