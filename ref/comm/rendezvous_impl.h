/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdio.h>

#include "ref/comm/rendezvous.h"
#include "ref/core/text.h"
#include "ref/core/wait.h"

/* Declarations shared by world.c, group.c, rendezvous.c and agreement.c, and by process/, which compares calls and
 * reports the ranks' activities in the same words.
 *
 * Locks are taken in this order: a world's, then a rank's or a group's; never two of a kind. */

enum { ARI_CACHE_LINE = 64 };
/* Flag in a group's count of leaves: a collective was aborted, and the group can no longer be used. */
#define ARI_BROKEN ((uint64_t)1 << 63)

/* State of a rank's function. A rank that returns with an error ends the world itself, so other ranks need not report
 * that it is missing. */
typedef enum ari_return { ARI_RUNS, ARI_RETURNED_OK, ARI_RETURNED_ERROR } ari_return;

typedef struct ari_rank_state {
    _Alignas(ARI_CACHE_LINE) pthread_mutex_t lock;
    /* guarded by `lock` */
    ari_activity *activities, **now_end;
    ari_activity last_finished; /* without a group: no activity */
    uint64_t idle_since_ns;
    /* the following field is not guarded */
    _Atomic uint64_t number; /* number of collectives, over all groups */
    atomic_int hold_count;   /* threads in ari_member_hold */
    _Atomic(ari_return) returned;
} ari_rank_state;

/* A rank's lines of the table of ranks. */
typedef struct ari_rank_lines {
    ari_rank_view view;
    ari_rank_row *rows; /* [row_count]; NULL if memory was short, then the view has the facts */
    size_t row_count;
} ari_rank_lines;

struct ari_world {
    ari_instruments instruments;
    int ranks;
    int cores;  /* number of cores at creation */
    bool spins; /* true if every rank has a core, so that waiting ranks spin */
    uint64_t timeout_ns;
    ari_rank_state *rank;
    ari_rank_lines *lines; /* [ranks] written at the first failure, before `st` */
    ari_group *full_group;
    _Atomic(ar_status) st;    /* the first failure, stored after everything that describes it */
    _Atomic uint64_t signals; /* counts failures, returns and departures: a waiter that has seen this number need not
                                 check again */
    pthread_mutex_t lock;
    /* guarded by `lock` */
    ari_group *groups; /* list */
    uint64_t groups_made;
    int failed_rank;
    uint64_t failed_group; /* id of the failed group; 0: none */
    char line[768];        /* description of the failure */
    char *message;         /* description and table; NULL if memory was short */
};

/* Post of a member of a group of two for a swap, without the input. It fits one cache line, so that it crosses from
 * core to core at once. */
typedef struct ari_post {
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t seq; /* sequence number of the call, written last */
    uint64_t signature, count, tag;                /* kind, dtype and operation; number of elements; hash of the tag */
} ari_post;
typedef struct ari_post_data {
    _Alignas(ARI_CACHE_LINE) char bytes[ARI_SWAP_BYTES];
} ari_post_data;

typedef struct ari_slot {
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t entered; /* the sequence number of the last collective entered */
    atomic_bool is_dropped;                            /* true if its member was dropped */
    atomic_bool waits;                                 /* true if it has been waiting for other members in an agreed
                                                          collective for some time */
    ari_call call;                                     /* other members read it only between agreement and end */
    ar_comm *comm;
    uint64_t virtual_begin_ns, virtual_end_ns; /* end: written by the last member before the gate opens */
    int virtual_from;                          /* world rank whose arrival determined the end; written at the same
                                                  time */
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t steps;
    _Atomic uint64_t pulses;                               /* counts from the beginning of the group, never reset */
    ari_post post[2];                                      /* indexed by the parity of the sequence number */
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t turned_back; /* the last posted call from which the member withdrew */
    ari_post_data *data;                                   /* [2] data of the posts; NULL before the first */
} ari_slot;

struct ari_group {
    ari_world *world;
    uint64_t id; /* number of the group in the world: 1, 2, ... */
    int n;
    int *rank; /* [n] world ranks */
    ari_slot *slot;
    /* guarded by the world's lock */
    ari_group *next, **link; /* link: the pointer that points to this group */
    int members_left;
    /* Gate: (number of the last agreed collective << 17) | (dead << 16) | number of members that have entered the next
     * one. */
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t gate;
    /* Number of members that have started to leave, or of parts done instead, since creation | ARI_BROKEN. The flag is
     * set before the last member of the collective arrives, so that all members see it, or none. */
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t leaves;
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t parts; /* bit set of the started parts of a shared collective */
    _Alignas(ARI_CACHE_LINE) ari_sleepers sleepers;
    /* Swaps: (last call from which a member withdrew while the other was present << 1) | whether both swap. */
    _Alignas(ARI_CACHE_LINE) _Atomic uint64_t decided;
    /* Facts about the last agreed collective, written by its last member before the gate opens. */
    int last_rank, virtual_last; /* world ranks of the last members to arrive on the two clocks */
    uint64_t virtual_begin_ns;   /* time at which the last member arrived */
    uint64_t paced_ns;           /* the same by the real clock if links are paced */
};

/** Compares the members' calls. Returns AR_OK, or AR_ERR_MISMATCH with a line in `why` that names the first two members
 *  that disagree, their calls, and the values that differ. */
AR_NODISCARD ar_status ari_calls_compare(const ari_group *g, char *why, size_t size);
/** "all_reduce(F32, count 8, sum)" for a group of n. */
void ari_call_describe(const ari_call *call, int n, char *text, size_t size);

/** Records that the member has finished a call that ari_world_begin has not seen. */
void ari_world_swapped(ari_member *m, const ari_call *call);
/** Takes what each rank is doing now, once. The world's lock held. */
void ari_world_take_views(ari_world *w);
/** Returns `line` and the table of these ranks; the caller frees the text. NULL: memory is short. */
char *ari_rank_table(const char *line, const ari_rank_lines *lines, int ranks);
/** Writes "all_reduce #12 layers.0.mlp.down_proj": kind, number and tag, cut off if too long. */
int ari_activity_name(char *text, size_t size, ari_kind kind, uint64_t seq, const char *tag);
/** Returns the status of a rank's call in a group (NULL: none) after a failure, with its message. */
ar_status ari_world_echo(ari_world *w, int rank, const ari_group *g);
/** Wakes waiting members of g (NULL: of all groups) to check for a change. */
void ari_world_signal(ari_world *w, ari_group *g);

void ari_group_wake(ari_group *g);
void ari_group_free(ari_group *g);
