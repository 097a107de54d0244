/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/contraction.h"
#include "tests/support/scoped.h"

#include <math.h>

#include "ref/core/size.h"
#include "ref/numerics/bits.h"

/* This file repeats the text of numerics.md rather than calling the kernels' element steps, so that it can be the
 * judge of them: only the reading of an exponent is shared. */

typedef struct matrix_view {
    const float *data;
    size_t rows;
    ptrdiff_t row_stride;
    ptrdiff_t k_stride;
} matrix_view;

__extension__ typedef __int128 wide_int;

static float at(const matrix_view *x, size_t row, size_t k)
{
    return x->data[(ptrdiff_t)row * x->row_stride + (ptrdiff_t)k * x->k_stride];
}

/* Step 2. */
typedef struct width {
    int bits;
    double limit;
} width;
static const width of_fp32 = {25, 33554431.0}, of_bf16 = {15, 32639.0}; /* 2^25 - 1; 127*2^8 + 127 */

/* Step 0: c_k, the smallest integer with |B[j,k]| < 2^c_k for all j; 0 for a column with a NaN or an infinity;
 * ARI_EXP_ZERO for a column of zeros. Without scaling 0 for all. */
static void equilibrate(int32_t *c, const matrix_view *b, size_t k_count, bool scale)
{
    for (size_t k = 0; k < k_count; k++) {
        int32_t largest = ARI_EXP_ZERO;
        for (size_t j = 0; j < b->rows; j++) {
            const int32_t e = ari_exponent32(at(b, j, k));
            largest = e > largest ? e : largest;
        }
        c[k] = !scale || largest == ARI_EXP_NONFINITE ? 0 : largest;
    }
}

/* A'[i,k] or B'[j,k] as a binary64, exact: the element times 2^(sign*c_k), 0 where B's column is all zero. */
static double shifted(const matrix_view *x, size_t row, size_t k, const int32_t *c, int sign)
{
    return c[k] == ARI_EXP_ZERO ? 0.0 : ldexp((double)at(x, row, k), sign * c[k]);
}

/* Steps 1 to 3: the exponent of every row of x' and its integers. */
static void quantise(int32_t *exponent, int32_t *q, const matrix_view *x, size_t k_count, const int32_t *c, int sign,
                     width w)
{
    for (size_t row = 0; row < x->rows; row++) {
        int32_t largest = ARI_EXP_ZERO;
        for (size_t k = 0; k < k_count; k++) {
            /* A non-finite element flags its row beside a column of zeros too. */
            const bool finite = isfinite(at(x, row, k));
            const int32_t e = finite ? ari_exponent64(shifted(x, row, k, c, sign)) : ARI_EXP_NONFINITE;
            const bool past = finite && e != ARI_EXP_ZERO && w.bits < 25 &&
                              fabs(ldexp(shifted(x, row, k, c, sign), w.bits - e)) >= w.limit + 0.5;
            largest = e + past > largest ? e + past : largest;
        }
        exponent[row] = largest;
        const bool flagged = largest == ARI_EXP_ZERO || largest == ARI_EXP_NONFINITE;
        for (size_t k = 0; k < k_count; k++) {
            double y = flagged ? 0.0 : rint(ldexp(shifted(x, row, k, c, sign), w.bits - largest));
            y = y > w.limit ? w.limit : y;
            y = y < -w.limit ? -w.limit : y;
            q[row * k_count + k] = (int32_t)y;
        }
    }
}

/* Steps 4 and 5 for one element. */
static ar_status dot(float *out, const int32_t *qa, int32_t e, const int32_t *qb, int32_t f, size_t k_count, width w)
{
    const wide_int two_63 = (wide_int)1 << 63;
    wide_int sum = 0;
    for (size_t k = 0; k < k_count; k++)
        sum += (wide_int)qa[k] * qb[k];
    if (k_count <= 8191 && (sum >= two_63 || sum <= -two_63))
        return ar_error_set(AR_ERR_INTERNAL, "contract_definition: a sum of %zu terms leaves 63 bits", k_count);
    if (e == ARI_EXP_NONFINITE || f == ARI_EXP_NONFINITE)
        *out = ari_nan32();
    else if (e == ARI_EXP_ZERO || f == ARI_EXP_ZERO)
        *out = 0.0f;
    else
        *out = (float)ldexp((double)sum, e + f - 2 * w.bits); /* the conversion of __int128 rounds to nearest even */
    return AR_OK;
}

static ar_status contract(float *c, const matrix_view *a, const matrix_view *b, size_t k_count, bool scale, width w,
                          int32_t *shift, int32_t *e, int32_t *f, int32_t *qa, int32_t *qb)
{
    equilibrate(shift, b, k_count, scale);
    quantise(e, qa, a, k_count, shift, 1, w);
    quantise(f, qb, b, k_count, shift, -1, w);
    for (size_t i = 0; i < a->rows; i++)
        for (size_t j = 0; j < b->rows; j++)
            AR_TRY(dot(&c[i * b->rows + j], qa + i * k_count, e[i], qb + j * k_count, f[j], k_count, w));
    return AR_OK;
}

ar_status ar_contract_definition(float *c, size_t m, size_t n, size_t k, const float *a, ptrdiff_t lda_row,
                                 ptrdiff_t lda_k, const float *b, ptrdiff_t ldb_row, ptrdiff_t ldb_k, bool scale,
                                 bool narrow)
{
    const matrix_view av = {a, m, lda_row, lda_k}, bv = {b, n, ldb_row, ldb_k};
    OWNED(free) void *shift = NULL, *e = NULL, *f = NULL, *qa = NULL, *qb = NULL;
    size_t a_count = 0, b_count = 0;
    if ((c == NULL && m != 0 && n != 0) || (a == NULL && m != 0 && k != 0) || (b == NULL && n != 0 && k != 0))
        return ar_error_set(AR_ERR_ARG, "contract_definition: NULL operand for m %zu, n %zu, k %zu", m, n, k);
    AR_TRY(ari_mul_size(&a_count, m, k));
    AR_TRY(ari_mul_size(&b_count, n, k));
    AR_TRY(ari_alloc(&shift, k, sizeof(int32_t), "the shifts of a contraction"));
    AR_TRY(ari_alloc(&e, m, sizeof(int32_t), "the exponents of A"));
    AR_TRY(ari_alloc(&f, n, sizeof(int32_t), "the exponents of B"));
    AR_TRY(ari_alloc(&qa, a_count, sizeof(int32_t), "the integers of A"));
    AR_TRY(ari_alloc(&qb, b_count, sizeof(int32_t), "the integers of B"));
    return contract(c, &av, &bv, k, scale, narrow ? of_bf16 : of_fp32, shift, e, f, qa, qb);
}
