/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of the weights, and the norm of the gradients; the definitions are those of ref/numerics/optimizer.h. */
#include "gpu/kernels.h"
#include "ref/numerics/optimizer.h"

namespace ARI_GPU
{

/* --- the gradient norm: integers, so that no order changes the sums ----------------------------------------------- */

struct sum_squares_block {
    static const size_t most = 8192; /* elements of a block */
    int64_t *sums;
    const float *g;
    const int32_t *e;
    size_t n;
    ARI_KERNEL void operator()(const block &b) const
    {
        const size_t from = b.index * most, length = n - from < most ? n - from : most;
        const float *values = g + from;
        const int32_t exponent = *e;
        const uint64_t high = b.sum(length, [=](size_t i) {
            return static_cast<uint64_t>(ari_norm_high(ari_norm_square(values[i], exponent)));
        });
        const uint64_t low = b.sum(length, [=](size_t i) {
            return static_cast<uint64_t>(ari_norm_low(ari_norm_square(values[i], exponent)));
        });
        int64_t *out = sums;
        b.each(2, [=](size_t i) { atomic_add(out + i, static_cast<int64_t>(i == 0 ? high : low)); });
    }
};

ar_status sum_squares(ar_device *d, ar_queue *q, ar_buf sums, ar_cbuf g, ar_cbuf e, size_t n)
{
    const size_t most = sum_squares_block::most;
    return launch_blocks(d, q, n / most + (n % most != 0), most,
                         sum_squares_block{dev<int64_t>(sums), dev<float>(g), dev<int32_t>(e), n});
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

ar_status scale(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, float factor, size_t n)
{
    return launch_each(d, q, n, [factor, y = dev<float>(y), x = dev<float>(x)] ARI_KERNEL(size_t i) {
        y[i] = ari_clipped(x[i], factor);
    });
}

/* v NULL: SGD; m NULL: without momentum. */
ar_status optimizer_step(ar_device *d, ar_queue *q, ar_buf w, ar_buf m, ar_buf v, ar_cbuf g,
                         const struct ari_optimizer_constants *k, size_t n)
{
    float *weight = dev<float>(w), *first = dev<float>(m), *second = dev<float>(v);
    ari_optimizer_constants own = *k;
    if (second)
        return launch_each(d, q, n, [=, g = dev<float>(g)] ARI_KERNEL(size_t i) {
            ari_adam_update(&own, weight + i, first + i, second + i, g[i]);
        });
    own.has_momentum = first != nullptr;
    return launch_each(d, q, n, [=, g = dev<float>(g)] ARI_KERNEL(size_t i) {
        ari_sgd_update(&own, weight + i, first ? first + i : nullptr, g[i]);
    });
}

} // namespace ARI_GPU
