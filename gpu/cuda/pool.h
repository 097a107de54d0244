/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Memory of the process on a GPU: CUDA's stream-ordered allocator with a separate pool that all devices on the GPU
 * share. The GPU's default pool keeps the settings of its other users, such as a program's own libraries. Each GPU with
 * a pool can read and write all pools of the process that it can reach. */
#include <cuda_runtime.h>

#include "anyrank/device.h"

namespace ari_cuda
{

struct pool;

/* Stream that allocates from a pool or frees to it. */
struct pool_stream {
    cudaStream_t handle;
    cudaEvent_t passed; /* event recorded by the last pool_trim; NULL: none yet */
    pool_stream *next;
};

/* Returns the pool of GPU `gpu`, the calling thread's, created with the first device on it. Close it with
 * pool_close. */
ar_status pool_open(pool **out, int gpu);
/* Closes a pool; the last user returns the memory to the GPU. Accepts NULL. */
void pool_close(pool *p);
/* Adds a stream of the pool's GPU, which must be the calling thread's. The stream's owner removes it before ending
 * it. */
void pool_join(pool *p, pool_stream *s);
void pool_leave(pool *p, pool_stream *s);
/* Allocates memory for work that is enqueued on s from now on. Memory freed by another stream is reused only after that
 * stream has finished the work before the free. If there is no memory, trims the pool and asks the GPU once more.
 * Errors: AR_ERR_MEMORY, those of pool_trim. */
ar_status pool_take(pool *p, void **out, size_t bytes, cudaStream_t s, uint64_t timeout_ns);
/* Waits on the host for the current work of all streams of the pool, then returns the cached memory to the GPU. Errors:
 * AR_ERR_TIMEOUT, AR_ERR_DEVICE. */
ar_status pool_trim(pool *p, uint64_t timeout_ns);

} // namespace ari_cuda
