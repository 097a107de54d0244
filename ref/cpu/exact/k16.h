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
 * masks and shifts. What that adds to S is known, and S begins at its negative.
 *
 * Narrow operands, |q| <= 32639, take two products: the left q itself, and of the right one q' = h*2^8 + l with -128 <=
 * h, l <= 127. 512 terms of either are at most 32639*2^7*2^9 < 2^31 in magnitude, and S = H*2^8 + L. */
#pragma once

#include <string.h>

#include "ref/cpu/device.h"
#include "ref/cpu/exact/panels.h"
#include "ref/cpu/exact/transpose8.h"
#include "ref/cpu/gemm.h"
#include "ref/numerics/integer_sum.h"

#define K16 __attribute__((target(K16_TARGET)))
#define K16_INLINE static inline __attribute__((always_inline, target(K16_TARGET)))

#define LANES ((size_t)K16_LANES)
#define ROWS ((size_t)K16_ROWS)
#define VECTORS ((size_t)K16_VECTORS)
#define WIDTH (VECTORS * LANES) /* columns of a register tile */
#define PLANES ((size_t)3)      /* h, l, h + l */
#define BLOCK ((size_t)64)      /* terms of an int32 sum */
#define SPLIT 13
#define NARROW_BLOCK ((size_t)512) /* 256 take 4 % longer, because sums are read and written twice as often */
#define NARROW_SPLIT 8

/* A slice of a tile's operands is packed at a time and multiplied in parts of the tile, whose sums and left panels of a
 * block, 180 KiB and 90 KiB, stay in the L2 cache. The right panel of a block, at most 18 KiB, stays in the L1 cache
 * while the left panels stream past it one after the other. */
#define TILE_ROWS ((size_t)960)
#define TILE_COLS ((size_t)768)
#define SLICE ((size_t)384)
#define NARROW_SLICE ((size_t)1024) /* sums of one slice, rounded in the kernel, never leave the L2 cache */
#define NEAR_ROWS ((size_t)240)
#define NEAR_COLS ((size_t)96)

typedef uint32_t vec __attribute__((vector_size(4 * K16_LANES)));
typedef int32_t signed_vec __attribute__((vector_size(4 * K16_LANES)));
typedef uint64_t wide_vec __attribute__((vector_size(4 * K16_LANES)));
typedef int64_t signed_wide_vec __attribute__((vector_size(4 * K16_LANES)));
typedef double real_vec __attribute__((vector_size(4 * K16_LANES)));
typedef float float_vec __attribute__((vector_size(2 * K16_LANES)));

/* --- panels ------------------------------------------------------------------------------------------------------- */

typedef uint32_t vec8 __attribute__((vector_size(32)));
typedef uint16_t halves8 __attribute__((vector_size(32)));
typedef int16_t signed_halves8 __attribute__((vector_size(32)));

/* Stores the three planes of terms k (even) and k + 1 (odd) of `rows` of 8 rows. With u = q + 2^12, h is u >> 13 and l
 * is (u mod 2^13) - 2^12. */
K16_INLINE void store_pair(uint32_t *dst, size_t plane, vec8 even, vec8 odd, const size_t rows)
{
    const uint32_t round = 1u << (SPLIT - 1), low = (1u << SPLIT) - 1;
    even += round;
    odd += round;
    const vec8 h = (even >> SPLIT & 0xffffu) | (odd << (16 - SPLIT) & 0xffff0000u);
    const halves8 l = (halves8)((even & low) | (odd << 16 & low << 16)) - (uint16_t)round;
    const halves8 digit_sum = (halves8)h + l;
    memcpy(dst, &h, rows * sizeof *dst);
    memcpy(dst + plane, &l, rows * sizeof *dst);
    memcpy(dst + 2 * plane, &digit_sum, rows * sizeof *dst);
}

/* Returns the column in lane `lane` of a vector. Sums of even lanes and of odd lanes become vectors of 64-bit integers,
 * which therefore belong to adjacent columns. */
static size_t column_of(size_t lane)
{
    return lane % 2 * (LANES / 2) + lane / 2;
}

/* Storage of a panel's terms: three planes; narrow terms as they are, or as their two digits. */
enum { KARATSUBA, WHOLE, DIGITS };

/* Packs `rows` rows from row `row` on of a panel of `width` rows: [plane][pair][row of the panel], where a dword holds
 * a pair of terms; packs 8 terms at a time. */
K16_INLINE void pack_wide(uint32_t *panel, size_t width, size_t row, const ari_strip *s, size_t terms,
                          const size_t rows)
{
    const size_t plane = ari_round_up8(terms) / 2 * width;
    uint32_t *dst = panel + row;
    for (size_t k = 0; k < terms; k += 8) {
        __m256i t[8];
        ari_transpose8(t, s, k, terms - k);
        for (size_t i = 0; i < 8; i += 2, dst += width)
            store_pair(dst, plane, (vec8)t[i], (vec8)t[i + 1], rows);
    }
}

/* Does the same for narrow integers, 16 terms at a time. */
K16_INLINE void pack_narrow(uint32_t *panel, size_t width, size_t row, const ari_strip *s, size_t terms,
                            const size_t rows, const bool digits)
{
    const size_t plane = (terms + 15) / 16 * 8 * width;
    uint32_t *dst = panel + row;
    for (size_t k = 0; k < terms; k += 16) {
        __m256i t[8];
        ari_transpose_pairs(t, s, k, terms - k);
        for (size_t i = 0; i < 8; i++, dst += width) {
            const halves8 q = (halves8)t[i];
            const halves8 h = (halves8)((signed_halves8)(q + (1u << (NARROW_SPLIT - 1))) >> NARROW_SPLIT);
            const halves8 upper = digits ? h : q, l = q - (h << NARROW_SPLIT);
            memcpy(dst, &upper, rows * sizeof *dst);
            if (digits)
                memcpy(dst + plane, &l, rows * sizeof *dst);
        }
    }
}

K16_INLINE void pack(uint32_t *panel, size_t width, size_t row, const ari_strip *s, size_t terms, const size_t rows,
                     const int form)
{
    if (form == KARATSUBA)
        pack_wide(panel, width, row, s, terms, rows);
    else
        pack_narrow(panel, width, row, s, terms, rows, form == DIGITS);
}

K16_INLINE void pack_left_as(void *panel, const ari_panel_rows *rows, size_t terms, const int form)
{
    ari_strip s = {.prefetch_distance = ROWS * rows->ld * rows->width};
    for (size_t r = 0; r < ROWS && r < rows->rows; r++)
        s.row[r] = ari_panel_rows_at(rows, r, 0);
    pack(panel, ROWS, 0, &s, terms, ROWS, form);
}

K16_INLINE void pack_right_as(void *panel, const ari_panel_rows *rows, size_t terms, const int form)
{
    const size_t width = (rows->rows + LANES - 1) / LANES * LANES;
    for (size_t j = 0; j < width; j += 8) {
        const size_t vector = j / LANES * LANES;
        ari_strip s = {.prefetch_distance = LANES * rows->ld * rows->width};
        for (size_t c = 0; c < 8; c++) {
            const size_t col = vector + column_of(j - vector + c);
            s.row[c] = col < rows->rows ? ari_panel_rows_at(rows, col, 0) : NULL;
        }
        pack(panel, width, j, &s, terms, 8, form);
    }
}

K16 static void pack_left(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *rows, size_t terms)
{
    (void)kernel;
    pack_left_as(panel, rows, terms, KARATSUBA);
}

K16 static void pack_left_narrow(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *rows, size_t terms)
{
    (void)kernel;
    pack_left_as(panel, rows, terms, WHOLE);
}

K16 static void pack_right(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *rows, size_t terms)
{
    (void)kernel;
    pack_right_as(panel, rows, terms, KARATSUBA);
}

K16 static void pack_right_narrow(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *rows, size_t terms)
{
    (void)kernel;
    pack_right_as(panel, rows, terms, DIGITS);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

#define BIAS (1u << 31)
#define OVERLAPPED (K16_LANES == 16)                 /* the products use all 16 registers of AVX2 */
#define ROUNDS(narrow) ((narrow) || K16_LANES == 16) /* AVX2 has no instruction that converts int64 */

K16_INLINE vec dot(vec sum, vec a, vec b)
{
    return (vec)K16_DOT((K16_WORDS)sum, (K16_WORDS)a, (K16_WORDS)b);
}

/* Returns S, plus the 64-bit integers at s if `add`, for the columns of a vector's even lanes or of its odd lanes. */
K16_INLINE wide_vec added(const int64_t *s, wide_vec x, uint64_t start, bool add)
{
    wide_vec sums = (wide_vec){0} + start;
    if (add)
        memcpy(&sums, s, sizeof sums);
    return sums + x;
}

/* Returns fl64(S): reverses ari_nearest_integer where |S| < 2^51, otherwise uses an AVX-512 instruction. */
K16_INLINE real_vec real_of(wide_vec s, const bool narrow)
{
    return narrow ? (real_vec)(s + ARI_ROUND_MAGIC_BITS) - ARI_ROUND_MAGIC
                  : __builtin_convertvector((signed_wide_vec)s, real_vec);
}

/* Rounds like ari_round_sums. NaN needs no special care: it comes from a factor that has the right bits, and these
 * instructions keep them. */
K16_INLINE void round_sums(float *y, wide_vec s, double row, const double *scales, const bool narrow)
{
    real_vec scale;
    memcpy(&scale, scales, sizeof scale);
    const float_vec x = __builtin_convertvector(real_of(s, narrow) * row * scale, float_vec);
    memcpy(y, &x, sizeof x);
}

/* y: NULL, or a row of rounded values, of which columns from j on are written. */
K16_INLINE void store_sums(const ari_register_tile *r, size_t i, size_t j, wide_vec x, uint64_t start, float *y,
                           const bool narrow)
{
    int64_t *s = r->sums + i * r->ld + j;
    const wide_vec sums = added(s, x, start, r->add);
    if (y)
        round_sums(y + j, sums, r->result.row[i], r->scale + j, narrow);
    else
        memcpy(s, &sums, sizeof sums);
}

/* Adds x*2^shift + rest to S for the columns of even lanes and of odd lanes. */
K16_INLINE void flush(const ari_register_tile *r, size_t i, size_t j, vec upper, vec rest, uint64_t start, float *y,
                      const bool narrow)
{
    const int shift = narrow ? NARROW_SPLIT : 2 * SPLIT;
    const wide_vec lower = (wide_vec){0} + 0xffffffffu, x = (wide_vec)upper, l = (wide_vec)rest;
    store_sums(r, i, j, ((x & lower) << shift) + (l & lower), start, y, narrow);
    store_sums(r, i, j + LANES / 2, ((x & ~lower) >> (32 - shift)) + (l >> 32), start, y, narrow);
}

K16_INLINE void prefetch_sums(const ari_register_tile *p, const size_t vectors)
{
    for (size_t i = 0; p->add && i < ROWS; i++) /* they are read last */
        for (size_t j = 0; j < vectors * LANES; j += 8)
            __builtin_prefetch(p->sums + i * p->ld + j, 1, 3);
    for (size_t i = 0; p->result.y && i < ROWS && i < p->rows; i++)
        for (size_t j = 0; j < vectors * LANES; j += 16)
            __builtin_prefetch(p->result.y + i * p->result.ld + j, 1, 3);
}

/* Sums of a register tile by planes, before they are added to int64. Adding takes a tenth as long as the products,
 * whose instructions leave half of the vector units idle, so it overlaps with the next tile's products. */
typedef struct tile_sums {
    vec plane[PLANES][ROWS][3];
    ari_register_tile tile; /* the tile; sums NULL: none */
} tile_sums;

/* Adds row i of the sums; `vectors` and `narrow` are constants where this function is inlined, as below. */
K16_INLINE void flush_row(const tile_sums *m, size_t i, const size_t vectors, const bool narrow)
{
    const int shift = narrow ? NARROW_SPLIT : 2 * SPLIT;
    const uint64_t start = 0 - m->tile.blocks * (((uint64_t)BIAS << shift) + BIAS);
    const ari_tile_result *result = &m->tile.result;
    float past[WIDTH], *y = ROUNDS(narrow) && result->y ? result->y + i * result->ld : NULL, *dst = y;
    if (y && i >= m->tile.rows)
        return;
    if (y && m->tile.inside < vectors * LANES)
        dst = past;
#pragma GCC unroll 3
    for (size_t v = 0; v < vectors; v++) {
        vec x = m->plane[0][i][v], rest = m->plane[1][i][v];
        if (!narrow) {
            const vec mid = m->plane[2][i][v] - x - rest;
            x += (vec)((signed_vec)mid >> SPLIT);
            rest += mid << (32 - SPLIT) >> (32 - 2 * SPLIT);
        }
        flush(&m->tile, i, v * LANES, x, rest, start, dst, narrow);
    }
    if (dst != y)
        memcpy(y, past, m->tile.inside * sizeof *y);
}

/* Computes dst = start + the products of one plane. Meanwhile the preceding tile's sums are added to int64, one row
 * every 4 terms. before NULL: no preceding tile. */
K16_INLINE void multiply_plane(vec dst[ROWS][3], const uint32_t *left, const uint32_t *right,
                               const ari_register_tile *r, uint32_t start, const size_t vectors,
                               const tile_sums *before, const bool narrow)
{
    vec acc[ROWS][3], x[3];
    size_t row = before && before->tile.sums ? 0 : ROWS;
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t v = 0; v < vectors; v++)
            acc[i][v] = (vec){0} + start;
    const size_t used = (r->used + 3) / 4 * 4, part = OVERLAPPED ? 4 : used;
    for (size_t k = 0; k < used; k += part) {
        for (size_t pair = 0; pair < part / 2; pair++) {
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
        if (OVERLAPPED && row < ROWS)
            flush_row(before, row++, vectors, narrow);
    }
    for (; OVERLAPPED && row < ROWS; row++)
        flush_row(before, row, vectors, narrow);
#pragma GCC unroll 8
    for (size_t i = 0; i < ROWS; i++)
#pragma GCC unroll 3
        for (size_t v = 0; v < vectors; v++)
            dst[i][v] = acc[i][v];
}

K16_INLINE void next_tile(ari_register_tile *r)
{
    r->sums += ROWS * r->ld;
    if (r->result.y) {
        r->result.y += ROWS * r->result.ld;
        r->result.row += ROWS;
        r->rows -= r->rows < ROWS ? r->rows : ROWS;
    }
}

/* Multiplies `tiles` register tiles, one below the other. */
K16_INLINE void multiply_column(const ari_register_tile *p, size_t tiles, const size_t vectors, const bool narrow)
{
    ari_register_tile r = *p;
    tile_sums m = {.tile = {.sums = NULL}};
    const size_t pairs = r.terms / 2, left_words = pairs * ROWS, right_words = pairs * vectors * LANES;
    const uint32_t *a = r.left_panel, *b = r.right_panel;
    for (size_t i = 0; i < tiles; i++) {
        prefetch_sums(&r, vectors);
        multiply_plane(m.plane[0], a, b, &r, BIAS, vectors, OVERLAPPED ? &m : NULL, narrow);
        m.tile = r;
        multiply_plane(m.plane[1], narrow ? a : a + left_words, b + right_words, &r, BIAS, vectors, NULL, narrow);
        if (!narrow)
            multiply_plane(m.plane[2], a + 2 * left_words, b + 2 * right_words, &r, 0, vectors, NULL, narrow);
        for (size_t row = 0; !OVERLAPPED && row < ROWS; row++)
            flush_row(&m, row, vectors, narrow);
        a += left_words * (narrow ? 1 : PLANES);
        next_tile(&r);
    }
    for (size_t row = 0; OVERLAPPED && row < ROWS; row++)
        flush_row(&m, row, vectors, narrow);
}

K16_INLINE void multiply_any(const ari_register_tile *r, size_t tiles, const bool narrow)
{
    if (r->cols == LANES)
        multiply_column(r, tiles, 1, narrow);
    else if (r->cols == 2 * LANES)
        multiply_column(r, tiles, 2, narrow);
#if K16_VECTORS == 3
    else
        multiply_column(r, tiles, 3, narrow);
#endif
}

K16 static void multiply_tiles(const ari_panel_kernel *kernel, const ari_register_tile *r, size_t tiles)
{
    (void)kernel;
    multiply_any(r, tiles, false);
}

K16 static void multiply_narrow_tiles(const ari_panel_kernel *kernel, const ari_register_tile *r, size_t tiles)
{
    (void)kernel;
    multiply_any(r, tiles, true);
}

static const ari_panel_kernel kernel = {.rows = ROWS,
                                        .cols = WIDTH,
                                        .lanes = LANES,
                                        .left_bytes = PLANES * sizeof(int16_t),
                                        .right_bytes = PLANES * sizeof(int16_t),
                                        .step = 8,
                                        .slice = SLICE,
                                        .block = BLOCK,
                                        .near_rows = NEAR_ROWS,
                                        .near_cols = NEAR_COLS,
                                        .pack_left = pack_left,
                                        .pack_right = pack_right,
                                        .multiply_column = multiply_tiles,
                                        .rounds = ROUNDS(false)};

static const ari_panel_kernel narrow_kernel = {.rows = ROWS,
                                               .cols = WIDTH,
                                               .lanes = LANES,
                                               .left_bytes = sizeof(int16_t),
                                               .right_bytes = 2 * sizeof(int16_t),
                                               .step = 16,
                                               .slice = NARROW_SLICE,
                                               .block = NARROW_BLOCK,
                                               .near_rows = NEAR_ROWS,
                                               .near_cols = NEAR_COLS,
                                               .pack_left = pack_left_narrow,
                                               .pack_right = pack_right_narrow,
                                               .multiply_column = multiply_narrow_tiles,
                                               .rounds = ROUNDS(true)};

static void plan_tile(ari_tile_plan *p, size_t k)
{
    ari_panels_plan(p->narrow ? &narrow_kernel : &kernel, p, k);
}

static bool is_supported(void)
{
    return ari_cpu_has(K16_FEATURES);
}

const ari_exact_path K16_PATH = {
    ARI_PANEL_PATH,    .name = K16_NAME,  .requirement = K16_NEEDS, .supported = is_supported,
    .rows = TILE_ROWS, .cols = TILE_COLS, .col_step = 48, /* multiples of whole panels, whatever their width */
    .plan = plan_tile};
