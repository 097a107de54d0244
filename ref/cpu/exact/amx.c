/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/size.h"
#include "ref/cpu/device.h"
#include "ref/cpu/exact/sums.h"
#include "ref/numerics/digits.h"

#if ARI_HAVE_X86_PATHS
#include <immintrin.h>
#include <string.h>
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

/* The integer sums of a contraction by ten products of int8 (ref/numerics/digits.h) with Intel's AMX. TDPBSSD
 * multiplies a tile of 16 rows by 64 terms with one of 64 terms by 16 columns, in which 4 terms of a column are side by
 * side, and adds the products to 16 by 16 int32. A register tile is two of them by two: of the eight tiles four are
 * sums, two are of the left panel and two of the right.
 *
 * Tiles multiply faster than anything feeds them: a step of four products takes as long as 90 vector operations or 32
 * lines from the second cache level, and one whose tiles come from the third takes six times as long. So the right
 * operand is packed once a product, as its four planes of digits; a block of 96 rows of the left one lies in the second
 * level in eight planes, which are the digits and the sums of two; and for each panel of 32 columns all row panels take
 * one plane after the other, which stays in the first level. Sums of a slice are int32, put together at its end. */
#define AMX_TARGET "amx-tile,amx-int8,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi"
#define AMX __attribute__((target(AMX_TARGET)))
#define AMX_INLINE static inline __attribute__((always_inline, target(AMX_TARGET)))

#define TILE ((size_t)16) /* rows of a tile, and columns of int32 */
#define DEPTH ((size_t)64)
#define PIECE (TILE * DEPTH) /* bytes of a tile */
#define SIDE (2 * TILE)      /* rows and columns of a register tile */
#define STEP (SIDE * DEPTH)  /* bytes of a panel's plane for DEPTH terms */
#define DIGITS ((size_t)4)
#define NARROW ((size_t)2) /* digits and planes of narrow integers: |q| <= 32639, q = d0 + d1*2^8 */

/* Measured on a Sapphire Rapids: 128 rows take 6 to 12 % longer, and slices of 1024 terms 10 %. */
#define TILE_ROWS ((size_t)96)
#define TILE_COLS ((size_t)1024)
#define SLICE ((size_t)768)
/* Shorter sums are packed and put together for longer than they are multiplied. */
#define LEAST_TERMS ((size_t)128)

/* The planes: digits, sums within each half of an integer, sums across the halves. */
enum { D0, D1, D2, D3, D01, D23, D02, D13, PLANES };
/* Planes whose products are summed. If two planes differ, a sum also has their product with the sides exchanged. A
 * plane comes soon after the planes that it is the sum of. */
enum { SUMS = 9 };
static const struct product {
    size_t left_plane, right_plane, sum;
} products[SUMS] = {{D0, D0, 0}, {D1, D1, 1},   {D01, D01, 4}, {D3, D3, 3},  {D13, D13, 8},
                    {D2, D2, 2}, {D02, D02, 7}, {D23, D23, 5}, {D02, D13, 6}};
/* Number of sums for narrow integers, which add both mixed products in one. */
enum { NARROW_SUMS = 3 };
static const struct product narrow_products[NARROW_SUMS] = {{D0, D0, 0}, {D0, D1, 1}, {D1, D1, 2}};
#define SUMS_ROW \
    (SUMS * SIDE) /* int32 values in a row of a register tile: those of the first sum, then of the second, .. */

typedef uint8_t bytes __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint64_t wides __attribute__((vector_size(64)));
typedef int64_t signed_wides __attribute__((vector_size(64)));

typedef struct workspace {
    int64_t *sums; /* [tile_rows, sums_ld] */
    int8_t *left;  /* a slice in panels of SIDE rows: [panel][plane][terms/DEPTH][two tiles] */
    int8_t *right; /* the sums of two digits of this panel of columns and the next, of the same form */
    int32_t *parts;
    size_t words;
} workspace;

static workspace workspace_at(const ari_tile_plan *p, void *memory)
{
    enum { WORD = sizeof(int64_t) };
    const size_t rows = ari_round_up(p->tile_rows, SIDE), sums = rows * ari_sums_ld(p);
    const size_t left_words = rows * PLANES * p->slice / WORD,
                 right_words = 2 * SIDE * (PLANES - DIGITS) * p->slice / WORD;
    workspace w = {.sums = memory, .words = sums + left_words + right_words + rows * SUMS_ROW * sizeof(int32_t) / WORD};
    if (memory) {
        w.left = (int8_t *)(w.sums + sums);
        w.right = (int8_t *)(w.sums + sums + left_words);
        w.parts = (int32_t *)(void *)(w.sums + sums + left_words + right_words);
    }
    return w;
}

static void plan_tile(ari_tile_plan *p, size_t k)
{
    const size_t slices = ari_ceil_div(k, SLICE);
    p->slice = slices > 0 ? ari_round_up(ari_ceil_div(k, slices), DEPTH) : 0;
    p->path = workspace_at(p, NULL).words;
    p->direct = false;
    p->panel = SIDE * (p->narrow ? NARROW : DIGITS) * ari_round_up(k, DEPTH) / sizeof(int64_t);
}

/* --- panels ------------------------------------------------------------------------------------------------------- */

/* Computes the digits of DEPTH integers, `count` of each, with offsets subtracted modulo 2^8. A 64-bit lane holds two
 * integers, and a byte of the result is 8 bits of a lane from any bit on: those of vector v become bytes 2v and 2v + 1
 * of each lane. So terms are not in order, but both operands have the same order. */
AMX_INLINE void digits_of(bytes *digits, const int32_t *q, const size_t count)
{
    const bool narrow = count == NARROW;
    const size_t bits = narrow ? 8 : 7;
    words u[4];
    memcpy(u, q, sizeof u);
    for (size_t v = 0; v < 4; v++)
        u[v] += narrow ? 128 : ARI_DIGITS_OFFSET;
    for (size_t i = 0; i < count; i++) {
        const wides bit_offsets = (wides){0} + ((uint64_t)(bits * i | (32 + bits * i) << 8) * 0x0001000100010001u);
        __m512i x = (__m512i)(wides){0};
        for (size_t v = 0; v < 4; v++)
            x = _mm512_mask_multishift_epi64_epi8(x, 0x0303030303030303u << 2 * v, (__m512i)bit_offsets, (__m512i)u[v]);
        digits[i] = narrow ? (bytes)x - (uint8_t)(i == D0 ? 128 : 0) : ((bytes)x & 127) - (uint8_t)(i == D3 ? 16 : 64);
    }
}

/* Computes the digits of a row's terms from k on, zeros beyond the end, and prefetches the following ones. */
AMX_INLINE void digits_at(bytes *digits, const ar_packed *p, size_t matrix_index, size_t row, size_t k,
                          const size_t count)
{
    const size_t width = ari_packed_width(count == NARROW);
    int32_t part[DEPTH] = {0};
    int16_t narrow[DEPTH];
    const void *q = part;
    if (row < p->rows) {
        q = ari_packed_at(p, matrix_index, row, k);
        for (size_t i = 0; i < width; i++)
            __builtin_prefetch((const void *)((uintptr_t)q + DEPTH * (width + i)), 0, 3);
        if (p->k - k < DEPTH) {
            memcpy(part, q, (p->k - k) * width);
            q = part;
        }
    }
    if (count == NARROW) {
        memcpy(narrow, q, sizeof narrow);
        for (size_t i = 0; i < DEPTH; i++)
            part[i] = narrow[i];
        q = part;
    }
    digits_of(digits, q, count);
}

AMX_INLINE void pack_left_as(int8_t *panel, const ari_tile *t, size_t row, size_t k, size_t terms, const bool narrow)
{
    for (size_t term = 0; term < terms; term += DEPTH)
        for (size_t i = 0; i < SIDE; i++) {
            bytes x[PLANES];
            digits_at(x, t->a, t->matrix, t->row + row + i, k + term, narrow ? NARROW : DIGITS);
            if (!narrow) {
                x[D01] = x[D0] + x[D1];
                x[D23] = x[D2] + x[D3];
                x[D02] = x[D0] + x[D2];
                x[D13] = x[D1] + x[D3];
            }
            for (size_t plane = 0; plane < (narrow ? NARROW : PLANES); plane++)
                memcpy(panel + (plane * terms + term) * SIDE + i * DEPTH, &x[plane], DEPTH);
        }
}

AMX static void pack_left(int8_t *panel, const ari_tile *t, size_t row, size_t k, size_t terms)
{
    if (t->plan->narrow)
        pack_left_as(panel, t, row, k, terms, true);
    else
        pack_left_as(panel, t, row, k, terms, false);
}

/* Exchanges the upper right and the lower left quarter of every block of 2*side by 2*side words. `side` is a constant
 * after inlining. */
AMX_INLINE void exchange(words x[TILE], const uint32_t side)
{
    words low, high;
#pragma GCC unroll 16
    for (uint32_t lane = 0; lane < TILE; lane++) {
        low[lane] = lane & side ? (uint32_t)TILE + lane - side : lane;
        high[lane] = lane & side ? (uint32_t)TILE + lane : lane + side;
    }
#pragma GCC unroll 16
    for (size_t i = 0; i < TILE; i++)
        if (!(i & side)) {
            const __m512i a = (__m512i)x[i], b = (__m512i)x[i + side];
            x[i] = (words)_mm512_permutex2var_epi32(a, (__m512i)low, b);
            x[i + side] = (words)_mm512_permutex2var_epi32(a, (__m512i)high, b);
        }
}

AMX_INLINE void transpose(words out[TILE], const words input[TILE])
{
    words x[TILE];
    for (size_t i = 0; i < TILE; i++)
        x[i] = input[i];
    exchange(x, 8);
    exchange(x, 4);
    exchange(x, 2);
    exchange(x, 1);
    for (size_t i = 0; i < TILE; i++)
        out[i] = x[i];
}

/* Returns the column in lane `lane` of an int32 vector. Sums of even and of odd lanes become int64 vectors, so these
 * belong to adjacent columns. */
static size_t column_of(size_t lane)
{
    return lane % 2 * (TILE / 2) + lane / 2;
}

AMX_INLINE void pack_right_as(void *panel, const ar_packed *b, size_t matrix_index, size_t row, const size_t count)
{
    const size_t plane = ari_round_up(b->k, DEPTH) * SIDE;
    words x[DIGITS][TILE];
    bytes digits[DIGITS];
    for (size_t k = 0; k < b->k; k += DEPTH)
        for (size_t half = 0; half < SIDE; half += TILE) {
            for (size_t i = 0; i < TILE; i++) {
                digits_at(digits, b, matrix_index, row + half + column_of(i), k, count);
                for (size_t d = 0; d < count; d++)
                    x[d][i] = (words)digits[d];
            }
            for (size_t d = 0; d < count; d++) {
                words out[TILE];
                transpose(out, x[d]);
                memcpy((int8_t *)panel + d * plane + (k * SIDE + half * DEPTH), out, PIECE);
            }
        }
}

AMX static void pack_right(void *panel, const ar_packed *b, size_t matrix_index, size_t row)
{
    if (b->narrow)
        pack_right_as(panel, b, matrix_index, row, NARROW);
    else
        pack_right_as(panel, b, matrix_index, row, DIGITS);
}

/* Panel of columns of the right operand, one slice: packed digits, and sums of two in the workspace. */
typedef struct right_panel {
    const int8_t *plane[PLANES];
    int8_t *sums;
    size_t bytes, filled; /* bytes of a plane; bytes of the planes of sums */
} right_panel;

/* The next 64 bytes of the planes of sums. */
AMX_INLINE void add_digits(right_panel *r)
{
    bytes x[DIGITS], y[PLANES - DIGITS];
    for (size_t i = 0; i < DIGITS; i++)
        memcpy(&x[i], r->plane[i] + r->filled, sizeof x[i]);
    y[0] = x[D0] + x[D1];
    y[1] = x[D2] + x[D3];
    y[2] = x[D0] + x[D2];
    y[3] = x[D1] + x[D3];
    for (size_t i = 0; i < PLANES - DIGITS; i++)
        memcpy(r->sums + i * r->bytes + r->filled, &y[i], sizeof y[i]);
    r->filled += sizeof(bytes);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* Tile configuration in the processor's format. All tiles have 16 rows of 64 bytes. */
typedef struct tile_configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_configuration;

static const tile_configuration configuration = {
    .palette = 1, .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

/* Adds the products of two planes of panels to the four tiles of sums. Meanwhile prefetches the next panel and computes
 * its sums of digits. */
AMX_INLINE void add_products(const int8_t *left, const int8_t *right, size_t terms, right_panel *next_panel)
{
    for (size_t k = 0; k < terms; k += DEPTH) {
        _tile_loadd(4, left, DEPTH);
        _tile_loadd(6, right, DEPTH);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, right + PIECE, DEPTH);
        _tile_dpbssd(1, 4, 7);
        _tile_loadd(5, left + PIECE, DEPTH);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        if (next_panel->filled < next_panel->bytes)
            add_digits(next_panel);
        left += STEP;
        right += STEP;
    }
}

/* Computes one of the sums of `rows` rows of the left panels with their planes, and a panel of columns. */
AMX static void make_sum(const workspace *w, const right_panel *right, right_panel *next_panel, const struct product *p,
                         size_t rows, size_t terms, size_t planes)
{
    const size_t l = p->left_plane, r = p->right_plane, row = SUMS_ROW * sizeof(int32_t);
    for (size_t i = 0; i < rows; i += SIDE) {
        const int8_t *left = w->left + i * planes * terms;
        int32_t *dst = w->parts + i * SUMS_ROW + p->sum * SIDE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        add_products(left + l * SIDE * terms, right->plane[r], terms, next_panel);
        if (l != r)
            add_products(left + r * SIDE * terms, right->plane[l], terms, next_panel);
        _tile_stored(0, dst, row);
        _tile_stored(1, dst + TILE, row);
        _tile_stored(2, dst + TILE * SUMS_ROW, row);
        _tile_stored(3, dst + TILE * SUMS_ROW + TILE, row);
    }
}

/* The int32 of even lanes, and of odd lanes, times 2^by, as int64. */
AMX_INLINE wides even(words x, int shift)
{
    return (wides)((signed_wides)((wides)x << 32) >> (32 - shift));
}

AMX_INLINE wides odd(words x, int shift)
{
    return (wides)((signed_wides)((wides)x & ~(uint64_t)UINT32_MAX) >> (32 - shift));
}

/* S = sum over w of D_w*2^7w, where D_w is the sum of the products of digits i and j with i + j = w. The D_w are
 * computed from the sums of products, modulo 2^32, and
 *    low = D0 + D1*2^7,  mid = D2 + D3*2^7,  high = D4 + D5*2^7,  S = low + mid*2^14 + high*2^28 + D6*2^42.
 * One term contributes at most 2^12 + 2*2^12*2^7 in magnitude to low, 3*2^12 + (2*2^12 + 2*2^10)*2^7 to mid, and less
 * to high. All are below 2^21 - 2^19, so 1024 terms fit in int32. */
_Static_assert(SLICE <= 1024 && SLICE % DEPTH == 0, "sums of a slice fit int32");

/* Folds a row of a panel of columns; `add` is a constant after inlining. */
AMX_INLINE void fold_row(int64_t *sums, const int32_t *of_products, const bool add)
{
    for (size_t j = 0; j < SIDE; j += TILE) {
        words p[SUMS];
        for (size_t i = 0; i < SUMS; i++)
            memcpy(&p[i], of_products + i * SIDE + j, sizeof p[i]);
        const words d1 = p[4] - p[0] - p[1], d5 = p[5] - p[2] - p[3], d3 = p[6] - d1 - d5;
        const words d2 = p[7] - p[0] - p[2] + p[1], d4 = p[8] - p[1] - p[3] + p[2];
        const words low = p[0] + (d1 << 7), mid = d2 + (d3 << 7), high = d4 + (d5 << 7);
        wides s[2] = {{0}, {0}};
        if (add)
            memcpy(s, sums + j, sizeof s);
        s[0] += even(low, 0) + even(mid, 14) + even(high, 28) + ((wides)p[3] << 42);
        s[1] += odd(low, 0) + odd(mid, 14) + odd(high, 28) + ((wides)p[3] >> 32 << 42);
        memcpy(sums + j, s, sizeof s);
    }
}

/* Folds a row of narrow integers: S = D0 + D1*2^8 + D2*2^16; int32 holds 2^15 terms of each. */
AMX_INLINE void fold_narrow_row(int64_t *sums, const int32_t *of_products, const bool add)
{
    for (size_t j = 0; j < SIDE; j += TILE) {
        words p[NARROW_SUMS];
        for (size_t i = 0; i < NARROW_SUMS; i++)
            memcpy(&p[i], of_products + i * SIDE + j, sizeof p[i]);
        wides s[2] = {{0}, {0}};
        if (add)
            memcpy(s, sums + j, sizeof s);
        s[0] += even(p[0], 0) + even(p[1], 8) + even(p[2], 16);
        s[1] += odd(p[0], 0) + odd(p[1], 8) + odd(p[2], 16);
        memcpy(sums + j, s, sizeof s);
    }
}

AMX static void fold(int64_t *sums, size_t ld, const int32_t *of_products, size_t rows, bool narrow, bool add)
{
    for (size_t i = 0; i < rows; i++)
        if (narrow)
            fold_narrow_row(sums + i * ld, of_products + i * SUMS_ROW, add);
        else if (add)
            fold_row(sums + i * ld, of_products + i * SUMS_ROW, true);
        else
            fold_row(sums + i * ld, of_products + i * SUMS_ROW, false);
}

/* Returns the panel of the tile's columns from `col` on, an empty one beyond the end. Every second panel uses the same
 * memory. */
static right_panel panel_of(const workspace *w, const ari_tile *t, size_t col, size_t k, size_t terms)
{
    const size_t plane = SIDE * terms, number = col / SIDE, digits = t->plan->narrow ? NARROW : DIGITS;
    right_panel r = {.sums = w->right + number % 2 * (PLANES - DIGITS) * plane,
                     .bytes = col < t->cols && !t->plan->narrow ? plane : 0};
    for (size_t i = DIGITS; i < PLANES; i++)
        r.plane[i] = r.sums + (i - DIGITS) * plane;
    for (size_t i = 0; i < digits && col < t->cols; i++)
        r.plane[i] =
            (const int8_t *)ari_tile_panel(t, t->col / SIDE + number) + (i * ari_round_up(t->b->k, DEPTH) + k) * SIDE;
    return r;
}

AMX static void multiply_slice(const workspace *w, const ari_tile *t, size_t k, size_t terms, bool add)
{
    const bool narrow = t->plan->narrow;
    right_panel next_panel = panel_of(w, t, 0, k, terms);
    for (size_t j = 0; j < t->cols; j += SIDE) {
        while (next_panel.filled < next_panel.bytes)
            add_digits(&next_panel);
        const right_panel right = next_panel;
        next_panel = panel_of(w, t, j + SIDE, k, terms);
        for (size_t i = 0; i < (narrow ? NARROW_SUMS : SUMS); i++)
            make_sum(w, &right, &next_panel, &(narrow ? narrow_products : products)[i], t->rows, terms,
                     narrow ? NARROW : PLANES);
        fold(w->sums + j, ari_sums_ld(t->plan), w->parts, t->rows, narrow, add);
    }
}

AMX static void sum_tile(const ari_tile *t, size_t begin, size_t end)
{
    const workspace w = workspace_at(t->plan, t->words);
    if (begin == end)
        memset(w.sums, 0, t->rows * ari_sums_ld(t->plan) * sizeof *w.sums);
    _tile_loadconfig(&configuration);
    for (size_t k = begin; k < end; k += t->plan->slice) {
        const size_t terms = ari_round_up(end - k < t->plan->slice ? end - k : t->plan->slice, DEPTH);
        for (size_t i = 0; i < t->rows; i += SIDE)
            pack_left(w.left + i * (t->plan->narrow ? NARROW : PLANES) * terms, t, i, k, terms);
        multiply_slice(&w, t, k, terms, k > begin);
    }
    _tile_release();
}

/* Returns true if the processor has the tiles and Linux lets this process use them. Their registers are large, so a
 * process must ask; asking again changes nothing. */
static bool is_supported(void)
{
#if defined(__x86_64__) && defined(__linux__)
    const long request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM of <asm/prctl.h>, a bit of XCR0 */
    return ari_cpu_has("amx_int8 avx512f avx512bw avx512dq avx512vl avx512vbmi") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

const ari_exact_path ari_exact_amx = {ARI_SUMS_PATH,
                                      .name = "amx",
                                      .requirement = "AMX-INT8 and AVX-512 VBMI, or the system refuses it",
                                      .supported = is_supported,
                                      .rows = TILE_ROWS,
                                      .cols = TILE_COLS,
                                      .col_step = SIDE,
                                      .least_terms = LEAST_TERMS,
                                      .plan = plan_tile,
                                      .pack = pack_right,
                                      .sum = sum_tile};
#endif
