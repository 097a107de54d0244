/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_COMM_IMPL_H
#define ARI_CORE_COMM_IMPL_H

#include <stdatomic.h>

#include "anyrank/comm.h"

/* One table: enumerator, name in reports. */
#define ARI_KIND_TABLE(X)               \
    X(ALL_REDUCE, "all_reduce")         \
    X(REDUCE_SCATTER, "reduce_scatter") \
    X(ALL_GATHER, "all_gather")         \
    X(ALL_TO_ALL, "all_to_all")         \
    X(BROADCAST, "broadcast")           \
    X(REDUCE, "reduce")                 \
    X(GATHER, "gather")                 \
    X(SCATTER, "scatter")               \
    X(SEND, "send")                     \
    X(RECV, "recv")                     \
    X(EXCHANGE, "exchange")             \
    X(BARRIER, "barrier")               \
    X(SPLIT, "split")
typedef enum ari_kind {
#define ARI_KIND_ENUM(kind, name) ARI_##kind,
    ARI_KIND_TABLE(ARI_KIND_ENUM)
#undef ARI_KIND_ENUM
        ARI_KIND_COUNT
} ari_kind;
const char *ari_kind_name(ari_kind kind); /* "?" for an unknown value */
const char *ari_op_name(ar_op op);

/* One call of one rank, validated. Fields that a kind does not use are zero. Borrows everything it points to.
 *
 * A send and the recv that it meets are one collective of a channel: a group of two ranks, the sender its member 0, the
 * receiver its member 1. They are agreed upon where count and dtype are equal. */
typedef struct ari_call {
    ari_kind kind;
    ar_dtype dtype;
    ar_op op;
    int root;                  /* broadcast, reduce, gather, scatter */
    int peer;                  /* send, recv: a rank of the communicator, not of the channel */
    int color, key;            /* split */
    size_t count;              /* elements; the number of p2p operations of an exchange */
    const size_t *counts;      /* [N]; reduce_scatter, all_gather, gather, scatter; all_to_all: what is sent */
    const size_t *recv_counts; /* [N]; all_to_all */
    const ar_p2p *p2p;         /* [count] */
    ar_buf out;                /* broadcast: the buffer, in = out; reduce, gather: the root's alone; send: none */
    ar_cbuf in;                /* scatter: the root's alone; recv: none */
    const char *tag;           /* never NULL */
    ar_queue *on; /* the inline queue that the call runs on: whose stream, if it stands on one, and so whose
                     device, the buffers belong to. Filled when the call runs */
} ari_call;

/* Bytes of other ranks' memory read and written on behalf of one rank, by whichever of its threads. */
typedef struct ari_moved {
    _Atomic uint64_t read, written;
} ari_moved;

static inline void ari_moved_add(ari_moved *m, uint64_t read, uint64_t written)
{
    if (read > 0)
        atomic_fetch_add_explicit(&m->read, read, memory_order_relaxed);
    if (written > 0)
        atomic_fetch_add_explicit(&m->written, written, memory_order_relaxed);
}

/* Every communicator begins with this. */
struct ar_comm {
    const ar_comm_ops *ops; /* all slots are required */
    int rank, size;
    /* Required. The first error of any rank of the communicator's world, and its words; AR_OK and "" if none. */
    ar_status (*error)(const ar_comm *c, const char **message);
    /* Required where the table uses ARI_QUEUED_COLLECTIVES: does one call in the calling thread, from start to end. */
    ar_status (*run)(ar_comm *c, const ari_call *call);
    ari_moved moved;
    _Atomic uint64_t calls[ARI_KIND_COUNT];
};

void ari_comm_init(ar_comm *c, const ar_comm_ops *ops, int rank, int size);

/** Enqueues c->run(c, call). A queue whose work is done later gets a copy of the call, its counts and its operations
 *  (but not its buffers and tag). If the queue fails before the call is reached, the communicator is aborted: the
 *  peers that wait for this rank hear of it at once. */
AR_NODISCARD ar_status ari_comm_enqueue(ar_comm *c, ar_queue *q, const ari_call *call);

/* The table's slots for communicators that do calls one at a time with c->run: host memory, host threads. */
ar_status ari_queued_all_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op,
                                const char *tag);
ar_status ari_queued_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                                    ar_op op, const char *tag);
ar_status ari_queued_all_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                                const char *tag);
ar_status ari_queued_all_to_all(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *send_counts,
                                const size_t *recv_counts, ar_dtype t, const char *tag);
ar_status ari_queued_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root,
                               const char *tag);
ar_status ari_queued_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op,
                            int root, const char *tag);
ar_status ari_queued_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t, int root,
                            const char *tag);
ar_status ari_queued_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                             int root, const char *tag);
ar_status ari_queued_send(ar_comm *c, ar_queue *q, ar_cbuf in, size_t count, ar_dtype t, int peer, const char *tag);
ar_status ari_queued_recv(ar_comm *c, ar_queue *q, ar_buf out, size_t count, ar_dtype t, int peer, const char *tag);
ar_status ari_queued_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t, const char *tag);
ar_status ari_queued_barrier(ar_comm *c, ar_queue *q, const char *tag);
#define ARI_QUEUED_COLLECTIVES                                                                                        \
    .all_reduce = ari_queued_all_reduce, .reduce_scatter = ari_queued_reduce_scatter,                                 \
    .all_gather = ari_queued_all_gather, .all_to_all = ari_queued_all_to_all, .broadcast = ari_queued_broadcast,      \
    .reduce = ari_queued_reduce, .gather = ari_queued_gather, .scatter = ari_queued_scatter, .send = ari_queued_send, \
    .recv = ari_queued_recv, .exchange = ari_queued_exchange, .barrier = ari_queued_barrier

/** Sum of counts[0..n): where rank n's part starts. Checked at the public boundary, so it cannot overflow here. */
static inline size_t ari_counts_before(const size_t *counts, int n)
{
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        sum += counts[i];
    return sum;
}

/** memcpy that takes 0 bytes from or to NULL, and source = destination. */
void ari_copy_bytes(void *to, const void *from, size_t bytes);

#endif
