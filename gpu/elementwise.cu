/* SPDX-License-Identifier: Apache-2.0 */
/* One thread an element, in dropout four; the definitions are those of ref/numerics and ref/core/half.h. Each thread
 * reads what it needs before it writes, so that outputs may be inputs. */
#include "gpu/sums.h"
#include "ref/core/float_bits.h"

namespace ARI_GPU
{

/* --- contiguous --------------------------------------------------------------------------------------------------- */

template <class T>
ar_status add_of(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    T *to = dev<T>(y->data);
    const T *left = dev<T>(a->data), *right = dev<T>(b->data);
    return launch_each(d, q, ar_tensor_count(y),
                       [=] ARI_KERNEL(size_t i) { store(to + i, ari_add32(load(left[i]), load(right[i]))); });
}

ar_status add(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return ARI_BY_DTYPE(y, add_of)(d, q, y, a, b);
}

template <class T>
ar_status mul_of(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    T *to = dev<T>(y->data);
    const T *left = dev<T>(a->data), *right = dev<T>(b->data);
    return launch_each(d, q, ar_tensor_count(y),
                       [=] ARI_KERNEL(size_t i) { store(to + i, ari_mul32(load(left[i]), load(right[i]))); });
}

ar_status mul(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return ARI_BY_DTYPE(y, mul_of)(d, q, y, a, b);
}

template <class T> ar_status fill_of(ar_device *d, ar_queue *q, const ar_tensor *y, float value)
{
    T *to = dev<T>(y->data);
    const float same = ari_canonical32(value);
    return launch_each(d, q, ar_tensor_count(y), [=] ARI_KERNEL(size_t i) { store(to + i, same); });
}

ar_status fill(ar_device *d, ar_queue *q, const ar_tensor *y, float value)
{
    return ARI_BY_DTYPE(y, fill_of)(d, q, y, value);
}

/* --- activations -------------------------------------------------------------------------------------------------- */

template <class T>
ar_status bias_act_of(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act,
                      const ar_tensor *z)
{
    T *sums = dev<T>(y->data), *values = act == AR_ACT_NONE ? nullptr : dev<T>(z->data);
    const size_t cols = y->shape[1];
    return launch_each(d, q, y->shape[0] * cols, [=, bias = dev<float>(bias)] ARI_KERNEL(size_t i) {
        if (bias)
            store(sums + i, ari_add32(load(sums[i]), bias[i % cols]));
        if (values)
            store(values + i, ari_act32(act, load(sums[i]))); /* of y as it is stored */
    });
}

ar_status bias_act(ar_device *d, ar_queue *q, const ar_tensor *y, ar_cbuf bias, ar_activation act, const ar_tensor *z)
{
    return ARI_BY_DTYPE(y, bias_act_of)(d, q, y, bias, act, z);
}

/* dbias adds dx as it is stored. */
template <class T>
ar_status act_backward_of(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                          ar_activation act, const ar_row_sum *dbias)
{
    T *to = dev<T>(dx->data);
    const T *slopes = dev<T>(ar_const(dy->data)), *from = dev<T>(ar_const(x->data));
    const ar_tensor all = ar_tensor_rows(x);
    const size_t rows = all.shape[0], cols = all.shape[1];
    if (!wanted(dbias))
        return launch_each(d, q, rows * cols, [=] ARI_KERNEL(size_t i) {
            store(to + i, ari_mul32(load(slopes[i]), ari_dact32(act, load(from[i]))));
        });
    return add_to_sums<1>(d, q, {dbias}, rows, cols, [=] ARI_KERNEL(size_t row, size_t col, float(&v)[1]) {
        const size_t i = row * cols + col;
        store(to + i, ari_mul32(load(slopes[i]), ari_dact32(act, load(from[i]))));
        v[0] = load(to[i]);
    });
}

ar_status act_backward(ar_device *d, ar_queue *q, const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
                       ar_activation act, const ar_row_sum *dbias)
{
    return ARI_BY_DTYPE(dx, act_backward_of)(d, q, dx, dy, x, act, dbias);
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

template <class T>
ar_status gated_forward_of(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
                           ar_activation act)
{
    const size_t cols = y->shape[1];
    const strided_rows<T> to = rows_of<T>(y);
    const strided_rows<const T> g = rows_of<const T>(gate), u = rows_of<const T>(up);
    return launch_each(d, q, y->shape[0] * cols, [=] ARI_KERNEL(size_t i) {
        const size_t row = i / cols, col = i % cols;
        store(to.at(row, col), ari_gated_act(act, load(*g.at(row, col)), load(*u.at(row, col))));
    });
}

ar_status gated_forward(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
                        ar_activation act)
{
    return ARI_BY_DTYPE(y, gated_forward_of)(d, q, y, gate, up, act);
}

/* The backward pass at one place; the biases' sums add what is stored. */
template <class T> struct gated_gradient {
    ar_activation act;
    strided_rows<T> dgate, dup;
    strided_rows<const T> dy, gate, up;
    ARI_KERNEL void operator()(size_t row, size_t col, float (&v)[2]) const
    {
        const float slope = load(*dy.at(row, col)), g = load(*gate.at(row, col));
        const float by_gate = ari_gated_dgate(act, slope, load(*up.at(row, col)), g);
        store(dup.at(row, col), ari_gated_dup(act, slope, g));
        v[1] = load(*dup.at(row, col));
        store(dgate.at(row, col), by_gate);
        v[0] = load(*dgate.at(row, col));
    }
};

template <class T>
ar_status gated_backward_of(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup,
                            const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act,
                            const ar_row_sum *dgate_bias, const ar_row_sum *dup_bias)
{
    const size_t rows = dy->shape[0], cols = dy->shape[1];
    const gated_gradient<T> at = {
        act, rows_of<T>(dgate), rows_of<T>(dup), rows_of<const T>(dy), rows_of<const T>(gate), rows_of<const T>(up)};
    if (wanted(dgate_bias) || wanted(dup_bias))
        return add_to_sums<2>(d, q, {dgate_bias, dup_bias}, rows, cols, at);
    return launch_each(d, q, rows * cols, [=] ARI_KERNEL(size_t i) {
        float v[2];
        at(i / cols, i % cols, v);
    });
}

ar_status gated_backward(ar_device *d, ar_queue *q, const ar_tensor *dgate, const ar_tensor *dup, const ar_tensor *dy,
                         const ar_tensor *gate, const ar_tensor *up, ar_activation act, const ar_row_sum *dgate_bias,
                         const ar_row_sum *dup_bias)
{
    return ARI_BY_DTYPE(dy, gated_backward_of)(d, q, dgate, dup, dy, gate, up, act, dgate_bias, dup_bias);
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Four elements of a full value share a block of random bits. A row may begin inside one: a thread draws one block and
 * takes those of its lanes that are in the row, of which there are `blocks` at most. */
template <class T> struct dropout_block {
    T *y, *sum; /* NULL: not written */
    const T *x, *residual;
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
            const float kept = bits[lane] >= which.threshold ? ari_mul32(load(x[at]), which.scale) : 0.0f;
            if (y)
                store(y + at, kept);
            if (sum)
                store(sum + at, ari_add32(load(residual[at]), kept));
        }
    }
};

template <class T>
ar_status dropout_of(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                     const ar_tensor *residual, const ar_dropout *which)
{
    const ar_buf none = {nullptr}, beside = residual ? residual->data : none;
    T *to = dev<T>(y ? y->data : none), *to_sum = dev<T>(residual ? sum->data : none);
    const view<const T> from = view_of<const T>(x);
    const size_t cols = from.shape[3], blocks = cols / 4 + 2;
    dropout_block<T> kernel = {to, to_sum, from.data, dev<T>(ar_const(beside)), cols, blocks, {}, *which};
    const int missing = AR_MAX_DIMS - x->ndim;
    for (int k = 0; k < AR_MAX_DIMS; k++) {
        kernel.shape[k] = from.shape[k];
        kernel.which.stride[k] = k < missing ? 0 : which->stride[k - missing];
    }
    return launch_each(d, q, cols > 0 ? from.rows() * blocks : 0, kernel);
}

ar_status dropout(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
                  const ar_tensor *residual, const ar_dropout *which)
{
    return ARI_BY_DTYPE(x, dropout_of)(d, q, y, sum, x, residual, which);
}

/* --- numbers of fewer bits ---------------------------------------------------------------------------------------- */

ar_status round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits)
{
    const view<float> to = view_of<float>(y);
    const view<const float> from = view_of<const float>(x);
    return launch_each(d, q, from.count(), [=] ARI_KERNEL(size_t i) {
        const place p = from.where(i);
        *to.at(p) = ari_f32_to_bits(*from.at(p), bits);
    });
}

} // namespace ARI_GPU
