/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/cpu/blas/blas.h"
#include "ref/cpu/gemm.h"
#include "ref/cpu/kernels.h"

/* Computes the integer sums of a contraction (numerics.md, "Contraction", step 4) on binary64 hardware. A quantised
 * element of the left operand is split into qA = hi*2^13 + lo with |hi| <= 2^12 and -2^12 <= lo < 2^12, and one dgemm
 * multiplies the rows of hi and, below them, of lo with qB. Since |qB| < 2^25, K terms of either half sum to less than
 * K*2^37 in magnitude. For K <= 2^16 every partial sum, in any order and with or without fused multiply-adds, is an
 * integer of magnitude at most 2^53 and therefore exact. int64 holds hi*2^13 + lo for K <= 8191, since K*(2^25 - 1)^2 <
 * 2^63.
 *
 * Narrow integers, |q| <= 32639, need no split: their K terms sum to less than K*2^30, and hi is zero.
 *
 * Operands are widened to binary64 one slice of K at a time, and dgemm accumulates the products of all slices. */
#define HALVES_TERMS ((size_t)65536)

/* Tile sizes, measured with transformer shapes on a Zen 4: 1 to 2 % faster than 256 rows and as fast as larger tiles,
 * with 8 MiB of workspace per thread. */
#define TILE_ROWS ((size_t)384)
#define TILE_COLS ((size_t)512)
#define SLICE ((size_t)512)
#define PAD ((size_t)8) /* in doubles; keeps rows of power-of-two length from sharing cache sets */

typedef struct workspace {
    double *products; /* [2*rows, product_ld] the hi rows of the tile, then the lo rows */
    double *left;     /* [2*rows, slice_ld] */
    double *right;    /* [cols, slice_ld] */
    size_t product_ld, slice_ld;
    size_t words;
} workspace;

static workspace workspace_at(const ari_tile_plan *p, void *words)
{
    workspace w = {
        .products = words, .product_ld = ari_round_up8(p->tile_cols) + PAD, .slice_ld = ari_round_up8(p->slice) + PAD};
    const size_t products = 2 * p->tile_rows * w.product_ld, left_words = 2 * p->tile_rows * w.slice_ld;
    w.words = ari_round_up8(products + left_words + p->tile_cols * w.slice_ld);
    if (words) {
        w.left = w.products + products;
        w.right = w.left + left_words;
    }
    return w;
}

static void plan_tile(ari_tile_plan *p, size_t k)
{
    p->slice = k < SLICE ? k : SLICE;
    p->path = workspace_at(p, NULL).words;
    p->direct = false;
}

/* Splits q into the remainder by 2^13 nearest to zero, and the rest: hi = floor((q + 2^12)/2^13), |hi| <= 2^12. */
ARI_SIMD static void widen_split(double *restrict hi, double *restrict lo, const int32_t *restrict q, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        const int32_t shifted = q[k] + 4096;
        const int32_t low = (shifted & 8191) - 4096;
        const int32_t high = (q[k] - low) / 8192; /* the division leaves no remainder */
        hi[k] = (double)high;
        lo[k] = (double)low;
    }
}

ARI_SIMD static void widen(double *restrict x, const void *restrict q, bool narrow, size_t n)
{
    for (size_t k = 0; k < n; k++)
        x[k] = (double)(narrow ? ((const int16_t *)q)[k] : ((const int32_t *)q)[k]);
}

/* w.products = the two halves of the tile's sums over k in [begin, end). */
static void sum_tile(const ari_tile *t, size_t begin, size_t end)
{
    const workspace w = workspace_at(t->plan, t->words);
    const size_t slice = t->plan->slice;
    const ptrdiff_t ld = (ptrdiff_t)w.slice_ld;
    const size_t upper = t->plan->narrow ? t->rows : 0; /* rows that are left out */
    const ari_blas_view cv = {2 * t->rows - upper, t->cols, (ptrdiff_t)w.product_ld, 1};
    if (begin == end || upper > 0)
        memset(w.products, 0, 2 * t->rows * w.product_ld * sizeof(double));
    for (size_t k = begin; k < end; k += slice) {
        const size_t n = end - k < slice ? end - k : slice;
        for (size_t i = 0; i < t->rows; i++) {
            const void *q = ari_packed_at(t->a, t->matrix, t->row + i, k);
            double *lo = w.left + (t->rows + i) * w.slice_ld;
            if (upper > 0)
                widen(lo, q, true, n);
            else
                widen_split(w.left + i * w.slice_ld, lo, q, n);
        }
        for (size_t j = 0; j < t->cols; j++)
            widen(w.right + j * w.slice_ld, ari_packed_at(t->b, t->matrix, t->col + j, k), upper > 0, n);
        ari_blas_dgemm(w.products + upper * w.product_ld, cv, w.left + upper * w.slice_ld,
                       (ari_blas_view){cv.rows, n, ld, 1}, w.right, (ari_blas_view){n, t->cols, 1, ld}, k > begin);
    }
}

/* Returns row i of the upper halves; the row of lower halves is t->rows rows further. */
static const double *half_row(const ari_tile *t, size_t i)
{
    const workspace w = workspace_at(t->plan, t->words);
    return w.products + i * w.product_ld;
}

static void round_row(const ari_tile *t, size_t i, float *y, double row)
{
    ari_round_halves(y, half_row(t, i), half_row(t, t->rows + i), row, t->scale, t->cols);
}

static void row_to_int64(const ari_tile *t, size_t i, int64_t *s, bool add)
{
    ari_halves_to_int64(s, half_row(t, i), half_row(t, t->rows + i), add, t->cols);
}

static void row_to_limbs(const ari_tile *t, size_t i, int64_t *s, bool add)
{
    ari_halves_to_limbs(s, half_row(t, i), half_row(t, t->rows + i), add, t->cols);
}

static bool is_supported(void)
{
    return true;
}

const ari_exact_path ari_exact_portable = {.name = "portable",
                                           .requirement = "binary64",
                                           .supported = is_supported,
                                           .rows = TILE_ROWS,
                                           .cols = TILE_COLS,
                                           .col_step = 8,
                                           .terms = HALVES_TERMS,
                                           .plan = plan_tile,
                                           .sum = sum_tile,
                                           .round_row = round_row,
                                           .row_to_int64 = row_to_int64,
                                           .row_to_limbs = row_to_limbs};
