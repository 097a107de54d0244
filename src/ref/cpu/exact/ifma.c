/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>
#include <string.h>

#include "ref/cpu/device.h"
#include "ref/cpu/exact/sums.h"
#include "ref/cpu/exact/transpose8.h"

/* The integer sums of a contraction (numerics.md, "Contraction", step 4) with AVX-512 IFMA: vpmadd52luq adds the
 * low 52 bits of a product of two unsigned integers to a 64-bit lane, at the rate of a binary64 multiply-add.
 *
 * Quantised integers have a sign, |q| <= 2^25 - 1, so both operands are offset: a = qA + 2^25 and b = qB + 2^25 lie in
 * [1, 2^26 - 1], and the low 52 bits of a*b < 2^52 are all of it. Over the n terms of a slice
 *
 *   sum qA*qB = sum (a - 2^25)*(b - 2^25) = sum a*b - 2^25*sum a - 2^25*sum b + n*2^50,
 *
 * where sum a belongs to a row of the tile and sum b to a column. A lane starts at the last three terms and adds up the
 * first. All of it is arithmetic modulo 2^64: sum a*b alone may pass 2^64 (n*2^52 does from n = 4096), and the lane is
 * S modulo 2^64 all the same. Over K <= 8191 terms |S| <= 8191*(2^25 - 1)^2 < 2^63, so that the lane read as int64 is
 * S itself; a longer sum is handed over in blocks (gemm_exact.c), and so the slices of one block may be added up here
 * in whatever number.
 *
 * Operands are transposed into panels a slice of K at a time. A register tile is 8 rows by 24, 16 or 8 columns: up to
 * 24 accumulators, 3 vectors of the right panel, and the 8 rows' values broadcast from memory. */
#define IFMA __attribute__((target("avx512f,avx512dq,avx512vl,avx512ifma")))
#define IFMA_INLINE static inline __attribute__((always_inline, target("avx512f,avx512dq,avx512vl,avx512ifma")))

#define GROUP ((size_t)8)   /* rows of a left panel, columns of a vector */
#define VECTORS ((size_t)3) /* of a right panel, at most */

/* A right panel of SLICE terms, 36 KiB, stays in the second cache level while the left panels stream past it. */
#define TILE_ROWS ((size_t)512)
#define TILE_COLS ((size_t)768)
#define SLICE ((size_t)384)

#define OFFSET_BITS ARI_QUANTISED_BITS

typedef struct workspace {
    uint64_t *sums;    /* [rows to a multiple of 8, sums_ld]: S modulo 2^64 */
    uint64_t *left;    /* panels of 8 rows, [slice][8] each */
    uint64_t *row_fix; /* [rows]: -2^25*sum a */
    uint64_t *col_fix; /* [cols]: n*2^50 - 2^25*sum b */
    uint32_t *right;   /* panels of up to 24 columns, [slice][24] each */
    size_t sums_ld, words;
} workspace;

static workspace workspace_at(const ari_tile_plan *p, void *words)
{
    const size_t rows = ari_round_up8(p->tile_rows), cols = ari_round_up8(p->tile_cols);
    workspace w = {.sums = words, .sums_ld = ari_sums_ld(p)};
    const size_t sums = rows * w.sums_ld, left = rows * p->slice;
    w.words = sums + left + rows + cols + ari_round_up8(cols * p->slice / 2);
    if (words) {
        w.left = w.sums + sums;
        w.row_fix = w.left + left;
        w.col_fix = w.row_fix + rows;
        w.right = (uint32_t *)(void *)(w.col_fix + cols);
    }
    return w;
}

/* Slices of nearly equal length: a short last one would cost as many reads and writes of the sums as a long one. */
static void plan_tile(ari_tile_plan *p, size_t k)
{
    const size_t slices = (k + SLICE - 1) / SLICE;
    p->slice = slices > 0 ? ari_round_up8((k + slices - 1) / slices) : 0;
    p->path = workspace_at(p, NULL).words;
}

/* --- panels ------------------------------------------------------------------------------------------------------- */

/* out[t] = q + 2^25 of term k + t in the 8 rows, for t < n <= 8; a missing row's is 2^25. */
IFMA_INLINE void offset8(__m256i out[8], const ari_strip *s, size_t k, size_t n)
{
    const __m256i offset = _mm256_set1_epi32(1 << OFFSET_BITS);
    ari_transpose8(out, s, k, n);
    for (size_t t = 0; t < 8; t++)
        out[t] = _mm256_add_epi32(out[t], offset);
}

/* The sums of 8 vectors of values below 2^26, in 64 bits. */
IFMA_INLINE __m512i add8(const __m256i x[8], __m512i sum, size_t n)
{
    __m256i part = _mm256_setzero_si256();
    for (size_t t = 0; t < 8; t++)
        part = t < n ? _mm256_add_epi32(part, x[t]) : part;
    return _mm512_add_epi64(sum, _mm512_cvtepu32_epi64(part));
}

/* base - 2^25*sum */
IFMA_INLINE void store_fix(uint64_t *fix, __m512i sum, uint64_t base)
{
    _mm512_storeu_si512(fix, _mm512_sub_epi64(_mm512_set1_epi64((long long)base), _mm512_slli_epi64(sum, OFFSET_BITS)));
}

IFMA static void pack_left(uint64_t *panel, uint64_t *fix, const ari_strip *s, size_t terms)
{
    __m512i sum = _mm512_setzero_si512();
    __m256i x[8];
    for (size_t k = 0; k < terms; k += 8) {
        const size_t n = terms - k < 8 ? terms - k : 8;
        offset8(x, s, k, n);
        sum = add8(x, sum, n);
        for (size_t t = 0; t < n; t++)
            _mm512_storeu_si512(panel + (k + t) * GROUP, _mm512_cvtepu32_epi64(x[t]));
    }
    store_fix(fix, sum, 0);
}

/* One of the vectors of a right panel whose terms are `ld` columns apart. */
IFMA static void pack_right(uint32_t *panel, size_t ld, uint64_t *fix, const ari_strip *s, size_t terms)
{
    __m512i sum = _mm512_setzero_si512();
    __m256i x[8];
    for (size_t k = 0; k < terms; k += 8) {
        const size_t n = terms - k < 8 ? terms - k : 8;
        offset8(x, s, k, n);
        sum = add8(x, sum, n);
        for (size_t t = 0; t < n; t++)
            _mm256_storeu_si256((__m256i *)(void *)(panel + (k + t) * ld), x[t]);
    }
    store_fix(fix, sum, (uint64_t)terms << (2 * OFFSET_BITS));
}

/* Columns of the right panel that starts at column j of `cols`. */
static size_t panel_width(size_t cols, size_t j)
{
    const size_t left = ari_round_up8(cols) - j;
    return left < VECTORS * GROUP ? left : VECTORS * GROUP;
}

/* `rows` rows of p, of which 8 make a strip, from row `row` and term k on. */
static ari_strip strip_of(const ar_packed *p, size_t at, size_t row, size_t rows, size_t k)
{
    ari_strip s = {.ahead = GROUP * p->ld};
    for (size_t i = 0; i < GROUP && i < rows; i++)
        s.row[i] = ari_packed_at(p, at, row + i, k);
    return s;
}

static void pack_slice(const workspace *w, const ari_tile *t, size_t k, size_t terms)
{
    for (size_t i = 0; i < t->rows; i += GROUP) {
        const ari_strip s = strip_of(t->a, t->at, t->row + i, t->rows - i, k);
        pack_left(w->left + i * terms, w->row_fix + i, &s, terms);
    }
    for (size_t j = 0; j < t->cols; j += GROUP) {
        const size_t first = j / (VECTORS * GROUP) * (VECTORS * GROUP);
        const ari_strip s = strip_of(t->b, t->at, t->col + j, t->cols - j, k);
        pack_right(w->right + first * terms + (j - first), panel_width(t->cols, first), w->col_fix + j, &s, terms);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* One register tile: operands, where its sums stand, and whether they start here. */
typedef struct product {
    const uint64_t *left;
    const uint32_t *right;
    const uint64_t *row_fix, *col_fix;
    uint64_t *sums;
    size_t ld, terms;
    bool add;
} product;

/* 8 rows by `vectors` times 8 columns; `vectors` is a constant where this is inlined. */
IFMA_INLINE void multiply(const product *p, const size_t vectors)
{
    __m512i acc[8][3], x[3];
    for (size_t i = 0; i < 8; i++)
        for (size_t v = 0; v < vectors; v++)
            acc[i][v] = _mm512_add_epi64(_mm512_set1_epi64((long long)p->row_fix[i]),
                                         _mm512_loadu_si512(p->col_fix + v * GROUP));
    const uint64_t *left = p->left;
    const uint32_t *right = p->right;
    for (size_t k = 0; k < p->terms; k++) {
        for (size_t v = 0; v < vectors; v++)
            x[v] = _mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i *)(const void *)(right + v * GROUP)));
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; i++) {
            const __m512i a = _mm512_set1_epi64((long long)left[i]);
#pragma GCC unroll 3
            for (size_t v = 0; v < vectors; v++)
                acc[i][v] = _mm512_madd52lo_epu64(acc[i][v], x[v], a);
        }
        left += GROUP;
        right += vectors * GROUP;
    }
    for (size_t i = 0; i < 8; i++)
        for (size_t v = 0; v < vectors; v++) {
            uint64_t *s = p->sums + i * p->ld + v * GROUP;
            _mm512_storeu_si512(s, p->add ? _mm512_add_epi64(acc[i][v], _mm512_loadu_si512(s)) : acc[i][v]);
        }
}

IFMA static void multiply3(const product *p)
{
    multiply(p, 3);
}

IFMA static void multiply2(const product *p)
{
    multiply(p, 2);
}

IFMA static void multiply1(const product *p)
{
    multiply(p, 1);
}

static void multiply_slice(const workspace *w, const ari_tile *t, size_t terms, bool add)
{
    void (*const kernels[])(const product *p) = {multiply1, multiply2, multiply3};
    for (size_t j = 0; j < t->cols; j += VECTORS * GROUP) {
        const size_t width = panel_width(t->cols, j);
        for (size_t i = 0; i < t->rows; i += GROUP) {
            const product p = {.left = w->left + i * terms,
                               .right = w->right + j * terms,
                               .row_fix = w->row_fix + i,
                               .col_fix = w->col_fix + j,
                               .sums = w->sums + i * w->sums_ld + j,
                               .ld = w->sums_ld,
                               .terms = terms,
                               .add = add};
            kernels[width / GROUP - 1](&p);
        }
    }
}

/* w.sums = the tile's sums over k in [from, to), at most 8191 terms. */
static void sum_tile(const ari_tile *t, size_t from, size_t to)
{
    const workspace w = workspace_at(t->plan, t->words);
    if (from == to)
        memset(w.sums, 0, t->rows * w.sums_ld * sizeof *w.sums);
    for (size_t k = from; k < to; k += t->plan->slice) {
        const size_t terms = to - k < t->plan->slice ? to - k : t->plan->slice;
        pack_slice(&w, t, k, terms);
        multiply_slice(&w, t, terms, k > from);
    }
}

static bool is_supported(void)
{
    return ari_cpu_has("avx512f avx512dq avx512vl avx512ifma");
}

const ari_exact_path ari_exact_ifma = {
    ARI_SUMS_PATH,     .name = "ifma",    .needs = "AVX-512 IFMA",     .supported = is_supported,
    .rows = TILE_ROWS, .cols = TILE_COLS, .col_step = VECTORS * GROUP, .plan = plan_tile,
    .sum = sum_tile};
#endif
