/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Sums over rows: the order-independent accumulator (numerics.md, section 3), and the native sum, which adds in row
 * order. Each element has one writer per launch; no sum is atomic. */
#include "gpu/kernels.h"
#include "ref/core/size.h"
#include "ref/numerics/accumulator.h"

namespace ARI_GPU
{

/* --- what is added, and to what ----------------------------------------------------------------------------------- */

struct exact_sums {
    uint8_t *t;
    int64_t *h, *l;
    bool narrow;
    struct element {
        uint8_t t;
        int64_t h, l;
        bool narrow;
        ARI_ON_GPU void add(float v)
        {
            ari_acc_add(&t, &h, &l, v, narrow);
        }
    };
    ARI_ON_GPU element make_zero() const
    {
        return element{0, 0, 0, narrow};
    }
    ARI_ON_GPU element load(size_t i) const
    {
        return element{t[i], h[i], l[i], narrow};
    }
    ARI_ON_GPU void store(size_t i, const element &e) const
    {
        t[i] = e.t;
        h[i] = e.h;
        l[i] = e.l;
    }
};

/* Exact sums of n elements. */
inline exact_sums exact_sums_of(ar_buf t, ar_buf hl, size_t n, bool narrow)
{
    int64_t *sums = dev<int64_t>(hl);
    return exact_sums{dev<uint8_t>(t), sums, sums + n, narrow};
}

struct native_sums {
    float *sum;
    struct element {
        float sum;
        ARI_ON_GPU void add(float v)
        {
            sum = ari_add32(sum, v);
        }
    };
    ARI_ON_GPU element load(size_t i) const
    {
        return element{sum[i]};
    }
    ARI_ON_GPU void store(size_t i, const element &e) const
    {
        sum[i] = e.sum;
    }
};

inline bool is_requested(const ar_row_sum *s)
{
    return s->t.ptr || s->f32.ptr;
}

/* --- every row to one row ----------------------------------------------------------------------------------------- */

/* N sums of [cols] over the same rows. terms(row, col, v) computes the N terms of an element. It is called once per
 * element, so it may also write other results. */

/* Returns the rows of a part: enough parts to keep a GPU busy, but at least 16 rows each, and at most 1024 parts, which
 * one thread merges. */
inline size_t rows_in_part(size_t total_rows, size_t cols)
{
    const size_t threads = (size_t)1 << 18, target_parts = threads / cols;
    const size_t max_parts = target_parts < 1 ? 1 : target_parts < 1024 ? target_parts : 1024;
    const size_t rows = ceil_div(total_rows, max_parts);
    return rows < 16 ? 16 : rows;
}

template <class Sums, size_t N> struct sums_of {
    static_assert(N == 1 || N == 2);
    Sums sums[N];
    bool requested[N];
    /* A variable index would copy a kernel's arguments to each thread's local memory. */
    ARI_ON_GPU Sums sum(size_t s) const
    {
        return s == 0 ? sums[0] : sums[N - 1];
    }
    ARI_ON_GPU bool is_wanted(size_t s) const
    {
        return s == 0 ? requested[0] : requested[N - 1];
    }
};

/* First one thread per column sums each part starting from zero, then one per column merges the parts. */
template <size_t N, class F>
ar_status add_exact(ar_device *d, ar_queue *q, const sums_of<exact_sums, N> &dst, size_t rows, size_t cols,
                    const F &terms)
{
    const size_t rows_of_part = rows_in_part(rows, cols), count = ceil_div(rows, rows_of_part);
    size_t per_sum, n, bytes;
    AR_TRY(ari_mul_size(&per_sum, count, cols));
    AR_TRY(ari_mul_size(&n, per_sum, N));
    AR_TRY(ari_mul_size(&bytes, n, 2 * sizeof(int64_t) + sizeof(uint8_t)));
    scratch memory(d, q);
    AR_TRY(memory.allocate(bytes));
    const exact_sums parts = exact_sums_of(ar_buf_at(memory.buf(), n * 2 * sizeof(int64_t)), memory.buf(), n, false);
    const ari_divisor by_cols = ari_divisor_of(cols);
    AR_TRY(launch_each(d, q, per_sum, [=] ARI_ON_GPU(size_t i) {
        size_t col = i;
        const size_t first_row = ari_divide(&by_cols, &col) * rows_of_part, remaining = rows - first_row;
        exact_sums::element e[N];
        for (size_t s = 0; s < N; s++)
            e[s] = dst.sum(s).make_zero();
        for (size_t r = 0; r < (remaining < rows_of_part ? remaining : rows_of_part); r++) {
            float v[N];
            terms(first_row + r, col, v);
            for (size_t s = 0; s < N; s++)
                e[s].add(v[s]);
        }
        for (size_t s = 0; s < N; s++)
            parts.store(s * per_sum + i, e[s]);
    }));
    return launch_each(d, q, N * cols, [=] ARI_ON_GPU(size_t i) {
        size_t col = i;
        const size_t s = ari_divide(&by_cols, &col);
        if (!dst.is_wanted(s))
            return;
        const exact_sums target = dst.sum(s);
        exact_sums::element e = target.load(col);
        for (size_t k = 0; k < count; k++) {
            const exact_sums::element part = parts.load(s * per_sum + k * cols + col);
            ari_acc_merge(&e.t, &e.h, &e.l, part.t, part.h, part.l);
        }
        target.store(col, e);
    });
}

/* Adds in row order, with one block for a few columns: many threads compute the terms, and one per column adds them. */
template <size_t N, class F>
ar_status add_native(ar_device *d, ar_queue *q, const sums_of<native_sums, N> &dst, size_t rows, size_t cols,
                     const F &terms)
{
    constexpr size_t ROWS = 256, COLUMNS = 16, TILE = ROWS * COLUMNS;
    return launch_blocks(d, q, ceil_div(cols, COLUMNS), TILE, [=] ARI_ON_GPU(const block &b) {
        ARI_SHARED(float, tile, [N * TILE]);
        const size_t first_col = b.index * COLUMNS, remaining = cols - first_col,
                     n = remaining < COLUMNS ? remaining : COLUMNS;
        for (size_t first_row = 0; first_row < rows; first_row += ROWS) {
            const size_t rest = rows - first_row, count = rest < ROWS ? rest : ROWS;
            b.each(count * COLUMNS, [&](size_t i) {
                const size_t col = i % COLUMNS;
                float v[N];
                if (col >= n)
                    return;
                terms(first_row + i / COLUMNS, first_col + col, v);
                for (size_t s = 0; s < N; s++)
                    tile[s * TILE + i] = v[s];
            });
            b.each(N * COLUMNS, [&](size_t i) {
                const size_t s = i / COLUMNS, col = i % COLUMNS;
                if (!dst.is_wanted(s) || col >= n)
                    return;
                const native_sums target = dst.sum(s);
                native_sums::element e = target.load(first_col + col);
                for (size_t r = 0; r < count; r++)
                    e.add(tile[s * TILE + r * COLUMNS + col]);
                target.store(first_col + col, e);
            });
        }
    });
}

/* All requested sums are of one kind. */
template <size_t N, class F>
ar_status add_to_sums(ar_device *d, ar_queue *q, const ar_row_sum *const (&sum)[N], size_t rows, size_t cols,
                      const F &terms)
{
    sums_of<exact_sums, N> exact = {};
    sums_of<native_sums, N> native = {};
    bool is_exact = false;
    if (rows == 0 || cols == 0)
        return AR_OK;
    for (size_t s = 0; s < N; s++) {
        exact.sums[s] = exact_sums_of(sum[s]->t, sum[s]->hl, sum[s]->t.ptr ? cols : 0, sum[s]->narrow);
        native.sums[s].sum = dev<float>(sum[s]->f32);
        exact.requested[s] = native.requested[s] = is_requested(sum[s]);
        is_exact = is_exact || sum[s]->t.ptr;
    }
    return is_exact ? add_exact<N>(d, q, exact, rows, cols, terms) : add_native<N>(d, q, native, rows, cols, terms);
}

} // namespace ARI_GPU
