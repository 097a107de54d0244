/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRACE_H
#define ANYRANK_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* A trace: the timeline of one run on the simulated cluster (sim.h). Each rank has a track for its computation and one
 * for each communication queue. Tracks contain spans (named intervals: modules, and those that a program marks),
 * collectives with bytes and tags, and transfers between ranks. Times are on two clocks: the real one of this machine,
 * and the virtual one of the modelled cluster (ar_sim_options.cluster). */
typedef struct ar_trace ar_trace;
typedef enum ar_trace_clock { AR_TRACE_REAL, AR_TRACE_VIRTUAL } ar_trace_clock; /* which of the two clocks */

/** Creates an empty trace, to be set in the ar_sim_options of one run. The caller releases *out with ar_trace_destroy.
 *  Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_create(ar_trace **out);
/** Frees a trace, which no run may be using. Accepts NULL. */
void ar_trace_destroy(ar_trace *t);

/** ar_trace_begin and ar_trace_end begin and end a span on the calling rank's thread. Spans nest up to 64 deep; deeper
 *  ones are not recorded. The first 255 bytes of `name` are copied. Outside of a traced run they do nothing. If memory
 *  runs out, recording stops, and writing the trace reports it. */
void ar_trace_begin(const char *name);
void ar_trace_end(void);
/** Advances the calling rank's virtual clock by the time that `flops` floating-point operations take on the cluster. */
void ar_trace_work(double flops);

/** Writes the trace as a JSON file for Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each rank, a
 *  thread for each track, arrows for transfers between ranks, bytes in flight as a counter. Its `otherData` holds title
 *  (NULL: none), clock and summary, for the HTML page of `python -m anyrank.page`. The file is written atomically.
 *  Errors: AR_ERR_ARG (the virtual clock of a run without a cluster), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_write_json(const ar_trace *t, ar_trace_clock clock, const char *title,
                                           const char *path);

/* An entry of the critical path: all of a rank's intervals with the same description. */
typedef struct ar_trace_part {
    char what[96]; /* a collective's kind and tag, "all_reduce layers.0.mlp.down_proj"; for computation the innermost
                      span's name, "compute" outside of spans; or "wait" */
    int rank;
    double seconds; /* total time of these intervals on the critical path */
} ar_trace_part;
/* Summary of a run by one clock. Times are in seconds. */
typedef struct ar_trace_summary {
    double seconds;       /* length of the run: from the first event's begin to the last one's end */
    double compute;       /* compute time of the rank that computes longest. Virtual clock: its ar_trace_work; real
                             clock: time of its main thread outside of collectives and waits */
    double communication; /* time with a collective in flight, waiting for peers included: of the rank with the most */
    double exposed;       /* communication time in which the rank computes nothing: of the rank with the most */
    double overlap;       /* 1 - exposed / communication of the rank with most communication; 0 without any */
    uint64_t bytes;       /* moved between ranks */
    size_t collectives;   /* number of calls, all ranks together */
    /* The critical path, traced from the last end back to the first begin through whatever each event waited for:
     * earlier work of its rank, the last rank to join a collective, a task of a queue, or the thread that enqueued it.
     * The three times add up to `seconds`. path_wait: by the real clock, delays between the end of the awaited event
     * and the continuation; by the virtual clock, delays from injected transport faults. */
    double path_compute, path_communication, path_wait;
    ar_trace_part longest[8]; /* the largest entries of the critical path, largest first */
    size_t parts;             /* entries of longest[] */
} ar_trace_summary;
/** Computes the summary of a trace by one clock. Errors: AR_ERR_ARG (the virtual clock of a run without a cluster),
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_summarise(ar_trace_summary *s, const ar_trace *t, ar_trace_clock clock);

AR_END_DECLS
#endif
