/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/comm/comm_impl.h"
#include "ref/core/lane.h"

/* Synchronises the ranks of one process. A world has ranks and one first failure; a group of its ranks synchronises for
 * one collective after the other. This file knows nothing of how data moves: a communicator enters, moves, and leaves.
 *
 * Invariants
 * - A collective is agreed upon by all members before any data moves: the last member to enter compares all calls.
 * - Until then a member's wait ends at a failure anywhere in the world, or at the world's timeout.
 * - Once agreed, a member leaves only when all have come to leave: one that left half-way would free memory that others
 *   still read. Between agreement and end no member waits for anything but other members in the same collective; what
 *   fails elsewhere does not end it.
 * - A collective is broken off where a member cannot do its part (ari_member_break), or waits in it while nothing moves
 *   (no step, no pulse, no leaving of any member) for the world's timeout. Either fails the world first. From then on
 *   ari_member_await is false on every member; each touches no other's memory any more and comes to leave, a rank that
 *   was killed or stalled (ari_member_hold) as well. Shared work (ari_group_share) goes on to its end instead: nobody
 *   leaves it before all parts are done.
 * - A collective ends alike on all members: leave returns AR_OK on every one, or an error on every one. It is decided
 * by the last to come: a break-off after that is none.
 * - The first failure is kept; whatever follows is a consequence of it. */
typedef struct ari_world ari_world;
typedef struct ari_group ari_group;

/* A line of the table of ranks. */
typedef struct ari_rank_row {
    char current[96]; /* the collective in which the rank was */
    char group[32];   /* ranks of the group; "" if the rank was in no collective */
    double waiting_s; /* seconds since the rank had entered the collective */
} ari_rank_row;

/* A rank's activity when the world failed. */
typedef struct ari_rank_view {
    char last_finished[96]; /* last collective that the rank finished, "all_reduce #12 layers.0.mlp.down_proj", or
                               "none" */
    ari_rank_row
        current_row; /* everything that the rank was in, the oldest first, to which group and time belong; "running"
                        between collectives, "returned" at the end; ends in "; ..." if cut off */
} ari_rank_view;

/* --- world -------------------------------------------------------------------------------------------------------- */

/** Creates a world of `ranks` ranks (1 to 4096) with the group of all of them. timeout_ns: longest wait for a peer.
 *  instruments: copied; NULL: none. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_world_create(ari_world **out, int ranks, uint64_t timeout_ns,
                                        const ari_instruments *instruments);
/** Destroys a world. No rank may be in a call, and no member of its groups may be used afterwards. */
void ari_world_destroy(ari_world *w);
ari_group *ari_world_group(ari_world *w);
/** Returns true if every rank had a core when the world was created; the same for all ranks. */
bool ari_world_has_cores(const ari_world *w);
/** Ends the world for a reason, unless it has ended. `rank` failed and gets `st`, and so do the members of `group`
 *  (NULL: none); every other rank gets AR_ERR_ABORTED. Wakes all waiting ranks. */
void ari_world_fail(ari_world *w, int rank, const ari_group *group, ar_status st, const char *reason);
/** AR_OK, or the first failure. */
ar_status ari_world_status(const ari_world *w);
/** Returns the first failure: one line, then the table of ranks; "" if none. Valid while the world lives. */
const char *ari_world_error(const ari_world *w);
/** Records that the rank's function returned with this status, so no rank waits for it any longer. An error ends the
 *  world, unless it is a consequence of an earlier failure. */
void ari_world_returned(ari_world *w, int rank, ar_status st, const char *message);
/** Returns the rank's activity at the first failure; zeroes if there is no failure. */
const ari_rank_view *ari_world_view(const ari_world *w, int rank);
/** Counts the collectives in which the rank takes part, over all its groups: 1, 2, ... */
uint64_t ari_world_number(ari_world *w, int rank);

/* --- group -------------------------------------------------------------------------------------------------------- */

enum { ARI_TAG_BYTES = 72 };

/* A collective that a rank is in, for reports. */
typedef struct ari_activity {
    ari_kind kind;
    const ari_group *group; /* NULL: no group */
    uint64_t seq;           /* number of the collective in the group */
    uint64_t since_ns;
    char tag[ARI_TAG_BYTES];           /* a copy, since the call's tag may be gone when a report is written */
    struct ari_activity *next, **link; /* next in the rank's list, the oldest first; link: the pointer to this
                                          activity */
} ari_activity;

/* One member of a group. Used by one thread at a time. It must not move between init and fini. */
typedef struct ari_member {
    ari_group *group;
    int index;             /* rank in the group */
    int rank;              /* rank in the world */
    uint64_t seq;          /* collectives entered */
    uint64_t leaves;       /* how many of these ended in ari_member_leave */
    atomic_int busy;       /* 1 during a call, to detect use by two threads */
    ari_activity activity; /* in the list of the rank's activities during a call */
    ari_record record;     /* of the current collective if the lane is recorded */
    uint64_t paced_ns;     /* earliest end by the real clock if links are paced; 0: at once */
} ari_member;

/** A new group of members of the world, in this order. Borrows `ranks`. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_group_create(ari_group **out, ari_world *w, const int *ranks, int n);
int ari_group_size(const ari_group *g);
ari_world *ari_group_world(const ari_group *g);
int ari_group_rank(const ari_group *g, int index); /* Returns a member's rank in the world. */
/** Returns the call of member `index` with its communicator. Valid between that member's enter and leave. */
const ari_call *ari_group_call(const ari_group *g, int index);
ar_comm *ari_group_comm(const ari_group *g, int index);
/** The members of `color` in an agreed split, in the order of (key, rank). Returns their number. members: [n]. */
int ari_group_members_of(const ari_group *g, int color, int *members);

void ari_member_init(ari_member *m, ari_group *g, int index);
/** Removes the member from its group. The group ends with its last member. */
void ari_member_fini(ari_member *m);

/* Function that the last member to arrive runs for all members while they wait. If it fails, the world ends with its
 * error. If another rank ends the world while it runs, each waiting member calls undo (unless NULL) for itself. */
typedef struct ari_alone {
    ar_status (*run)(ari_group *g, void *arg);
    void *arg;
    void (*undo)(ar_comm *c);
} ari_alone;

/** Enters a collective with `call`. Returns when every member has entered with the same call and `alone` (unless NULL)
 *  has run on one of them. Then every member calls the same one of ari_member_leave, ari_member_leave_shared and
 *  ari_member_done.
 *  Errors: AR_ERR_MISMATCH, AR_ERR_TIMEOUT, AR_ERR_ABORTED, or those of alone; then the member has left and no data
 *  moves. */
AR_NODISCARD ar_status ari_member_enter(ari_member *m, ar_comm *c, const ari_call *call, const ari_alone *alone);
/** Leaves when every member is ready to leave, so that no member reads this one's memory any more. Errors: those of
 *  ari_member_enter if the collective was aborted, which then was so on every member. */
AR_NODISCARD ar_status ari_member_leave(ari_member *m);
/** Leaves at once, for collectives whose work one member has done. */
void ari_member_done(ari_member *m);

/* Largest number of parts of shared work. There are as many parts as members, and any member may do a part. A member
 * leaves when all parts are done, without waiting for members that have not begun one. */
enum { ARI_MAX_PARTS = 64 };

/** Called in the ari_alone of a shared collective, before any part has begun. */
void ari_group_share(ari_group *g);
/** Returns the next part that no member has begun, 0 .. N-1, which this member then does; -1: all have begun. The same
 *  core is offered the same parts first each time, because its cache may still hold their data. */
int ari_member_next_part(ari_member *m);
void ari_member_part_done(ari_member *m);
/** Called instead of ari_member_leave when all parts are done. */
AR_NODISCARD ar_status ari_member_leave_shared(ari_member *m);

/** Exchanges the inputs of a short collective of two ranks that both have a core, instead of entering it: each posts
 *  what the other needs, `bytes` from `src` on, and gets the other's post, which is valid until this member's next
 *  call. NULL: the other rank is late or calls something else, or there is a failure. Then nothing has happened on
 *  either side, and the member enters as usual. */
enum { ARI_SWAP_BYTES = 2048 };
const void *ari_member_swap(ari_member *m, const ari_call *call, const void *src, size_t bytes);
/** Returns true if the members of this group may try to swap; the same for all members. */
bool ari_member_can_swap(const ari_member *m);

/** Publishes what this member has written, as its step number `steps_done`. Each member counts its steps within a
 *  collective from 0. */
void ari_member_advance(ari_member *m, uint64_t steps_done);
/** The member is moving bytes: a long step is no standstill. To be called once in a while. */
void ari_member_pulse(ari_member *m);
/** Waits until member `index` has done this many steps. Only between enter and leave. Returns false if the collective
 *  was aborted; the member then must not access other members' memory and leaves. */
AR_NODISCARD bool ari_member_await(ari_member *m, int index, uint64_t steps_done);
/** Aborts the collective and ends the world with `st` and `why`, unless it has ended; the members of the group get
 *  `st`. Called between enter and leave, or in an ari_alone, which then returns an error. The caller must not access
 *  other members' memory afterwards, and leaves as usual. */
void ari_member_break(ari_member *m, ar_status st, const char *why);

/* Functions for ranks that are late or lost: before entering, or within a collective followed by ari_member_break. */

/** Describes the collective that the member is in or about to enter: "all_reduce(F32, count 8, sum) 'x', collective #3
 *  of ranks 0-3". */
void ari_member_describe(const ari_member *m, const ari_call *call, char *text, size_t size);
/** Waits for this time, or until the world has failed. */
void ari_member_sleep(ari_member *m, uint64_t ns);
/** Waits until the world has failed. If every other rank has returned or waits here too, no rank is left to notice:
 *  then it ends the world itself after the timeout with AR_ERR_TIMEOUT and `why`. */
void ari_member_hold(ari_member *m, const char *why);
