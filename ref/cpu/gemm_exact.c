/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/cpu/blis_calls.h"
#include "ref/cpu/contract_kernels.h"
#include "ref/cpu/matrix.h"
#include "ref/cpu/packed.h"
#include "ref/cpu/parallel.h"
#include "ref/cpu/round.h"
#include "ref/cpu/row_kernels.h"
#include "ref/cpu/simd.h"
#include "ref/numerics/integer_sum.h"

/* The exact contraction on binary64 hardware (docs/numerics.md, "Contraction", step 4). A quantised element of the left
 * operand is split, qA = hi*2^13 + lo with |hi| <= 2^12 and -2^12 <= lo < 2^12, and one dgemm multiplies the rows of hi
 * and, stacked below them, of lo with qB. |qB| < 2^25, so K terms of either half sum to less than K*2^37 in magnitude:
 * for K <= 2^16 every partial sum, in whatever order and with or without fused multiply-adds, is an integer of
 * magnitude at most 2^53 and thus exact. int64 holds hi*2^13 + lo for K <= 8191, as K*(2^25 - 1)^2 < 2^63.
 *
 * The result is made in tiles that stay in the cache: operands are widened to binary64 a slice of K at a time, the
 * products of all slices are added up by dgemm itself, and rounding, bias and activation read the tile once. */
#define HALVES_TERMS ((size_t)65536)

/* Tile sizes, measured at transformer shapes on a Zen 4: 1 to 2 % better than 256 rows, as good as larger ones, and
 * 8 MiB of workspace a thread. */
#define TILE_ROWS ((size_t)384)
#define TILE_COLS ((size_t)512)
#define SLICE ((size_t)512)
#define PAD ((size_t)8) /* doubles: keeps rows of a power-of-two length out of each other's cache sets */

/* How an [m, n] result is cut, and what a thread needs to make one tile. Sizes in elements. */
typedef struct tile_plan {
    size_t tile_rows, tile_cols;  /* of a full tile */
    size_t down, across;          /* tiles */
    size_t slice;                 /* of K */
    size_t products, left, right; /* doubles of each part of a thread's workspace */
    size_t wide;                  /* int64 for sums over more than HALVES_TERMS terms */
    size_t total;                 /* 8-byte words a thread */
} tile_plan;

typedef struct workspace {
    double *products; /* [2*rows, product_ld]: the hi rows of the tile, then the lo rows */
    double *left;     /* [2*rows, slice_ld] */
    double *right;    /* [cols, slice_ld] */
    double *scale;    /* [cols] */
    int64_t *wide;    /* [rows, 2*cols] */
} workspace;

static size_t ceil_div(size_t a, size_t b)
{
    return (a + b - 1) / b;
}

/* The extent of n cut into `parts` nearly equal parts, a multiple of 8 where there are several. */
static size_t part_extent(size_t n, size_t parts)
{
    return parts <= 1 ? n : ceil_div(ceil_div(n, parts), 8) * 8;
}

static size_t round_up8(size_t n)
{
    return (n + 7) & ~(size_t)7;
}

static tile_plan plan_tiles(const ar_device *d, const ar_packed *a, const ar_packed *b, size_t terms)
{
    tile_plan p = {.down = ceil_div(a->rows, TILE_ROWS), .across = ceil_div(b->rows, TILE_COLS)};
    /* A single product is cut further until every thread has a tile, though never below 32 rows or columns. */
    while (a->batch * p.down * p.across < (size_t)d->threads) {
        const size_t rows = a->rows / p.down, cols = b->rows / p.across;
        if (rows < 64 && cols < 64)
            break;
        if (rows >= cols)
            p.down++;
        else
            p.across++;
    }
    p.tile_rows = part_extent(a->rows, p.down);
    p.tile_cols = part_extent(b->rows, p.across);
    p.down = ceil_div(a->rows, p.tile_rows);
    p.across = ceil_div(b->rows, p.tile_cols);
    p.slice = a->k < SLICE ? a->k : SLICE;
    const size_t slice_ld = round_up8(p.slice) + PAD;
    p.products = 2 * p.tile_rows * (round_up8(p.tile_cols) + PAD);
    p.left = 2 * p.tile_rows * slice_ld;
    p.right = p.tile_cols * slice_ld;
    p.wide = terms < a->k ? 2 * p.tile_rows * p.tile_cols : 0;
    p.total = round_up8(p.products + p.left + p.right + p.tile_cols + p.wide);
    return p;
}

static workspace workspace_at(const tile_plan *p, double *words)
{
    workspace w = {.products = words, .left = words + p->products};
    w.right = w.left + p->left;
    w.scale = w.right + p->right;
    w.wide = (int64_t *)(void *)(w.scale + p->tile_cols);
    return w;
}

/* One tile of the result: rows [row, row + rows) and columns [col, col + cols) of matrix `at`. */
typedef struct tile {
    size_t at, row, rows, col, cols;
    size_t product_ld, slice_ld;
    const ar_packed *a, *b;
    workspace w;
} tile;

static tile tile_of(const tile_plan *p, const ar_packed *a, const ar_packed *b, size_t number, double *words)
{
    tile t = {.at = number / (p->down * p->across), .a = a, .b = b, .w = workspace_at(p, words)};
    t.row = number / p->across % p->down * p->tile_rows;
    t.col = number % p->across * p->tile_cols;
    t.rows = a->rows - t.row < p->tile_rows ? a->rows - t.row : p->tile_rows;
    t.cols = b->rows - t.col < p->tile_cols ? b->rows - t.col : p->tile_cols;
    t.product_ld = round_up8(p->tile_cols) + PAD;
    t.slice_ld = round_up8(p->slice) + PAD;
    return t;
}

/* The remainder of q by 2^13 nearest to zero, and what is left: hi = floor((q + 2^12)/2^13), |hi| <= 2^12. */
ARI_SIMD static void widen_split(double *restrict hi, double *restrict lo, const int32_t *restrict q, size_t n)
{
    for (size_t k = 0; k < n; k++) {
        const int32_t shifted = q[k] + 4096;
        const int32_t low = (shifted & 8191) - 4096;
        const int32_t high = (q[k] - low) / 8192; /* no remainder */
        hi[k] = (double)high;
        lo[k] = (double)low;
    }
}

ARI_SIMD static void widen(double *restrict x, const int32_t *restrict q, size_t n)
{
    for (size_t k = 0; k < n; k++)
        x[k] = (double)q[k];
}

/* w.products = the two halves of the tile's sums over k in [from, to). */
static void multiply(const tile *t, size_t slice, size_t from, size_t to)
{
    const ptrdiff_t ld = (ptrdiff_t)t->slice_ld;
    const ari_blis_view cv = {2 * t->rows, t->cols, (ptrdiff_t)t->product_ld, 1};
    if (from == to)
        memset(t->w.products, 0, 2 * t->rows * t->product_ld * sizeof(double));
    for (size_t k = from; k < to; k += slice) {
        const size_t n = to - k < slice ? to - k : slice;
        const int32_t *qa = t->a->q + (t->at * t->a->rows + t->row) * t->a->k + k;
        const int32_t *qb = t->b->q + (t->at * t->b->rows + t->col) * t->b->k + k;
        for (size_t i = 0; i < t->rows; i++)
            widen_split(t->w.left + i * t->slice_ld, t->w.left + (t->rows + i) * t->slice_ld, qa + i * t->a->k, n);
        for (size_t j = 0; j < t->cols; j++)
            widen(t->w.right + j * t->slice_ld, qb + j * t->b->k, n);
        ari_blis_dgemm(t->w.products, cv, t->w.left, (ari_blis_view){2 * t->rows, n, ld, 1}, t->w.right,
                       (ari_blis_view){n, t->cols, 1, ld}, k > from, 1);
    }
}

static const double *hi_row(const tile *t, size_t i)
{
    return t->w.products + i * t->product_ld;
}

static const double *lo_row(const tile *t, size_t i)
{
    return t->w.products + (t->rows + i) * t->product_ld;
}

/* Refuses operands that do not belong together. */
static ar_status check_pair(const ar_packed *a, const ar_packed *b, const char *what)
{
    if (a->batch != b->batch || a->k != b->k)
        return ar_error_set(AR_ERR_SHAPE, "%s: left operand [%zu, %zu, k %zu], right operand [%zu, %zu, k %zu]", what,
                            a->batch, a->rows, a->k, b->batch, b->rows, b->k);
    return AR_OK;
}

/* Runs job(context, tile) for every tile, spread over the threads; `terms` is the longest sum between two flushes. */
static ar_status for_each_tile(const ar_device *d, const ar_packed *a, const ar_packed *b, size_t terms,
                               void (*job)(const void *context, const tile *t, size_t slice), const void *context)
{
    if (a->batch == 0 || a->rows == 0 || b->rows == 0)
        return AR_OK;
    const tile_plan p = plan_tiles(d, a, b, terms);
    const size_t tiles = a->batch * p.down * p.across;
    const int threads = ari_threads_for(d, tiles, a->batch * a->rows * b->rows * (a->k + 8) / 8);
    ar_buf words = {NULL};
    size_t count = 0;
    AR_TRY(ari_mul_size(&count, p.total, (size_t)threads * sizeof(double)));
    AR_TRY(ari_cpu_alloc(NULL, &words, count));
    double *base = words.ptr;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < tiles; i++) {
        const tile t = tile_of(&p, a, b, i, base + ari_thread_number() * p.total);
        job(context, &t, p.slice);
    }
    ari_cpu_free(NULL, words);
    return AR_OK;
}

/* --- integers out ---------------------------------------------------------------------------------------------------
 */

typedef struct int_output {
    int64_t *s; /* [batch, m, n] of `limbs` */
    int limbs;
} int_output;

static void int_tile(const void *context, const tile *t, size_t slice)
{
    const int_output *o = context;
    const size_t k = t->a->k, n = t->b->rows, limbs = (size_t)o->limbs;
    /* Whole slices only, so that no short one falls between two blocks. */
    const size_t block = k <= ARI_CONTRACT_BLOCK ? k : ARI_CONTRACT_BLOCK / slice * slice;
    size_t from = 0;
    do {
        const size_t to = k - from < block ? k : from + block;
        multiply(t, slice, from, to);
        for (size_t i = 0; i < t->rows; i++) {
            int64_t *s = o->s + ((t->at * t->a->rows + t->row + i) * n + t->col) * limbs;
            if (limbs == 1)
                ari_halves_to_int64(s, hi_row(t, i), lo_row(t, i), from > 0, t->cols);
            else
                ari_halves_to_limbs(s, hi_row(t, i), lo_row(t, i), from > 0, t->cols);
        }
        from = to;
    } while (from < k);
}

/** Slot gemm_i64. Errors: AR_ERR_SHAPE, AR_ERR_ARG (limbs; one limb for more than 8191 terms), AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
ar_status ari_cpu_gemm_i64(ar_device *d, ar_queue *q, ar_buf s, const ar_packed *a, const ar_packed *b, int limbs)
{
    (void)q;
    AR_TRY(check_pair(a, b, "gemm_i64"));
    if (limbs != 1 && limbs != 2)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: %d limbs, expected 1 or 2", limbs);
    if (limbs == 1 && a->k > ARI_CONTRACT_BLOCK)
        return ar_error_set(AR_ERR_ARG, "gemm_i64: k %zu needs two limbs, one holds up to %d terms", a->k,
                            ARI_CONTRACT_BLOCK);
    const int_output o = {.s = s.ptr, .limbs = limbs};
    return for_each_tile(d, a, b, ARI_CONTRACT_BLOCK, int_tile, &o);
}

/* --- rounded values out ---------------------------------------------------------------------------------------------
 */

typedef struct round_output {
    ar_device *d;
    const ar_tensor *y, *z;
    const int32_t *e, *f; /* [batch, m], [batch, n] */
    const float *bias;    /* [n] or NULL */
    ar_activation act;
} round_output;

/* Sums over more than HALVES_TERMS terms: limbs are kept beside the products. */
static void wide_sums(const tile *t, size_t slice)
{
    for (size_t from = 0; from < t->a->k; from += HALVES_TERMS) {
        const size_t to = t->a->k - from < HALVES_TERMS ? t->a->k : from + HALVES_TERMS;
        multiply(t, slice, from, to);
        for (size_t i = 0; i < t->rows; i++)
            ari_halves_to_limbs(t->w.wide + i * 2 * t->cols, hi_row(t, i), lo_row(t, i), from > 0, t->cols);
    }
}

static void round_row(const round_output *o, const tile *t, size_t i, float *y, bool wide)
{
    const int32_t e = o->e[t->at * t->a->rows + t->row + i];
    if (!wide) {
        ari_round_halves(y, hi_row(t, i), lo_row(t, i), ari_round_row_factor(e), t->w.scale, t->cols);
        return;
    }
    const int32_t *f = o->f + t->at * t->b->rows + t->col;
    const int64_t *s = t->w.wide + i * 2 * t->cols;
    for (size_t j = 0; j < t->cols; j++)
        y[j] = ari_contract_value2(s[2 * j], s[2 * j + 1], e, f[j]);
}

static ar_tensor row_view(float *row, size_t cols)
{
    return (ar_tensor){.dtype = AR_F32, .ndim = 2, .shape = {1, cols}, .stride = {(ptrdiff_t)cols, 1}, .data = {row}};
}

/* Bias and activation by the element-wise kernel, on a row that is still in the first cache level. */
static void finish_row(const round_output *o, const tile *t, size_t i, float *y)
{
    if (!o->bias && o->act == AR_ACT_NONE)
        return;
    const ar_cbuf bias = {o->bias ? o->bias + t->col : NULL};
    const ar_tensor sums = row_view(y, t->cols);
    ar_tensor values = sums;
    if (o->act != AR_ACT_NONE) {
        const ari_matrices zm = ari_matrices_of(o->z);
        values.data.ptr = ari_matrix_at(o->z, t->at) + (ptrdiff_t)(t->row + i) * zm.row_stride + t->col;
    }
    (void)ari_cpu_bias_act(o->d, NULL, &sums, bias, o->act, &values); /* it has no error to report */
}

static void round_tile(const void *context, const tile *t, size_t slice)
{
    const round_output *o = context;
    const ari_matrices ym = ari_matrices_of(o->y);
    const bool wide = t->a->k > HALVES_TERMS;
    float *first = ari_matrix_at(o->y, t->at) + (ptrdiff_t)t->row * ym.row_stride + t->col;
    ari_round_factors(t->w.scale, o->f + t->at * t->b->rows + t->col, t->cols);
    if (wide)
        wide_sums(t, slice);
    else
        multiply(t, slice, 0, t->a->k);
    for (size_t i = 0; i < t->rows; i++) {
        float *y = first + (ptrdiff_t)i * ym.row_stride;
        round_row(o, t, i, y, wide);
        finish_row(o, t, i, y);
    }
}

/** Slot gemm_round. z may be NULL for AR_ACT_NONE. Errors: AR_ERR_SHAPE, AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
ar_status ari_cpu_gemm_round(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_packed *a, const ar_packed *b,
                             ar_cbuf e, ar_cbuf f, ar_cbuf bias, ar_activation act, const ar_tensor *z)
{
    (void)q;
    AR_TRY(check_pair(a, b, "gemm_round"));
    const ari_matrices ym = ari_matrices_of(y);
    if (ym.batch != a->batch || ym.rows != a->rows || ym.cols != b->rows)
        return ar_error_set(AR_ERR_SHAPE, "gemm_round: result [%zu, %zu, %zu], expected [%zu, %zu, %zu]", ym.batch,
                            ym.rows, ym.cols, a->batch, a->rows, b->rows);
    const round_output o = {.d = d, .y = y, .z = z, .e = e.ptr, .f = f.ptr, .bias = bias.ptr, .act = act};
    return for_each_tile(d, a, b, HALVES_TERMS, round_tile, &o);
}
