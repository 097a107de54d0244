/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"

/* Call of a communicator as a value: its kind, which is a row of a table, and its arguments. Code that checks
 * results or predicts bytes (ref/baseline, verify/bytes, tests/sim/plain.h) must not include it, because it would
 * check itself. */

typedef enum ari_kind {
    ARI_ALL_REDUCE,
    ARI_REDUCE_SCATTER,
    ARI_ALL_GATHER,
    ARI_ALL_TO_ALL,
    ARI_BROADCAST,
    ARI_SEND,
    ARI_RECV,
    ARI_EXCHANGE,
    ARI_BARRIER,
    ARI_SPLIT,
    ARI_KIND_COUNT
} ari_kind;

/* Elements of a buffer of rank r. */
typedef enum ari_buffer_extent {
    ARI_EXTENT_NOTHING,
    ARI_EXTENT_COUNT,      /* count */
    ARI_EXTENT_OWN_PART,   /* counts[r] */
    ARI_EXTENT_PARTS,      /* sum of counts, part after part */
    ARI_EXTENT_RECV_PARTS, /* sum of recv_counts, part after part */
    ARI_EXTENTS
} ari_buffer_extent;

typedef struct ari_kind_row {
    const char *name; /* name in reports */
    ari_buffer_extent input, out;
    bool from_root; /* only the root has an input, in the buffer that is every rank's output */
    bool combines;  /* true for kinds with a reduction operation */
    bool has_peer;
    bool ring; /* uses a ring; not for data that differs for each pair, which a ring would only move more often */
} ari_kind_row;
const ari_kind_row *ari_kind_of(ari_kind kind); /* Returns the row of a kind; for an unknown value an empty row named
                                                   "?". */

const char *ari_kind_name(ari_kind kind);
const char *ari_op_name(ar_op op);

/* One call of one rank. Fields that a kind does not use are zero. Borrows everything it points to.
 *
 * A send and its matching recv are one collective of a channel: a group of two ranks with the sender as member 0 and
 * the receiver as member 1. They match if count and dtype are equal. */
typedef struct ari_call {
    ari_kind kind;
    ar_dtype dtype;
    ar_op op;
    int root;                  /* broadcast */
    int peer;                  /* send, recv: the peer as a rank of the communicator, not of the channel */
    int color, key;            /* split */
    size_t count;              /* number of elements; for an exchange, number of p2p operations */
    const size_t *counts;      /* [N]; reduce_scatter, all_gather; for all_to_all the sent counts */
    const size_t *recv_counts; /* [N] for all_to_all */
    const ar_p2p *p2p;         /* [count] */
    ar_buf out;                /* broadcast: the buffer, which is input and output; send: unused */
    ar_cbuf input;             /* recv: unused */
    const char *tag;           /* never NULL while the call runs */
    ar_queue *queue; /* the inline queue that runs the call. If the queue is on a stream, the buffers belong to that
                        stream's device. Set when the call runs */
} ari_call;

/** The arguments of rank `rank` of `size` ranks, by the row of the kind. Errors: AR_ERR_ARG, AR_ERR_DTYPE,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_call_check(const ari_call *call, int rank, int size);

/** Returns the sum of counts[0..n): the offset of rank n's part. The counts were checked at the public interface, so
 *  the sum cannot overflow. */
static inline size_t ari_counts_before(const size_t *counts, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}
