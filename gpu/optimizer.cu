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

ar_status sum_squares(ar_device *d, ar_queue *q, ar_buf sums, const ar_tensor *g, ar_cbuf e)
{
    const size_t n = ar_tensor_count(g);
    const size_t most = sum_squares_block::most;
    return launch_blocks(d, q, n / most + (n % most != 0), most,
                         sum_squares_block{dev<int64_t>(sums), dev<float>(g->data), dev<int32_t>(e), n});
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

ar_status scale(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, float factor)
{
    float *to = dev<float>(y->data);
    const float *from = dev<float>(x->data);
    return launch_each(d, q, ar_tensor_count(x), [=] ARI_KERNEL(size_t i) { to[i] = ari_clipped(from[i], factor); });
}

/* An element of the weights, of its master copy where there is one, of the moments that the kind has. */
struct optimizer_element {
    ari_optimizer_constants k;
    float *weight, *master, *first, *second;
    const float *gradient;
    ARI_KERNEL void operator()(size_t i) const
    {
        const float w = weight[i];
        float value = master ? master[i] : w;
        if (ari_bits32(ari_f32_of_bf16(ari_bf16_of_f32(value))) != ari_bits32(w))
            value = w; /* it was set since */
        if (second)
            ari_adam_update(&k, &value, first + i, second + i, gradient[i]);
        else
            ari_sgd_update(&k, &value, first ? first + i : nullptr, gradient[i]);
        if (master)
            master[i] = value;
        weight[i] = master ? ari_f32_of_bf16(ari_bf16_of_f32(value)) : value;
    }
};

/* v NULL: SGD; m NULL: without momentum. */
ar_status optimizer_step(ar_device *d, ar_queue *q, const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v,
                         const ar_tensor *g, const struct ari_optimizer_constants *k)
{
    optimizer_element one = {
        *k, dev<float>(w->data), dev<float>(master), dev<float>(m), dev<float>(v), dev<float>(g->data)};
    one.k.has_momentum = one.first != nullptr;
    return launch_each(d, q, ar_tensor_count(w), one);
}

} // namespace ARI_GPU
