/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised operands (docs/numerics.md, "Contraction", steps 2 and 3) in the form that gpu/packed.h describes. */
#include <stdlib.h>

#include "gpu/packed.h"
#include "ref/core/size.h"

namespace ARI_GPU
{
namespace
{

/* The most terms of a block. int32 holds the sums of products: of 4 products of digits a term, and of one of Karatsuba's
 * sums of two, 4*64*64*131071 = 128*128*131071 < 2^31. */
const size_t TERMS = 131056;

/* From so many terms on 10 products beat 16: six fewer of k terms an element of the result, against three more sums of
 * 4 bytes written and read, at some 200 int8 multiply-adds a byte of memory's, and more bytes of the operands. */
const size_t TERMS_FOR_TEN = 512;

const size_t ROWS = 32, COLS = 128; /* of a tile */
const size_t LD = COLS + 1;         /* of its rows in shared memory: columns in different banks */

struct digits {
    int32_t d[4];
};

/* |q| <= 2^25 - 1. */
ARI_KERNEL digits digits_of(int32_t q)
{
    digits r;
    for (int i = 0; i < 3; i++) {
        r.d[i] = ((q + 64) & 127) - 64;
        q = (q - r.d[i]) / 128; /* no remainder */
    }
    r.d[3] = q;
    return r;
}

/* What run number `run` of an operand holds. */
template <bool TEN> ARI_KERNEL int32_t run_value(const digits &v, bool left, int run)
{
    if (!TEN)
        return left ? v.d[run] : v.d[3 - run];
    if (run < 4)
        return v.d[run];
    if (run < 6)
        return v.d[2 * (run - 4)] + v.d[2 * (run - 4) + 1];
    const bool low = run == 8 || run == (left ? 6 : 7);
    return low ? v.d[0] + v.d[2] : v.d[1] + v.d[3];
}

/* A tile of one matrix: ROWS rows of COLS terms, read along whichever dimension lies side by side, and written along
 * the terms, four to a word. Rows and columns are those of the packed operand; what lies outside the source but inside
 * [row_at, row_end) and [k_at, k_end) is padding. */
template <bool TEN> struct pack_tile {
    view<const float> x;
    const int32_t *c, *e; /* [matrices, cols of x] or NULL, [matrices, rows] */
    int32_t sign;
    int8_t *runs;
    packed p;
    size_t row_at, row_end, k_at, k_end, down, across;

    ARI_KERNEL int32_t quantised(const float *matrix, size_t at, size_t row, size_t col) const
    {
        if (row >= row_end || row - row_at >= x.shape[2] || col < k_at || col - k_at >= x.shape[3])
            return 0;
        const size_t k = col - k_at;
        const int32_t shift = c ? ari_contract_shift(c[at * x.shape[3] + k], sign) : 0;
        const float v =
            matrix[static_cast<ptrdiff_t>(row - row_at) * x.stride[2] + static_cast<ptrdiff_t>(k) * x.stride[3]];
        return shift == ARI_EXP_ZERO ? 0 : ari_contract_quantise(v, shift, e[at * p.rows + row]);
    }

    /* Four terms of every run of a row, from column `col` on. */
    ARI_KERNEL void store(int8_t *row, size_t col, const int32_t *q) const
    {
        const size_t at = p.blocks == 1 ? 0 : col / p.width;
        int8_t *to = row + at * p.width * (TEN ? RUNS_10 : RUNS_16) + (col - at * p.width);
        const digits v[4] = {digits_of(q[0]), digits_of(q[1]), digits_of(q[2]), digits_of(q[3])};
        const bool whole = col >= k_at && col + 4 <= k_end;
        for (int run = 0; run < static_cast<int>(TEN ? RUNS_10 : RUNS_16); run++, to += p.width) {
            uint32_t word = 0;
            for (int i = 3; i >= 0; i--)
                word = word << 8 | (static_cast<uint32_t>(run_value<TEN>(v[i], p.left, run)) & 0xffu);
            if (whole) {
                *reinterpret_cast<uint32_t *>(to) = word;
                continue;
            }
            for (size_t i = 0; i < 4; i++)
                if (col + i >= k_at && col + i < k_end)
                    to[i] = static_cast<int8_t>(run_value<TEN>(v[i], p.left, run));
        }
    }

    ARI_KERNEL void operator()(const block &b) const
    {
        ARI_SHARED int32_t tile[ROWS * LD];
        const size_t at = b.index / (down * across);
        const size_t first_row = row_at + b.index / across % down * ROWS;
        const size_t first_col = (k_at / COLS + b.index % across) * COLS;
        const float *matrix = x.matrix(at);
        const bool lines = x.stride[3] == 1;
        b.each(ROWS * COLS, [&](size_t i) {
            const size_t row = lines ? i / COLS : i % ROWS, col = lines ? i % COLS : i / ROWS;
            tile[row * LD + col] = quantised(matrix, at, first_row + row, first_col + col);
        });
        b.each(ROWS * COLS / 4, [&](size_t i) {
            const size_t row = first_row + i / (COLS / 4), col = i % (COLS / 4) * 4;
            if (row < row_end && first_col + col < k_end)
                store(runs + at * p.step + row * p.row_bytes, first_col + col, tile + i / (COLS / 4) * LD + col);
        });
    }
};

template <bool TEN> ar_status pack_tiles(ar_device *d, ar_queue *q, pack_tile<TEN> t)
{
    if (t.row_at >= t.row_end || t.k_at >= t.k_end)
        return AR_OK;
    t.down = ceil_div(t.row_end - t.row_at, ROWS);
    t.across = ceil_div(t.k_end, COLS) - t.k_at / COLS;
    return launch_blocks(d, q, t.p.batch * t.down * t.across, ROWS * COLS, t);
}

/* Where run `run` of term k of a row lies. */
ARI_KERNEL inline size_t place_of(const packed &p, int run, size_t k)
{
    return (k / p.width * (p.ten ? RUNS_10 : RUNS_16) + static_cast<size_t>(run)) * p.width + k % p.width;
}

/* The digits of a part's rows and terms, a thread a term; what pads them is 0. */
ar_status copy_digits(ar_device *d, ar_queue *q, const packed &to, const packed &from, const ar_part &part)
{
    const size_t terms = to.blocks * to.width, n = to.batch * to.all_rows * terms;
    const int8_t *in = dev<int8_t>(ar_const(from.runs));
    int8_t *out = dev<int8_t>(to.runs);
    return launch_each(d, q, n, [=] ARI_KERNEL(size_t i) {
        const size_t k = i % terms, row = i / terms % to.all_rows, at = i / terms / to.all_rows;
        const int8_t *source = in + (part.matrix + at) * from.step + (part.row + row) * from.row_bytes;
        int8_t *target = out + at * to.step + row * to.row_bytes;
        digits v = {{0, 0, 0, 0}};
        for (int digit = 0; digit < 4 && row < to.rows && k < to.k; digit++)
            v.d[digit] = source[place_of(from, from.ten || from.left ? digit : 3 - digit, part.col + k)];
        for (int run = 0; run < static_cast<int>(to.ten ? RUNS_10 : RUNS_16); run++)
            target[place_of(to, run, k)] =
                static_cast<int8_t>(to.ten ? run_value<true>(v, to.left, run) : run_value<false>(v, to.left, run));
    });
}

/* A host object of that form. Errors: AR_ERR_MEMORY. */
ar_status give(ar_packed **gives, const packed &form)
{
    void *memory = nullptr;
    AR_TRY(ari_alloc(&memory, 1, sizeof form, "a packed operand"));
    *static_cast<packed *>(memory) = form;
    *gives = static_cast<ar_packed *>(memory);
    return AR_OK;
}

/* The form of an operand of k terms. */
ar_status lay_out(packed *p, size_t *bytes, ari_imma_path path)
{
    p->ten = path == ARI_IMMA_AUTO ? p->k >= TERMS_FOR_TEN : path == ARI_IMMA_10;
    p->blocks = ceil_div(p->k, TERMS);
    p->width = p->blocks ? ceil_div(ceil_div(p->k, p->blocks), 16) * 16 : 0;
    AR_TRY(ari_add_size(&p->all_rows, p->rows, (4 - p->rows % 4) % 4));
    AR_TRY(ari_mul_size(&p->row_bytes, p->blocks, p->block_bytes()));
    AR_TRY(ari_mul_size(&p->step, p->all_rows, p->row_bytes));
    return ari_mul_size(bytes, p->batch, p->step);
}

} // namespace

ar_status packed_create(ar_device *d, ar_queue *q, ar_packed **gives, size_t batch, size_t rows, size_t k, bool split)
{
    packed form = {};
    size_t bytes = 0;
    form.batch = batch;
    form.rows = rows;
    form.k = k;
    form.left = split;
    AR_TRY(lay_out(&form, &bytes, imma_of(d).path));
    AR_TRY(alloc(d, q, &form.runs, bytes ? bytes : 16));
    const ar_status st = give(gives, form);
    if (st != AR_OK)
        ARI_GPU::free(d, q, form.runs);
    return st;
}

/* Rows with all their terms are where they are; with the last rows' padding they must lie inside the whole. Of some
 * terms, or where the form changes with their number, the digits are copied. */
ar_status packed_part(ar_device *d, ar_queue *q, ar_packed **gives, const ar_packed *of, const ar_part *part)
{
    const packed &whole = *packed_of(of);
    AR_TRY(ar_part_check(part, whole.batch, whole.rows, whole.k, "packed_part"));
    const size_t all_rows = ceil_div(part->rows, 4) * 4;
    if (part->cols == whole.k && all_rows <= whole.all_rows - part->row) {
        packed form = whole;
        form.batch = part->matrices;
        form.rows = part->rows;
        form.all_rows = all_rows;
        form.runs = ar_buf_at(whole.runs, part->matrix * whole.step + part->row * whole.row_bytes);
        form.part = true;
        return give(gives, form);
    }
    ar_packed *copy = nullptr;
    AR_TRY(packed_create(d, q, &copy, part->matrices, part->rows, part->cols, whole.left));
    const ar_status st = copy_digits(d, q, *packed_of(copy), whole, *part);
    if (st != AR_OK) {
        packed_destroy(d, q, copy);
        return st;
    }
    *gives = copy;
    return AR_OK;
}

void packed_destroy(ar_device *d, ar_queue *q, ar_packed *p)
{
    if (!p)
        return;
    if (!packed_of(p)->part)
        ARI_GPU::free(d, q, packed_of(p)->runs);
    ::free(p);
}

size_t packed_bytes(const ar_packed *p)
{
    const packed &form = *packed_of(p);
    return form.part ? 0 : form.batch * form.step;
}

/* The part that reaches the last row, or the last term, writes the padding that follows. */
ar_status pack(ar_device *d, ar_queue *q, ar_packed *to, size_t row_at, size_t k_at, const ar_tensor *a, ar_cbuf c,
               int sign, ar_cbuf e)
{
    const packed &p = *packed_of(to);
    const view<const float> x = view_of<const float>(a);
    const size_t rows = x.shape[2], cols = x.shape[3];
    if (x.matrices() != p.batch || row_at > p.rows || rows > p.rows - row_at || k_at > p.k || cols > p.k - k_at)
        return ar_error_set(AR_ERR_SHAPE, "pack: [%zu, %zu, %zu] at row %zu, column %zu is outside [%zu, %zu, %zu]",
                            x.matrices(), rows, cols, row_at, k_at, p.batch, p.rows, p.k);
    const size_t row_end = row_at + rows == p.rows ? p.all_rows : row_at + rows;
    const size_t k_end = k_at + cols == p.k ? p.blocks * p.width : k_at + cols;
    const int32_t *shifts = dev<int32_t>(c), *exponents = dev<int32_t>(e);
    int8_t *runs = dev<int8_t>(p.runs);
    if (p.ten)
        return pack_tiles<true>(d, q, {x, shifts, exponents, sign, runs, p, row_at, row_end, k_at, k_end, 0, 0});
    return pack_tiles<false>(d, q, {x, shifts, exponents, sign, runs, p, row_at, row_end, k_at, k_end, 0, 0});
}

} // namespace ARI_GPU
