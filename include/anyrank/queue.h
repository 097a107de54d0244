/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_QUEUE_H
#define ANYRANK_QUEUE_H

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* ONE notion of "asynchronous": an in-order queue. A rank's main queue on the CPU runs each task at once in the calling
 * thread (inline); a communication queue is a thread of its own; on CUDA both are streams. The first task that fails
 * poisons its queue: later tasks are dropped, and every wait returns that first error with its message. Waits with a
 * limit also return AR_ERR_TIMEOUT; AR_ERR_ARG where something is NULL, or a task waits for its own queue. Any thread
 * may wait for a queue; one thread at a time uses an event. */
typedef struct ar_queue ar_queue;
typedef struct ar_event ar_event;

typedef enum ar_queue_kind { AR_QUEUE_INLINE, AR_QUEUE_THREAD } ar_queue_kind;

/** Gives a queue. Errors: AR_ERR_MEMORY. Destroy with ar_queue_destroy, which runs what is still enqueued first. */
AR_NODISCARD ar_status ar_queue_create(ar_queue **q, ar_queue_kind kind, const char *name);
void ar_queue_destroy(ar_queue *q);
/** Enqueues fn(arg): in order, after everything enqueued before. Inline: runs now and returns its status.
 *  Errors: the queue's first error if it is poisoned. Threads: one thread enqueues. */
AR_NODISCARD ar_status ar_queue_host(ar_queue *q, ar_status (*fn)(void *), void *arg);

/** Gives an event; not recorded, it counts as done. Errors: AR_ERR_MEMORY. Destroy with ar_event_destroy. */
AR_NODISCARD ar_status ar_event_create(ar_event **e);
/** Accepts NULL. What waits for the event goes on waiting for what it stood for. */
void ar_event_destroy(ar_event *e);
/** The event is done when everything enqueued on q so far is done. */
AR_NODISCARD ar_status ar_event_record(ar_event *e, ar_queue *q);
/** The host waits. Returns the recorded queue's FIRST error, or AR_ERR_TIMEOUT. timeout_ns 0: no limit. */
AR_NODISCARD ar_status ar_event_sync(ar_event *e, uint64_t timeout_ns);

AR_END_DECLS
#endif
