/* SPDX-License-Identifier: Apache-2.0 */
/* Slots of the exact contraction: int8 products into int32 planes (gpu/packed.h), tile by tile, and one pass over a
 * tile's planes that combines the sums and applies the slot's operation. */
#include "gpu/blas.h"
#include "gpu/epilogue.h"
#include "gpu/packed.h"
#include "ref/core/size.h"

namespace ARI_GPU
{
namespace
{

const size_t CHUNK = 1024; /* columns that a block of threads combines */

/* Refuses operands whose shapes do not match. */
ar_status check_pair(const packed &a, const packed &b, const char *label)
{
    if (a.batch != b.batch || a.k != b.k)
        return ar_error_set(AR_ERR_SHAPE, "%s: left operand [%zu, %zu, k %zu], right operand [%zu, %zu, k %zu]", label,
                            a.batch, a.rows, a.k, b.batch, b.rows, b.k);
    if (!a.is_left || b.is_left || a.ten != b.ten)
        return ar_error_set(AR_ERR_ARG, "%s: the operands were not packed as a left and a right one", label);
    return AR_OK;
}

size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Part of a result that is combined at once: full matrices, or rows and columns of some. */
struct tile {
    size_t matrix, matrices, row, rows, col, cols; /* cols: columns of the products, including padding */

    /* Returns the int32 words of a plane, whose rows are contiguous. */
    size_t words() const
    {
        return matrices * rows * cols;
    }
};

/* Returns the product's size in the form that gpu/tiles/plan.h needs. */
ari_tile_work work_of(const packed &a, const packed &b, bool one_result)
{
    ari_tile_work w = {a.batch, a.rows, b.all_rows, a.width, a.blocks, 0, 0, a.ten, one_result};
    w.planes = a.ten ? PLANES_10 : PLANES_16;
    for (size_t i = 0; i < w.planes; i++)
        w.runs += (a.ten ? PRODUCTS_10 : PRODUCTS_16)[i].count;
    return w;
}

/* Computes the bytes of the planes for a tile of this size. */
ar_status bytes_of_planes(size_t *bytes, const ari_tile_work &w, const ari_tiling &t)
{
    AR_TRY(ari_mul_size(bytes, w.planes * w.blocks * sizeof(int32_t), t.matrices));
    AR_TRY(ari_mul_size(bytes, *bytes, t.rows));
    return ari_mul_size(bytes, *bytes, t.cols);
}

/* One run of products: `shape.batch` products at constant distances in all three operands. */
struct distance {
    size_t left_bytes, right_bytes, plane; /* bytes, bytes, int32 */
};

/* The planes of a tile, one after the other. */
struct products {
    const packed &a, &b;
    const tile &t;
    const ari_tile_part &part;
    ar_buf planes;

    /* Product i of a block, of one matrix of the tile or of all. */
    ar_status call(ar_device *d, ar_queue *q, size_t block, size_t i, size_t matrix, size_t batch,
                   const distance &step) const
    {
        const run_product &p = (a.ten ? PRODUCTS_10 : PRODUCTS_16)[i];
        const size_t plane = block * (a.ten ? PLANES_10 : PLANES_16) + i;
        const size_t left_offset =
            (t.matrix + matrix) * a.step + t.row * a.row_bytes + block * a.block_bytes() + part.term;
        const size_t right_offset =
            (t.matrix + matrix) * b.step + t.col * b.row_bytes + block * b.block_bytes() + part.term;
        const size_t plane_offset = plane * t.words() + matrix * t.rows * t.cols;
        const blas_shape shape = {t.rows, t.cols, p.count * part.terms, batch};
        const blas_matrix c = {ar_buf_at(planes, plane_offset * sizeof(int32_t)), t.cols, step.plane, false};
        const blas_matrix l = {ar_buf_at(a.runs, left_offset + p.a * a.width), a.row_bytes, step.left_bytes, false};
        const blas_matrix r = {ar_buf_at(b.runs, right_offset + p.b * b.width), b.row_bytes, step.right_bytes, false};
        return int8_product(d, q, shape, c, l, r);
    }

    /* together: one call for all products of a matrix; otherwise one product of all matrices. */
    ar_status run(ar_device *d, ar_queue *q, bool together) const
    {
        const timed_part timed(d, q, "int8 products");
        const size_t n = a.ten ? PLANES_10 : PLANES_16;
        for (size_t block = 0; block < a.blocks; block++)
            for (size_t i = 0; i < (together ? t.matrices : n); i++)
                AR_TRY(together ? call(d, q, block, 0, i, n, {a.width, b.width, t.words()})
                                : call(d, q, block, i, 0, t.matrices, {a.step, b.step, t.rows * t.cols}));
        return AR_OK;
    }
};

/* A tile and its result, as needed by a pass over the tile's planes. */
struct extents : result {
    tile t;
    size_t cols; /* columns of the tile that belong to the result */
};

/* A block of threads processes a chunk of one line of a tile; each thread processes four columns at a time. */
struct chunk {
    uint32_t line;
    size_t first_col, fours; /* the first column, and the number of groups of four; the last group may extend past
                                the line */
};

/* Calls kernel(b, chunk) for every chunk of columns of the lines. */
template <class F> struct chunks_of {
    F kernel;
    size_t cols;
    uint32_t count; /* chunks in a line; planes have fewer than 2^32 lines */

    ARI_ON_GPU void operator()(const block &b) const
    {
        const uint32_t number = static_cast<uint32_t>(b.index), line = number / count;
        const size_t first_col = static_cast<size_t>(number - line * count) * CHUNK;
        const size_t chunk_cols = cols - first_col < CHUNK ? cols - first_col : CHUNK;
        kernel(b, chunk{line, first_col, (chunk_cols + 3) / 4});
    }
};
template <class F> ar_status launch_chunks(ar_device *d, ar_queue *q, size_t lines, size_t cols, const F &kernel)
{
    const size_t count = ceil_div(cols, CHUNK);
    return launch_blocks(d, q, lines * count, smaller(cols, CHUNK) / 4,
                         chunks_of<F>{kernel, cols, static_cast<uint32_t>(count)});
}

/* Combines the sums of a tile's planes element by element, as the slots define it, and passes each to OUT with its
 * matrix, row and column. */
template <class OUT> struct give_to {
    static const bool ONE_RESULT = false;
    OUT out;

    template <bool TEN> ar_status run(ar_device *d, ar_queue *q, const tile_sums<TEN> &sums, const extents &x) const
    {
        const OUT epilogue = out;
        const uint32_t rows = static_cast<uint32_t>(x.t.rows);
        return launch_chunks(d, q, x.t.matrices * x.t.rows, x.cols, [=] ARI_ON_GPU(const block &b, const chunk &c) {
            const uint32_t matrix = c.line / rows;
            const auto line = epilogue.line(x, x.t.matrix + matrix, x.t.row + (c.line - matrix * rows));
            b.each(c.fours, [&](size_t i) {
                const size_t col = c.first_col + 4 * i, remaining = x.cols - col;
                wide_sum sum[4];
                sums.load_sums(c.line, col, sum);
                epilogue.put_four(line, x.t.col + col, sum, remaining);
            });
        });
    }
};

/* Adds rounded values to an accumulator. An element receives values from all matrices of the tile, and a tile contains
 * all matrices unless their planes would be too large, so that the element's state is read and written once. */
struct accumulate {
    static const bool ONE_RESULT = true;
    accumulator_out out;

    template <bool TEN> ar_status run(ar_device *d, ar_queue *q, const tile_sums<TEN> &sums, const extents &x) const
    {
        const accumulator_out accumulator = out;
        return launch_chunks(d, q, x.t.rows, x.cols, [=] ARI_ON_GPU(const block &b, const chunk &c) {
            const size_t row = x.t.row + c.line;
            b.each(c.fours, [&](size_t i) {
                const size_t col = c.first_col + 4 * i, n = x.cols - col;
                accumulator_out::states state = accumulator.load_four_states(x, row, x.t.col + col, n);
                for (size_t g = 0; g < x.t.matrices; g++) {
                    wide_sum sum[4];
                    sums.load_sums(g * x.t.rows + c.line, col, sum);
                    accumulator.add_four(&state, x, x.t.matrix + g, row, x.t.col + col, sum, n);
                }
                accumulator.store_four_states(x, row, x.t.col + col, state, n);
            });
        });
    }
};

/* Runs one tile: the products, then the pass. */
template <class PASS> ar_status run_tile(ar_device *d, ar_queue *q, const products &p, bool together, const PASS &pass)
{
    const packed &a = p.a, &b = p.b;
    const tile &t = p.t;
    const extents x = {{a.rows, b.rows}, t, smaller(t.cols, b.rows - t.col)};
    AR_TRY(p.run(d, q, together));
    const int32_t *words = dev<int32_t>(p.planes);
    if (a.ten)
        return pass.run(d, q, tile_sums<true>{words, t.words(), t.cols, a.blocks}, x);
    return pass.run(d, q, tile_sums<false>{words, t.words(), t.cols, a.blocks}, x);
}

/* Processes one part of the rows, tile by tile. */
template <class PASS>
ar_status run_part(ar_device *d, ar_queue *q, const packed &a, const packed &b, const ari_tile_part &p,
                   const ari_tile_machine &machine, const PASS &pass)
{
    ari_tile_work w = work_of(a, b, PASS::ONE_RESULT);
    scratch planes(d, q);
    size_t bytes = 0;
    w.m = p.rows;
    w.n = p.cols;
    w.terms = p.terms;
    const ari_tiling plan = ari_plan_tiles(&w, &machine);
    AR_TRY(bytes_of_planes(&bytes, w, plan));
    AR_TRY(planes.allocate(bytes ? bytes : 16));
    for (size_t row = 0; row < w.m; row += plan.rows)
        for (size_t col = 0; col < w.n; col += plan.cols)
            for (size_t matrix = 0; matrix < w.batch; matrix += plan.matrices) {
                const tile t = {matrix,      smaller(plan.matrices, w.batch - matrix),
                                p.row + row, smaller(plan.rows, w.m - row),
                                p.col + col, smaller(plan.cols, w.n - col)};
                AR_TRY(run_tile(d, q, {a, b, t, p, planes.buf()}, plan.together, pass));
            }
    return AR_OK;
}

template <class PASS>
ar_status for_each_tile(ar_device *d, ar_queue *q, const packed &a, const packed &b, const PASS &pass,
                        const ar_band *band = nullptr)
{
    const ari_tile_work w = work_of(a, b, PASS::ONE_RESULT);
    const ari_tile_machine machine = blas_machine(d);
    if (a.batch == 0 || a.rows == 0 || b.rows == 0)
        return AR_OK;
    for (ari_tile_part p = {}; ari_band_next(&p, &w, &machine, band);)
        AR_TRY(run_part(d, q, a, b, p, machine, pass));
    return AR_OK;
}

} // namespace

ar_status gemm_i64(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *left, const ar_packed *right, int limbs,
                   bool add)
{
    const packed &a = *packed_of(left), &b = *packed_of(right);
    AR_TRY(check_pair(a, b, "gemm_i64"));
    if (limbs != 1 && limbs != 2)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: %d limbs, expected 1 or 2", limbs);
    if (limbs == 1 && a.k > ARI_CONTRACT_BLOCK && !a.narrow)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: k %zu needs two limbs, one holds up to %d terms", a.k,
                            ARI_CONTRACT_BLOCK);
    return for_each_tile(d, q, a, b, give_to<integers_out>{{dev<int64_t>(s), static_cast<size_t>(limbs), add}});
}

ar_status gemm_round(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *left, const ar_packed *right,
                     ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z, const ar_band *band)
{
    const packed &a = *packed_of(left), &b = *packed_of(right);
    AR_TRY(check_pair(a, b, "gemm_round"));
    const view<float> dst = view_of<float>(y);
    if (dst.matrices() != a.batch || dst.shape[2] != a.rows || dst.shape[3] != b.rows)
        return ar_error_set(AR_ERR_SHAPE, "gemm_round: result [%zu, %zu, %zu], expected [%zu, %zu, %zu]",
                            dst.matrices(), dst.shape[2], dst.shape[3], a.batch, a.rows, b.rows);
    const int32_t *rows = dev<int32_t>(e), *cols = dev<int32_t>(f);
    if (!bias.ptr && act == AR_ACT_NONE)
        return for_each_tile(d, q, a, b, give_to<values_out<false>>{{dst, dst, rows, cols, nullptr, act}}, band);
    const view<float> active = act == AR_ACT_NONE ? dst : view_of<float>(z);
    return for_each_tile(d, q, a, b, give_to<values_out<true>>{{dst, active, rows, cols, dev<float>(bias), act}}, band);
}

ar_status gemm_acc(ar_device *d, ar_queue *q, ar_buf t, ar_buf hl, size_t low, bool narrow, const ar_packed *left,
                   const ar_packed *right, ar_cbuf e, ar_cbuf f, const ar_runs *runs, bool fresh)
{
    const packed &a = *packed_of(left), &b = *packed_of(right);
    const size_t n = a.rows * b.rows;
    AR_TRY(check_pair(a, b, "gemm_acc"));
    if (fresh) {
        AR_TRY(zero(d, q, t, n));
        AR_TRY(zero(d, q, hl, n * sizeof(int64_t)));
        AR_TRY(zero(d, q, ar_buf_at(hl, low * sizeof(int64_t)), n * sizeof(int64_t)));
    }
    for (size_t i = 0; runs && i < runs->n; i++) {
        const size_t first_term = runs->first + runs->cut[i], terms = runs->cut[i + 1] - runs->cut[i];
        const ar_part of_a = {0, 1, 0, a.rows, first_term, terms}, of_b = {0, 1, 0, b.rows, first_term, terms};
        ar_packed *l = nullptr, *r = nullptr;
        ar_status st = terms > 0 ? packed_part(d, q, &l, left, &of_a) : AR_OK;
        if (l)
            st = packed_part(d, q, &r, right, &of_b);
        if (r)
            st = gemm_acc(d, q, t, hl, low, narrow, l, r, ar_cbuf_at(e, i * a.rows * sizeof(int32_t)),
                          ar_cbuf_at(f, i * b.rows * sizeof(int32_t)), nullptr, false);
        packed_destroy(d, q, r);
        packed_destroy(d, q, l);
        AR_TRY(st);
    }
    int64_t *h = dev<int64_t>(hl);
    const accumulator_out accumulator = {dev<uint8_t>(t), h, h + low, dev<int32_t>(e), dev<int32_t>(f), narrow};
    return runs ? AR_OK : for_each_tile(d, q, a, b, accumulate{accumulator});
}

/* A block rounds a chunk of a matrix row with n columns; elements [start, start + count) of the matrix are given. */
ar_status round_i64(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count, size_t n,
                    ar_cbuf e, ar_cbuf f)
{
    if (count == 0 || n == 0)
        return AR_OK;
    const size_t rows = (start + count - 1) / n - start / n + 1, chunks = ceil_div(n, CHUNK);
    float *dst = dev<float>(y);
    const int64_t *sums = dev<int64_t>(s);
    const int32_t *of_row = dev<int32_t>(e), *of_col = dev<int32_t>(f);
    return launch_blocks(d, q, rows * chunks, n < CHUNK ? n : CHUNK, [=] ARI_ON_GPU(const block &b) {
        const size_t row = start / n + b.index / chunks, first_col = b.index % chunks * CHUNK;
        b.each(n - first_col < CHUNK ? n - first_col : CHUNK, [&](size_t i) {
            const size_t index = row * n + first_col + i;
            if (index < start || index - start >= count)
                return;
            const int64_t *sum = sums + (index - start) * static_cast<size_t>(limbs);
            dst[index - start] = limbs == 1 ? ari_contract_value(sum[0], of_row[row], of_col[first_col + i])
                                            : ari_contract_value2(sum[0], sum[1], of_row[row], of_col[first_col + i]);
        });
    });
}

} // namespace ARI_GPU
