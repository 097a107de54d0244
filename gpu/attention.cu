/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, and attention's softmax with its gradient, with one block per row, as in ref/cpu/rope.c and
 * ref/cpu/softmax.c. */
#include <math.h>

#include "gpu/vectors.h"
#include "ref/numerics/rope_check.h"
#include "ref/numerics/scores.h"

namespace ARI_GPU
{

/* --- rotary positions --------------------------------------------------------------------------------------------- */

ar_status rope_tables(ar_device *d, ar_queue *q, ar_buf cos, ar_buf sin, size_t positions, size_t head_dim,
                      const ar_rope *rope)
{
    AR_TRY(ari_rope_check(positions, head_dim, rope));
    const size_t turning = ar_rope_dim(rope, head_dim), half = turning / 2;
    const ari_divisor by_half = ari_divisor_of(half);
    const ar_rope rotation = *rope;
    const float scale = ari_rope_attention(rope);
    return launch_each(d, q, positions * half, [=, cos = dev<float>(cos), sin = dev<float>(sin)] ARI_ON_GPU(size_t i) {
        size_t pair = i;
        const size_t position = ari_divide(&by_half, &pair);
        const float angle = ari_rope_angle(position, ari_rope_frequency(&rotation, pair, turning));
        cos[i] = ari_cos32(angle) * scale;
        sin[i] = ari_sin32(angle) * scale;
    });
}

/* A block handles a position of a sample with all its heads. A thread reads both halves of a pair before it writes
 * them, so y may be x. */
ARI_FOR_DTYPES(rope, y, (y, x, cos, sin, direction), const ar_tensor *y, const ar_tensor *x, ar_cbuf cos, ar_cbuf sin,
               int direction)
{
    const view<T> all_to = view_of<T>(y);
    const view<const T> all_from = view_of<const T>(x);
    const size_t positions = x->shape[1], heads = x->shape[2], half = x->shape[3] / 2;
    const ari_divisor by_half = ari_divisor_of(half);
    const float *cosines = dev<float>(cos), *sines = dev<float>(sin);
    const uint32_t flip = direction < 0 ? 0x80000000u : 0; /* the sign bit turns sin into -sin */
    return launch_blocks(d, q, x->shape[0] * positions, heads * half, [=] ARI_ON_GPU(const block &b) {
        size_t position = b.index;
        ari_divide(&all_to.divisor[1], &position);
        const T *src = all_from.matrix(b.index);
        T *dst = all_to.matrix(b.index);
        b.each(heads * half, [&](size_t i) {
            size_t pair = i;
            const ptrdiff_t head = static_cast<ptrdiff_t>(ari_divide(&by_half, &pair));
            const T *input = src + head * all_from.stride[2];
            T *out = dst + head * all_to.stride[2];
            const float x1 = load(input[pair]), x2 = load(input[half + pair]), c = cosines[position * half + pair];
            const float s = ari_float32(ari_bits32(sines[position * half + pair]) ^ flip);
            store(out + pair, ari_rope_first(x1, x2, c, s));
            store(out + half + pair, ari_rope_second(x1, x2, c, s));
        });
    });
}

/* --- softmax ------------------------------------------------------------------------------------------------------ */

/* Masked scores are not read: +0 is written there. */

static ari_score_rows rows_of_block(const ar_scores *b, const ar_mask *m)
{
    return ari_score_rows_of(b, m, dev<int32_t>(m->visible), dev<uint8_t>(m->padding), dev<float>(m->additive));
}

/* Returns true if a row sees key j in its range. The other function returns, for the block's columns, the range and the
 * visible keys. */
ARI_ON_GPU inline bool shows(const ari_score_row &r, size_t j)
{
    return (!r.additive || r.additive[j] != -INFINITY) && (!r.padding || r.padding[j]);
}
ARI_ON_GPU inline bool sees(const ari_score_row &r, size_t key)
{
    return key - r.first_key < r.keys && shows(r, key - r.first_key);
}

/* The score of key j of the range, from the block's value. */
ARI_ON_GPU inline float score_of(const ari_score_row &r, float value, size_t j, float scale)
{
    const float scaled = ari_mul32(value, scale);
    return r.additive ? ari_add32(scaled, r.additive[j]) : scaled;
}

/* Calls write(N, key) for the columns of a block's row of which it sees one of the N, and zero(N, key) for the
 * others. */
template <class F, class Z>
ARI_ON_GPU void each_column(const block &thread_block, const ari_score_row &r, size_t columns, bool wide, F write,
                            Z zero)
{
    each_vector<ROW_LANES>(thread_block, columns, wide, [&](auto lanes, size_t key) {
        if (key + lanes <= r.first_key || key >= r.first_key + r.keys)
            zero(lanes, key);
        else
            write(lanes, key);
    });
}

/* Returns the largest key of the visible scores in a row; `input`: the block's row. */
ARI_ON_GPU inline int32_t largest_score(const block &thread_block, const ari_score_row &r, const float *input,
                                        bool wide, float scale)
{
    return max_vectors<ROW_LANES>(thread_block, r.keys, wide, [&](auto lanes, size_t j) {
        const auto values = read_vector<lanes>(input + r.first_key + j);
        int32_t max_key = INT32_MIN;
#pragma unroll
        for (size_t k = 0; k < lanes; k++)
            if (shows(r, j + k))
                max_key = larger(max_key, ari_key32(score_of(r, values.lane[k], j + k, scale)));
        return max_key;
    });
}

/* probs may be the same memory as scores: until the sums are known only a value's own thread writes its element and no
 * longer reads it. */
ar_status softmax_forward(ar_device *d, ar_queue *q, ar_buf probs, ar_cbuf scores, ar_cbuf sinks, ar_buf max,
                          ar_buf sum, bool known, float scale, const ar_scores *score_shape, const ar_mask *mask)
{
    float *dst = dev<float>(probs);
    const float *src = dev<float>(scores), *all_sinks = dev<float>(sinks);
    int32_t *tops = dev<int32_t>(max);
    double *sums = dev<double>(sum);
    const ari_score_rows rows = rows_of_block(score_shape, mask);
    const size_t keys = score_shape->part.cols;
    const int32_t p = ari_rowsum_bits(score_shape->seq + (all_sinks ? 1 : 0));
    const bool wide = keys % ROW_LANES == 0 && aligned<ROW_LANES>(dst, src);
    return launch_blocks(
        d, q, score_shape->part.matrices * score_shape->part.rows, keys, [=] ARI_ON_GPU(const block &team) {
            const ari_score_row r = ari_score_row_of(&rows, team.index);
            const bool wide_range = wide && r.first_key % ROW_LANES == 0;
            float *row = dst + team.index * keys;
            const float *input = src + team.index * keys, *sink = all_sinks ? all_sinks + r.head : nullptr;
            const int32_t top =
                known ? tops[r.row_index] : ari_sink_top(largest_score(team, r, input, wide_range, scale), sink);
            auto zero = [&](auto lanes, size_t key) { write_vector(row + key, vector<float, lanes>{}); };
            if (!known)
                team.each(1, [&](size_t) { tops[r.row_index] = top; });
            if (top == INT32_MIN || top == INT32_MAX) { /* no visible key, or a visible score that is not finite */
                team.each(keys, [&](size_t key) { row[key] = top == INT32_MAX && sees(r, key) ? ari_nan32() : 0.0f; });
                return;
            }
            const float largest = ari_key32_value(top);
            auto exponential = [&](float value, size_t j) {
                return shows(r, j) ? ari_softmax_exp(score_of(r, value, j, scale), largest) : 0.0f;
            };
            if (known) {
                const double l = sums[r.row_index];
                auto probability = [&](auto lanes, size_t key) {
                    const auto values = read_vector<lanes>(input + key);
                    write_vector(row + key, vector_of<lanes>([&](size_t k) {
                                     return sees(r, key + k)
                                                ? ari_softmax_p(exponential(values.lane[k], key + k - r.first_key), l)
                                                : 0.0f;
                                 }));
                };
                each_column(team, r, keys, wide, probability, zero);
                return;
            }
            /* Exponent 1: every term is at most exp(0) = 1. */
            const int64_t total = row_integer<ROW_LANES>(team, r.keys, wide_range, 1, p, [&](auto lanes, size_t j) {
                const auto values = read_vector<lanes>(input + r.first_key + j);
                const auto e = vector_of<lanes>([&](size_t k) { return exponential(values.lane[k], j + k); });
                write_vector(row + r.first_key + j, e);
                return vector_of<lanes>([&](size_t k) { return static_cast<double>(e.lane[k]); });
            });
            const int64_t sink_term =
                sink ? ari_rowsum_quantise(static_cast<double>(ari_softmax_exp(*sink, largest)), 1, p) : 0;
            const double l = ari_rowsum_value(total + sink_term, 1, p);
            team.each(1, [&](size_t) { sums[r.row_index] = l; });
            auto quotient = [&](auto lanes, size_t key) {
                const auto e = read_vector<lanes>(row + key);
                write_vector(row + key, vector_of<lanes>([&](size_t k) {
                                 return key + k - r.first_key < r.keys ? ari_softmax_p(e.lane[k], l) : 0.0f;
                             }));
            };
            each_column(team, r, keys, wide, quotient, zero);
        });
}

ar_status sinks_backward(ar_device *d, ar_queue *q, const ar_tensor *terms, ar_cbuf sinks, ar_cbuf max, ar_cbuf sum,
                         ar_cbuf dot)
{
    const size_t queries = terms->shape[1], heads = terms->shape[2], rows = terms->shape[0] * heads * queries;
    const ptrdiff_t by_sample = terms->stride[0], by_query = terms->stride[1], by_head = terms->stride[2];
    const ari_divisor per_head = ari_divisor_of(queries), per_sample = ari_divisor_of(heads);
    float *out = dev<float>(terms->data);
    const float *sink = dev<float>(sinks);
    const int32_t *tops = dev<int32_t>(max);
    const double *sums = dev<double>(sum), *dots = dev<double>(dot);
    return launch_each(d, q, rows, [=] ARI_ON_GPU(size_t i) {
        size_t query = i;
        size_t head = ari_divide(&per_head, &query);
        const size_t sample = ari_divide(&per_sample, &head);
        out[static_cast<ptrdiff_t>(sample) * by_sample + static_cast<ptrdiff_t>(query) * by_query +
            static_cast<ptrdiff_t>(head) * by_head] = ari_sink_term(sink[head], tops[i], sums[i], dots[i]);
    });
}

/* ds may be dprobs. */
ar_status softmax_backward(ar_device *d, ar_queue *q, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot, bool known,
                           float scale, const ar_scores *score_shape, const ar_mask *mask)
{
    float *score_gradients = dev<float>(ds), *gradients = dev<float>(dprobs);
    const float *values = dev<float>(probs);
    double *dots = dev<double>(dot);
    const ari_score_rows rows = rows_of_block(score_shape, mask);
    const size_t keys = score_shape->part.cols;
    const int32_t p = ari_rowsum_bits(score_shape->seq);
    const bool wide = keys % ROW_LANES == 0 && aligned<ROW_LANES>(score_gradients, gradients, values);
    return launch_blocks(
        d, q, score_shape->part.matrices * score_shape->part.rows, keys, [=] ARI_ON_GPU(const block &thread_block) {
            const ari_score_row r = ari_score_row_of(&rows, thread_block.index);
            const size_t start = thread_block.index * keys;
            const float *pr = values + start + r.first_key;
            float *dp = gradients + start, *out = score_gradients + start;
            auto product = [&](auto lanes, size_t j) {
                const auto share = read_vector<lanes>(pr + j), gradient = read_vector<lanes>(dp + r.first_key + j);
                return vector_of<lanes>([&](size_t k) {
                    const float upstream = shows(r, j + k) ? gradient.lane[k] : 0.0f;
                    return static_cast<double>(share.lane[k]) * static_cast<double>(upstream);
                });
            };
            const double sum =
                known ? dots[r.row_index]
                      : row_sum<ROW_LANES>(thread_block, r.keys, wide && r.first_key % ROW_LANES == 0, p, product);
            if (!known)
                thread_block.each(1, [&](size_t) { dots[r.row_index] = sum; });
            auto zero = [&](auto lanes, size_t key) {
                write_vector(out + key, vector<float, lanes>{});
                if (dp != out)
                    write_vector(dp + key, vector<float, lanes>{});
            };
            auto gradient = [&](auto lanes, size_t key) {
                const auto share = read_vector<lanes>(values + start + key);
                const auto upstream = read_vector<lanes>(dp + key);
                if (dp != out)
                    write_vector(dp + key, vector_of<lanes>(
                                               [&](size_t k) { return sees(r, key + k) ? upstream.lane[k] : 0.0f; }));
                write_vector(out + key, vector_of<lanes>([&](size_t k) {
                                 return sees(r, key + k) ? ari_attention_ds(share.lane[k], upstream.lane[k], sum, scale)
                                                         : 0.0f;
                             }));
            };
            each_column(thread_block, r, keys, wide, gradient, zero);
        });
}

} // namespace ARI_GPU
