/* SPDX-License-Identifier: Apache-2.0 */
/* The integer sums of a contraction (numerics.md, "Contraction", step 4) by products of 16-bit integers, of which
 * x86 multiplies and adds two pairs a 32-bit lane. k16_*.c include this file once each and say with what:
 *
 *   K16_TARGET           the compiler's names of the instructions
 *   K16_LANES            32-bit lanes of a vector: 8 or 16
 *   K16_ROWS, _VECTORS   a register tile: rows, and vectors of columns, at most 3
 *   K16_WORDS            the compiler's type of such a vector
 *   K16_DOT(sum, a, b)   sum + a*b of the low halves + a*b of the high halves in each lane, modulo 2^32
 *   K16_PATH, _NAME, _NEEDS, _FEATURES   what the path is called, and what it asks of the processor, in words and for
 *                        ari_cpu_has
 *
 * q = h*2^13 + l with |h| <= 2^12 and -2^12 <= l < 2^12, and by Karatsuba's rule three products are enough:
 *
 *   H = sum h*h',  L = sum l*l',  P = sum (h + l)*(h' + l'),  M = P - H - L,  S = H*2^26 + M*2^13 + L.
 *
 * 32 bits hold the sums of a block of 64 terms. |h*h'| and |l*l'| are at most 2^24, so |H| and |L| are at most 2^30. P
 * may wrap around, and M, computed modulo 2^32, is right all the same if M itself fits. A term of it, h*l' + l*h', is
 * at least -2^25 and at most 2^25 - 1: 2^25 would take h*l' = l*h' = 2^24, where neither l nor l' is 2^12, so that all
 * four were -2^12; but then q = -2^25 - 2^12, which no operand holds. 64 such terms lie in [-2^31, 2^31 - 64].
 *
 * After a block, x = H + (M >> 13) and r = (M mod 2^13)*2^13 + L also fit, and S += x*2^26 + r in int64, modulo 2^64:
 * |S| < 2^63 over K <= 8191 terms, and a longer sum is handed over in pieces (gemm_exact.c). The lanes of H and L begin
 * at 2^31 instead of 0, which M does not notice modulo 2^32: so x and r have no sign, and become 64-bit integers by
 * masks and shifts. What that adds to S is known, and S begins at its negative. */
#ifndef ARI_CPU_GEMM_K16_H
#define ARI_CPU_GEMM_K16_H

#include <string.h>

#include "ref/cpu/device.h"
#include "ref/cpu/exact/sums.h"
#include "ref/cpu/exact/transpose8.h"
#include "ref/cpu/gemm.h"

#define K16 __attribute__((target(K16_TARGET)))
#define K16_INLINE static inline __attribute__((always_inline, target(K16_TARGET)))

#define LANES ((size_t)K16_LANES)
#define ROWS ((size_t)K16_ROWS)
#define VECTORS ((size_t)K16_VECTORS)
#define WIDTH (VECTORS * LANES) /* columns of a register tile */
#define PLANES ((size_t)3)      /* h, l, h + l */
#define BLOCK ((size_t)64)      /* terms of an int32 sum */
#define SPLIT 13

/* A slice of a tile's operands is packed at a time, and multiplied in parts of the tile whose sums and left panels of a
 * block, 180 KiB and 90 KiB, stay in the second cache level. The right panel of a block, 18 KiB at most, stays in the
 * first while the left panels stream past it, one behind the other. */
#define TILE_ROWS ((size_t)480)
#define TILE_COLS ((size_t)768)
#define SLICE ((size_t)384)
#define NEAR_ROWS ((size_t)240)
#define NEAR_COLS ((size_t)96)

typedef uint32_t vec __attribute__((vector_size(4 * K16_LANES)));
typedef int32_t signed_vec __attribute__((vector_size(4 * K16_LANES)));
typedef uint64_t wide_vec __attribute__((vector_size(4 * K16_LANES)));

typedef struct workspace {
    uint64_t *sums;  /* [rows to a multiple of ROWS, sums_ld] */
    uint32_t *right; /* a slice in panels of up to WIDTH columns */
    uint32_t *left;  /* and of ROWS rows */
    size_t sums_ld, words;
} workspace;

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Dwords of a plane for each row of a panel; 8 terms are packed at a time. */
static size_t pairs_of(size_t terms)
{
    return ari_round_up8(terms) / 2;
}

static workspace workspace_at(const ari_tile_plan *p, void *words)
{
    const size_t rows = round_up(p->tile_rows, ROWS), cols = round_up(p->tile_cols, LANES);
    const size_t depth = PLANES * pairs_of(p->slice);
    workspace w = {.sums = words, .sums_ld = ari_sums_ld(p)};
    const size_t sums = rows * w.sums_ld, right = cols * depth / 2; /* cols is a multiple of 8, depth of 4 */
    w.words = sums + right + ari_round_up8(rows * depth / 2);
    if (words) {
        w.right = (uint32_t *)(void *)(w.sums + sums);
        w.left = (uint32_t *)(void *)(w.sums + sums + right);
    }
    return w;
}

/* Slices of nearly equal length, of whole blocks. */
static void plan_tile(ari_tile_plan *p, size_t k)
{
    const size_t slices = (k + SLICE - 1) / SLICE;
    p->slice = slices > 0 ? round_up((k + slices - 1) / slices, BLOCK) : 0;
    p->path = workspace_at(p, NULL).words;
}

/* --- panels ------------------------------------------------------------------------------------------------------- */

typedef uint32_t vec8 __attribute__((vector_size(32)));
typedef uint16_t halves8 __attribute__((vector_size(32)));

/* The three planes of terms k (even) and k + 1 (odd) of 8 rows; `rows` of them are stored. With q + 2^12 = u, h is
 * u >> 13 and l is (u mod 2^13) - 2^12. */
K16_INLINE void store_pair(uint32_t *to, size_t plane, vec8 even, vec8 odd, const size_t rows)
{
    const uint32_t round = 1u << (SPLIT - 1), low = (1u << SPLIT) - 1;
    even += round;
    odd += round;
    const vec8 h = (even >> SPLIT & 0xffffu) | (odd << (16 - SPLIT) & 0xffff0000u);
    const halves8 l = (halves8)((even & low) | (odd << 16 & low << 16)) - (uint16_t)round;
    const halves8 both = (halves8)h + l;
    memcpy(to, &h, rows * sizeof *to);
    memcpy(to + plane, &l, rows * sizeof *to);
    memcpy(to + 2 * plane, &both, rows * sizeof *to);
}

/* An operand's slice: [block][panel][plane][pair][row of the panel], of dwords that hold a pair of terms each. */
typedef struct panels {
    uint32_t *at;
    size_t rows; /* of all panels */
} panels;

/* The block of `pairs` pairs that begins at pair `from`, of the panel that begins at row `row`. */
static inline uint32_t *panel_at(const panels *p, size_t from, size_t pairs, size_t row)
{
    return p->at + PLANES * (from * p->rows + pairs * row);
}

/* `rows` rows from row `row` of a panel of `width` rows on, which begins at `panel`. */
K16_INLINE void pack(const panels *p, size_t panel, size_t width, size_t row, const ari_strip *s, size_t terms,
                     const size_t rows)
{
    for (size_t from = 0; from < terms; from += BLOCK) {
        const size_t n = terms - from < BLOCK ? terms - from : BLOCK, pairs = pairs_of(n);
        uint32_t *to = panel_at(p, from / 2, pairs, panel) + (row - panel);
        for (size_t k = 0; k < n; k += 8) {
            __m256i t[8];
            ari_transpose8(t, s, from + k, n - k);
            for (size_t i = 0; i < 8; i += 2, to += width)
                store_pair(to, pairs * width, (vec8)t[i], (vec8)t[i + 1], rows);
        }
    }
}

K16 static void pack_left(const panels *p, size_t row, const ari_strip *s, size_t terms)
{
    pack(p, row, ROWS, row, s, terms, ROWS);
}

K16 static void pack_right(const panels *p, size_t panel, size_t width, size_t col, const ari_strip *s, size_t terms)
{
    pack(p, panel, width, col, s, terms, 8);
}

/* Columns of the right panel that starts at column j of `cols`, a multiple of LANES. */
static size_t panel_width(size_t cols, size_t j)
{
    return cols - j < WIDTH ? cols - j : WIDTH;
}

/* The column in lane `lane` of a vector. Sums of even lanes and those of odd lanes become vectors of 64-bit integers:
 * so these are of neighbouring columns. */
static size_t column_of(size_t lane)
{
    return lane % 2 * (LANES / 2) + lane / 2;
}

static void pack_slice(const workspace *w, const ari_tile *t, size_t k, size_t terms)
{
    const panels left = {w->left, round_up(t->rows, ROWS)}, right = {w->right, round_up(t->cols, LANES)};
    for (size_t i = 0; i < t->rows; i += ROWS) {
        ari_strip s = {.ahead = ROWS * t->a->ld};
        for (size_t r = 0; r < ROWS && i + r < t->rows; r++)
            s.row[r] = ari_packed_at(t->a, t->at, t->row + i + r, k);
        pack_left(&left, i, &s, terms);
    }
    for (size_t j = 0; j < right.rows; j += 8) {
        const size_t panel = j / WIDTH * WIDTH, vector = j / LANES * LANES;
        ari_strip s = {.ahead = LANES * t->b->ld};
        for (size_t c = 0; c < 8; c++) {
            const size_t col = vector + column_of(j - vector + c);
            s.row[c] = col < t->cols ? ari_packed_at(t->b, t->at, t->col + col, k) : NULL;
        }
        pack_right(&right, panel, panel_width(right.rows, panel), j, &s, terms);
    }
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* One block of a register tile: operands, where its sums stand, and whether they start here. */
typedef struct product {
    const uint32_t *left, *right;
    uint64_t *sums;
    size_t ld, pairs;
    uint64_t start; /* what sums begin with */
    bool add;
} product;

#define BIAS (1u << 31)

K16_INLINE vec dot(vec sum, vec a, vec b)
{
    return (vec)K16_DOT((K16_WORDS)sum, (K16_WORDS)a, (K16_WORDS)b);
}

/* acc = start + the products of one plane; `vectors` is a constant where this is inlined. */
K16_INLINE void multiply_plane(vec acc[ROWS][3], const uint32_t *left, const uint32_t *right, size_t pairs,
                               uint32_t start, const size_t vectors)
{
    vec x[3];
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t v = 0; v < vectors; v++)
            acc[i][v] = (vec){0} + start;
    for (size_t k = 0; k < pairs; k++) {
#pragma GCC unroll 3
        for (size_t v = 0; v < vectors; v++)
            memcpy(&x[v], right + v * LANES, sizeof *x);
#pragma GCC unroll 8
        for (size_t i = 0; i < ROWS; i++) {
            const vec a = (vec){0} + left[i];
#pragma GCC unroll 3
            for (size_t v = 0; v < vectors; v++)
                acc[i][v] = dot(acc[i][v], a, x[v]);
        }
        left += ROWS;
        right += vectors * LANES;
    }
}

/* 64-bit integers at s: x, or x added to them. */
K16_INLINE void put(uint64_t *s, wide_vec x, const product *p)
{
    wide_vec sums = (wide_vec){0} + p->start;
    if (p->add)
        memcpy(&sums, s, sizeof sums);
    sums += x;
    memcpy(s, &sums, sizeof sums);
}

/* S += x*2^26 + r, of the columns of even lanes and of those of odd ones. */
K16_INLINE void flush(uint64_t *s, vec h, vec l, vec both, const product *p)
{
    const vec m = both - h - l;
    const wide_vec lower = (wide_vec){0} + 0xffffffffu;
    const wide_vec x = (wide_vec)(h + (vec)((signed_vec)m >> SPLIT));
    const wide_vec r = (wide_vec)((m << (32 - SPLIT) >> (32 - 2 * SPLIT)) + l);
    put(s, ((x & lower) << (2 * SPLIT)) + (r & lower), p);
    put(s + LANES / 2, ((x & ~lower) >> (32 - 2 * SPLIT)) + (r >> 32), p);
}

K16_INLINE void multiply(const product *p, const size_t vectors)
{
    vec h[ROWS][3], l[ROWS][3], both[ROWS][3];
    const size_t left = p->pairs * ROWS, right = p->pairs * vectors * LANES;
    for (size_t i = 0; p->add && i < ROWS; i++) /* the sums, which are read last */
        for (size_t j = 0; j < vectors * LANES; j += 8)
            __builtin_prefetch(p->sums + i * p->ld + j, 1, 3);
    multiply_plane(h, p->left, p->right, p->pairs, BIAS, vectors);
    multiply_plane(l, p->left + left, p->right + right, p->pairs, BIAS, vectors);
    multiply_plane(both, p->left + 2 * left, p->right + 2 * right, p->pairs, 0, vectors);
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t v = 0; v < vectors; v++)
            flush(p->sums + i * p->ld + v * LANES, h[i][v], l[i][v], both[i][v], p);
}

K16 static void multiply1(const product *p)
{
    multiply(p, 1);
}

K16 static void multiply2(const product *p)
{
    multiply(p, 2);
}

#if K16_VECTORS == 3
K16 static void multiply3(const product *p)
{
    multiply(p, 3);
}
#endif

static void (*const kernels[K16_VECTORS])(const product *p) = {
    multiply1,
    multiply2,
#if K16_VECTORS == 3
    multiply3,
#endif
};

/* The part of the tile from row i0 and column j0 on. */
static void multiply_part(const workspace *w, const ari_tile *t, size_t i0, size_t j0, size_t pairs, uint64_t start,
                          bool add)
{
    const size_t cols = round_up(t->cols, LANES);
    const size_t rows_end = t->rows < i0 + NEAR_ROWS ? t->rows : i0 + NEAR_ROWS;
    const size_t cols_end = cols < j0 + NEAR_COLS ? cols : j0 + NEAR_COLS;
    const panels left = {w->left, round_up(t->rows, ROWS)}, right = {w->right, cols};
    for (size_t k = 0; k < pairs; k += BLOCK / 2) {
        const size_t n = pairs - k < BLOCK / 2 ? pairs - k : BLOCK / 2;
        for (size_t j = j0; j < cols_end; j += WIDTH)
            for (size_t i = i0; i < rows_end; i += ROWS) {
                const product p = {.left = panel_at(&left, k, n, i),
                                   .right = panel_at(&right, k, n, j),
                                   .sums = w->sums + i * w->sums_ld + j,
                                   .ld = w->sums_ld,
                                   .pairs = n,
                                   .start = start,
                                   .add = add || k > 0};
                kernels[panel_width(cols, j) / LANES - 1](&p);
            }
    }
}

/* w.sums = the tile's sums over k in [from, to), at most 8191 terms. */
static void sum_tile(const ari_tile *t, size_t from, size_t to)
{
    const workspace w = workspace_at(t->plan, t->words);
    const uint64_t blocks = (to - from + BLOCK - 1) / BLOCK, of_block = ((uint64_t)BIAS << 2 * SPLIT) + BIAS;
    if (from == to)
        memset(w.sums, 0, t->rows * w.sums_ld * sizeof *w.sums);
    for (size_t k = from; k < to; k += t->plan->slice) {
        const size_t terms = to - k < t->plan->slice ? to - k : t->plan->slice;
        pack_slice(&w, t, k, terms);
        for (size_t i = 0; i < t->rows; i += NEAR_ROWS)
            for (size_t j = 0; j < t->cols; j += NEAR_COLS)
                multiply_part(&w, t, i, j, pairs_of(terms), 0 - blocks * of_block, k > from);
    }
}

static bool is_supported(void)
{
    return ari_cpu_has(K16_FEATURES);
}

const ari_exact_path K16_PATH = {
    ARI_SUMS_PATH,     .name = K16_NAME,  .needs = K16_NEEDS, .supported = is_supported,
    .rows = TILE_ROWS, .cols = TILE_COLS, .col_step = 48, /* of whole panels, whatever their width */
    .plan = plan_tile, .sum = sum_tile};

#endif
