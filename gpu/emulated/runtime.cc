/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device. */
#include <stdlib.h>
#include <string.h>

#include "gpu/device_private.h"
#include "gpu/emulated/memory.h"
#include "gpu/emulated/stream.h"
#include "gpu/kernels.h"

namespace ari_emulated
{

namespace
{

struct emulated_device {
    ar_device base; /* must be the first field, since an ar_device * points to it */
    ar_device_ops ops;
    order runs;
    unsigned threads; /* threads of a block if it has several */
    ari_imma imma;
};

/* The address that dev<>() could not translate since this thread's last launch. */
thread_local const void *wrong_address;

} // namespace

/* --- what kernels call -------------------------------------------------------------------------------------------- */

/* A kernel runs in a stream's order, so its queue must be an inline queue of this kind of device. */
static ar_status check_queue(const ar_queue *q)
{
    if (stream_of(q))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "a kernel of the emulated device was given a queue that is not %s",
                        !q || ari_queue_is_inline(q) ? "this device's" : "an inline one");
}

ar_status enter(ar_device *d, ar_queue *q, order *o)
{
    const void *wrong = wrong_address;
    wrong_address = nullptr;
    if (wrong)
        return ar_error_set(AR_ERR_DEVICE, "a kernel was given %p, an address of the host", wrong);
    AR_TRY(streams_failed());
    *o = reinterpret_cast<emulated_device *>(d)->runs;
    return check_queue(q);
}

unsigned team_size(const ar_device *d)
{
    return reinterpret_cast<const emulated_device *>(d)->threads;
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

ar_status queue_create(ar_device *d, ar_queue **result, ar_queue_kind kind, const char *name)
{
    ari_stream *s = nullptr;
    AR_TRY(stream_create(&s, d));
    const ar_status st = ari_queue_create_on(result, kind, name, s);
    if (st != AR_OK)
        s->ops->destroy(s);
    return st;
}

ar_status alloc(ar_device *d, ar_queue *q, ar_buf *result, size_t bytes)
{
    (void)d;
    AR_TRY(check_queue(q));
    return stream_alloc(stream_of(q), &result->ptr, bytes);
}

void free(ar_device *d, ar_queue *q, ar_buf b)
{
    ari_stream *s = stream_of(q);
    if (!b.ptr)
        return;
    if (s)
        stream_free(s, b.ptr);
    else
        device_free(d, b.ptr);
}

/* Copy, of which either side may be in host memory; or zeros if `src` is NULL. */
struct movement {
    void *dst;
    const void *src;
    size_t bytes;

    static ar_status run(const void *arg)
    {
        const movement *m = static_cast<const movement *>(arg);
        if (m->src)
            memcpy(m->dst, m->src, m->bytes);
        else
            memset(m->dst, 0, m->bytes);
        return AR_OK;
    }
};

static void *either(const void *address)
{
    return arena_has(address) ? arena_at(address) : const_cast<void *>(address);
}

/* Memory of the host must not end while a copy still looks at it. */
ar_status copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    order o;
    const bool host = sanitized || !arena_has(dst.ptr) || !arena_has(src.ptr); /* under a sanitizer this is not known */
    AR_TRY(enter(d, q, &o));
    if (bytes == 0)
        return AR_OK;
    AR_TRY(submit(q, movement{either(dst.ptr), either(src.ptr), bytes}));
    return host ? ari_stream_sync(ari_queue_stream(q), 0) : AR_OK;
}

ar_status zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    order o;
    void *target = dev<void>(dst);
    AR_TRY(enter(d, q, &o));
    return bytes > 0 ? submit(q, movement{target, nullptr, bytes}) : AR_OK;
}

void destroy(ar_device *d)
{
    ::free(d);
}

/* Returns N of "threads:N"; 0: another text. */
static unsigned read_threads(const char *text)
{
    char *end = nullptr;
    const unsigned long n = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
    return end && !*end && n <= team::max_threads ? static_cast<unsigned>(n) : 0;
}

/* Reads ANYRANK_EMULATED_ORDER. AddressSanitizer cannot follow a thread from stack to stack, so with it threads run in
 * the order `forward`. */
static ar_status read_order(order *o, unsigned *threads)
{
    const char *text = getenv("ANYRANK_EMULATED_ORDER");
    *o = order::forward;
    *threads = 16;
    if (!text || strcmp(text, "forward") == 0)
        return AR_OK;
    const bool numbered = strncmp(text, "threads:", 8) == 0;
    if (numbered)
        *threads = read_threads(text + 8);
    if ((strcmp(text, "backward") != 0 && strcmp(text, "threads") != 0 && !numbered) || *threads == 0)
        return ar_error_set(AR_ERR_ARG,
                            "ANYRANK_EMULATED_ORDER is '%.40s'; it takes forward, backward or threads, or threads:N of "
                            "N = 1 to %u threads of a block",
                            text, team::max_threads);
    *o = text[0] == 'b' ? order::backward : sanitized ? order::forward : order::threads;
    return AR_OK;
}

} // namespace ari_emulated

/* small, so that short sequences are divided too */
static const size_t BLOCK_BYTES = 16384;

ar_status ari_device_emulated_create(ar_device **result)
{
    using namespace ari_emulated;
    order o;
    unsigned threads;
    ari_imma imma;
    AR_TRY(read_order(&o, &threads));
    AR_TRY(ari_imma_choose(&imma));
    AR_TRY(arena_open());
    AR_TRY(streams_open());
    emulated_device *d = static_cast<emulated_device *>(calloc(1, sizeof *d));
    if (!d)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the emulated device");
    d->runs = o;
    d->threads = threads;
    d->imma = imma;
    d->ops = table_of("emulated");
    d->base.ops = &d->ops;
    d->base.threads = 1;
    d->base.block_bytes = BLOCK_BYTES;
    *result = &d->base;
    return AR_OK;
}
