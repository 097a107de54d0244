/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks have size classes. Address space is allocated upwards and never reused for other classes; a freed block is
 * used for the next request of its class. When ranks need more memory than is available, free blocks first return their
 * pages. */
#include "gpu/emulated/memory.h"

#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace ari_emulated
{

namespace
{

const size_t CLASSES = 64 * 8; /* eight sizes to each power of two */

struct arena {
    pthread_mutex_t lock;
    char *handed_out, *for_kernels; /* two mappings of `reserved` bytes; the first cannot be accessed */
    size_t reserved, limit;
    size_t top;    /* used part of the address space, from its start */
    size_t used;   /* bytes in allocated blocks */
    size_t cached; /* bytes of pages in free blocks */
    chunk *free[CLASSES];
};

/* Constants of the process after the first device has been created; a lock guards the data that they point to. */
pthread_once_t once = PTHREAD_ONCE_INIT;
arena *memory;
bool limit_is_wrong;

const size_t junk = 0xa5;

/* Returns ANYRANK_EMULATED_MEMORY, or the machine's memory. */
size_t read_limit(void)
{
    const char *text = getenv("ANYRANK_EMULATED_MEMORY");
    if (!text)
        return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
    char *end = nullptr;
    const unsigned long long mib = strtoull(text, &end, 10);
    limit_is_wrong = *text < '0' || *text > '9' || *end || mib == 0 || mib > (1ULL << 24);
    return static_cast<size_t>(mib) << 20;
}

char *reserve(size_t bytes, int protection)
{
    void *mapping = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED)
        return nullptr;
    (void)madvise(mapping, bytes, MADV_DONTDUMP); /* if it fails, core files are larger */
    return static_cast<char *>(mapping);
}

/* Maps more address space than memory, because classes do not share theirs; less if the process may not have as
 * much. */
bool map_both(arena *a)
{
    for (a->reserved = a->limit * 4; a->reserved >= (1U << 20); a->reserved /= 2) {
        a->handed_out = reserve(a->reserved, PROT_NONE);
        a->for_kernels = a->handed_out ? reserve(a->reserved, PROT_READ | PROT_WRITE) : nullptr;
        if (a->for_kernels)
            return true;
        if (a->handed_out)
            munmap(a->handed_out, a->reserved);
    }
    return false;
}

void create_arena(void)
{
    arena *a = static_cast<arena *>(calloc(1, sizeof *a));
    if (!a)
        return;
    a->limit = read_limit();
    if (pthread_mutex_init(&a->lock, nullptr) == 0 && (limit_is_wrong || sanitized || map_both(a)))
        memory = a;
    else
        ::free(a);
}

/* Returns the size class of a number of lines. *units is rounded up to the class's size. */
size_t class_of(size_t *units)
{
    size_t power = 0;
    while (*units >> (power + 4))
        power++;
    const size_t rounded = (*units + (static_cast<size_t>(1) << power) - 1) >> power; /* 0 to 16 */
    *units = rounded << power;
    return power * 8 + rounded; /* 16 of one power is 8 of the next, which is the same size */
}

size_t class_of_chunk(const chunk *c)
{
    size_t units = c->units;
    return class_of(&units);
}

/* Computes the lines of a block with its header and guard. Returns whether such a block may exist. */
bool units_of(size_t *units, size_t bytes)
{
    *units = bytes / LINE + 1 + (bytes % LINE > 0) + GUARD / LINE;
    return bytes <= memory->limit;
}

/* Writes a non-zero pattern, in every line of small blocks and once per KiB of large ones: a kernel that reads
 * unwritten memory gets other bits. */
void spoil(void *address, size_t bytes)
{
    const size_t full_bytes = static_cast<size_t>(1) << 20, step = 1024;
    char *dst = static_cast<char *>(address);
    memset(dst, junk, bytes < full_bytes ? bytes : full_bytes);
    for (size_t i = full_bytes; i + LINE <= bytes; i += step)
        memset(dst + i, junk, LINE);
}

/* Returns the pages of free blocks; the blocks stay. Requires `lock`. */
void release_pages(arena *a)
{
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (chunk *head : a->free) {
        for (chunk *h = head; h; h = h->next) {
            const uintptr_t begin = (reinterpret_cast<uintptr_t>(h + 1) + page - 1) / page * page,
                            end = reinterpret_cast<uintptr_t>(h + h->units) / page * page;
            if (!h->resident || begin >= end ||
                madvise(reinterpret_cast<void *>(begin), end - begin, MADV_DONTNEED) != 0)
                continue;
            h->resident = false;
            a->cached -= h->units * LINE;
        }
    }
}

chunk *take_free(arena *a, size_t of_class)
{
    chunk *h = a->free[of_class];
    if (h) {
        a->free[of_class] = h->next;
        a->cached -= h->resident ? h->units * LINE : 0;
    }
    return h;
}

/* Finds a block of at least `units`: a free one, a new one, or without address space a larger one. Requires `lock`. */
chunk *find(arena *a, size_t units, size_t of_class)
{
    chunk *h = take_free(a, of_class);
    const bool fits = units * LINE <= a->reserved - a->top;
    for (size_t c = of_class + 1; !h && !fits && c < CLASSES; c++)
        h = take_free(a, c);
    if (h || !fits)
        return h;
    h = reinterpret_cast<chunk *>(a->for_kernels + a->top);
    a->top += units * LINE;
    h->units = units;
    h->guard = NO_GUARD;
    return h;
}

/* Checks the guard of a block. */
ar_status look_at_guard(const chunk *c, size_t bytes)
{
    const unsigned char *guard = reinterpret_cast<const unsigned char *>(c + 1) + bytes;
    size_t i = 0;
    while (i < GUARD && guard[i] == junk)
        i++;
    return i == GUARD
               ? AR_OK
               : ar_error_set(AR_ERR_DEVICE,
                              "a kernel wrote behind a block of %zu bytes of device memory: %zu bytes past its end",
                              bytes, i);
}

ar_status refuse(const arena *a, size_t bytes, size_t used)
{
    return ar_error_set(AR_ERR_MEMORY,
                        "the emulated device's memory: %zu bytes asked for, %zu of %zu free "
                        "(ANYRANK_EMULATED_MEMORY sets the limit, in MiB)",
                        bytes, a->limit > used ? a->limit - used : 0, a->limit);
}

ar_status take_watched(void **result, size_t bytes)
{
    void *address = nullptr;
    /* Not aligned_alloc, because the guard should begin where the bytes end. */
    if (bytes > memory->limit || posix_memalign(&address, LINE, bytes > 0 ? bytes : 1) != 0)
        return refuse(memory, bytes, __atomic_load_n(&memory->used, __ATOMIC_RELAXED));
    const size_t size = malloc_usable_size(address), used = __atomic_add_fetch(&memory->used, size, __ATOMIC_RELAXED);
    if (used > memory->limit) {
        arena_give(address);
        return refuse(memory, bytes, used - size);
    }
    spoil(address, bytes);
    *result = address;
    return AR_OK;
}

} // namespace

bool arena_has(const void *address)
{
    const uintptr_t target = reinterpret_cast<uintptr_t>(address),
                    base = reinterpret_cast<uintptr_t>(memory->handed_out);
    return sanitized || (target >= base && target - base < memory->reserved);
}

void *arena_at(const void *address)
{
    char *target = static_cast<char *>(const_cast<void *>(address));
    return sanitized ? target : memory->for_kernels + (target - memory->handed_out);
}

chunk *arena_chunk(const void *address)
{
    return sanitized ? nullptr : static_cast<chunk *>(arena_at(address)) - 1;
}

void *arena_address(chunk *c)
{
    return memory->handed_out + (reinterpret_cast<char *>(c + 1) - memory->for_kernels);
}

bool arena_fits(const chunk *c, size_t bytes)
{
    size_t units = 0;
    return units_of(&units, bytes) && class_of(&units) <= class_of_chunk(c) && c->units <= 2 * units;
}

void guard_set(void *address, size_t bytes)
{
    if (sanitized)
        return;
    memset(static_cast<char *>(arena_at(address)) + bytes, junk, GUARD);
    __atomic_store_n(&arena_chunk(address)->guard, bytes, __ATOMIC_RELEASE);
}

ar_status guard_end(void *address, size_t bytes)
{
    if (sanitized)
        return AR_OK;
    __atomic_store_n(&arena_chunk(address)->guard, NO_GUARD, __ATOMIC_RELEASE);
    return look_at_guard(arena_chunk(address), bytes);
}

/* Memory freed meanwhile holds junk, as a guard does, and is not reused before the lock is released. */
ar_status guards_check(void)
{
    arena *a = memory;
    ar_status st = AR_OK;
    pthread_mutex_lock(&a->lock);
    for (size_t offset = 0; offset < a->top && st == AR_OK;) {
        const chunk *c = reinterpret_cast<const chunk *>(a->for_kernels + offset);
        const size_t bytes = __atomic_load_n(&c->guard, __ATOMIC_ACQUIRE);
        if (bytes != NO_GUARD)
            st = look_at_guard(c, bytes);
        offset += c->units * LINE;
    }
    pthread_mutex_unlock(&a->lock);
    return st;
}

void arena_spoil(void *address)
{
    if (sanitized)
        spoil(address, malloc_usable_size(address));
    else
        spoil(arena_at(address), (arena_chunk(address)->units - 1) * LINE);
}

/* The caller may overwrite the contents. */
static void give_block(void *address)
{
    arena *a = memory;
    if (sanitized) {
        __atomic_sub_fetch(&a->used, malloc_usable_size(address), __ATOMIC_RELAXED);
        ::free(address);
        return;
    }
    chunk *h = arena_chunk(address);
    const size_t of_class = class_of_chunk(h);
    pthread_mutex_lock(&a->lock);
    a->used -= h->units * LINE;
    a->cached += h->units * LINE;
    h->next = a->free[of_class];
    a->free[of_class] = h;
    pthread_mutex_unlock(&a->lock);
}

void arena_give(void *address)
{
    if (!address)
        return;
    if (!sanitized)
        arena_spoil(address);
    give_block(address);
}

ar_status arena_open(void)
{
    pthread_once(&once, create_arena);
    if (!memory)
        return ar_error_set(AR_ERR_MEMORY, "the emulated device: no address space for its memory");
    if (limit_is_wrong)
        return ar_error_set(AR_ERR_ARG, "ANYRANK_EMULATED_MEMORY is '%.40s'; a number of MiB, from 1",
                            getenv("ANYRANK_EMULATED_MEMORY"));
    return AR_OK;
}

/* The caller sets the guard. */
static ar_status take_block(void **result, size_t bytes)
{
    arena *a = memory;
    if (sanitized)
        return take_watched(result, bytes);
    chunk *h = nullptr;
    size_t units = 0, used;
    const bool possible = units_of(&units, bytes);
    const size_t of_class = class_of(&units);
    pthread_mutex_lock(&a->lock);
    used = a->used;
    if (possible && used <= a->limit && units * LINE <= a->limit - used) {
        if (used + a->cached + units * LINE > a->limit)
            release_pages(a);
        h = find(a, units, of_class);
        a->used += h ? h->units * LINE : 0;
    }
    pthread_mutex_unlock(&a->lock);
    if (!h)
        return refuse(a, bytes, used);
    *result = arena_address(h);
    if (!h->resident)
        arena_spoil(*result);
    h->resident = true;
    h->next = nullptr;
    h->bytes = bytes;
    return AR_OK;
}

ar_status arena_take(void **result, size_t bytes)
{
    AR_TRY(take_block(result, bytes));
    guard_set(*result, bytes);
    return AR_OK;
}

/* Block as an argument of a worker's task. */
struct block_of {
    void *address;
    size_t bytes;

    static ar_status begin(const void *arg)
    {
        const block_of *b = static_cast<const block_of *>(arg);
        guard_set(b->address, b->bytes);
        return AR_OK;
    }
    static ar_status end(const void *arg)
    {
        const block_of *b = static_cast<const block_of *>(arg);
        const ar_status st = guard_end(b->address, b->bytes);
        if (!sanitized)
            arena_spoil(b->address);
        return st;
    }
};

ar_status arena_take_by(worker *w, void **result, size_t bytes)
{
    AR_TRY(take_block(result, bytes));
    const block_of b = {*result, bytes};
    worker_after(w, arena_chunk(*result));
    return worker_call(w, b.begin, &b, sizeof b);
}

ar_status arena_give_by(worker *w, void *address, size_t bytes)
{
    const block_of b = {address, bytes};
    const ar_status st = worker_call(w, b.end, &b, sizeof b);
    worker_before(w, arena_chunk(address));
    give_block(address);
    return st;
}

} // namespace ari_emulated
