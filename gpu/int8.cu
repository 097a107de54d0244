/* SPDX-License-Identifier: Apache-2.0 */
/* Int8 products that the library does not support. cuBLAS has refused some shapes (CUBLAS_STATUS_NOT_SUPPORTED for few
 * rows, on some GPUs and versions), and does not document them. */
#include "gpu/blas.h"
#include "gpu/kernels.h"
#include "gpu/report/refused.h"

namespace ARI_GPU
{
namespace
{

const size_t SIDE = 32;         /* rows and columns of a tile, and words of four terms processed at once */
const size_t PADDED = SIDE + 1; /* row length in shared memory, so that columns are in different banks */

struct words {
    const uint32_t *data;
    size_t rows, ld, step; /* sizes in words */

    ARI_ON_GPU uint32_t word(size_t matrix, size_t row, size_t k, size_t k_end) const
    {
        return row < rows && k < k_end ? data[matrix * step + row * ld + k] : 0;
    }
};

words words_of(const blas_matrix &m, size_t rows)
{
    return {dev<uint32_t>(ar_const(m.data)), rows, m.ld / 4, m.step / 4};
}

/* A block computes a tile of one matrix of c. */
struct multiply_tile {
    words a, b;
    int32_t *c;
    size_t c_ld, c_step, k; /* k: in words */

    ARI_ON_GPU void operator()(const block &thread_block) const
    {
        struct tiles {
            uint32_t left[SIDE * PADDED], right[SIDE * PADDED];
            int32_t sums[SIDE * SIDE];
        };
        ARI_SHARED(tiles, shared, [1]);
        const size_t across = (b.rows + SIDE - 1) / SIDE, down = (a.rows + SIDE - 1) / SIDE;
        const size_t matrix = thread_block.index / (across * down);
        const size_t row = thread_block.index / across % down * SIDE, col = thread_block.index % across * SIDE;
        const size_t rows = a.rows - row < SIDE ? a.rows - row : SIDE, cols = b.rows - col < SIDE ? b.rows - col : SIDE;
        const words x = a, y = b;
        const size_t k_end = k;
        thread_block.each(rows * SIDE, [&](size_t i) { shared->sums[i] = 0; });
        for (size_t k_begin = 0; k_begin < k_end; k_begin += SIDE) {
            thread_block.each((rows > cols ? rows : cols) * SIDE, [&](size_t i) {
                const size_t line = i / SIDE, word = i % SIDE;
                shared->left[line * PADDED + word] = x.word(matrix, row + line, k_begin + word, k_end);
                shared->right[line * PADDED + word] = y.word(matrix, col + line, k_begin + word, k_end);
            });
            thread_block.each(rows * SIDE, [&](size_t i) {
                int32_t sum = shared->sums[i];
                for (size_t word = 0; word < SIDE && i % SIDE < cols; word++)
                    sum =
                        dot_bytes(sum, shared->left[i / SIDE * PADDED + word], shared->right[i % SIDE * PADDED + word]);
                shared->sums[i] = sum;
            });
        }
        int32_t *dst = c + matrix * c_step + row * c_ld + col;
        const size_t ld = c_ld;
        thread_block.each(rows * SIDE, [&](size_t i) {
            if (i % SIDE < cols)
                dst[i / SIDE * ld + i % SIDE] = shared->sums[i];
        });
    }
};

} // namespace

ar_status int8_product(ar_device *d, ar_queue *q, const blas_shape &s, const blas_matrix &c, const blas_matrix &a,
                       const blas_matrix &b)
{
    const size_t min_side = imma_of(d).min_rows;
    if (s.m >= min_side && s.n >= min_side) {
        const ar_status st = blas_int8(d, q, s, c, a, b);
        if (st != AR_ERR_UNSUPPORTED)
            return st;
        ari_gpu_note_refused(s.m, s.n, s.k, s.batch);
    }
    const multiply_tile tile = {words_of(a, s.m), words_of(b, s.n), dev<int32_t>(c.data), c.ld, c.step, s.k / 4};
    return launch_blocks(d, q, s.batch * ceil_div(s.m, SIDE) * ceil_div(s.n, SIDE), SIDE * SIDE, tile);
}

} // namespace ARI_GPU
