/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>

#include "ref/cpu/device.h"
#include "ref/cpu/exact/panels.h"
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

/* --- panels ------------------------------------------------------------------------------------------------------- */

/* A panel has, before its terms, a 64-bit integer for each row: -2^25*sum a, for each column n*2^50 - 2^25*sum b. */
#define HEAD ((size_t)2) /* uint32_t of such an integer */

/* 8 rows of a panel from row `row` on. */
static ari_strip strip_of(const ari_panel_rows *s, size_t row)
{
    ari_strip strip = {.ahead = GROUP * s->ld * s->width};
    for (size_t i = 0; i < GROUP && row + i < s->rows; i++)
        strip.row[i] = ari_panel_rows_at(s, row + i, 0);
    return strip;
}

/* out[t] = q + 2^25 of term k + t in the 8 rows, 2^25 where there is none, and their sums in 64 bits added to `sum`. */
IFMA_INLINE __m512i offset8(__m256i out[8], const ari_strip *s, size_t k, size_t terms, __m512i sum)
{
    const __m256i offset = _mm256_set1_epi32(1 << OFFSET_BITS);
    __m256i part = _mm256_setzero_si256();
    ari_transpose8(out, s, k, terms - k < 8 ? terms - k : 8);
    for (size_t t = 0; t < 8; t++) {
        out[t] = _mm256_add_epi32(out[t], offset);
        part = _mm256_add_epi32(part, out[t]);
    }
    return _mm512_add_epi64(sum, _mm512_cvtepu32_epi64(part));
}

/* base - 2^25*sum */
IFMA_INLINE void store_fix(uint64_t *fix, __m512i sum, uint64_t base)
{
    _mm512_storeu_si512(fix, _mm512_sub_epi64(_mm512_set1_epi64((long long)base), _mm512_slli_epi64(sum, OFFSET_BITS)));
}

IFMA static void pack_left(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    (void)kernel;
    uint64_t *fix = panel, *to = fix + HEAD * GROUP;
    const ari_strip strip = strip_of(s, 0);
    __m512i sum = _mm512_setzero_si512();
    __m256i x[8];
    for (size_t k = 0; k < terms; k += 8) {
        sum = offset8(x, &strip, k, terms, sum);
        for (size_t t = 0; t < 8; t++)
            _mm512_storeu_si512(to + (k + t) * GROUP, _mm512_cvtepu32_epi64(x[t]));
    }
    store_fix(fix, sum, 0);
}

IFMA static void pack_right(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    (void)kernel;
    const size_t width = ari_round_up8(s->rows);
    uint64_t *fix = panel;
    uint32_t *to = (uint32_t *)panel + HEAD * width;
    for (size_t j = 0; j < width; j += GROUP) {
        const ari_strip strip = strip_of(s, j);
        __m512i sum = _mm512_setzero_si512();
        __m256i x[8];
        for (size_t k = 0; k < terms; k += 8) {
            sum = offset8(x, &strip, k, terms, sum);
            for (size_t t = 0; t < 8; t++)
                _mm256_storeu_si256((__m256i *)(void *)(to + (k + t) * width + j), x[t]);
        }
        store_fix(fix + j, sum, (uint64_t)ari_round_up8(terms) << (2 * OFFSET_BITS));
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* 8 rows by `vectors` times 8 columns; `vectors` is a constant where this is inlined. */
IFMA_INLINE void multiply(const ari_register_tile *r, const size_t vectors)
{
    __m512i acc[8][3], x[3];
    const uint64_t *row_fix = r->left, *col_fix = r->right, *left = row_fix + HEAD * GROUP;
    const uint32_t *right = (const uint32_t *)r->right + HEAD * vectors * GROUP;
    for (size_t i = 0; i < 8; i++)
        for (size_t v = 0; v < vectors; v++)
            acc[i][v] =
                _mm512_add_epi64(_mm512_set1_epi64((long long)row_fix[i]), _mm512_loadu_si512(col_fix + v * GROUP));
    for (size_t i = 0; r->add && i < 8; i++) /* the sums are read last */
        for (size_t v = 0; v < vectors; v++)
            __builtin_prefetch(r->sums + i * r->ld + v * GROUP, 1, 3);
    for (size_t k = 0; k < r->terms; k++) {
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
            int64_t *s = r->sums + i * r->ld + v * GROUP;
            _mm512_storeu_si512(s, r->add ? _mm512_add_epi64(acc[i][v], _mm512_loadu_si512(s)) : acc[i][v]);
        }
}

IFMA static void multiply_tile(const ari_panel_kernel *kernel, const ari_register_tile *r)
{
    (void)kernel;
    if (r->cols == 3 * GROUP)
        multiply(r, 3);
    else if (r->cols == 2 * GROUP)
        multiply(r, 2);
    else
        multiply(r, 1);
}

static const ari_panel_kernel kernel = {.rows = GROUP,
                                        .cols = VECTORS * GROUP,
                                        .lanes = GROUP,
                                        .left = sizeof(uint64_t),
                                        .right = sizeof(uint32_t),
                                        .head = HEAD,
                                        .step = 8,
                                        ARI_PANEL_BLOCK(SLICE, TILE_ROWS, TILE_COLS),
                                        .pack_left = pack_left,
                                        .pack_right = pack_right,
                                        .multiply = multiply_tile};

static void plan_tile(ari_tile_plan *p, size_t k)
{
    if (p->narrow) /* 52 bits would be wasted */
        ari_exact_avx2.plan(p, k);
    else
        ari_panels_plan(&kernel, p, k);
}

static bool is_supported(void)
{
    return ari_cpu_has("avx2 avx512f avx512dq avx512vl avx512ifma");
}

const ari_exact_path ari_exact_ifma = {
    ARI_PANEL_PATH,    .name = "ifma",    .needs = "AVX-512 IFMA",     .supported = is_supported,
    .rows = TILE_ROWS, .cols = TILE_COLS, .col_step = VECTORS * GROUP, .plan = plan_tile};
#endif
