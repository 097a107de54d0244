/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_QUEUE_IMPL_H
#define ARI_CORE_QUEUE_IMPL_H

#include "anyrank/queue.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a task leaves behind when it cannot run, because its queue failed before: `st` and `why` are the queue's first
 * error. Releases arg. */
typedef void (*ari_drop_fn)(void *arg, ar_status st, const char *why);

/** As ar_queue_host, but every task that is accepted ends in exactly one of fn(arg) and drop(arg, ...); drop may be
 *  NULL. Where it is not accepted (an error is returned without fn having run), neither is called: *ran tells.
 *  ran: set to true if fn ran inside this call (inline queues), else false. */
AR_NODISCARD ar_status ari_queue_push(ar_queue *q, ar_status (*fn)(void *), ari_drop_fn drop, void *arg, bool *ran);

/** Whether tasks run in the calling thread, inside the call. */
bool ari_queue_is_inline(const ar_queue *q);
/** A task of an inline queue that the caller does itself, between the two. Begin: the queue's first error, and then
 *  there is no task. End: the queue keeps the task's status, and gives it. */
AR_NODISCARD ar_status ari_queue_begin(ar_queue *q);
AR_NODISCARD ar_status ari_queue_end(ar_queue *q, ar_status st);
/** Where q's tasks enqueue further work: q itself if it is inline, a thread's own inline queue otherwise. */
ar_queue *ari_queue_inner(ar_queue *q);

/* For events. A ticket is the number of tasks enqueued so far; it is done when that many have ended. Queues are counted
 * references, so that an event or a waiting queue may outlive ar_queue_destroy. */
uint64_t ari_queue_ticket(ar_queue *q);
ar_queue *ari_queue_keep(ar_queue *q);
void ari_queue_release(ar_queue *q);
/** Waits for the ticket. Returns the queue's first error, AR_ERR_TIMEOUT, or AR_OK. timeout_ns 0: no limit. */
AR_NODISCARD ar_status ari_queue_await(ar_queue *q, uint64_t ticket, uint64_t timeout_ns);
/** The same without waiting. */
AR_NODISCARD ar_status ari_queue_poll(ar_queue *q, uint64_t ticket, bool *done);
/** A failure of what q's tasks left to a stream poisons q; a wait that was too long does not. Returns st. */
ar_status ari_queue_note(ar_queue *q, ar_status st);

#ifdef __cplusplus
}
#endif
#endif
