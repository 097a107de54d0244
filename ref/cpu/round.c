/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/gemm.h"

#include "ref/cpu/kernels.h"
#include "ref/numerics/integer_sum.h"

/* fl32(fl64(S)*2^(e+f-50)), numerics.md, "Contraction", step 5. The power of two is applied as 2^(e-50) and 2^f:
 * exponents of fp32 values shifted by exponents of fp32 values lie in -297..256, |S| < 2^116, so that both products are
 * normal in binary64 and exact, and the conversion to fp32 is the only rounding after fl64. A flag is a factor: NaN
 * makes everything NaN, also beside a zero; 0 leaves +0, since the sum of an all-zero row is +0. */

static inline double factor(int32_t f, int32_t shift)
{
    const int special = f == ARI_EXP_ZERO || f == ARI_EXP_NONFINITE;
    const double finite = ari_pow2(ari_clamp32(special ? 0 : f, -900, 900) + shift);
    const double flagged = f == ARI_EXP_NONFINITE ? (double)ari_nan32() : finite;
    return f == ARI_EXP_ZERO ? 0.0 : flagged;
}

ARI_SIMD void ari_round_factors(double *restrict scale, const int32_t *restrict f, size_t n)
{
    for (size_t j = 0; j < n; j++)
        scale[j] = factor(f[j], 0);
}

double ari_round_row_factor(int32_t e)
{
    return factor(e, -2 * ARI_CONTRACT_BITS);
}

/* fl32 of fl64(S) times the row's and the column's power of two. */
static inline float rounded(double sum, double row, double scale)
{
    return ari_canonical32((float)(sum * row * scale));
}

/* hi*2^13 is exact and the addition rounds once, to nearest even: the sum is fl64(S). Adding +0 first makes a zero sum
 * +0 whatever the signs of its halves. */
ARI_SIMD void ari_round_halves(float *restrict y, const double *restrict hi, const double *restrict lo, double row,
                               const double *restrict scale, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const double sum = hi[j] * 8192.0 + (lo[j] + 0.0);
        y[j] = rounded(sum, row, scale[j]);
    }
}

ARI_SIMD void ari_round_sums(float *restrict y, const int64_t *restrict s, double row, const double *restrict scale,
                             size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = rounded(ari_double64(s[j]), row, scale[j]);
}

/* The magic sum of ari_nearest_integer, turned round. */
ARI_SIMD void ari_round_small_sums(float *restrict y, const int64_t *restrict s, double row,
                                   const double *restrict scale, size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = rounded(ari_float64((uint64_t)s[j] + ARI_ROUND_MAGIC_BITS) - ARI_ROUND_MAGIC, row, scale[j]);
}

ARI_SIMD void ari_halves_to_int64(int64_t *restrict s, const double *restrict hi, const double *restrict lo, bool add,
                                  size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const uint64_t sum = (uint64_t)(int64_t)hi[j] * 8192u + (uint64_t)(int64_t)lo[j];
        s[j] = (int64_t)((add ? (uint64_t)s[j] : 0u) + sum);
    }
}

/* S = (hi >> 19)*2^32 + rest, rest = (hi mod 2^19)*2^13 + lo, of which |rest| < 2^54. */
ARI_SIMD void ari_halves_to_limbs(int64_t *restrict s, const double *restrict hi, const double *restrict lo, bool add,
                                  size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const int64_t h = (int64_t)hi[j];
        const int64_t low_bits = h & 0x7ffff;
        const int64_t rest = low_bits * 8192 + (int64_t)lo[j];
        const int64_t rest_low = rest & 0xffffffff;
        const int64_t high = (h - low_bits) / 524288 + (rest - rest_low) / 4294967296;
        s[2 * j] = ari_add64(add ? s[2 * j] : 0, high);
        s[2 * j + 1] = ari_add64(add ? s[2 * j + 1] : 0, rest_low);
    }
}

ARI_SIMD void ari_sums_to_limbs(int64_t *restrict s, const int64_t *restrict sums, bool add, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        const int64_t low = sums[j] & 0xffffffff;
        const int64_t high = (sums[j] - low) / 4294967296; /* no remainder */
        s[2 * j] = ari_add64(add ? s[2 * j] : 0, high);
        s[2 * j + 1] = ari_add64(add ? s[2 * j + 1] : 0, low);
    }
}

/* Columns whose factors are made at a time. */
#define COLUMNS ((size_t)2048)

/* Sums from other ranks are not trusted to be 0 where a flag says so: a product with 0 is +0 or -0, and adding +0 makes
 * it +0, as it leaves everything else. */
ARI_SIMD static void round_run(float *restrict y, const int64_t *restrict s, double row, const double *restrict scale,
                               size_t n)
{
    for (size_t j = 0; j < n; j++)
        y[j] = ari_canonical32((float)(ari_double64(s[j]) * (row * scale[j]) + 0.0));
}

/* The elements [start, start + count) of a matrix of n columns. */
typedef struct round_job {
    float *y;
    const int64_t *s;
    int limbs;
    size_t start, count, n;
    const int32_t *e, *f;
} round_job;

/* Those in columns [from, to) of row i. */
static void round_piece(const round_job *r, size_t i, size_t from, size_t to, const double *scale)
{
    const size_t begin = i * r->n + from < r->start ? r->start - i * r->n : from;
    const size_t all = r->start + r->count - i * r->n, end = all < to ? all : to;
    if (begin >= end)
        return;
    float *y = r->y + (i * r->n + begin - r->start);
    const int64_t *s = r->s + (i * r->n + begin - r->start) * (size_t)r->limbs;
    if (r->limbs == 1)
        round_run(y, s, ari_round_row_factor(r->e[i]), scale + (begin - from), end - begin);
    for (size_t j = 0; r->limbs == 2 && j < end - begin; j++)
        y[j] = ari_contract_value2(s[2 * j], s[2 * j + 1], r->e[i], r->f[begin + j]);
}

/** Slot round_i64. Errors: none. */
ar_status ari_cpu_round_i64(ar_device *d, ARI_AT_ONCE, ar_buf y, ar_cbuf s, int limbs, size_t start, size_t count,
                            size_t n, ar_cbuf e, ar_cbuf f)
{
    enum { ROWS = 16 };
    if (count == 0 || n == 0)
        return AR_OK;
    const round_job r = {y.ptr, s.ptr, limbs, start, count, n, e.ptr, f.ptr};
    const size_t first = start / n, rows = (start + count - 1) / n - first + 1;
    const size_t down = (rows + ROWS - 1) / ROWS, across = (n + COLUMNS - 1) / COLUMNS;
    ARI_PARALLEL_FOR (t, down * across, d, count) {
        double scale[COLUMNS];
        const size_t from = t % across * COLUMNS, to = n - from < COLUMNS ? n : from + COLUMNS;
        const size_t top = t / across * ROWS, left = rows - top < ROWS ? rows - top : ROWS;
        ari_round_factors(scale, r.f + from, to - from);
        for (size_t i = first + top; i < first + top + left; i++)
            round_piece(&r, i, from, to, scale);
    }
    return AR_OK;
}
