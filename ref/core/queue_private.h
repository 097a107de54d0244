/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/queue.h"

/* Functions of anyrank/queue.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** Enqueues a chain: what fn(arg, on) enqueues on `on` runs in order, after what was enqueued on q before, and before
 *  what is enqueued on it later. Inline: fn(arg, q), now. A thread: on that thread, with an inline queue of its own, so
 *  that kernels and collectives can follow each other there. Errors: as ar_queue_host. */
AR_NODISCARD ar_status ari_queue_chain(ar_queue *q, ar_status (*fn)(void *arg, ar_queue *on), void *arg);
/** Waits until all enqueued work is done. Returns the queue's first error. timeout_ns 0: no limit. */
AR_NODISCARD ar_status ari_queue_sync(ar_queue *q, uint64_t timeout_ns);
/** The name it was created with. */
const char *ari_queue_name(const ar_queue *q);
/** q waits for the event as it is recorded now; the host does not (an inline queue is the host, so there it does). An
 *  error of the queue that is waited for poisons q. Errors: AR_ERR_MEMORY, or q's first error. */
AR_NODISCARD ar_status ari_queue_wait(ar_queue *q, ar_event *e);
/** Tests if the event is done, without waiting. Returns the queue's first error. */
AR_NODISCARD ar_status ari_event_test(ar_event *e, bool *done);

AR_END_DECLS
