/* SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "ref/cpu/row_sum.h"

/* Cross-entropy over a vocabulary that may be sharded: leaf kernels for one shard. What ranks combine between them is
 * integer: keys by max, sums and bit patterns by addition. Formulas: docs/numerics.md, "Sums along a row". */

ARI_ROW_KERNEL int32_t largest_key(const float *x, size_t n)
{
    return ari_row_largest_key(x, n, ari_nan32()); /* no place equals a NaN: all count */
}

/** Slot ce_max. */
ar_status ari_cpu_ce_max(ar_device *d, ARI_AT_ONCE, ar_buf key, const ar_tensor *logits)
{
    const ar_tensor all = ar_tensor_rows(logits);
    const size_t n = all.shape[0], v_local = all.shape[1];
    int32_t *out = key.ptr;
    const float *x = logits->data.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * v_local)
        out[t] = largest_key(x + t * v_local, v_local);
    return AR_OK;
}

/* Quantised sum of exp32(fl32(x - m)): exponent 1, since every term is at most exp(0) = 1. */
ARI_ROW_KERNEL uint64_t sum_exponentials(const float *x, float m, size_t n, int32_t p)
{
    const double step = ari_row_step(1, p);
    uint64_t sum = 0;
    for (size_t j = 0; j < n; j++)
        sum += ari_row_biased((double)ari_softmax_exp(x[j], m), step);
    return ari_row_unbiased(sum, n);
}

/** Slot ce_sum. */
ar_status ari_cpu_ce_sum(ar_device *d, ARI_AT_ONCE, ar_buf sum, const ar_tensor *logits, ar_cbuf key, size_t v)
{
    const ar_tensor all = ar_tensor_rows(logits);
    const size_t n = all.shape[0], v_local = all.shape[1];
    const int32_t p = ari_rowsum_bits(v);
    int64_t *out = sum.ptr;
    const float *x = logits->data.ptr;
    const int32_t *keys = key.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * v_local) {
        const int nan = keys[t] == INT32_MAX;
        out[t] = nan ? 0 : (int64_t)sum_exponentials(x + t * v_local, ari_key32_value(keys[t]), v_local, p);
    }
    return AR_OK;
}

ARI_ROW_KERNEL uint64_t sum_values(const float *x, size_t n, int32_t e, int32_t p)
{
    return ari_row_unbiased(ari_row_integer(x, n, e, p), n);
}

/** Slot ce_logits. */
ar_status ari_cpu_ce_logits(ar_device *d, ARI_AT_ONCE, ar_buf sum, const ar_tensor *logits, ar_cbuf e, size_t v)
{
    const ar_tensor all = ar_tensor_rows(logits);
    const size_t n = all.shape[0], v_local = all.shape[1];
    const int32_t p = ari_rowsum_bits(v);
    int64_t *out = sum.ptr;
    const float *x = logits->data.ptr;
    const int32_t *exponents = e.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * v_local) {
        const int finite = exponents[t] != ARI_EXP_NONFINITE;
        out[t] = finite ? (int64_t)sum_values(x + t * v_local, v_local, exponents[t], p) : 0;
    }
    return AR_OK;
}

/** Slot ce_target. */
ar_status ari_cpu_ce_target(ar_device *d, ARI_AT_ONCE, ar_buf bits, const ar_tensor *logits, ar_cbuf row_of)
{
    (void)d;
    const ar_tensor all = ar_tensor_rows(logits);
    const size_t n = all.shape[0], v_local = all.shape[1];
    int32_t *out = bits.ptr;
    const float *x = logits->data.ptr;
    const int64_t *at = row_of.ptr;
    for (size_t t = 0; t < n; t++) {
        out[t] = 0;
        if (at[t] >= 0)
            memcpy(&out[t], &x[t * v_local + (size_t)at[t]], sizeof out[t]);
    }
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
    const uint32_t *targets = bits.ptr; /* int32 summed over ranks: the same bits */
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

/* dlogits of a row whose key is finite, as if no entry were the target. dlogits may be logits. */
ARI_ROW_KERNEL void backward_row(float *dlogits, const float *x, float m, double l, double weight, double label,
                                 double targets, size_t n)
{
#pragma GCC ivdep
    for (size_t j = 0; j < n; j++) {
        const float p = ari_softmax_p(ari_softmax_exp(x[j], m), l);
        dlogits[j] = ari_ce_dlogit(p, weight, label, targets);
    }
}

static void fill_row(float *row, float value, size_t n)
{
    for (size_t j = 0; j < n; j++)
        row[j] = value;
}

/** Slot ce_backward. dlogits may be logits; no other overlap. */
ar_status ari_cpu_ce_backward(ar_device *d, ARI_AT_ONCE, const ar_tensor *dlogits, const ar_tensor *logits, ar_cbuf key,
                              ar_cbuf sum, ar_cbuf row_of, ar_cbuf valid, const ar_loss_options *o, double targets,
                              size_t v)
{
    const ar_tensor all = ar_tensor_rows(logits);
    const size_t n = all.shape[0], v_local = all.shape[1];
    const int32_t bits = ari_rowsum_bits(v);
    const double miss = ari_ce_label(0, v, o), hit = ari_ce_label(1, v, o);
    float *out = dlogits->data.ptr;
    const float *x = logits->data.ptr;
    const int32_t *keys = key.ptr;
    const int64_t *sums = sum.ptr, *at = row_of.ptr;
    const uint8_t *counts = valid.ptr;
    ARI_PARALLEL_FOR (t, n, d, n * v_local) {
        float *row = out + t * v_local;
        if (!counts[t] || !(targets > 0.0)) {
            fill_row(row, 0.0f, v_local);
        } else if (keys[t] == INT32_MAX) {
            fill_row(row, ari_nan32(), v_local);
        } else {
            const float m = ari_key32_value(keys[t]);
            const double l = ari_rowsum_value(sums[t], 1, bits);
            const double weight = ari_ce_weight(ari_ce_lse(m, l), o);
            const int here = at[t] >= 0;
            const float target = here ? x[t * v_local + (size_t)at[t]] : 0.0f; /* before it may be overwritten */
            backward_row(row, x + t * v_local, m, l, weight, miss, targets, v_local);
            if (here)
                row[at[t]] = ari_ce_dlogit(ari_softmax_p(ari_softmax_exp(target, m), l), weight, hit, targets);
        }
    }
    return AR_OK;
}
