/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CPU_MATRIX_H
#define ARI_CPU_MATRIX_H

#include <stddef.h>

#include "anyrank/tensor.h"

/* A batch of equally shaped fp32 matrices inside an ar_tensor: the last two dimensions are rows and columns. */
typedef struct ari_matrices {
    size_t batch, rows, cols;
    ptrdiff_t row_stride, col_stride; /* elements */
} ari_matrices;

static inline ari_matrices ari_matrices_of(const ar_tensor *t)
{
    ari_matrices v = {1, t->shape[t->ndim - 2], t->shape[t->ndim - 1], t->stride[t->ndim - 2], t->stride[t->ndim - 1]};
    for (int i = 0; i + 2 < t->ndim; i++)
        v.batch *= t->shape[i];
    return v;
}

/* Element (0, 0) of matrix `at` of the batch, in row-major order of the batch dimensions. */
static inline float *ari_matrix_at(const ar_tensor *t, size_t at)
{
    float *p = t->data.ptr;
    for (int i = t->ndim - 3; i >= 0; i--) {
        p += (ptrdiff_t)(at % t->shape[i]) * t->stride[i];
        at /= t->shape[i];
    }
    return p;
}

#endif
