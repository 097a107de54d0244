/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/comm.h"

/* A call of a communicator as a value: its kind, which is a row of one table, and its arguments. What checks results or
 * predicts bytes (ref/baseline, verify/bytes, tests/sim/plain.h) may not include this: it would check itself. */

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
    ARI_EXTENT_PARTS,      /* the sum of counts, part after part */
    ARI_EXTENT_RECV_PARTS, /* the sum of recv_counts, part after part */
    ARI_EXTENTS
} ari_buffer_extent;

typedef struct ari_kind_row {
    const char *name; /* in reports */
    ari_buffer_extent input, out;
    bool from_root; /* the input is the root's alone, in the one buffer, which is every rank's output */
    bool combines;  /* with an operation */
    bool has_peer;
    bool ring; /* a ring moves it: not what each pair has of its own, which would only move more often */
} ari_kind_row;
const ari_kind_row *ari_kind_of(ari_kind kind); /* of an unknown value: named "?", with nothing in it */

const char *ari_kind_name(ari_kind kind);
const char *ari_op_name(ar_op op);

/* One call of one rank. Fields that a kind does not use are zero. Borrows everything it points to.
 *
 * A send and the recv that it meets are one collective of a channel: a group of two ranks, the sender its member 0, the
 * receiver its member 1. They are agreed upon where count and dtype are equal. */
typedef struct ari_call {
    ari_kind kind;
    ar_dtype dtype;
    ar_op op;
    int root;                  /* broadcast */
    int peer;                  /* send, recv: a rank of the communicator, not of the channel */
    int color, key;            /* split */
    size_t count;              /* elements; the number of p2p operations of an exchange */
    const size_t *counts;      /* [N]; reduce_scatter, all_gather; all_to_all: what is sent */
    const size_t *recv_counts; /* [N]; all_to_all */
    const ar_p2p *p2p;         /* [count] */
    ar_buf out;                /* broadcast: the buffer, in = out; send: none */
    ar_cbuf input;             /* recv: none */
    const char *tag;           /* never NULL where the call runs */
    ar_queue *queue; /* the inline queue that the call runs on: whose stream, if it stands on one, and so whose
                     device, the buffers belong to. Filled when the call runs */
} ari_call;

/** The arguments of rank `rank` of `size` ranks, by the row of the kind. Errors: AR_ERR_ARG, AR_ERR_DTYPE,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_call_check(const ari_call *call, int rank, int size);

/** Sum of counts[0..n): where rank n's part starts. Checked at the public boundary, so it cannot overflow here. */
static inline size_t ari_counts_before(const size_t *counts, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}
