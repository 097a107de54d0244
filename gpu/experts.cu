/* SPDX-License-Identifier: Apache-2.0 */
/* Experts: choosing them, and moving rows to them and back, as in ref/cpu/experts.c. */
#include "gpu/vectors.h"
#include "ref/core/tensor_private.h"

namespace ARI_GPU
{

/* --- routing ------------------------------------------------------------------------------------------------------ */

/* Returns the logarithm of the denominator, on every thread. */
template <class T> ARI_ON_GPU float softmax_of(const block &b, float *p, const T *x, size_t n)
{
    const int32_t top = b.max(n, [&](size_t j) { return ari_key32(load(x[j])); }), bits = ari_rowsum_bits(n);
    if (top == INT32_MAX) {
        b.each(n, [&](size_t j) { p[j] = ari_nan32(); });
        return ari_nan32();
    }
    const float largest = ari_key32_value(top);
    /* Exponent 1: every term is at most exp(0) = 1. */
    const int64_t total = row_integer<1>(b, n, false, 1, bits, [&](auto lanes, size_t j) {
        return vector_of<lanes>([&](size_t k) {
            p[j + k] = ari_softmax_exp(load(x[j + k]), largest);
            return static_cast<double>(p[j + k]);
        });
    });
    const double l = ari_rowsum_value(total, 1, bits);
    b.each(n, [&](size_t j) { p[j] = ari_softmax_p(p[j], l); });
    return ari_route_lse(largest, l);
}

/* Returns the score by which expert i of a row is chosen; for a softmax without bias its logit. */
template <class T> ARI_ON_GPU float score_of(const T *x, const float *bias, size_t i)
{
    if (!bias)
        return load(x[i]);
    return ari_route_score(ari_sigmoid32(load(x[i])), bias[i]);
}

/* Returns the sum of the two largest scores in the group that begins with expert `first_expert`; for a softmax router,
 * the largest score. */
template <class T> ARI_ON_GPU float group_score(const T *x, const float *bias, size_t first_expert, size_t group_size)
{
    float largest = score_of(x, bias, first_expert), second = -INFINITY;
    for (size_t i = first_expert + 1; i < first_expert + group_size; i++) {
        const float c = score_of(x, bias, i);
        if (c > largest) {
            second = largest;
            largest = c;
        } else if (c > second) {
            second = c;
        }
    }
    return bias ? largest + second : largest;
}

/* Returns the selected groups as bits: those to which fewer than `kept_groups` groups are preferred. */
ARI_ON_GPU uint64_t groups_kept(const float *score, size_t groups, size_t kept_groups)
{
    uint64_t stay = 0;
    for (size_t g = 0; g < groups; g++) {
        size_t preferred = 0;
        for (size_t rival = 0; rival < groups; rival++)
            if (ari_route_prefers(score[rival], rival, score[g], g))
                preferred++;
        stay |= static_cast<uint64_t>(preferred < kept_groups) << g;
    }
    return stay;
}

/* Counts the experts in the selected groups that are preferred to expert j. */
template <class T>
ARI_ON_GPU size_t preferred_to(size_t j, const T *x, const float *bias, uint64_t stay, size_t groups, size_t group_size)
{
    const float expert_score = score_of(x, bias, j);
    size_t preferred = 0;
    for (size_t g = 0; g < groups; g++)
        for (size_t i = g * group_size; i < (stay >> g & 1 ? (g + 1) * group_size : 0); i++)
            if (ari_route_prefers(score_of(x, bias, i), i, expert_score, j))
                preferred++;
    return preferred;
}

/* ar_route_rule, with memory of the device. */
struct route_rule {
    const float *bias;
    size_t groups, kept_groups, k;
    ari_divisor group_size;
    float scale;
    bool normalised;
};

route_rule rule_of(const ar_route_rule *rule, size_t experts)
{
    return {
        dev<float>(rule->bias), rule->groups, rule->kept, rule->k, ari_divisor_of(experts / rule->groups), rule->scale,
        rule->normalised};
}

/* Chooses the experts of a row, ascending. Each chosen expert is first written at its rank to `ranks`: float [k],
 * scratch. scores: [groups], scratch. */
template <class T>
ARI_ON_GPU void choose(const block &b, int32_t *expert, float *ranks, float *scores, const T *x, size_t n,
                       const route_rule &rule)
{
    if (rule.groups > 1)
        b.each(rule.groups, [&](size_t g) {
            scores[g] = group_score(x, rule.bias, g * rule.group_size.divisor, rule.group_size.divisor);
        });
    b.each(n, [&](size_t j) {
        const uint64_t stay = rule.groups > 1 ? groups_kept(scores, rule.groups, rule.kept_groups) : 1;
        if (!(stay >> ari_quotient(&rule.group_size, j) & 1))
            return;
        const size_t rank = preferred_to(j, x, rule.bias, stay, rule.groups, rule.group_size.divisor);
        if (rank < rule.k)
            ranks[rank] = static_cast<float>(j);
    });
    b.each(rule.k, [&](size_t s) {
        size_t below = 0;
        for (size_t rival = 0; rival < rule.k; rival++)
            if (ranks[rival] < ranks[s])
                below++;
        expert[below] = static_cast<int32_t>(ranks[s]);
    });
}

/* Returns the divisor of the chosen experts' scores if their weights are normalised. */
ARI_ON_GPU float divisor_of(const float *a, const int32_t *expert, const route_rule &rule)
{
    float sum = a[expert[0]];
    for (size_t i = 1; i < rule.k; i++)
        sum = ari_add32(sum, a[expert[i]]);
    return rule.bias ? ari_route_divisor(sum) : sum;
}

ARI_FOR_DTYPES(route, z, (p, expert, weight, lse, z, host_rule), ar_buf p, ar_buf expert, ar_buf weight, ar_buf lse,
               const ar_tensor *z, const ar_route_rule *host_rule)
{
    const ar_tensor matrix = ari_tensor_rows(z);
    const size_t n = matrix.shape[1], k = host_rule->k;
    const T *logits = dev<T>(z->data);
    float *rows = dev<float>(p), *weights = dev<float>(weight), *logarithms = dev<float>(lse);
    int32_t *experts = dev<int32_t>(expert);
    const route_rule rule = rule_of(host_rule, n);
    return launch_blocks(d, q, matrix.shape[0], n, [=] ARI_ON_GPU(const block &b) {
        const T *x = logits + b.index * n;
        float *row = rows + b.index * n, *w = weights + b.index * k;
        int32_t *chosen = experts + b.index * k;
        /* The first index that makes a choice impossible, as -1 - index, so that the first is the largest. */
        const int32_t lost = b.max(n, [&](size_t j) {
            const float c = score_of(x, rule.bias, j);
            return (rule.bias ? ari_route_is_lost(c) : c != c) ? -1 - static_cast<int32_t>(j) : INT32_MIN;
        });
        if (lost == INT32_MIN)
            choose(b, chosen, w, row, x, n, rule);
        const float of_row = rule.bias ? 0.0f : softmax_of(b, row, x, n);
        b.each(rule.bias ? n : 0, [&](size_t j) { row[j] = ari_sigmoid32(load(x[j])); });
        b.each(logarithms ? 1 : 0, [&](size_t) { logarithms[b.index] = of_row; });
        b.each(k, [&](size_t j) {
            if (lost != INT32_MIN) {
                chosen[j] = lost;
                w[j] = ari_nan32();
                return;
            }
            w[j] = ari_route_scaled(row[chosen[j]], divisor_of(row, chosen, rule), rule.scale, rule.normalised);
        });
    });
}

ARI_FOR_DTYPES(route_backward, dz, (dz, g, p, expert, weight, host_rule), const ar_tensor *dz, ar_cbuf g, ar_cbuf p,
               ar_cbuf expert, ar_cbuf weight, const ar_route_rule *host_rule)
{
    const ar_tensor matrix = ari_tensor_rows(dz);
    const size_t n = matrix.shape[1], k = host_rule->k;
    T *gradients = dev<T>(dz->data);
    const float *slopes = dev<float>(g), *rows = dev<float>(p), *weights = dev<float>(weight);
    const int32_t *experts = dev<int32_t>(expert);
    const route_rule rule = rule_of(host_rule, n);
    return launch_blocks(d, q, matrix.shape[0], n, [=] ARI_ON_GPU(const block &b) {
        const size_t first_slot = b.index * k;
        const float *row = rows + b.index * n, *w = weights + first_slot, *slope = slopes + first_slot;
        const int32_t *chosen = experts + first_slot;
        T *out = gradients + b.index * n;
        float r = 0.0f;
        if (rule.bias) {
            const float divisor = divisor_of(row, chosen, rule);
            for (size_t j = 0; j < k && rule.normalised; j++)
                r = ari_add32(r, ari_mul32(ari_route_weight(row[chosen[j]], divisor), slope[j]));
            b.each(n, [&](size_t i) { store(out + i, 0.0f); });
            b.each(k, [&](size_t j) { store(out + chosen[j], ari_route_dscore(w[j], row[chosen[j]], slope[j], r)); });
            return;
        }
        const auto share = [&](size_t j) { return rule.normalised ? w[j] : row[chosen[j]]; };
        for (size_t j = 0; j < k; j++)
            r = ari_add32(r, ari_mul32(share(j), ari_mul32(slope[j], rule.scale)));
        b.each(n, [&](size_t i) { store(out + i, rule.normalised ? 0.0f : ari_mul32(row[i], -r)); });
        b.each(k, [&](size_t j) {
            store(out + chosen[j], ari_route_dlogit(share(j), ari_mul32(slope[j], rule.scale), r));
        });
    });
}

/* --- losses of routers -------------------------------------------------------------------------------------------- */

ar_status route_terms(ar_device *d, ar_queue *q, ar_buf terms, const ar_tensor *p, ar_cbuf balance, size_t tokens,
                      ar_cbuf lse, double z, ar_cbuf valid)
{
    const size_t n = p->shape[1];
    const float *rows = dev<float>(p->data), *slopes = dev<float>(balance), *logarithms = dev<float>(lse);
    const uint8_t *counts = dev<uint8_t>(valid);
    const ari_divisor by_each = ari_divisor_of(tokens);
    float *out = dev<float>(terms);
    return launch_each(d, q, p->shape[0], [=] ARI_ON_GPU(size_t t) {
        float term = ari_route_balance(rows + t * n, slopes ? slopes + ari_quotient(&by_each, t) * n : nullptr, n);
        if (logarithms)
            term = ari_add32(term, ari_route_z_term(z, logarithms[t]));
        out[t] = counts && !counts[t] ? 0.0f : term;
    });
}

ARI_FOR_DTYPES(route_losses, dz, (dz, p, balance, tokens, lse, z, valid), const ar_tensor *dz, ar_cbuf p,
               ar_cbuf balance, size_t tokens, ar_cbuf lse, double z, ar_cbuf valid)
{
    const ar_tensor matrix = ari_tensor_rows(dz);
    const size_t n = matrix.shape[1];
    T *gradients = dev<T>(dz->data);
    const float *probabilities = dev<float>(p), *slopes = dev<float>(balance), *logarithms = dev<float>(lse);
    const uint8_t *counts = dev<uint8_t>(valid);
    const ari_divisor by_each = ari_divisor_of(tokens);
    return launch_blocks(d, q, matrix.shape[0], n, [=] ARI_ON_GPU(const block &b) {
        const float *row = probabilities + b.index * n;
        const float *c = slopes ? slopes + ari_quotient(&by_each, b.index) * n : nullptr;
        const float of_z = logarithms ? ari_route_z(z, logarithms[b.index]) : 0.0f;
        const float r = ari_route_balance(row, c, n);
        T *out = gradients + b.index * n;
        b.each(counts && !counts[b.index] ? 0 : n, [&](size_t i) {
            float sum = load(out[i]);
            if (c)
                sum = ari_add32(sum, ari_route_dlogit(row[i], c[i], r));
            if (logarithms)
                sum = ari_add32(sum, ari_mul32(row[i], of_z));
            store(out + i, sum);
        });
    });
}

/* --- rows of slots ------------------------------------------------------------------------------------------------ */

ARI_FOR_DTYPES(gather_rows, y, (y, w, row_of, weight, k), const ar_tensor *y, const ar_tensor *w, ar_cbuf row_of,
               ar_cbuf weight, size_t k)
{
    constexpr size_t W = 16 / sizeof(T);
    const size_t n = ari_tensor_rows(y).shape[0], cols = w->shape[1];
    const ptrdiff_t stride = w->stride[0];
    const ari_divisor by_k = ari_divisor_of(k);
    T *dst = dev<T>(y->data);
    const T *src = dev<T>(w->data);
    const float *weights = dev<float>(weight);
    const int64_t *rows = dev<int64_t>(row_of);
    const bool wide = cols % W == 0 && stride % static_cast<ptrdiff_t>(W) == 0 && aligned<W>(dst, src);
    return launch_row_vectors<W>(d, q, n, cols, wide, [=] ARI_ON_GPU(auto lanes, size_t t, size_t col) {
        constexpr size_t N = lanes;
        const int64_t row = rows[t];
        vector<T, N> values = {}; /* without weights elements are bits */
        if (row >= 0)
            values = read_vector<N>(
                src + static_cast<ptrdiff_t>(ari_quotient(&by_k, static_cast<size_t>(row))) * stride + col);
        if (row < 0 || !weights) {
            write_vector(dst + t * cols + col, values);
            return;
        }
        const float factor = weights[row];
        write_stored<N>(dst + t * cols + col, [&](size_t i) { return ari_mul32(factor, load(values.lane[i])); });
    });
}

ARI_FOR_DTYPES(combine_rows, y, (y, rows, weight, place, k), const ar_tensor *y, const ar_tensor *rows, ar_cbuf weight,
               ar_cbuf place, size_t k)
{
    constexpr size_t W = 16 / sizeof(T);
    const ar_tensor matrix = ari_tensor_rows(y);
    const size_t cols = matrix.shape[1];
    T *dst = dev<T>(y->data);
    const T *src = dev<T>(rows->data);
    const float *weights = dev<float>(weight);
    const int64_t *places = dev<int64_t>(place);
    const bool wide = cols % W == 0 && aligned<W>(dst, src);
    return launch_row_vectors<W>(d, q, matrix.shape[0], cols, wide, [=] ARI_ON_GPU(auto lanes, size_t row, size_t col) {
        constexpr size_t N = lanes;
        vector<float, N> sum = {};
        for (size_t j = 0; j < k; j++) {
            const size_t slot = row * k + j;
            const vector<T, N> values = read_vector<N>(src + static_cast<size_t>(places[slot]) * cols + col);
            const float w = weights ? weights[slot] : 1.0f;
#pragma unroll
            for (size_t i = 0; i < N; i++) {
                const float term = weights ? ari_mul32(w, load(values.lane[i])) : load(values.lane[i]);
                sum.lane[i] = j == 0 ? term : ari_add32(sum.lane[i], term);
            }
        }
        write_stored<N>(dst + row * cols + col, [&](size_t i) { return sum.lane[i]; });
    });
}

/* fl32(row sum of the products of two rows). */
template <class T> ARI_ON_GPU float dot(const block &b, const T *left, const T *right, size_t n, bool wide)
{
    return ari_round32(row_sum<ROW_LANES>(b, n, wide, ari_rowsum_bits(n), [&](auto lanes, size_t j) {
        const auto x = read_vector<lanes>(left + j), y = read_vector<lanes>(right + j);
        return vector_of<lanes>(
            [&](size_t k) { return static_cast<double>(load(x.lane[k])) * static_cast<double>(load(y.lane[k])); });
    }));
}

ARI_FOR_DTYPES(dot_rows, dy, (g, dy, rows, place, k), ar_buf g, const ar_tensor *dy, const ar_tensor *rows,
               ar_cbuf place, size_t k)
{
    const ar_tensor matrix = ari_tensor_rows(dy);
    const size_t cols = matrix.shape[1];
    const ari_divisor by_k = ari_divisor_of(k);
    float *products = dev<float>(g);
    const T *slopes = dev<T>(dy->data), *outputs = dev<T>(rows->data);
    const int64_t *places = dev<int64_t>(place);
    const bool wide = cols % ROW_LANES == 0 && aligned<ROW_LANES>(slopes, outputs);
    return launch_blocks(d, q, matrix.shape[0] * k, cols, [=] ARI_ON_GPU(const block &b) {
        size_t rest = b.index;
        const size_t token = ari_divide(&by_k, &rest), row = static_cast<size_t>(places[b.index]);
        const float value = dot(b, slopes + token * cols, outputs + row * cols, cols, wide);
        b.each(1, [&](size_t) { products[b.index] = value; });
    });
}

/* --- an expert of all tokens -------------------------------------------------------------------------------------- */

ARI_FOR_DTYPES(add_gated, y, (y, x, logit), const ar_tensor *y, const ar_tensor *x, const ar_tensor *logit)
{
    constexpr size_t W = 16 / sizeof(T);
    const ar_tensor matrix = ari_tensor_rows(y);
    const size_t cols = matrix.shape[1];
    T *sums = dev<T>(y->data);
    const T *src = dev<T>(x->data), *logits = dev<T>(logit->data);
    const bool wide = cols % W == 0 && aligned<W>(sums, src);
    return launch_blocks(d, q, matrix.shape[0], cols, [=] ARI_ON_GPU(const block &b) {
        const float s = ari_sigmoid32(load(logits[b.index]));
        T *out = sums + b.index * cols;
        const T *src_row = src + b.index * cols;
        each_vector<W>(b, cols, wide, [&](auto lanes, size_t j) {
            const auto old = read_vector<lanes>(out + j), addend = read_vector<lanes>(src_row + j);
            write_stored<lanes>(out + j,
                                [&](size_t k) { return ari_add_gated32(load(old.lane[k]), s, load(addend.lane[k])); });
        });
    });
}

ARI_FOR_DTYPES(add_gated_backward, dy, (dx, dlogit, dy, x, logit), const ar_tensor *dx, const ar_tensor *dlogit,
               const ar_tensor *dy, const ar_tensor *x, const ar_tensor *logit)
{
    const ar_tensor matrix = ari_tensor_rows(dy);
    const size_t cols = matrix.shape[1];
    T *dst = dev<T>(dx->data), *to_logit = dev<T>(dlogit->data);
    const T *slopes = dev<T>(dy->data), *src = dev<T>(x->data);
    const T *logits = dev<T>(logit->data);
    const bool wide = cols % ROW_LANES == 0 && aligned<ROW_LANES>(dst, slopes, src);
    return launch_blocks(d, q, matrix.shape[0], cols, [=] ARI_ON_GPU(const block &b) {
        const float s = ari_sigmoid32(load(logits[b.index]));
        T *out = dst + b.index * cols;
        const T *slope = slopes + b.index * cols;
        const float gradient = dot(b, slope, src + b.index * cols, cols, wide);
        b.each(1, [&](size_t) { store(to_logit + b.index, ari_dsigmoid32(gradient, s)); });
        each_vector<ROW_LANES>(b, cols, wide, [&](auto lanes, size_t j) {
            const auto slope_values = read_vector<lanes>(slope + j);
            write_stored<lanes>(out + j, [&](size_t k) { return ari_mul32(s, load(slope_values.lane[k])); });
        });
    });
}

} // namespace ARI_GPU
