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

/* The pool of GPU `gpu`, the calling thread's; made with the first device on it. pool_close. */
ar_status pool_open(pool **gives, int gpu);
/* The GPU has the memory back with the last one. Accepts NULL. */
void pool_close(pool *p);
/* Memory that comes after what was enqueued on s. What other streams have freed and still use is waited for where there
 * is no other. Errors: AR_ERR_MEMORY, AR_ERR_DEVICE. */
ar_status pool_take(pool *p, void **gives, size_t bytes, cudaStream_t s);
/* Waits for the GPU and gives it what the pool keeps for reuse. */
ar_status pool_trim(pool *p);

} // namespace ari_cuda
