/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_TRACE_H
#define ANYRANK_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* The timeline of a run of the simulated cluster: for each rank a track of computation and one for each queue that
 * communicates; spans (modules, and whatever a program marks), collectives with bytes and tags, transfers between
 * ranks. Two clocks: the real one of this machine, and the virtual one of the cluster that ar_sim_options describe. */
typedef struct ar_trace ar_trace;
typedef enum ar_trace_clock { AR_TRACE_REAL, AR_TRACE_VIRTUAL } ar_trace_clock;

/** Gives an empty trace, to be named in the ar_sim_options of one run. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_create(ar_trace **out);
/** Not while a run uses it. Accepts NULL. */
void ar_trace_destroy(ar_trace *t);

/** A span of the calling rank's thread, from begin to end; spans nest, 64 deep (deeper ones are left out). `name` is
 *  copied, its first 255 bytes. Outside a traced run: nothing. Where memory runs out the trace ends and says so when it
 *  is written. */
void ar_trace_begin(const char *name);
void ar_trace_end(void);
/** The calling rank has computed so much: its virtual clock goes on by flops / the cluster's rate. */
void ar_trace_work(double flops);

/** Writes what Perfetto (ui.perfetto.dev) and chrome://tracing open: a process for each rank, a thread for each track,
 *  arrows between ranks, bytes in flight as a counter. `otherData` has `title` (NULL: none), the clock and the summary,
 *  for the page that `python -m anyrank.page` makes of it. The file appears whole or not at all.
 *  Errors: AR_ERR_ARG (the virtual clock of a run without a cluster), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_write_json(const ar_trace *t, ar_trace_clock clock, const char *title,
                                           const char *path);

/* A part of the time of a run, by one clock. All in seconds. */
typedef struct ar_trace_part {
    char what[96];  /* "all_reduce layers.0.mlp.down_proj": kind and tag of a collective; the name of the innermost span
                       of a computation, "compute" outside all of them; "wait" */
    int rank;       /* where it ran */
    double seconds; /* its share of the critical path, all times together */
} ar_trace_part;
typedef struct ar_trace_summary {
    double seconds; /* from the first begin to the last end */
    double compute; /* of the rank that computes longest. Virtual clock: its work (ar_trace_work); real clock: what
                       its main thread does outside of collectives and waits */
    double communication; /* time in collectives, waiting for others in them included, overlapping ones once: of the
                             rank that has most of it */
    double exposed;       /* time in collectives while the rank computes nothing: of the rank that has most of it */
    double overlap;       /* 1 - exposed / communication, of the rank with the most communication; 0 without any */
    uint64_t bytes;       /* moved between ranks, as they counted them */
    size_t collectives;   /* calls, all ranks together */
    /* The critical path: from the last end back to the first begin, at every moment what decided it: the rank's own
     * work before, the member of a collective that the others waited for, the task of a queue that was waited for, the
     * thread that enqueued it. The three make up `seconds`. wait: by the real clock, between the end of what was waited
     * for and going on; by the virtual one, what delayed a rank from outside: a fault of the transport. */
    double path_compute, path_communication, path_wait;
    ar_trace_part longest[8]; /* its largest parts, the largest first */
    size_t parts;
} ar_trace_summary;
/** Errors: AR_ERR_ARG (the virtual clock of a run without a cluster), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_trace_summarise(ar_trace_summary *s, const ar_trace *t, ar_trace_clock clock);

AR_END_DECLS
#endif
