/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* All element-wise definitions of the exact numerics: the layers' kernels, other devices and the independent baseline
 * call these. An expression is evaluated in its written order, in fp32 unless a double is named. Each result is rounded
 * once per written operation, and a NaN result is canonical. numerics.md, section 4. */
#include "anyrank/batch.h"
#include "ref/numerics/accumulator.h"
#include "ref/numerics/integer_sum.h"
#include "ref/numerics/philox.h"
#include "ref/numerics/rope.h"

/* --- norms: h the width, S a row sum ------------------------------------------------------------------------------ */

/** Returns fl32(1/sqrt(mean_square + eps)) in binary64; mean_square = S(d*d)/h for LayerNorm, S(x*x)/h for RMSNorm. */
ARI_FN float ari_norm_rstd(double mean_square, double eps)
{
    return ari_round32(1.0 / sqrt(mean_square + eps));
}

/** d = fl32(x - mean), mean in binary64. xhat = fl32(d*rstd). */
ARI_FN float ari_layernorm_d(float x, double mean)
{
    return ari_round32((double)x - mean);
}

/** Returns fl32(a*b): xhat = d*rstd, g = dy*gamma, and every other single product. */
ARI_FN float ari_mul32(float a, float b)
{
    return ari_canonical32(a * b);
}

/** Returns fl32(a + b): residuals, biases, masks. */
ARI_FN float ari_add32(float a, float b)
{
    return ari_canonical32(a + b);
}

/** y = fl32(fl32(xhat*gamma) + beta). */
ARI_FN float ari_layernorm_y(float xhat, float gamma, float beta)
{
    const float scaled = xhat * gamma;
    return ari_canonical32(scaled + beta);
}

/** Returns dx = fl32(((g - a) - xhat*b)*rstd) in binary64; a = S(g)/h, b = S(g*xhat)/h, g = fl32(dy*gamma). */
ARI_FN float ari_layernorm_dx(float g, double a, double b, float xhat, float rstd)
{
    return ari_round32((((double)g - a) - (double)xhat * b) * (double)rstd);
}

/** dx = fl32((g - xhat*b)*rstd) in binary64. */
ARI_FN float ari_rmsnorm_dx(float g, double b, float xhat, float rstd)
{
    return ari_round32(((double)g - (double)xhat * b) * (double)rstd);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

/** Returns fl32(1/sqrt(n)); n: the features of a head, or the model's replacement for that number. */
ARI_FN float ari_softmax_scale(double n)
{
    return ari_round32(1.0 / sqrt(n));
}

/** fl32(c*tanh(fl32(x*scale)/c)), in binary64 behind the inner rounding. */
ARI_FN float ari_softcap32(float x, float scale, double cap)
{
    return ari_round32(cap * ari_tanh64((double)ari_mul32(x, scale) / cap));
}

/** Returns dx = fl32(fl32(dy*(1 - t*t))*scale), where t is the tanh above; +0 if dy is zero, whatever x is. */
ARI_FN float ari_dsoftcap32(float dy, float x, float scale, double cap)
{
    const double t = ari_tanh64((double)ari_mul32(x, scale) / cap);
    const float inner = (float)((double)dy * ((1.0 - t) * (1.0 + t)));
    return dy == 0.0f ? 0.0f : ari_canonical32(inner * scale);
}

/** dS = fl32(fl32(p*(dp - D))*scale), the inner product in binary64. */
ARI_FN float ari_attention_ds(float p, float dp, double D, float scale)
{
    const float inner = (float)((double)p * ((double)dp - D));
    return ari_canonical32(inner * scale);
}

/** Returns the larger of a row's largest key and its sink's key; NULL: no sink. INT32_MIN (no visible key) is returned
 *  unchanged. */
ARI_FN int32_t ari_sink_top(int32_t top, const float *sink)
{
    const int32_t key = sink && top != INT32_MIN ? ari_key32(*sink) : top;
    return key > top ? key : top;
}

/** Returns fl32(-p*D), a row's term of the gradient of its head's sink, whose probability is p. top: the row's largest
 *  key, or that there is none; l: its sum. */
ARI_FN float ari_sink_term(float sink, int32_t top, double l, double D)
{
    const float p = ari_round32((double)ari_exp32(sink - ari_key32_value(top)) / l);
    const float term = ari_round32(-((double)p * D));
    return top == INT32_MIN ? 0.0f : top == INT32_MAX ? ari_nan32() : term;
}

/** Returns exp32(fl32(x - m)), the numerator of a softmax. */
ARI_FN float ari_softmax_exp(float x, float m)
{
    return ari_exp32(x - m);
}

/** Returns fl32(e/l), with l in binary64: a probability. */
ARI_FN float ari_softmax_p(float e, double l)
{
    return ari_round32((double)e / l);
}

/* --- experts ------------------------------------------------------------------------------------------------------ */

/** Returns true if a token prefers expert i with logit a to expert j with logit b. Neither is NaN. */
ARI_FN int ari_route_prefers(float a, size_t i, float b, size_t j)
{
    return a > b || (a == b && i < j);
}

/** Returns fl32(p/sum), a normalised weight; sum: of p over a token's experts. */
ARI_FN float ari_route_weight(float p, float sum)
{
    return ari_round32((double)p / (double)sum);
}

/** Returns fl32(w*fl32(g - r)), the gradient of an expert's logit; w: the expert's weight, g: the weight's gradient, r:
 *  the sum of fl32(w*g) over the token's experts. */
ARI_FN float ari_route_dlogit(float w, float g, float r)
{
    const float difference = g - r;
    return ari_canonical32(w * difference);
}

/** Returns fl32(a + bias), the score by which a sigmoid router chooses. */
ARI_FN float ari_route_score(float a, float bias)
{
    return a + bias;
}

/** True if a score is no finite number. */
ARI_FN int ari_route_is_lost(float score)
{
    return score - score != 0.0f;
}

/** Returns fl32(sum + 1e-20), the divisor of a token's scores in a sigmoid router; sum: of these scores. */
ARI_FN float ari_route_divisor(float sum)
{
    return sum + 1e-20f;
}

/** Returns fl32(fl32(a/divisor)*scale), a weight of such a router; fl32(a*scale) if it does not divide. */
ARI_FN float ari_route_scaled(float a, float divisor, float scale, int divides)
{
    const float share = divides ? ari_route_weight(a, divisor) : a;
    return share * scale;
}

/** Returns fl32(fl32(w*fl32(1 - a))*fl32(g - r)), the gradient of the logit of an expert. r is the sum of fl32(s*g)
 *  over the token's experts with s = fl32(a/divisor), 0 if it does not divide. */
ARI_FN float ari_route_dscore(float w, float a, float g, float r)
{
    const float rest = 1.0f - a, slope = w * rest, difference = g - r;
    return ari_canonical32(slope * difference);
}

/** Returns log(sum of exp(z)) of a router's logits, rounded once; m: the largest logit, l: the sum of exp(z - m). */
ARI_FN float ari_route_lse(float m, double l)
{
    return ari_round32((double)m + ari_log64(l));
}

/** Returns fl32(z*lse), with z in binary64: the factor of a router's probabilities in the z-loss's gradient. */
ARI_FN float ari_route_z(double z, float lse)
{
    return ari_round32(z * (double)lse);
}

/** Returns fl32(z*lse*lse), computed in binary64 from left to right: a token's z-loss. */
ARI_FN float ari_route_z_term(double z, float lse)
{
    return ari_round32(z * (double)lse * (double)lse);
}

/** The sum over a row's experts of p*c; 0 without a c. */
ARI_FN float ari_route_balance(const float *p, const float *c, size_t n)
{
    float r = 0.0f;
    for (size_t i = 0; i < n && c; i++)
        r = ari_add32(r, ari_mul32(p[i], c[i]));
    return r;
}

/** fl32(y + fl32(s*x)). */
ARI_FN float ari_add_gated32(float y, float s, float x)
{
    const float scaled = s * x;
    return ari_canonical32(y + scaled);
}

/** Returns fl32(D*(s*(1 - s))) in binary64: the gradient of a sigmoid's operand; s: the sigmoid, D: its gradient. */
ARI_FN float ari_dsigmoid32(float D, float s)
{
    return ari_round32((double)D * ((double)s * (1.0 - (double)s)));
}

/* --- cross-entropy over the vocabulary ---------------------------------------------------------------------------- */

/** Returns log(sum of exp(x)) in binary64; m: the largest x, l: the sum of exp(x - m). */
ARI_FN double ari_ce_lse(float m, double l)
{
    return (double)m + ari_log64(l);
}

/* A row of V logits. */
typedef struct ari_ce_row {
    float m;       /* the largest */
    double l;      /* sum of exp32(fl32(x - m)), as a row sum */
    double lse;    /* ari_ce_lse */
    double moment; /* sum of exp32(fl32(x - m))*(x - m), in binary64 from the first to the last */
} ari_ce_row;

/** Returns a row's log-sum-exp and moments: the logarithm of an entry's probability is x - lse, and the entropy is lse
 *  - m - moment/l. NaN if an x is NaN or +inf. */
ARI_FN ari_ce_row ari_ce_row_of(const float *x, size_t V)
{
    const int32_t bits = ari_rowsum_bits(V);
    ari_ce_row row = {0.0f, 0.0, 0.0, 0.0};
    int32_t top = INT32_MIN;
    int64_t sum = 0;
    for (size_t j = 0; j < V; j++) {
        const int32_t key = ari_key32(x[j]);
        top = key > top ? key : top;
    }
    row.m = ari_key32_value(top);
    for (size_t j = 0; j < V && top != INT32_MAX; j++) {
        const double e = (double)ari_softmax_exp(x[j], row.m);
        sum = ari_add64(sum, ari_rowsum_quantise(e, 1, bits));
        row.moment += e * ((double)x[j] - (double)row.m);
    }
    row.l = ari_rowsum_value(sum, 1, bits);
    row.lse = ari_ce_lse(row.m, row.l);
    return row;
}

/** Returns one token's loss, computed in binary64 from left to right and rounded once; e: label smoothing, c: weight of
 *  the z-loss: fl32(((1 - e)*(lse - x_target) + e*(lse - mean)) + c*lse*lse). */
ARI_FN float ari_ce_term(double lse, float x_target, double mean, const ar_loss_options *o)
{
    const double e = o->label_smoothing;
    const double labels = (1.0 - e) * (lse - (double)x_target) + e * (lse - mean);
    return ari_round32(labels + o->z_loss * lse * lse);
}

/** Returns 1 + 2*c*lse in binary64: the factor of a probability in the gradient with z-loss. */
ARI_FN double ari_ce_weight(double lse, const ar_loss_options *o)
{
    return 1.0 + 2.0 * o->z_loss * lse;
}

/** Returns (1 - e)*onehot + e/V in binary64: the smoothed label of this entry; hit: the entry is the target. */
ARI_FN double ari_ce_label(int hit, size_t V, const ar_loss_options *o)
{
    return (hit != 0 ? 1.0 - o->label_smoothing : 0.0) + o->label_smoothing / (double)V;
}

/** fl32(p*weight - label) in binary64. */
ARI_FN float ari_ce_difference(float p, double weight, double label)
{
    return (float)((double)p * weight - label);
}

/** fl32(fl32(p*weight - label)/T) in binary64, T > 0. */
ARI_FN float ari_ce_dlogit(float p, double weight, double label, double T)
{
    return ari_round32((double)ari_ce_difference(p, weight, label) / T);
}
