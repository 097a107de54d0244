/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Computes exp, log, tanh, erf, erfc, sigmoid, sin and cos from IEEE + - * / fma and integer operations only, without
 * libm, whose last bit differs between platforms. Branches are selections, so that loops over an fp32 form vectorise
 * and every lane computes what scalar code computes. fma rounds once with or without the instruction, so builds agree.
 *
 * Coefficients are Chebyshev fits by ref/numerics/coefficients.py, rounded to binary64. Reductions follow Cody and
 * Waite, Software Manual for the Elementary Functions, 1980. The logarithm follows fdlibm's e_log.c. erfc's mapping of
 * [0, inf) to a bounded interval follows Shepherd and Laframboise, Math. Comp. 36 (1981). The fp32 forms compute in
 * binary64 and round once; numerics.md has the measured errors. */
#include "ref/numerics/bits.h"

#define ARI_LOG2E 0x1.71547652b82fep+0
#define ARI_LN2_HI 0x1.62e42fefp-1 /* 33 bits: k*ARI_LN2_HI is exact for |k| < 2^20 */
#define ARI_LN2_LO 0x1.473de6af278edp-34
#define ARI_2_PI 0x1.45f306dc9c883p-1
#define ARI_PI_2_HI 0x1.921fb544p+0 /* 33 bits */
#define ARI_PI_2_MID 0x1.0b4611a6p-34
#define ARI_PI_2_LO 0x1.3198a2e037073p-69
#define ARI_PI 0x1.921fb54442d18p+1
#define ARI_TWO_PI 0x1.921fb54442d18p+2
#define ARI_SQRT_1_2 0x1.6a09e667f3bcdp-1
#define ARI_SQRT_2_PI 0x1.9884533d43651p-1  /* sqrt(2/pi) */
#define ARI_1_SQRT_2PI 0x1.9884533d43651p-2 /* 1/sqrt(2 pi) */

/* Reduces e^x = 2^k (1 + p) with |remainder| <= ln(2)/2. Returns p and writes k, as a binary64 integer plus
 * ARI_ROUND_MAGIC. |x| < 2^19. p has full relative accuracy, which tanh and the zeros of derivatives need. */
ARI_FN double ari_exp_reduce(double x, double *shifted_k)
{
    const double t = fma(x, ARI_LOG2E, ARI_ROUND_MAGIC);
    const double k = t - ARI_ROUND_MAGIC;
    const double r = fma(k, -ARI_LN2_LO, fma(k, -ARI_LN2_HI, x));
    double q = 0x1.af38a9b0ec855p-26;
    q = fma(q, r, 0x1.289185613a3d6p-22);
    q = fma(q, r, 0x1.71de0dae63bb3p-19);
    q = fma(q, r, 0x1.a019b90d2ae7ap-16);
    q = fma(q, r, 0x1.a01a01a7c41d5p-13);
    q = fma(q, r, 0x1.6c16c1788bd90p-10);
    q = fma(q, r, 0x1.11111111109b3p-7);
    q = fma(q, r, 0x1.5555555553d63p-5);
    q = fma(q, r, 0x1.5555555555556p-3);
    q = fma(q, r, 0x1.0000000000001p-1);
    *shifted_k = t;
    return fma(r * r, q, r);
}

/* Does the same with 2^k in *scale, for |x| <= 700. The low bits of the magic sum are k, which is shifted into
 * place. */
ARI_FN double ari_expm1_part(double x, double *scale)
{
    double t;
    const double p = ari_exp_reduce(x, &t);
    *scale = ari_float64((ari_bits64(t) << 52) + 0x3ff0000000000000u);
    return p;
}

/* Returns e^x for |x| <= 700, without subnormal results. NaN is passed on. */
ARI_FN double ari_exp_mid(double x)
{
    double scale;
    const double p = ari_expm1_part(x, &scale);
    return fma(scale, p, scale);
}

/* Returns x limited to [low, high]; NaN is passed on. */
ARI_FN double ari_limit(double x, double low, double high)
{
    const double y = x < low ? low : x;
    return y > high ? high : y;
}

/** Returns e^x for every binary64 x; overflow gives infinity, and subnormal results round once. */
ARI_FN double ari_exp64(double x)
{
    double t;
    const double p = ari_exp_reduce(ari_limit(x, -746.0, 710.0), &t);
    const int32_t k = (int32_t)(uint32_t)(ari_bits64(t) - ARI_ROUND_MAGIC_BITS);
    const int32_t half = k >> 1; /* 2^k as two factors, because k may lie outside the normal exponents */
    const double y = (1.0 + p) * ari_pow2(half) * ari_pow2(k - half);
    return x != x ? x : y;
}

/** The natural logarithm over all of binary64: log(0) = -inf, log(negative) = NaN. */
ARI_FN double ari_log64(double x)
{
    const int tiny = x < 0x1p-1022;
    const uint64_t u = ari_bits64(tiny ? x * 0x1p54 : x);
    /* The offset moves the boundary between exponents from 1 to sqrt(1/2), so that m lies in [sqrt(1/2), sqrt(2)). */
    const uint64_t biased = (u + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu)) >> 52;
    const double m = ari_float64(u - (biased << 52) + 0x3ff0000000000000u);
    const double k = ari_float64(biased | 0x4330000000000000u) - (tiny ? 0x1p52 + 1077.0 : 0x1p52 + 1023.0);
    const double f = m - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double q = 0x1.0c04595972ab8p-3;
    q = fma(q, z, 0x1.0fbe83c2cbcf3p-3);
    q = fma(q, z, 0x1.3b1c360763b8ap-3);
    q = fma(q, z, 0x1.745cf901605f7p-3);
    q = fma(q, z, 0x1.c71c720160b47p-3);
    q = fma(q, z, 0x1.2492492476c87p-2);
    q = fma(q, z, 0x1.9999999999a38p-2);
    q = fma(q, z, 0x1.5555555555555p-1);
    const double half_square = 0.5 * f * f;
    const double y = k * ARI_LN2_HI - ((half_square - fma(s, half_square + z * q, k * ARI_LN2_LO)) - f);
    const double positive = x > 0x1.fffffffffffffp1023 ? x : y;
    const double zero = x == 0.0 ? -(double)INFINITY : (double)NAN;
    return x > 0.0 ? positive : zero;
}

/** Returns tanh for every binary64 x: e/(e + 2) with e = expm1(2|x|), which keeps its relative accuracy near 0. */
ARI_FN double ari_tanh64(double x)
{
    const double a = fabs(x);
    double scale;
    const double p = ari_expm1_part(2.0 * (a > 22.0 ? 22.0 : a), &scale);
    const double e = fma(scale, p, scale - 1.0);
    return copysign(e / (e + 2.0), x);
}

/** Returns 1/(1 + e^-x), computed from e^-|x| so that nothing overflows and the lower tail keeps its relative
 *  accuracy. */
ARI_FN double ari_sigmoid64(double x)
{
    const double e = ari_exp64(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

/* e^(y^2) erfc(y) for 0 <= y <= 28. */
ARI_FN double ari_erfcx_part(double y)
{
    const double v = 1.0 / (y + 4.0);
    const double t = fma(-8.0, v, 1.0);
    double q = -0x1.bb889b00479f0p-29;
    q = fma(q, t, -0x1.000c573bd01c7p-26);
    q = fma(q, t, 0x1.61c811f5a5533p-27);
    q = fma(q, t, 0x1.118ede3a3284dp-23);
    q = fma(q, t, -0x1.7443ce2813566p-24);
    q = fma(q, t, -0x1.c98952bcd3249p-21);
    q = fma(q, t, 0x1.803e3fd4b9a47p-20);
    q = fma(q, t, 0x1.3b5cb52fcf7bep-18);
    q = fma(q, t, -0x1.3c7ae654d277ep-16);
    q = fma(q, t, -0x1.e833041dc3d68p-19);
    q = fma(q, t, 0x1.72ce035d9c7cap-13);
    q = fma(q, t, -0x1.dd281d2bb9a0fp-12);
    q = fma(q, t, -0x1.269b5895f1c00p-12);
    q = fma(q, t, 0x1.908f46bb15c1fp-8);
    q = fma(q, t, -0x1.b00c052a35502p-6);
    q = fma(q, t, 0x1.38dbd2c980e0cp-4);
    q = fma(q, t, -0x1.645fd8a4be66fp-3);
    q = fma(q, t, 0x1.52cac2370e2dep-2);
    q = fma(q, t, -0x1.14eacb1ad0321p-1);
    q = fma(q, t, 0x1.8be202d26c74fp-1);
    q = fma(q, t, -0x1.f3fe31ecb49bfp-1);
    q = fma(q, t, 0x1.18932bf08e154p+0);
    return q * v;
}

/* Returns e^-(a^2) for every binary64 a; a^2 is the exact sum of its rounded value and the remainder. */
ARI_FN double ari_exp_minus_square(double a)
{
    const double high = a * a;
    const double low = fma(a, a, -high);
    const double e = ari_exp64(-high);
    return fma(-e, low, e);
}

/* Computes r = |x| - k*pi/2 with |r| <= pi/4, and returns k modulo 2^63 in the low bits; |x| < 2^20. The first product
 * is exact, and so is its subtraction near a multiple of pi/2; the constants represent pi/2 to 2^-121. */
ARI_FN uint64_t ari_quadrant(double x, double *r)
{
    const double a = fabs(x);
    const double t = fma(a, ARI_2_PI, ARI_ROUND_MAGIC);
    const double k = t - ARI_ROUND_MAGIC;
    *r = fma(k, -ARI_PI_2_LO, fma(k, -ARI_PI_2_MID, fma(k, -ARI_PI_2_HI, a)));
    return ari_bits64(t);
}

ARI_FN double ari_sin_part(double r)
{
    const double z = r * r;
    double q = 0x1.5e0b05bff20f2p-33;
    q = fma(q, z, -0x1.ae600aca92c64p-26);
    q = fma(q, z, 0x1.71de379654304p-19);
    q = fma(q, z, -0x1.a01a019e83816p-13);
    q = fma(q, z, 0x1.1111111110bb2p-7);
    q = fma(q, z, -0x1.5555555555555p-3);
    return fma(r * z, q, r);
}

ARI_FN double ari_cos_part(double r)
{
    const double z = r * r;
    double q = -0x1.907d8f29fe831p-37;
    q = fma(q, z, 0x1.1eeb68cd22f56p-29);
    q = fma(q, z, -0x1.27e4fa17bf139p-22);
    q = fma(q, z, 0x1.a01a019f4e9b4p-16);
    q = fma(q, z, -0x1.6c16c16c16967p-10);
    q = fma(q, z, 0x1.5555555555555p-5);
    return fma(z * z, q, fma(z, -0.5, 1.0));
}

/** Returns sin for |x| < 2^20; beyond that NaN, since no position of a model reaches it. */
ARI_FN double ari_sin64(double x)
{
    double r;
    const uint64_t k = ari_quadrant(x, &r);
    const double s = ari_sin_part(r);
    const double c = ari_cos_part(r);
    const double v = (k & 1u) != 0 ? c : s;
    const double y = ari_float64(ari_bits64(v) ^ ((k & 2u) << 62) ^ (ari_bits64(x) & 0x8000000000000000u));
    return fabs(x) < 0x1p20 ? y : (double)NAN;
}

/** Returns cos for |x| < 2^20; beyond that NaN. */
ARI_FN double ari_cos64(double x)
{
    double r;
    const uint64_t k = ari_quadrant(x, &r);
    const double s = ari_sin_part(r);
    const double c = ari_cos_part(r);
    const double v = (k & 1u) != 0 ? s : c;
    const double y = ari_float64(ari_bits64(v) ^ (((k + 1u) & 2u) << 62));
    return fabs(x) < 0x1p20 ? y : (double)NAN;
}

/* --- the fp32 forms: binary64 inside, rounded once, NaN canonical ------------------------------------------------- */

/** binary64 rounded to fp32, NaN canonical. */
ARI_FN float ari_round32(double x)
{
    return ari_canonical32((float)x);
}

ARI_FN float ari_exp32(float x)
{
    return ari_round32(ari_exp_mid(ari_limit((double)x, -110.0, 100.0))); /* e^-110 rounds to 0, e^100 to infinity */
}

ARI_FN float ari_sigmoid32(float x)
{
    const double e = ari_exp_mid(-(fabs((double)x) > 110.0 ? 110.0 : fabs((double)x)));
    return ari_round32((x < 0.0f ? e : 1.0) / (1.0 + e));
}

ARI_FN float ari_sin32(float x)
{
    return ari_round32(ari_sin64((double)x));
}

ARI_FN float ari_cos32(float x)
{
    return ari_round32(ari_cos64((double)x));
}
