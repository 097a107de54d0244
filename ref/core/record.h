/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/trace.h"
#include "ref/core/gpu.h"

/* Recordings of a trace: one per lane, written by that lane's thread alone and read after the run. */
struct ari_lane;

typedef enum ari_record_kind {
    ARI_RECORD_SPAN,       /* of the program: a module, a step */
    ARI_RECORD_WORK,       /* computation that takes virtual time; none of the real clock's own */
    ARI_RECORD_COLLECTIVE, /* from entering it to leaving it */
    ARI_RECORD_WAIT,       /* the lane waited for an event of another lane, or for a queue */
    ARI_RECORD_TRANSFER    /* inside a collective: bytes from another rank */
} ari_record_kind;

typedef struct ari_record {
    ari_record_kind kind;
    uint32_t depth;            /* of spans that were open when it began */
    uint32_t order;            /* in which the lane's records began; transfers have their collective's */
    bool broken;               /* collective: an error ended it; some of its members may never have come */
    uint64_t begin_ns, end_ns; /* of the monotonic clock */
    uint64_t virtual_begin_ns, virtual_end_ns;
    const char *name; /* span: its name; collective: its tag; wait: the lane's name; else "". Owned by the trace */
    double flops;     /* work */
    /* collective */
    unsigned op_kind; /* ari_kind (ref/comm/call.h) */
    ar_dtype dtype;
    ar_op op;
    int root;
    size_t count;                       /* elements of the call: of a v-form, of all ranks together */
    uint64_t group, seq;                /* the group's number in the world; the collective's in the group */
    int ranks;                          /* of the group */
    int last_rank;                      /* world rank of the member that came last, by the real clock */
    int virtual_last;                   /* and by the virtual one */
    int virtual_from;                   /* world rank of the member whose coming decided virtual_end_ns */
    uint64_t agreed_ns;                 /* when all had come */
    uint64_t bytes_read, bytes_written; /* by this rank, of other ranks' memory */
    /* transfer; wait */
    int peer;       /* world rank it came from; the rank's own for a wait */
    int peer_track; /* wait: the lane that was waited for; -1: not known */
    uint64_t bytes;
} ari_record;

typedef struct ari_recording ari_recording;

/** A recording for the lane, owned by the trace. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_recording_create(ari_recording **out, ar_trace *t, const struct ari_lane *l);
/** Adds a record to the calling thread's lane, real times as given; `name` is copied. NULL recording: nothing. Work
 * that follows other work without a pause is added to that one's record. */
void ari_record_add(ari_recording *recording, const ari_record *r, const char *name);
/** The lane's thread is about to end: so do the spans that its program left open. NULL: nothing. */
void ari_recording_close(ari_recording *r, uint64_t virtual_ns);

/** Records that the calling thread's rank has computed a product: its virtual clock advances. */
void ari_work_product(const ari_gpu_product *p);
void ari_work_scores(const ari_gpu_scores *s);
void ari_work_moves(ari_gpu_moves kernel_kind, bool backward, size_t elements);

/* When something began, by the calling thread's clocks; zeroes where nothing is recorded. */
typedef struct ari_moment {
    uint64_t ns, virtual_ns;
} ari_moment;
ari_moment ari_record_moment(void);
enum { ARI_SHORTEST_WAIT_NS = 1000 };
/** Records that the calling lane has waited for another lane of its rank, by an event or a full queue. Waits shorter
 *  than the threshold by both clocks are left out. peer NULL: unknown. */
void ari_record_wait(ari_moment since, const struct ari_lane *peer);
/** Inside a collective: `bytes` have come from the memory of this rank of the world. */
void ari_record_transfer(ari_moment since, int src_rank, uint64_t bytes);

/* For what reads a trace. */
size_t ari_trace_lanes(const ar_trace *t);
typedef struct ari_trace_lane {
    int rank, track;
    const char *name;
    const ari_record *records; /* in the order in which they ended */
    size_t count;
} ari_trace_lane;
ari_trace_lane ari_trace_lane_at(const ar_trace *t, size_t i);
/** True if the run had virtual time. */
bool ari_trace_is_virtual(const ar_trace *t);
/** True if memory ran out, so that the end is missing. */
bool ari_trace_is_cut(const ar_trace *t);

/* Spans of the library's own code. Where nothing is recorded they cost one test of a pointer: no text is made. */

/** ar_trace_begin with a name as of printf. */
void ari_span_begin(const char *format, ...) AR_PRINTF(1, 2);
/** ar_trace_end around a call: `AR_TRY(ari_span_end(f(x)))` ends the span whatever f returns. Returns st. */
static inline ar_status ari_span_end(ar_status st)
{
    ar_trace_end();
    return st;
}
