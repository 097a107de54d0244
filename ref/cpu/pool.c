/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/device.h"

#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

/* Header in front of every buffer, which records its size for when it is freed. */
struct ari_block {
    size_t bytes;     /* size including this header, a multiple of ALIGNMENT */
    size_t requested; /* size that the user requested */
};

#define ALIGNMENT ((size_t)64)
/* Size from which glibc asks the kernel for pages; below it, glibc's free lists are as fast as these. */
#define LARGE ((size_t)1 << 17)

/* With a sanitizer nothing is kept, so that it sees every allocation and release. */
#if defined(ARI_SANITIZED)
#define KEEP 0
#else
#define KEEP 1
#endif

void ari_pool_init(ari_pool *p)
{
    *p = (ari_pool){.n = 0};
    pthread_mutex_init(&p->lock, NULL);
}

/* Takes kept block i out of the list. */
static ari_block *take_block(ari_pool *p, size_t i)
{
    ari_block *b = p->block[i];
    p->n--;
    memmove(p->block + i, p->block + i + 1, (p->n - i) * sizeof *p->block);
    p->cached -= b->bytes;
    return b;
}

void ari_pool_fini(ari_pool *p)
{
    while (p->n > 0)
        free(take_block(p, p->n - 1));
    pthread_mutex_destroy(&p->lock);
}

/* Returns the smallest cached block that is large enough and wastes at most an eighth; NULL: none. */
static ari_block *find_block(ari_pool *p, size_t requested)
{
    size_t best_index = p->n;
    for (size_t i = 0; i < p->n; i++) {
        const size_t bytes = p->block[i]->bytes;
        const bool fits = bytes >= requested && bytes - requested <= bytes / 8;
        if (fits && (best_index == p->n || bytes <= p->block[best_index]->bytes))
            best_index = i; /* among equal sizes the newest block, which is most likely in a cache */
    }
    return best_index < p->n ? take_block(p, best_index) : NULL;
}

/* Returns cached blocks to the system until all memory is within `limit`. */
static void shrink(ari_pool *p, size_t limit)
{
    while (p->n > 0 && p->in_use + p->cached > limit)
        free(take_block(p, 0));
}

/* Returns the limit of used and cached memory together. It includes slack, because steps whose phases request different
 * sizes would otherwise map new pages in every phase. */
static size_t limit_of(const ari_pool *p)
{
    const size_t peak = ari_larger(p->peak, p->requested);
    return peak + peak / ARI_POOL_SLACK;
}

/* Returns a free block; NULL if a new one must be allocated. */
static ari_block *reuse(ari_pool *p, size_t requested)
{
    pthread_mutex_lock(&p->lock);
    p->requested += requested;
    ari_block *b = find_block(p, requested);
    p->in_use += b ? b->bytes : requested;
    shrink(p, limit_of(p));
    pthread_mutex_unlock(&p->lock);
    return b;
}

/* Allocates a new block; if there is no memory, frees cached blocks and tries again. */
static ari_block *allocate_block(ari_pool *p, size_t bytes)
{
    ari_block *b = aligned_alloc(ALIGNMENT, bytes);
    if (!b) {
        pthread_mutex_lock(&p->lock);
        shrink(p, 0);
        pthread_mutex_unlock(&p->lock);
        b = aligned_alloc(ALIGNMENT, bytes);
    }
    if (b)
        b->bytes = bytes;
    return b;
}

/* Undoes the count of `reuse` after a failed allocation. */
static void give_up(ari_pool *p, size_t requested)
{
    pthread_mutex_lock(&p->lock);
    p->in_use -= requested;
    p->requested -= requested;
    pthread_mutex_unlock(&p->lock);
}

ar_status ari_pool_alloc(ari_pool *p, void **out, size_t bytes)
{
    size_t rounded = 0;
    AR_TRY(ari_add_size(&rounded, bytes > 0 ? bytes : 1, 2 * ALIGNMENT - 1));
    rounded &= ~(ALIGNMENT - 1);
    const bool large = rounded >= LARGE;
    ari_block *b = large ? reuse(p, rounded) : NULL;
    if (!b)
        b = allocate_block(p, rounded);
    if (!b) {
        if (large)
            give_up(p, rounded);
        return ar_error_set(AR_ERR_MEMORY, "cpu device: no memory for a buffer of %zu bytes", bytes);
    }
    b->requested = rounded;
    *out = (char *)b + ALIGNMENT;
    return AR_OK;
}

void ari_pool_free(ari_pool *p, void *memory)
{
    if (!memory)
        return;
    ari_block *b = (ari_block *)(void *)((char *)memory - ALIGNMENT);
    if (b->requested < LARGE) {
        free(b);
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->peak = ari_larger(p->peak, p->requested);
    p->in_use -= b->bytes;
    p->requested -= b->requested;
    if (p->n == ARI_POOL_KEPT)
        free(take_block(p, 0));
    p->block[p->n++] = b;
    p->cached += b->bytes;
    shrink(p, KEEP ? limit_of(p) : 0);
    pthread_mutex_unlock(&p->lock);
}
