/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>

#include "ref/numerics/integer_sum.h"
#include "ref/numerics/scalar.h"
#include "verify/logprobs/logprobs.h"

/* The sum of exponentials is that of the cross-entropy: integers, whose order does not matter. The entropy is summed in
 * binary64 from the first entry to the last. */
ari_place ari_place_of(const double *logits, size_t v, int64_t token)
{
    const int32_t bits = ari_rowsum_bits(v);
    int32_t top = INT32_MIN;
    int64_t sum = 0;
    double mean = 0.0;
    for (size_t j = 0; j < v; j++) {
        const int32_t key = ari_key32((float)logits[j]);
        top = key > top ? key : top;
    }
    const float m = ari_key32_value(top);
    for (size_t j = 0; j < v && top != INT32_MAX; j++) {
        const float e = ari_softmax_exp((float)logits[j], m);
        sum = ari_add64(sum, ari_rowsum_quantise((double)e, 1, bits));
        mean += (double)e * (logits[j] - (double)m);
    }
    const double l = ari_rowsum_value(sum, 1, bits), lse = ari_ce_lse(m, l);
    return (ari_place){.logprob = (double)ari_round32(logits[token] - lse),
                       .entropy = (double)ari_round32(lse - (double)m - mean / l),
                       .largest = (double)ari_round32((double)m - lse),
                       .lse = lse};
}

ari_place ari_place_of_f64(const double *logits, size_t v, int64_t token)
{
    double m = logits[0], l = 0.0, mean = 0.0;
    for (size_t j = 1; j < v; j++)
        m = logits[j] > m || isnan(logits[j]) ? logits[j] : m;
    for (size_t j = 0; j < v; j++) {
        const double e = exp(logits[j] - m);
        l += e;
        mean += e > 0.0 ? e * (logits[j] - m) : 0.0;
    }
    const double lse = m + log(l);
    return (ari_place){.logprob = logits[token] - lse, .entropy = lse - m - mean / l, .largest = m - lse, .lse = lse};
}
