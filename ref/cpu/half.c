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

ARI_ROW_KERNEL void round_loop(float *y, const float *x, size_t n, int bits)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++)
        y[j] = ari_f32_to_bits(x[j], bits);
}

static void round_strided(float *y, ptrdiff_t y_stride, const float *x, ptrdiff_t x_stride, size_t n, int bits)
{
    if (y_stride == 1 && x_stride == 1) {
        round_loop(y, x, n, bits);
        return;
    }
    for (size_t j = 0; j < n; j++)
        y[(ptrdiff_t)j * y_stride] = ari_f32_to_bits(x[(ptrdiff_t)j * x_stride], bits);
}

/** Slot round_bits. Errors: none. */
ar_status ari_cpu_round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits)
{
    (void)d, (void)q;
    const size_t row = x->shape[x->ndim - 1], rows = row > 0 ? ar_tensor_count(x) / row : 0;
    for (size_t r = 0; r < rows; r++) {
        size_t rest = r;
        ptrdiff_t to = 0, from = 0;
        for (int i = x->ndim - 2; i >= 0; i--) {
            const ptrdiff_t index = (ptrdiff_t)(rest % x->shape[i]);
            to += index * y->stride[i];
            from += index * x->stride[i];
            rest /= x->shape[i];
        }
        round_strided((float *)y->data.ptr + to, y->stride[x->ndim - 1], (const float *)x->data.ptr + from,
                      x->stride[x->ndim - 1], row, bits);
    }
    return AR_OK;
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
