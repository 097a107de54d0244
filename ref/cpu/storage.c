/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/storage.h"
#include "ref/core/tensor_private.h"

ARI_SIMD void ari_narrow(uint16_t *restrict y, const float *restrict x, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_bf16_of_f32(x[j]);
}

ARI_SIMD void ari_widen(float *restrict y, const uint16_t *restrict x, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_f32_of_bf16(x[j]);
}

ar_tensor ari_matrix_view(const ar_tensor *t, size_t matrix)
{
    const ari_matrices m = ari_matrices_of(t);
    const ptrdiff_t bytes = ari_matrix_offset(t, matrix) * (ptrdiff_t)ar_dtype_bytes(t->dtype);
    return (ar_tensor){.dtype = t->dtype,
                       .ndim = 2,
                       .shape = {m.rows, m.cols},
                       .stride = {m.row_stride, m.col_stride},
                       .data = {(char *)t->data.ptr + bytes}};
}

static void put_value(const ar_tensor *t, ptrdiff_t offset, float value)
{
    if (t->dtype == AR_BF16)
        ((uint16_t *)t->data.ptr)[offset] = ari_bf16_of_f32(value);
    else
        ((float *)t->data.ptr)[offset] = value;
}

/* A row of a matrix. */
static void convert_row(const ar_tensor *y, const ar_tensor *x, size_t row)
{
    const ptrdiff_t y_offset = (ptrdiff_t)row * y->stride[0], x_offset = (ptrdiff_t)row * x->stride[0];
    const bool runs = y->stride[1] == 1 && x->stride[1] == 1;
    const size_t n = y->shape[1];
    if (runs && y->dtype == AR_F32 && x->dtype == AR_BF16)
        ari_widen((float *)y->data.ptr + y_offset, (const uint16_t *)x->data.ptr + x_offset, n);
    else if (runs && y->dtype == AR_BF16 && x->dtype == AR_F32)
        ari_narrow((uint16_t *)y->data.ptr + y_offset, (const float *)x->data.ptr + x_offset, n);
    else
        for (size_t j = 0; j < n; j++)
            put_value(y, y_offset + (ptrdiff_t)j * y->stride[1],
                      ari_value_at(x, x_offset + (ptrdiff_t)j * x->stride[1]));
}

void ari_convert(const ar_tensor *y, const ar_tensor *x)
{
    if (y->stride[1] != 1 && y->stride[0] == 1) { /* contiguous along columns */
        const ar_tensor turned_y = ari_tensor_transposed(y), turned_x = ari_tensor_transposed(x);
        for (size_t r = 0; r < turned_y.shape[0]; r++)
            convert_row(&turned_y, &turned_x, r);
        return;
    }
    for (size_t r = 0; r < y->shape[0]; r++)
        convert_row(y, x, r);
}
