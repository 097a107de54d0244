/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* What the fp32 functions are judged by: the same functions from their textbook formulas and libm, in binary64 (fast,
 * used far from ties), in long double (near ties and zeros), and, where the includer defines SCALAR_QUAD, in
 * __float128. None of it shares an operation with ref/numerics. */
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ref/numerics/activation.h"
#include "ref/numerics/scalar.h"
#ifdef SCALAR_QUAD
#include <quadmath.h>
#endif

/* FORMULAS(type, tag, literal suffix, exp, erfc): the compound functions in one type. */
#define FORMULAS(T, TAG, L, EXP, ERFC)                                                                   \
    static T TAG##_sigmoid(T x)                                                                          \
    {                                                                                                    \
        return (T)1 / ((T)1 + EXP(-x));                                                                  \
    }                                                                                                    \
    static T TAG##_silu(T x)                                                                             \
    {                                                                                                    \
        return x * TAG##_sigmoid(x);                                                                     \
    }                                                                                                    \
    static T TAG##_dsilu(T x)                                                                            \
    {                                                                                                    \
        return TAG##_sigmoid(x) * ((T)1 + x * TAG##_sigmoid(-x));                                        \
    }                                                                                                    \
    static T TAG##_cdf(T x)                                                                              \
    {                                                                                                    \
        return (T)0.5 * ERFC(-x * 0.7071067811865475244008443621048490393##L);                           \
    }                                                                                                    \
    static T TAG##_gelu_erf(T x)                                                                         \
    {                                                                                                    \
        return x * TAG##_cdf(x);                                                                         \
    }                                                                                                    \
    static T TAG##_dgelu_erf(T x)                                                                        \
    {                                                                                                    \
        return TAG##_cdf(x) + x * (EXP((T)-0.5 * (x * x)) * 0.3989422804014326779399460599343818685##L); \
    }                                                                                                    \
    static T TAG##_twice_u(T x)                                                                          \
    {                                                                                                    \
        return 1.5957691216057307117597842397375274738##L * (x + 0.044715##L * x * x * x);               \
    }                                                                                                    \
    static T TAG##_gelu_tanh(T x)                                                                        \
    {                                                                                                    \
        return x * TAG##_sigmoid(TAG##_twice_u(x));                                                      \
    }                                                                                                    \
    static T TAG##_dgelu_tanh(T x)                                                                       \
    {                                                                                                    \
        const T w = TAG##_twice_u(x);                                                                    \
        const T slope = 1.5957691216057307117597842397375274738##L * ((T)1 + 0.134145##L * x * x);       \
        return TAG##_sigmoid(w) * ((T)1 + x * slope * TAG##_sigmoid(-w));                                \
    }

FORMULAS(double, f64, , exp, erfc)
FORMULAS(long double, ld, L, expl, erfcl)
#ifdef SCALAR_QUAD
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic" /* __float128 and its Q suffix */
typedef __float128 quad;
FORMULAS(quad, f128, Q, expq, erfcq)
#pragma GCC diagnostic pop
#endif

/* FUNCTIONS(X): X(name, binary64 reference, long double reference, __float128 reference, derivative with a zero) */
#define SCALAR_FUNCTIONS(X)                                               \
    X(exp32, exp, expl, expq, false)                                      \
    X(sigmoid32, f64_sigmoid, ld_sigmoid, f128_sigmoid, false)            \
    X(sin32, sin, sinl, sinq, false)                                      \
    X(cos32, cos, cosl, cosq, false)                                      \
    X(gelu_erf32, f64_gelu_erf, ld_gelu_erf, f128_gelu_erf, false)        \
    X(dgelu_erf32, f64_dgelu_erf, ld_dgelu_erf, f128_dgelu_erf, true)     \
    X(gelu_tanh32, f64_gelu_tanh, ld_gelu_tanh, f128_gelu_tanh, false)    \
    X(dgelu_tanh32, f64_dgelu_tanh, ld_dgelu_tanh, f128_dgelu_tanh, true) \
    X(silu32, f64_silu, ld_silu, f128_silu, false)                        \
    X(dsilu32, f64_dsilu, ld_dsilu, f128_dsilu, true)

typedef struct scalar_function {
    const char *name;
    float (*one)(float);                                       /* compiled for the build's own target */
    void (*wide)(float *restrict y, const float *x, size_t n); /* a loop over the same text, vectorised with FMA */
    double (*f64)(double);
    long double (*ld)(long double);
#ifdef SCALAR_QUAD
    quad (*f128)(quad);
#endif
    bool has_zero; /* a derivative that crosses zero in (-1.4, -0.6), where binary64 is no judge */
} scalar_function;

/* The wide loops are compiled for AVX2 with FMA where the compiler can; scalar_wide_works says whether this processor
 * runs them. */
#if defined(__x86_64__) && defined(__GNUC__)
#define SCALAR_WIDE __attribute__((target("avx2,fma")))
static inline bool scalar_wide_works(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#else
#define SCALAR_WIDE
static inline bool scalar_wide_works(void)
{
    return true;
}
#endif

#define SCALAR_LOOPS(NAME, F64, LD, F128, ZERO)                                      \
    static float one_##NAME(float x)                                                 \
    {                                                                                \
        return ari_##NAME(x);                                                        \
    }                                                                                \
    SCALAR_WIDE static void wide_##NAME(float *restrict y, const float *x, size_t n) \
    {                                                                                \
        for (size_t i = 0; i < n; i++)                                               \
            y[i] = ari_##NAME(x[i]);                                                 \
    }
SCALAR_FUNCTIONS(SCALAR_LOOPS)

#ifdef SCALAR_QUAD
#define SCALAR_ROW(NAME, F64, LD, F128, ZERO) {#NAME, one_##NAME, wide_##NAME, F64, LD, F128, ZERO},
#else
#define SCALAR_ROW(NAME, F64, LD, F128, ZERO) {#NAME, one_##NAME, wide_##NAME, F64, LD, ZERO},
#endif
static const scalar_function scalar_functions[] = {SCALAR_FUNCTIONS(SCALAR_ROW)};
enum { SCALAR_FUNCTION_COUNT = sizeof scalar_functions / sizeof scalar_functions[0] };

typedef struct scalar_tally {
    double max_ulp;      /* largest error, in units in the last place of the correctly rounded result */
    float max_at;        /* where */
    uint64_t judged;     /* inputs with a finite or infinite reference */
    uint64_t misrounded; /* results that differ from the correctly rounded one */
    uint64_t undecided;  /* too close to a tie for the widest reference; counted as right if they are a neighbour */
    uint64_t wrong;      /* NaN, infinity or overflow where the reference has none, or the reverse */
    float wrong_at;
} scalar_tally;

/* The spacing of fp32 values at q (finite): subnormals share 2^-149. */
static inline double scalar_ulp(float q)
{
    const int32_t e = ari_exponent32(q);
    return ari_pow2((e < -125 ? -125 : e) - 24);
}

/* The error of y against the real number high + low, in ulps; *tie: its distance from the nearest rounding boundary. */
static inline double scalar_error(float y, long double r, double *tie)
{
    const float q = (float)r;
    const double ulp = scalar_ulp(q);
    *tie = 0.5 - (double)(fabsl(r - (long double)q) / (long double)ulp);
    return (double)(fabsl((long double)y - r) / (long double)ulp);
}

static inline void scalar_wrong(scalar_tally *t, float x)
{
    t->wrong++;
    t->wrong_at = x;
}

/* Near a tie, a zero, or on a difference: the slow judge. */
static inline void scalar_judge_closely(const scalar_function *f, float x, float y, scalar_tally *t)
{
    double tie;
    const long double r = f->ld((long double)x);
    double error = scalar_error(y, r, &tie);
    bool right = y == (float)r;
    if (tie < 0x1p-28) { /* long double is good for about 2^-36 ulp here, compound formulas for less */
#ifdef SCALAR_QUAD
        const quad s = f->f128((quad)x);
        right = y == (float)s;
        error = (double)(fabsq((quad)y - s) / (quad)scalar_ulp((float)s));
#else
        t->undecided++;
        right = error < 0.5 + 0x1p-20;
#endif
    }
    t->misrounded += right ? 0 : 1;
    if (error > t->max_ulp) {
        t->max_ulp = error;
        t->max_at = x;
    }
}

/** Judges y = f(x) for one finite x. */
static inline void scalar_judge(const scalar_function *f, float x, float y, scalar_tally *t)
{
    const double r = f->f64((double)x);
    if (r != r) {
        if (ari_bits32(y) != ARI_NAN_BITS)
            scalar_wrong(t, x);
        return;
    }
    t->judged++;
    const float q = (float)r;
    if (q - q != 0.0f || y - y != 0.0f) {
        if (y != q)
            scalar_wrong(t, x);
        return;
    }
    const double ulp = scalar_ulp(q);
    const double error = fabs((double)y - r) / ulp;
    const bool near_zero = f->has_zero && x < -0.6f && x > -1.4f;
    if (near_zero || y != q || error > 0.5 - 0x1p-14) {
        scalar_judge_closely(f, x, y, t);
    } else if (error > t->max_ulp) {
        t->max_ulp = error;
        t->max_at = x;
    }
}
