/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's memory and queues. Its streams do their work at once, and have the marks of streams that do
 * not. */
#include <stdlib.h>
#include <string.h>

#include "gpu/arena_host.h"
#include "gpu/runtime.h"
#include "gpu/table.h"
#include "ref/core/queue_impl.h"
#include "ref/core/stream.h"

namespace ari_emulated
{

namespace
{

struct emulated_device {
    ar_device base; /* first: an ar_device of this kind is one of these */
    ar_device_ops ops;
    order runs;
    ari_imma imma;
};

/* The address that dev<>() could not translate since this thread's last launch. */
thread_local const void *wrong_address;

/* --- streams ------------------------------------------------------------------------------------------------------ */

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

const ari_stream_ops stream_ops = {mark, wait, await, poll, mark_destroy, stream_destroy};

/* A kernel runs in the order of one stream, so its queue is an inline one of this kind of device. */
ar_status check_queue(ar_queue *q)
{
    const ari_stream *s = ari_queue_stream(q);
    if (s && s->ops == &stream_ops && ari_queue_is_inline(q))
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "a kernel of the emulated device was given a queue that is not %s",
                        ari_queue_is_inline(q) ? "this device's" : "an inline one");
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

scratch::~scratch()
{
    arena_give(b.ptr);
}

ar_status scratch::take(size_t bytes)
{
    return alloc(d, &b, bytes);
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

ar_status alloc(ar_device *d, ar_buf *gives, size_t bytes)
{
    (void)d;
    return arena_take(&gives->ptr, bytes);
}

void free(ar_device *d, ar_buf b)
{
    (void)d;
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
    *gives = &d->base;
    return AR_OK;
}
