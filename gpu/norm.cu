/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm and RMSNorm, a block a row: what ref/cpu/norm.c does. Nothing is kept between the passes over a row but its
 * sums: what lies between x and the result costs less than memory for it, and an output may be an input, since no value
 * is written before its last use. */
#include "gpu/kernels.h"
#include "gpu/row_sum.h"

namespace ARI_GPU
{

template <bool centred> ARI_KERNEL float deviation(float x, double mean)
{
    return centred ? ari_layernorm_d(x, mean) : x;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

template <bool centred> struct norm_forward_row {
    float *y;
    double *mean; /* unused if not centred */
    float *rstd;
    const float *x, *gamma, *beta;
    double eps;
    size_t h;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const float *in = x + b.index * h;
        float *out = y + b.index * h;
        const double width = static_cast<double>(h);
        double m = 0.0;
        if (centred)
            m = row_sum(b, h, p, [&](size_t j) { return static_cast<double>(in[j]); }) / width;
        const double squares = row_sum(b, h, p, [&](size_t j) {
            const double d = static_cast<double>(deviation<centred>(in[j], m));
            return d * d;
        });
        const float r = ari_norm_rstd(squares / width, eps);
        b.each(h, [&](size_t j) {
            const float xhat = ari_mul32(deviation<centred>(in[j], m), r);
            out[j] = centred ? ari_layernorm_y(xhat, gamma[j], beta[j]) : ari_mul32(xhat, gamma[j]);
        });
        b.each(1, [&](size_t) {
            if (centred) /* a quotient's NaN has the bits that a processor gives it */
                mean[b.index] = m == m ? m : static_cast<double>(ari_nan32());
            rstd[b.index] = r;
        });
    }
};

template <bool centred>
static ar_status forward(ar_device *d, ar_queue *q, ar_buf y, ar_buf mean, ar_buf rstd, ar_cbuf x, ar_cbuf gamma,
                         ar_cbuf beta, double eps, size_t rows, size_t h)
{
    const norm_forward_row<centred> kernel = {dev<float>(y),
                                              dev<double>(mean),
                                              dev<float>(rstd),
                                              dev<float>(x),
                                              dev<float>(gamma),
                                              dev<float>(beta),
                                              eps,
                                              h,
                                              ari_rowsum_bits(h)};
    return launch_blocks(d, q, h > 0 ? rows : 0, h, kernel);
}

ar_status norm_forward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf y, ar_buf mean, ar_buf rstd, ar_cbuf x,
                       ar_cbuf gamma, ar_cbuf beta, double eps, size_t rows, size_t h)
{
    return kind == AR_NORM_LAYER ? forward<true>(d, q, y, mean, rstd, x, gamma, beta, eps, rows, h)
                                 : forward<false>(d, q, y, mean, rstd, x, gamma, beta, eps, rows, h);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

template <bool centred> struct norm_backward_row {
    float *dx, *sum, *dgamma; /* sum, dgamma NULL: not wanted */
    const float *dy, *x;
    const double *mean; /* unused if not centred */
    const float *rstd, *gamma, *residual;
    size_t h;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const size_t first = b.index * h;
        const float *slope = dy + first, *in = x + first;
        const double m = centred ? mean[b.index] : 0.0, width = static_cast<double>(h);
        const float r = rstd[b.index];
        auto xhat = [&](size_t j) { return ari_mul32(deviation<centred>(in[j], m), r); };
        auto g = [&](size_t j) { return ari_mul32(slope[j], gamma[j]); };
        double mean_g = 0.0;
        if (centred)
            mean_g = row_sum(b, h, p, [&](size_t j) { return static_cast<double>(g(j)); }) / width;
        const double products =
            row_sum(b, h, p, [&](size_t j) { return static_cast<double>(g(j)) * static_cast<double>(xhat(j)); });
        const double mean_product = products / width;
        b.each(h, [&](size_t j) {
            const float at = xhat(j), down = g(j);
            if (dgamma)
                dgamma[first + j] = ari_mul32(slope[j], at);
            const float own = centred ? ari_layernorm_dx(down, mean_g, mean_product, at, r)
                                      : ari_rmsnorm_dx(down, mean_product, at, r);
            dx[first + j] = own;
            if (sum)
                sum[first + j] = ari_add32(residual[first + j], own);
        });
    }
};

template <bool centred>
static ar_status backward(ar_device *d, ar_queue *q, ar_buf dx, ar_buf sum, ar_buf dgamma_terms, ar_cbuf dy, ar_cbuf x,
                          ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, ar_cbuf residual, size_t rows, size_t h)
{
    const norm_backward_row<centred> kernel = {dev<float>(dx),
                                               residual.ptr ? dev<float>(sum) : nullptr,
                                               dev<float>(dgamma_terms),
                                               dev<float>(dy),
                                               dev<float>(x),
                                               dev<double>(mean),
                                               dev<float>(rstd),
                                               dev<float>(gamma),
                                               dev<float>(residual),
                                               h,
                                               ari_rowsum_bits(h)};
    return launch_blocks(d, q, rows, h, kernel);
}

ar_status norm_backward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf dx, ar_buf sum, ar_buf dgamma_terms,
                        ar_cbuf dy, ar_cbuf x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, ar_cbuf residual, size_t rows,
                        size_t h)
{
    return kind == AR_NORM_LAYER
               ? backward<true>(d, q, dx, sum, dgamma_terms, dy, x, mean, rstd, gamma, residual, rows, h)
               : backward<false>(d, q, dx, sum, dgamma_terms, dy, x, mean, rstd, gamma, residual, rows, h);
}

} // namespace ARI_GPU
