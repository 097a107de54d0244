/* SPDX-License-Identifier: Apache-2.0 */
/* Element-wise kernels: a thread computes the elements of 16 bytes, or one element, by the definitions of ref/numerics
 * and ref/core/half.h. Each thread reads before it writes, so outputs may be inputs. */
#include "gpu/sums.h"
#include "gpu/vectors.h"
#include "ref/core/float_bits.h"
#include "ref/core/tensor_private.h"
#include "ref/numerics/activation.h"

namespace ARI_GPU
{

/* --- contiguous --------------------------------------------------------------------------------------------------- */

ARI_FOR_DTYPES(add, y, (y, a, b), const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return map(d, q, ar_tensor_count(y), dev<T>(y->data), dev<T>(ar_const(a->data)), dev<T>(ar_const(b->data)),
               [] ARI_ON_GPU(float left, float right) { return ari_add32(left, right); });
}

ARI_FOR_DTYPES(mul, y, (y, a, b), const ar_tensor *y, const ar_tensor *a, const ar_tensor *b)
{
    return map(d, q, ar_tensor_count(y), dev<T>(y->data), dev<T>(ar_const(a->data)), dev<T>(ar_const(b->data)),
               [] ARI_ON_GPU(float left, float right) { return ari_mul32(left, right); });
}

ARI_FOR_DTYPES(softcap, y, (y, x, scale, cap), const ar_tensor *y, const ar_tensor *x, float scale, double cap)
{
    const T *null_operand = nullptr;
    return map(d, q, ar_tensor_count(y), dev<T>(y->data), dev<T>(ar_const(x->data)), null_operand,
               [=] ARI_ON_GPU(float value, float) { return ari_softcap32(value, scale, cap); });
}

ARI_FOR_DTYPES(softcap_backward, dx, (dx, dy, x, scale, cap), const ar_tensor *dx, const ar_tensor *dy,
               const ar_tensor *x, float scale, double cap)
{
    return map(d, q, ar_tensor_count(dx), dev<T>(dx->data), dev<T>(ar_const(dy->data)), dev<T>(ar_const(x->data)),
               [=] ARI_ON_GPU(float slope, float value) { return ari_dsoftcap32(slope, value, scale, cap); });
}

ARI_FOR_DTYPES(fill, y, (y, value), const ar_tensor *y, float value)
{
    constexpr size_t W = 16 / sizeof(T);
    T *dst = dev<T>(y->data);
    const float fill_value = ari_canonical32(value);
    return launch_vectors<W>(d, q, ar_tensor_count(y), aligned<W>(dst), [=] ARI_ON_GPU(auto lanes, size_t i) {
        constexpr size_t N = lanes;
        write_stored<N>(dst + i, [=](size_t) { return fill_value; });
    });
}

/* --- activations -------------------------------------------------------------------------------------------------- */

ARI_FOR_DTYPES(bias_act, y, (y, bias, act, z), const ar_tensor *y, ar_cbuf bias, ar_activation act, const ar_tensor *z)
{
    T *sums = dev<T>(y->data), *values = act == AR_ACT_NONE ? nullptr : dev<T>(z->data);
    constexpr size_t W = 16 / sizeof(T);
    const float *offsets = dev<float>(bias);
    const size_t cols = y->shape[1];
    const bool wide = cols % W == 0 && aligned<W>(sums, values) && aligned<W>(offsets);
    return launch_row_vectors<W>(d, q, y->shape[0], cols, wide, [=] ARI_ON_GPU(auto lanes, size_t row, size_t col) {
        constexpr size_t N = lanes;
        const size_t i = row * cols + col;
        vector<T, N> sum = read_vector<N>(sums + i);
        if (offsets) {
            const vector<float, N> offset = read_vector<N>(offsets + col);
            sum = vector_of<N>([&](size_t k) { return stored<T>(ari_add32(load(sum.lane[k]), offset.lane[k])); });
            write_vector(sums + i, sum);
        }
        if (values) /* values of y as stored */
            write_stored<N>(values + i, [&](size_t k) { return ari_act32(act, load(sum.lane[k])); });
    });
}

/* dbias adds dx as stored. */
ARI_FOR_DTYPES(act_backward, dx, (dx, dy, x, act, dbias), const ar_tensor *dx, const ar_tensor *dy, const ar_tensor *x,
               ar_activation act, const ar_row_sum *dbias)
{
    T *dst = dev<T>(dx->data);
    const T *slopes = dev<T>(dy->data), *src = dev<T>(x->data);
    const ar_tensor row_view = ari_tensor_rows(x);
    const size_t rows = row_view.shape[0], cols = row_view.shape[1];
    if (!is_requested(dbias))
        return map(d, q, rows * cols, dst, slopes, src,
                   [=] ARI_ON_GPU(float slope, float point) { return ari_mul32(slope, ari_dact32(act, point)); });
    return add_to_sums<1>(d, q, {dbias}, rows, cols, [=] ARI_ON_GPU(size_t row, size_t col, float(&v)[1]) {
        const size_t i = row * cols + col;
        store(dst + i, ari_mul32(load(slopes[i]), ari_dact32(act, load(src[i]))));
        v[0] = load(dst[i]);
    });
}

/* A 2-D view whose columns are contiguous. */
template <class T> struct strided_rows {
    T *data;
    ptrdiff_t stride;
    ARI_ON_GPU T *locate(size_t row, size_t col) const
    {
        return data + static_cast<ptrdiff_t>(row) * stride + col;
    }
    bool aligned_to(size_t elements) const
    {
        const size_t bytes = elements * sizeof(T);
        return reinterpret_cast<uintptr_t>(data) % bytes == 0 && static_cast<size_t>(stride) % elements == 0;
    }
};

template <class T> strided_rows<T> rows_of(const ar_tensor *t)
{
    return strided_rows<T>{dev<T>(t->data), t->stride[0]};
}

ARI_FOR_DTYPES(gated_forward, y, (y, gate, up, act), const ar_tensor *y, const ar_tensor *gate, const ar_tensor *up,
               ar_activation act)
{
    const size_t cols = y->shape[1];
    const strided_rows<T> dst = rows_of<T>(y);
    const strided_rows<const T> g = rows_of<const T>(gate), u = rows_of<const T>(up);
    constexpr size_t W = 16 / sizeof(T);
    const bool wide = cols % W == 0 && dst.aligned_to(W) && g.aligned_to(W) && u.aligned_to(W);
    return launch_row_vectors<W>(d, q, y->shape[0], cols, wide, [=] ARI_ON_GPU(auto lanes, size_t row, size_t col) {
        constexpr size_t N = lanes;
        const vector<T, N> left = read_vector<N>(g.locate(row, col)), right = read_vector<N>(u.locate(row, col));
        write_stored<N>(dst.locate(row, col),
                        [&](size_t k) { return ari_gated_act(act, load(left.lane[k]), load(right.lane[k])); });
    });
}

/* Backward pass at one element; the biases' sums add the stored values. */
template <class T> struct gated_gradient {
    ar_activation act;
    strided_rows<T> dgate, dup;
    strided_rows<const T> dy, gate, up;
    template <size_t N> ARI_ON_GPU void run(size_t row, size_t col, vector<T, N> *by_gate, vector<T, N> *by_up) const
    {
        const vector<T, N> s = read_vector<N>(dy.locate(row, col)), g = read_vector<N>(gate.locate(row, col));
        const vector<T, N> u = read_vector<N>(up.locate(row, col));
        *by_gate = vector_of<N>([&](size_t k) {
            return stored<T>(ari_gated_dgate(act, load(s.lane[k]), load(u.lane[k]), load(g.lane[k])));
        });
        *by_up = vector_of<N>(
            [&](size_t k) { return stored<T>(ari_gated_dup(act, load(s.lane[k]), load(u.lane[k]), load(g.lane[k]))); });
        write_vector(dup.locate(row, col), *by_up);
        write_vector(dgate.locate(row, col), *by_gate);
    }
    ARI_ON_GPU void operator()(size_t row, size_t col, float (&v)[2]) const
    {
        vector<T, 1> by_gate, by_up;
        run(row, col, &by_gate, &by_up);
        v[0] = load(by_gate.lane[0]);
        v[1] = load(by_up.lane[0]);
    }
    bool aligned_to(size_t elements) const
    {
        return dgate.aligned_to(elements) && dup.aligned_to(elements) && dy.aligned_to(elements) &&
               gate.aligned_to(elements) && up.aligned_to(elements);
    }
};

ARI_FOR_DTYPES(gated_backward, dy, (dgate, dup, dy, gate, up, act, dgate_bias, dup_bias), const ar_tensor *dgate,
               const ar_tensor *dup, const ar_tensor *dy, const ar_tensor *gate, const ar_tensor *up, ar_activation act,
               const ar_row_sum *dgate_bias, const ar_row_sum *dup_bias)
{
    const size_t rows = dy->shape[0], cols = dy->shape[1];
    const gated_gradient<T> gradient = {
        act, rows_of<T>(dgate), rows_of<T>(dup), rows_of<const T>(dy), rows_of<const T>(gate), rows_of<const T>(up)};
    if (is_requested(dgate_bias) || is_requested(dup_bias))
        return add_to_sums<2>(d, q, {dgate_bias, dup_bias}, rows, cols, gradient);
    constexpr size_t W = 16 / sizeof(T);
    const bool wide = cols % W == 0 && gradient.aligned_to(W);
    return launch_row_vectors<W>(d, q, rows, cols, wide, [=] ARI_ON_GPU(auto lanes, size_t row, size_t col) {
        vector<T, lanes> by_gate, by_up;
        gradient.run(row, col, &by_gate, &by_up);
    });
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

/* Block of random bits shared by four elements of the full tensor. A row may begin inside a block, so a thread draws
 * one block and uses only the lanes that are in the row. A row touches at most `blocks` blocks. */
template <class T> struct dropout_block {
    T *y, *sum; /* NULL: not written */
    const T *x, *residual;
    size_t cols;
    bool wide; /* true if all rows begin and end at a block's boundary */
    ari_divisor blocks, shape[AR_MAX_DIMS];
    ar_dropout which; /* its strides, assigned to the dimensions of shape */
    ARI_ON_GPU void operator()(size_t i) const
    {
        const size_t row = ari_divide(&blocks, &i);
        uint64_t row_start = which.first;
        size_t rest = row;
        for (int k = AR_MAX_DIMS - 2; k >= 0; k--) {
            const size_t outer = ari_divide(&shape[k], &rest);
            row_start += static_cast<uint64_t>(rest) * which.stride[k];
            rest = outer;
        }
        uint32_t bits[4];
        const uint64_t drawn = ((row_start >> 2) + i) << 2;
        ari_random_block(which.key, drawn, which.step, 0, bits);
        if (wide) {
            run<4>(row * cols + i * 4, bits);
            return;
        }
        for (unsigned lane = 0; lane < 4; lane++) {
            const uint64_t number = drawn + lane;
            if (number >= row_start && number - row_start < cols)
                run<1>(row * cols + static_cast<size_t>(number - row_start), bits + lane);
        }
    }
    template <size_t N> ARI_ON_GPU void run(size_t offset, const uint32_t *bits) const
    {
        const vector<T, N> input = read_vector<N>(x + offset);
        const vector<float, N> masked = vector_of<N>([&](size_t lane) {
            return bits[lane] >= which.threshold ? ari_mul32(load(input.lane[lane]), which.scale) : 0.0f;
        });
        if (sum) {
            const vector<T, N> addend = read_vector<N>(residual + offset);
            write_stored<N>(sum + offset, [&](size_t k) { return ari_add32(load(addend.lane[k]), masked.lane[k]); });
        }
        if (y)
            write_stored<N>(y + offset, [&](size_t k) { return masked.lane[k]; });
    }
};

ARI_FOR_DTYPES(dropout, x, (y, sum, x, residual, which), const ar_tensor *y, const ar_tensor *sum, const ar_tensor *x,
               const ar_tensor *residual, const ar_dropout *which)
{
    const ar_buf null_buffer = {nullptr}, addend = residual ? residual->data : null_buffer;
    T *dst = dev<T>(y ? y->data : null_buffer), *to_sum = dev<T>(residual ? sum->data : null_buffer);
    const view<const T> src = view_of<const T>(x);
    const size_t cols = src.shape[3];
    dropout_block<T> kernel = {dst, to_sum, src.data, dev<T>(ar_const(addend)), cols, false, {}, {}, *which};
    const int missing = AR_MAX_DIMS - x->ndim;
    kernel.wide = cols % 4 == 0 && which->first % 4 == 0 && aligned<4>(dst, to_sum, kernel.x, kernel.residual);
    for (int k = 0; k < AR_MAX_DIMS; k++) {
        kernel.shape[k] = src.divisor[k];
        kernel.which.stride[k] = k < missing ? 0 : which->stride[k - missing];
        kernel.wide = kernel.wide && (k == AR_MAX_DIMS - 1 || kernel.which.stride[k] % 4 == 0);
    }
    const size_t blocks = kernel.wide ? cols / 4 : cols / 4 + 2;
    kernel.blocks = ari_divisor_of(blocks);
    return launch_each(d, q, cols > 0 ? src.rows() * blocks : 0, kernel);
}

/* --- numbers of fewer bits ---------------------------------------------------------------------------------------- */

ar_status round_bits(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, int bits)
{
    const view<float> dst = view_of<float>(y);
    const view<const float> src = view_of<const float>(x);
    return launch_each(d, q, src.count(), [=] ARI_ON_GPU(size_t i) {
        const place p = src.unravel(i);
        *dst.locate(p) = ari_f32_to_bits(*src.locate(p), bits);
    });
}

} // namespace ARI_GPU
