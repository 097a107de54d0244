/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"
#include "anyrank/queue.h"

AR_BEGIN_DECLS

/* Called instead of a task that cannot run because its queue has failed: `st` and `why` are the queue's first error.
 * Releases arg. */
typedef void (*ari_drop_fn)(void *arg, ar_status st, const char *why);

/** Does the same as ar_queue_host, but every accepted task ends in exactly one of fn(arg) and drop(arg, ...); drop may
 *  be NULL. If the task is not accepted (an error without fn having run), neither is called. *ran: fn ran inside this
 *  call (inline queues). */
AR_NODISCARD ar_status ari_queue_push(ar_queue *q, ar_status (*fn)(void *), ari_drop_fn drop, void *arg, bool *ran);

/** True if tasks run in the calling thread, inside the call. */
bool ari_queue_is_inline(const ar_queue *q);
/** Run a task of an inline queue in the caller, between the two calls. begin returns the queue's first error, and then
 *  there is no task. end records the task's status in the queue and returns it. */
AR_NODISCARD ar_status ari_queue_begin(ar_queue *q);
AR_NODISCARD ar_status ari_queue_end(ar_queue *q, ar_status st);
/** Returns the queue on which q's tasks enqueue further work: q itself if it is inline, otherwise a thread's own inline
 *  queue. */
ar_queue *ari_queue_inner(ar_queue *q);

/* Returns a ticket for events: the number of tasks enqueued so far. A ticket is done when that many tasks have ended.
 * Queues are reference-counted, so that an event or a waiting queue may outlive ar_queue_destroy. */
uint64_t ari_queue_ticket(ar_queue *q);
/** Waits for the ticket. Returns the queue's first error, AR_ERR_TIMEOUT, or AR_OK. timeout_ns 0: no limit. */
AR_NODISCARD ar_status ari_queue_await(ar_queue *q, uint64_t ticket, uint64_t timeout_ns);
/** Poisons q if work that its tasks enqueued on a stream has failed, but not if a wait timed out. Returns st. */
ar_status ari_queue_note(ar_queue *q, ar_status st);

/* Stream: a device's in-order list of work, on which a queue may be built. A task of that queue enqueues work there
 * that is done later, so waiting for the queue includes waiting for the stream. A mark is a point in a stream. One
 * thread at a time enqueues, makes a stream wait, and moves a mark; meanwhile any thread may create marks and wait for
 * them. A mark outlives its stream and its device. */
struct ar_device;
typedef struct ari_stream ari_stream;
typedef struct ari_mark ari_mark;

typedef struct ari_stream_ops {
    /* Sets *m to the point after everything enqueued so far. *m NULL: creates a mark for ari_mark_destroy; otherwise
     * moves it. Errors: AR_ERR_MEMORY, AR_ERR_DEVICE. */
    ar_status (*mark)(ari_stream *s, ari_mark **m);
    /* Work enqueued on s from now on runs after the point; the host does not wait. The mark may be of another stream of
     * the same device, and may be moved or destroyed right afterwards. */
    ar_status (*wait)(ari_stream *s, const ari_mark *m);
    /* Waits on the host. timeout_ns 0: no limit. Errors: AR_ERR_TIMEOUT, AR_ERR_DEVICE (a device fault before that
     * point). */
    ar_status (*await)(const ari_mark *m, uint64_t timeout_ns);
    ar_status (*poll)(const ari_mark *m, bool *is_done);
    void (*mark_destroy)(ari_mark *m);
    void (*destroy)(ari_stream *s); /* called when nothing is in flight on the stream */
    /* Records a mark like `mark`, but *m also records the time at which the stream reached it. NULL: enqueued work is
     * done when the call returns, and the host's clock gives the time. */
    ar_status (*stamp)(ari_stream *s, ari_mark **m);
    /* Computes the time from one stamp to a later one of the same stream, both reached. Required together with
     * stamp. */
    ar_status (*elapsed)(const ari_mark *begin, const ari_mark *end, double *seconds);
} ari_stream_ops;

/* Base of a stream; a device's stream types begin with it. */
struct ari_stream {
    const ari_stream_ops *ops;
    struct ar_device *device;
};
struct ari_mark {
    const ari_stream_ops *ops;
};

/** Creates a queue on a stream, which the queue owns; on failure the caller still does. A thread's queue waits for the
 *  stream after each of its tasks. Otherwise as ar_queue_create. */
AR_NODISCARD ar_status ari_queue_create_on(ar_queue **out, ar_queue_kind kind, const char *name, ari_stream *s);
/** Returns the queue's stream; NULL: none, and tasks are done when they return. */
ari_stream *ari_queue_stream(const ar_queue *q);

/** The host waits for everything enqueued on s so far. */
AR_NODISCARD ar_status ari_stream_sync(ari_stream *s, uint64_t timeout_ns);
/** Accepts NULL. */
void ari_mark_destroy(ari_mark *m);

/* A status and its message, to be carried to another thread or process. */
typedef struct ari_outcome {
    ar_status status;
    char message[1024]; /* "": AR_OK */
} ari_outcome;
/** st, with this thread's message. */
ari_outcome ari_outcome_of(ar_status st);
/** Returns the status, and makes its message this thread's message. */
ar_status ari_outcome_status(const ari_outcome *o);

/* Failure that may come from outside of a queue at any time and ends the work in progress on its stream, such as the
 * failure of a communicator whose data a device moves. A wait that would otherwise succeed returns it. Counted
 * references; usable from any thread. */
typedef struct ari_failure ari_failure;

/** Creates a failure that has not occurred. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_failure_create(ari_failure **out);
ari_failure *ari_failure_keep(ari_failure *f);
/** Accepts NULL. */
void ari_failure_release(ari_failure *f);
/** Sets the failure; the first call wins. */
void ari_failure_set(ari_failure *f, ar_status st, const char *message);
/** Returns AR_OK, or the failure that has occurred; *message lives as long as f. */
ar_status ari_failure_get(const ari_failure *f, const char **message);

/** Makes the failure q's too: its waits and enqueued work end with it. A later call replaces it. */
void ari_queue_heed(ar_queue *q, ari_failure *f);

AR_END_DECLS
