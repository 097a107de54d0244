/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/queue.h"

/* Private functions of anyrank/queue.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Enqueues a chain: the work that fn(arg, queue) enqueues on `queue` runs in order, after everything enqueued on q
 *  before and before everything enqueued on q later. On an inline queue, fn(arg, q) runs now. On a thread's queue, fn
 *  runs in that thread with a separate inline queue, so that kernels and collectives can follow each other there.
 *  Errors: as ar_queue_host. */
AR_NODISCARD ar_status ari_queue_chain(ar_queue *q, ar_status (*fn)(void *arg, ar_queue *queue), void *arg);
/** Returns the name given at creation. */
const char *ari_queue_name(const ar_queue *q);

AR_END_DECLS
