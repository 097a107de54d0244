/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_STREAM_H
#define ARI_CORE_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/queue.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A device's own in-order list of work, on which a queue may stand: a task of that queue enqueues there what is done
 * later. Waiting for the queue then means waiting for the stream too. A mark is a point in a stream. One thread at a
 * time enqueues, makes a stream wait, and moves a mark; any thread takes new marks, meanwhile too, and waits for one. A
 * mark outlives its stream, and its device. */
struct ar_device;
typedef struct ari_stream ari_stream;
typedef struct ari_mark ari_mark;

typedef struct ari_stream_ops {
    /* *m = the point behind everything enqueued so far. *m NULL: makes a mark, ari_mark_destroy; else moves it. Errors:
     * AR_ERR_MEMORY, AR_ERR_DEVICE. */
    ar_status (*mark)(ari_stream *s, ari_mark **m);
    /* What is enqueued on s from now on comes after the point; the host does not wait. The mark may be of another
     * stream of the same device, and may be moved or destroyed right afterwards. */
    ar_status (*wait)(ari_stream *s, const ari_mark *m);
    /* The host waits. timeout_ns 0: no limit. Errors: AR_ERR_TIMEOUT, AR_ERR_DEVICE (what the device did wrong before
     * that point). */
    ar_status (*await)(const ari_mark *m, uint64_t timeout_ns);
    ar_status (*poll)(const ari_mark *m, bool *done);
    void (*mark_destroy)(ari_mark *m);
    void (*destroy)(ari_stream *s); /* nothing of it is under way */
} ari_stream_ops;

/* A device's own types begin with these. */
struct ari_stream {
    const ari_stream_ops *ops;
    struct ar_device *device;
};
struct ari_mark {
    const ari_stream_ops *ops;
};

/** As ar_queue_create, for a queue that stands on a stream, which it owns from then on; on failure the caller does. A
 *  thread's queue waits for the stream after each of its tasks. */
AR_NODISCARD ar_status ari_queue_create_on(ar_queue **gives, ar_queue_kind kind, const char *name, ari_stream *s);
/** NULL: it stands on none, its tasks are done when they return. */
ari_stream *ari_queue_stream(const ar_queue *q);

/** The host waits for everything enqueued on s so far. */
AR_NODISCARD ar_status ari_stream_sync(ari_stream *s, uint64_t timeout_ns);
/** Accepts NULL. */
void ari_mark_destroy(ari_mark *m);

#ifdef __cplusplus
}
#endif
#endif
