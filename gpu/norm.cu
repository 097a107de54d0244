/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm and RMSNorm, a block a row: what ref/cpu/norm.c does. Nothing is kept between the passes over a row but its
 * sums: what lies between x and the result costs less than memory for it, and an output may be an input, since no value
 * is written before its last use. */
#include "gpu/kernels.h"

namespace ARI_GPU
{

template <bool centred> ARI_KERNEL float deviation(float x, double mean)
{
    return centred ? ari_layernorm_d(x, mean) : x;
}

/* mean: unused if not centred. */
template <bool centred>
ar_status forward(ar_device *d, ar_queue *q, const ar_tensor *y, ar_buf mean, ar_buf rstd, const ar_tensor *x,
                  ar_cbuf gamma, ar_cbuf beta, double eps)
{
    const ar_tensor all = ar_tensor_rows(x);
    const size_t rows = all.shape[0], h = all.shape[1];
    float *to = dev<float>(y->data), *inverses = dev<float>(rstd);
    double *means = dev<double>(mean);
    const float *from = dev<float>(x->data), *weight = dev<float>(gamma), *bias = dev<float>(beta);
    const int32_t p = ari_rowsum_bits(h);
    return launch_blocks(d, q, h > 0 ? rows : 0, h, [=] ARI_KERNEL(const block &b) {
        const float *in = from + b.index * h;
        float *out = to + b.index * h;
        const double width = static_cast<double>(h);
        double m = 0.0;
        if (centred)
            m = row_sum(b, h, p, [&](size_t j) { return static_cast<double>(in[j]); }) / width;
        const double squares = row_sum(b, h, p, [&](size_t j) {
            const double difference = static_cast<double>(deviation<centred>(in[j], m));
            return difference * difference;
        });
        const float r = ari_norm_rstd(squares / width, eps);
        b.each(h, [&](size_t j) {
            const float xhat = ari_mul32(deviation<centred>(in[j], m), r);
            out[j] = centred ? ari_layernorm_y(xhat, weight[j], bias[j]) : ari_mul32(xhat, weight[j]);
        });
        b.each(1, [&](size_t) {
            if (centred) /* a quotient's NaN has the bits that a processor gives it */
                means[b.index] = m == m ? m : static_cast<double>(ari_nan32());
            inverses[b.index] = r;
        });
    });
}

ar_status norm_forward(ar_device *d, ar_queue *q, ar_norm_kind kind, const ar_tensor *y, ar_buf mean, ar_buf rstd,
                       const ar_tensor *x, ar_cbuf gamma, ar_cbuf beta, double eps)
{
    return (kind == AR_NORM_LAYER ? forward<true> : forward<false>)(d, q, y, mean, rstd, x, gamma, beta, eps);
}

/* mean: unused if not centred; sum and dgamma_terms NULL: not wanted. */
template <bool centred>
ar_status backward(ar_device *d, ar_queue *q, ar_buf dx, ar_buf sum, ar_buf dgamma_terms, ar_cbuf dy, ar_cbuf x,
                   ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, ar_cbuf residual, size_t rows, size_t h)
{
    float *to = dev<float>(dx), *to_sum = residual.ptr ? dev<float>(sum) : nullptr;
    float *dgamma = dev<float>(dgamma_terms);
    const float *slopes = dev<float>(dy), *from = dev<float>(x), *inverses = dev<float>(rstd);
    const float *weight = dev<float>(gamma), *beside = dev<float>(residual);
    const double *means = dev<double>(mean);
    const int32_t p = ari_rowsum_bits(h);
    return launch_blocks(d, q, rows, h, [=] ARI_KERNEL(const block &b) {
        const size_t first = b.index * h;
        const float *slope = slopes + first, *in = from + first;
        const double m = centred ? means[b.index] : 0.0, width = static_cast<double>(h);
        const float r = inverses[b.index];
        auto xhat = [&](size_t j) { return ari_mul32(deviation<centred>(in[j], m), r); };
        auto g = [&](size_t j) { return ari_mul32(slope[j], weight[j]); };
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
            to[first + j] = own;
            if (to_sum)
                to_sum[first + j] = ari_add32(beside[first + j], own);
        });
    });
}

ar_status norm_backward(ar_device *d, ar_queue *q, ar_norm_kind kind, ar_buf dx, ar_buf sum, ar_buf dgamma_terms,
                        ar_cbuf dy, ar_cbuf x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, ar_cbuf residual, size_t rows,
                        size_t h)
{
    return (kind == AR_NORM_LAYER ? backward<true> : backward<false>)(d, q, dx, sum, dgamma_terms, dy, x, mean, rstd,
                                                                      gamma, residual, rows, h);
}

} // namespace ARI_GPU
