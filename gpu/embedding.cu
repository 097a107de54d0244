/* SPDX-License-Identifier: Apache-2.0 */
/* Selections of rows. They copy bits. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

struct rows_in_range_each {
    int64_t *row_of;
    const int64_t *ids;
    uint64_t start, count;
    ARI_KERNEL void operator()(size_t i) const
    {
        /* In uint64_t no difference overflows, and an id below start becomes larger than any count. */
        const uint64_t row = static_cast<uint64_t>(ids[i]) - start;
        row_of[i] = row < count ? static_cast<int64_t>(row) : -1;
    }
};

ar_status rows_in_range(ar_device *d, ar_queue *q, ar_buf row_of, ar_cbuf ids, size_t n, int64_t start, int64_t count)
{
    const rows_in_range_each kernel = {dev<int64_t>(row_of), dev<int64_t>(ids), static_cast<uint64_t>(start),
                                       static_cast<uint64_t>(count)};
    return launch_each(d, q, n, kernel);
}

struct gather_row {
    uint32_t *y;
    const uint32_t *w;
    ptrdiff_t stride;
    const int64_t *row_of;
    size_t cols;
    ARI_KERNEL void operator()(const block &b) const
    {
        const int64_t row = row_of[b.index];
        const uint32_t *from = w + static_cast<ptrdiff_t>(row) * stride;
        uint32_t *to = y + b.index * cols;
        b.each(cols, [&](size_t j) { to[j] = row >= 0 ? from[j] : 0; });
    }
};

ar_status gather_rows(ar_device *d, ar_queue *q, ar_buf y, const ar_tensor *w, ar_cbuf row_of, size_t n)
{
    const size_t cols = w->shape[1];
    const gather_row kernel = {dev<uint32_t>(y), dev<uint32_t>(ar_const(w->data)), w->stride[0], dev<int64_t>(row_of),
                               cols};
    return launch_blocks(d, q, n, cols, kernel);
}

} // namespace ARI_GPU
