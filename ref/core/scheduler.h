/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_SCHEDULER_H
#define ARI_CORE_SCHEDULER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Deterministic scheduling: the lanes of a world run one at a time, and wherever one could wait or be overtaken a seed
 * decides who goes on. Two runs with one seed make the same choices, so an order of events that a real cluster shows
 * once a year is a number to replay.
 *
 * Time is the scheduler's own: it stands still while any lane can run, and jumps to the earliest deadline when all of
 * them wait. So a timeout is reached at once, and only where nothing else could happen. */
typedef struct ari_scheduler ari_scheduler;
typedef struct ari_turn ari_turn; /* one lane's place in it */

AR_NODISCARD ar_status ari_scheduler_create(ari_scheduler **gives, uint64_t seed);
/** No lane may be left. Accepts NULL. */
void ari_scheduler_destroy(ari_scheduler *s);
/** Choices made so far, and a hash of them: equal for equal runs. */
void ari_scheduler_choices(const ari_scheduler *s, uint64_t *choices, uint64_t *hash);

/** A place for a lane that is about to start; runnable from now on. Gives; destroy after leave. */
AR_NODISCARD ar_status ari_turn_create(ari_turn **gives, ari_scheduler *s);
void ari_turn_destroy(ari_turn *t);
/** Returns when it is this lane's turn for the first time. */
void ari_turn_enter(ari_turn *t);
/** The lane has ended: passes the turn on. */
void ari_turn_leave(ari_turn *t);
/** The lane could go on, and so could others: chooses among all. */
void ari_turn_yield(ari_turn *t);
/** The lane waits until *word != seen, or *other != other_seen (NULL: not looked at), or the scheduler's time reaches
 * the deadline. The words are only changed by lanes of the same scheduler. */
void ari_turn_wait(ari_turn *t, const _Atomic uint64_t *word, uint64_t seen, const _Atomic uint64_t *other,
                   uint64_t other_seen, uint64_t deadline_ns);
/** The lane is about to wait for the thread of another lane to end (pthread_join): the others run until that one has
 *  left. */
void ari_turn_join(ari_turn *t, const ari_turn *ends);
/** The scheduler's time. */
uint64_t ari_turn_now_ns(const ari_turn *t);

#endif
