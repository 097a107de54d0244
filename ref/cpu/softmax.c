/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "ref/cpu/row_sum.h"
#include "ref/numerics/scores.h"

enum { WORTH = 4 }; /* minimum number of elements that other kernels process in the time of one */

/* Attention's softmax and its gradient, one row (one query of one head) after the other. Masks are structural: masked
 * keys are left out. While a row is being computed, its masked entries are -inf. No visible entry is -inf then, because
 * a visible score that is not finite has been replaced by NaN, since it makes the whole row NaN. */

static ari_score_rows rows_of(const ar_scores *block, const ar_mask *mask)
{
    return ari_score_rows_of(block, mask, mask->visible.ptr, mask->padding.ptr, mask->additive.ptr);
}

ARI_ROW_LOOP float nan_unless_finite(float x)
{
    return (ari_bits32(x) & 0x7f800000u) == 0x7f800000u ? ari_nan32() : x;
}

/* From here on rows begin at the first key that the row may see. */

/* Computes row = scaled scores with the additive mask, where masked entries are -inf and visible ones finite or NaN.
 * Returns the row's largest key; INT32_MIN without a visible key. row may be scores. */
ARI_ROW_LOOP int32_t scale_and_mask(float *row, const float *scores, float scale, const float *additive,
                                    const uint8_t *padding, size_t n)
{
    int32_t top = INT32_MIN;
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++) {
        const float scaled = scores[j] * scale, moved = nan_unless_finite(additive ? scaled + additive[j] : scaled);
        const bool masked = (additive && additive[j] == -INFINITY) | (padding && !padding[j]);
        const float visible = masked ? -INFINITY : moved;
        const int32_t ordered = ari_row_ordered(visible);
        row[j] = visible;
        top = ordered > top ? ordered : top;
    }
    const float row_max = ari_row_of_ordered(top);
    return n == 0 || row_max == -INFINITY ? INT32_MIN : ari_key32(row_max);
}

/* Dispatches to a separate loop for each kind of mask. */
ARI_ROW_LOOP int32_t mask_row(float *row, const float *scores, float scale, const ari_score_row *m)
{
    if (m->additive && m->padding)
        return scale_and_mask(row, scores, scale, m->additive, m->padding, m->keys);
    if (m->additive)
        return scale_and_mask(row, scores, scale, m->additive, NULL, m->keys);
    if (m->padding)
        return scale_and_mask(row, scores, scale, NULL, m->padding, m->keys);
    return scale_and_mask(row, scores, scale, NULL, NULL, m->keys);
}

/* Computes row = exp32(fl32(row - max)), +0 for -inf, and its row sum with exponent 1, as every term is at most exp(0)
 * = 1. sink: an additional term; NULL: none. */
ARI_ROW_LOOP double exponentials(float *row, size_t n, float max, const float *sink, int32_t p)
{
    ari_softmax_exps(row, row, max, n);
    uint64_t sum = ari_row_unit_integer(row, n, p);
    if (sink)
        sum += (uint64_t)ari_rowsum_quantise((double)ari_softmax_exp(*sink, max), 1, p);
    return ari_rowsum_value((int64_t)sum, 1, p);
}

ARI_ROW_LOOP void set_zero(float *row, size_t begin, size_t end)
{
    for (size_t j = begin; j < end; j++)
        row[j] = 0.0f;
}

/* Writes +0 outside the keys that the row may see; `block_row` is the block's row. */
ARI_ROW_LOOP void clear_outside(float *block_row, const ari_score_row *m, size_t cols)
{
    set_zero(block_row, 0, m->first_key);
    set_zero(block_row, m->first_key + m->keys, cols);
}

/* Handles rows without a visible key, or with a visible value that is not finite. */
ARI_ROW_LOOP void without_sum(float *row, size_t n, int32_t top)
{
    for (size_t j = 0; j < n; j++)
        row[j] = top == INT32_MIN || row[j] == -INFINITY ? 0.0f : ari_nan32();
}

/* Figures of a row once all of it was seen. */
typedef struct row_sums {
    int32_t *top;
    double *l;
    bool is_known;
    const float *sink; /* sink of the row's head; NULL: none */
} row_sums;

ARI_ROW_KERNEL void softmax_row(float *block_row, const float *all_scores, float scale, const ari_score_row *m,
                                const ar_scores *b, const row_sums *sums)
{
    const size_t n = m->keys;
    float *row = block_row + m->first_key;
    const int32_t row_top = mask_row(row, all_scores + m->first_key, scale, m);
    const int32_t top = sums->is_known ? *sums->top : ari_sink_top(row_top, sums->sink);
    *sums->top = top;
    if (top == INT32_MIN || top == INT32_MAX) {
        without_sum(row, n, top);
    } else if (sums->is_known) {
        ari_softmax_exps(row, row, ari_key32_value(top), n);
        ari_quotients(row, row, *sums->l, n);
    } else {
        *sums->l =
            exponentials(row, n, ari_key32_value(top), sums->sink, ari_rowsum_bits(b->seq + (sums->sink != NULL)));
        ari_quotients(row, row, *sums->l, n);
    }
    clear_outside(block_row, m, b->part.cols);
}

/** Slot softmax_forward. probs may be scores; no other overlap. */
ar_status ari_cpu_softmax_forward(ar_device *d, ARI_AT_ONCE, ar_buf probs, ar_cbuf scores, ar_cbuf sinks, ar_buf max,
                                  ar_buf sum, bool is_known, float scale, const ar_scores *block, const ar_mask *mask)
{
    const size_t rows = block->part.matrices * block->part.rows, keys = block->part.cols;
    float *out = probs.ptr;
    const float *input = scores.ptr, *sink = sinks.ptr;
    int32_t *tops = max.ptr;
    double *l = sum.ptr;
    const ari_score_rows score_rows = rows_of(block, mask);
    /* dynamic schedule: a causal row's length grows with its query. An element costs as much as several in other
     * kernels */
    ARI_PARALLEL_BY ((dynamic, 16), i, rows, d, rows * keys * WORTH) {
        const ari_score_row m = ari_score_row_of(&score_rows, i);
        const row_sums sums = {tops + m.row_index, l + m.row_index, is_known, sink ? sink + m.head : NULL};
        softmax_row(out + i * keys, input + i * keys, scale, &m, block, &sums);
    }
    return AR_OK;
}

/* +0 at the masked keys of a block's row. */
ARI_ROW_LOOP void clear_masked(float *block_row, const ari_score_row *m, size_t cols)
{
    float *row = block_row + m->first_key;
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
    clear_outside(block_row, m, cols);
}

/* Row sum of probs*dprobs over the keys. */
ARI_ROW_LOOP double row_dot(const float *probs, const float *dprobs, size_t n, int32_t p)
{
    const int32_t e = ari_exponent64(ari_float64(ari_row_product_top(probs, dprobs, n)));
    return ari_row_value(ari_row_product_integer(probs, dprobs, n, e, p), n, e, p);
}

ARI_ROW_KERNEL void softmax_backward_row(float *all_ds, const float *all_probs, float *all_dprobs, double *dot,
                                         bool is_known, float scale, const ari_score_row *m, const ar_scores *b)
{
    clear_masked(all_dprobs, m, b->part.cols);
    float *ds = all_ds + m->first_key;
    const float *probs = all_probs + m->first_key, *dprobs = all_dprobs + m->first_key;
    const double sum = is_known ? *dot : row_dot(probs, dprobs, m->keys, ari_rowsum_bits(b->seq));
    *dot = sum;
#pragma GCC ivdep
    for (size_t j = 0; j < m->keys; j++)
        ds[j] = ari_attention_ds(probs[j], dprobs[j], sum, scale);
    clear_masked(all_ds, m, b->part.cols); /* masked keys now contain -0, or NaN in a row with NaN */
}

/** Slot softmax_backward. ds may be dprobs; no other overlap. */
ar_status ari_cpu_softmax_backward(ar_device *d, ARI_AT_ONCE, ar_buf ds, ar_cbuf probs, ar_buf dprobs, ar_buf dot,
                                   bool is_known, float scale, const ar_scores *block, const ar_mask *mask)
{
    const size_t rows = block->part.matrices * block->part.rows, keys = block->part.cols;
    float *out = ds.ptr, *dp = dprobs.ptr;
    const float *pr = probs.ptr;
    double *dots = dot.ptr;
    const ari_score_rows score_rows = rows_of(block, mask);
    ARI_PARALLEL_BY ((dynamic, 16), i, rows, d, rows * keys * WORTH) {
        const ari_score_row m = ari_score_row_of(&score_rows, i);
        softmax_backward_row(out + i * keys, pr + i * keys, dp + i * keys, dots + m.row_index, is_known, scale, &m,
                             block);
    }
    return AR_OK;
}

/** Slot sinks_backward. */
ar_status ari_cpu_sinks_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *terms, ar_cbuf sinks, ar_cbuf max,
                                 ar_cbuf sum, ar_cbuf dot)
{
    const size_t queries = terms->shape[1], heads = terms->shape[2], rows = terms->shape[0] * heads * queries;
    const float *sink = sinks.ptr;
    const int32_t *tops = max.ptr;
    const double *l = sum.ptr, *dots = dot.ptr;
    float *out = terms->data.ptr;
    ARI_PARALLEL_FOR (i, rows, d, rows) {
        const size_t query = i % queries, head = i / queries % heads, sample = i / queries / heads;
        const ptrdiff_t offset = (ptrdiff_t)sample * terms->stride[0] + (ptrdiff_t)query * terms->stride[1] +
                                 (ptrdiff_t)head * terms->stride[2];
        out[offset] = ari_sink_term(sink[head], tops[i], l[i], dots[i]);
    }
    return AR_OK;
}
