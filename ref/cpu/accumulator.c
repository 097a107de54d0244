/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/accumulator.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/kernels.h"

/* The order-independent accumulator (docs/numerics.md, section 3) over arrays, in its two-phase form: the highest slice
 * of state and value first, raise where that is new (rare after the first few values), then plain additions. The same
 * states as ari_acc_add's. */

#define CHUNK ((size_t)512) /* elements whose state, 17 bytes each, stays in the first cache level */

/* now[i] = the larger of t[i] and the top slice of v[i]; whether any is larger than t[i]. */
ARI_SIMD static bool tops_of(uint8_t *restrict now, const uint8_t *restrict t, const float *restrict v, size_t n)
{
    unsigned int raised = 0;
    for (size_t i = 0; i < n; i++) {
        const uint8_t top = (uint8_t)ari_acc_top(v[i]);
        const uint8_t larger = top > t[i] ? top : t[i];
        raised |= (unsigned int)(larger ^ t[i]);
        now[i] = larger;
    }
    return raised != 0;
}

/* h += slice t of v, l += slice t-1 of v, for t at least the top of v. With the significand m < 2^24 at bit p of
 * |v|*2^149, the 64 bits from bit 32(t-1) on hold both slices, and m lies below their end: they are m*2^40 shifted
 * right by 40 - (p - 32(t-1)) >= 0. For a flagged element, t = 255, that is beyond every value: nothing is added. */
ARI_SIMD static void add_slices(int64_t *restrict h, int64_t *restrict l, const uint8_t *restrict t,
                                const float *restrict v, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ari_bits32(v[i]);
        const int32_t biased = (int32_t)((bits >> 23) & 0xffu);
        const uint32_t significand = (bits & 0x7fffffu) | (biased != 0 ? 0x800000u : 0u);
        const int32_t place = biased != 0 ? biased - 1 : 0;
        const int32_t right = 40 - place + 32 * ((int32_t)t[i] - 1);
        const uint64_t shifted = ((uint64_t)significand << 40) >> (right & 63);
        const uint64_t window = right > 63 ? 0u : shifted;
        const uint64_t sign =
            0u - (uint64_t)(bits >> 31); /* all ones for a negative value: (x ^ sign) - sign negates */
        h[i] = (int64_t)((uint64_t)h[i] + (((window >> 32) ^ sign) - sign));
        l[i] = (int64_t)((uint64_t)l[i] + (((window & 0xffffffffu) ^ sign) - sign));
    }
}

/* Raising by one slice moves H down to L; by more, or to the flag, drops both. */
ARI_SIMD static void raise_run(uint8_t *restrict t, int64_t *restrict h, int64_t *restrict l,
                               const uint8_t *restrict t_new, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int64_t old = t[i];
        const int64_t now = t_new[i] > old ? t_new[i] : old;
        const int64_t moved = now == old + 1 ? h[i] : 0;
        l[i] = now == old ? l[i] : moved;
        h[i] = now == old ? h[i] : 0;
        t[i] = (uint8_t)now;
    }
}

ARI_SIMD static void value_run(float *restrict y, const uint8_t *restrict t, const int64_t *restrict h,
                               const int64_t *restrict l, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = ari_acc_value(t[i], h[i], l[i]);
}

void ari_accumulate(uint8_t *t, int64_t *h, int64_t *l, const float *v, size_t n)
{
    uint8_t now[CHUNK];
    for (size_t i = 0; i < n; i += CHUNK) {
        const size_t count = n - i < CHUNK ? n - i : CHUNK;
        if (tops_of(now, t + i, v + i, count))
            raise_run(t + i, h + i, l + i, now, count);
        add_slices(h + i, l + i, t + i, v + i, count);
    }
}

/* The accumulator as arrays, [rows, cols] of elements. */
typedef struct acc_view {
    uint8_t *t;
    int64_t *h, *l;
    size_t cols;
} acc_view;

/* Adds terms of row r, columns [from, from + n), to row `row` of the accumulator. */
static void add_piece(const acc_view *acc, size_t row, const ar_tensor *terms, size_t r, size_t from, size_t n)
{
    float gathered[CHUNK];
    const ptrdiff_t stride = terms->stride[1];
    const float *x = (const float *)terms->data.ptr + (ptrdiff_t)r * terms->stride[0] + (ptrdiff_t)from * stride;
    if (stride != 1) {
        for (size_t j = 0; j < n; j++)
            gathered[j] = x[(ptrdiff_t)j * stride];
        x = gathered;
    }
    const size_t at = row * acc->cols + from;
    ari_accumulate(acc->t + at, acc->h + at, acc->l + at, x, n);
}

/* The row of the accumulator that row r of the terms goes to; negative: none. */
static int64_t target_row(const int64_t *row_of, size_t rows_in_acc, size_t r)
{
    if (row_of)
        return row_of[r];
    return rows_in_acc > 1 ? (int64_t)r : 0;
}

/** Slot acc_add. Rows of the terms may meet in a row of the accumulator, so threads share out its columns; without
 *  row_of and with one row each they share out rows too. Errors: AR_ERR_SHAPE (a row outside the accumulator). */
ar_status ari_cpu_acc_add(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf hl, size_t rows_in_acc, const ar_tensor *terms,
                          ar_cbuf row_of)
{
    const size_t rows = terms->shape[0], cols = terms->shape[1];
    const int64_t *targets = row_of.ptr;
    int64_t *sums = hl.ptr;
    const acc_view acc = {.t = t.ptr, .h = sums, .l = sums + rows_in_acc * cols, .cols = cols};
    for (size_t r = 0; r < rows; r++)
        if (target_row(targets, rows_in_acc, r) >= (int64_t)rows_in_acc)
            return ar_error_set(AR_ERR_SHAPE, "acc_add: row %zu goes to row %lld of %zu", r,
                                (long long)target_row(targets, rows_in_acc, r), rows_in_acc);
    const bool disjoint = !targets && rows_in_acc > 1;
    const size_t chunks = (cols + CHUNK - 1) / CHUNK, groups = disjoint ? rows : 1;
    ARI_PARALLEL_FOR (i, chunks * groups, d, rows * cols) {
        const size_t from = i % chunks * CHUNK, n = cols - from < CHUNK ? cols - from : CHUNK;
        const size_t first = disjoint ? i / chunks : 0, last = disjoint ? first + 1 : rows;
        for (size_t r = first; r < last; r++) {
            const int64_t row = target_row(targets, rows_in_acc, r);
            if (row >= 0)
                add_piece(&acc, (size_t)row, terms, r, from, n);
        }
    }
    return AR_OK;
}

/** Slot acc_raise. Errors: none. */
ar_status ari_cpu_acc_raise(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf hl, ar_cbuf t_new, size_t n)
{
    uint8_t *top = t.ptr;
    int64_t *h = hl.ptr, *l = h + n;
    const uint8_t *to = t_new.ptr;
    const size_t chunks = (n + CHUNK - 1) / CHUNK;
    ARI_PARALLEL_FOR (i, chunks, d, n) {
        const size_t from = i * CHUNK;
        raise_run(top + from, h + from, l + from, to + from, n - from < CHUNK ? n - from : CHUNK);
    }
    return AR_OK;
}

/* Writes values[0..n), elements [from, from + n) in row-major order, through the strides of y, a run along the last
 * dimension at a time. */
static void scatter(const ar_tensor *y, size_t from, const float *values, size_t n)
{
    const size_t inner = y->shape[y->ndim - 1];
    const ptrdiff_t stride = y->stride[y->ndim - 1];
    while (n > 0) {
        float *out = (float *)y->data.ptr + (ptrdiff_t)(from % inner) * stride;
        size_t rest = from / inner;
        for (int dim = y->ndim - 2; dim >= 0; dim--) {
            out += (ptrdiff_t)(rest % y->shape[dim]) * y->stride[dim];
            rest /= y->shape[dim];
        }
        const size_t run = inner - from % inner < n ? inner - from % inner : n;
        for (size_t i = 0; i < run; i++)
            out[(ptrdiff_t)i * stride] = values[i];
        from += run;
        values += run;
        n -= run;
    }
}

/** Slot acc_value. Errors: none. */
ar_status ari_cpu_acc_value(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n)
{
    const uint8_t *top = t.ptr;
    const int64_t *h = hl.ptr, *l = h + n;
    const bool contiguous = ar_tensor_is_contiguous(y);
    const size_t chunks = (n + CHUNK - 1) / CHUNK;
    ARI_PARALLEL_FOR (i, chunks, d, n) {
        const size_t from = i * CHUNK, count = n - from < CHUNK ? n - from : CHUNK;
        if (contiguous) {
            value_run((float *)y->data.ptr + from, top + from, h + from, l + from, count);
            continue;
        }
        float values[CHUNK] = {0};
        value_run(values, top + from, h + from, l + from, count);
        scatter(y, from, values, count);
    }
    return AR_OK;
}
