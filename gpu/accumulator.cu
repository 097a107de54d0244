/* SPDX-License-Identifier: Apache-2.0 */
/* The order-independent accumulator (docs/numerics.md, section 3) and the native sum over rows, whose order is that of
 * the rows. Each element has one writer in each launch; no sum is atomic. */
#include "gpu/kernels.h"
#include "ref/core/size.h"
#include "ref/numerics/accumulator.h"

namespace ARI_GPU
{

/* --- what is added, and to what ----------------------------------------------------------------------------------- */

struct exact_sums {
    uint8_t *t;
    int64_t *h, *l;
    struct element {
        uint8_t t;
        int64_t h, l;
        ARI_KERNEL void add(float v)
        {
            ari_acc_add(&t, &h, &l, v);
        }
    };
    ARI_KERNEL element load(size_t i) const
    {
        return element{t[i], h[i], l[i]};
    }
    ARI_KERNEL void store(size_t i, const element &e) const
    {
        t[i] = e.t;
        h[i] = e.h;
        l[i] = e.l;
    }
};

/* Of n elements. */
static exact_sums exact_sums_of(ar_buf t, ar_buf hl, size_t n)
{
    int64_t *sums = dev<int64_t>(hl);
    return exact_sums{dev<uint8_t>(t), sums, sums + n};
}

struct native_sums {
    float *sum;
    struct element {
        float sum;
        ARI_KERNEL void add(float v)
        {
            sum = ari_add32(sum, v);
        }
    };
    ARI_KERNEL element load(size_t i) const
    {
        return element{sum[i]};
    }
    ARI_KERNEL void store(size_t i, const element &e) const
    {
        sum[i] = e.sum;
    }
};

struct term_rows {
    const float *data;
    ptrdiff_t row_stride, col_stride;
    size_t rows, cols;
    ARI_KERNEL float at(size_t row, size_t col) const
    {
        return data[static_cast<ptrdiff_t>(row) * row_stride + static_cast<ptrdiff_t>(col) * col_stride];
    }
};

static term_rows terms_of(const ar_tensor *t)
{
    return term_rows{dev<float>(ar_const(t->data)), t->stride[0], t->stride[1], t->shape[0], t->shape[1]};
}

/* --- row r to row r ----------------------------------------------------------------------------------------------- */

template <class Sums> ar_status add_apart(ar_device *d, ar_queue *q, const Sums &sums, const term_rows &terms)
{
    return launch_each(d, q, terms.rows * terms.cols, [=] ARI_KERNEL(size_t i) {
        typename Sums::element e = sums.load(i);
        e.add(terms.at(i / terms.cols, i % terms.cols));
        sums.store(i, e);
    });
}

/* --- row r to row row_of[r] --------------------------------------------------------------------------------------- */

/* Rows that meet in one row are added in their order by the block of the first of them; the others' blocks have nothing
 * to do. A launch looks for such rows among ROWS_AT_ONCE. */
constexpr size_t ROWS_AT_ONCE = 1024, COLUMNS_AT_ONCE = 1024;

template <class Sums>
ar_status add_chosen(ar_device *d, ar_queue *q, const Sums &sums, const term_rows &terms, const int64_t *row_of,
                     size_t rows_in_acc, size_t from, size_t count)
{
    const size_t cols = terms.cols, tiles = ceil_div(cols, COLUMNS_AT_ONCE);
    const size_t width = cols < COLUMNS_AT_ONCE ? cols : COLUMNS_AT_ONCE;
    return launch_blocks(d, q, count * tiles, width, [=] ARI_KERNEL(const block &b) {
        ARI_SHARED uint32_t same[ROWS_AT_ONCE / 32]; /* a bit a row: whether it goes to this block's */
        const size_t own = b.index / tiles, first = b.index % tiles * COLUMNS_AT_ONCE, left = cols - first;
        const int64_t *target = row_of + from;
        const int64_t row = target[own];
        if (row < 0)
            return;
        if (static_cast<uint64_t>(row) >= rows_in_acc) {
            fault();
            return;
        }
        if (b.max(own, [&](size_t r) { return target[r] == row ? 1 : 0; }) == 1)
            return;
        const size_t words = (count + 31) / 32;
        b.each(words, [&](size_t w) {
            uint32_t bits = 0;
            for (size_t r = w * 32; r < w * 32 + 32 && r < count; r++)
                bits |= static_cast<uint32_t>(target[r] == row) << r % 32;
            same[w] = bits;
        });
        b.each(left < COLUMNS_AT_ONCE ? left : COLUMNS_AT_ONCE, [&](size_t j) {
            const size_t at = static_cast<size_t>(row) * cols + first + j;
            typename Sums::element e = sums.load(at);
            for (size_t w = own / 32; w < words; w++) {
                size_t r = from + w * 32;
                for (uint32_t bits = same[w]; bits != 0; bits >>= 1, r++)
                    if (bits % 2 != 0)
                        e.add(terms.at(r, first + j));
            }
            sums.store(at, e);
        });
    });
}

template <class Sums>
static ar_status add_rows(ar_device *d, ar_queue *q, const Sums &sums, const term_rows &terms, const int64_t *row_of,
                          size_t rows_in_acc)
{
    for (size_t from = 0; from < terms.rows; from += ROWS_AT_ONCE) {
        const size_t left = terms.rows - from, count = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        AR_TRY(add_chosen(d, q, sums, terms, row_of, rows_in_acc, from, count));
    }
    return AR_OK;
}

/* --- every row to one row ----------------------------------------------------------------------------------------- */

/* Parts enough to keep a GPU busy, but of 16 rows or more, and 1024 at most, which one thread merges. */
static size_t rows_in_part(const term_rows &terms)
{
    const size_t threads = (size_t)1 << 18, wanted = threads / terms.cols;
    const size_t most = wanted < 1 ? 1 : wanted < 1024 ? wanted : 1024;
    const size_t rows = ceil_div(terms.rows, most);
    return rows < 16 ? 16 : rows;
}

/* First a thread a column of one part sums it up from nothing, then one a column merges the parts. */
static ar_status add_all_exact(ar_device *d, ar_queue *q, const exact_sums &sums, const term_rows &terms)
{
    if (terms.rows == 0 || terms.cols == 0)
        return AR_OK;
    const size_t rows_of_part = rows_in_part(terms), count = ceil_div(terms.rows, rows_of_part), cols = terms.cols;
    size_t n, bytes;
    AR_TRY(ari_mul_size(&n, count, cols));
    AR_TRY(ari_mul_size(&bytes, n, 2 * sizeof(int64_t) + sizeof(uint8_t)));
    scratch memory(d, q);
    AR_TRY(memory.take(bytes));
    const exact_sums parts = exact_sums_of(ar_buf_at(memory.buf(), n * 2 * sizeof(int64_t)), memory.buf(), n);
    AR_TRY(launch_each(d, q, n, [=] ARI_KERNEL(size_t i) {
        const size_t from = i / cols * rows_of_part, left = terms.rows - from;
        exact_sums::element e = {0, 0, 0};
        for (size_t r = 0; r < (left < rows_of_part ? left : rows_of_part); r++)
            e.add(terms.at(from + r, i % cols));
        parts.store(i, e);
    }));
    return launch_each(d, q, cols, [=] ARI_KERNEL(size_t i) {
        exact_sums::element e = sums.load(i);
        for (size_t k = 0; k < count; k++) {
            const exact_sums::element part = parts.load(k * cols + i);
            ari_acc_merge(&e.t, &e.h, &e.l, part.t, part.h, part.l);
        }
        sums.store(i, e);
    });
}

/* In the order of the rows, a block a few columns: many threads bring the terms, one a column adds them. */
static ar_status add_all_native(ar_device *d, ar_queue *q, const native_sums &sums, const term_rows &terms)
{
    constexpr size_t ROWS = 256, COLUMNS = 16;
    return launch_blocks(d, q, ceil_div(terms.cols, COLUMNS), ROWS * COLUMNS, [=] ARI_KERNEL(const block &b) {
        ARI_SHARED float tile[ROWS * COLUMNS];
        const size_t first = b.index * COLUMNS, left = terms.cols - first, n = left < COLUMNS ? left : COLUMNS;
        for (size_t from = 0; from < terms.rows; from += ROWS) {
            const size_t rest = terms.rows - from, count = rest < ROWS ? rest : ROWS;
            b.each(count * COLUMNS, [&](size_t i) {
                const size_t col = i % COLUMNS;
                if (col < n)
                    tile[i] = terms.at(from + i / COLUMNS, first + col);
            });
            b.each(n, [&](size_t col) {
                native_sums::element e = sums.load(first + col);
                for (size_t r = 0; r < count; r++)
                    e.add(tile[r * COLUMNS + col]);
                sums.store(first + col, e);
            });
        }
    });
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

/* Without row_of: where a row of the terms goes past the accumulator. What row_of says is seen by the kernel. */
static ar_status check_rows(const ar_tensor *terms, size_t rows_in_acc)
{
    const size_t rows = terms->shape[0];
    const bool apart = rows_in_acc > 1;
    if (rows == 0 || (apart ? rows <= rows_in_acc : rows_in_acc == 1))
        return AR_OK;
    const size_t row = apart ? rows_in_acc : 0;
    return ar_error_set(AR_ERR_SHAPE, "acc_add: row %zu goes to row %zu of %zu", row, row, rows_in_acc);
}

ar_status acc_add(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t rows_in_acc, const ar_tensor *terms,
                  ar_cbuf row_of)
{
    const term_rows in = terms_of(terms);
    const exact_sums sums = exact_sums_of(t, hl, rows_in_acc * in.cols);
    if (row_of.ptr)
        return add_rows(d, q, sums, in, dev<int64_t>(row_of), rows_in_acc);
    AR_TRY(check_rows(terms, rows_in_acc));
    if (rows_in_acc > 1)
        return add_apart(d, q, sums, in);
    return add_all_exact(d, q, sums, in);
}

ar_status sum_rows_f32(ar_device *d, ar_queue *q, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                       ar_cbuf row_of)
{
    const term_rows in = terms_of(terms);
    const native_sums sums = {dev<float>(acc)};
    if (row_of.ptr)
        return add_rows(d, q, sums, in, dev<int64_t>(row_of), rows_in_acc);
    if (rows_in_acc > 1)
        return add_apart(d, q, sums, in);
    return add_all_native(d, q, sums, in);
}

ar_status acc_raise(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, ar_cbuf t_new, size_t n)
{
    const exact_sums sums = exact_sums_of(t, hl, n);
    return launch_each(d, q, n, [sums, to = dev<uint8_t>(t_new)] ARI_KERNEL(size_t i) {
        exact_sums::element e = sums.load(i);
        ari_acc_raise(&e.t, &e.h, &e.l, to[i]);
        sums.store(i, e);
    });
}

ar_status acc_value(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n)
{
    const view<float> to = view_of<float>(y);
    const bool contiguous = ar_tensor_is_contiguous(y);
    const int64_t *h = dev<int64_t>(hl), *l = h + n;
    return launch_each(d, q, n, [=, t = dev<uint8_t>(t)] ARI_KERNEL(size_t i) {
        *(contiguous ? to.data + i : to.at(i)) = ari_acc_value(t[i], h[i], l[i]);
    });
}

} // namespace ARI_GPU
