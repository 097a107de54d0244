/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/tensor.h"

#include "ref/core/size.h"

ar_status ar_tensor_view(ar_tensor *t, ar_dtype dtype, int ndim, const size_t *shape, ar_buf data)
{
    if (ndim < 0 || ndim > AR_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "a tensor has 0 to %d dimensions, not %d", AR_MAX_DIMS, ndim);
    ar_tensor view = {.dtype = dtype, .ndim = ndim, .data = data};
    size_t elements = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        view.shape[d] = shape[d];
        view.stride[d] = (ptrdiff_t)elements;
        AR_TRY(ari_mul_size(&elements, elements, shape[d] ? shape[d] : 1));
    }
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, elements, 8)); /* so that a byte offset never overflows, whatever the dtype */
    *t = view;
    return AR_OK;
}

size_t ar_tensor_count(const ar_tensor *t)
{
    size_t n = 1;
    for (int d = 0; d < t->ndim; d++)
        n *= t->shape[d];
    return n;
}

bool ar_tensor_is_contiguous(const ar_tensor *t)
{
    size_t expected = 1;
    for (int d = t->ndim - 1; d >= 0; d--) {
        if (t->shape[d] != 1 && t->stride[d] != (ptrdiff_t)expected)
            return false;
        expected *= t->shape[d] ? t->shape[d] : 1;
    }
    return true;
}

ar_tensor ar_tensor_rows(const ar_tensor *t)
{
    const size_t cols = t->ndim > 0 ? t->shape[t->ndim - 1] : 1;
    size_t rows = 1;
    for (int d = 0; d + 1 < t->ndim; d++)
        rows *= t->shape[d];
    ar_tensor v = {.dtype = t->dtype,
                   .ndim = 2,
                   .shape = {rows, cols},
                   .stride = {t->ndim > 1 ? t->stride[t->ndim - 2] : (ptrdiff_t)cols, 1},
                   .data = t->data};
    return v;
}

ar_tensor ar_tensor_transposed(const ar_tensor *t)
{
    ar_tensor v = *t;
    const int a = t->ndim - 2, b = t->ndim - 1;
    v.shape[a] = t->shape[b];
    v.shape[b] = t->shape[a];
    v.stride[a] = t->stride[b];
    v.stride[b] = t->stride[a];
    return v;
}

ar_tensor ar_tensor_slice(const ar_tensor *t, int dim, size_t start, size_t extent)
{
    ar_tensor v = *t;
    v.shape[dim] = extent;
    v.data = ar_buf_at(t->data, start * (size_t)t->stride[dim] * ar_dtype_bytes(t->dtype));
    return v;
}
