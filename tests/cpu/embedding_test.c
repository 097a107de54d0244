/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/row_support.h"

Test(embedding, rows_in_range_are_local_numbers_and_others_are_minus_one)
{
    ar_device d = test_device(1);
    const int64_t ids[] = {0, 9, 10, 14, 15, -1, -100, INT64_MIN, INT64_MAX};
    const int64_t expected[] = {-1, -1, 0, 4, -1, -1, -1, -1, -1};
    int64_t row_of[9];
    assert_ok(ari_cpu_rows_in_range(&d, NULL, buf(row_of), cbuf(ids), 9, 10, 5));
    cr_assert(memcmp(row_of, expected, sizeof expected) == 0);
    assert_ok(ari_cpu_rows_in_range(&d, NULL, buf(row_of), cbuf(ids), 9, 10, 0)); /* an empty shard */
    for (size_t i = 0; i < 9; i++)
        cr_assert_eq(row_of[i], -1);
    assert_ok(ari_cpu_rows_in_range(&d, NULL, buf(NULL), cbuf(NULL), 0, 10, 5));
}

static void check_gather(size_t cols, int threads)
{
    ar_device d = test_device(threads);
    const size_t ld = cols + 3, rows = 11, n = ROWS;
    OWNED(free) float *w = new_values(rows * ld, SPECIAL, 1), *y = new_values(n * cols, SPECIAL, 2);
    OWNED(free) uint32_t *expected = calloc(n * cols, sizeof *expected);
    int64_t row_of[ROWS];
    w[0] = -0.0f; /* bits that no arithmetic would keep */
    w[ld] = ari_float32(0xffc12345u);
    for (size_t t = 0; t < n; t++) {
        row_of[t] = (int64_t)(t * 7 % 13) - 2; /* -2 and -1: not here */
        if (row_of[t] >= 0)
            memcpy(expected + t * cols, w + (size_t)row_of[t] * ld, cols * sizeof *w);
    }
    const ar_tensor table = view2(w, rows, cols, ld);
    assert_ok(ari_cpu_gather_rows(&d, NULL, rows_of(y, n, cols), &table, cbuf(row_of), cbuf(NULL), 1));
    assert_bits(y, expected, n * cols, "gathered");
}

Test(embedding, gather_copies_bits_from_strided_rows_and_writes_zero_bits_elsewhere)
{
    for (size_t i = 0; i < ROW_LENGTHS; i++)
        for (int threads = 1; threads <= 2; threads++)
            check_gather(row_lengths[i], threads);
}

/* Without row_of a term goes to its own row, or to row 0 of an accumulator that has one row. */
static void check_sum(size_t rows_in_acc, size_t rows, size_t cols, const int64_t *row_of, bool transposed, int threads)
{
    ar_device d = test_device(threads);
    OWNED(free) float *terms = new_values(rows * cols, SPECIAL, 3), *acc = new_values(rows_in_acc * cols, ORDINARY, 4);
    OWNED(free) float *expected = new_copy(acc, rows_in_acc * cols);
    ar_tensor view = view2(terms, rows, cols, cols);
    if (transposed) {
        view.stride[0] = 1;
        view.stride[1] = (ptrdiff_t)rows;
    }
    for (size_t r = 0; r < rows; r++) {
        const int64_t to = row_of ? row_of[r] : rows_in_acc > 1 ? (int64_t)r : 0;
        for (size_t c = 0; c < cols && to >= 0; c++) {
            const float term = transposed ? terms[c * rows + r] : terms[r * cols + c];
            expected[(size_t)to * cols + c] = stored(expected[(size_t)to * cols + c] + term);
        }
    }
    assert_ok(ari_cpu_sum_rows_f32(&d, NULL, buf(acc), rows_in_acc, &view, cbuf(row_of)));
    assert_bits(acc, expected, rows_in_acc * cols, "sum_rows_f32");
}

Test(embedding, sum_rows_adds_in_row_order_on_any_number_of_threads)
{
    static const size_t columns[] = {1, 3, 7, 33, 100, 257, 1000};
    int64_t row_of[ROWS];
    for (size_t r = 0; r < ROWS; r++)
        row_of[r] = (int64_t)(r * 5 % 7) - 1;
    for (size_t i = 0; i < 7; i++)
        for (int variant = 0; variant < 4; variant++) {
            check_sum(6, ROWS, columns[i], row_of, variant & 1, 1 + variant / 2);
            check_sum(ROWS, ROWS, columns[i], NULL, variant & 1, 1 + variant / 2);
            check_sum(1, ROWS, columns[i], NULL, variant & 1, 1 + variant / 2);
        }
}
