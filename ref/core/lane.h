/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/core/record.h"
#include "ref/core/scheduler.h"

/* Lane: a thread of a simulated rank, its main thread or one of its queues. Everything that watches or drives a run
 * from outside (traces, virtual time, the scheduler) is attached to the calling thread's lane. A thread without a lane,
 * as in a plain program, pays one test of a pointer. */

struct ari_group;

/* Instruments that observe and control a world, which borrows them. */
typedef struct ari_instruments {
    ar_trace *trace;          /* NULL: nothing is recorded */
    ari_scheduler *scheduler; /* NULL: the system's */
    ari_rates rates;          /* rates of a rank in virtual seconds; flops 0: no virtual time */
    bool paced;               /* true if a collective also takes its virtual time on the real clock */
    /* Computes the virtual time of a collective. The last member to enter calls it before any member continues. From
     * the members' calls and their virtual_begin_ns it sets each member's virtual_end_ns and virtual_from, and the
     * group's virtual_last and virtual_begin_ns. NULL: no virtual time. */
    void (*virtual_cost)(void *user, struct ari_group *g);
    void *user;
} ari_instruments;

typedef struct ari_lane {
    const ari_instruments *instruments; /* a copy, since a queue may outlive the world */
    int rank, track;          /* track 0: the rank's main thread; 1, 2, ...: its queues in order of creation */
    char name[32];            /* name of the track: "main", or the queue's name */
    uint64_t virtual_ns;      /* the lane's virtual clock; 0 without virtual time */
    double virtual_rest;      /* fraction of a nanosecond of work that rounding has left out so far */
    ari_recording *recording; /* NULL: nothing is recorded */
    ari_turn *turn;           /* NULL: the system's scheduler */
    struct ari_lane *main;    /* the rank's main lane; on track 0 the lane itself */
    atomic_int tracks;        /* on track 0: number of tracks of the rank so far, including itself */
    ari_instruments instruments_copy;
} ari_lane;

/** The calling thread's; NULL outside a simulated rank. */
ari_lane *ari_lane_self(void);

/** Creates a lane for a thread that is about to start: by the world's runner for a rank's main thread (parent NULL), or
 *  by a thread of that rank (parent: its lane) for a queue. Release it with ari_lane_destroy after joining the thread.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_lane_create(ari_lane **out, ari_lane *parent, const ari_instruments *instruments, int rank,
                                       const char *name);
/** Accepts NULL. */
void ari_lane_destroy(ari_lane *l);
/** Make the calling thread the lane (NULL: nothing) until it leaves. With a scheduler, enter returns when it is the
 *  lane's turn, and leave passes the turn on. */
void ari_lane_enter(ari_lane *l);
void ari_lane_leave(ari_lane *l);

/** The calling thread is about to wait for the lane's thread to end (pthread_join). NULL: nothing. */
void ari_lane_join(const ari_lane *l);

/** Returns `base_ns` + `ns`, rounded to the nearest integer and limited to some centuries, so that a virtual clock does
 *  not overflow. NaN: returns `base_ns`. */
static inline uint64_t ari_virtual_after(uint64_t base_ns, double ns)
{
    const uint64_t latest = (uint64_t)1 << 62;
    const uint64_t delta_ns = ns >= 0x1p62 ? latest : ns > 0 ? (uint64_t)(ns + 0.5) : 0;
    return delta_ns > latest - (base_ns < latest ? base_ns : latest) ? latest : base_ns + delta_ns;
}

/** Moves the lane's virtual clock to at least `virtual_ns`. NULL: nothing. */
static inline void ari_lane_reach(ari_lane *l, uint64_t virtual_ns)
{
    if (l && l->virtual_ns < virtual_ns)
        l->virtual_ns = virtual_ns;
}
static inline bool ari_lane_is_virtual(const ari_lane *l)
{
    return l && l->instruments->rates.flops > 0;
}
