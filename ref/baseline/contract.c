/* SPDX-License-Identifier: Apache-2.0 */
/* C[i,j] = round(sum over k of A[i,k]*B[j,k]): numerics.md section 2, step by step, and two sequential forms. */
#include "ref/baseline/run.h"

#include <math.h>
#include <string.h>

#include "ref/numerics/scalar.h"

__extension__ typedef __int128 wide;

enum { BLOCK = 8191, MOST_NARROW = 16384, LANES = 4 };

/* Step 2: the bits of the integers, and the largest one. */
typedef struct width {
    int32_t p, limit;
} width;

static width width_of(const ari_bl_run *run, size_t k, int how)
{
    const width of_fp32 = {25, (1 << 25) - 1}, of_bf16 = {15, 127 * 256 + 127};
    const bool narrow = how & ARI_BL_WEIGHT ? !(how & ARI_BL_PEAKED) : k <= MOST_NARROW;
    return run->o->bf16 && narrow ? of_bf16 : of_fp32;
}

static int32_t larger_exponent(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* Step 0: c[k], the smallest integer with |B[j,k]| < 2^c for all j; ARI_EXP_ZERO where the column is all zero, 0 where
 * it holds a NaN or an infinity, and 0 everywhere without scaling. */
static void column_exponents(int32_t *c, size_t n, size_t k, ari_bl_matrix b, bool scale)
{
    for (size_t kk = 0; kk < k; kk++)
        c[kk] = scale ? ARI_EXP_ZERO : 0;
    if (!scale)
        return;
    for (size_t j = 0; j < n; j++)
        for (size_t kk = 0; kk < k; kk++)
            c[kk] = larger_exponent(c[kk], ari_exponent64(b.at[j * b.row + kk * b.col]));
    for (size_t kk = 0; kk < k; kk++)
        if (c[kk] == ARI_EXP_NONFINITE)
            c[kk] = 0;
}

/* Steps 0, 1 and 3 for one row x: x' = x*2^(sign*c), its exponent, and q = clamp(rint(x'*2^(p - e))). Against an
 * all-zero column x' is 0, unless x is not finite. Returns e. */
ARI_SIMD static int32_t quantise(int32_t *q, double *scaled, size_t k, const double *x, size_t col, const int32_t *c,
                                 int sign, width w)
{
    int32_t e = ARI_EXP_ZERO;
    for (size_t kk = 0; kk < k; kk++) {
        const double value = x[kk * col];
        const bool finite = ari_exponent64(value) != ARI_EXP_NONFINITE;
        if (c[kk] == ARI_EXP_ZERO)
            scaled[kk] = finite ? 0.0 : value;
        else
            scaled[kk] = ari_scale2(value, sign * c[kk]);
        e = larger_exponent(e, ari_exponent64(scaled[kk]));
    }
    if (e == ARI_EXP_ZERO || e == ARI_EXP_NONFINITE)
        return e; /* q stays zero */
    for (size_t kk = 0; kk < k; kk++)
        if (fabs(ari_scale2(scaled[kk], w.p - e)) >= (double)w.limit + 0.5 && w.p < 25) {
            e++; /* once: then all are less than half as large */
            break;
        }
    for (size_t kk = 0; kk < k; kk++) {
        const double r = ari_rint(ari_scale2(scaled[kk], w.p - e));
        q[kk] = (int32_t)(r > w.limit ? w.limit : r < -w.limit ? -w.limit : r);
    }
    return e;
}

/* Step 4 for LANES columns at once: b holds their rows one after the other. A block of 8191 products below 2^50 stays
 * below 2^63. */
ARI_SIMD static void dot(wide s[LANES], const int32_t *a, const int32_t *b, size_t k)
{
    for (int r = 0; r < LANES; r++)
        s[r] = 0;
    for (size_t from = 0; from < k; from += BLOCK) {
        const size_t to = k - from < BLOCK ? k : from + BLOCK;
        int64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
        for (size_t kk = from; kk < to; kk++) {
            const int64_t x = a[kk];
            s0 += x * b[kk];
            s1 += x * b[kk + k];
            s2 += x * b[kk + 2 * k];
            s3 += x * b[kk + 3 * k];
        }
        s[0] += s0;
        s[1] += s1;
        s[2] += s2;
        s[3] += s3;
    }
}

/* Step 5. Both conversions round to nearest, so the first is the correctly rounded binary64 of the exact integer. */
static double value(wide s, int32_t e, int32_t f, width w)
{
    if (e == ARI_EXP_NONFINITE || f == ARI_EXP_NONFINITE)
        return (double)ari_nan32();
    if (e == ARI_EXP_ZERO || f == ARI_EXP_ZERO)
        return 0.0;
    const double fl64 = s == (int64_t)s ? (double)(int64_t)s : (double)s;
    return (double)(float)ari_scale2(fl64, e + f - 2 * w.p);
}

static ar_status exact(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a, ari_bl_matrix b,
                       int how)
{
    const width w = width_of(run, k, how);
    int32_t *shift = ari_bl_take(run, 1, k, sizeof *shift);
    int32_t *e = ari_bl_take(run, 1, m, sizeof *e);
    int32_t *f = ari_bl_take(run, 1, n, sizeof *f);
    int32_t *qa = ari_bl_take(run, m, k, sizeof *qa);
    int32_t *qb = ari_bl_take(run, n + LANES - 1, k, sizeof *qb); /* the last lanes may be rows of zeros */
    double *scaled = ari_bl_doubles(run, 1, k);
    AR_TRY(run->memory);
    column_exponents(shift, n, k, b, how & ARI_BL_SCALED);
    for (size_t i = 0; i < m; i++)
        e[i] = quantise(qa + i * k, scaled, k, a.at + i * a.row, a.col, shift, +1, w);
    for (size_t j = 0; j < n; j++)
        f[j] = quantise(qb + j * k, scaled, k, b.at + j * b.row, b.col, shift, -1, w);
    for (size_t i = 0; i < m; i++)
        for (size_t j = 0; j < n; j += LANES) {
            wide s[LANES];
            dot(s, qa + i * k, qb + j * k, k);
            for (size_t r = 0; r < LANES && j + r < n; r++)
                c[i * n + j + r] = value(s[r], e[i], f[j + r], w);
        }
    return AR_OK;
}

/* c[i,j] = fl32(c[i,j] + fl32(a*b)) for k = 0, 1, ...: k runs outside j, which changes no sum's order. */
ARI_SIMD static ar_status sequential32(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a,
                                       ari_bl_matrix b)
{
    float *columns = ari_bl_take(run, k, n, sizeof *columns); /* B transposed: column k of B is contiguous */
    float *sum = ari_bl_take(run, 1, n, sizeof *sum);
    AR_TRY(run->memory);
    for (size_t j = 0; j < n; j++)
        for (size_t kk = 0; kk < k; kk++)
            columns[kk * n + j] = (float)b.at[j * b.row + kk * b.col];
    for (size_t i = 0; i < m; i++) {
        for (size_t j = 0; j < n; j++)
            sum[j] = 0.0F;
        for (size_t kk = 0; kk < k; kk++) {
            const float x = (float)a.at[i * a.row + kk * a.col];
            for (size_t j = 0; j < n; j++)
                sum[j] += x * columns[kk * n + j];
        }
        for (size_t j = 0; j < n; j++)
            c[i * n + j] = ari_bl_fl(run, (double)sum[j]);
    }
    return AR_OK;
}

/* B [n, k] as [k, n] in binary64: column k of B is contiguous. */
static double *columns_of(ari_bl_run *run, size_t n, size_t k, ari_bl_matrix b)
{
    double *columns = ari_bl_doubles(run, k, n);
    for (size_t j = 0; columns != NULL && j < n; j++)
        for (size_t kk = 0; kk < k; kk++)
            columns[kk * n + j] = b.at[j * b.row + kk * b.col];
    return columns;
}

/* The same in binary64. Four terms at a time, added one after the other all the same: fewer passes over the sums. */
ARI_SIMD static ar_status sequential64(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a,
                                       ari_bl_matrix b)
{
    const double *columns = columns_of(run, n, k, b);
    AR_TRY(run->memory);
    for (size_t i = 0; i < m; i++) {
        double *sum = c + i * n;
        const double *x = a.at + i * a.row;
        size_t kk = 0;
        for (size_t j = 0; j < n; j++)
            sum[j] = 0.0;
        for (; kk + 4 <= k; kk += 4) {
            const double *y = columns + kk * n;
            const double x0 = x[kk * a.col], x1 = x[(kk + 1) * a.col];
            const double x2 = x[(kk + 2) * a.col], x3 = x[(kk + 3) * a.col];
            for (size_t j = 0; j < n; j++)
                sum[j] = (((sum[j] + x0 * y[j]) + x1 * y[n + j]) + x2 * y[2 * n + j]) + x3 * y[3 * n + j];
        }
        for (; kk < k; kk++)
            for (size_t j = 0; j < n; j++)
                sum[j] += x[kk * a.col] * columns[kk * n + j];
        for (size_t j = 0; j < n; j++)
            sum[j] = ari_bl_fl(run, sum[j]);
    }
    return AR_OK;
}

/* B [n, k] as noisy64 takes it: bands of NOISY rows, each band [k, NOISY]; rows past the n-th are zero. */
enum { NOISY = 16 };

static double *bands_of(ari_bl_run *run, size_t n, size_t k, ari_bl_matrix b)
{
    const size_t bands = (n + NOISY - 1) / NOISY;
    double *band = ari_bl_doubles(run, bands * NOISY, k);
    for (size_t j = 0; band != NULL && j < n; j++)
        for (size_t kk = 0; kk < k; kk++)
            band[(j / NOISY * k + kk) * NOISY + j % NOISY] = b.at[j * b.row + kk * b.col];
    if (band != NULL)
        ari_bl_shorten(run->noise, band, bands * NOISY * k, run->noise->unit.operand);
    return band;
}

/* Sums of x against a band's rows, and of the squares of their partial sums and of their products. */
ARI_SIMD static void band_sums(double *restrict sum, double *restrict squares, const double *restrict x,
                               const double *restrict band, size_t k)
{
    double s[NOISY] = {0.0}, q[NOISY] = {0.0};
    for (size_t kk = 0; kk < k; kk++)
        for (size_t r = 0; r < NOISY; r++) {
            const double product = x[kk] * band[kk * NOISY + r];
            s[r] += product;
            q[r] += s[r] * s[r] + product * product;
        }
    memcpy(sum, s, sizeof s);
    memcpy(squares, q, sizeof q);
}

/* sequential64 with errors: of the operands, of accumulating, of the result. What accumulating sum j in fp32 would add
 * goes by its expected size: each of the K additions and products errs by up to 2^-24 of its own result, independently
 * of the others. */
static ar_status noisy64(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a, ari_bl_matrix b)
{
    const ar_noise_units *unit = &run->noise->unit;
    const double *band = bands_of(run, n, k, b);
    double *x = ari_bl_doubles(run, 1, k);
    AR_TRY(run->memory);
    for (size_t i = 0; i < m; i++) {
        for (size_t kk = 0; kk < k; kk++)
            x[kk] = a.at[i * a.row + kk * a.col];
        ari_bl_shorten(run->noise, x, k, unit->operand);
        for (size_t j = 0; j < n; j += NOISY) {
            double sum[NOISY], squares[NOISY];
            band_sums(sum, squares, x, band + j * k, k);
            for (size_t r = 0; r < NOISY && j + r < n; r++) {
                sum[r] += unit->inner * sqrt(squares[r]) * ari_bl_noise_normal(run->noise);
                c[i * n + j + r] = ari_bl_round(run, sum[r], ARI_BL_PRODUCT);
            }
        }
    }
    return AR_OK;
}

ar_status ari_bl_contract(ari_bl_run *run, double *c, size_t m, size_t n, size_t k, ari_bl_matrix a, ari_bl_matrix b,
                          int how)
{
    ARI_BL_SCOPE(run);
    if (run->o->mode == AR_MODE_EXACT)
        AR_TRY(exact(run, c, m, n, k, a, b, how));
    else if (run->o->mode == AR_MODE_FP32)
        AR_TRY(sequential32(run, c, m, n, k, a, b));
    else if (run->noise != NULL)
        AR_TRY(noisy64(run, c, m, n, k, a, b));
    else
        AR_TRY(sequential64(run, c, m, n, k, a, b));
    return AR_OK;
}
