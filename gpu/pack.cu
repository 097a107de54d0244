/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised operands (numerics.md, "Contraction", steps 2 and 3) in the form that gpu/packed.h describes. */
#include <stdlib.h>

#include "gpu/packed.h"
#include "ref/core/size.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/digits.h"

namespace ARI_GPU
{
namespace
{

/* Maximum number of terms in a block for which int32 holds the sums of products: 4 products of digits per term, or one
 * of Karatsuba's sums of two: 4*64*64*131071 = 128*128*131071 < 2^31. */
const size_t TERMS = 131056;

/* From this number of terms on, 10 products are faster than 16: they save six products of k terms per element of the
 * result, and cost three more sums of 4 bytes written and read (about 200 int8 multiply-adds per byte of memory
 * traffic) and more operand bytes. */
const size_t TERMS_FOR_TEN = 512;

const size_t ROWS = 32, COLS = 128; /* rows and columns of a tile */
const size_t LD = COLS + 4;         /* row length in shared memory: four columns of eight rows are in different banks */
const size_t GROUP = 16;            /* number of terms that a thread writes at once: 16 bytes of each run */

/* Sums of the bytes of two words, each modulo 256. */
ARI_ON_GPU uint32_t add_bytes(uint32_t a, uint32_t b)
{
    return ((a & 0x7f7f7f7fu) + (b & 0x7f7f7f7fu)) ^ ((a ^ b) & 0x80808080u);
}
ARI_ON_GPU four<uint32_t> add_bytes(const four<uint32_t> &a, const four<uint32_t> &b)
{
    four<uint32_t> sum = a;
    for (int i = 0; i < 4; i++)
        sum.lane[i] = add_bytes(a.lane[i], b.lane[i]);
    return sum;
}

/* Selects one of two words, or of fours, by value: by address they would have to be in memory. */
ARI_ON_GPU uint32_t one_of(bool is_first, uint32_t a, uint32_t b)
{
    return is_first ? a : b;
}
ARI_ON_GPU four<uint32_t> one_of(bool is_first, const four<uint32_t> &a, const four<uint32_t> &b)
{
    return {{is_first ? a.lane[0] : b.lane[0], is_first ? a.lane[1] : b.lane[1], is_first ? a.lane[2] : b.lane[2],
             is_first ? a.lane[3] : b.lane[3]}};
}

/* Returns digit i of four terms in one word. */
ARI_ON_GPU four<uint32_t> digits_of_four(const four<int32_t> &q)
{
    four<uint32_t> w = {{0, 0, 0, 0}};
    for (int term = 3; term >= 0; term--) {
        for (int i = 0; i < 4; i++)
            w.lane[i] = w.lane[i] << 8 | (static_cast<uint32_t>(ari_digit(q.lane[term], i)) & 0xffu);
    }
    return w;
}

/* Calls out(run, words) for every run of an operand, made from the runs of the four digits. */
template <bool TEN, class W, class F> ARI_ON_GPU void each_run(const W (&digit)[4], bool is_left, F out)
{
    for (size_t i = 0; i < 4; i++)
        out(i, one_of(TEN || is_left, digit[i], digit[3 - i]));
    if (!TEN)
        return;
    out(4, add_bytes(digit[0], digit[1]));
    out(5, add_bytes(digit[2], digit[3]));
    const W low = add_bytes(digit[0], digit[2]), high = add_bytes(digit[1], digit[3]);
    out(6, one_of(is_left, low, high));
    out(7, one_of(is_left, high, low));
    out(8, low);
    out(9, high);
}

/* Tile of one matrix: ROWS rows of COLS terms, read along the contiguous dimension and written along the terms. Rows
 * and columns are those of the packed operand; elements outside the source but inside [row_at, row_end) and [k_at,
 * k_end) are padding. */
template <bool TEN, class T> struct pack_tile {
    view<const T> x;
    const int32_t *c, *e; /* c: [matrices, cols of x] or NULL; e: [matrices, rows] */
    int32_t sign;
    int8_t *runs;
    packed p;
    size_t row_at, row_end, k_at, k_end;
    uint32_t down, across;

    /* Returns four quantised elements of a source matrix from row `row` and term `k` on, along its terms or rows; 0
     * outside. Before the first term k has wrapped around. */
    ARI_ON_GPU four<int32_t> quantised(const T *matrix, size_t matrix_index, size_t row, size_t k,
                                       bool along_terms) const
    {
        const size_t rows = x.shape[2], cols = x.shape[3], below = along_terms ? 0 : 1, beyond = 1 - below;
        const ptrdiff_t step = along_terms ? x.stride[3] : x.stride[2];
        const T *src = matrix + static_cast<ptrdiff_t>(row) * x.stride[2] + static_cast<ptrdiff_t>(k) * x.stride[3];
        const bool is_full = row < rows && k < cols && (along_terms ? cols - k : rows - row) >= 4;
        four<float> v = {{0.0f, 0.0f, 0.0f, 0.0f}};
        if (is_full && step == 1) {
            const four<T> stored = load_four(src, 4);
            for (size_t i = 0; i < 4; i++)
                v.lane[i] = load(stored.lane[i]);
        } else
            for (size_t i = 0; i < 4; i++)
                if (row + i * below < rows && k + i * beyond < cols)
                    v.lane[i] = load(src[static_cast<ptrdiff_t>(i) * step]);
        four<int32_t> q = {{0, 0, 0, 0}};
        for (size_t i = 0; i < 4; i++) {
            const size_t line = row + i * below, term = k + i * beyond;
            if (line >= rows || term >= cols)
                continue;
            const int32_t shift = c ? ari_contract_shift(c[matrix_index * cols + term], sign) : 0;
            const int32_t exponent = e[matrix_index * p.rows + row_at + line];
            q.lane[i] = shift == ARI_EXP_ZERO ? 0
                        : p.narrow            ? ari_contract_quantise_narrow(v.lane[i], shift, exponent)
                                              : ari_contract_quantise(v.lane[i], shift, exponent);
        }
        return q;
    }

    /* Stores those of a word's four bytes whose index is in [begin, end). */
    ARI_ON_GPU static void store_bytes(int8_t *dst, uint32_t word, int begin, int end)
    {
        for (int i = 0; i < 4; i++)
            if (i >= begin && i < end)
                dst[i] = static_cast<int8_t>(word >> i * 8 & 0xffu);
    }

    /* GROUP terms of every run of a row, from column `col` on, which is a multiple of GROUP. */
    ARI_ON_GPU void store(int8_t *row, size_t col, const four<int32_t> *q) const
    {
        const size_t block_index = p.blocks == 1 ? 0 : col / p.width, width = p.width;
        const int begin = col < k_at ? static_cast<int>(k_at - col) : 0;
        const int end = k_end - col < GROUP ? static_cast<int>(k_end - col) : static_cast<int>(GROUP);
        int8_t *dst = row + block_index * width * (TEN ? RUNS_10 : RUNS_16) + (col - block_index * width);
        four<uint32_t> digit[4] = {};
        for (size_t i = 0; i < GROUP / 4; i++) {
            const four<uint32_t> words = digits_of_four(q[i]);
            for (size_t d = 0; d < 4; d++)
                digit[d].lane[i] = words.lane[d];
        }
        each_run<TEN>(digit, p.is_left, [=](size_t run, const four<uint32_t> &words) {
            int8_t *run_to = dst + run * width;
            if (begin == 0 && end == static_cast<int>(GROUP))
                store_whole(reinterpret_cast<uint32_t *>(run_to), words);
            else
                for (int i = 0; i < 4; i++)
                    store_bytes(run_to + 4 * i, words.lane[i], begin - 4 * i, end - 4 * i);
        });
    }

    ARI_ON_GPU void operator()(const block &b) const
    {
        ARI_SHARED(four<int32_t>, tile, [ROWS * LD / 4]);
        const uint32_t number = static_cast<uint32_t>(b.index), tiles = down * across;
        const uint32_t matrix_index = number / tiles, in_matrix = number % tiles;
        const size_t first_row = in_matrix / across * ROWS; /* first row in the source */
        const size_t first_col = (k_at / COLS + in_matrix % across) * COLS;
        const T *matrix = x.matrix(matrix_index);
        int32_t *values = reinterpret_cast<int32_t *>(tile);
        const bool lines = x.stride[3] == 1;
        b.each(ROWS * COLS / 4, [&](size_t i) {
            const size_t row = lines ? i / (COLS / 4) : i % (ROWS / 4) * 4;
            const size_t col = lines ? i % (COLS / 4) * 4 : i / (ROWS / 4);
            const four<int32_t> q = quantised(matrix, matrix_index, first_row + row, first_col + col - k_at, lines);
            if (lines)
                tile[(row * LD + col) / 4] = q;
            else
                for (size_t j = 0; j < 4; j++)
                    values[(row + j) * LD + col] = q.lane[j];
        });
        b.each(ROWS * COLS / GROUP,
               [&](size_t i) { /* eight rows, then the next group, to use different banks */
                               const size_t line = i % 8 + i / 16 % 4 * 8, group = i / 8 % 2 + i / 64 * 2;
                               const size_t row = row_at + first_row + line, col = first_col + group * GROUP;
                               if (row < row_end && col < k_end && col + GROUP > k_at)
                                   store(runs + matrix_index * p.step + row * p.row_bytes, col,
                                         tile + (line * LD + group * GROUP) / 4);
               });
    }
};

template <bool TEN, class T> ar_status pack_tiles(ar_device *d, ar_queue *q, pack_tile<TEN, T> t)
{
    if (t.row_at >= t.row_end || t.k_at >= t.k_end)
        return AR_OK;
    const size_t down = ceil_div(t.row_end - t.row_at, ROWS), across = ceil_div(t.k_end, COLS) - t.k_at / COLS;
    size_t tiles = 0;
    AR_TRY(ari_mul_size(&tiles, down, across));
    AR_TRY(ari_mul_size(&tiles, tiles, t.p.batch));
    if (tiles > UINT32_MAX)
        return ar_error_set(AR_ERR_UNSUPPORTED, "pack: %zu tiles of %zu x %zu, at most 2^32 - 1", tiles, ROWS, COLS);
    t.down = static_cast<uint32_t>(down);
    t.across = static_cast<uint32_t>(across);
    return launch_blocks(d, q, tiles, ROWS * COLS, t);
}

/* The offset of run `run` of term k of a row. */
ARI_ON_GPU inline size_t place_of(const packed &p, size_t run, size_t k)
{
    const size_t block = p.blocks == 1 ? 0 : k / p.width;
    return (block * (p.ten ? RUNS_10 : RUNS_16) + run) * p.width + (k - block * p.width);
}

/* The digits of four terms of a row, from `k` on; 0 past the last. */
ARI_ON_GPU four<uint32_t> stored_digits(const packed &p, const int8_t *row, size_t k, size_t end)
{
    four<uint32_t> w = {{0, 0, 0, 0}};
    for (size_t i = 0; i < 4; i++) {
        const size_t run = p.ten || p.is_left ? i : 3 - i;
        for (size_t term = 0; term < 4; term++)
            if (k + term < end)
                w.lane[i] |= static_cast<uint32_t>(static_cast<uint8_t>(row[place_of(p, run, k + term)])) << term * 8;
    }
    return w;
}

/* Copies the digits of a part's rows and terms; each block copies some terms of a row; padding becomes 0. */
ar_status copy_digits(ar_device *d, ar_queue *q, const packed &dst, const packed &src, const ar_part &part)
{
    const size_t words = dst.blocks * dst.width / 4, chunks = ceil_div(words, COLS);
    const int8_t *src_digits = dev<int8_t>(ar_const(src.runs));
    int8_t *dst_digits = dev<int8_t>(dst.runs);
    return launch_blocks(d, q, dst.batch * dst.all_rows * chunks, COLS, [=] ARI_ON_GPU(const block &b) {
        const size_t line = b.index / chunks, first_word = b.index % chunks * COLS;
        const size_t matrix_index = line / dst.all_rows, row = line % dst.all_rows;
        const int8_t *source = src_digits + (part.matrix + matrix_index) * src.step + (part.row + row) * src.row_bytes;
        int8_t *target = dst_digits + matrix_index * dst.step + row * dst.row_bytes;
        b.each(words - first_word < COLS ? words - first_word : COLS, [&](size_t i) {
            const size_t k = (first_word + i) * 4;
            const size_t end = row < dst.rows ? part.col + dst.k : 0;
            const four<uint32_t> digit = stored_digits(src, source, part.col + k, end);
            auto write = [&](size_t run, uint32_t word) {
                *reinterpret_cast<uint32_t *>(target + place_of(dst, run, k)) = word;
            };
            if (dst.ten)
                each_run<true>(digit.lane, dst.is_left, write);
            else
                each_run<false>(digit.lane, dst.is_left, write);
        });
    });
}

/* Creates a host object of that form. Errors: AR_ERR_MEMORY. */
ar_status create_handle(ar_packed **out, const packed &form)
{
    void *memory = nullptr;
    AR_TRY(ari_alloc(&memory, 1, sizeof form, "a packed operand"));
    *static_cast<packed *>(memory) = form;
    *out = static_cast<ar_packed *>(memory);
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

/* Returns true if a part is stored as in the whole: rows with all their terms, and with the last rows' padding. */
bool lies_within(const ar_part &part, size_t rows, size_t k)
{
    return part.cols == k && ceil_div(part.rows, 4) * 4 <= ceil_div(rows, 4) * 4 - part.row;
}

} // namespace

ar_status packed_create(ar_device *d, ar_queue *q, ar_packed **out, size_t batch, size_t rows, size_t k,
                        unsigned form_of)
{
    packed form = {};
    size_t bytes = 0;
    form.batch = batch;
    form.rows = rows;
    form.k = k;
    form.is_left = form_of & AR_PACKED_LEFT;
    form.narrow = form_of & AR_PACKED_NARROW;
    AR_TRY(lay_out(&form, &bytes, imma_of(d).path));
    AR_TRY(alloc(d, q, &form.runs, bytes ? bytes : 16));
    const ar_status st = create_handle(out, form);
    if (st != AR_OK)
        ARI_GPU::free(d, q, form.runs);
    return st;
}

/* The digits are copied for a part of the terms, or if the form depends on their number. */
ar_status packed_part(ar_device *d, ar_queue *q, ar_packed **out, const ar_packed *full, const ar_part *part)
{
    const packed &full_form = *packed_of(full);
    AR_TRY(ari_part_check(part, full_form.batch, full_form.rows, full_form.k, "packed_part"));
    if (lies_within(*part, full_form.rows, full_form.k)) {
        packed form = full_form;
        form.batch = part->matrices;
        form.rows = part->rows;
        form.all_rows = ceil_div(part->rows, 4) * 4;
        form.runs = ar_buf_at(full_form.runs, part->matrix * full_form.step + part->row * full_form.row_bytes);
        form.part = true;
        return create_handle(out, form);
    }
    ar_packed *copy = nullptr;
    AR_TRY(packed_create(d, q, &copy, part->matrices, part->rows, part->cols, full_form.form()));
    const ar_status st = copy_digits(d, q, *packed_of(copy), full_form, *part);
    if (st != AR_OK) {
        packed_destroy(d, q, copy);
        return st;
    }
    *out = copy;
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

ar_status packed_room(const ar_device *d, size_t *bytes, size_t batch, size_t rows, size_t k, unsigned,
                      const ar_part *part)
{
    packed form = {};
    form.batch = part ? part->matrices : batch;
    form.rows = part ? part->rows : rows;
    form.k = part ? part->cols : k;
    *bytes = 0;
    return part && lies_within(*part, rows, k) ? AR_OK : lay_out(&form, bytes, imma_of(d).path);
}

size_t packed_bytes(const ar_packed *p)
{
    const packed &form = *packed_of(p);
    return form.part ? 0 : form.batch * form.step;
}

/* The part that contains the last row, or the last term, also writes the following padding. */
ARI_FOR_DTYPES(pack, a, (operand, row_at, k_at, a, c, sign, e), ar_packed *operand, size_t row_at, size_t k_at,
               const ar_tensor *a, ar_cbuf c, int sign, ar_cbuf e)
{
    const packed &p = *packed_of(operand);
    const view<const T> x = view_of<const T>(a);
    const size_t rows = x.shape[2], cols = x.shape[3];
    if (x.matrices() != p.batch || row_at > p.rows || rows > p.rows - row_at || k_at > p.k || cols > p.k - k_at)
        return ar_error_set(AR_ERR_SHAPE, "pack: [%zu, %zu, %zu] at row %zu, column %zu is outside [%zu, %zu, %zu]",
                            x.matrices(), rows, cols, row_at, k_at, p.batch, p.rows, p.k);
    const size_t row_end = row_at + rows == p.rows ? p.all_rows : row_at + rows;
    const size_t k_end = k_at + cols == p.k ? p.blocks * p.width : k_at + cols;
    const int32_t *shifts = dev<int32_t>(c), *exponents = dev<int32_t>(e);
    int8_t *runs = dev<int8_t>(p.runs);
    if (p.ten)
        return pack_tiles<true, T>(d, q, {x, shifts, exponents, sign, runs, p, row_at, row_end, k_at, k_end, 0, 0});
    return pack_tiles<false, T>(d, q, {x, shifts, exponents, sign, runs, p, row_at, row_end, k_at, k_end, 0, 0});
}

} // namespace ARI_GPU
