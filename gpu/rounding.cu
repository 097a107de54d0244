/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of fewer bits; the definitions are those of ref/core/half.h. */
#include "gpu/kernels.h"
#include "gpu/view.h"
#include "ref/core/half.h"

namespace ARI_GPU
{

struct round_bf16_each {
    float *y;
    const float *x;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_f32_of_bf16(ari_bf16_of_f32(x[i]));
    }
};

ar_status round_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(d, q, n, round_bf16_each{dev<float>(y), dev<float>(x)});
}

struct round_bits_each {
    view<float> y;
    view<const float> x;
    int bits;
    ARI_KERNEL void operator()(size_t i) const
    {
        const place p = x.where(i);
        *y.at(p) = ari_f32_to_bits(*x.at(p), bits);
    }
};

ar_status round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits)
{
    const round_bits_each kernel = {view_of<float>(y), view_of<const float>(x), bits};
    return launch_each(d, q, kernel.x.count(), kernel);
}

struct take_bf16_each {
    float *master;
    const float *weight;
    ARI_KERNEL void operator()(size_t i) const
    {
        const float rounded = ari_f32_of_bf16(ari_bf16_of_f32(master[i]));
        if (ari_bits32(rounded) != ari_bits32(weight[i]))
            master[i] = weight[i];
    }
};

ar_status take_bf16(ar_device *d, ar_queue *q, ar_buf master, ar_cbuf weight, size_t n)
{
    return launch_each(d, q, n, take_bf16_each{dev<float>(master), dev<float>(weight)});
}

struct narrow_each {
    uint16_t *y;
    const float *x;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_bf16_of_f32(x[i]);
    }
};

ar_status narrow_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(d, q, n, narrow_each{dev<uint16_t>(y), dev<float>(x)});
}

struct widen_each {
    float *y;
    const uint16_t *x;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_f32_of_bf16(x[i]);
    }
};

ar_status widen_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(d, q, n, widen_each{dev<float>(y), dev<uint16_t>(x)});
}

} // namespace ARI_GPU
