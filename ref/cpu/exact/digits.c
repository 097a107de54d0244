/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/exact/digits.h"

#include <string.h>

#include "ref/numerics/digits.h"

/* --- panels ------------------------------------------------------------------------------------------------------- */

#define CHUNK ARI_DIGIT_CHUNK

/* Planes, and the two planes of each of the ten products: digits, sums within each half of q, sums across the
 * halves. */
enum { D0, D1, D2, D3, D01, D23, D02, D13 };
static const struct pair {
    size_t left_plane, right_plane;
} products[] = {{D0, D0},   {D1, D1},   {D2, D2},   {D3, D3},   {D01, D01},
                {D23, D23}, {D02, D13}, {D13, D02}, {D02, D02}, {D13, D13}};
_Static_assert(sizeof products / sizeof products[0] == ARI_DIGIT_PRODUCTS, "one row for each product");

/* Digits of narrow integers. */
enum { LOW, HIGH };
static const struct pair narrow_products[] = {{LOW, LOW}, {LOW, HIGH}, {HIGH, LOW}, {HIGH, HIGH}};

/* A loop over single terms would do, were compilers to make vectors of it. */
typedef uint32_t words __attribute__((vector_size(CHUNK * sizeof(uint32_t))));
typedef uint16_t halves __attribute__((vector_size(CHUNK * sizeof(uint16_t))));
typedef uint8_t bytes __attribute__((vector_size(CHUNK)));

/* Computes the planes of CHUNK terms with ari_digit, subtracting the offsets modulo 2^8. */
static inline void planes_of(bytes planes[ARI_DIGIT_PLANES], const void *q)
{
    words u;
    memcpy(&u, q, sizeof u);
    u += ARI_DIGITS_OFFSET;
    const halves low = __builtin_convertvector(u, halves) & 16383, high = __builtin_convertvector(u >> 14, halves);
    planes[D0] = __builtin_convertvector(low & 127, bytes) - 64;
    planes[D1] = __builtin_convertvector(low >> 7, bytes) - 64;
    planes[D2] = __builtin_convertvector(high & 127, bytes) - 64;
    planes[D3] = __builtin_convertvector(high >> 7, bytes) - 16;
    planes[D01] = planes[D0] + planes[D1];
    planes[D23] = planes[D2] + planes[D3];
    planes[D02] = planes[D0] + planes[D2];
    planes[D13] = planes[D1] + planes[D3];
}

/* q = high*2^8 + low, -128 <= low <= 127. */
static inline void narrow_planes_of(bytes planes[ARI_DIGIT_PLANES_NARROW], const void *q)
{
    halves u;
    memcpy(&u, q, sizeof u);
    planes[LOW] = __builtin_convertvector(u, bytes);
    planes[HIGH] = __builtin_convertvector((u + 128) >> 8, bytes);
}

/* Terms [k, k + CHUNK) of row `row` of every plane, in pieces that are side by side. */
static inline void store_planes(int8_t *panel, size_t plane, const bytes *src, size_t planes, size_t rows, size_t group,
                                size_t row, size_t k)
{
    for (size_t p = 0; p < planes; p++)
        for (size_t t = 0; t < CHUNK; t += group)
            memcpy(panel + p * plane + (k + t) * rows + row * group, (const char *)&src[p] + t, group);
}

/* The number of planes and `group` are constants after inlining. */
static inline void pack_rows(int8_t *panel, const ari_panel_rows *s, size_t terms, size_t rows, size_t count,
                             size_t group, size_t step)
{
    const size_t padded_terms = (terms + step - 1) / step * step;
    bytes planes[ARI_DIGIT_PLANES];
    int32_t q[CHUNK];
    for (size_t row = 0; row < rows; row++)
        for (size_t k = 0; k < padded_terms; k += CHUNK) {
            const void *src = ari_panel_rows_at(s, row, k);
            if (row >= s->rows || k + CHUNK > terms) {
                memset(q, 0, sizeof q);
                if (row < s->rows && k < terms)
                    memcpy(q, src, (terms - k) * s->width);
                src = q;
            }
            if (count == ARI_DIGIT_PLANES)
                planes_of(planes, src);
            else
                narrow_planes_of(planes, src);
            store_planes(panel, rows * padded_terms, planes, count, rows, group, row, k);
        }
}

ARI_SIMD static void pack_panel(void *panel, const ari_panel_rows *s, size_t terms, size_t rows, size_t planes,
                                size_t group, size_t step)
{
    if (planes == ARI_DIGIT_PLANES_NARROW)
        pack_rows(panel, s, terms, rows, ARI_DIGIT_PLANES_NARROW, group, step);
    else if (group == 4)
        pack_rows(panel, s, terms, rows, ARI_DIGIT_PLANES, 4, step);
    else
        pack_rows(panel, s, terms, rows, ARI_DIGIT_PLANES, 8, step);
}

void ari_digits_pack_left(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    pack_panel(panel, s, terms, kernel->rows, kernel->left_bytes, kernel->left_group, kernel->step);
}

void ari_digits_pack_right(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms)
{
    pack_panel(panel, s, terms, kernel->cols, kernel->right_bytes, kernel->right_group, kernel->step);
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* S = sum over w of D_w*2^7w, where D_w is the sum of the products of digits i and j with i + j = w. The D_w are
 * computed from the ten sums, modulo 2^32, and each of
 *    low = D0 + D1*2^7,  mid = D2 + D3*2^7,  high = D4 + D5*2^7 + D6*2^14,  S = low + mid*2^14 + high*2^28,
 * fits in int32. One term contributes at most 2^12 + 2*2^12*2^7 < 2^21 in magnitude to low, and at most 3*2^12 +
 * (2*2^12 + 2*2^10)*2^7 < 2^21 to mid. Its contribution to high is h*h' + d1*d3' + d3*d1', where h = d2 + d3*2^7 is the
 * integer nearest to q/2^14 or next to it, at most 2^11, so it is below 2^22 + 2^12, and 448 terms stay below 2^31. The
 * ten sums themselves are exact for 131071 terms. */
_Static_assert(ARI_DIGIT_SLICE *((1 << 22) + (1 << 12)) < (size_t)1 << 31, "the upper digits fit int32");

/* `add` is a constant after inlining. */
static inline void fold(int64_t *restrict sums, const int32_t *restrict of_products, size_t tile, size_t n, bool add)
{
    const uint32_t *restrict p = (const uint32_t *)of_products;
    for (size_t j = 0; j < n; j++) {
        const uint32_t p0 = p[j], p1 = p[tile + j], p2 = p[2 * tile + j], p3 = p[3 * tile + j];
        const uint32_t d1 = p[4 * tile + j] - p0 - p1, d5 = p[5 * tile + j] - p2 - p3;
        const uint32_t d3 = p[6 * tile + j] + p[7 * tile + j] - d1 - d5;
        const uint32_t d2 = p[8 * tile + j] - p0 - p2 + p1, d4 = p[9 * tile + j] - p1 - p3 + p2;
        const int32_t low = (int32_t)(p0 + (d1 << 7)), mid = (int32_t)(d2 + (d3 << 7));
        const int32_t high = (int32_t)(d4 + (d5 << 7) + (p3 << 14));
        const int64_t sum = low + mid * ((int64_t)1 << 14) + high * ((int64_t)1 << 28);
        sums[j] = add ? sums[j] + sum : sum;
    }
}

/* Folds a row of a register tile's sums from those of its ten products, which are `tile` apart. */
ARI_SIMD static void fold_row(int64_t *restrict sums, const int32_t *restrict of_products, size_t tile, size_t n,
                              bool add)
{
    if (add)
        fold(sums, of_products, tile, n, true);
    else
        fold(sums, of_products, tile, n, false);
}

/* Does the same for narrow integers, of which 448 terms of any of the four products stay below 2^24. */
ARI_SIMD static void fold_narrow_row(int64_t *restrict sums, const int32_t *restrict p, size_t tile, size_t n, bool add)
{
    for (size_t j = 0; j < n; j++) {
        const int64_t mid = p[tile + j] + p[2 * tile + j];
        sums[j] = (add ? sums[j] : 0) + p[j] + mid * (1 << 8) + p[3 * tile + j] * ((int64_t)1 << 16);
    }
}

void ari_digits_multiply(const ari_panel_kernel *kernel, const ari_register_tile *r)
{
    int32_t sums[ARI_DIGIT_PRODUCTS * ARI_DIGIT_TILE];
    const bool narrow = kernel->left_bytes == ARI_DIGIT_PLANES_NARROW;
    const size_t tile = kernel->rows * kernel->cols;
    const size_t count = narrow ? sizeof narrow_products / sizeof narrow_products[0] : ARI_DIGIT_PRODUCTS;
    const struct pair *p = narrow ? narrow_products : products;
    const int8_t *left = r->left_panel, *right = r->right_panel;
    for (size_t i = 0; i < count; i++)
        kernel->product(sums + i * tile, left + p[i].left_plane * kernel->rows * r->terms,
                        right + p[i].right_plane * kernel->cols * r->terms, r->terms);
    for (size_t row = 0; row < kernel->rows; row++)
        (narrow ? fold_narrow_row : fold_row)(r->sums + row * r->ld, sums + row * kernel->cols, tile, kernel->cols,
                                              r->add);
}
