/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Memory of the emulated device, one for the process, as the process's ranks share a GPU. Its addresses belong to
 * memory that the host may not access; arena_at returns the address for kernels. Under AddressSanitizer blocks come
 * from the C library, which checks their bounds. Any thread may call these functions.
 *
 * A block is followed by GUARD bytes that nothing may write. Free or unused memory is filled with junk. */
#include <stdint.h>

#include "gpu/emulated/fiber.h"

namespace ari_emulated
{

#if defined(ARI_SANITIZED) && !ARI_WATCHED
const bool sanitized = true;
#else
const bool sanitized = false;
#endif

const size_t LINE = 64, GUARD = 64, NO_GUARD = SIZE_MAX;

/* Header before each block, in memory that kernels can reach. It is a full cache line, for the alignment of the
 * block. */
struct alignas(64) chunk {
    size_t units;         /* lines of 64 bytes, including this one */
    size_t bytes;         /* requested bytes */
    bool resident;        /* true if its pages have been accessed since their allocation */
    chunk *next, *prev;   /* neighbours in a list: of free blocks of the same class, or of blocks to be freed late on
                             the same stream (gpu/emulated/stream.cc) */
    const void *freed_by; /* work that still has to free the block; NULL: none */
    size_t guard;         /* offset of the guard from the block's start; NO_GUARD: no guard now */
};
static_assert(sizeof(chunk) == 64, "one line");

/* Prepares the arena; to be called first. Errors: AR_ERR_ARG (ANYRANK_EMULATED_MEMORY, the limit in MiB),
 * AR_ERR_MEMORY. */
ar_status arena_open(void);
/* Allocates memory at a 64-byte aligned address. Errors: AR_ERR_MEMORY. */
ar_status arena_take(void **result, size_t bytes);
void arena_give(void *address);
/* Do the same for a block that a worker uses next, or used last: guard and junk are written in the worker's order, and
 * the last user's work comes before the next user's, as between streams in CUDA's pool. Errors of the second: a damaged
 * guard. */
ar_status arena_take_by(worker *w, void **result, size_t bytes);
ar_status arena_give_by(worker *w, void *address, size_t bytes);
/* True if an address is in this memory. Under a sanitizer always true. */
bool arena_has(const void *address);
/* The kernels' address of memory for which arena_has is true. */
void *arena_at(const void *address);
/* The chunk of a block; NULL under a sanitizer. */
chunk *arena_chunk(const void *address);
void *arena_address(chunk *c);
/* True if a block of this many bytes fits into c, and c is not much larger. */
bool arena_fits(const chunk *c, size_t bytes);

/* Set the guard of a block, check it for the last time, and check the guards of all blocks that have one. Errors:
 * AR_ERR_DEVICE, a kernel wrote there. */
void guard_set(void *address, size_t bytes);
ar_status guard_end(void *address, size_t bytes);
ar_status guards_check(void);
/* Junk instead of a block's contents. */
void arena_spoil(void *address);

} // namespace ari_emulated
