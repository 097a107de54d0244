/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_COMM_H
#define ANYRANK_COMM_H

#include <stddef.h>
#include <stdint.h>

#include "anyrank/queue.h"
#include "anyrank/tensor.h"

AR_BEGIN_DECLS

/* A communicator: one rank's handle of a group of ranks. Every call is a collective over the group (send and recv: over
 * the two ranks). A call checks its arguments, then enqueues its work on queue q. Buffers are contiguous. `tag` names
 * layer and tensor in reports and traces. Buffers and tag are borrowed until the enqueued work is done; counts and
 * p2p lists are copied. In the comments N = ar_comm_size, r = ar_comm_rank, counts are elements. Inputs are not
 * modified unless input and output are the same memory in the way that a function documents ("in place"); any other
 * overlap is AR_ERR_ARG. A buffer without elements may be NULL.
 *
 * Calls on one communicator run one at a time in the order in which the rank enqueued them: use one queue for each
 * communicator. Collectives of different communicators may be in flight at once, each on its own queue.
 *
 * Reductions support F32, F64, BF16, F16, I64, I32 and U8 with every operation. With N = 1 they copy.
 * - Order (a ring's): the buffer is cut into N consecutive slices, of which the first count mod N have one element
 *   more. Slice c is combined from left to right in the order of ranks c+1, c+2, ..., c (modulo N). So all_reduce gives
 *   the same bits as reduce_scatter with these slices as counts and then all_gather. NCCL adds floats in its own order,
 *   and its AR_MAX and AR_MIN of floats ignore NaN and the sign of 0.
 * - AR_SUM adds in the type's own arithmetic. BF16 and F16: each addition is done in fp32 and rounded to the type, ties
 *   to even. Integers wrap modulo 2^64, 2^32 or 2^8. If a float's sum is NaN, its payload is undefined.
 * - AR_MAX, AR_MIN of floats are IEEE 754-2019 maximum and minimum, independent of the order: NaN if any input is NaN
 *   (the canonical quiet NaN, sign 0), and -0 is less than +0.
 *
 * Errors of every call: AR_ERR_ARG (a NULL communicator too), AR_ERR_DTYPE (both before anything is enqueued);
 * AR_ERR_MISMATCH (ranks disagree about the kind, dtype, count, operation, root or order of collectives; ranks compare
 * their tags if both give one, except in exchange, send and recv, so that two swapped collectives are found);
 * AR_ERR_TIMEOUT, AR_ERR_ABORTED. The first error fails the world: every rank of every group gets an error, whose
 * message names the rank that failed first. After an error outputs are undefined. */
typedef struct ar_comm ar_comm;
typedef enum ar_op { AR_SUM, AR_MAX, AR_MIN } ar_op; /* operation of a reduction */
/** One send or receive of a point-to-point exchange. */
typedef struct ar_p2p {
    int peer;     /* the other rank */
    bool send;    /* true: send buf to peer; false: receive from peer into buf */
    ar_buf buf;   /* borrowed; only read if send */
    size_t count; /* elements */
} ar_p2p;

/** All-reduce: output[i] = op over all ranks' input[i], for i in [0, count). In place: output == input. */
AR_NODISCARD ar_status ar_comm_all_reduce(ar_comm *c, ar_queue *q, ar_buf output, ar_cbuf input, size_t count,
                                          ar_dtype t, ar_op op, const char *tag);
/** Reduce-scatter: input has the sum of counts [N] elements, output counts[r]. Rank r's output[i] = op over all ranks'
 *  input[offset + i], offset = counts[0] + .. + counts[r-1]. In place: output == input + offset. */
AR_NODISCARD ar_status ar_comm_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf output, ar_cbuf input,
                                              const size_t *counts, ar_dtype t, ar_op op, const char *tag);
/** All-gather: input has counts[r] elements; output has the sum of counts [N], the ranks' inputs in rank order. In
 *  place: input == output + counts[0] + .. + counts[r-1]. */
AR_NODISCARD ar_status ar_comm_all_gather(ar_comm *c, ar_queue *q, ar_buf output, ar_cbuf input, const size_t *counts,
                                          ar_dtype t, const char *tag);
/** All-to-all: sends send_counts[p] elements to each rank p and receives recv_counts[p] elements from it. Input and
 *  output hold these pieces in rank order without gaps. */
AR_NODISCARD ar_status ar_comm_all_to_all(ar_comm *c, ar_queue *q, ar_buf output, ar_cbuf input,
                                          const size_t *send_counts, const size_t *recv_counts, ar_dtype t,
                                          const char *tag);
/** Broadcast: copies buf [count] of rank `root` to every rank's buf. */
AR_NODISCARD ar_status ar_comm_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root,
                                         const char *tag);
/* Point-to-point: the k-th send from rank a to rank b is received by b's k-th recv from a; both give the same count and
 * dtype. A send is done when its peer has received the data. The two directions between two ranks are independent. The
 * peer must be another rank. */
/** Sends input [count] to rank `peer`. */
AR_NODISCARD ar_status ar_comm_send(ar_comm *c, ar_queue *q, ar_cbuf input, size_t count, ar_dtype t, int peer,
                                    const char *tag);
/** Receives output [count] from rank `peer`. */
AR_NODISCARD ar_status ar_comm_recv(ar_comm *c, ar_queue *q, ar_buf output, size_t count, ar_dtype t, int peer,
                                    const char *tag);
/** Exchanges n point-to-point messages at once, sends and receives in any order; the k-th send from rank a to rank b is
 *  received by b's k-th receive from a. Every rank of the group calls it; a rank without messages passes n = 0. */
AR_NODISCARD ar_status ar_comm_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t,
                                        const char *tag);
/** Barrier: the enqueued task is done when every rank has called ar_comm_barrier. */
AR_NODISCARD ar_status ar_comm_barrier(ar_comm *c, ar_queue *q, const char *tag);

/** Splits the group: ranks that give the same color form a new group, in the order of (key, rank), like
 *  MPI_Comm_split. color < 0: *out becomes NULL. Every rank of the group calls it. It runs in the calling thread, so
 *  wait first for the calls of c that are enqueued. The caller releases *out with ar_comm_destroy before the rank's
 *  function returns. Errors: also AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_comm_split(ar_comm **out, ar_comm *c, int color, int key);
/** Destroys a communicator that the caller owns; none of its calls may be enqueued or running. Accepts NULL. The
 *  communicator that ar_sim_run passes to a rank is not the rank's to destroy. */
void ar_comm_destroy(ar_comm *c);

/** Returns this rank's number in the group, from 0. */
int ar_comm_rank(const ar_comm *c);
/** Returns the number of ranks in the group. */
int ar_comm_size(const ar_comm *c);
/** Returns how many bytes of other ranks' memory this rank has read and written through this communicator (not through
 *  communicators split from it), as the copy loops counted them. */
void ar_comm_counted(const ar_comm *c, uint64_t *bytes_read, uint64_t *bytes_written);

AR_END_DECLS
#endif
