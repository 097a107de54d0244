/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/contract_kernels.h"

/** Slot alloc. No bytes: a valid pointer all the same. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_alloc(ar_device *d, ar_buf *gives, size_t bytes)
{
    (void)d;
    size_t rounded = 0;
    AR_TRY(ari_add_size(&rounded, bytes > 0 ? bytes : 1, 63));
    rounded &= ~(size_t)63;
    void *memory = aligned_alloc(64, rounded);
    if (!memory)
        return ar_error_set(AR_ERR_MEMORY, "cpu device: no memory for a buffer of %zu bytes", bytes);
    gives->ptr = memory;
    return AR_OK;
}

/** Slot free. */
void ari_cpu_free(ar_device *d, ar_buf b)
{
    (void)d;
    free(b.ptr);
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
