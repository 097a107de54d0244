/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/cpu/row_sum.h"

/* Selections of rows. They copy bits: a selection is not a sum, and -0 stays -0. */

/** Slot rows_in_range: ids int64. row_of may be ids. */
ar_status ari_cpu_rows_in_range(ar_device *d, ARI_AT_ONCE, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start,
                                int64_t count)
{
    (void)d;
    int64_t *out = row_of.ptr;
    const int64_t *id = ids.ptr;
    for (size_t t = 0; t < n; t++) {
        /* In uint64_t no difference overflows, and an id below start becomes larger than any count. */
        const uint64_t row = (uint64_t)id[t] - (uint64_t)start;
        out[t] = row < (uint64_t)count ? (int64_t)row : -1;
    }
    return AR_OK;
}

/** Slot gather_rows. */
ar_status ari_cpu_gather_rows(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, const ar_tensor *w, ar_cbuf row_of)
{
    const size_t n = ar_tensor_rows(y).shape[0], cols = w->shape[1];
    float *out = y->data.ptr;
    const float *rows = w->data.ptr;
    const int64_t *at = row_of.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * cols) {
        if (at[t] >= 0)
            memcpy(out + t * cols, rows + (ptrdiff_t)at[t] * w->stride[0], cols * sizeof *out);
        else
            memset(out + t * cols, 0, cols * sizeof *out);
    }
    return AR_OK;
}

/* acc[j] = fl32(acc[j] + terms[j]), j in [0, n). */
ARI_ROW_KERNEL void add_terms(float *restrict acc, const float *restrict terms, ptrdiff_t stride, size_t n)
{
    if (stride == 1) {
        for (size_t j = 0; j < n; j++)
            acc[j] = ari_add32(acc[j], terms[j]);
    } else {
        for (size_t j = 0; j < n; j++)
            acc[j] = ari_add32(acc[j], terms[(ptrdiff_t)j * stride]);
    }
}

/* Columns a thread takes at a time: 16 cache lines, so that no two threads share one. */
#define COLUMN_BLOCK ((size_t)256)

/** Slot sum_rows_f32. The summation order is that of the rows, for every element and any number of threads, since
 *  threads share out the columns. fp32 accumulator. */
ar_status ari_cpu_sum_rows_f32(ar_device *d, ARI_AT_ONCE, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                               ar_cbuf row_of)
{
    const size_t rows = terms->shape[0], cols = terms->shape[1];
    const size_t blocks = cols / COLUMN_BLOCK + (cols % COLUMN_BLOCK != 0);
    float *sums = acc.ptr;
    const int64_t *at = row_of.ptr;
    ARI_PARALLEL_FOR (block, blocks, d, rows * cols) {
        const size_t from = block * COLUMN_BLOCK, left = cols - from, n = left < COLUMN_BLOCK ? left : COLUMN_BLOCK;
        const float *in = (const float *)terms->data.ptr + (ptrdiff_t)from * terms->stride[1];
        for (size_t r = 0; r < rows; r++) {
            const int64_t row = at ? at[r] : rows_in_acc > 1 ? (int64_t)r : 0;
            if (row >= 0)
                add_terms(sums + (size_t)row * cols + from, in + (ptrdiff_t)r * terms->stride[0], terms->stride[1], n);
        }
    }
    return AR_OK;
}
