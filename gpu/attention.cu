/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, and attention's softmax with its gradient, a block a row: what ref/cpu/rope.c and
 * ref/cpu/softmax.c do. */
#include <math.h>

#include "gpu/kernels.h"
#include "ref/numerics/rope_check.h"
#include "ref/numerics/scores.h"

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
template <class T>
ar_status rope_of(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
                  int direction)
{
    const view<T> all_to = view_of<T>(y);
    const view<const T> all_from = view_of<const T>(x);
    const size_t positions = x->shape[1], heads = x->shape[2], half = x->shape[3] / 2;
    const float *cosines = dev<float>(cos), *sines = dev<float>(sin);
    const uint32_t flip = direction < 0 ? 0x80000000u : 0; /* the sign bit that makes sin -sin */
    return launch_blocks(d, q, x->shape[0] * positions, heads * half, [=] ARI_KERNEL(const block &b) {
        const size_t position = b.index % positions;
        const T *from = all_from.matrix(b.index);
        T *to = all_to.matrix(b.index);
        b.each(heads * half, [&](size_t i) {
            const ptrdiff_t head = static_cast<ptrdiff_t>(i / half);
            const size_t pair = i % half;
            const T *in = from + head * all_from.stride[2];
            T *out = to + head * all_to.stride[2];
            const float x1 = load(in[pair]), x2 = load(in[half + pair]), c = cosines[position * half + pair];
            const float s = ari_float32(ari_bits32(sines[position * half + pair]) ^ flip);
            store(out + pair, ari_rope_first(x1, x2, c, s));
            store(out + half + pair, ari_rope_second(x1, x2, c, s));
        });
    });
}

ar_status rope(ar_device *d, ar_queue *q, const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
               int direction)
{
    return ARI_BY_DTYPE(y, rope_of)(d, q, y, x, cos, sin, direction);
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

/* A block of scores as a kernel sees it. */
struct block_view {
    ar_scores scores;
    ar_mask mask; /* its numbers alone */
    const int32_t *visible;
    const uint8_t *padding;
    const float *additive;
    ARI_KERNEL ari_score_row row(size_t i) const
    {
        return ari_score_row_of(&scores, &mask, visible, padding, additive, i);
    }
};

static block_view view_of_block(const ar_scores *b, const ar_mask *m)
{
    return {*b, *m, dev<int32_t>(m->visible), dev<uint8_t>(m->padding), dev<float>(m->additive)};
}

/* Whether a row sees a column of its block. */
ARI_KERNEL inline bool sees(const ari_score_row &r, size_t key)
{
    const size_t j = key - r.first;
    return j < r.keys && (!r.additive || r.additive[j] != -INFINITY) && (!r.padding || r.padding[j]);
}

ARI_KERNEL inline float score_of(const ari_score_row &r, const float *in, size_t key, float scale)
{
    const float scaled = ari_mul32(in[key], scale);
    return r.additive ? ari_add32(scaled, r.additive[key - r.first]) : scaled;
}

/* probs may be scores: until the sums are known only a value's own thread writes its place, and reads it no more. */
ar_status softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, ar_buf max, ar_buf sum, bool known,
                          float scale, const ar_scores *of, const ar_mask *mask)
{
    float *to = dev<float>(probs);
    const float *from = dev<float>(scores);
    int32_t *tops = dev<int32_t>(max);
    double *sums = dev<double>(sum);
    const block_view rows = view_of_block(of, mask);
    const size_t keys = of->part.cols;
    const int32_t p = ari_rowsum_bits(of->seq);
    return launch_blocks(d, q, of->part.matrices * of->part.rows, keys, [=] ARI_KERNEL(const block &own) {
        const ari_score_row r = rows.row(own.index);
        float *row = to + own.index * keys;
        const float *in = from + own.index * keys;
        const int32_t top = known ? tops[r.at] : own.max(r.keys, [&](size_t j) {
            const size_t key = r.first + j;
            return sees(r, key) ? ari_key32(score_of(r, in, key, scale)) : INT32_MIN;
        });
        if (!known)
            own.each(1, [&](size_t) { tops[r.at] = top; });
        if (top == INT32_MIN || top == INT32_MAX) { /* no visible key; a visible score that is not finite */
            own.each(keys, [&](size_t key) { row[key] = top == INT32_MAX && sees(r, key) ? ari_nan32() : 0.0f; });
            return;
        }
        const float largest = ari_key32_value(top);
        auto exponential = [&](size_t key) {
            return sees(r, key) ? ari_softmax_exp(score_of(r, in, key, scale), largest) : 0.0f;
        };
        if (known) {
            const double l = sums[r.at];
            own.each(keys, [&](size_t key) { row[key] = sees(r, key) ? ari_softmax_p(exponential(key), l) : 0.0f; });
            return;
        }
        /* Exponent 1: every term is at most exp(0) = 1. */
        const int64_t total = row_integer(own, r.keys, 1, p, [&](size_t j) {
            const float e = exponential(r.first + j);
            row[r.first + j] = e;
            return static_cast<double>(e);
        });
        const double l = ari_rowsum_value(total, 1, p);
        own.each(1, [&](size_t) { sums[r.at] = l; });
        own.each(keys, [&](size_t key) { row[key] = key - r.first < r.keys ? ari_softmax_p(row[key], l) : 0.0f; });
    });
}

/* ds may be dprobs. */
ar_status softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot, bool known,
                           float scale, const ar_scores *of, const ar_mask *mask)
{
    float *to = dev<float>(ds), *gradients = dev<float>(dprobs);
    const float *values = dev<float>(probs);
    double *dots = dev<double>(dot);
    const block_view rows = view_of_block(of, mask);
    const size_t keys = of->part.cols;
    const int32_t p = ari_rowsum_bits(of->seq);
    return launch_blocks(d, q, of->part.matrices * of->part.rows, keys, [=] ARI_KERNEL(const block &own) {
        const ari_score_row r = rows.row(own.index);
        const size_t start = own.index * keys;
        const float *pr = values + start;
        float *dp = gradients + start, *out = to + start;
        own.each(keys, [&](size_t key) {
            if (!sees(r, key))
                dp[key] = 0.0f;
        });
        const double sum = known ? dots[r.at] : row_sum(own, r.keys, p, [&](size_t j) {
            const size_t key = r.first + j;
            return static_cast<double>(pr[key]) * static_cast<double>(dp[key]);
        });
        if (!known)
            own.each(1, [&](size_t) { dots[r.at] = sum; });
        own.each(keys,
                 [&](size_t key) { out[key] = sees(r, key) ? ari_attention_ds(pr[key], dp[key], sum, scale) : 0.0f; });
    });
}

} // namespace ARI_GPU
