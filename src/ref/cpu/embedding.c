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
    const size_t n = ar_tensor_rows(y).shape[0], width = ar_dtype_bytes(w->dtype), bytes = w->shape[1] * width;
    const ptrdiff_t step = w->stride[0] * (ptrdiff_t)width;
    char *out = y->data.ptr;
    const char *rows = w->data.ptr;
    const int64_t *at = row_of.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * w->shape[1]) {
        if (at[t] >= 0)
            memcpy(out + t * bytes, rows + (ptrdiff_t)at[t] * step, bytes);
        else
            memset(out + t * bytes, 0, bytes);
    }
    return AR_OK;
}
