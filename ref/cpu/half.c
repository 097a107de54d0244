/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/half.h"

#include "ref/cpu/row_kernels.h"
#include "ref/cpu/row_sum.h"

/* Numbers that are stored in 16 bits. A loop does what memory allows; threads would not help it. */

ARI_ROW_KERNEL void narrow_loop(uint16_t *restrict y, const float *restrict x, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_bf16_of_f32(x[j]);
}

ARI_ROW_KERNEL void widen_loop(float *restrict y, const uint16_t *restrict x, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_f32_of_bf16(x[j]);
}

/** Slot narrow_bf16. Errors: none. */
ar_status ari_cpu_narrow_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    (void)d, (void)q;
    narrow_loop(y.ptr, x.ptr, n);
    return AR_OK;
}

/** Slot widen_bf16. Errors: none. */
ar_status ari_cpu_widen_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    (void)d, (void)q;
    widen_loop(y.ptr, x.ptr, n);
    return AR_OK;
}
