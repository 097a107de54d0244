/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* The process' memory on a GPU: CUDA's stream-ordered allocator, in a pool of its own, which all devices on that GPU
 * share. The GPU's default pool stays as its other users, a program's own libraries, have set it. Each GPU with a pool
 * can read and write the memory of all the process's pools that it can reach. */
#include <cuda_runtime.h>

#include "anyrank/device.h"

namespace ari_cuda
{

struct pool;

/* A stream that takes memory from a pool or gives it back. */
struct pool_stream {
    cudaStream_t handle;
    cudaEvent_t passed; /* recorded by the last pool_trim; NULL: none has been */
    pool_stream *next;
};

/* The pool of GPU `gpu`, the calling thread's; made with the first device on it. pool_close. */
ar_status pool_open(pool **out, int gpu);
/* The GPU has the memory back with the last one. Accepts NULL. */
void pool_close(pool *p);
/* Adds a stream of the pool's GPU, which is the calling thread's. The stream's owner removes it before it ends. */
void pool_join(pool *p, pool_stream *s);
void pool_leave(pool *p, pool_stream *s);
/* Memory for work that is enqueued on s from now on. Memory that another stream has freed is used only once that stream
 * has done what precedes the free. If there is no memory, the pool is trimmed and the GPU asked once more. Errors:
 * AR_ERR_MEMORY, those of pool_trim. */
ar_status pool_take(pool *p, void **out, size_t bytes, cudaStream_t s, uint64_t timeout_ns);
/* The host waits for what all streams of the pool have now. Then the GPU gets the memory that the pool keeps for reuse.
 * Errors: AR_ERR_TIMEOUT, AR_ERR_DEVICE. */
ar_status pool_trim(pool *p, uint64_t timeout_ns);

} // namespace ari_cuda
