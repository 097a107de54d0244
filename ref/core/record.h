/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"
#include "anyrank/trace.h"
#include "ref/core/gpu.h"

/* Recordings of a trace, one per lane. Only the lane's thread writes its recording, and it is read after the run. */
struct ari_lane;

typedef enum ari_record_kind {
    ARI_RECORD_SPAN,       /* a span of the program: a module, a step */
    ARI_RECORD_WORK,       /* computation that takes virtual time and no time on the real clock */
    ARI_RECORD_COLLECTIVE, /* a collective, from entering to leaving it */
    ARI_RECORD_WAIT,       /* the lane waited for an event of another lane, or for a queue */
    ARI_RECORD_TRANSFER    /* within a collective: bytes from another rank */
} ari_record_kind;

typedef struct ari_record {
    ari_record_kind kind;
    uint32_t depth;            /* number of spans open when the record began */
    uint32_t order;            /* order in which the lane's records began; a transfer has its collective's number */
    bool broken;               /* collective: an error ended it; some members may never have arrived */
    uint64_t begin_ns, end_ns; /* times of the monotonic clock */
    uint64_t virtual_begin_ns, virtual_end_ns;
    const char *name; /* span: its name; collective: its tag; wait: the lane's name; otherwise "". Owned by the trace */
    double flops;     /* work */
    /* collective */
    unsigned op_kind; /* ari_kind (ref/comm/call.h) */
    ar_dtype dtype;
    ar_op op;
    int root;
    size_t count;                       /* number of elements of the call; for a call with counts, of all ranks
                                           together */
    uint64_t group, seq;                /* number of the group in the world, and of the collective in the group */
    int ranks;                          /* number of ranks in the group */
    int last_rank;                      /* world rank of the last member to arrive on the real clock */
    int virtual_last;                   /* the same on the virtual clock */
    int virtual_from;                   /* world rank of the member whose arrival determined virtual_end_ns */
    uint64_t agreed_ns;                 /* time at which all members had arrived */
    uint64_t bytes_read, bytes_written; /* bytes of other ranks' memory that this rank read and wrote */
    /* for a transfer or a wait: */
    int peer;       /* world rank that sent the data; for a wait, the rank itself */
    int peer_track; /* wait: the awaited lane; -1: unknown */
    uint64_t bytes;
} ari_record;

typedef struct ari_recording ari_recording;

/** A recording for the lane, owned by the trace. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_recording_create(ari_recording **out, ar_trace *t, const struct ari_lane *l);
/** Adds a record with the given real times to the calling thread's lane, and copies `name`. NULL recording: does
 *  nothing. Work that directly follows other work is added to that record. */
void ari_record_add(ari_recording *recording, const ari_record *r, const char *name);
/** Ends the spans that the program left open, before the lane's thread ends. NULL: does nothing. */
void ari_recording_close(ari_recording *r, uint64_t virtual_ns);

/** Records that the calling thread's rank has computed a product: its virtual clock advances. */
void ari_work_product(const ari_gpu_product *p);
void ari_work_scores(const ari_gpu_scores *s);
void ari_work_moves(ari_gpu_moves kernel_kind, bool backward, size_t elements);

/* When something began, on the calling thread's clocks; zero if nothing is recorded. */
typedef struct ari_moment {
    uint64_t ns, virtual_ns;
} ari_moment;
ari_moment ari_record_moment(void);
enum { ARI_SHORTEST_WAIT_NS = 1000 };
/** Records that the calling lane has waited for another lane of its rank, by an event or a full queue. Waits shorter
 *  than the threshold by both clocks are left out. peer NULL: unknown. */
void ari_record_wait(ari_moment since, const struct ari_lane *peer);
/** Records a transfer within a collective: `bytes` came from the memory of this world rank. */
void ari_record_transfer(ari_moment since, int src_rank, uint64_t bytes);

/* Functions for readers of a trace. */
size_t ari_trace_lanes(const ar_trace *t);
typedef struct ari_trace_lane {
    int rank, track;
    const char *name;
    const ari_record *records; /* records in the order in which they ended */
    size_t count;
} ari_trace_lane;
ari_trace_lane ari_trace_lane_at(const ar_trace *t, size_t i);
/** True if the run had virtual time. */
bool ari_trace_is_virtual(const ar_trace *t);
/** Returns true if memory ran out, so that the end of the trace is missing. */
bool ari_trace_is_cut(const ar_trace *t);

/* Begins a span of the library's code. If nothing is recorded, the cost is one test of a pointer, and no text is
 * formatted. */

/** ar_trace_begin with a name as of printf. */
void ari_span_begin(const char *format, ...) AR_PRINTF(1, 2);
/** Ends a span after a call, whatever the call returns: `AR_TRY(ari_span_end(f(x)))`. Returns st. */
static inline ar_status ari_span_end(ar_status st)
{
    ar_trace_end();
    return st;
}
