/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of the weights, and the norm of the gradients, as ref/numerics/optimizer.h defines them. */
#include "gpu/vectors.h"
#include "ref/numerics/optimizer.h"

namespace ARI_GPU
{

/* --- the gradient norm: integers, so that no order changes the sums ----------------------------------------------- */

template <class T> struct sum_squares_block {
    static const size_t block_elements = 8192; /* elements of a block */
    int64_t *sums;
    const T *g;
    const int32_t *e;
    size_t n;
    ARI_ON_GPU void operator()(const block &b) const
    {
        const size_t begin = b.index * block_elements, length = n - begin < block_elements ? n - begin : block_elements;
        const T *values = g + begin;
        const int32_t exponent = *e;
        const uint64_t high = b.sum(length, [=](size_t i) {
            return static_cast<uint64_t>(ari_norm_high(ari_norm_square(load(values[i]), exponent)));
        });
        const uint64_t low = b.sum(length, [=](size_t i) {
            return static_cast<uint64_t>(ari_norm_low(ari_norm_square(load(values[i]), exponent)));
        });
        int64_t *out = sums;
        b.each(2, [=](size_t i) { atomic_add(out + i, static_cast<int64_t>(i == 0 ? high : low)); });
    }
};

ARI_FOR_DTYPES(sum_squares, g, (sums, g, e), ar_buf sums, const ar_tensor *g, ar_cbuf e)
{
    typedef sum_squares_block<T> kernel;
    const size_t n = ar_tensor_count(g);
    return launch_blocks(d, q, ceil_div(n, kernel::block_elements), kernel::block_elements,
                         kernel{dev<int64_t>(sums), dev<T>(g->data), dev<int32_t>(e), n});
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

ARI_FOR_DTYPES(scale, y, (y, x, factor), const ar_tensor *y, const ar_tensor *x, float factor)
{
    const T *null_operand = nullptr;
    return map(d, q, ar_tensor_count(x), dev<T>(y->data), dev<T>(ar_const(x->data)), null_operand,
               [=] ARI_ON_GPU(float value, float) { return ari_clipped(value, factor); });
}

/* Element of the weights, of the master copy if there is one, and of the moments that the kind has. */
template <class W, class G> struct optimizer_element {
    ari_optimizer_constants k;
    W *weight;
    float *master, *first_moment, *second_moment;
    const G *gradient;
    /* Updates one element; moments that it lacks may be anything. */
    ARI_ON_GPU float updated(float w, float value, float *m, float *v, float g) const
    {
        if (ari_bits32(ari_f32_of_bf16(ari_bf16_of_f32(value))) != ari_bits32(w))
            value = w; /* the weight was set by somebody since */
        if (second_moment)
            ari_adam_update(&k, &value, m, v, g);
        else
            ari_sgd_update(&k, &value, m, g);
        return value;
    }
    template <size_t N> ARI_ON_GPU void operator()(lane_count<N>, size_t i) const
    {
        const vector<W, N> w = read_vector<N>(weight + i);
        const vector<G, N> g = read_vector<N>(gradient + i);
        vector<float, N> m = {}, v = {}, value = vector_of<N>([&](size_t j) { return load(w.lane[j]); });
        if (master)
            value = read_vector<N>(master + i);
        if (first_moment)
            m = read_vector<N>(first_moment + i);
        if (second_moment)
            v = read_vector<N>(second_moment + i);
#pragma unroll
        for (size_t j = 0; j < N; j++)
            value.lane[j] = updated(load(w.lane[j]), value.lane[j], &m.lane[j], &v.lane[j], load(g.lane[j]));
        if (master)
            write_vector(master + i, value);
        if (first_moment)
            write_vector(first_moment + i, m);
        if (second_moment)
            write_vector(second_moment + i, v);
        write_stored<N>(weight + i, [&](size_t j) { return value.lane[j]; });
    }
    bool wide() const
    {
        return aligned<4>(weight) && aligned<4>(gradient) && aligned<4>(master, first_moment, second_moment);
    }
};

/* v NULL: SGD; m NULL: without momentum. */
template <class W, class G>
ar_status step_of(ar_device *d, ar_queue *q, const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v, const ar_tensor *g,
                  const struct ari_optimizer_constants *k)
{
    optimizer_element<W, G> kernel = {
        *k, dev<W>(w->data), dev<float>(master), dev<float>(m), dev<float>(v), dev<G>(g->data)};
    kernel.k.has_momentum = kernel.first_moment != nullptr;
    return launch_vectors<4>(d, q, ar_tensor_count(w), kernel.wide(), kernel);
}

ARI_FOR_DTYPES(optimizer_step, w, (w, master, m, v, g, k), const ar_tensor *w, ar_buf master, ar_buf m, ar_buf v,
               const ar_tensor *g, const struct ari_optimizer_constants *k)
{
    return (g->dtype == AR_BF16 ? step_of<T, bf16> : step_of<T, float>)(d, q, w, master, m, v, g, k);
}

} // namespace ARI_GPU
