/* SPDX-License-Identifier: Apache-2.0 */
/* Slots for sums over rows: row by row, all rows into one, and into rows selected by a list. */
#include "gpu/sums.h"
#include "gpu/vectors.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/sent_sum.h"

namespace ARI_GPU
{

template <class T> struct term_rows {
    const T *data;
    ptrdiff_t row_stride, col_stride;
    size_t rows, cols;
    ARI_ON_GPU float value(size_t row, size_t col) const
    {
        return load(data[static_cast<ptrdiff_t>(row) * row_stride + static_cast<ptrdiff_t>(col) * col_stride]);
    }
};

template <class T> term_rows<T> terms_of(const ar_tensor *t)
{
    return term_rows<T>{dev<T>(ar_const(t->data)), t->stride[0], t->stride[1], t->shape[0], t->shape[1]};
}

/* --- row r to row r ----------------------------------------------------------------------------------------------- */

template <class Sums, class T>
ar_status add_apart(ar_device *d, ar_queue *q, const Sums &sums, const term_rows<T> &terms)
{
    return launch_row_vectors<1>(d, q, terms.rows, terms.cols, false, [=] ARI_ON_GPU(auto, size_t row, size_t col) {
        const size_t i = row * terms.cols + col;
        typename Sums::element e = sums.load(i);
        e.add(terms.value(row, col));
        sums.store(i, e);
    });
}

/* --- row r to row row_of[r] --------------------------------------------------------------------------------------- */

/* Rows added to the same row are added in order by the block of the first of them; the blocks of the others do nothing.
 * A launch looks for such rows among ROWS_AT_ONCE. */
constexpr size_t ROWS_AT_ONCE = 1024, COLUMNS_AT_ONCE = 1024;

template <class Sums, class T>
ar_status add_chosen(ar_device *d, ar_queue *q, const Sums &sums, const term_rows<T> &terms, const int64_t *row_of,
                     size_t rows_in_acc, size_t first_row, size_t count)
{
    const size_t cols = terms.cols, tiles = ceil_div(cols, COLUMNS_AT_ONCE);
    const size_t width = cols < COLUMNS_AT_ONCE ? cols : COLUMNS_AT_ONCE;
    const ari_divisor by_tiles = ari_divisor_of(tiles);
    return launch_blocks(d, q, count * tiles, width, [=] ARI_ON_GPU(const block &b) {
        ARI_SHARED(uint32_t, row_mask, [ROWS_AT_ONCE / 32]); /* one bit per row: the row belongs to this block */
        size_t tile = b.index;
        const size_t block_row = ari_divide(&by_tiles, &tile), first_col = tile * COLUMNS_AT_ONCE,
                     remaining = cols - first_col;
        const int64_t *target = row_of + first_row;
        const int64_t row = target[block_row];
        if (row < 0)
            return;
        if (static_cast<uint64_t>(row) >= rows_in_acc) {
            fault();
            return;
        }
        if (b.max(block_row, [&](size_t r) { return target[r] == row ? 1 : 0; }) == 1)
            return;
        const size_t words = (count + 31) / 32;
        b.each(words, [&](size_t w) {
            uint32_t bits = 0;
            for (size_t r = w * 32; r < w * 32 + 32 && r < count; r++)
                bits |= static_cast<uint32_t>(target[r] == row) << r % 32;
            row_mask[w] = bits;
        });
        b.each(remaining < COLUMNS_AT_ONCE ? remaining : COLUMNS_AT_ONCE, [&](size_t j) {
            const size_t index = static_cast<size_t>(row) * cols + first_col + j;
            typename Sums::element e = sums.load(index);
            for (size_t w = block_row / 32; w < words; w++) {
                size_t r = first_row + w * 32;
                for (uint32_t bits = row_mask[w]; bits != 0; bits >>= 1, r++)
                    if (bits % 2 != 0)
                        e.add(terms.value(r, first_col + j));
            }
            sums.store(index, e);
        });
    });
}

template <class Sums, class T>
ar_status add_rows(ar_device *d, ar_queue *q, const Sums &sums, const term_rows<T> &terms, const int64_t *row_of,
                   size_t rows_in_acc)
{
    for (size_t first_row = 0; first_row < terms.rows; first_row += ROWS_AT_ONCE) {
        const size_t remaining = terms.rows - first_row, count = remaining < ROWS_AT_ONCE ? remaining : ROWS_AT_ONCE;
        AR_TRY(add_chosen(d, q, sums, terms, row_of, rows_in_acc, first_row, count));
    }
    return AR_OK;
}

/* --- every row to one row ----------------------------------------------------------------------------------------- */

template <class T> ar_status add_all(ar_device *d, ar_queue *q, const ar_row_sum &dst, const term_rows<T> &terms)
{
    return add_to_sums<1>(d, q, {&dst}, terms.rows, terms.cols,
                          [=] ARI_ON_GPU(size_t row, size_t col, float(&v)[1]) { v[0] = terms.value(row, col); });
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

/* Without row_of: checks that no row of the terms is beyond the accumulator. The kernel checks the rows in row_of. */
static ar_status check_rows(const ar_tensor *terms, size_t rows_in_acc)
{
    const size_t rows = terms->shape[0];
    const bool is_separate = rows_in_acc > 1;
    if (rows == 0 || (is_separate ? rows <= rows_in_acc : rows_in_acc == 1))
        return AR_OK;
    const size_t row = is_separate ? rows_in_acc : 0;
    return ar_error_set(AR_ERR_SHAPE, "acc_add: row %zu goes to row %zu of %zu", row, row, rows_in_acc);
}

ARI_FOR_DTYPES(acc_add, terms, (t, hl, narrow, rows_in_acc, terms, row_of), ar_buf t, ar_buf hl, bool narrow,
               size_t rows_in_acc, const ar_tensor *terms, ar_cbuf row_of)
{
    const term_rows<T> input = terms_of<T>(terms);
    const exact_sums sums = exact_sums_of(t, hl, rows_in_acc * input.cols, narrow);
    if (row_of.ptr)
        return add_rows(d, q, sums, input, dev<int64_t>(row_of), rows_in_acc);
    AR_TRY(check_rows(terms, rows_in_acc));
    return rows_in_acc > 1 ? add_apart(d, q, sums, input) : add_all(d, q, {t, hl, narrow, {nullptr}}, input);
}

ARI_FOR_DTYPES(sum_rows_f32, terms, (acc, rows_in_acc, terms, row_of), ar_buf acc, size_t rows_in_acc,
               const ar_tensor *terms, ar_cbuf row_of)
{
    const term_rows<T> input = terms_of<T>(terms);
    const native_sums sums = {dev<float>(acc)};
    if (row_of.ptr)
        return add_rows(d, q, sums, input, dev<int64_t>(row_of), rows_in_acc);
    return rows_in_acc > 1 ? add_apart(d, q, sums, input) : add_all(d, q, {{nullptr}, {nullptr}, false, acc}, input);
}

ar_status acc_value(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n, bool narrow)
{
    const view<float> dst = view_of<float>(y);
    const int64_t *h = dev<int64_t>(hl), *l = h + n;
    const uint8_t *slices = dev<uint8_t>(t);
    if (!ari_tensor_is_contiguous(y))
        return launch_each(d, q, dst.count(),
                           [=] ARI_ON_GPU(size_t i) { *dst.locate(i) = ari_acc_value(slices[i], h[i], l[i], narrow); });
    float *values = dst.data;
    const bool wide = aligned<ROW_LANES>(values) && aligned<ROW_LANES>(slices) && aligned<ROW_LANES>(h, l);
    return launch_vectors<ROW_LANES>(d, q, dst.count(), wide, [=] ARI_ON_GPU(auto lanes, size_t i) {
        const auto slice = read_vector<lanes>(slices + i);
        const auto high = read_vector<lanes>(h + i), low = read_vector<lanes>(l + i);
        write_vector(values + i, vector_of<lanes>([&](size_t k) {
                         return ari_acc_value(slice.lane[k], high.lane[k], low.lane[k], narrow);
                     }));
    });
}

ar_status acc_put(ar_device *d, ar_queue *q, ar_buf t, ar_buf h, ar_buf l, ar_cbuf x, size_t n, bool narrow)
{
    uint8_t *top = dev<uint8_t>(t);
    int64_t *high = dev<int64_t>(h), *low = dev<int64_t>(l);
    const float *v = dev<float>(x);
    return launch_each(d, q, n, [=] ARI_ON_GPU(size_t i) { ari_acc_put(&top[i], &high[i], &low[i], v[i], narrow); });
}

ar_status states_narrow(ar_device *d, ar_queue *q, ar_buf dst, ar_cbuf t, ar_cbuf h, ar_cbuf l, size_t n, size_t width,
                        bool narrow)
{
    uint8_t *sent = dev<uint8_t>(dst);
    const uint8_t *slices = dev<uint8_t>(t);
    const int64_t *high = dev<int64_t>(h), *low = dev<int64_t>(l);
    return launch_each(d, q, n, [=] ARI_ON_GPU(size_t i) {
        ari_sent_write_state(sent + i * width, slices[i], high[i], low[i], width, narrow);
    });
}

ar_status states_merge(ar_device *d, ar_queue *q, ar_buf t, ar_buf h, ar_buf l, ar_cbuf src, size_t ranks, size_t n,
                       size_t width, bool narrow)
{
    const uint8_t *sent = dev<uint8_t>(src);
    uint8_t *slices = dev<uint8_t>(t);
    int64_t *high = dev<int64_t>(h), *low = dev<int64_t>(l);
    return launch_each(d, q, n, [=] ARI_ON_GPU(size_t i) {
        for (size_t r = 0; r < ranks; r++)
            ari_sent_merge_state(&slices[i], &high[i], &low[i], sent + (r * n + i) * width, width, narrow);
    });
}

} // namespace ARI_GPU
