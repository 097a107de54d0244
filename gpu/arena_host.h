/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_GPU_ARENA_HOST_H
#define ARI_GPU_ARENA_HOST_H

/* The emulated device's memory: one for the process, as one GPU is shared by its ranks. The addresses that it hands out
 * are of memory that nobody may touch; reach() (gpu/kernel.h) tells kernels where the same memory lies for them. Under
 * a sanitizer it is the C library's, whose borders the sanitizer watches. Used by any thread. */
#include <stddef.h>

#include "anyrank/status.h"

namespace ari_emulated
{

#if defined(ARI_SANITIZED)
const bool sanitized = true;
#else
const bool sanitized = false;
#endif

/* Before anything else. Errors: AR_ERR_ARG (ANYRANK_EMULATED_MEMORY, the limit in MiB), AR_ERR_MEMORY. */
ar_status arena_open(void);
/* *gives = an address, 64-byte aligned; what lies there are no zeros. Errors: AR_ERR_MEMORY. */
ar_status arena_take(void **gives, size_t bytes);
void arena_give(void *address); /* accepts NULL */
/* Whether an address is of this memory. Under a sanitizer any is. */
bool arena_has(const void *address);
/* Where the memory at an address of arena_has lies for kernels. */
void *arena_at(const void *address);

} // namespace ari_emulated

#endif
