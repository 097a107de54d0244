/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_QUEUE_H
#define ANYRANK_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* An in-order task queue, like a CUDA stream: all asynchronous work goes through one. On the CPU, a rank's main queue
 * is inline (enqueuing a task runs it at once in the calling thread), and a communication queue has its own thread. On
 * CUDA both are streams. The first task that fails poisons its queue: later tasks are dropped, and every wait for the
 * queue returns that first error and its message. Errors of all functions: AR_ERR_ARG (an argument is NULL, or a task
 * waits for the queue that it runs on). Any thread may wait for a queue; only one thread at a time may use an event. */
typedef struct ar_queue ar_queue;
typedef struct ar_event ar_event; /* marks a point in a queue, like a CUDA event */

/* Kind of a CPU queue. */
typedef enum ar_queue_kind {
    AR_QUEUE_INLINE, /* tasks run at once, in the thread that enqueues them */
    AR_QUEUE_THREAD  /* tasks run in the queue's own thread */
} ar_queue_kind;

/** Creates a queue called `name`; the caller releases *q with ar_queue_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_queue_create(ar_queue **q, ar_queue_kind kind, const char *name);
/** Runs the tasks that are still enqueued, then frees the queue. */
void ar_queue_destroy(ar_queue *q);
/** Enqueues the host function fn(arg), to run after all tasks enqueued before. An inline queue runs fn at once and
 *  returns its status. Errors: the queue's first error if it is poisoned. Threads: one thread enqueues. */
AR_NODISCARD ar_status ar_queue_host(ar_queue *q, ar_status (*fn)(void *), void *arg);

/** Blocks the calling thread until all tasks enqueued so far are done. timeout_ns: longest wait in nanoseconds; 0: no
 *  limit. Errors: the queue's first error, AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ar_queue_sync(ar_queue *q, uint64_t timeout_ns);
/** Makes tasks that are enqueued on q from now on wait until event e, as it is recorded now, is done; like
 *  cudaStreamWaitEvent. The calling thread waits only if q is inline. If the queue on which e was recorded fails, q is
 *  poisoned. Errors: q's first error, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_queue_wait(ar_queue *q, ar_event *e);

/** Creates an event, done until it is recorded. The caller releases *e with ar_event_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_event_create(ar_event **e);
/** Frees an event. Queues that already wait for it still wait for the recorded tasks. Accepts NULL. */
void ar_event_destroy(ar_event *e);
/** Records the event on q: it is done when all tasks that are enqueued on q now are done. */
AR_NODISCARD ar_status ar_event_record(ar_event *e, ar_queue *q);
/** Blocks the calling thread until the event is done. timeout_ns: longest wait in nanoseconds; 0: no limit. Errors: the
 *  first error of the queue that the event was recorded on, AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ar_event_sync(ar_event *e, uint64_t timeout_ns);

/** Tests whether the event is done, without waiting. Errors: the first error of the queue that the event was recorded
 *  on. */
AR_NODISCARD ar_status ar_event_test(ar_event *e, bool *is_done);

AR_END_DECLS
#endif
