/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Streams, and memory that is allocated and freed in stream order. Streams run their tasks at once or late, as
 * ANYRANK_EMULATED_STREAMS says (anyrank/device.h). Late streams have a list of tasks, and nothing runs before the host
 * waits. Then a scheduler chooses among the process's streams whose next task does not wait for an event that another
 * stream has not reached. Tasks run on the waiting thread, one at a time. */
#include "gpu/kernel.h"
#include "ref/core/queue_impl.h"

namespace ari_emulated
{

/* Called for each new device. Reads the environment variable, which takes effect only if no stream exists. Errors:
 * AR_ERR_ARG (unknown value). */
ar_status streams_open(void);

/* Creates a stream, which the caller releases with its ops' destroy. */
ar_status stream_create(ari_stream **result, ar_device *d);
/* Returns the stream of an inline queue of this kind of device; NULL: another kind of queue. */
ari_stream *stream_of(const ar_queue *q);

/* Returns AR_ERR_DEVICE after a kernel's fault, or one that a guard revealed; every call returns it until no stream is
 * left. */
ar_status streams_failed(void);

/* Allocates memory for work that is enqueued on s from now on. As in CUDA's pool, it may have been freed on s and still
 * be in use there, or on another stream, for which s then waits. Errors: AR_ERR_MEMORY. */
ar_status stream_alloc(ari_stream *s, void **result, size_t bytes);
/* Releases memory when s reaches this point: checks its guard and fills it with junk. */
void stream_free(ari_stream *s, void *address);
/* Waits for all streams of d, then releases memory. */
void device_free(ar_device *d, void *address);

} // namespace ari_emulated
