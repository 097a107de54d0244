/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's memory and queues. */
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "gpu/kernels.h"
#include "ref/core/queue_impl.h"

namespace ari_emulated
{

namespace
{

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* The device's memory: one for the process, as one GPU is shared by its ranks. The addresses that it hands out are of
 * memory that nobody may touch; reach() (gpu/kernel.h) says where the same memory is for kernels. Under a sanitizer it
 * is the C library's, whose borders the sanitizer watches. Used by any thread.
 *
 * Blocks are of size classes. Address space is taken once, upwards; a block that is given back serves the next of its
 * class. Where ranks need more than there is, blocks that nobody holds give their pages back first. */

#if defined(ARI_SANITIZED)
const bool sanitized = true;
#else
const bool sanitized = false;
#endif

/* Before each block, where kernels reach it. A whole line, for the alignment of what follows. */
struct alignas(64) header {
    size_t units;  /* lines of 64 bytes, this one included */
    bool resident; /* its pages have been touched since they were taken */
    header *next;  /* of the same class, free */
};
static_assert(sizeof(header) == 64, "one line");

const size_t CLASSES = 64 * 8; /* eight sizes to each power of two */

struct arena {
    pthread_mutex_t lock;
    char *handed_out, *for_kernels; /* two mappings of `reserved` bytes: the first cannot be touched */
    size_t reserved, limit;
    size_t taken; /* of the address space, from its beginning */
    size_t used;  /* bytes in blocks that are held */
    size_t kept;  /* bytes with pages in blocks that are free */
    header *free[CLASSES];
};

/* Constants of the process once the first device is made; what they point to is guarded by its lock. */
pthread_once_t once = PTHREAD_ONCE_INIT;
arena *memory;
bool limit_is_wrong;

const size_t line = 64, junk = 0xa5;

/* ANYRANK_EMULATED_MEMORY, or what the machine has. */
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
    void *at = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return nullptr;
    (void)madvise(at, bytes, MADV_DONTDUMP); /* where it fails, core files are larger */
    return static_cast<char *>(at);
}

/* More address space than memory, since classes do not lend each other theirs; less where the process may not have so
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

void make(void)
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

/* The class of so many lines. *units: rounded up to what the class holds. */
size_t class_of(size_t *units)
{
    size_t power = 0;
    while (*units >> (power + 4))
        power++;
    const size_t rounded = (*units + (static_cast<size_t>(1) << power) - 1) >> power; /* 0 to 16 */
    *units = rounded << power;
    return power * 8 + rounded; /* 16 of one power is 8 of the next, of the same size */
}

/* Something that is not zero, in every line of small blocks and once in a KiB of large ones: a kernel that reads what
 * nobody has written gives other bits. */
void spoil(void *at, size_t bytes)
{
    const size_t whole = static_cast<size_t>(1) << 20, step = 1024;
    char *to = static_cast<char *>(at);
    memset(to, junk, bytes < whole ? bytes : whole);
    for (size_t i = whole; i + line <= bytes; i += step)
        memset(to + i, junk, line);
}

/* Gives the pages of free blocks back; the blocks stay. `lock` held. */
void release_pages(arena *a)
{
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (header *first : a->free) {
        for (header *h = first; h; h = h->next) {
            const uintptr_t from = (reinterpret_cast<uintptr_t>(h + 1) + page - 1) / page * page,
                            to = reinterpret_cast<uintptr_t>(h + h->units) / page * page;
            if (!h->resident || from >= to || madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED) != 0)
                continue;
            h->resident = false;
            a->kept -= h->units * line;
        }
    }
}

header *take_free(arena *a, size_t of_class)
{
    header *h = a->free[of_class];
    if (h) {
        a->free[of_class] = h->next;
        a->kept -= h->resident ? h->units * line : 0;
    }
    return h;
}

/* A block of at least `units`: a free one, a new one, or, where no address space is left, a larger one. `lock` held. */
header *find(arena *a, size_t units, size_t of_class)
{
    header *h = take_free(a, of_class);
    const bool fits = units * line <= a->reserved - a->taken;
    for (size_t c = of_class + 1; !h && !fits && c < CLASSES; c++)
        h = take_free(a, c);
    if (h || !fits)
        return h;
    h = reinterpret_cast<header *>(a->for_kernels + a->taken);
    a->taken += units * line;
    h->units = units;
    return h;
}

ar_status refuse(const arena *a, size_t bytes, size_t used)
{
    return ar_error_set(AR_ERR_MEMORY,
                        "the emulated device's memory: %zu bytes asked for, %zu of %zu free "
                        "(ANYRANK_EMULATED_MEMORY sets the limit, in MiB)",
                        bytes, a->limit > used ? a->limit - used : 0, a->limit);
}

/* Whether an address is of this memory. Under a sanitizer any is. */
bool arena_has(const void *address)
{
    const uintptr_t at = reinterpret_cast<uintptr_t>(address), from = reinterpret_cast<uintptr_t>(memory->handed_out);
    return sanitized || (at >= from && at - from < memory->reserved);
}

/* Where the memory at an address of arena_has is for kernels. */
void *arena_at(const void *address)
{
    char *at = static_cast<char *>(const_cast<void *>(address));
    return sanitized ? at : memory->for_kernels + (at - memory->handed_out);
}

void arena_give(void *address)
{
    arena *a = memory;
    if (!address)
        return;
    if (sanitized) {
        __atomic_sub_fetch(&a->used, malloc_usable_size(address), __ATOMIC_RELAXED);
        ::free(address);
        return;
    }
    header *h = static_cast<header *>(arena_at(address)) - 1;
    size_t units = h->units;
    const size_t of_class = class_of(&units);
    pthread_mutex_lock(&a->lock);
    a->used -= units * line;
    a->kept += units * line;
    h->next = a->free[of_class];
    a->free[of_class] = h;
    pthread_mutex_unlock(&a->lock);
}

ar_status take_watched(void **gives, size_t bytes)
{
    void *at = nullptr;
    /* Not aligned_alloc: the border is to be where the bytes end. */
    if (bytes > memory->limit || posix_memalign(&at, line, bytes > 0 ? bytes : 1) != 0)
        return refuse(memory, bytes, __atomic_load_n(&memory->used, __ATOMIC_RELAXED));
    const size_t size = malloc_usable_size(at), used = __atomic_add_fetch(&memory->used, size, __ATOMIC_RELAXED);
    if (used > memory->limit) {
        arena_give(at);
        return refuse(memory, bytes, used - size);
    }
    spoil(at, bytes);
    *gives = at;
    return AR_OK;
}

/* Before anything else. Errors: AR_ERR_ARG (ANYRANK_EMULATED_MEMORY, the limit in MiB), AR_ERR_MEMORY. */
ar_status arena_open(void)
{
    pthread_once(&once, make);
    if (!memory)
        return ar_error_set(AR_ERR_MEMORY, "the emulated device: no address space for its memory");
    if (limit_is_wrong)
        return ar_error_set(AR_ERR_ARG, "ANYRANK_EMULATED_MEMORY is '%.40s'; a number of MiB, from 1",
                            getenv("ANYRANK_EMULATED_MEMORY"));
    return AR_OK;
}

/* *gives = an address, 64-byte aligned; its contents are not zeros. Errors: AR_ERR_MEMORY. */
ar_status arena_take(void **gives, size_t bytes)
{
    arena *a = memory;
    if (sanitized)
        return take_watched(gives, bytes);
    header *h = nullptr;
    size_t units = bytes / line + 1 + (bytes % line > 0), used;
    const size_t of_class = class_of(&units);
    pthread_mutex_lock(&a->lock);
    used = a->used;
    if (bytes <= a->limit && used <= a->limit && units * line <= a->limit - used) {
        if (used + a->kept + units * line > a->limit)
            release_pages(a);
        h = find(a, units, of_class);
        a->used += h ? h->units * line : 0;
    }
    pthread_mutex_unlock(&a->lock);
    if (!h)
        return refuse(a, bytes, used);
    h->resident = true;
    h->next = nullptr;
    spoil(h + 1, (h->units - 1) * line);
    *gives = a->handed_out + (reinterpret_cast<char *>(h + 1) - a->for_kernels);
    return AR_OK;
}

/* --- the device and its streams ----------------------------------------------------------------------------------- */

struct emulated_device {
    ar_device base; /* first: an ar_device of this kind is one of these */
    ar_device_ops ops;
    order runs;
    ari_imma imma;
};

/* The address that dev<>() could not translate since this thread's last launch. */
thread_local const void *wrong_address;

/* Streams do their work at once, and have the marks of streams that do not. */

void mark_destroy(ari_mark *m)
{
    ::free(m);
}

ar_status mark(ari_stream *s, ari_mark **m)
{
    if (!*m)
        *m = static_cast<ari_mark *>(malloc(sizeof **m));
    if (!*m)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a mark in a stream");
    (*m)->ops = s->ops;
    return AR_OK;
}

ar_status wait(ari_stream *s, const ari_mark *m)
{
    (void)s;
    (void)m;
    return AR_OK;
}

ar_status await(const ari_mark *m, uint64_t timeout_ns)
{
    (void)m;
    (void)timeout_ns;
    return AR_OK;
}

ar_status poll(const ari_mark *m, bool *done)
{
    (void)m;
    *done = true;
    return AR_OK;
}

void stream_destroy(ari_stream *s)
{
    ::free(s);
}

const ari_stream_ops stream_ops = {mark, wait, await, poll, mark_destroy, stream_destroy, nullptr, nullptr};

/* A kernel runs in the order of one stream, so its queue is an inline one of this kind of device. */
ar_status check_queue(ar_queue *q)
{
    const ari_stream *s = q ? ari_queue_stream(q) : nullptr;
    if (s && s->ops == &stream_ops && ari_queue_is_inline(q))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "a kernel of the emulated device was given a queue that is not %s",
                        !q || ari_queue_is_inline(q) ? "this device's" : "an inline one");
}

} // namespace

/* --- what kernels call -------------------------------------------------------------------------------------------- */

ar_status enter(ar_device *d, ar_queue *q, order *o)
{
    const void *wrong = wrong_address;
    wrong_address = nullptr;
    if (wrong)
        return ar_error_set(AR_ERR_DEVICE, "a kernel was given %p, an address of the host", wrong);
    *o = reinterpret_cast<emulated_device *>(d)->runs;
    return check_queue(q);
}

ari_imma imma_of(const ar_device *d)
{
    return reinterpret_cast<const emulated_device *>(d)->imma;
}

void *reach(const void *device_address)
{
    if (!device_address)
        return nullptr;
    if (arena_has(device_address))
        return arena_at(device_address);
    wrong_address = device_address;
    return const_cast<void *>(device_address);
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

ar_status queue_create(ar_device *d, ar_queue **gives, ar_queue_kind kind, const char *name)
{
    ari_stream *s = static_cast<ari_stream *>(malloc(sizeof *s));
    if (!s)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a stream of the emulated device");
    s->ops = &stream_ops;
    s->device = d;
    const ar_status st = ari_queue_create_on(gives, kind, name, s);
    if (st != AR_OK)
        ::free(s);
    return st;
}

ar_status alloc(ar_device *d, ar_queue *q, ar_buf *gives, size_t bytes)
{
    (void)d;
    AR_TRY(check_queue(q));
    return arena_take(&gives->ptr, bytes);
}

void free(ar_device *d, ar_queue *q, ar_buf b)
{
    (void)d;
    (void)q;
    arena_give(b.ptr);
}

/* Either side may be the host's. */
static void *either(const void *address)
{
    return arena_has(address) ? arena_at(address) : const_cast<void *>(address);
}

ar_status copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    order o;
    AR_TRY(enter(d, q, &o));
    if (bytes > 0)
        memcpy(either(dst.ptr), either(src.ptr), bytes);
    return AR_OK;
}

ar_status zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    order o;
    void *to = dev<void>(dst);
    AR_TRY(enter(d, q, &o));
    if (bytes > 0)
        memset(to, 0, bytes);
    return AR_OK;
}

void destroy(ar_device *d)
{
    ::free(d);
}

/* ANYRANK_EMULATED_ORDER. Under a sanitizer, which does not follow a thread from stack to stack, threads run as
 * `forward` has them. */
static ar_status read_order(order *o)
{
    const char *text = getenv("ANYRANK_EMULATED_ORDER");
    *o = order::forward;
    if (!text || strcmp(text, "forward") == 0)
        return AR_OK;
    if (strcmp(text, "backward") != 0 && strcmp(text, "threads") != 0)
        return ar_error_set(AR_ERR_ARG, "ANYRANK_EMULATED_ORDER is '%.40s'; it takes forward, backward or threads",
                            text);
    *o = text[0] == 'b' ? order::backward : sanitized ? order::forward : order::threads;
    return AR_OK;
}

} // namespace ari_emulated

/* So small that short sequences are cut too. */
static const size_t BLOCK_BYTES = 16384;

ar_status ar_device_emulated_create(ar_device **gives)
{
    using namespace ari_emulated;
    order o;
    ari_imma imma;
    AR_TRY(read_order(&o));
    AR_TRY(ari_imma_choose(&imma));
    AR_TRY(arena_open());
    emulated_device *d = static_cast<emulated_device *>(calloc(1, sizeof *d));
    if (!d)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the emulated device");
    d->runs = o;
    d->imma = imma;
    d->ops = table_of("emulated");
    d->base.ops = &d->ops;
    d->base.threads = 1;
    d->base.block_bytes = BLOCK_BYTES;
    *gives = &d->base;
    return AR_OK;
}
