/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, and attention's softmax with its gradient, a block a row: what ref/cpu/rope.c and
 * ref/cpu/softmax.c do. */
#include <math.h>

#include "gpu/kernels.h"
#include "gpu/row_sum.h"
#include "gpu/view.h"
#include "ref/numerics/rope_check.h"

namespace ARI_GPU
{

/* --- rotary positions --------------------------------------------------------------------------------------------- */

struct rope_tables_each {
    float *cos, *sin;
    size_t half, head_dim;
    double theta, factor;
    bool scaled;
    ar_rope_llama3 llama3; /* where scaled */
    ARI_KERNEL void operator()(size_t i) const
    {
        const float frequency = ari_rope_frequency(theta, factor, scaled ? &llama3 : nullptr, i % half, head_dim);
        const float angle = ari_rope_angle(i / half, frequency);
        cos[i] = ari_cos32(angle);
        sin[i] = ari_sin32(angle);
    }
};

ar_status rope_tables(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                      double theta, double factor, const ar_rope_llama3 *llama3)
{
    AR_TRY(ari_rope_check(positions, head_dim, theta, factor, llama3));
    const size_t half = head_dim / 2;
    const rope_tables_each kernel = {dev<float>(cos),
                                     dev<float>(sin),
                                     half,
                                     head_dim,
                                     theta,
                                     factor,
                                     llama3 != nullptr,
                                     llama3 ? *llama3 : ar_rope_llama3{}};
    return launch_each(d, q, positions * half, kernel);
}

/* A block a position of a sample, all its heads. A thread reads both halves of a pair before it writes them: y may be
 * x. */
struct rope_position {
    view<float> y;
    view<const float> x;
    const float *cos, *sin;
    uint32_t flip; /* the sign bit that makes sin -sin */
    ARI_KERNEL void operator()(const block &b) const
    {
        const size_t sample = b.index / x.shape[1], position = b.index % x.shape[1], half = x.shape[3] / 2;
        const float *from =
            x.data + static_cast<ptrdiff_t>(sample) * x.stride[0] + static_cast<ptrdiff_t>(position) * x.stride[1];
        float *to =
            y.data + static_cast<ptrdiff_t>(sample) * y.stride[0] + static_cast<ptrdiff_t>(position) * y.stride[1];
        b.each(x.shape[2] * half, [&](size_t i) {
            const ptrdiff_t head = static_cast<ptrdiff_t>(i / half);
            const size_t pair = i % half;
            const float *in = from + head * x.stride[2];
            float *out = to + head * y.stride[2];
            const float x1 = in[pair], x2 = in[half + pair], c = cos[position * half + pair];
            const float s = ari_float32(ari_bits32(sin[position * half + pair]) ^ flip);
            out[pair] = ari_rope_first(x1, x2, c, s);
            out[half + pair] = ari_rope_second(x1, x2, c, s);
        });
    }
};

ar_status rope(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
               int direction)
{
    const rope_position kernel = {view_of<float>(y), view_of<const float>(x), dev<float>(cos), dev<float>(sin),
                                  direction < 0 ? 0x80000000u : 0};
    return launch_blocks(d, q, x->shape[0] * x->shape[1], x->shape[2] * (x->shape[3] / 2), kernel);
}

/* --- masks -------------------------------------------------------------------------------------------------------- */

/* Which keys one query may see. */
struct row_mask {
    size_t first, keys;     /* [first, first + keys), where padding and additive do not mask */
    const uint8_t *padding; /* of the row's keys, 0 = masked; NULL: none */
    const float *additive;  /* of the row's keys, -inf = masked; NULL: none */
    ARI_KERNEL bool sees(size_t key) const
    {
        return key - first < keys && (!additive || additive[key] != -INFINITY) && (!padding || padding[key]);
    }
};

/* ar_mask as a kernel sees it. */
struct mask_view {
    bool causal;
    size_t window;
    const uint8_t *padding;
    const float *additive;
    size_t mask_batch, mask_heads, head_start, heads, s;
    ARI_KERNEL row_mask of_row(size_t row) const
    {
        const size_t query = row % s, head = row / s % heads, sample = row / s / heads;
        row_mask m = {0, 0, nullptr, nullptr};
        m.first = window > 0 && query >= window ? query - window + 1 : 0;
        m.keys = (causal ? query + 1 : s) - m.first;
        if (padding)
            m.padding = padding + sample * s;
        if (additive) {
            const size_t plane = (mask_batch > 1 ? sample : 0) * mask_heads + (mask_heads > 1 ? head_start + head : 0);
            m.additive = additive + (plane * s + query) * s;
        }
        return m;
    }
};

static mask_view view_of_mask(const ar_mask *m, size_t heads, size_t s)
{
    return mask_view{m->causal,
                     m->window,
                     dev<uint8_t>(m->padding),
                     dev<float>(m->additive),
                     m->mask_batch,
                     m->mask_heads,
                     m->head_start,
                     heads,
                     s};
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

/* probs may be scores: until the sums are known only a value's own thread writes its place, and reads it no more. */
struct softmax_row {
    float *probs;
    const float *scores;
    size_t s;
    float scale;
    mask_view mask;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const row_mask m = mask.of_row(b.index);
        float *row = probs + b.index * s;
        const float *in = scores + b.index * s;
        auto score = [&](size_t key) {
            const float scaled = ari_mul32(in[key], scale);
            return m.additive ? ari_add32(scaled, m.additive[key]) : scaled;
        };
        const int32_t top = b.max(m.keys, [&](size_t j) {
            const size_t key = m.first + j;
            return m.sees(key) ? ari_key32(score(key)) : INT32_MIN;
        });
        if (top == INT32_MIN || top == INT32_MAX) { /* no visible key; a visible score that is not finite */
            b.each(s, [&](size_t key) { row[key] = top == INT32_MAX && m.sees(key) ? ari_nan32() : 0.0f; });
            return;
        }
        const float largest = ari_key32_value(top);
        /* Exponent 1: every term is at most exp(0) = 1. */
        const int64_t sum = row_integer(b, m.keys, 1, p, [&](size_t j) {
            const size_t key = m.first + j;
            const float e = m.sees(key) ? ari_softmax_exp(score(key), largest) : 0.0f;
            row[key] = e;
            return static_cast<double>(e);
        });
        const double l = ari_rowsum_value(sum, 1, p);
        b.each(s, [&](size_t key) { row[key] = key - m.first < m.keys ? ari_softmax_p(row[key], l) : 0.0f; });
    }
};

ar_status softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, size_t b, size_t heads, size_t s,
                          float scale, const ar_mask *mask)
{
    const softmax_row kernel = {dev<float>(probs), dev<float>(scores), s, scale, view_of_mask(mask, heads, s),
                                ari_rowsum_bits(s)};
    return launch_blocks(d, q, b * heads * s, s, kernel);
}

/* ds may be dprobs. */
struct softmax_backward_row {
    float *ds, *dprobs;
    const float *probs;
    size_t s;
    float scale;
    mask_view mask;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const row_mask m = mask.of_row(b.index);
        const size_t start = b.index * s;
        const float *pr = probs + start;
        float *dp = dprobs + start, *out = ds + start;
        b.each(s, [&](size_t key) {
            if (!m.sees(key))
                dp[key] = 0.0f;
        });
        const double dot = row_sum(b, m.keys, p, [&](size_t j) {
            const size_t key = m.first + j;
            return static_cast<double>(pr[key]) * static_cast<double>(dp[key]);
        });
        b.each(s, [&](size_t key) { out[key] = m.sees(key) ? ari_attention_ds(pr[key], dp[key], dot, scale) : 0.0f; });
    }
};

ar_status softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, size_t b, size_t heads,
                           size_t s, float scale, const ar_mask *mask)
{
    const softmax_backward_row kernel = {dev<float>(ds), dev<float>(dprobs),           dev<float>(probs), s,
                                         scale,          view_of_mask(mask, heads, s), ari_rowsum_bits(s)};
    return launch_blocks(d, q, b * heads * s, s, kernel);
}

} // namespace ARI_GPU
