/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, and attention's softmax with its gradient, a block a row: what ref/cpu/rope.c and
 * ref/cpu/softmax.c do. */
#include <math.h>

#include "gpu/kernels.h"
#include "ref/numerics/rope_check.h"

namespace ARI_GPU
{

/* --- rotary positions --------------------------------------------------------------------------------------------- */

ar_status rope_tables(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                      double theta, double factor, const ar_rope_llama3 *llama3)
{
    AR_TRY(ari_rope_check(positions, head_dim, theta, factor, llama3));
    const size_t half = head_dim / 2;
    const bool scaled = llama3 != nullptr;
    const ar_rope_llama3 how = scaled ? *llama3 : ar_rope_llama3{};
    return launch_each(d, q, positions * half, [=, cos = dev<float>(cos), sin = dev<float>(sin)] ARI_KERNEL(size_t i) {
        const float frequency = ari_rope_frequency(theta, factor, scaled ? &how : nullptr, i % half, head_dim);
        const float angle = ari_rope_angle(i / half, frequency);
        cos[i] = ari_cos32(angle);
        sin[i] = ari_sin32(angle);
    });
}

/* A block a position of a sample, all its heads. A thread reads both halves of a pair before it writes them: y may be
 * x. */
ar_status rope(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
               int direction)
{
    const view<float> all_to = view_of<float>(y);
    const view<const float> all_from = view_of<const float>(x);
    const size_t positions = x->shape[1], heads = x->shape[2], half = x->shape[3] / 2;
    const float *cosines = dev<float>(cos), *sines = dev<float>(sin);
    const uint32_t flip = direction < 0 ? 0x80000000u : 0; /* the sign bit that makes sin -sin */
    return launch_blocks(d, q, x->shape[0] * positions, heads * half, [=] ARI_KERNEL(const block &b) {
        const size_t position = b.index % positions;
        const float *from = all_from.matrix(b.index);
        float *to = all_to.matrix(b.index);
        b.each(heads * half, [&](size_t i) {
            const ptrdiff_t head = static_cast<ptrdiff_t>(i / half);
            const size_t pair = i % half;
            const float *in = from + head * all_from.stride[2];
            float *out = to + head * all_to.stride[2];
            const float x1 = in[pair], x2 = in[half + pair], c = cosines[position * half + pair];
            const float s = ari_float32(ari_bits32(sines[position * half + pair]) ^ flip);
            out[pair] = ari_rope_first(x1, x2, c, s);
            out[half + pair] = ari_rope_second(x1, x2, c, s);
        });
    });
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
ar_status softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, size_t b, size_t heads, size_t s,
                          float scale, const ar_mask *mask)
{
    float *to = dev<float>(probs);
    const float *from = dev<float>(scores);
    const mask_view masks = view_of_mask(mask, heads, s);
    const int32_t p = ari_rowsum_bits(s);
    return launch_blocks(d, q, b * heads * s, s, [=] ARI_KERNEL(const block &own) {
        const row_mask m = masks.of_row(own.index);
        float *row = to + own.index * s;
        const float *in = from + own.index * s;
        auto score = [&](size_t key) {
            const float scaled = ari_mul32(in[key], scale);
            return m.additive ? ari_add32(scaled, m.additive[key]) : scaled;
        };
        const int32_t top = own.max(m.keys, [&](size_t j) {
            const size_t key = m.first + j;
            return m.sees(key) ? ari_key32(score(key)) : INT32_MIN;
        });
        if (top == INT32_MIN || top == INT32_MAX) { /* no visible key; a visible score that is not finite */
            own.each(s, [&](size_t key) { row[key] = top == INT32_MAX && m.sees(key) ? ari_nan32() : 0.0f; });
            return;
        }
        const float largest = ari_key32_value(top);
        /* Exponent 1: every term is at most exp(0) = 1. */
        const int64_t sum = row_integer(own, m.keys, 1, p, [&](size_t j) {
            const size_t key = m.first + j;
            const float e = m.sees(key) ? ari_softmax_exp(score(key), largest) : 0.0f;
            row[key] = e;
            return static_cast<double>(e);
        });
        const double l = ari_rowsum_value(sum, 1, p);
        own.each(s, [&](size_t key) { row[key] = key - m.first < m.keys ? ari_softmax_p(row[key], l) : 0.0f; });
    });
}

/* ds may be dprobs. */
ar_status softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, size_t b, size_t heads,
                           size_t s, float scale, const ar_mask *mask)
{
    float *to = dev<float>(ds), *gradients = dev<float>(dprobs);
    const float *values = dev<float>(probs);
    const mask_view masks = view_of_mask(mask, heads, s);
    const int32_t p = ari_rowsum_bits(s);
    return launch_blocks(d, q, b * heads * s, s, [=] ARI_KERNEL(const block &own) {
        const row_mask m = masks.of_row(own.index);
        const size_t start = own.index * s;
        const float *pr = values + start;
        float *dp = gradients + start, *out = to + start;
        own.each(s, [&](size_t key) {
            if (!m.sees(key))
                dp[key] = 0.0f;
        });
        const double dot = row_sum(own, m.keys, p, [&](size_t j) {
            const size_t key = m.first + j;
            return static_cast<double>(pr[key]) * static_cast<double>(dp[key]);
        });
        own.each(s,
                 [&](size_t key) { out[key] = m.sees(key) ? ari_attention_ds(pr[key], dp[key], dot, scale) : 0.0f; });
    });
}

} // namespace ARI_GPU
