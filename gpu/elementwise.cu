/* SPDX-License-Identifier: Apache-2.0 */
/* One thread an element, in dropout four; the definitions are those of ref/numerics and ref/core/half.h. Each thread
 * reads what it needs before it writes, so that outputs may be inputs. */
#include "gpu/kernels.h"
#include "ref/core/float_bits.h"

namespace ARI_GPU
{

/* --- contiguous --------------------------------------------------------------------------------------------------- */

ar_status add(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    float *to = dev<float>(y->data);
    const float *left = dev<float>(a->data), *right = dev<float>(b->data);
    return launch_each(d, q, ar_tensor_count(y), [=] ARI_KERNEL(size_t i) { to[i] = ari_add32(left[i], right[i]); });
}

ar_status mul(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    float *to = dev<float>(y->data);
    const float *left = dev<float>(a->data), *right = dev<float>(b->data);
    return launch_each(d, q, ar_tensor_count(y), [=] ARI_KERNEL(size_t i) { to[i] = ari_mul32(left[i], right[i]); });
}

ar_status fill(ar_device *d, ar_queue *q, const ar_tensor *y, float value)
{
    return launch_each(
        d, q, ar_tensor_count(y),
        [to = dev<float>(y->data), value = ari_canonical32(value)] ARI_KERNEL(size_t i) { to[i] = value; });
}

/* --- activations -------------------------------------------------------------------------------------------------- */

ar_status bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act, const ar_tensor *z)
{
    float *sums = dev<float>(y->data), *values = act == AR_ACT_NONE ? nullptr : dev<float>(z->data);
    const size_t cols = y->shape[1];
    return launch_each(d, q, y->shape[0] * cols, [=, bias = dev<float>(bias)] ARI_KERNEL(size_t i) {
        float sum = sums[i];
        if (bias) {
            sum = ari_add32(sum, bias[i % cols]);
            sums[i] = sum;
        }
        if (values)
            values[i] = ari_act32(act, sum);
    });
}

ar_status act_backward(ar_device *d, ar_queue *q, ar_buf dx, ar_cbuf dy, ar_cbuf x, ar_activation act, size_t n)
{
    return launch_each(d, q, n,
                       [act, dx = dev<float>(dx), dy = dev<float>(dy), x = dev<float>(x)] ARI_KERNEL(size_t i) {
                           dx[i] = ari_mul32(dy[i], ari_dact32(act, x[i]));
                       });
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

ar_status gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
                        ar_activation act)
{
    const size_t cols = y->shape[1];
    const strided_rows<float> to = rows_of<float>(y);
    const strided_rows<const float> g = rows_of<const float>(gate), u = rows_of<const float>(up);
    return launch_each(d, q, y->shape[0] * cols, [=] ARI_KERNEL(size_t i) {
        const size_t row = i / cols, col = i % cols;
        *to.at(row, col) = ari_gated_act(act, *g.at(row, col), *u.at(row, col));
    });
}

ar_status gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup, const ar_tensor *dy,
                         const ar_tensor *gate, const ar_tensor *up, ar_activation act)
{
    const size_t cols = dy->shape[1];
    const strided_rows<float> to_gate = rows_of<float>(dgate), to_up = rows_of<float>(dup);
    const strided_rows<const float> slopes = rows_of<const float>(dy);
    const strided_rows<const float> gates = rows_of<const float>(gate), ups = rows_of<const float>(up);
    return launch_each(d, q, dy->shape[0] * cols, [=] ARI_KERNEL(size_t i) {
        const size_t row = i / cols, col = i % cols;
        const float slope = *slopes.at(row, col), g = *gates.at(row, col);
        const float by_gate = ari_gated_dgate(act, slope, *ups.at(row, col), g);
        *to_up.at(row, col) = ari_gated_dup(act, slope, g);
        *to_gate.at(row, col) = by_gate;
    });
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Four elements of a full value share a block of random bits. A row may begin inside one: a thread draws one block and
 * takes those of its lanes that are in the row, of which there are `blocks` at most. */
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

/* --- numbers of fewer bits ---------------------------------------------------------------------------------------- */

ar_status round_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(d, q, n, [y = dev<float>(y), x = dev<float>(x)] ARI_KERNEL(size_t i) {
        y[i] = ari_f32_of_bf16(ari_bf16_of_f32(x[i]));
    });
}

ar_status round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits)
{
    const view<float> to = view_of<float>(y);
    const view<const float> from = view_of<const float>(x);
    return launch_each(d, q, from.count(), [=] ARI_KERNEL(size_t i) {
        const place p = from.where(i);
        *to.at(p) = ari_f32_to_bits(*from.at(p), bits);
    });
}

ar_status narrow_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(
        d, q, n, [y = dev<uint16_t>(y), x = dev<float>(x)] ARI_KERNEL(size_t i) { y[i] = ari_bf16_of_f32(x[i]); });
}

ar_status widen_bf16(ar_device *d, ar_queue *q, ar_buf y, ar_cbuf x, size_t n)
{
    return launch_each(
        d, q, n, [y = dev<float>(y), x = dev<uint16_t>(x)] ARI_KERNEL(size_t i) { y[i] = ari_f32_of_bf16(x[i]); });
}

} // namespace ARI_GPU
