/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/cpu_device.h"

static ari_pool *pool_of(ar_device *d)
{
    return &((ari_cpu_device *)d)->pool;
}

/** Slot alloc. No bytes: a valid pointer all the same. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_alloc(ar_device *d, ar_buf *gives, size_t bytes)
{
    return ari_pool_alloc(pool_of(d), &gives->ptr, bytes);
}

/** Slot free. */
void ari_cpu_free(ar_device *d, ar_buf b)
{
    ari_pool_free(pool_of(d), b.ptr);
}

/** Slot copy: memory of the device is memory of the host. */
ar_status ari_cpu_copy(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf src, size_t bytes)
{
    (void)d;
    (void)q;
    if (bytes > 0)
        memcpy(dst.ptr, src.ptr, bytes);
    return AR_OK;
}

/** Slot zero. */
ar_status ari_cpu_zero(ar_device *d, ar_queue *q, ar_buf dst, size_t bytes)
{
    (void)d;
    (void)q;
    if (bytes > 0)
        memset(dst.ptr, 0, bytes);
    return AR_OK;
}
