/* SPDX-License-Identifier: Apache-2.0 */
/* Computes C[i,j] = round(sum over k of A[i,k]*B[j,k]): in integers, as numerics.md section 2 defines it, or one term
 * after the other. */
#include "ref/baseline/run.h"

#include <math.h>
#include <string.h>

#include "ref/numerics/elementary.h"

__extension__ typedef __int128 wide;

/* Sizes of tiles and panels. A tile of C is ROWS x PANEL sums that stay in registers while k runs. Matrices are split
 * into panels of PANEL adjacent rows, [k][PANEL], the last one padded with zeros. BAND panels of B are multiplied with
 * all of A. */
enum { ROWS = 4, PANEL = ARI_BL_PANEL, BAND = 4, BLOCK = 8191, MOST_NARROW = 16384 };

/* Computes sum[i][j] = ((a_i0*b_j0 + a_i1*b_j1) + a_i2*b_j2) + .. with k as the outer loop, so that each sum adds its
 * terms in the same order as three nested loops over i, j and k. */
#define TILE(name, number, element)                                                                                    \
    ARI_SIMD static void name(number sum[ROWS][PANEL], const element *restrict a, const element *restrict b, size_t k) \
    {                                                                                                                  \
        number s[ROWS][PANEL] = {{0}};                                                                                 \
        for (size_t kk = 0; kk < k; kk++)                                                                              \
            for (size_t j = 0; j < PANEL; j++)                                                                         \
                for (size_t i = 0; i < ROWS; i++)                                                                      \
                    s[i][j] += (number)a[kk * PANEL + i] * (number)b[kk * PANEL + j];                                  \
        memcpy(sum, s, sizeof s);                                                                                      \
    }
TILE(tile_of_integers, int64_t, int32_t)
TILE(tile_of_floats, float, float)
TILE(tile_of_doubles, double, double)

/* --- exact: numerics.md section 2, step by step ------------------------------------------------------------------- */

/* Step 2: the number of bits of the integers, and the largest integer. */
typedef struct width {
    int32_t p, limit;
} width;

static width width_of(const ari_bl_run *run, size_t k, int flags)
{
    const width of_fp32 = {25, (1 << 25) - 1}, of_bf16 = {15, 127 * 256 + 127};
    const bool narrow = flags & ARI_BL_WEIGHT ? !(flags & ARI_BL_PEAKED) : k <= MOST_NARROW;
    return run->o->bf16 && narrow ? of_bf16 : of_fp32;
}

/* Returns |x| as an integer with the order of |x|; NaN and infinity are the largest. */
static inline uint64_t magnitude_of(double x)
{
    return ari_bits64(x) & 0x7fffffffffffffffu;
}

static inline uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* largest[kk] = max over j of |B[j,kk]|. */
ARI_SIMD static void column_maxima(uint64_t *restrict largest, size_t n, size_t k, ari_bl_matrix b)
{
    for (size_t j = 0; b.col == 1 && j < n; j++)
        for (size_t kk = 0; kk < k; kk++)
            largest[kk] = larger(largest[kk], magnitude_of(b.data[j * b.row + kk]));
    for (size_t kk = 0; b.col != 1 && kk < k; kk++)
        for (size_t j = 0; j < n; j++)
            largest[kk] = larger(largest[kk], magnitude_of(b.data[j * b.row + kk * b.col]));
}

/* Step 0: computes c[kk], the smallest integer with |B[j,kk]| < 2^c for all j; ARI_EXP_ZERO if the column is all zero,
 * 0 if it holds NaN or infinity. */
static ar_status column_exponents(ari_bl_run *run, int32_t *c, size_t n, size_t k, ari_bl_matrix b)
{
    ARI_BL_SCOPE(run);
    uint64_t *largest = ari_bl_take(run, k, 1, sizeof *largest);
    AR_TRY(run->memory);
    column_maxima(largest, n, k, b);
    for (size_t kk = 0; kk < k; kk++) {
        c[kk] = ari_exponent64(ari_float64(largest[kk]));
        if (c[kk] == ARI_EXP_NONFINITE)
            c[kk] = 0;
    }
    return AR_OK;
}

/* Steps 0, 1 and 3 for the rows x of a panel: x' = x*2^(sign*c), e with |x'| < 2^e, q = clamp(rint(x'*2^(p - e))), and
 * unit = 2^(e - p), the value of one step of q; NaN if a row is not finite. Against an all-zero column x' is 0, unless
 * x is not finite. The values are fp32 values, so no power of two here leaves the range of binary64. */
ARI_SIMD static void quantise(int32_t *restrict q, double unit[PANEL], double *restrict x, size_t k,
                              const int32_t *restrict c, int sign, width w)
{
    uint64_t largest[PANEL] = {0};
    double scale[PANEL];
    for (size_t kk = 0; kk < k; kk++) {
        const double factor = c[kk] == ARI_EXP_ZERO ? 0.0 : ari_pow2(sign * c[kk]);
        for (size_t r = 0; r < PANEL; r++) { /* NaN and infinity times 0 are NaN */
            x[kk * PANEL + r] *= factor;
            largest[r] = larger(largest[r], magnitude_of(x[kk * PANEL + r]));
        }
    }
    for (size_t r = 0; r < PANEL; r++) {
        int32_t e = ari_exponent64(ari_float64(largest[r]));
        const bool finite = e != ARI_EXP_NONFINITE;
        e = e == ARI_EXP_ZERO || !finite ? 0 : e;
        /* With fewer than 25 bits no value is clamped: e is one larger if the largest value would round to more than
         * the limit. */
        if (finite && w.p < 25 && ari_float64(largest[r]) * ari_pow2(w.p - e) >= (double)w.limit + 0.5)
            e++;
        scale[r] = finite ? ari_pow2(w.p - e) : 0.0;
        unit[r] = finite ? ari_pow2(e - w.p) : (double)ari_nan32();
    }
    for (size_t kk = 0; kk < k; kk++)
        for (size_t r = 0; r < PANEL; r++) {
            const double y = scale[r] == 0.0 ? 0.0 : x[kk * PANEL + r] * scale[r], rounded = ari_rint(y);
            q[kk * PANEL + r] = (int32_t)(rounded > w.limit ? w.limit : rounded < -w.limit ? -w.limit : rounded);
        }
}

/* Steps 4 and 5. A block of 8191 products below 2^50 stays below 2^63. Both conversions round to nearest, so the first
 * gives the correctly rounded binary64 of the exact integer. */
ARI_SIMD static void exact_values(double value[ROWS][PANEL], const int32_t *a, const int32_t *b, size_t k,
                                  const double *unit_a, const double *unit_b)
{
    int64_t sum[ROWS][PANEL] = {{0}}; /* zero sums also if k is 0 */
    wide total[ROWS][PANEL] = {{0}};
    for (size_t kk = 0; kk < k; kk += BLOCK) {
        tile_of_integers(sum, a + kk * PANEL, b + kk * PANEL, k - kk < BLOCK ? k - kk : BLOCK);
        for (size_t i = 0; k > BLOCK && i < ROWS; i++)
            for (size_t j = 0; j < PANEL; j++)
                total[i][j] += sum[i][j];
    }
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < PANEL; j++) {
            const double x = (k > BLOCK ? (double)total[i][j] : (double)sum[i][j]) * (unit_a[i] * unit_b[j]);
            value[i][j] = x == x ? (double)(float)x : (double)ari_nan32();
        }
}

/* --- one term after the other ------------------------------------------------------------------------------------- */

ARI_SIMD static void double_values(double value[ROWS][PANEL], const double *a, const double *b, size_t k)
{
    tile_of_doubles(value, a, b, k);
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < PANEL; j++)
            value[i][j] = value[i][j] == value[i][j] ? value[i][j] : (double)ari_nan32();
}

static void float_values(double value[ROWS][PANEL], const float *a, const float *b, size_t k)
{
    float sum[ROWS][PANEL];
    tile_of_floats(sum, a, b, k);
    for (size_t i = 0; i < ROWS; i++)
        for (size_t j = 0; j < PANEL; j++)
            value[i][j] = sum[i][j] == sum[i][j] ? (double)sum[i][j] : (double)ari_nan32();
}

/* --- every mode --------------------------------------------------------------------------------------------------- */

/* Rows [first_row, first_row + PANEL) of a matrix of n rows, as a panel. */
static void fill_panel(double *panel, ari_bl_matrix m, size_t first_row, size_t n, size_t k)
{
    const size_t rows = n - first_row < PANEL ? n - first_row : PANEL;
    const double *x = m.data + first_row * m.row;
    for (size_t kk = 0; m.row == 1 && kk < k; kk++)
        for (size_t r = 0; r < rows; r++)
            panel[kk * PANEL + r] = x[kk * m.col + r];
    for (size_t r = 0; m.row != 1 && r < rows; r++)
        for (size_t kk = 0; kk < k; kk++)
            panel[kk * PANEL + r] = x[r * m.row + kk * m.col];
    for (size_t kk = 0; rows < PANEL && kk < k; kk++)
        for (size_t r = rows; r < PANEL; r++)
            panel[kk * PANEL + r] = 0.0;
}

/* Returns the bytes of an operand's element: double, float or int32. */
static size_t element_size(const ari_bl_run *run)
{
    return run->o->mode == AR_MODE_F64 ? sizeof(double) : sizeof(float);
}

static void *panel_at(const ari_bl_product *p, void *panels, size_t i)
{
    return (char *)panels + i * p->k * PANEL * element_size(p->run);
}

/* Makes panel `i` of A, or after A's panels that of B. */
static ar_status make_panel(ari_bl_run *run, void *arg, size_t i)
{
    ARI_BL_SCOPE(run);
    const ari_bl_product *p = arg;
    const bool is_b = i >= ari_bl_panels(p->m);
    const size_t panel = is_b ? i - ari_bl_panels(p->m) : i;
    const ar_number_mode mode = run->o->mode;
    void *element = panel_at(p, is_b ? p->b : p->a, panel);
    double *values = mode == AR_MODE_F64 ? element : ari_bl_doubles(run, p->k, PANEL);
    AR_TRY(run->memory);
    fill_panel(values, is_b ? p->matrix_b : p->matrix_a, panel * PANEL, is_b ? p->n : p->m, p->k);
    if (mode == AR_MODE_EXACT)
        quantise(element, (is_b ? p->unit_b : p->unit_a) + panel * PANEL, values, p->k, p->exponent, is_b ? -1 : +1,
                 width_of(run, p->k, p->flags));
    for (size_t k = 0; mode == AR_MODE_FP32 && k < p->k * PANEL; k++)
        ((float *)element)[k] = (float)values[k];
    return AR_OK;
}

ar_status ari_bl_product_open(ari_bl_run *run, ari_bl_product *p, size_t m, size_t n, size_t k, ari_bl_matrix a,
                              ari_bl_matrix b, int flags)
{
    *p = (ari_bl_product){.run = run, .m = m, .n = n, .k = k, .matrix_a = a, .matrix_b = b, .flags = flags};
    p->a = ari_bl_take(run, ari_bl_panels(m) * PANEL, k, element_size(run));
    p->b = ari_bl_take(run, ari_bl_panels(n) * PANEL, k, element_size(run));
    p->unit_a = ari_bl_doubles(run, ari_bl_panels(m), PANEL);
    p->unit_b = ari_bl_doubles(run, ari_bl_panels(n), PANEL);
    p->exponent = ari_bl_take(run, k, 1, sizeof *p->exponent);
    AR_TRY(run->memory);
    if (run->o->mode == AR_MODE_EXACT && flags & ARI_BL_SCALED)
        AR_TRY(column_exponents(run, p->exponent, n, k, b));
    return ari_bl_each(run, ari_bl_panels(m) + ari_bl_panels(n), make_panel, p);
}

void ari_bl_product_tile(const ari_bl_product *p, double c[PANEL][PANEL], size_t i, size_t j)
{
    const void *a = panel_at(p, p->a, i), *b = panel_at(p, p->b, j);
    for (size_t r = 0; r < PANEL; r += ROWS) {
        if (p->run->o->mode == AR_MODE_EXACT)
            exact_values(c + r, (const int32_t *)a + r, b, p->k, p->unit_a + i * PANEL + r, p->unit_b + j * PANEL);
        else if (p->run->o->mode == AR_MODE_F64)
            double_values(c + r, (const double *)a + r, b, p->k);
        else
            float_values(c + r, (const float *)a + r, b, p->k);
    }
}

/* Computes a band of columns of C: BAND panels of B times all of A. */
static ar_status write_band(ari_bl_run *run, void *arg, size_t band)
{
    const ari_bl_product *p = arg;
    const size_t end = (band + 1) * BAND < ari_bl_panels(p->n) ? (band + 1) * BAND : ari_bl_panels(p->n);
    (void)run;
    for (size_t i = 0; i < ari_bl_panels(p->m); i++)
        for (size_t j = band * BAND; j < end; j++) {
            double tile[PANEL][PANEL];
            const size_t rows = p->m - i * PANEL < PANEL ? p->m - i * PANEL : PANEL;
            const size_t cols = p->n - j * PANEL < PANEL ? p->n - j * PANEL : PANEL;
            ari_bl_product_tile(p, tile, i, j);
            for (size_t r = 0; r < rows; r++)
                memcpy(p->c + (i * PANEL + r) * p->n + j * PANEL, tile[r], cols * sizeof(double));
        }
    return AR_OK;
}

/* --- binary64 with errors ----------------------------------------------------------------------------------------- */

/* B [n, k] as panels. */
static double *panels_with_errors(ari_bl_run *run, size_t n, size_t k, ari_bl_matrix b)
{
    double *panels = ari_bl_doubles(run, ari_bl_panels(n) * PANEL, k);
    for (size_t j = 0; panels != NULL && j < n; j += PANEL)
        fill_panel(panels + j * k, b, j, n, k);
    if (panels != NULL)
        ari_bl_shorten(run->noise, panels, ari_bl_panels(n) * PANEL * k, run->noise->unit.operand);
    return panels;
}

/* Sums of x against a panel's rows, and of the squares of their partial sums and of their products. */
ARI_SIMD static void panel_sums(double *restrict sum, double *restrict squares, const double *restrict x,
                                const double *restrict panel, size_t k)
{
    double s[PANEL] = {0.0}, q[PANEL] = {0.0};
    for (size_t kk = 0; kk < k; kk++)
        for (size_t r = 0; r < PANEL; r++) {
            const double term = x[kk] * panel[kk * PANEL + r];
            s[r] += term;
            q[r] += s[r] * s[r] + term * term;
        }
    memcpy(sum, s, sizeof s);
    memcpy(squares, q, sizeof q);
}

/* Computes each sum with errors of the operands, of the accumulation and of the result. The error of accumulating sum j
 * in fp32 is drawn with its expected size: each of the K additions and products has an independent error of up to 2^-24
 * of its result. */
static ar_status noisy64(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a, ari_bl_matrix b)
{
    const ar_noise_units *unit = &run->noise->unit;
    const double *panels = panels_with_errors(run, n, k, b);
    double *x = ari_bl_doubles(run, 1, k);
    AR_TRY(run->memory);
    for (size_t i = 0; i < m; i++) {
        for (size_t kk = 0; kk < k; kk++)
            x[kk] = a.data[i * a.row + kk * a.col];
        ari_bl_shorten(run->noise, x, k, unit->operand);
        for (size_t j = 0; j < n; j += PANEL) {
            double sum[PANEL], squares[PANEL];
            panel_sums(sum, squares, x, panels + j * k, k);
            for (size_t r = 0; r < PANEL && j + r < n; r++) {
                sum[r] += unit->inner * sqrt(squares[r]) * ari_bl_noise_normal(run->noise);
                c[i * n + j + r] = ari_bl_round(run, sum[r], ARI_BL_PRODUCT);
            }
        }
    }
    return AR_OK;
}

ar_status ari_bl_contract(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a, ari_bl_matrix b,
                          int flags)
{
    ARI_BL_SCOPE(run);
    ari_bl_product p;
    if (run->noise != NULL)
        return noisy64(run, c, m, n, k, a, b);
    AR_TRY(ari_bl_product_open(run, &p, m, n, k, a, b, flags));
    p.c = c;
    return ari_bl_each(run, (ari_bl_panels(n) + BAND - 1) / BAND, write_band, &p);
}
