/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/row_kernels.h"
#include "ref/cpu/row_sum.h"
#include "ref/numerics/philox.h"

/* Elements whose bits are drawn before they are used. */
#define LANES ((size_t)64)

/* n neighbouring elements, the first of which is number `first` of the full value. y may be x. */
ARI_ROW_KERNEL void drop_row(float *y, const float *x, size_t n, const ar_dropout *w, uint64_t first)
{
    uint32_t bits[LANES];
    size_t skip = (size_t)(first & 3u); /* a block holds four elements: the row may begin inside one */
    uint64_t block = first >> 2;
    for (size_t at = 0; at < n; block += LANES / 4) {
        const size_t count = n - at < LANES - skip ? n - at : LANES - skip, blocks = (skip + count + 3) / 4;
#pragma GCC ivdep
        for (size_t i = 0; i < blocks; i++)
            ari_random_block(w->key, (block + i) << 2, w->step, 0, bits + 4 * i);
#pragma GCC ivdep
        for (size_t i = 0; i < count; i++) {
            const float kept = ari_mul32(x[at + i], w->scale);
            y[at + i] = bits[skip + i] >= w->threshold ? kept : 0.0f;
        }
        at += count;
        skip = 0;
    }
}

/* The number in the full value of the first element of a row. */
static uint64_t number_of(const ar_tensor *x, const ar_dropout *w, size_t row)
{
    uint64_t number = w->first;
    for (int d = x->ndim - 2; d >= 0; d--) {
        number += (uint64_t)(row % x->shape[d]) * w->stride[d];
        row /= x->shape[d];
    }
    return number;
}

/** Slot dropout. */
ar_status ari_cpu_dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_dropout *which)
{
    (void)q;
    const size_t n = ar_tensor_count(x), cols = x->ndim > 0 ? x->shape[x->ndim - 1] : 1, rows = n > 0 ? n / cols : 0;
    const int threads = ari_threads_for(d, rows, n * 8);
    (void)threads;
    float *to = y->data.ptr;
    const float *from = x->data.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t r = 0; r < rows; r++)
        drop_row(to + r * cols, from + r * cols, cols, which, number_of(x, which, r));
    return AR_OK;
}
