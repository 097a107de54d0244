/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_COMM_H
#define ANYRANK_COMM_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/queue.h"
#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A communicator: one object per rank and group. Every call is collective over the group (send and recv: of the two
 * ranks), enqueues on q, and uses contiguous buffers. `tag` names layer and tensor in reports and traces; it is
 * borrowed until the call is done, and so are the buffers; counts and operations are copied. Inputs are never modified,
 * except where input and output are the same memory as documented ("in place"); other overlap is AR_ERR_ARG. N =
 * ar_comm_size, r = ar_comm_rank. Counts are elements. A NULL buffer is fine where nothing is in it.
 *
 * Calls of one communicator run one at a time, in the order in which its rank enqueued them: use one queue for each
 * communicator. Collectives of different communicators may be in flight at once, each on a queue of its own.
 *
 * Reductions. dtypes: F32, F64, BF16, F16, I64, I32, U8; every operation on every one of them. N = 1: a copy.
 * - Order (the ring's): slice c, one of N slices cut by ari_comm_slice, is combined in the order of ranks c+1, c+2, ...,
 *   c (modulo N), from left to right. So all_reduce has the bits of reduce_scatter (counts from ari_comm_slice) then
 *   all_gather. NCCL has orders of its own for floats; also its AR_MAX and AR_MIN of floats pass over NaN and the sign
 *   of 0.
 * - AR_SUM: in the type's own arithmetic. BF16 and F16: each step in fp32, rounded to the type (ties to even). Integers
 *   wrap modulo 2^64, 2^32 or 2^8. Where a float's sum is NaN, its payload is not defined.
 * - AR_MAX, AR_MIN: of floats as IEEE 754-2019 maximum and minimum, whatever the order: NaN where any is NaN (the one
 *   canonical quiet NaN, sign 0), and -0 below +0.
 *
 * Errors of every call: AR_ERR_ARG, AR_ERR_DTYPE (before anything moves); AR_ERR_MISMATCH (ranks disagree about kind,
 * dtype, count, op, root or order: two collectives in another order show at least by their tags, which are compared
 * where both ranks give one, except in exchange, send and recv), AR_ERR_TIMEOUT, AR_ERR_ABORTED. The first error ends
 * the world: every rank of every group of it gets an error, and ari_comm_error tells the first one. After an error no
 * output is defined. */
typedef enum ar_op { AR_SUM, AR_MAX, AR_MIN } ar_op;
typedef struct ar_comm ar_comm;
typedef struct ar_p2p {
    int peer;
    bool send;    /* false: receive */
    ar_buf buf;   /* borrowed; not written where send */
    size_t count; /* elements */
} ar_p2p;

/* Each call checks its arguments before it enqueues anything. NULL c is a programming error (AR_ERR_ARG). */

/** out[i] = op over ranks of in[i]. In place: out == in. */
AR_NODISCARD ar_status ar_comm_all_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, size_t count, ar_dtype t,
                                          ar_op op, const char *tag);
/** in: sum of counts; out: counts[r]. Rank r's out[i] = op over ranks of in[counts[0] + .. + counts[r-1] + i].
 *  In place: out == in + that offset. */
AR_NODISCARD ar_status ar_comm_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *counts,
                                              ar_dtype t, ar_op op, const char *tag);
/** in: counts[r]; out: sum of counts, rank after rank. In place: in == out + own offset. */
AR_NODISCARD ar_status ar_comm_all_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *counts,
                                          ar_dtype t, const char *tag);
/** Sends send_counts[p] elements to each rank p, receives recv_counts[p] from it, both packed in rank order. */
AR_NODISCARD ar_status ar_comm_all_to_all(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *send_counts,
                                          const size_t *recv_counts, ar_dtype t, const char *tag);
/** Every rank's buf = the root's. */
AR_NODISCARD ar_status ar_comm_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root,
                                         const char *tag);
/* Between two ranks alone: the k-th send from a to b meets b's k-th recv from a; counts and dtypes equal. A send is
 * done when its peer has received. The two directions of a pair are independent of each other. peer != r. */
AR_NODISCARD ar_status ar_comm_send(ar_comm *c, ar_queue *q, ar_cbuf input, size_t count, ar_dtype t, int peer,
                                    const char *tag);
AR_NODISCARD ar_status ar_comm_recv(ar_comm *c, ar_queue *q, ar_buf out, size_t count, ar_dtype t, int peer,
                                    const char *tag);
/** Returns, or ends on the queue, when every rank has called it. */
AR_NODISCARD ar_status ar_comm_barrier(ar_comm *c, ar_queue *q, const char *tag);

int ar_comm_rank(const ar_comm *c);
int ar_comm_size(const ar_comm *c);
/** Bytes of other ranks' memory that this rank read and wrote through this communicator (not its splits), counted in
 *  the copy loops. */
void ar_comm_counted(const ar_comm *c, uint64_t *bytes_read, uint64_t *bytes_written);

AR_END_DECLS
#endif
