/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"
#include "ref/core/clock.h"

AR_BEGIN_DECLS

/** Returns the clock for measurements: the thread's processor time if the calling thread alone does the device's work,
 *  otherwise the monotonic clock. */
static inline uint64_t ari_device_clock_ns(const ar_device *d)
{
    return d->ops->host_reaches && d->threads == 1 ? ari_thread_ns() : ari_now_ns();
}

/* Measures the time of each slot of a device's table, by name: on a GPU from the slot's first kernel to its last, by
 * events in the stream; for a call that returns when its work is done, by the clock. */
typedef struct ari_profile ari_profile;

typedef struct ari_profile_row {
    const char *name; /* name of the slot; static storage */
    const char *part; /* part of its calls that the device distinguishes; NULL: all of them. Static storage */
    uint64_t calls;
    double seconds; /* seconds of all calls */
    uint64_t bytes; /* bytes of the tensors given to the calls, each counted in every call; buffers are not counted,
                       because a slot does not state their sizes */
} ari_profile_row;

#define ARI_PROFILE_ROWS 96

/** Times calls of d's table from now on, except allocations. One thread calls it and enqueues on d until
 *  ari_profile_end. Errors: AR_ERR_ARG (a profile is active already), AR_ERR_MEMORY; AR_ERR_UNSUPPORTED: a build
 *  without a C++ compiler. */
AR_NODISCARD ar_status ari_profile_begin(ari_profile **out, ar_device *d);
/** Waits for the calls, returns the rows with calls, and starts anew. Each slot's row precedes its parts; the longest
 *  slot comes first. rows: [ARI_PROFILE_ROWS]. Errors: AR_ERR_MEMORY (of an earlier call), AR_ERR_DEVICE. */
AR_NODISCARD ar_status ari_profile_read(ari_profile *p, ari_profile_row *rows, size_t *n);
/** Ends profiling, after the device has waited for its queues. Accepts NULL. */
void ari_profile_end(ari_profile *p);

/** Begins a part of a slot's call on q. Returns a handle for its end, NULL if d is not profiled. part: static
 *  storage. */
void *ari_profile_part(ar_device *d, ar_queue *q, const char *part);
void ari_profile_part_end(ar_device *d, ar_queue *q, void *begun);

AR_END_DECLS
