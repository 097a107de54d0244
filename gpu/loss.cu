/* SPDX-License-Identifier: Apache-2.0 */
/* Cross-entropy over one shard of the vocabulary, a block a row of logits: what ref/cpu/loss.c does. */
#include "gpu/kernels.h"
#include "gpu/row_sum.h"

namespace ARI_GPU
{

struct ce_max_row {
    int32_t *key;
    const float *logits;
    size_t v_local;
    ARI_KERNEL void operator()(const block &b) const
    {
        const float *x = logits + b.index * v_local;
        const int32_t top = b.max(v_local, [&](size_t j) { return ari_key32(x[j]); });
        b.each(1, [&](size_t) { key[b.index] = top; });
    }
};

ar_status ce_max(ar_device *d, ar_queue *q, ar_buf key, ar_cbuf logits, size_t n, size_t v_local)
{
    return launch_blocks(d, q, n, v_local, ce_max_row{dev<int32_t>(key), dev<float>(logits), v_local});
}

struct ce_sum_row {
    int64_t *sum;
    const float *logits;
    const int32_t *key;
    size_t v_local;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const float *x = logits + b.index * v_local;
        const int32_t top = key[b.index];
        const float m = ari_key32_value(top);
        /* Exponent 1: every term is at most exp(0) = 1. */
        const int64_t total = row_integer(b, top == INT32_MAX ? 0 : v_local, 1, p,
                                          [&](size_t j) { return static_cast<double>(ari_softmax_exp(x[j], m)); });
        b.each(1, [&](size_t) { sum[b.index] = total; });
    }
};

ar_status ce_sum(ar_device *d, ar_queue *q, ar_buf sum, ar_cbuf logits, ar_cbuf key, size_t n, size_t v_local, size_t v)
{
    const ce_sum_row kernel = {dev<int64_t>(sum), dev<float>(logits), dev<int32_t>(key), v_local, ari_rowsum_bits(v)};
    return launch_blocks(d, q, n, v_local, kernel);
}

struct ce_target_each {
    uint32_t *bits;
    const float *logits;
    const int64_t *row_of;
    size_t v_local;
    ARI_KERNEL void operator()(size_t i) const
    {
        const int64_t at = row_of[i];
        bits[i] = at >= 0 ? ari_bits32(logits[i * v_local + static_cast<size_t>(at)]) : 0;
    }
};

ar_status ce_target(ar_device *d, ar_queue *q, ar_buf bits, ar_cbuf logits, ar_cbuf row_of, size_t n, size_t v_local)
{
    return launch_each(d, q, n, ce_target_each{dev<uint32_t>(bits), dev<float>(logits), dev<int64_t>(row_of), v_local});
}

struct ce_terms_each {
    float *terms;
    const int32_t *key;
    const int64_t *sum;
    const uint32_t *bits; /* int32 summed over ranks: the same bits */
    const uint8_t *valid;
    int32_t p;
    ARI_KERNEL void operator()(size_t i) const
    {
        const double l = ari_rowsum_value(sum[i], 1, p);
        const float term = ari_ce_term(ari_key32_value(key[i]), l, ari_float32(bits[i]));
        terms[i] = valid[i] ? term : 0.0f;
    }
};

ar_status ce_terms(ar_device *d, ar_queue *q, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits, ar_cbuf valid,
                   size_t n, size_t v)
{
    const ce_terms_each kernel = {dev<float>(terms),   dev<int32_t>(key),   dev<int64_t>(sum),
                                  dev<uint32_t>(bits), dev<uint8_t>(valid), ari_rowsum_bits(v)};
    return launch_each(d, q, n, kernel);
}

/* dlogits may be logits: each value is read by the thread that writes its place. */
struct ce_backward_row {
    float *dlogits;
    const float *logits;
    const int32_t *key;
    const int64_t *sum, *row_of;
    const uint8_t *valid;
    double targets;
    size_t v_local;
    int32_t p;
    ARI_KERNEL void operator()(const block &b) const
    {
        const float *x = logits + b.index * v_local;
        float *out = dlogits + b.index * v_local;
        const int32_t top = key[b.index];
        if (!valid[b.index] || !(targets > 0.0) || top == INT32_MAX) {
            const float all = valid[b.index] && targets > 0.0 ? ari_nan32() : 0.0f;
            b.each(v_local, [&](size_t j) { out[j] = all; });
            return;
        }
        const float m = ari_key32_value(top);
        const double l = ari_rowsum_value(sum[b.index], 1, p);
        const int64_t at = row_of[b.index];
        b.each(v_local, [&](size_t j) {
            const float share = ari_softmax_p(ari_softmax_exp(x[j], m), l);
            out[j] = ari_ce_dlogit(share, static_cast<int64_t>(j) == at, targets);
        });
    }
};

ar_status ce_backward(ar_device *d, ar_queue *q, ar_buf dlogits, ar_cbuf logits, ar_cbuf key, ar_cbuf sum,
                      ar_cbuf row_of, ar_cbuf valid, double targets, size_t n, size_t v_local, size_t v)
{
    const ce_backward_row kernel = {dev<float>(dlogits),  dev<float>(logits),  dev<int32_t>(key), dev<int64_t>(sum),
                                    dev<int64_t>(row_of), dev<uint8_t>(valid), targets,           v_local,
                                    ari_rowsum_bits(v)};
    return launch_blocks(d, q, n, v_local, kernel);
}

} // namespace ARI_GPU
