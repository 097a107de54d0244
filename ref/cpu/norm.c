/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/cpu/row_kernels.h"
#include "ref/cpu/row_sum.h"

/* LayerNorm (Ba, Kiros, Hinton 2016) and RMSNorm (Zhang, Sennrich 2019), forward and backward, one row after the other.
 * Formulas, in the order in which they are rounded: docs/numerics.md, "Sums along a row". */

/* y holds d = fl32(x - mean) between the two sums. y may be x. */
ARI_ROW_KERNEL void layer_forward(float *y, double *mean, float *rstd, const float *x, const float *gamma,
                                  const float *beta, double eps, size_t h)
{
    const int32_t p = ari_rowsum_bits(h);
    const double m = ari_row_sum(x, h, ari_row_exponent(x, h), p) / (double)h;
    uint32_t top = 0;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float d = ari_layernorm_d(x[j], m);
        const uint32_t bits = ari_row_magnitude32(d);
        top = bits > top ? bits : top;
        y[j] = d;
    }
    const float r = ari_norm_rstd(ari_row_sum_squares(y, h, top, p) / (double)h, eps);
    *mean = m;
    *rstd = r;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float xhat = y[j] * r;
        y[j] = ari_layernorm_y(xhat, gamma[j], beta[j]);
    }
}

/* y may be x. */
ARI_ROW_KERNEL void rms_forward(float *y, float *rstd, const float *x, const float *gamma, double eps, size_t h)
{
    const int32_t p = ari_rowsum_bits(h);
    uint32_t top = 0;
    for (size_t j = 0; j < h; j++) {
        const uint32_t bits = ari_row_magnitude32(x[j]);
        top = bits > top ? bits : top;
    }
    const float r = ari_norm_rstd(ari_row_sum_squares(x, h, top, p) / (double)h, eps);
    *rstd = r;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float xhat = x[j] * r;
        y[j] = ari_mul32(xhat, gamma[j]);
    }
}

/** Slot norm_forward. y may be x. h = 0 or rows = 0: nothing to do. */
ar_status ari_cpu_norm_forward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf y, ar_buf mean, ar_buf rstd,
                               ar_cbuf x, ar_cbuf gamma, ar_cbuf beta, double eps, size_t rows, size_t h)
{
    (void)q;
    const int threads = ari_threads_for(d, rows, rows * h);
    const float *in = x.ptr, *gains = gamma.ptr, *shifts = beta.ptr;
    float *out = y.ptr, *r = rstd.ptr;
    double *m = mean.ptr;
    (void)threads;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < rows; i++) {
        if (kind == AR_NORM_LAYER)
            layer_forward(out + i * h, m + i, r + i, in + i * h, gains, shifts, eps, h);
        else
            rms_forward(out + i * h, r + i, in + i * h, gains, eps, h);
    }
    return AR_OK;
}

/* What the backward pass of one row reads and writes; mean is unused, and `centred` false, for RMSNorm. */
typedef struct norm_row {
    float *dx, *sum, *dgamma;    /* [h]; sum, dgamma NULL: not wanted */
    const float *dy, *x, *gamma; /* [h] */
    const float *residual;       /* [h]; NULL: none */
    double mean;
    float rstd;
} norm_row;

/* xhat again from what the forward pass saved: cheaper than storing and reading it. */
ARI_ROW_LOOP float xhat_again(const norm_row *row, size_t j, int centred)
{
    const float d = centred ? ari_layernorm_d(row->x[j], row->mean) : row->x[j];
    return d * row->rstd;
}

/* Row means a = S(g)/h and b = S(g*xhat)/h, g = fl32(dy*gamma). */
ARI_ROW_LOOP void backward_means(double *a, double *b, const norm_row *row, size_t h, int centred)
{
    const int32_t p = ari_rowsum_bits(h);
    uint32_t top_g = 0;
    uint64_t top_product = 0;
    for (size_t j = 0; j < h; j++) {
        const float g = row->dy[j] * row->gamma[j];
        const uint32_t bits_g = ari_row_magnitude32(g);
        const uint64_t bits = ari_row_magnitude64((double)g * (double)xhat_again(row, j, centred));
        top_g = bits_g > top_g ? bits_g : top_g;
        top_product = bits > top_product ? bits : top_product;
    }
    const int32_t e_g = ari_exponent32(ari_float32(top_g)), e_product = ari_exponent64(ari_float64(top_product));
    const double step_g = ari_row_step(e_g, p), step_product = ari_row_step(e_product, p);
    uint64_t sum_g = 0, sum_product = 0;
    for (size_t j = 0; j < h; j++) {
        const float g = row->dy[j] * row->gamma[j];
        sum_product += ari_row_quantised((double)g * (double)xhat_again(row, j, centred), step_product);
        if (centred)
            sum_g += ari_row_quantised((double)g, step_g);
    }
    *a = centred ? ari_row_value(sum_g, e_g, p) / (double)h : 0.0;
    *b = ari_row_value(sum_product, e_product, p) / (double)h;
}

ARI_ROW_LOOP void backward_row(const norm_row *row, size_t h, int centred)
{
    double a, b;
    backward_means(&a, &b, row, h, centred);
    float *dx = row->dx, *dgamma = row->dgamma;
#pragma GCC ivdep
    for (size_t j = 0; j < h; j++) {
        const float g = row->dy[j] * row->gamma[j];
        const float xhat = xhat_again(row, j, centred);
        const float value =
            centred ? ari_layernorm_dx(g, a, b, xhat, row->rstd) : ari_rmsnorm_dx(g, b, xhat, row->rstd);
        if (dgamma)
            dgamma[j] = ari_mul32(row->dy[j], xhat);
        dx[j] = value;
    }
    if (row->sum && row->residual) {
#pragma GCC ivdep
        for (size_t j = 0; j < h; j++)
            row->sum[j] = ari_add32(row->residual[j], dx[j]);
    }
}

ARI_ROW_KERNEL void layer_backward(const norm_row *row, size_t h)
{
    backward_row(row, h, 1);
}

ARI_ROW_KERNEL void rms_backward(const norm_row *row, size_t h)
{
    backward_row(row, h, 0);
}

/** Slot norm_backward. In place: dx may be dy or x, sum may be residual; no other overlap. dgamma_terms NULL: not
 *  written (a frozen gain). */
ar_status ari_cpu_norm_backward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf dx, ar_buf sum,
                                ar_buf dgamma_terms, ar_cbuf dy, ar_cbuf x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma,
                                ar_cbuf residual, size_t rows, size_t h)
{
    (void)q;
    const int threads = ari_threads_for(d, rows, rows * h);
    (void)threads;
    float *dx_all = dx.ptr, *sum_all = sum.ptr, *dgamma_all = dgamma_terms.ptr;
    const float *dy_all = dy.ptr, *x_all = x.ptr, *residual_all = residual.ptr, *gains = gamma.ptr, *r = rstd.ptr;
    const double *m = mean.ptr;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (size_t i = 0; i < rows; i++) {
        const norm_row row = {.dx = dx_all + i * h,
                              .sum = sum_all ? sum_all + i * h : NULL,
                              .dgamma = dgamma_all ? dgamma_all + i * h : NULL,
                              .dy = dy_all + i * h,
                              .x = x_all + i * h,
                              .gamma = gains,
                              .residual = residual_all ? residual_all + i * h : NULL,
                              .mean = kind == AR_NORM_LAYER ? m[i] : 0.0,
                              .rstd = r[i]};
        if (kind == AR_NORM_LAYER)
            layer_backward(&row, h);
        else
            rms_backward(&row, h);
    }
    return AR_OK;
}
