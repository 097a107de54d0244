/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Streams, and the memory that comes and goes in their order. They do their work at once, or late, as
 * ANYRANK_EMULATED_STREAMS says (anyrank/device.h). Late, each has a list of what it is to do, and nothing is done
 * before the host waits: then a scheduler chooses, among the streams of the process whose next task does not wait for a
 * point that another has not reached. What runs runs in the thread that waits, one task at a time. */
#include "gpu/kernel.h"
#include "ref/core/queue_impl.h"

namespace ari_emulated
{

/* With each device. Reads the variable, which is heeded where no stream is left. Errors: AR_ERR_ARG (another value). */
ar_status streams_open(void);

/* Gives; its ops' destroy. */
ar_status stream_create(ari_stream **result, ar_device *d);
/* The stream of an inline queue of this kind of device; NULL: the queue is none. */
ari_stream *stream_of(const ar_queue *q);

/* A kernel's fault, or one that a guard revealed; every call returns it from then on, until no stream is left:
 * AR_ERR_DEVICE. */
ar_status streams_failed(void);

/* Memory that may be used by what is enqueued on s from now on. It may have been freed there, and be in use still; or,
 * with a wait of s for it, on another stream: as CUDA's pool has it. Errors: AR_ERR_MEMORY. */
ar_status stream_alloc(ari_stream *s, void **result, size_t bytes);
/* Given back when s comes to it: its guard is looked at, and it becomes junk. */
void stream_free(ari_stream *s, void *address);
/* Waits for all streams of d, and gives it back. */
void device_free(ar_device *d, void *address);

} // namespace ari_emulated
