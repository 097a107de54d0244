/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DUMP_LISTENER_H
#define ANYRANK_DUMP_LISTENER_H

#include "anyrank/context.h"
#include "anyrank/dump.h"
#include "anyrank/parallel.h"

AR_BEGIN_DECLS

/* Collects the values that a rank reports to taps, and writes them as that rank's file of a dump (pytorch.md):
 *
 *     ar_dump_listener *listener;
 *     AR_TRY(ar_dump_listener_create(&listener, NULL));
 *     const ar_ctx_options o = {.device = device, .tp = tp, .tap = ar_dump_listener_tap, .tap_user = listener};
 *     ...
 *     const ar_dump_place place = ar_dump_place_of(&parallel, rank);
 *     AR_TRY(ar_dump_listener_write(listener, "dump", &place, NULL, 0));
 *     ar_dump_listener_destroy(listener);
 *
 * One for each rank. */
typedef struct ar_dump_listener ar_dump_listener;

typedef struct ar_dump_listener_options {
    const char *passes; /* those to keep, as "fb": the letters of ar_tap_event; NULL: all */
    bool first_copies;  /* of replicated values the first copy alone; false: each rank keeps its own */
    /* True if a reported value is to be kept; NULL: all are. */
    bool (*wants)(void *user, const ar_tap_event *event);
    void *wants_user; /* borrowed until ar_dump_listener_destroy */
} ar_dump_listener_options;

/** Gives; ar_dump_listener_destroy. options NULL: everything. */
AR_NODISCARD ar_status ar_dump_listener_create(ar_dump_listener **out, const ar_dump_listener_options *options);
/** Accepts NULL. */
void ar_dump_listener_destroy(ar_dump_listener *l);
/** An ar_tap_fn; user: the rank's ar_dump_listener. Copies what the rank holds: name and suffix ("lm_head:fwd"), with
 *  "@N" behind it from step 2 on. A rank that goes through its samples in micro-batches reports a tensor once for each;
 *  neighbouring rows become one part. Elements of the local tensor that stand in no box (a share of a gradient) are
 *  left out, or zero where others lie around them. Errors: AR_ERR_DTYPE (not fp32), AR_ERR_UNSUPPORTED (reports that
 *  make more than AR_MAX_BOXES boxes), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_dump_listener_tap(void *user, const ar_tap_event *event);
/** Writes the rank's file into a folder that is there: ar_dump_write. metadata: n_meta pairs beside the placement's.
 *  Errors: those of ar_dump_write. */
AR_NODISCARD ar_status ar_dump_listener_write(const ar_dump_listener *l, const char *folder, const ar_dump_place *place,
                                              const char *const *metadata, size_t n_meta);

/** Position of a rank in a layout, whose extents form a mesh in the order of ar_parallel_rank; of the extents of one
 *  rank it has dp and tp alone. */
ar_dump_place ar_dump_place_of(const ar_parallel *p, int rank);

AR_END_DECLS
#endif
