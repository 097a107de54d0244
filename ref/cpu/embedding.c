/* SPDX-License-Identifier: Apache-2.0 */

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
        /* in uint64_t no difference overflows, and an id below start becomes larger than any count */
        const uint64_t row = (uint64_t)id[t] - (uint64_t)start;
        out[t] = row < (uint64_t)count ? (int64_t)row : -1;
    }
    return AR_OK;
}
