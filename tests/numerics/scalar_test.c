/* SPDX-License-Identifier: Apache-2.0 */
/* The fp32 functions, on every 503rd bit pattern, against libm in wider types; numerics.md states the errors of
 * the exhaustive sweep, tests/extended/scalar_sweep.c. */
#include "anyrank/activation.h"
#include "ref/numerics/activation.h"
#include "tests/numerics/scalar_reference.h"
#include "tests/support/test.h"

/* A prime stride meets every exponent and all patterns of low bits. Unoptimised and instrumented builds take fewer. */
#if defined(__SANITIZE_ADDRESS__) || !defined(__OPTIMIZE__)
enum { STRIDE = 8009 };
#else
enum { STRIDE = 1009 };
#endif
enum { CHUNK = 4096, SCALAR_EVERY = 64 };

static const scalar_function *find(const char *name)
{
    for (size_t i = 0; i < SCALAR_FUNCTION_COUNT; i++)
        if (strcmp(scalar_functions[i].name, name) == 0)
            return &scalar_functions[i];
    cr_assert(false, "no function %s", name);
    return NULL;
}

/* One value at a time for this build's target, and one in SCALAR_EVERY chunks both ways: the bits must be the same. */
static void evaluate(const scalar_function *f, float *y, const float *x, size_t n, size_t chunk)
{
    const bool wide = scalar_wide_works();
    if (wide)
        f->wide(y, x, n);
    if (wide && chunk % SCALAR_EVERY != 0)
        return;
    for (size_t i = 0; i < n; i++) {
        const float one = f->one(x[i]);
        cr_assert(!wide || ari_bits32(one) == ari_bits32(y[i]), "%s(%a): %08x alone, %08x in a vector", f->name,
                  (double)x[i], ari_bits32(one), ari_bits32(y[i]));
        y[i] = one;
    }
}

/* Sweeps the finite inputs of the function's domain and asserts the largest error. */
static void sweep(const char *name, double bound, double max_ulp)
{
    const scalar_function *f = find(name);
    static float x[CHUNK], y[CHUNK];
    scalar_tally t = {0};
    size_t chunk = 0;
    for (uint64_t u = 0; u <= UINT32_MAX; chunk++) {
        size_t n = 0;
        for (; n < CHUNK && u <= UINT32_MAX; u += STRIDE) {
            x[n] = ari_float32((uint32_t)u);
            n += fabsf(x[n]) < (float)bound ? 1 : 0;
        }
        evaluate(f, y, x, n, chunk);
        for (size_t i = 0; i < n; i++)
            scalar_judge(f, x[i], y[i], &t);
    }
    printf("%-13s max %.6f ulp at %a, %llu of %llu not correctly rounded, %llu undecided\n", name, t.max_ulp,
           (double)t.max_at, (unsigned long long)t.misrounded, (unsigned long long)t.judged,
           (unsigned long long)t.undecided);
    cr_assert(t.judged > 1000000u / (STRIDE > 503 ? 32u : 1u));
    cr_assert(t.wrong == 0, "%s: %llu results of the wrong kind, one at %a", name, (unsigned long long)t.wrong,
              (double)t.wrong_at);
    cr_assert(t.max_ulp <= max_ulp, "%s(%a): %.6f ulp", name, (double)t.max_at, t.max_ulp);
}

#define SWEEP(NAME, BOUND, ULP)                                                    \
    Test(scalar, NAME##_is_correctly_rounded_within_##ULP##_thousandths_of_an_ulp) \
    {                                                                              \
        sweep(#NAME, (double)(BOUND), (ULP) / 1000.0);                             \
    }
SWEEP(exp32, INFINITY, 501)
SWEEP(sigmoid32, INFINITY, 501)
SWEEP(sin32, 0x1p20, 501)
SWEEP(cos32, 0x1p20, 501)
SWEEP(gelu_erf32, INFINITY, 501)
SWEEP(dgelu_erf32, INFINITY, 510)
SWEEP(gelu_tanh32, INFINITY, 501)
SWEEP(dgelu_tanh32, INFINITY, 510)
SWEEP(silu32, INFINITY, 501)
SWEEP(dsilu32, INFINITY, 510)

/* Every value within 2^17 steps of a derivative's zero, where a difference would lose everything. */
static void around_zero(const char *name, float zero)
{
    const scalar_function *f = find(name);
    scalar_tally t = {0};
    const uint32_t middle = ari_bits32(zero);
    for (uint32_t u = middle - (1u << 17); u <= middle + (1u << 17); u++)
        scalar_judge(f, ari_float32(u), f->one(ari_float32(u)), &t);
    printf("%-13s max %.6f ulp at %a near its zero\n", name, t.max_ulp, (double)t.max_at);
    cr_assert(t.wrong == 0);
    cr_assert(t.max_ulp <= 0.51, "%s(%a): %.6f ulp", name, (double)t.max_at, t.max_ulp);
}

Test(scalar, derivatives_keep_their_relative_accuracy_at_their_zeros)
{
    around_zero("dgelu_erf32", -0.75179160f);
    around_zero("dgelu_tanh32", -0.75246143f);
    around_zero("dsilu32", -1.27846454f);
}

/* --- values that a formula does not decide ------------------------------------------------------------------------ */

#define PLUS_INF 0x7f800000u
#define MINUS_INF 0xff800000u
#define MINUS_ZERO 0x80000000u
#define ONE 0x3f800000u
#define HALF 0x3f000000u

typedef struct special {
    const char *name;
    uint32_t at_zero, at_minus_zero, at_inf, at_minus_inf;
} special;

static const special specials[] = {
    {"exp32", ONE, ONE, PLUS_INF, 0},
    {"sigmoid32", HALF, HALF, ONE, 0},
    {"sin32", 0, MINUS_ZERO, ARI_NAN_BITS, ARI_NAN_BITS},
    {"cos32", ONE, ONE, ARI_NAN_BITS, ARI_NAN_BITS},
    {"gelu_erf32", 0, MINUS_ZERO, PLUS_INF, MINUS_ZERO},
    {"dgelu_erf32", HALF, HALF, ONE, MINUS_ZERO},
    {"gelu_tanh32", 0, MINUS_ZERO, PLUS_INF, MINUS_ZERO},
    {"dgelu_tanh32", HALF, HALF, ONE, MINUS_ZERO},
    {"silu32", 0, MINUS_ZERO, PLUS_INF, MINUS_ZERO},
    {"dsilu32", HALF, HALF, ONE, MINUS_ZERO},
};

static void expect_both_ways(const scalar_function *f, uint32_t x, uint32_t want)
{
    const float in[8] = {ari_float32(x), ari_float32(x), ari_float32(x), ari_float32(x),
                         ari_float32(x), ari_float32(x), ari_float32(x), ari_float32(x)};
    float out[8];
    const uint32_t got = ari_bits32(f->one(in[0]));
    cr_assert(got == want, "%s(%08x) = %08x, expected %08x", f->name, x, got, want);
    if (!scalar_wide_works())
        return;
    f->wide(out, in, 8);
    for (int i = 0; i < 8; i++)
        cr_assert(ari_bits32(out[i]) == want, "%s(%08x) = %08x in a vector", f->name, x, ari_bits32(out[i]));
}

Test(scalar, zeros_and_infinities_give_the_limits)
{
    cr_assert(sizeof specials / sizeof specials[0] == SCALAR_FUNCTION_COUNT);
    for (size_t i = 0; i < SCALAR_FUNCTION_COUNT; i++) {
        const scalar_function *f = find(specials[i].name);
        expect_both_ways(f, 0, specials[i].at_zero);
        expect_both_ways(f, MINUS_ZERO, specials[i].at_minus_zero);
        expect_both_ways(f, PLUS_INF, specials[i].at_inf);
        expect_both_ways(f, MINUS_INF, specials[i].at_minus_inf);
    }
}

Test(scalar, every_nan_becomes_the_canonical_one)
{
    static const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu};
    for (size_t i = 0; i < SCALAR_FUNCTION_COUNT; i++)
        for (size_t k = 0; k < sizeof nans / sizeof nans[0]; k++)
            expect_both_ways(&scalar_functions[i], nans[k], ARI_NAN_BITS);
    for (ar_activation kind = AR_ACT_GELU_ERF; kind < AR_ACTIVATIONS; kind++) {
        cr_assert(ari_bits32(ari_act32((ar_activation)kind, ari_float32(0xffc00001u))) == ARI_NAN_BITS);
        cr_assert(ari_bits32(ari_dact32((ar_activation)kind, ari_float32(0xffc00001u))) == ARI_NAN_BITS);
    }
}

Test(scalar, subnormal_results_are_rounded_once)
{
    /* exp(-103) = 1.45e-45 lies between 1 and 2 units of 2^-149 = 1.4013e-45; gelu's tail ends in -0. */
    cr_assert(ari_bits32(ari_exp32(-103.0f)) == 1u);
    cr_assert(ari_bits32(ari_exp32(-100.0f)) == (uint32_t)rint(exp(-100.0) * 0x1p149));
    cr_assert(ari_bits32(ari_exp32(-104.0f)) == 0u);
    cr_assert(ari_bits32(ari_silu32(-107.0f)) == (MINUS_ZERO | (uint32_t)rint(107.0 * exp(-107.0) * 0x1p149)));
    cr_assert(ari_bits32(ari_gelu_erf32(-20.0f)) == MINUS_ZERO);
    cr_assert(ari_bits32(ari_gelu_tanh32(-20.0f)) == MINUS_ZERO);
    cr_assert(ari_bits32(ari_silu32(0x1p-148f)) == 1u);
}

Test(scalar, sine_and_cosine_end_at_two_to_the_20)
{
    const float last = 0x1.fffffep19f;
    cr_assert(ari_bits32(ari_sin32(last)) == ari_bits32((float)sin((double)last)));
    cr_assert(ari_bits32(ari_cos32(-last)) == ari_bits32((float)cos((double)last)));
    cr_assert(ari_bits32(ari_sin32(0x1p20f)) == ARI_NAN_BITS);
    cr_assert(ari_bits32(ari_cos32(-0x1p20f)) == ARI_NAN_BITS);
}

/* --- known answers ------------------------------------------------------------------------------------------------ */

static void near_to(double got, double want, double unit)
{
    cr_assert(fabs(got - want) <= 0.5 * unit, "got %.17g, expected %.17g", got, want);
}

Test(scalar, gelu_has_the_published_values)
{
    near_to(ari_gelu_tanh64(1.0), 0.8411919906, 1e-10);
    near_to(ari_dgelu_tanh64(1.0), 1.0829640838, 1e-10);
    near_to(ari_dgelu_tanh64(-1.0), -0.0829640838, 1e-10);
    near_to(ari_gelu_erf64(1.0), 0.8413447461, 1e-10);
    near_to(ARI_SQRT_2_PI, 0.7978845608, 1e-10);
    cr_assert(ari_gelu_tanh32(1.0f) == 0.8411919906f);
    cr_assert(ari_dgelu_tanh32(1.0f) == 1.0829640838f);
    cr_assert(ari_dgelu_tanh32(-1.0f) == -0.0829640838f);
    cr_assert(ari_gelu_erf32(1.0f) == 0.8413447461f);
}

Test(scalar, the_two_gelus_differ_by_at_most_473e_6_near_2_70)
{
    double largest = 0.0, at = 0.0;
    for (int i = -80000; i <= 80000; i++) {
        const double x = i * 1e-4;
        const double distance = fabs(ari_gelu_erf64(x) - ari_gelu_tanh64(x));
        at = distance > largest ? fabs(x) : at;
        largest = distance > largest ? distance : largest;
    }
    near_to(largest, 4.73e-4, 1e-6);
    near_to(at, 2.70, 1e-2);
}

Test(scalar, relu_passes_minus_zero_and_its_derivative_is_zero_there)
{
    cr_assert(ari_bits32(ari_relu32(-0.0f)) == MINUS_ZERO);
    cr_assert(ari_bits32(ari_relu32(-1.0f)) == 0u);
    cr_assert(ari_bits32(ari_relu32(-INFINITY)) == 0u);
    cr_assert(ari_relu32(0x1p-149f) == 0x1p-149f && ari_drelu32(0x1p-149f) == 1.0f);
    cr_assert(ari_bits32(ari_drelu32(0.0f)) == 0u && ari_bits32(ari_drelu32(-0.0f)) == 0u);
    cr_assert(ari_act32(AR_ACT_NONE, -3.5f) == -3.5f && ari_dact32(AR_ACT_NONE, -3.5f) == 1.0f);
}

/* g*sigmoid(1.702*g) to 7, and its slope by differences. */
Test(scalar, gpt_oss_s_gate_is_limited_to_7)
{
    for (int i = -3000; i <= 900; i++) {
        const double x = i * 0.01, g = x > 7.0 ? 7.0 : x, d = 1e-5;
        const double want = g / (1.0 + exp(-1.702 * g));
        const double slope = (ari_clamped64(x + d) - ari_clamped64(x - d)) / (2.0 * d);
        near_to(ari_clamped64(x), want, 1e-14 + 1e-14 * fabs(want));
        near_to((double)ari_clamped32((float)x), ari_clamped64((double)(float)x), 2e-6);
        near_to((double)ari_dclamped32((float)x), ari_dclamped64((double)(float)x), 2e-7);
        if (i != 700)
            near_to(ari_dclamped64(x), slope, 1e-9);
    }
    cr_assert(ari_clamped32(INFINITY) == ari_clamped32(7.0f) && ari_dclamped32(7.0f) > 1.0f);
    cr_assert(ari_bits32(ari_dclamped32(7.5f)) == 0u && ari_bits32(ari_clamped32(-INFINITY)) == MINUS_ZERO);
    cr_assert(ari_gated_act(AR_ACT_CLAMPED, 1.0f, -9.0f) == -6.0f * ari_clamped32(1.0f));
    cr_assert(ari_bits32(ari_gated_dup(AR_ACT_CLAMPED, 1.0f, 7.5f, 1.0f)) == 0u);
    cr_assert(ari_gated_dup(AR_ACT_CLAMPED, 1.0f, 7.0f, 1.0f) == ari_clamped32(1.0f));
}

/* --- the binary64 forms ------------------------------------------------------------------------------------------- */

typedef struct wide_case {
    const char *name;
    double (*ours)(double);
    long double (*reference)(long double);
    double low, high, ulps; /* domain, and the bound in units in the last place of the result */
} wide_case;

static const wide_case wide_cases[] = {
    {"exp64", ari_exp64, expl, -708.0, 709.7, 2.0},
    {"log64", ari_log64, logl, 1e-300, 1e300, 2.0},
    {"log64 near 1", ari_log64, logl, 0.5, 2.0, 2.0},
    {"tanh64", ari_tanh64, tanhl, -22.0, 22.0, 4.0},
    {"sigmoid64", ari_sigmoid64, ld_sigmoid, -700.0, 40.0, 4.0},
    {"gelu_erf64", ari_gelu_erf64, ld_gelu_erf, -3.0, 40.0, 16.0},
    {"gelu_tanh64", ari_gelu_tanh64, ld_gelu_tanh, -3.0, 40.0, 16.0},
    {"silu64", ari_silu64, ld_silu, -700.0, 700.0, 4.0},
};

Test(scalar, binary64_forms_are_good_to_a_few_units)
{
    for (size_t c = 0; c < sizeof wide_cases / sizeof wide_cases[0]; c++) {
        const wide_case *w = &wide_cases[c];
        double largest = 0.0;
        for (int i = 0; i <= 200000; i++) {
            const double x = w->low + (w->high - w->low) * ((double)i / 200000.0);
            const long double r = w->reference((long double)x);
            if ((double)r == 0.0)
                continue;
            const double ulp = ari_scale2(1.0, ari_exponent64((double)r) - 53);
            const double error = (double)(fabsl((long double)w->ours(x) - r) / (long double)ulp);
            largest = error > largest ? error : largest;
        }
        printf("%-13s max %.3f binary64 ulp in [%g, %g]\n", w->name, largest, w->low, w->high);
        cr_assert(largest <= w->ulps, "%s: %.3f", w->name, largest);
    }
}

Test(scalar, binary64_sine_and_cosine_are_good_to_1e_16)
{
    for (int i = -200000; i <= 200000; i++) {
        const double x = i * 5.2428;
        cr_assert(fabsl((long double)ari_sin64(x) - sinl((long double)x)) < 2e-16L, "sin64(%a)", x);
        cr_assert(fabsl((long double)ari_cos64(x) - cosl((long double)x)) < 2e-16L, "cos64(%a)", x);
    }
}

Test(scalar, binary64_forms_have_limits_and_edges)
{
    cr_assert(ari_exp64(710.0) == (double)INFINITY && ari_exp64(-746.0) == 0.0 && ari_exp64(-(double)INFINITY) == 0.0);
    cr_assert(ari_exp64(-744.0) == 0x1p-1073, "a subnormal: %a", ari_exp64(-744.0));
    cr_assert(ari_log64(0.0) == -(double)INFINITY && ari_log64((double)INFINITY) == (double)INFINITY);
    cr_assert(ari_log64(-1.0) != ari_log64(-1.0));
    near_to(ari_log64(0x1p-1074), -744.44007192138122, 1e-13);
    cr_assert(ari_bits64(ari_tanh64(-0.0)) == 0x8000000000000000u && ari_tanh64(1e300) == 1.0);
    cr_assert(ari_sigmoid64(-800.0) == 0.0 && ari_sigmoid64(800.0) == 1.0);
    cr_assert(ari_gelu_erf64(-(double)INFINITY) == 0.0 && ari_gelu_tanh64(-(double)INFINITY) == 0.0);
    cr_assert(ari_dgelu_erf64((double)INFINITY) == 1.0 && ari_dsilu64((double)INFINITY) == 1.0);
}
