/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_DUMP_LISTENER_H
#define ANYRANK_DUMP_LISTENER_H

#include "anyrank/context.h"
#include "anyrank/dump.h"
#include "anyrank/parallel.h"

AR_BEGIN_DECLS

/* Collects the values that a rank reports to its tap (context.h) and writes them as the rank's file of a dump (dump.h):
 *
 *     ar_dump_listener *listener;
 *     AR_TRY(ar_dump_listener_create(&listener, NULL));
 *     const ar_ctx_options o = {.device = device, .tp = tp, .tap = ar_dump_listener_tap, .tap_user = listener};
 *     ...
 *     const ar_dump_place place = ar_dump_place_of(&parallel, rank);
 *     AR_TRY(ar_dump_listener_write(listener, "dump", &place, NULL, 0));
 *     ar_dump_listener_destroy(listener);
 *
 * Each rank has its own listener. */
typedef struct ar_dump_listener ar_dump_listener;

/** Which reported values a listener collects. */
typedef struct ar_dump_listener_options {
    const char *passes; /* passes to collect, as letters of ar_tap_event.pass, such as "fb"; NULL: all */
    bool first_copies;  /* collects only the first copy of replicated values; false: every rank collects its own */
    /* Callback that returns true if a reported value is to be collected; NULL: all are. */
    bool (*wants)(void *user, const ar_tap_event *event);
    void *wants_user; /* borrowed until ar_dump_listener_destroy */
} ar_dump_listener_options;

/** Creates a listener; the caller releases *out with ar_dump_listener_destroy. options NULL: collects everything. */
AR_NODISCARD ar_status ar_dump_listener_create(ar_dump_listener **out, const ar_dump_listener_options *options);
/** Frees a listener. Accepts NULL. */
void ar_dump_listener_destroy(ar_dump_listener *l);
/** The tap function (ar_tap_fn) of a listener; user: the rank's ar_dump_listener. Copies the rank's part of the value
 *  under its name with a suffix for the pass ("lm_head:fwd"), followed by "@N" in steps N >= 2. The parts that a rank
 *  reports for several micro-batches are merged if their rows are adjacent. Elements of the local tensor outside of all
 *  boxes (the rest of a ZeRO shard) are omitted, or zero if boxes lie around them. Errors: AR_ERR_DTYPE (not fp32),
 *  AR_ERR_UNSUPPORTED (more than AR_MAX_BOXES boxes after merging), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_dump_listener_tap(void *user, const ar_tap_event *event);
/** Writes the rank's file to an existing folder, with ar_dump_write. metadata: n_meta further key-value pairs,
 *  [2*n_meta]. Errors: those of ar_dump_write. */
AR_NODISCARD ar_status ar_dump_listener_write(const ar_dump_listener *l, const char *folder, const ar_dump_place *place,
                                              const char *const *metadata, size_t n_meta);

/** Returns the place of a rank in a layout: the mesh has the layout's extents as dimensions, in the order of
 *  ar_parallel_rank; extents of 1 are left out, except dp and tp. */
ar_dump_place ar_dump_place_of(const ar_parallel *parallel, int rank);

AR_END_DECLS
#endif
