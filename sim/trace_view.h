/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/comm/call.h"

#include "ref/core/record.h"
#include "ref/core/size.h"

/* Trace in the time of one clock and in display order: lanes by rank and track, records by start, and collectives
 * assembled from the records of their members. */

/* One collective, with those of its members that arrived and are in the trace. */
typedef struct ari_rendezvous {
    size_t first_member, members; /* range in ari_trace_view.members */
    uint64_t came_ns;             /* time at which the last member arrived */
    int last_rank;                /* rank of the last member */
    const ari_record *record;     /* record of the first member; all members agree on op, tag, dtype, count, group
                                     and sequence number */
} ari_rendezvous;

typedef struct ari_rendezvous_member {
    const ari_record *record;
    size_t lane, place; /* location of the record: view->lanes[lane].shown[place] */
} ari_rendezvous_member;

typedef struct ari_view_lane {
    int rank, track;
    const char *name;
    const ari_record **shown; /* [count] */
    size_t *rendezvous;       /* [count] index of the rendezvous for a collective; SIZE_MAX for other records */
    size_t count;
    size_t collectives;
} ari_view_lane;

typedef struct ari_trace_view {
    ar_trace_clock clock;
    uint64_t start_ns, end_ns; /* first begin, last end */
    int ranks;                 /* largest rank of all + 1 */
    bool cut;
    ari_view_lane *lanes;
    size_t lane_count;
    ari_rendezvous_member *members; /* sorted by group, sequence number and rank */
    size_t member_count;
    ari_rendezvous *rendezvous;
    size_t rendezvous_count;
} ari_trace_view;

/** Builds a view. Errors: AR_ERR_ARG (no such clock, or the virtual clock of a run without a cluster), AR_ERR_MEMORY.
 *  The view borrows the trace; the caller ends it also after an error. */
AR_NODISCARD ar_status ari_trace_view_init(ari_trace_view *v, const ar_trace *t, ar_trace_clock clock);
void ari_trace_view_fini(ari_trace_view *v);

/* Returns when the record begins, on the view's clock, from the view's start. */
uint64_t ari_view_begin(const ari_trace_view *v, const ari_record *r);
uint64_t ari_view_end(const ari_trace_view *v, const ari_record *r);
/** Returns how long this member waited for a collective's last member. The rest of the collective is transfer. */
uint64_t ari_view_waiting(const ari_trace_view *v, const ari_rendezvous *m, const ari_record *r);
/** Returns the index of the lane for this rank and track; SIZE_MAX: not in the trace. */
size_t ari_view_lane_of(const ari_trace_view *v, int rank, int track);
/** Returns the member of a rendezvous with this rank; NULL: not in the trace. */
const ari_rendezvous_member *ari_view_member(const ari_trace_view *v, const ari_rendezvous *m, int rank);
/** The ranks of a rendezvous: "0-3, 8". */
void ari_view_ranks(const ari_trace_view *v, const ari_rendezvous *m, char *text, size_t size);

/* Change of the bytes in flight: the bytes of other ranks' memory that a rank reads and writes in a collective, from
 * the moment when the last rank has arrived until its end. */
typedef struct ari_view_flight {
    uint64_t ns; /* time from the view's start */
    int rank;
    int64_t bytes; /* change of the bytes: positive at the begin, negative at the end */
} ari_view_flight;
/** Lists all changes by time; at equal times ends come before begins. Release *out with free(). Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_view_flights(ari_view_flight **out, size_t *count, const ari_trace_view *v);

/* --- the critical path -------------------------------------------------------------------------------------------- */

/* Kinds of a stretch of the critical path. */
typedef enum ari_path_kind { ARI_PATH_COMPUTE, ARI_PATH_COMMUNICATION, ARI_PATH_WAIT, ARI_PATH_KINDS } ari_path_kind;

typedef struct ari_path_step {
    ari_path_kind kind;
    size_t lane;               /* lane of the view on which it ran */
    uint64_t begin_ns, end_ns; /* times from the view's start */
    const ari_record *record;  /* record of a collective, otherwise NULL */
} ari_path_step;

/** Computes the critical path: from the last end back to the first begin, the activity that determined each moment. The
 *  steps are contiguous, the latest first, and together cover the whole run. They are allocated in the arena. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_critical_path(ari_path_step **out, size_t *count, ari_arena *arena, const ari_trace_view *v);
