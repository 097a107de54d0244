/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Gradient norm, clipping, and the update of one element: numerics.md, sections 4 and 6. All in fp32, with every
 * written operation rounded in the written order. Values that depend only on the step are computed once in binary64. */
#include "anyrank/optimizer.h"
#include "ref/numerics/elementary.h"

/* --- the norm of the gradients: a sum of integers ----------------------------------------------------------------- */

/** Returns rint((g*2^-e)^2*2^60), at most 2^60, where e is the largest exponent of all gradients; 0 if e marks all-zero
 *  or non-finite gradients. A rank sums q >> 30 and q & (2^30 - 1) separately: 2^32 elements fit. */
ARI_FN int64_t ari_norm_square(float g, int32_t e)
{
    const int has_exponent = e != ARI_EXP_ZERO && e != ARI_EXP_NONFINITE;
    const double x = (double)g * ari_pow2(has_exponent ? ari_clamp32(-e, -200, 200) : 0); /* exact, as is its square */
    return has_exponent ? (int64_t)ari_rint(x * x * 0x1p60) : 0;
}

ARI_FN int64_t ari_norm_high(int64_t q)
{
    return q >> 30;
}

ARI_FN int64_t ari_norm_low(int64_t q)
{
    return q & 0x3fffffff;
}

/** Returns fl32(sqrt(fl64(high)*2^-30 + fl64(low)*2^-60)*2^e), computed in binary64; +0 or NaN if e says so. */
ARI_FN float ari_norm_value(int64_t high, int64_t low, int32_t e)
{
    if (e == ARI_EXP_NONFINITE)
        return ari_nan32();
    if (e == ARI_EXP_ZERO)
        return 0.0f;
    return (float)(sqrt(ari_double64(high) * 0x1p-30 + ari_double64(low) * 0x1p-60) * ari_pow2(e));
}

/** Returns fl32(min(1, max_norm/(norm + 1e-6))), divided in binary64; NaN is passed on. */
ARI_FN float ari_clip_factor(double max_norm, float norm)
{
    const double ratio = max_norm / ((double)norm + 1e-6);
    return ari_canonical32((float)(ratio > 1.0 ? 1.0 : ratio));
}

/** fl32(g*factor). */
ARI_FN float ari_clipped(float g, float factor)
{
    return ari_canonical32(g * factor);
}

/* --- the learning rate, in binary64 ------------------------------------------------------------------------------- */

/** Returns the factor of step t = 1, 2, ..: ar_schedule's formula, evaluated in its written order. */
ARI_FN double ari_schedule_factor(const ar_optimizer_options *o, uint64_t t)
{
    const uint64_t after = t - o->warmup_steps, length = o->total_steps - o->warmup_steps;
    const double min_factor = o->lr > 0.0 ? o->min_lr / o->lr : 0.0;
    if (t < o->warmup_steps)
        return (double)t / (double)o->warmup_steps;
    if (o->schedule == AR_SCHEDULE_CONSTANT)
        return 1.0;
    if (t >= o->total_steps)
        return min_factor;
    const double angle = ARI_PI * (double)after / (double)length;
    return min_factor + (1.0 - min_factor) * (1.0 + ari_cos64(angle)) / 2.0;
}

/** lr times the factor. */
ARI_FN double ari_schedule_lr(const ar_optimizer_options *o, uint64_t t)
{
    return o->lr * ari_schedule_factor(o, t);
}

/* --- one step ----------------------------------------------------------------------------------------------------- */

/* State of an optimizer besides the moments of each element. All zero before the first step. */
typedef struct ari_optimizer_clock {
    uint64_t steps;          /* taken */
    double beta1_t, beta2_t; /* beta^steps by repeated multiplication */
} ari_optimizer_clock;

/* Constants for updating one parameter in one step. */
typedef struct ari_optimizer_constants {
    ar_optimizer_kind kind;
    int is_first_step; /* nonzero in the first step */
    int decays;        /* SGD, Adam: weight_decay is not 0 */
    int has_momentum, nesterov;
    float lr, momentum, weight_decay;
    float rest1;          /* fl32(1 - beta1); Muon: fl32(1 - momentum) */
    float beta2, rest2;   /* fl32(beta2), fl32(1 - beta2) */
    float eps, step_size; /* fl32(lr/(1 - beta1^t)) */
    float root2;          /* fl32(sqrt(1 - beta2^t)) */
    float shrink;         /* AdamW, Muon: fl32(1 - lr*weight_decay) */
    double rate;          /* unrounded learning rate */
} ari_optimizer_constants;

/** Advances the clock to a new step. */
ARI_FN void ari_optimizer_tick(ari_optimizer_clock *clock, const ar_optimizer_options *o)
{
    clock->beta1_t = clock->steps == 0 ? o->beta1 : clock->beta1_t * o->beta1;
    clock->beta2_t = clock->steps == 0 ? o->beta2 : clock->beta2_t * o->beta2;
    clock->steps++;
}

/** Returns the constants of the clock's step for a parameter with its own options: the step's learning rate times
 *  lr_scale, and the parameter's weight decay instead of o's. */
ARI_FN ari_optimizer_constants ari_optimizer_constants_of(const ari_optimizer_clock *clock,
                                                          const ar_optimizer_options *o, double lr_scale,
                                                          double weight_decay)
{
    const double lr = ari_schedule_lr(o, clock->steps) * lr_scale;
    ari_optimizer_constants k;
    k.kind = o->kind;
    k.is_first_step = clock->steps == 1;
    k.decays = weight_decay != 0.0;
    k.has_momentum = o->momentum != 0.0;
    k.nesterov = o->nesterov;
    k.lr = (float)lr;
    k.momentum = (float)o->momentum;
    k.weight_decay = (float)weight_decay;
    k.rest1 = (float)(1.0 - (o->kind == AR_OPTIMIZER_MUON ? o->momentum : o->beta1));
    k.beta2 = (float)o->beta2;
    k.rest2 = (float)(1.0 - o->beta2);
    k.eps = (float)o->eps;
    k.step_size = (float)(lr / (1.0 - clock->beta1_t));
    k.root2 = (float)sqrt(1.0 - clock->beta2_t);
    k.shrink = (float)(1.0 - lr * weight_decay);
    k.rate = lr;
    return k;
}

/** Returns g' = g + weight_decay*w, for SGD and Adam if the decay is not 0. */
ARI_FN float ari_decayed(float g, float w, float weight_decay)
{
    const float decay = weight_decay * w;
    return g + decay;
}

/* --- Muon: the elements' part ------------------------------------------------------------------------------------- */

/* Newton-Schulz's quintic iteration: X = aX + (bA + cAA)X with A = XX^T (Jordan et al. 2024). */
#define ARI_MUON_A 3.4445f
#define ARI_MUON_B (-4.775f)
#define ARI_MUON_C 2.0315f
enum { ARI_MUON_STEPS = 5 };

/** Returns the factor by which a matrix of this norm is scaled first: fl32(1/max(norm, 1e-7)), divided in binary64; NaN
 *  is passed through. */
ARI_FN float ari_muon_normed(float norm)
{
    return (float)(1.0 / ((double)norm < 1e-7 ? 1e-7 : (double)norm));
}

/** fl32(rate times the factor of a matrix [rows, cols]). */
ARI_FN float ari_muon_rate(double rate, size_t rows, size_t cols, bool match_rms)
{
    const double r = (double)rows, c = (double)cols;
    if (match_rms)
        return (float)(rate * (0.2 * sqrt(r > c ? r : c)));
    return (float)(rate * sqrt(r > c ? r / c : 1.0));
}

/** Updates the momentum and sets *u to the matrix that is made orthogonal, from momentum and gradient. */
ARI_FN void ari_muon_direction(const ari_optimizer_constants *k, float *u, float *m, float g)
{
    const float towards = g - *m;
    const float moved = k->rest1 * towards;
    const float m1 = *m + moved;
    const float back = m1 - g;
    const float lookahead = k->rest1 * back;
    *m = ari_canonical32(m1);
    *u = ari_canonical32(k->nesterov ? m1 - lookahead : m1);
}

/** The weight less x, an element of the orthogonal matrix times ari_muon_rate. */
ARI_FN void ari_muon_update(const ari_optimizer_constants *k, float *w, float x)
{
    const float base_weight = *w * k->shrink;
    *w = ari_canonical32(base_weight - x);
}

/* --- SGD, Adam ---------------------------------------------------------------------------------------------------- */

/** Updates an element by SGD. *m: the momentum, or NULL without one. For Muon with momentum, w is the direction,
 *  without the weight. */
ARI_FN void ari_sgd_update(const ari_optimizer_constants *k, float *w, float *m, float g)
{
    if (k->kind == AR_OPTIMIZER_MUON) {
        if (k->has_momentum)
            ari_muon_direction(k, w, m, g);
        else
            ari_muon_update(k, w, g);
        return;
    }
    float step = k->decays ? ari_decayed(g, *w, k->weight_decay) : g;
    if (k->has_momentum) {
        const float decayed_moment = k->momentum * *m;
        const float moment = k->is_first_step ? step : decayed_moment + step;
        const float lookahead = k->momentum * moment;
        step = k->nesterov ? step + lookahead : moment;
        *m = ari_canonical32(moment);
    }
    const float change = k->lr * step;
    *w = ari_canonical32(*w - change);
}

/** Adam and AdamW. *m, *v: the moments. */
ARI_FN void ari_adam_update(const ari_optimizer_constants *k, float *w, float *m, float *v, float g)
{
    const int decoupled = k->kind == AR_OPTIMIZER_ADAMW;
    const float base_weight = decoupled ? *w * k->shrink : *w;
    const float slope = !decoupled && k->decays ? ari_decayed(g, *w, k->weight_decay) : g;
    const float towards = slope - *m;
    const float moved = k->rest1 * towards;
    const float m1 = *m + moved;
    const float decayed_moment = k->beta2 * *v;
    const float scaled = k->rest2 * slope;
    const float square = scaled * slope;
    const float v1 = decayed_moment + square;
    const float root = sqrtf(v1) / k->root2;
    const float ratio = m1 / (root + k->eps);
    const float change = k->step_size * ratio;
    *m = ari_canonical32(m1);
    *v = ari_canonical32(v1);
    *w = ari_canonical32(base_weight - change);
}
