/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Deterministic scheduling: the lanes of a world run one at a time, and wherever one could wait or be overtaken a seed
 * decides who goes on. Two runs with one seed make the same choices, so an order of events that a real cluster shows
 * once a year is a number to replay.
 *
 * Time is the scheduler's own: it stands still while any lane can run, and jumps to the earliest deadline when all of
 * them wait. So a timeout is reached at once, and only where nothing else could happen.
 *
 * A lane never gives its turn away while it holds a lock that another lane may need: that one would wait for the lock,
 * unseen by the scheduler, with the turn in its hands. */
typedef struct ari_scheduler ari_scheduler;
typedef struct ari_turn ari_turn; /* one lane's place in it */

AR_NODISCARD ar_status ari_scheduler_create(ari_scheduler **out, uint64_t seed);
/** The world is over: lanes that are left (of queues that a rank forgot to destroy) run as the system lets them. The
 *  memory goes with the last of them. Accepts NULL. */
void ari_scheduler_destroy(ari_scheduler *s);
/** Choices made so far, and a hash of them: equal for equal runs. */
void ari_scheduler_choices(ari_scheduler *s, uint64_t *choices, uint64_t *hash);
/** The scheduler's time; never 0. */
uint64_t ari_scheduler_now_ns(ari_scheduler *s);

/* Condition for which a lane waits: *word != seen, or *other_word != other_seen, or the scheduler's time reaches the
 * deadline. The words are only changed by lanes of the same scheduler. */
typedef struct ari_turn_until {
    const _Atomic uint64_t *word, *other_word; /* other: NULL: not looked at */
    uint64_t expected, other_seen;
    uint64_t deadline_ns; /* UINT64_MAX: none */
    bool gives_up;        /* whoever waits can do something about a word that nobody will change any more */
} ari_turn_until;
typedef enum ari_turn_end {
    ARI_TURN_CHANGED, /* a word, or the time */
    ARI_TURN_STUCK,   /* no lane can continue, and none has a deadline: this one was chosen to give up */
    ARI_TURN_FREE     /* the world is over: the lane has to wait by itself */
} ari_turn_end;

/** The next number of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"): for
 *  choices that a seed repeats on every machine. Tensors are drawn by Philox. */
static inline uint64_t ari_splitmix(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}
