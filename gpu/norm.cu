/* SPDX-License-Identifier: Apache-2.0 */
/* LayerNorm and RMSNorm with one block per row, as in ref/cpu/norm.c. Only the sums are kept between the passes over a
 * row, since recomputing intermediate values costs less than memory for them. An output may be an input, because no
 * value is written before its last use. */
#include "gpu/sums.h"
#include "gpu/vectors.h"
#include "ref/core/tensor_private.h"

namespace ARI_GPU
{

template <bool centred> ARI_ON_GPU float deviation(float x, double mean)
{
    return centred ? ari_layernorm_d(x, mean) : x;
}

/* mean: unused if not centred. */
template <bool centred, class T>
ar_status forward_of(ar_device *d, ar_queue *q, const ar_tensor *y, ar_buf mean, ar_buf rstd, const ar_tensor *x,
                     ar_cbuf gamma, ar_cbuf beta, double eps)
{
    const ar_tensor matrix = ari_tensor_rows(x);
    const size_t rows = matrix.shape[0], h = matrix.shape[1];
    T *dst = dev<T>(y->data);
    float *inverses = dev<float>(rstd);
    double *means = dev<double>(mean);
    const T *src = dev<T>(x->data);
    const float *weight = dev<float>(gamma), *bias = dev<float>(beta);
    const int32_t p = ari_rowsum_bits(h);
    const bool wide = h % ROW_LANES == 0 && aligned<ROW_LANES>(dst, src) && aligned<ROW_LANES>(weight, bias);
    return launch_blocks(d, q, h > 0 ? rows : 0, h, [=] ARI_ON_GPU(const block &b) {
        const T *src_row = src + b.index * h;
        T *out = dst + b.index * h;
        const double width = static_cast<double>(h);
        double m = 0.0;
        if (centred)
            m = row_sum<ROW_LANES>(b, h, wide, p,
                                   [&](auto lanes, size_t j) {
                                       const auto value = read_vector<lanes>(src_row + j);
                                       return vector_of<lanes>(
                                           [&](size_t k) { return static_cast<double>(load(value.lane[k])); });
                                   }) /
                width;
        const double squares = row_sum<ROW_LANES>(b, h, wide, p, [&](auto lanes, size_t j) {
            const auto value = read_vector<lanes>(src_row + j);
            return vector_of<lanes>([&](size_t k) {
                const double difference = static_cast<double>(deviation<centred>(load(value.lane[k]), m));
                return difference * difference;
            });
        });
        const float r = ari_norm_rstd(squares / width, eps);
        each_vector<ROW_LANES>(b, h, wide, [&](auto lanes, size_t j) {
            const auto value = read_vector<lanes>(src_row + j);
            const auto gain = read_vector<lanes>(weight + j),
                       offset = read_vector<lanes>(bias != nullptr ? bias + j : weight + j);
            write_stored<lanes>(out + j, [&](size_t k) {
                const float xhat = ari_mul32(deviation<centred>(load(value.lane[k]), m), r);
                return bias != nullptr ? ari_layernorm_y(xhat, gain.lane[k], offset.lane[k])
                                       : ari_mul32(xhat, gain.lane[k]);
            });
        });
        b.each(1, [&](size_t) {
            if (centred) /* gives a quotient's NaN the bits that a processor gives it */
                means[b.index] = m == m ? m : static_cast<double>(ari_nan32());
            inverses[b.index] = r;
        });
    });
}

ARI_FOR_DTYPES(norm_forward, y, (kind, y, mean, rstd, x, gamma, beta, eps), ar_norm_kind kind, const ar_tensor *y,
               ar_buf mean, ar_buf rstd, const ar_tensor *x, ar_cbuf gamma, ar_cbuf beta, double eps)
{
    return (kind == AR_NORM_LAYER ? forward_of<true, T> : forward_of<false, T>)(d, q, y, mean, rstd, x, gamma, beta,
                                                                                eps);
}

/* Computes the parameters' gradients by reading x and dy a second time, which costs as much as writing and reading
 * terms, and needs no memory. */
template <bool centred, class T>
ar_status parameter_gradients(ar_device *d, ar_queue *q, const ar_tensor *dy, const ar_tensor *x, ar_cbuf mean,
                              ar_cbuf rstd, const ar_row_sum *dgamma, const ar_row_sum *dbeta)
{
    const ar_tensor matrix = ari_tensor_rows(x);
    const size_t h = matrix.shape[1];
    const T *slopes = dev<T>(dy->data), *src = dev<T>(x->data);
    const float *inverses = dev<float>(rstd);
    const double *means = dev<double>(mean);
    return add_to_sums<2>(d, q, {dgamma, dbeta}, matrix.shape[0], h,
                          [=] ARI_ON_GPU(size_t row, size_t col, float(&v)[2]) {
                              const size_t i = row * h + col;
                              const double m = centred ? means[row] : 0.0;
                              const float xhat = ari_mul32(deviation<centred>(load(src[i]), m), inverses[row]);
                              v[0] = ari_mul32(load(slopes[i]), xhat);
                              v[1] = load(slopes[i]);
                          });
}

/* mean: unused if not centred; sum NULL: not wanted. */
template <bool centred, class T>
ar_status input_gradient(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *sum, const ar_tensor *dy,
                         const ar_tensor *x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, const ar_tensor *residual)
{
    const ar_buf null_buffer = {nullptr};
    T *dst = dev<T>(dx->data), *to_sum = dev<T>(residual ? sum->data : null_buffer);
    const T *slopes = dev<T>(dy->data), *src = dev<T>(x->data);
    const T *residuals = dev<T>(residual ? residual->data : null_buffer);
    const float *weight = dev<float>(gamma);
    const float *inverses = dev<float>(rstd);
    const double *means = dev<double>(mean);
    const ar_tensor matrix = ari_tensor_rows(x);
    const size_t h = matrix.shape[1];
    const int32_t p = ari_rowsum_bits(h);
    const bool wide =
        h % ROW_LANES == 0 && aligned<ROW_LANES>(dst, to_sum, slopes, src, residuals) && aligned<ROW_LANES>(weight);
    return launch_blocks(d, q, matrix.shape[0], h, [=] ARI_ON_GPU(const block &b) {
        const size_t row_offset = b.index * h;
        const T *slope = slopes + row_offset, *src_row = src + row_offset;
        const double m = centred ? means[b.index] : 0.0, width = static_cast<double>(h);
        const float r = inverses[b.index];
        auto xhat = [&](auto lanes, size_t j) {
            const auto value = read_vector<lanes>(src_row + j);
            return vector_of<lanes>([&](size_t k) { return ari_mul32(deviation<centred>(load(value.lane[k]), m), r); });
        };
        auto g = [&](auto lanes, size_t j) {
            const auto down = read_vector<lanes>(slope + j);
            const auto gain = read_vector<lanes>(weight + j);
            return vector_of<lanes>([&](size_t k) { return ari_mul32(load(down.lane[k]), gain.lane[k]); });
        };
        double mean_g = 0.0;
        if (centred)
            mean_g = row_sum<ROW_LANES>(b, h, wide, p,
                                        [&](auto lanes, size_t j) {
                                            const auto down = g(lanes, j);
                                            return vector_of<lanes>(
                                                [&](size_t k) { return static_cast<double>(down.lane[k]); });
                                        }) /
                     width;
        const double products = row_sum<ROW_LANES>(b, h, wide, p, [&](auto lanes, size_t j) {
            const auto down = g(lanes, j), xhat_values = xhat(lanes, j);
            return vector_of<lanes>(
                [&](size_t k) { return static_cast<double>(down.lane[k]) * static_cast<double>(xhat_values.lane[k]); });
        });
        const double mean_product = products / width;
        each_vector<ROW_LANES>(b, h, wide, [&](auto lanes, size_t j) {
            const auto down = g(lanes, j), xhat_values = xhat(lanes, j);
            const auto gradient = vector_of<lanes>([&](size_t k) {
                return centred ? ari_layernorm_dx(down.lane[k], mean_g, mean_product, xhat_values.lane[k], r)
                               : ari_rmsnorm_dx(down.lane[k], mean_product, xhat_values.lane[k], r);
            });
            if (to_sum) {
                const auto residual_values = read_vector<lanes>(residuals + row_offset + j);
                write_stored<lanes>(to_sum + row_offset + j, [&](size_t k) {
                    return ari_add32(load(residual_values.lane[k]), gradient.lane[k]);
                });
            }
            write_stored<lanes>(dst + row_offset + j, [&](size_t k) { return gradient.lane[k]; });
        });
    });
}

/* The parameters' gradients come first, because dx may overwrite x or dy. */
template <bool centred, class T>
ar_status backward_of(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *sum, const ar_tensor *dy,
                      const ar_tensor *x, ar_cbuf mean, ar_cbuf rstd, ar_cbuf gamma, const ar_tensor *residual,
                      const ar_row_sum *dgamma, const ar_row_sum *dbeta)
{
    if (is_requested(dgamma) || is_requested(dbeta))
        AR_TRY((parameter_gradients<centred, T>(d, q, dy, x, mean, rstd, dgamma, dbeta)));
    return input_gradient<centred, T>(d, q, dx, sum, dy, x, mean, rstd, gamma, residual);
}

ARI_FOR_DTYPES(norm_backward, x, (kind, dx, sum, dy, x, mean, rstd, gamma, residual, dgamma, dbeta), ar_norm_kind kind,
               const ar_tensor *dx, const ar_tensor *sum, const ar_tensor *dy, const ar_tensor *x, ar_cbuf mean,
               ar_cbuf rstd, ar_cbuf gamma, const ar_tensor *residual, const ar_row_sum *dgamma,
               const ar_row_sum *dbeta)
{
    return (kind == AR_NORM_LAYER ? backward_of<true, T> : backward_of<false, T>)(d, q, dx, sum, dy, x, mean, rstd,
                                                                                  gamma, residual, dgamma, dbeta);
}

} // namespace ARI_GPU
