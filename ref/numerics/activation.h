/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Activations and their derivatives, fp32 (binary64 inside, rounded once) and binary64. Limits at infinity are the
 * functions' own: act(-inf) = -0, which is also what every very negative finite x rounds to; act'(-inf) = -0; act(inf)
 * = inf; act'(inf) = 1. NaN is passed through, canonical in the fp32 forms. */
#include "anyrank/activation.h"
#include "ref/numerics/elementary.h"

/* Bounds at which the functions have reached their limit in the format. Beyond them only the sign and, on the positive
 * side, the factor x remain, so limiting x changes no result and keeps every exponential in range. */
#define ARI_GELU_BOUND32 20.0 /* Phi(-20) < 2^-290, and 1 - Phi(20) < 2^-53 */
#define ARI_GELU_BOUND64 40.0 /* Phi(-40) < 2^-1150 */
#define ARI_SILU_BOUND32 200.0
#define ARI_SILU_BOUND64 800.0

/* --- GELU, erf form: x*Phi(x) ------------------------------------------------------------------------------------- */

/* Phi(x) from e = exp(-x^2/2), a = |x|: the tail is never a difference. */
ARI_FN double ari_normal_cdf_part(double x, double a, double e)
{
    const double tail = 0.5 * e * ari_erfcx_part(a * ARI_SQRT_1_2);
    return x < 0.0 ? tail : 1.0 - tail;
}

ARI_FN float ari_gelu_erf32(float x)
{
    const double low = (double)x < -ARI_GELU_BOUND32 ? -ARI_GELU_BOUND32 : (double)x;
    const double a = fabs(low) > ARI_GELU_BOUND32 ? ARI_GELU_BOUND32 : fabs(low);
    return ari_round32(low * ari_normal_cdf_part(low, a, ari_exp_mid(-0.5 * (a * a))));
}

ARI_FN double ari_gelu_erf64(double x)
{
    const double low = x < -ARI_GELU_BOUND64 ? -ARI_GELU_BOUND64 : x;
    const double a = fabs(low) > 39.0 ? 39.0 : fabs(low);
    return low * ari_normal_cdf_part(low, a, ari_exp_minus_square(a * ARI_SQRT_1_2));
}

/* Returns Phi(x) + x*phi(x). For x < 0 the two terms have opposite signs; computed as e*(erfcx/2 - a/sqrt(2 pi)), only
 * the terms round. */
ARI_FN double ari_dgelu_erf_part(double x, double a, double e)
{
    const double negative = fma(a, -ARI_1_SQRT_2PI, 0.5 * ari_erfcx_part(a * ARI_SQRT_1_2)) * e;
    return x < 0.0 ? negative : 1.0 - negative;
}

ARI_FN float ari_dgelu_erf32(float x)
{
    const double a = fabs((double)x) > ARI_GELU_BOUND32 ? ARI_GELU_BOUND32 : fabs((double)x);
    return ari_round32(ari_dgelu_erf_part((double)x, a, ari_exp_mid(-0.5 * (a * a))));
}

ARI_FN double ari_dgelu_erf64(double x)
{
    const double a = fabs(x) > 39.0 ? 39.0 : fabs(x);
    return ari_dgelu_erf_part(x, a, ari_exp_minus_square(a * ARI_SQRT_1_2));
}

/* --- GELU, tanh form: x*(1 + tanh(u))/2 = x*sigmoid(2u), u = sqrt(2/pi)*(x + 0.044715 x^3) ------------------------ */

#define ARI_GELU_CUBIC 0.044715

ARI_FN double ari_gelu_tanh_2u(double x)
{
    return 2.0 * ARI_SQRT_2_PI * x * fma(ARI_GELU_CUBIC, x * x, 1.0);
}

ARI_FN float ari_gelu_tanh32(float x)
{
    const double low = (double)x < -ARI_GELU_BOUND32 ? -ARI_GELU_BOUND32 : (double)x;
    const double near = low > ARI_GELU_BOUND32 ? ARI_GELU_BOUND32 : low;
    return ari_round32(low / (1.0 + ari_exp_mid(-ari_gelu_tanh_2u(near))));
}

ARI_FN double ari_gelu_tanh64(double x)
{
    const double near = ari_limit(x, -ARI_GELU_BOUND64, ARI_GELU_BOUND64);
    return (x < -ARI_GELU_BOUND64 ? -ARI_GELU_BOUND64 : x) * ari_sigmoid64(ari_gelu_tanh_2u(near));
}

/* Returns sigmoid(w) + x*w'*sigmoid'(w), w = 2u. With e = exp(-|w|) this is n/(1 + e)^2, times e for w < 0. */
ARI_FN double ari_dgelu_tanh_part(double x, double e)
{
    const double slope = 2.0 * ARI_SQRT_2_PI * x * fma(3.0 * ARI_GELU_CUBIC, x * x, 1.0); /* x*w' */
    const double n = x < 0.0 ? (1.0 + slope) + e : fma(slope, e, 1.0) + e;
    const double d = 1.0 + e;
    return n * (x < 0.0 ? e : 1.0) / (d * d);
}

ARI_FN float ari_dgelu_tanh32(float x)
{
    const double near = ari_limit((double)x, -ARI_GELU_BOUND32, ARI_GELU_BOUND32);
    const double w = ari_gelu_tanh_2u(near);
    return ari_round32(ari_dgelu_tanh_part(near, ari_exp_mid(-fabs(w))));
}

ARI_FN double ari_dgelu_tanh64(double x)
{
    const double near = ari_limit(x, -ARI_GELU_BOUND64, ARI_GELU_BOUND64);
    const double w = ari_gelu_tanh_2u(near);
    return ari_dgelu_tanh_part(near, ari_exp64(-fabs(w)));
}

/* --- SiLU: x*sigmoid(x) ------------------------------------------------------------------------------------------- */

ARI_FN float ari_silu32(float x)
{
    const double low = (double)x < -ARI_SILU_BOUND32 ? -ARI_SILU_BOUND32 : (double)x;
    const double near = low > ARI_SILU_BOUND32 ? ARI_SILU_BOUND32 : low;
    return ari_round32(low / (1.0 + ari_exp_mid(-near)));
}

ARI_FN double ari_silu64(double x)
{
    return (x < -ARI_SILU_BOUND64 ? -ARI_SILU_BOUND64 : x) * ari_sigmoid64(x);
}

/* Returns sigmoid(x)*(1 + x*(1 - sigmoid(x))). With e = exp(-|x|) = scale*(1 + p) this is (1 + e + x)*e/(1 + e)^2 for x
 * < 0 and (1 + e + x*e)/(1 + e)^2 otherwise. Near the zero at -1.278, the sum of 1 + x and scale is exact, and p has
 * full relative accuracy. */
ARI_FN double ari_dsilu_part(double x, double p, double scale)
{
    const double e = fma(scale, p, scale);
    const double d = 1.0 + e;
    const double n = fma(scale, p, (1.0 + (x < 0.0 ? x : x * e)) + scale);
    return n * (x < 0.0 ? e : 1.0) / (d * d);
}

ARI_FN float ari_dsilu32(float x)
{
    const double near = ari_limit((double)x, -ARI_SILU_BOUND32, ARI_SILU_BOUND32);
    double scale;
    const double p = ari_expm1_part(-fabs(near), &scale);
    return ari_round32(ari_dsilu_part(near, p, scale));
}

ARI_FN double ari_dsilu64(double x)
{
    const double near = ari_limit(x, -700.0, 700.0);
    double scale;
    const double p = ari_expm1_part(-fabs(near), &scale);
    return ari_dsilu_part(near, p, scale);
}

/* --- GPT-OSS's: g*sigmoid(1.702*g), g = min(x, 7) ------------------------------------------------------------------- */

#define ARI_CLAMP 7.0
#define ARI_CLAMPED_SLOPE 1.702

ARI_FN float ari_clamped32(float x)
{
    const double below = (double)x > ARI_CLAMP ? ARI_CLAMP : (double)x;
    const double near = below < -ARI_SILU_BOUND32 ? -ARI_SILU_BOUND32 : below;
    return ari_round32(near / (1.0 + ari_exp_mid(-(ARI_CLAMPED_SLOPE * near))));
}

ARI_FN double ari_clamped64(double x)
{
    const double low = -ARI_SILU_BOUND64 / ARI_CLAMPED_SLOPE, below = x > ARI_CLAMP ? ARI_CLAMP : x;
    const double near = below < low ? low : below;
    return near * ari_sigmoid64(ARI_CLAMPED_SLOPE * near);
}

/* Returns SiLU's slope at w = 1.702*x; +0 beyond the limit. */
ARI_FN float ari_dclamped32(float x)
{
    const double w = ARI_CLAMPED_SLOPE * ari_limit((double)x, -ARI_SILU_BOUND32, ARI_CLAMP);
    double scale;
    const double p = ari_expm1_part(-fabs(w), &scale);
    const float slope = ari_round32(ari_dsilu_part(w, p, scale));
    return (double)x > ARI_CLAMP ? 0.0f : slope;
}

ARI_FN double ari_dclamped64(double x)
{
    return x > ARI_CLAMP ? 0.0 : ari_dsilu64(ARI_CLAMPED_SLOPE * x);
}

/* --- ReLU and none ------------------------------------------------------------------------------------------------ */

ARI_FN float ari_relu32(float x)
{
    return ari_canonical32(x < 0.0f ? 0.0f : x);
}

ARI_FN double ari_relu64(double x)
{
    return x < 0.0 ? 0.0 : x;
}

/** Returns 1 for x > 0, 0 for x <= 0; NaN is passed on. */
ARI_FN float ari_drelu32(float x)
{
    const float step = x > 0.0f ? 1.0f : 0.0f;
    return x != x ? ari_nan32() : step;
}

ARI_FN double ari_drelu64(double x)
{
    const double step = x > 0.0 ? 1.0 : 0.0;
    return x != x ? x : step;
}

/* --- by kind ------------------------------------------------------------------------------------------------------ */

/* Defines a function of an activation and a number by kind; for AR_ACT_NONE it returns `identity`. */
#define ARI_ACT_FUNCTION(type, name, d, width, identity) \
    ARI_FN type name(ar_activation kind, type x)         \
    {                                                    \
        switch ((enum ar_activations)kind) {             \
        case AR_ACT_GELU_ERF:                            \
            return ari_##d##gelu_erf##width(x);          \
        case AR_ACT_GELU_TANH:                           \
            return ari_##d##gelu_tanh##width(x);         \
        case AR_ACT_SILU:                                \
            return ari_##d##silu##width(x);              \
        case AR_ACT_RELU:                                \
            return ari_##d##relu##width(x);              \
        case AR_ACT_CLAMPED:                             \
            return ari_##d##clamped##width(x);           \
        case AR_ACTIVATIONS:                             \
            break;                                       \
        }                                                \
        return identity;                                 \
    }

/** act32(x). AR_ACT_NONE is the identity. */
ARI_ACT_FUNCTION(float, ari_act32, , 32, ari_canonical32(x))
/** The derivative of act at x. Of the identity 1; NaN passes there too. */
ARI_ACT_FUNCTION(float, ari_dact32, d, 32, x != x ? ari_nan32() : 1.0f)
ARI_ACT_FUNCTION(double, ari_act64, , 64, x)
ARI_ACT_FUNCTION(double, ari_dact64, d, 64, x != x ? x : 1.0)

/* --- gated MLP ---------------------------------------------------------------------------------------------------- */

/** Returns the factor of act(gate): up, or for AR_ACT_CLAMPED 1 + up with up limited to [-7, 7]. The slope with respect
 *  to up is 1, or 0 where the limit applies. */
ARI_FN double ari_gate_up(ar_activation kind, double up)
{
    const double limited = up > ARI_CLAMP ? ARI_CLAMP : up < -ARI_CLAMP ? -ARI_CLAMP : up;
    return kind == AR_ACT_CLAMPED ? limited + 1.0 : up;
}
ARI_FN int ari_gate_up_moves(ar_activation kind, double up)
{
    return kind != AR_ACT_CLAMPED || !(up > ARI_CLAMP || up < -ARI_CLAMP);
}

/** Returns fl32(act32(gate)*u), where u is fl32 of the factor. */
ARI_FN float ari_gated_act(ar_activation kind, float gate, float up)
{
    return ari_canonical32(ari_act32(kind, gate) * (float)ari_gate_up(kind, (double)up));
}

/** Returns fl32(dy*act32(gate)), or +0 if up was limited. */
ARI_FN float ari_gated_dup(ar_activation kind, float dy, float up, float gate)
{
    const float d = ari_canonical32(dy * ari_act32(kind, gate));
    return ari_gate_up_moves(kind, (double)up) ? d : 0.0f;
}

/** fl32(fl32(dy*u)*act'32(gate)). */
ARI_FN float ari_gated_dgate(ar_activation kind, float dy, float up, float gate)
{
    const float product = dy * (float)ari_gate_up(kind, (double)up);
    return ari_canonical32(product * ari_dact32(kind, gate));
}
