/* SPDX-License-Identifier: Apache-2.0 */
/* Muon's update of one matrix: numerics.md section 6, step by step. */
#include "ref/baseline/run.h"

#include <math.h>

#include "ref/numerics/elementary.h"

/* Returns sqrt(sum of x^2). In the exact mode it is a sum of integers, like the gradient norm. */
static double norm_of(const ari_bl_run *run, const double *x, size_t n)
{
    int32_t e = ARI_EXP_ZERO;
    int64_t high = 0, low = 0;
    double sum = 0.0;
    for (size_t i = 0; i < n; i++)
        e = ari_exponent64(x[i]) > e ? ari_exponent64(x[i]) : e;
    if (e == ARI_EXP_ZERO)
        return 0.0;
    if (e == ARI_EXP_NONFINITE)
        return (double)ari_nan32();
    for (size_t i = 0; i < n; i++) {
        const double scaled = ari_scale2(x[i], -e);
        const int64_t q = (int64_t)ari_rint(scaled * scaled * 0x1p60);
        high += q >> 30;
        low += q & ((1 << 30) - 1);
        sum = ari_bl_fl(run, sum + ari_bl_fl(run, x[i] * x[i]));
    }
    if (run->o->mode != AR_MODE_EXACT)
        return ari_bl_fl(run, sqrt(sum));
    return (double)(float)ari_scale2(sqrt((double)high * 0x1p-30 + (double)low * 0x1p-60), e);
}

/* y = p*y + q*x. */
static void add(const ari_bl_run *run, double *y, double p, const double *x, double q, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = ari_bl_fl(run, ari_bl_fl(run, p * y[i]) + ari_bl_fl(run, q * x[i]));
}

/* Iterates five times for x [m, n], m <= n: A = X X^T, X = aX + (bA + c A A^T)X. */
static ar_status iterate(ari_bl_run *run, double *x, size_t m, size_t n)
{
    double *gram = ari_bl_doubles(run, m, m), *square = ari_bl_doubles(run, m, m);
    double *product = ari_bl_doubles(run, m, n);
    AR_TRY(run->memory);
    const ari_bl_matrix rows = {x, n, 1}, columns = {x, 1, n}, g = {gram, m, 1};
    for (int i = 0; i < 5; i++) {
        AR_TRY(ari_bl_contract(run, gram, m, m, n, rows, rows, true));
        AR_TRY(ari_bl_contract(run, square, m, m, m, g, g, true));
        add(run, gram, ari_bl_fl(run, -4.775), square, ari_bl_fl(run, 2.0315), m * m);
        AR_TRY(ari_bl_contract(run, product, m, n, m, g, columns, true));
        add(run, x, ari_bl_fl(run, 3.4445), product, 1.0, m * n);
    }
    return AR_OK;
}

/* Makes the matrix [outputs, inputs], with element (r, c) at u[r*row + c*col], orthogonal: the result is subtracted
 * from the weights. */
static ar_status orthogonalise(ari_bl_run *run, const ari_bl_trained *p, double *u, size_t outputs, size_t inputs,
                               size_t row, size_t col)
{
    ARI_BL_SCOPE(run);
    const bool tall = outputs > inputs;
    const size_t m = tall ? inputs : outputs, n = tall ? outputs : inputs;
    const double r = (double)outputs, c = (double)inputs;
    double *x = ari_bl_doubles(run, m, n);
    AR_TRY(run->memory);
    for (size_t i = 0; i < m; i++)
        for (size_t k = 0; k < n; k++)
            x[i * n + k] = u[(tall ? k : i) * row + (tall ? i : k) * col];
    const double norm = norm_of(run, x, m * n);
    const double factor = ari_bl_fl(run, 1.0 / (norm < 1e-7 ? 1e-7 : norm));
    for (size_t i = 0; i < m * n; i++)
        x[i] = ari_bl_fl(run, x[i] * factor);
    AR_TRY(iterate(run, x, m, n));
    const bool rms = run->o->optimizer.match_rms;
    const double times = rms ? 0.2 * sqrt(r > c ? r : c) : sqrt(r > c ? r / c : 1.0);
    const double rate = ari_bl_fl(run, p->lr * times);
    for (size_t i = 0; i < m; i++)
        for (size_t k = 0; k < n; k++)
            u[(tall ? k : i) * row + (tall ? i : k) * col] = ari_bl_fl(run, rate * x[i * n + k]);
    return AR_OK;
}

/* m = m + (1 - mu)(g - m), u = m - (1 - mu)(m - g). */
static void direction(const ari_bl_run *run, const ari_bl_trained *p, double *u)
{
    const ar_optimizer_options *o = &run->o->optimizer;
    const double rest = ari_bl_fl(run, 1.0 - o->momentum);
    for (size_t i = 0; i < p->rows * p->cols; i++) {
        const double g = p->gradient[i];
        p->m[i] = ari_bl_fl(run, p->m[i] + ari_bl_fl(run, rest * ari_bl_fl(run, g - p->m[i])));
        u[i] = p->m[i];
        if (o->nesterov)
            u[i] = ari_bl_fl(run, u[i] - ari_bl_fl(run, rest * ari_bl_fl(run, u[i] - g)));
    }
}

ar_status ari_bl_muon(ari_bl_run *run, const ari_bl_trained *p)
{
    ARI_BL_SCOPE(run);
    const bool conv1d = run->names->conv1d;
    const size_t outputs = conv1d ? p->cols : p->rows, inputs = conv1d ? p->rows : p->cols;
    const size_t row = conv1d ? 1 : p->cols, col = conv1d ? p->cols : 1;
    const double shrink = ari_bl_fl(run, 1.0 - p->lr * p->weight_decay);
    double *u = ari_bl_doubles(run, p->rows, p->cols);
    AR_TRY(run->memory);
    direction(run, p, u);
    size_t first_output = 0;
    for (int i = 0; i < p->blocks || i == 0; i++) {
        const size_t width = p->blocks > 0 ? p->block[i] : outputs;
        AR_TRY(orthogonalise(run, p, u + first_output * row, width, inputs, row, col));
        first_output += width;
    }
    for (size_t r = 0; r < p->rows; r++)
        for (size_t c = 0; c < p->cols; c++) {
            const size_t i = r * p->cols + c;
            double *stored = &p->data[r * p->row + c * p->col], *w = p->master != NULL ? p->master + i : stored;
            *w = ari_bl_fl(run, ari_bl_fl(run, *w * shrink) - u[i]);
            *stored = p->master != NULL ? ari_bl_keep(run, *w) : *w;
        }
    return AR_OK;
}
