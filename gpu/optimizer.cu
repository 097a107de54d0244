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

/* --- clipping ----------------------------------------------------------------------------------------------------- */

struct scale_each {
    float *y;
    const float *x;
    float factor;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_clipped(x[i], factor);
    }
};

ar_status scale(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, float factor, size_t n)
{
    return launch_each(d, q, n, scale_each{dev<float>(y), dev<float>(x), factor});
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

struct sgd_each {
    float *w, *m; /* m NULL: no momentum */
    const float *g;
    ari_optimizer_constants k;
    ARI_KERNEL void operator()(size_t i) const
    {
        ari_sgd_update(&k, w + i, m ? m + i : nullptr, g[i]);
    }
};

struct adam_each {
    float *w, *m, *v;
    const float *g;
    ari_optimizer_constants k;
    ARI_KERNEL void operator()(size_t i) const
    {
        ari_adam_update(&k, w + i, m + i, v + i, g[i]);
    }
};

ar_status optimizer_step(ar_device *d, ar_queue *q, ar_buf w, ar_buf m, ar_buf v, ar_cbuf g,
                         const struct ari_optimizer_constants *k, size_t n)
{
    if (v.ptr)
        return launch_each(d, q, n, adam_each{dev<float>(w), dev<float>(m), dev<float>(v), dev<float>(g), *k});
    ari_optimizer_constants own = *k;
    own.has_momentum = m.ptr != nullptr;
    return launch_each(d, q, n, sgd_each{dev<float>(w), dev<float>(m), dev<float>(g), own});
}

} // namespace ARI_GPU
