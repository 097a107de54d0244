/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/tensor_private.h"
#include "ref/cpu/row_sum.h"
#include "ref/cpu/storage.h"

/* Cross-entropy over a vocabulary that may be sharded: kernels for one shard. What the ranks combine are integers: keys
 * by maximum, sums and bit patterns by addition. Formulas: numerics.md, "Sums along a row". */

ARI_ROW_KERNEL int32_t largest_key(const float *x, size_t n)
{
    return ari_row_largest_key(x, n);
}

/* Returns the logits of row t from column `first_col` on, and how many of them a loop processes at a time. */
static const float *piece_of(const ar_tensor *rows, size_t t, size_t first_col, size_t *n, float *scratch)
{
    *n = ari_block_length(rows->shape[1], first_col / ARI_BLOCK);
    return ari_run_load(rows, (ptrdiff_t)(t * rows->shape[1] + first_col), *n, scratch);
}

/** Slot ce_max. */
ar_status ari_cpu_ce_max(ar_device *d, ARI_AT_ONCE, ar_buf key, const ar_tensor *logits)
{
    const ar_tensor rows = ari_tensor_rows(logits);
    const size_t n = rows.shape[0], v_local = rows.shape[1];
    int32_t *out = key.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * v_local) {
        float scratch[ARI_BLOCK];
        int32_t top = INT32_MIN;
        for (size_t first_col = 0, count; first_col < v_local; first_col += count) {
            const float *x = piece_of(&rows, t, first_col, &count, scratch);
            const int32_t found = largest_key(x, count);
            top = found > top ? found : top;
        }
        out[t] = top;
    }
    return AR_OK;
}

/* A sum of some function over n logits of a row, given a number that belongs to the row. */
typedef uint64_t (*sum_fn)(const float *x, size_t n, int32_t of_row, int32_t p);

/* Sums each row over its classes; 0 for a row whose of_row is `sentinel`. */
static ar_status sum_rows(ar_device *d, int64_t *out, const ar_tensor *logits, const int32_t *of_row, int32_t sentinel,
                          size_t v, sum_fn sum)
{
    const ar_tensor rows = ari_tensor_rows(logits);
    const size_t n = rows.shape[0], v_local = rows.shape[1];
    const int32_t p = ari_rowsum_bits(v);
    ARI_PARALLEL_FOR (t, n, d, n * v_local) {
        float scratch[ARI_BLOCK];
        uint64_t total = 0;
        for (size_t first_col = 0, count; first_col < v_local && of_row[t] != sentinel; first_col += count) {
            const float *x = piece_of(&rows, t, first_col, &count, scratch);
            total += sum(x, count, of_row[t], p);
        }
        out[t] = (int64_t)total;
    }
    return AR_OK;
}

/* Quantised sum of exp32(fl32(x - m)), n <= ARI_BLOCK: exponent 1, since every term is at most exp(0) = 1. */
ARI_ROW_KERNEL uint64_t sum_exponentials(const float *x, size_t n, int32_t key, int32_t p)
{
    float e[ARI_BLOCK];
    ari_softmax_exps(e, x, ari_key32_value(key), n);
    return ari_row_unit_integer(e, n, p);
}

/** Slot ce_sum. */
ar_status ari_cpu_ce_sum(ar_device *d, ARI_AT_ONCE, ar_buf sum, const ar_tensor *logits, ar_cbuf key, size_t v)
{
    return sum_rows(d, sum.ptr, logits, key.ptr, INT32_MAX, v, sum_exponentials);
}

ARI_ROW_KERNEL uint64_t sum_values(const float *x, size_t n, int32_t e, int32_t p)
{
    return ari_row_unbiased(ari_row_integer(x, n, e, p), n);
}

/** Slot ce_logits. */
ar_status ari_cpu_ce_logits(ar_device *d, ARI_AT_ONCE, ar_buf sum, const ar_tensor *logits, ar_cbuf e, size_t v)
{
    return sum_rows(d, sum.ptr, logits, e.ptr, ARI_EXP_NONFINITE, v, sum_values);
}

/** Slot ce_target. */
ar_status ari_cpu_ce_target(ar_device *d, ARI_AT_ONCE, ar_buf bits, const ar_tensor *logits, ar_cbuf row_of)
{
    (void)d;
    const ar_tensor rows = ari_tensor_rows(logits);
    uint32_t *out = bits.ptr; /* int32 bits that are summed over ranks */
    const int64_t *target_cols = row_of.ptr;
    for (size_t t = 0; t < rows.shape[0]; t++)
        out[t] = target_cols[t] >= 0
                     ? ari_bits32(ari_value_at(&rows, (ptrdiff_t)(t * rows.shape[1]) + (ptrdiff_t)target_cols[t]))
                     : 0;
    return AR_OK;
}

/** Slot ce_terms. */
ar_status ari_cpu_ce_terms(ar_device *d, ARI_AT_ONCE, ar_buf terms, ar_cbuf key, ar_cbuf sum, ar_cbuf bits,
                           ar_cbuf valid, ar_cbuf e, ar_cbuf logits, const ar_loss_options *o, size_t n, size_t v)
{
    (void)d;
    const int32_t p = ari_rowsum_bits(v);
    float *out = terms.ptr;
    const int32_t *keys = key.ptr;
    const int64_t *sums = sum.ptr;
    const uint32_t *targets = bits.ptr; /* int32 bits summed over ranks */
    const uint8_t *counts = valid.ptr;
    const int32_t *exponents = e.ptr;
    const int64_t *values = logits.ptr;
    for (size_t t = 0; t < n; t++) {
        const double lse = ari_ce_lse(ari_key32_value(keys[t]), ari_rowsum_value(sums[t], 1, p));
        const double mean = exponents ? ari_rowsum_value(values[t], exponents[t], p) / (double)v : 0.0;
        const float term = ari_ce_term(lse, ari_float32(targets[t]), mean, o);
        out[t] = counts[t] ? term : 0.0f;
    }
    return AR_OK;
}

/* Constants of the gradients of a row. */
typedef struct loss_row {
    float m;
    double l, weight, targets;
    double miss, hit; /* labels of other entries, and of the target */
    float fill_value; /* if `constant`: the value of each */
    bool constant;
} loss_row;

/* Computes n consecutive gradients of a row as if none of them belonged to the target. dlogits may be logits. */
ARI_ROW_KERNEL void backward_piece(float *dlogits, const float *x, const loss_row *row, size_t n)
{
    const double weight = row->weight, label = row->miss;
    const bool plain = weight == 1.0 && label == 0.0; /* the difference is the probability itself */
    ari_softmax_exps(dlogits, x, row->m, n);
    ari_quotients(dlogits, dlogits, row->l, n);
    for (size_t j = 0; !plain && j < n; j++)
        dlogits[j] = ari_ce_difference(dlogits[j], weight, label);
    ari_quotients(dlogits, dlogits, row->targets, n);
}

/* Backward pass of row t, whose target is column `target`, or in none of its columns. */
static void backward_row(const ar_tensor *dlogits, const ar_tensor *rows, size_t t, int64_t target, const loss_row *row)
{
    const size_t v_local = rows->shape[1];
    float scratch[ARI_BLOCK];
    for (size_t begin = 0, n; begin < v_local; begin += n) {
        const ptrdiff_t offset = (ptrdiff_t)(t * v_local + begin);
        const float *x = piece_of(rows, t, begin, &n, scratch);
        float *out = ari_run_at(dlogits, offset, scratch);
        const size_t target_index = (size_t)target - begin;                           /* n or more: not in this piece */
        const float logit = target >= 0 && target_index < n ? x[target_index] : 0.0f; /* read before it may be
                                                                                         overwritten */
        if (row->constant) {
            for (size_t j = 0; j < n; j++)
                out[j] = row->fill_value;
        } else {
            backward_piece(out, x, row, n);
            if (target >= 0 && target_index < n)
                out[target_index] = ari_ce_dlogit(ari_softmax_p(ari_softmax_exp(logit, row->m), row->l), row->weight,
                                                  row->hit, row->targets);
        }
        ari_run_store(dlogits, offset, n, out);
    }
}

/** Slot ce_backward. dlogits may be logits; no other overlap. */
ar_status ari_cpu_ce_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dlogits, const ar_tensor *logits, ar_cbuf key,
                              ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid, const ar_loss_options *o, double targets,
                              size_t v)
{
    const ar_tensor rows = ari_tensor_rows(logits);
    const size_t n = rows.shape[0];
    const int32_t bits = ari_rowsum_bits(v);
    const int32_t *keys = key.ptr;
    const int64_t *sums = sum.ptr, *target_cols = row_of.ptr;
    const uint8_t *counts = valid.ptr;
    const loss_row shared = {.targets = targets, .miss = ari_ce_label(0, v, o), .hit = ari_ce_label(1, v, o)};
    ARI_PARALLEL_FOR (t, n, d, n * rows.shape[1]) {
        loss_row row = shared;
        const bool nothing = !counts[t] || !(targets > 0.0);
        row.constant = nothing || keys[t] == INT32_MAX;
        row.fill_value = nothing ? 0.0f : ari_nan32();
        if (!row.constant) {
            row.m = ari_key32_value(keys[t]);
            row.l = ari_rowsum_value(sums[t], 1, bits);
            row.weight = ari_ce_weight(ari_ce_lse(row.m, row.l), o);
        }
        backward_row(dlogits, &rows, t, target_cols[t], &row);
    }
    return AR_OK;
}
