/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/accumulator.h"

#include <math.h>

#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"
#include "ref/numerics/sent_sum.h"

/* Sums over rows: the order-independent accumulator (numerics.md, section 3) over arrays, and the native sum in row
 * order. The accumulator has a two-phase form: first the highest slice of state and values, with a raise if it is new
 * (rare after the first few values), then plain additions. The states are those of ari_acc_add. */

#define CHUNK ((size_t)512) /* elements whose state, 17 bytes each, fits in the L1 cache */

/* Sets tops[i] to the larger of tops[i] and the top slice of v[i], and returns whether any changed. Tops are int32
 * while values are added, because vectors of bytes next to vectors of 64-bit integers would not fit the registers. */
ARI_ROW_LOOP bool raise_tops_of(int32_t *restrict tops, const float *restrict v, size_t n, bool narrow)
{
    int32_t raised = 0;
    for (size_t i = 0; i < n; i++) {
        const int32_t top = ari_acc_top(v[i], narrow);
        const int32_t larger = top > tops[i] ? top : tops[i];
        raised |= larger ^ tops[i];
        tops[i] = larger;
    }
    return raised != 0;
}

ARI_SIMD static bool raise_tops(int32_t *restrict tops, const float *restrict v, size_t n, bool narrow)
{
    return narrow ? raise_tops_of(tops, v, n, true) : raise_tops_of(tops, v, n, false);
}

/* Computes h = slice t of v and l = slice t-1 of v, or adds these to h and l, where t is at least v's top slice and
 * slices have w bits. With the significand m < 2^24 at bit p of |v|*2^149, the 2w bits from bit w(t-1) on contain both
 * slices, and m lies below their end. The slices are therefore m*2^40 shifted right by 40 - (p - w(t-1)) >= 0. For a
 * flagged element, t = 255 lies beyond every value, and nothing is added. */
ARI_ROW_LOOP void add_slices_of(int64_t *restrict h, int64_t *restrict l, const int32_t *restrict t,
                                const float *restrict v, size_t n, bool add, bool narrow)
{
    const int32_t width = ari_acc_bits(narrow);
    const uint64_t mask = ((uint64_t)1 << width) - 1;
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ari_bits32(v[i]);
        const int32_t biased = (int32_t)((bits >> 23) & 0xffu);
        const uint32_t significand = (bits & 0x7fffffu) | (biased != 0 ? 0x800000u : 0u);
        const int32_t place = biased != 0 ? biased - 1 : 0;
        const int32_t right = 40 - place + width * (t[i] - 1);
        const uint64_t shifted = ((uint64_t)significand << 40) >> (right & 63);
        const uint64_t window = right > 63 ? 0u : shifted;
        const uint64_t sign =
            0u - (uint64_t)(bits >> 31); /* all ones for a negative value: (x ^ sign) - sign negates x */
        h[i] = (int64_t)((add ? (uint64_t)h[i] : 0u) + (((window >> width) ^ sign) - sign));
        l[i] = (int64_t)((add ? (uint64_t)l[i] : 0u) + (((window & mask) ^ sign) - sign));
    }
}

ARI_SIMD static void add_slices(int64_t *restrict h, int64_t *restrict l, const int32_t *restrict t,
                                const float *restrict v, size_t n, bool add, bool narrow)
{
    if (narrow)
        add_slices_of(h, l, t, v, n, add, true);
    else
        add_slices_of(h, l, t, v, n, add, false);
}

/* Raising t by one slice moves H to L; raising it by more, or to the flag, drops both. */
ARI_SIMD static void raise_run(uint8_t *restrict t, int64_t *restrict h, int64_t *restrict l,
                               const uint8_t *restrict t_new, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const int64_t old = t[i];
        const int64_t new_top = t_new[i] > old ? t_new[i] : old;
        const int64_t moved = new_top == old + 1 ? h[i] : 0;
        l[i] = new_top == old ? l[i] : moved;
        h[i] = new_top == old ? h[i] : 0;
        t[i] = (uint8_t)new_top;
    }
}

/* `narrow` is a constant after inlining; otherwise compilers do not vectorise. */
static inline void values_of(float *restrict y, const uint8_t *restrict t, const int64_t *restrict h,
                             const int64_t *restrict l, size_t n, const bool narrow)
{
    for (size_t i = 0; i < n; i++)
        y[i] = ari_acc_value(t[i], h[i], l[i], narrow);
}

ARI_SIMD static void value_run(float *restrict y, const uint8_t *restrict t, const int64_t *restrict h,
                               const int64_t *restrict l, size_t n, bool narrow)
{
    if (narrow)
        values_of(y, t, h, l, n, true);
    else
        values_of(y, t, h, l, n, false);
}

void ari_accumulate(uint8_t *t, int64_t *h, int64_t *l, const float *const *row, size_t rows, size_t n, bool fresh,
                    bool narrow)
{
    int32_t tops[CHUNK];
    uint8_t scratch[CHUNK];
    for (size_t i = 0; i < n; i += CHUNK) {
        const size_t count = n - i < CHUNK ? n - i : CHUNK;
        uint8_t *top = fresh ? t + i : scratch;
        bool raised = fresh;
        for (size_t j = 0; j < count; j++)
            tops[j] = fresh ? 0 : t[i + j];
        for (size_t r = 0; r < rows; r++)
            raised |= raise_tops(tops, row[r] + i, count, narrow);
        for (size_t j = 0; j < count && raised; j++)
            top[j] = (uint8_t)tops[j];
        if (raised && !fresh)
            raise_run(t + i, h + i, l + i, top, count);
        for (size_t r = 0; r < rows; r++)
            add_slices(h + i, l + i, tops, row[r] + i, count, !fresh || r > 0, narrow);
    }
}

/* --- many rows into one ------------------------------------------------------------------------------------------- */

/* Columns whose sums stay in registers while rows are added, and number of these rows, chosen so that adjacent columns
 * are still in the caches afterwards. A binary64 number holds the sum of the slices of 2^18 rows, each below 2^32,
 * exactly, below the 2^51 up to which ARI_ROUND_MAGIC converts to an integer. */
#define LANES ((size_t)16)
#define ROWS_AT_ONCE ((size_t)128)

/* Slices t and t - 1 of a column's values, added up, and the largest magnitude of these. */
typedef struct column_sums {
    double high[LANES], low[LANES];
    uint32_t top[LANES];
} column_sums;

/* In |v|*2^(149-wt), for slices of w bits, slice t lies above the binary point and slice t-1 in the w bits below it. No
 * operation here rounds, since v has 24 bits. */
ARI_ROW_LOOP void sum_columns(column_sums *s, const uint8_t *t, const float *x, ptrdiff_t stride, size_t rows,
                              bool narrow)
{
    const double slice = narrow ? 0x1p13 : 0x1p32;
    double unit[LANES], high[LANES] = {0.0}, low[LANES] = {0.0};
    uint32_t top[LANES] = {0};
    for (size_t j = 0; j < LANES; j++)
        unit[j] = t[j] == ARI_ACC_NONFINITE ? 0.0 : ari_pow2(149 - ari_acc_bits(narrow) * (int32_t)t[j]);
    for (size_t r = 0; r < rows; r++) {
        __builtin_prefetch(x + (ptrdiff_t)r * stride + LANES); /* prefetches the next columns, since no hardware
                                                                  prefetcher handles such strides */
        for (size_t j = 0; j < LANES; j++) {
            const float value = x[(ptrdiff_t)r * stride + (ptrdiff_t)j];
            const double v = (double)value * unit[j], above = trunc(v);
            const uint32_t bits = ari_row_magnitude32(value);
            high[j] += above;
            low[j] += trunc((v - above) * slice);
            top[j] = bits > top[j] ? bits : top[j];
        }
    }
    for (size_t j = 0; j < LANES; j++) {
        s->high[j] = high[j];
        s->low[j] = low[j];
        s->top[j] = top[j];
    }
}

/* Computes new_tops[j], the larger of t[j] and the magnitude's top slice. Returns whether any is larger than t[j]. */
ARI_ROW_LOOP bool raised_tops(uint8_t *new_tops, const uint8_t *t, const uint32_t *top, bool narrow)
{
    unsigned int raised = 0;
    for (size_t j = 0; j < LANES; j++) {
        const uint8_t slice = (uint8_t)ari_acc_top(ari_float32(top[j]), narrow);
        new_tops[j] = slice > t[j] ? slice : t[j];
        raised |= (unsigned int)(new_tops[j] ^ t[j]);
    }
    return raised != 0;
}

/* Accumulates up to ROWS_AT_ONCE rows into LANES elements. If a value reaches above t, which is rare after the first
 * rows, the sums are computed again. A flagged element is unchanged. */
ARI_ROW_KERNEL void accumulate_lanes(uint8_t *t, int64_t *h, int64_t *l, const float *x, ptrdiff_t stride, size_t rows,
                                     bool narrow)
{
    uint8_t new_tops[LANES];
    column_sums s;
    sum_columns(&s, t, x, stride, rows, narrow);
    if (raised_tops(new_tops, t, s.top, narrow)) {
        raise_run(t, h, l, new_tops, LANES);
        sum_columns(&s, t, x, stride, rows, narrow);
    }
    for (size_t j = 0; j < LANES; j++) {
        const bool flagged = t[j] == ARI_ACC_NONFINITE;
        const uint64_t to_h = ari_bits64((flagged ? 0.0 : s.high[j]) + ARI_ROUND_MAGIC) - ARI_ROUND_MAGIC_BITS;
        const uint64_t to_l = ari_bits64((flagged ? 0.0 : s.low[j]) + ARI_ROUND_MAGIC) - ARI_ROUND_MAGIC_BITS;
        h[j] = (int64_t)((uint64_t)h[j] + to_h);
        l[j] = (int64_t)((uint64_t)l[j] + to_l);
    }
}

/* The rows x[r * stride, + n) into elements [0, n). */
static void accumulate_rows(uint8_t *t, int64_t *h, int64_t *l, const float *x, ptrdiff_t stride, size_t rows, size_t n,
                            bool narrow)
{
    const size_t full_cols = n - n % LANES;
    for (size_t first_row = 0; first_row < rows; first_row += ROWS_AT_ONCE) {
        const size_t count = rows - first_row < ROWS_AT_ONCE ? rows - first_row : ROWS_AT_ONCE;
        const float *block = x + (ptrdiff_t)first_row * stride;
        for (size_t j = 0; j < full_cols; j += LANES)
            accumulate_lanes(t + j, h + j, l + j, block + j, stride, count, narrow);
    }
    for (size_t r = 0; r < rows && full_cols < n; r++) {
        const float *rest = x + (ptrdiff_t)r * stride + full_cols;
        ari_accumulate(t + full_cols, h + full_cols, l + full_cols, &rest, 1, n - full_cols, false, narrow);
    }
}

/* Columns of a native sum that stay in registers: several independent chains of additions. */
#define NATIVE_LANES ((size_t)64)

/* Computes sum[j] = fl32(sum[j] + x[r][j]) row by row. A NaN stays NaN, and is converted to its stored form at the
 * end. */
ARI_ROW_KERNEL void add_lanes(float *restrict sum, const float *restrict x, ptrdiff_t stride, size_t rows)
{
    float local_sum[NATIVE_LANES];
    for (size_t j = 0; j < NATIVE_LANES; j++)
        local_sum[j] = sum[j];
    for (size_t r = 0; r < rows; r++)
        for (size_t j = 0; j < NATIVE_LANES; j++)
            local_sum[j] += x[(ptrdiff_t)r * stride + (ptrdiff_t)j];
    for (size_t j = 0; j < NATIVE_LANES; j++)
        sum[j] = ari_canonical32(local_sum[j]);
}

/* acc[j] = fl32(acc[j] + terms[j]), j in [0, n). */
ARI_ROW_KERNEL void add_terms(float *restrict acc, const float *restrict terms, size_t n)
{
    for (size_t j = 0; j < n; j++)
        acc[j] = ari_add32(acc[j], terms[j]);
}

/* The rows x[r * stride, + n) into elements [0, n). */
static void add_rows_f32(float *sum, const float *x, ptrdiff_t stride, size_t rows, size_t n)
{
    size_t col = 0;
    for (; col + NATIVE_LANES <= n; col += NATIVE_LANES)
        add_lanes(sum + col, x + col, stride, rows);
    for (size_t r = 0; r < rows && col < n; r++)
        add_terms(sum + col, x + (ptrdiff_t)r * stride + col, n - col);
}

/* Number of columns that a thread processes at a time: 16 cache lines of fp32, so that no two threads share a cache
 * line. */
#define COLUMN_BLOCK ((size_t)256)
/* Terms of a block of rows for each thread: 128 KiB, which fit the second cache level next to their inputs. */
#define BLOCK_TERMS ((size_t)32768)

size_t ari_block_rows(const ar_device *d, size_t rows, size_t cols)
{
    const size_t per_thread = cols < BLOCK_TERMS ? BLOCK_TERMS / cols : 1;
    const size_t total_rows = per_thread * (size_t)ari_threads_for(d, rows, rows * cols);
    return total_rows < rows ? total_rows : rows;
}

/* The rows x[r * stride, + n) to the sums of `cols` columns from `first_col` on. */
static void add_piece(const ar_row_sum *row_sum, size_t cols, size_t first_col, const float *x, ptrdiff_t stride,
                      size_t rows, size_t n)
{
    if (row_sum->t.ptr) {
        int64_t *h = (int64_t *)row_sum->hl.ptr + first_col;
        accumulate_rows((uint8_t *)row_sum->t.ptr + first_col, h, h + cols, x, stride, rows, n, row_sum->narrow);
    } else if (row_sum->f32.ptr) {
        add_rows_f32((float *)row_sum->f32.ptr + first_col, x, stride, rows, n);
    }
}

/* Adds the columns [first_col, ..) of `rows` rows from `first_row` on. bf16 rows are widened in groups that fit the
 * first cache level. */
static void add_block(const ari_row_pass *p, const ari_row_terms *s, size_t first_row, size_t rows, size_t first_col)
{
    enum { WIDENED = 16 };
    const size_t n = p->cols - first_col < COLUMN_BLOCK ? p->cols - first_col : COLUMN_BLOCK;
    const ptrdiff_t stride = s->terms.stride[0],
                    offset = (s->of_block ? 0 : (ptrdiff_t)first_row * stride) + (ptrdiff_t)first_col;
    float scratch[WIDENED * COLUMN_BLOCK];
    if (s->terms.dtype != AR_BF16) {
        add_piece(s->target, p->cols, first_col, (const float *)s->terms.data.ptr + offset, stride, rows, n);
        return;
    }
    for (size_t r = 0; r < rows && ari_sum_requested(s->target); r += WIDENED) {
        const size_t count = rows - r < WIDENED ? rows - r : WIDENED;
        for (size_t i = 0; i < count; i++)
            (void)ari_run_load(&s->terms, offset + (ptrdiff_t)(r + i) * stride, n, scratch + i * n);
        add_piece(s->target, p->cols, first_col, scratch, (ptrdiff_t)n, count, n);
    }
}

void ari_make_rows(ar_device *d, const ari_row_pass *p)
{
    if (p->rows == 0 || p->cols == 0)
        return;
    const size_t at_once = ari_block_rows(d, p->rows, p->cols);
    const size_t blocks = (p->cols + COLUMN_BLOCK - 1) / COLUMN_BLOCK, pieces = blocks * (size_t)p->sums;
#pragma omp parallel num_threads(ari_threads_for(d, p->rows, p->rows * p->cols))
    for (size_t first_row = 0; first_row < p->rows; first_row += at_once) {
        const size_t n = p->rows - first_row < at_once ? p->rows - first_row : at_once;
#pragma omp for schedule(static)
        for (size_t i = 0; i < n; i++)
            p->make_row(p->user, first_row + i, i);
#pragma omp for schedule(static)
        for (size_t i = 0; i < pieces; i++)
            add_block(p, &p->sum[i / blocks], first_row, n, i % blocks * COLUMN_BLOCK);
    }
}

/* Adds all rows of the terms into one row; their columns are contiguous. */
static ar_status add_all_rows(ar_device *d, const ar_row_sum *row_sum, const ar_tensor *terms)
{
    const ari_row_pass p = {
        .rows = terms->shape[0], .cols = terms->shape[1], .sums = 1, .sum = {{.target = row_sum, .terms = *terms}}};
    const size_t blocks = (p.cols + COLUMN_BLOCK - 1) / COLUMN_BLOCK;
    ARI_PARALLEL_FOR (i, blocks, d, p.rows * p.cols)
        add_block(&p, &p.sum[0], 0, p.rows, i * COLUMN_BLOCK);
    return AR_OK;
}

/* Returns true if a slot's arguments request that. */
static bool all_into_one(const ar_tensor *terms, size_t rows_in_acc, ar_cbuf row_of)
{
    return !row_of.ptr && rows_in_acc == 1 && terms->stride[1] == 1;
}

/* --- slots -------------------------------------------------------------------------------------------------------- */

/* The accumulator as arrays, [rows, cols] of elements. */
typedef struct acc_view {
    uint8_t *t;
    int64_t *h, *l;
    size_t cols;
    bool narrow;
} acc_view;

/* Adds terms of row r, columns [first_col, first_col + n), to row `row` of the accumulator. */
static void add_run(const acc_view *acc, size_t row, const ar_tensor *terms, size_t r, size_t first_col, size_t n)
{
    float scratch[CHUNK];
    const ptrdiff_t term_offset = (ptrdiff_t)r * terms->stride[0] + (ptrdiff_t)first_col * terms->stride[1];
    const float *x = ari_run_gather(terms, term_offset, terms->stride[1], n, scratch);
    const size_t acc_offset = row * acc->cols + first_col;
    ari_accumulate(acc->t + acc_offset, acc->h + acc_offset, acc->l + acc_offset, &x, 1, n, false, acc->narrow);
}

/* Returns the accumulator row of row r of the terms; negative: none. */
static int64_t target_row(const int64_t *row_of, size_t rows_in_acc, size_t r)
{
    if (row_of)
        return row_of[r];
    return rows_in_acc > 1 ? (int64_t)r : 0;
}

/** Slot acc_add. Several rows of the terms may be added to one row of the accumulator, so threads divide its
 *  columns; without row_of and with separate rows they divide rows too. Errors: AR_ERR_SHAPE (a row outside of the
 *  accumulator). */
ar_status ari_cpu_acc_add(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf hl, bool narrow, size_t rows_in_acc,
                          const ar_tensor *terms, ar_cbuf row_of)
{
    const size_t rows = terms->shape[0], cols = terms->shape[1];
    const int64_t *targets = row_of.ptr;
    int64_t *sums = hl.ptr;
    const acc_view acc = {.t = t.ptr, .h = sums, .l = sums + rows_in_acc * cols, .cols = cols, .narrow = narrow};
    for (size_t r = 0; r < rows; r++)
        if (target_row(targets, rows_in_acc, r) >= (int64_t)rows_in_acc)
            return ar_error_set(AR_ERR_SHAPE, "acc_add: row %zu goes to row %lld of %zu", r,
                                (long long)target_row(targets, rows_in_acc, r), rows_in_acc);
    if (all_into_one(terms, rows_in_acc, row_of))
        return add_all_rows(d, &(ar_row_sum){.t = t, .hl = hl, .narrow = narrow}, terms);
    const bool disjoint = !targets && rows_in_acc > 1;
    const size_t chunks = (cols + CHUNK - 1) / CHUNK, groups = disjoint ? rows : 1;
    ARI_PARALLEL_FOR (i, chunks * groups, d, rows * cols) {
        const size_t first_col = i % chunks * CHUNK, n = cols - first_col < CHUNK ? cols - first_col : CHUNK;
        const size_t first_row = disjoint ? i / chunks : 0, end_row = disjoint ? first_row + 1 : rows;
        for (size_t r = first_row; r < end_row; r++) {
            const int64_t row = target_row(targets, rows_in_acc, r);
            if (row >= 0)
                add_run(&acc, (size_t)row, terms, r, first_col, n);
        }
    }
    return AR_OK;
}

/** Implements slot sum_rows_f32. The summation order is that of the rows, for every element and any number of threads,
 *  because threads share the columns. fp32 accumulator. */
ar_status ari_cpu_sum_rows_f32(ar_device *d, ARI_AT_ONCE, ar_buf acc, size_t rows_in_acc, const ar_tensor *terms,
                               ar_cbuf row_of)
{
    const size_t rows = terms->shape[0], cols = terms->shape[1];
    const size_t blocks = cols / COLUMN_BLOCK + (cols % COLUMN_BLOCK != 0);
    if (all_into_one(terms, rows_in_acc, row_of))
        return add_all_rows(d, &(ar_row_sum){.f32 = acc}, terms);
    float *sums = acc.ptr;
    const int64_t *targets = row_of.ptr;
    ARI_PARALLEL_FOR (block, blocks, d, rows * cols) {
        const size_t first_col = block * COLUMN_BLOCK, remaining_cols = cols - first_col,
                     n = remaining_cols < COLUMN_BLOCK ? remaining_cols : COLUMN_BLOCK;
        const ptrdiff_t col_offset = (ptrdiff_t)first_col * terms->stride[1];
        float scratch[COLUMN_BLOCK];
        for (size_t r = 0; r < rows; r++) {
            const int64_t row = targets ? targets[r] : rows_in_acc > 1 ? (int64_t)r : 0;
            const ptrdiff_t term_offset = col_offset + (ptrdiff_t)r * terms->stride[0];
            if (row >= 0)
                add_terms(sums + (size_t)row * cols + first_col,
                          ari_run_gather(terms, term_offset, terms->stride[1], n, scratch), n);
        }
    }
    return AR_OK;
}

/* Writes values[0..n), elements [first_element, first_element + n) in row-major order, through the strides of y, a run
 * along the last dimension at a time. */
static void scatter(const ar_tensor *y, size_t first_element, const float *values, size_t n)
{
    const size_t inner = y->shape[y->ndim - 1];
    const ptrdiff_t stride = y->stride[y->ndim - 1];
    while (n > 0) {
        float *out = (float *)y->data.ptr + (ptrdiff_t)(first_element % inner) * stride;
        size_t rest = first_element / inner;
        for (int dim = y->ndim - 2; dim >= 0; dim--) {
            out += (ptrdiff_t)(rest % y->shape[dim]) * y->stride[dim];
            rest /= y->shape[dim];
        }
        const size_t run = inner - first_element % inner < n ? inner - first_element % inner : n;
        for (size_t i = 0; i < run; i++)
            out[(ptrdiff_t)i * stride] = values[i];
        first_element += run;
        values += run;
        n -= run;
    }
}

/** Implements slot acc_value. Errors: none. */
ar_status ari_cpu_acc_value(ar_device *d, ARI_AT_ONCE, const ar_tensor *y, ar_cbuf t, ar_cbuf hl, size_t n, bool narrow)
{
    const uint8_t *top = t.ptr;
    const int64_t *h = hl.ptr, *l = h + n;
    const bool contiguous = ari_tensor_is_contiguous(y);
    const size_t total = ar_tensor_count(y), chunks = (total + CHUNK - 1) / CHUNK;
    ARI_PARALLEL_FOR (i, chunks, d, total) {
        const size_t begin = i * CHUNK, count = total - begin < CHUNK ? total - begin : CHUNK;
        if (contiguous) {
            value_run((float *)y->data.ptr + begin, top + begin, h + begin, l + begin, count, narrow);
            continue;
        }
        float values[CHUNK] = {0};
        value_run(values, top + begin, h + begin, l + begin, count, narrow);
        scatter(y, begin, values, count);
    }
    return AR_OK;
}

/** Implements slot acc_put. Errors: none. */
ar_status ari_cpu_acc_put(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf h, ar_buf l, ar_cbuf x, size_t n, bool narrow)
{
    uint8_t *top = t.ptr;
    int64_t *high = h.ptr, *low = l.ptr;
    const float *v = x.ptr;
    ARI_PARALLEL_FOR (i, n, d, n)
        ari_acc_put(&top[i], &high[i], &low[i], v[i], narrow);
    return AR_OK;
}

/** Implements slot states_narrow. Errors: none. */
ar_status ari_cpu_states_narrow(ar_device *d, ARI_AT_ONCE, ar_buf dst, ar_cbuf t, ar_cbuf h, ar_cbuf l, size_t n,
                                size_t width, bool narrow)
{
    uint8_t *sent = dst.ptr;
    const uint8_t *top = t.ptr;
    const int64_t *high = h.ptr, *low = l.ptr;
    ARI_PARALLEL_FOR (i, n, d, n)
        ari_sent_write_state(sent + i * width, top[i], high[i], low[i], width, narrow);
    return AR_OK;
}

/** Implements slot states_merge. Errors: none. */
ar_status ari_cpu_states_merge(ar_device *d, ARI_AT_ONCE, ar_buf t, ar_buf h, ar_buf l, ar_cbuf src, size_t ranks,
                               size_t n, size_t width, bool narrow)
{
    const uint8_t *sent = src.ptr;
    uint8_t *top = t.ptr;
    int64_t *high = h.ptr, *low = l.ptr;
    ARI_PARALLEL_FOR (i, n, d, n * ranks)
        for (size_t r = 0; r < ranks; r++)
            ari_sent_merge_state(&top[i], &high[i], &low[i], sent + (r * n + i) * width, width, narrow);
    return AR_OK;
}
