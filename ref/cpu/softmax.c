/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "ref/cpu/row_sum.h"

/* Attention's softmax and its gradient, one row (one query of one head) after the other. Masks are structural: a masked
 * key is left out. While a row is worked on, its masked places hold -inf, which no visible place does then: a visible
 * score that is not finite has been written as NaN, since it makes the whole row NaN. */

/* What one query may see: of keys [first, first + keys), which are looked at, all that the others do not mask. */
typedef struct row_mask {
    size_t first, keys;     /* before them lies what the sliding window leaves behind, after them the future (causal) */
    const uint8_t *padding; /* of these keys, 0 = masked; NULL: none */
    const float *additive;  /* of these keys, -inf = masked; NULL: none */
} row_mask;

static row_mask mask_of_row(const ar_mask *mask, size_t heads, size_t s, size_t row)
{
    const size_t query = row % s, head = row / s % heads, sample = row / s / heads;
    const size_t first = mask->window > 0 && query >= mask->window ? query - mask->window + 1 : 0;
    row_mask m = {.first = first, .keys = (mask->causal ? query + 1 : s) - first};
    if (mask->padding.ptr)
        m.padding = (const uint8_t *)mask->padding.ptr + sample * s + first;
    if (mask->additive.ptr) {
        const size_t plane = (mask->mask_batch > 1 ? sample : 0) * mask->mask_heads +
                             (mask->mask_heads > 1 ? mask->head_start + head : 0);
        m.additive = (const float *)mask->additive.ptr + (plane * s + query) * s + first;
    }
    return m;
}

ARI_ROW_LOOP float nan_unless_finite(float x)
{
    return (ari_bits32(x) & 0x7f800000u) == 0x7f800000u ? ari_nan32() : x;
}

/* In what follows the rows begin at the mask's first key. */

/* row = scaled scores with the additive mask, masked -inf, visible ones finite or NaN. row may be scores. */
ARI_ROW_LOOP void scale_and_mask(float *row, const float *scores, float scale, const row_mask *m)
{
    if (m->additive) {
#pragma GCC ivdep
        for (size_t j = 0; j < m->keys; j++) {
            const float scaled = scores[j] * scale;
            const float moved = nan_unless_finite(scaled + m->additive[j]);
            row[j] = m->additive[j] == -INFINITY ? -INFINITY : moved;
        }
    } else {
#pragma GCC ivdep
        for (size_t j = 0; j < m->keys; j++)
            row[j] = nan_unless_finite(scores[j] * scale);
    }
    if (m->padding) {
#pragma GCC ivdep
        for (size_t j = 0; j < m->keys; j++)
            row[j] = m->padding[j] ? row[j] : -INFINITY;
    }
}

/* row = exp32(fl32(row - max)) and its row sum, exponent 1: every term is at most exp(0) = 1. */
ARI_ROW_LOOP double exponentials(float *row, size_t n, float max, int32_t p)
{
    const double step = ari_row_step(1, p);
    uint64_t sum = 0;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++) {
        const float e = row[j] == -INFINITY ? 0.0f : ari_softmax_exp(row[j], max);
        sum += ari_row_biased((double)e, step);
        row[j] = e;
    }
    return ari_row_value(sum, n, 1, p);
}

ARI_ROW_LOOP void set_zero(float *row, size_t from, size_t to)
{
    for (size_t j = from; j < to; j++)
        row[j] = 0.0f;
}

/* +0 outside the mask's keys; `all` is the whole row. */
ARI_ROW_LOOP void clear_outside(float *all, const row_mask *m, size_t s)
{
    set_zero(all, 0, m->first);
    set_zero(all, m->first + m->keys, s);
}

ARI_ROW_KERNEL void softmax_row(float *all, const float *all_scores, float scale, const row_mask *m, size_t s)
{
    const size_t n = m->keys;
    float *row = all + m->first;
    const float *scores = all_scores + m->first;
    scale_and_mask(row, scores, scale, m);
    const int32_t top = ari_row_largest_key(row, n, -INFINITY);
    if (top == INT32_MIN) { /* no visible key */
        set_zero(row, 0, n);
    } else if (top == INT32_MAX) { /* a visible score that is not finite */
        for (size_t j = 0; j < n; j++)
            row[j] = row[j] == -INFINITY ? 0.0f : ari_nan32();
    } else {
        const double l = exponentials(row, n, ari_key32_value(top), ari_rowsum_bits(s));
#pragma GCC ivdep
        for (size_t j = 0; j < n; j++)
            row[j] = ari_softmax_p(row[j], l);
    }
    clear_outside(all, m, s);
}

/** Slot softmax_forward. probs may be scores; no other overlap. */
ar_status ari_cpu_softmax_forward(ar_device *d, ARI_AT_ONCE, ar_buf probs, ar_cbuf scores, size_t b, size_t heads,
                                  size_t s, float scale, const ar_mask *mask)
{
    if (heads == 0 || s == 0)
        return AR_OK;
    const size_t rows = b * heads * s;
    float *out = probs.ptr;
    const float *in = scores.ptr;
    /* Dynamic: a causal row's length grows with its query. */
    ARI_PARALLEL_BY ((dynamic, 16), i, rows, d, rows * s) {
        const row_mask m = mask_of_row(mask, heads, s, i);
        softmax_row(out + i * s, in + i * s, scale, &m, s);
    }
    return AR_OK;
}

/* +0 at the masked keys of a whole row. */
ARI_ROW_LOOP void clear_masked(float *all, const row_mask *m, size_t s)
{
    float *row = all + m->first;
    if (m->additive) {
#pragma GCC ivdep
        for (size_t j = 0; j < m->keys; j++)
            row[j] = m->additive[j] == -INFINITY ? 0.0f : row[j];
    }
    if (m->padding) {
#pragma GCC ivdep
        for (size_t j = 0; j < m->keys; j++)
            row[j] = m->padding[j] ? row[j] : 0.0f;
    }
    clear_outside(all, m, s);
}

/* Row sum of probs*dprobs over the keys; the products of two fp32 are exact in binary64. */
ARI_ROW_LOOP double row_dot(const float *probs, const float *dprobs, size_t n, int32_t p)
{
    uint64_t top = 0;
    for (size_t j = 0; j < n; j++) {
        const uint64_t bits = ari_row_magnitude64((double)probs[j] * (double)dprobs[j]);
        top = bits > top ? bits : top;
    }
    const int32_t e = ari_exponent64(ari_float64(top));
    const double step = ari_row_step(e, p);
    uint64_t sum = 0;
    for (size_t j = 0; j < n; j++)
        sum += ari_row_biased((double)probs[j] * (double)dprobs[j], step);
    return ari_row_value(sum, n, e, p);
}

ARI_ROW_KERNEL void softmax_backward_row(float *all_ds, const float *all_probs, float *all_dprobs, float scale,
                                         const row_mask *m, size_t s)
{
    clear_masked(all_dprobs, m, s);
    float *ds = all_ds + m->first;
    const float *probs = all_probs + m->first, *dprobs = all_dprobs + m->first;
    const double dot = row_dot(probs, dprobs, m->keys, ari_rowsum_bits(s));
#pragma GCC ivdep
    for (size_t j = 0; j < m->keys; j++)
        ds[j] = ari_attention_ds(probs[j], dprobs[j], dot, scale);
    clear_masked(all_ds, m, s); /* -0, or NaN in a row that has one, stands at masked keys now */
}

/** Slot softmax_backward. ds may be dprobs; no other overlap. */
ar_status ari_cpu_softmax_backward(ar_device *d, ARI_AT_ONCE, ar_buf ds, ar_cbuf probs, ar_buf dprobs, size_t b,
                                   size_t heads, size_t s, float scale, const ar_mask *mask)
{
    if (heads == 0 || s == 0)
        return AR_OK;
    const size_t rows = b * heads * s;
    float *out = ds.ptr, *dp = dprobs.ptr;
    const float *pr = probs.ptr;
    ARI_PARALLEL_BY ((dynamic, 16), i, rows, d, rows * s) {
        const row_mask m = mask_of_row(mask, heads, s, i);
        softmax_backward_row(out + i * s, pr + i * s, dp + i * s, scale, &m, s);
    }
    return AR_OK;
}
