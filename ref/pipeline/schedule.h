/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/schedule.h"
#include "ref/core/size.h"
#include "ref/pipeline/schedule_private.h"

ARI_OWNER(ar_pipeline_schedule, ari_pipeline_schedule_destroy)

/* A rank's list of operations during its construction. */
typedef struct ari_pp_list {
    ar_pp_operation *operations;
    size_t count, capacity;
} ari_pp_list;

struct ar_pipeline_schedule {
    ar_pipeline_shape shape;
    ari_pp_list *lists; /* [ranks] */
};

/** Creates a schedule with empty lists, which the caller owns. Errors: AR_ERR_ARG (the shape), AR_ERR_OVERFLOW,
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_schedule_begin(ar_pipeline_schedule **out, ar_pipeline_shape shape);
/** Errors: AR_ERR_OVERFLOW, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_pp_append(ari_pp_list *list, ar_pp_kind kind, int stage, int micro);

/** Checks the operation lists of a schedule that comes from outside, and inserts transfers if the lists have none.
 *  Errors: those of ari_pipeline_schedule_from_lists. */
AR_NODISCARD ar_status ari_schedule_finish(ar_pipeline_schedule *s);

/* Directions of transfers: a stage's output to the next stage, and its gradient back. */
typedef enum ari_pp_direction { ARI_PP_ACTIVATION, ARI_PP_GRADIENT, ARI_PP_DIRECTIONS } ari_pp_direction;

static inline ar_pp_kind ari_pp_send(ari_pp_direction d)
{
    return d == ARI_PP_ACTIVATION ? AR_PP_SEND_ACTIVATION : AR_PP_SEND_GRADIENT;
}
static inline ar_pp_kind ari_pp_recv(ari_pp_direction d)
{
    return d == ARI_PP_ACTIVATION ? AR_PP_RECV_ACTIVATION : AR_PP_RECV_GRADIENT;
}
static inline bool ari_pp_computes(ar_pp_kind k)
{
    return k <= AR_PP_BACKWARD_WEIGHT;
}
static inline bool ari_pp_receives(ar_pp_kind k)
{
    return k == AR_PP_RECV_ACTIVATION || k == AR_PP_RECV_GRADIENT;
}
static inline ari_pp_direction ari_pp_direction_of(ar_pp_kind k)
{
    return k == AR_PP_FORWARD || k == AR_PP_SEND_ACTIVATION || k == AR_PP_RECV_ACTIVATION ? ARI_PP_ACTIVATION
                                                                                          : ARI_PP_GRADIENT;
}
/** Return the stage from which a stage receives in this direction, and the stage to which it sends; -1: none. */
static inline int ari_pp_source(const ar_pipeline_shape *s, ari_pp_direction d, int stage)
{
    const int source_stage = d == ARI_PP_ACTIVATION ? stage - 1 : stage + 1;
    return source_stage < s->stages ? source_stage : -1;
}
static inline int ari_pp_target(const ar_pipeline_shape *s, ari_pp_direction d, int stage)
{
    return ari_pp_source(s, d == ARI_PP_ACTIVATION ? ARI_PP_GRADIENT : ARI_PP_ACTIVATION, stage);
}
/** Returns true if values between the two stages move between ranks; false also if one of the stages does not exist. */
static inline bool ari_pp_on_different_ranks(const ar_pipeline_shape *s, int stage, int peer_stage)
{
    return stage >= 0 && peer_stage >= 0 && stage % s->ranks != peer_stage % s->ranks;
}
/** Returns the stage at the other end of a SEND or RECV; -1: nothing is transferred. */
static inline int ari_pp_peer(const ar_pipeline_shape *s, ar_pp_kind k, int stage)
{
    const ari_pp_direction d = ari_pp_direction_of(k);
    const int peer_stage = ari_pp_receives(k) ? ari_pp_source(s, d, stage) : ari_pp_target(s, d, stage);
    return ari_pp_on_different_ranks(s, stage, peer_stage) ? peer_stage : -1;
}
/** Returns true if a computation uses a value from another stage. Only W does not, since its input is on the rank. */
static inline bool ari_pp_takes(ar_pp_kind k)
{
    return ari_pp_computes(k) && k != AR_PP_BACKWARD_WEIGHT;
}
/** The place of a (stage, micro-batch) among all. */
static inline size_t ari_pp_item(const ar_pipeline_shape *s, int stage, int micro)
{
    return (size_t)stage * (size_t)s->micro_batches + (size_t)micro;
}

/* Durations by stage and micro-batch: stage_times[k * stages + stage] applies to micro-batches from first_micro[k] up
 * to first_micro[k + 1]. */
typedef struct ari_pp_timed {
    const ar_pp_times *stage_times;
    const int *first_micro;
    int kinds;
    bool at_once; /* each value is where it is needed at once: transfers are left out */
} ari_pp_timed;
/** Does the same as ari_pipeline_schedule_run for lists that may deadlock: AR_ERR_FORMAT then says which rank waits for
 *  which. times NULL: all durations are zero. */
AR_NODISCARD ar_status ari_schedule_walk(ar_pp_run *out, const ar_pipeline_schedule *s, const ari_pp_timed *times,
                                         ar_pp_event_fn on_event, void *user);
