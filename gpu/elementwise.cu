/* SPDX-License-Identifier: Apache-2.0 */
/* One thread an element, in dropout four; the definitions are those of ref/numerics and ref/core/half.h. Each thread
 * reads what it needs before it writes, so that outputs may be inputs. */
#include "gpu/sums.h"
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

ar_status act_backward(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                       ar_activation act, const ar_row_sum *dbias)
{
    float *to = dev<float>(dx->data);
    const float *slopes = dev<float>(ar_const(dy->data)), *from = dev<float>(ar_const(x->data));
    const ar_tensor all = ar_tensor_rows(x);
    const size_t rows = all.shape[0], cols = all.shape[1];
    if (!wanted(dbias))
        return launch_each(d, q, rows * cols,
                           [=] ARI_KERNEL(size_t i) { to[i] = ari_mul32(slopes[i], ari_dact32(act, from[i])); });
    return add_to_sums<1>(d, q, {dbias}, rows, cols, [=] ARI_KERNEL(size_t row, size_t col, float(&v)[1]) {
        const size_t i = row * cols + col;
        v[0] = to[i] = ari_mul32(slopes[i], ari_dact32(act, from[i]));
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

/* The backward pass at one place. */
struct gated_gradient {
    ar_activation act;
    strided_rows<float> dgate, dup;
    strided_rows<const float> dy, gate, up;
    ARI_KERNEL void operator()(size_t row, size_t col, float (&v)[2]) const
    {
        const float slope = *dy.at(row, col), g = *gate.at(row, col);
        v[0] = ari_gated_dgate(act, slope, *up.at(row, col), g);
        v[1] = ari_gated_dup(act, slope, g);
        *dup.at(row, col) = v[1];
        *dgate.at(row, col) = v[0];
    }
};

ar_status gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup, const ar_tensor *dy,
                         const ar_tensor *gate, const ar_tensor *up, ar_activation act, const ar_row_sum *dgate_bias,
                         const ar_row_sum *dup_bias)
{
    const size_t rows = dy->shape[0], cols = dy->shape[1];
    const gated_gradient at = {act,
                               rows_of<float>(dgate),
                               rows_of<float>(dup),
                               rows_of<const float>(dy),
                               rows_of<const float>(gate),
                               rows_of<const float>(up)};
    if (wanted(dgate_bias) || wanted(dup_bias))
        return add_to_sums<2>(d, q, {dgate_bias, dup_bias}, rows, cols, at);
    return launch_each(d, q, rows * cols, [=] ARI_KERNEL(size_t i) {
        float v[2];
        at(i / cols, i % cols, v);
    });
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Four elements of a full value share a block of random bits. A row may begin inside one: a thread draws one block and
 * takes those of its lanes that are in the row, of which there are `blocks` at most. */
struct dropout_block {
    float *y, *sum; /* NULL: not written */
    const float *x, *residual;
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
            const float kept = bits[lane] >= which.threshold ? ari_mul32(x[at], which.scale) : 0.0f;
            if (y)
                y[at] = kept;
            if (sum)
                sum[at] = ari_add32(residual[at], kept);
        }
    }
};

ar_status dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                  const ar_tensor *residual, const ar_dropout *which)
{
    const ar_buf none = {nullptr}, beside = residual ? residual->data : none;
    float *to = dev<float>(y ? y->data : none), *to_sum = dev<float>(residual ? sum->data : none);
    const view<const float> from = view_of<const float>(x);
    const size_t cols = from.shape[3], blocks = cols / 4 + 2;
    dropout_block kernel = {to, to_sum, from.data, dev<float>(ar_const(beside)), cols, blocks, {}, *which};
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
