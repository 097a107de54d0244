/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device's memory and queues. */
#include <stdlib.h>
#include <string.h>

#include "gpu/runtime.h"
#include "gpu/table.h"

namespace ari_emulated
{

struct emulated_device {
    ar_device base; /* first: an ar_device of this kind is one of these */
    ar_device_ops ops;
    bool backward;
};

ar_status enter(ar_device *d, ar_queue *q, bool *backward)
{
    (void)q;
    *backward = reinterpret_cast<emulated_device *>(d)->backward;
    return AR_OK;
}

void *reach(const void *device_address)
{
    return const_cast<void *>(device_address);
}

ar_status queue_create(ar_device *d, ar_queue **gives, ar_queue_kind kind, const char *name)
{
    (void)d;
    return ar_queue_create(gives, kind, name);
}

ar_status alloc(ar_device *d, ar_buf *gives, size_t bytes)
{
    (void)d;
    gives->ptr = aligned_alloc(64, (bytes / 64 + 1) * 64);
    return gives->ptr ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes", bytes);
}

void free(ar_device *d, ar_buf b)
{
    (void)d;
    ::free(b.ptr);
}

ar_status copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    (void)d;
    (void)q;
    if (bytes > 0)
        memcpy(dst.ptr, src.ptr, bytes);
    return AR_OK;
}

ar_status zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    (void)d;
    (void)q;
    if (bytes > 0)
        memset(dst.ptr, 0, bytes);
    return AR_OK;
}

scratch::~scratch()
{
    ari_emulated::free(d, b);
}

ar_status scratch::take(size_t bytes)
{
    return alloc(d, &b, bytes);
}

void destroy(ar_device *d)
{
    ::free(d);
}

} // namespace ari_emulated

ar_status ar_device_emulated_create(ar_device **gives)
{
    using namespace ari_emulated;
    emulated_device *d = static_cast<emulated_device *>(calloc(1, sizeof *d));
    if (!d)
        return ar_error_set(AR_ERR_MEMORY, "no memory for the emulated device");
    const char *order = getenv("ANYRANK_EMULATED_ORDER");
    d->backward = order && strcmp(order, "backward") == 0;
    d->ops = table_of("emulated");
    d->base.ops = &d->ops;
    d->base.threads = 1;
    *gives = &d->base;
    return AR_OK;
}
