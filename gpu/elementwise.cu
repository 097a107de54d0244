/* SPDX-License-Identifier: Apache-2.0 */
/* One thread an element, in dropout four; the definitions are those of ref/numerics. Each thread reads what it needs
 * before it writes, so that outputs may be inputs. */
#include "gpu/kernels.h"
#include "gpu/view.h"
#include "ref/numerics/scalar.h"

namespace ARI_GPU
{

/* --- contiguous --------------------------------------------------------------------------------------------------- */

struct add_each {
    float *y;
    const float *a, *b;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_add32(a[i], b[i]);
    }
};

ar_status add(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n)
{
    return launch_each(d, q, n, add_each{dev<float>(y), dev<float>(a), dev<float>(b)});
}

struct mul_each {
    float *y;
    const float *a, *b;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = ari_mul32(a[i], b[i]);
    }
};

ar_status mul(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf a, ar_cbuf b, size_t n)
{
    return launch_each(d, q, n, mul_each{dev<float>(y), dev<float>(a), dev<float>(b)});
}

struct fill_each {
    float *y;
    float value;
    ARI_KERNEL void operator()(size_t i) const
    {
        y[i] = value;
    }
};

ar_status fill(ar_device *d, ar_queue *q, ar_buf y, float value, size_t n)
{
    return launch_each(d, q, n, fill_each{dev<float>(y), ari_canonical32(value)});
}

/* --- activations -------------------------------------------------------------------------------------------------- */

struct bias_act_each {
    float *y, *z;      /* z NULL: no activation */
    const float *bias; /* or NULL */
    size_t cols;
    ar_activation act;
    ARI_KERNEL void operator()(size_t i) const
    {
        float sum = y[i];
        if (bias) {
            sum = ari_add32(sum, bias[i % cols]);
            y[i] = sum;
        }
        if (z)
            z[i] = ari_act32(act, sum);
    }
};

ar_status bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act, const ar_tensor *z)
{
    float *values = act == AR_ACT_NONE ? nullptr : dev<float>(z->data);
    const size_t cols = y->shape[1];
    return launch_each(d, q, y->shape[0] * cols,
                       bias_act_each{dev<float>(y->data), values, dev<float>(bias), cols, act});
}

struct act_backward_each {
    float *dx;
    const float *dy, *x;
    ar_activation act;
    ARI_KERNEL void operator()(size_t i) const
    {
        dx[i] = ari_mul32(dy[i], ari_dact32(act, x[i]));
    }
};

ar_status act_backward(ar_device *d, ar_queue *q, ar_buf dx, ar_cbuf dy, ar_cbuf x, ar_activation act, size_t n)
{
    return launch_each(d, q, n, act_backward_each{dev<float>(dx), dev<float>(dy), dev<float>(x), act});
}

/* A 2-D view whose columns are contiguous. */
template <class T> struct strided_rows {
    T *data;
    ptrdiff_t stride;
    ARI_KERNEL T *at(size_t row, size_t col) const
    {
        return data + static_cast<ptrdiff_t>(row) * stride + col;
    }
};

template <class T> strided_rows<T> rows_of(const ar_tensor *t)
{
    return strided_rows<T>{dev<T>(t->data), t->stride[0]};
}

struct gated_forward_each {
    strided_rows<float> y;
    strided_rows<const float> gate, up;
    size_t cols;
    ar_activation act;
    ARI_KERNEL void operator()(size_t i) const
    {
        const size_t row = i / cols, col = i % cols;
        *y.at(row, col) = ari_gated_act(act, *gate.at(row, col), *up.at(row, col));
    }
};

ar_status gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
                        ar_activation act)
{
    const size_t cols = y->shape[1];
    return launch_each(
        d, q, y->shape[0] * cols,
        gated_forward_each{rows_of<float>(y), rows_of<const float>(gate), rows_of<const float>(up), cols, act});
}

struct gated_backward_each {
    strided_rows<float> dgate, dup;
    strided_rows<const float> dy, gate, up;
    size_t cols;
    ar_activation act;
    ARI_KERNEL void operator()(size_t i) const
    {
        const size_t row = i / cols, col = i % cols;
        const float slope = *dy.at(row, col), g = *gate.at(row, col);
        const float by_gate = ari_gated_dgate(act, slope, *up.at(row, col), g);
        *dup.at(row, col) = ari_gated_dup(act, slope, g);
        *dgate.at(row, col) = by_gate;
    }
};

ar_status gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup, const ar_tensor *dy,
                         const ar_tensor *gate, const ar_tensor *up, ar_activation act)
{
    const size_t cols = dy->shape[1];
    const gated_backward_each kernel = {rows_of<float>(dgate),
                                        rows_of<float>(dup),
                                        rows_of<const float>(dy),
                                        rows_of<const float>(gate),
                                        rows_of<const float>(up),
                                        cols,
                                        act};
    return launch_each(d, q, dy->shape[0] * cols, kernel);
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Four elements of a full value share a block of random bits. A row may begin inside one: a thread draws one block and
 * takes those of its lanes that lie in the row, of which there are `blocks` at most. */
struct dropout_block {
    float *y;
    const float *x;
    size_t cols, blocks, shape[AR_MAX_DIMS];
    ar_dropout which; /* its strides moved to the dimensions of shape */
    ARI_KERNEL void operator()(size_t i) const
    {
        const size_t row = i / blocks, block = i % blocks;
        uint64_t first = which.first;
        size_t rest = row;
        for (int k = AR_MAX_DIMS - 2; k >= 0; k--) {
            first += static_cast<uint64_t>(rest % shape[k]) * which.stride[k];
            rest /= shape[k];
        }
        uint32_t bits[4];
        const uint64_t drawn = ((first >> 2) + block) << 2;
        ari_random_block(which.key, drawn, which.step, 0, bits);
        for (unsigned lane = 0; lane < 4; lane++) {
            const uint64_t number = drawn + lane;
            if (number < first || number - first >= cols)
                continue;
            const size_t at = row * cols + static_cast<size_t>(number - first);
            y[at] = bits[lane] >= which.threshold ? ari_mul32(x[at], which.scale) : 0.0f;
        }
    }
};

ar_status dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, const ar_dropout *which)
{
    const view<const float> from = view_of<const float>(x);
    const size_t cols = from.shape[3], blocks = cols / 4 + 2;
    dropout_block kernel = {dev<float>(y->data), from.data, cols, blocks, {}, *which};
    const int missing = AR_MAX_DIMS - x->ndim;
    for (int k = 0; k < AR_MAX_DIMS; k++) {
        kernel.shape[k] = from.shape[k];
        kernel.which.stride[k] = k < missing ? 0 : which->stride[k - missing];
    }
    return launch_each(d, q, cols > 0 ? from.rows() * blocks : 0, kernel);
}

} // namespace ARI_GPU
