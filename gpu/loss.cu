/* SPDX-License-Identifier: Apache-2.0 */
/* Cross-entropy over one shard of the vocabulary, with one block per row of logits, as in ref/cpu/loss.c. */
#include "gpu/vectors.h"
#include "ref/core/tensor_private.h"

namespace ARI_GPU
{

ARI_FOR_DTYPES(ce_max, logits, (key, logits), ar_buf key, const ar_tensor *logits)
{
    const ar_tensor matrix = ari_tensor_rows(logits);
    const size_t n = matrix.shape[0], v_local = matrix.shape[1];
    int32_t *tops = dev<int32_t>(key);
    const T *values = dev<T>(logits->data);
    const bool wide = v_local % ROW_LANES == 0 && aligned<ROW_LANES>(values);
    return launch_blocks(d, q, n, v_local, [=] ARI_ON_GPU(const block &b) {
        const T *x = values + b.index * v_local;
        const int32_t top = max_vectors<ROW_LANES>(b, v_local, wide, [&](auto lanes, size_t j) {
            const auto logit = read_vector<lanes>(x + j);
            int32_t max_key = ari_key32(load(logit.lane[0]));
#pragma unroll
            for (size_t k = 1; k < lanes; k++)
                max_key = larger(max_key, ari_key32(load(logit.lane[k])));
            return max_key;
        });
        b.each(1, [&](size_t) { tops[b.index] = top; });
    });
}

ARI_FOR_DTYPES(ce_sum, logits, (sum, logits, key, v), ar_buf sum, const ar_tensor *logits, ar_cbuf key, size_t v)
{
    const ar_tensor matrix = ari_tensor_rows(logits);
    const size_t n = matrix.shape[0], v_local = matrix.shape[1];
    const T *values = dev<T>(logits->data);
    const int32_t *tops = dev<int32_t>(key), p = ari_rowsum_bits(v);
    const bool wide = v_local % ROW_LANES == 0 && aligned<ROW_LANES>(values);
    return launch_blocks(d, q, n, v_local, [=, sum = dev<int64_t>(sum)] ARI_ON_GPU(const block &b) {
        const T *x = values + b.index * v_local;
        const int32_t top = tops[b.index];
        const float m = ari_key32_value(top);
        /* Exponent 1: every term is at most exp(0) = 1. */
        const int64_t total =
            row_integer<ROW_LANES>(b, top == INT32_MAX ? 0 : v_local, wide, 1, p, [&](auto lanes, size_t j) {
                const auto logit = read_vector<lanes>(x + j);
                return vector_of<lanes>(
                    [&](size_t k) { return static_cast<double>(ari_softmax_exp(load(logit.lane[k]), m)); });
            });
        b.each(1, [&](size_t) { sum[b.index] = total; });
    });
}

ARI_FOR_DTYPES(ce_logits, logits, (sum, logits, e, v), ar_buf sum, const ar_tensor *logits, ar_cbuf e, size_t v)
{
    const ar_tensor matrix = ari_tensor_rows(logits);
    const size_t n = matrix.shape[0], v_local = matrix.shape[1];
    const T *values = dev<T>(logits->data);
    const int32_t *exponents = dev<int32_t>(e), p = ari_rowsum_bits(v);
    const bool wide = v_local % ROW_LANES == 0 && aligned<ROW_LANES>(values);
    return launch_blocks(d, q, n, v_local, [=, sum = dev<int64_t>(sum)] ARI_ON_GPU(const block &b) {
        const T *x = values + b.index * v_local;
        const int64_t total =
            row_integer<ROW_LANES>(b, v_local, wide, exponents[b.index], p, [&](auto lanes, size_t j) {
                const auto logit = read_vector<lanes>(x + j);
                return vector_of<lanes>([&](size_t k) { return static_cast<double>(load(logit.lane[k])); });
            });
        b.each(1, [&](size_t) { sum[b.index] = total; });
    });
}

ARI_FOR_DTYPES(ce_target, logits, (bits, logits, row_of), ar_buf bits, const ar_tensor *logits, ar_cbuf row_of)
{
    const ar_tensor matrix = ari_tensor_rows(logits);
    const size_t n = matrix.shape[0], v_local = matrix.shape[1];
    const T *x = dev<T>(logits->data);
    return launch_each(d, q, n, [=, bits = dev<uint32_t>(bits), row_of = dev<int64_t>(row_of)] ARI_ON_GPU(size_t i) {
        const int64_t target_index = row_of[i];
        bits[i] = target_index >= 0 ? ari_bits32(load(x[i * v_local + static_cast<size_t>(target_index)])) : 0;
    });
}

ar_status ce_terms(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits, ar_cbuf valid,
                   ar_cbuf e, ar_cbuf logits, const ar_loss_options *o, size_t n, size_t v)
{
    float *dst = dev<float>(terms);
    const ar_loss_options options = *o;
    const int32_t *exponents = dev<int32_t>(e);
    const int64_t *values = dev<int64_t>(logits);
    const int32_t *tops = dev<int32_t>(key), p = ari_rowsum_bits(v);
    const int64_t *sums = dev<int64_t>(sum);
    const uint32_t *targets = dev<uint32_t>(bits); /* int32 bits summed over ranks */
    return launch_each(d, q, n, [=, valid = dev<uint8_t>(valid)] ARI_ON_GPU(size_t i) {
        const double lse = ari_ce_lse(ari_key32_value(tops[i]), ari_rowsum_value(sums[i], 1, p));
        const double mean = exponents ? ari_rowsum_value(values[i], exponents[i], p) / static_cast<double>(v) : 0.0;
        const float term = ari_ce_term(lse, ari_float32(targets[i]), mean, &options);
        dst[i] = valid[i] ? term : 0.0f;
    });
}

/* dlogits may be logits: the thread that writes an element reads it first. */
ARI_FOR_DTYPES(ce_backward, logits, (dlogits, logits, key, sum, row_of, valid, o, targets, v), const ar_tensor *dlogits,
               const ar_tensor *logits, ar_cbuf key, ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid,
               const ar_loss_options *o, double targets, size_t v)
{
    const ar_tensor matrix = ari_tensor_rows(logits);
    const size_t n = matrix.shape[0], v_local = matrix.shape[1];
    const ar_loss_options options = *o;
    const double miss = ari_ce_label(0, v, o), hit = ari_ce_label(1, v, o);
    T *gradients = dev<T>(dlogits->data);
    const T *values = dev<T>(logits->data);
    const int32_t *tops = dev<int32_t>(key), p = ari_rowsum_bits(v);
    const int64_t *sums = dev<int64_t>(sum), *rows = dev<int64_t>(row_of);
    const bool wide = v_local % ROW_LANES == 0 && aligned<ROW_LANES>(gradients, values);
    return launch_blocks(d, q, n, v_local, [=, valid = dev<uint8_t>(valid)] ARI_ON_GPU(const block &b) {
        const T *x = values + b.index * v_local;
        T *out = gradients + b.index * v_local;
        const int32_t top = tops[b.index];
        if (!valid[b.index] || !(targets > 0.0) || top == INT32_MAX) {
            const float fill_value = valid[b.index] && targets > 0.0 ? ari_nan32() : 0.0f;
            b.each(v_local, [&](size_t j) { store(out + j, fill_value); });
            return;
        }
        const float m = ari_key32_value(top);
        const double l = ari_rowsum_value(sums[b.index], 1, p);
        const double weight = ari_ce_weight(ari_ce_lse(m, l), &options);
        const int64_t target_index = rows[b.index];
        each_vector<ROW_LANES>(b, v_local, wide, [&](auto lanes, size_t j) {
            const auto logit = read_vector<lanes>(x + j);
            write_stored<lanes>(out + j, [&](size_t k) {
                const float share = ari_softmax_p(ari_softmax_exp(load(logit.lane[k]), m), l);
                const double label = static_cast<int64_t>(j + k) == target_index ? hit : miss;
                return ari_ce_dlogit(share, weight, label, targets);
            });
        });
    });
}

} // namespace ARI_GPU
