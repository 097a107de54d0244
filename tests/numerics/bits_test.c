/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/numerics/bits.h"
#include "ref/numerics/philox.h"
#include "support/together.h"

/* The definition of an exponent, by comparison alone: the smallest e with |x| < 2^e. */
static bool is_exponent(double x, int32_t e)
{
    const double magnitude = fabs(x);
    return (e > 1023 || magnitude < ldexp(1.0, e)) && magnitude >= ldexp(1.0, e - 1);
}

CLAIM(exponent_is_the_smallest_power_of_two_above_every_fp32_value)
{
    for (uint64_t u = 0; u <= UINT32_MAX; u += 4099) {
        const float x = ari_float32((uint32_t)u);
        const int32_t e = ari_exponent32(x);
        if (!isfinite(x))
            cr_assert(e == ARI_EXP_NONFINITE, "%08x", (uint32_t)u);
        else if (x == 0.0f)
            cr_assert(e == ARI_EXP_ZERO, "%08x", (uint32_t)u);
        else
            cr_assert(is_exponent((double)x, e), "%08x gives %d", (uint32_t)u, e);
    }
}

CLAIM(exponent_edges_of_fp32)
{
    cr_assert(ari_exponent32(0.0f) == ARI_EXP_ZERO && ari_exponent32(-0.0f) == ARI_EXP_ZERO);
    cr_assert(ari_exponent32(0x1p-149f) == -148 && ari_exponent32(0x1.fffffcp-127f) == -126);
    cr_assert(ari_exponent32(0x1p-126f) == -125 && ari_exponent32(1.0f) == 1 && ari_exponent32(-0.75f) == 0);
    cr_assert(ari_exponent32(0x1.fffffep127f) == 128);
    cr_assert(ari_exponent32(INFINITY) == ARI_EXP_NONFINITE && ari_exponent32(-INFINITY) == ARI_EXP_NONFINITE);
    cr_assert(ari_exponent32(ari_float32(0x7f800001u)) == ARI_EXP_NONFINITE);
}

CLAIM(exponent_edges_of_binary64)
{
    cr_assert(ari_exponent64(-0.0) == ARI_EXP_ZERO && ari_exponent64(0x1p-1074) == -1073);
    cr_assert(ari_exponent64(0x1.8p-1023) == -1022 && ari_exponent64(0x1p-1022) == -1021);
    cr_assert(ari_exponent64(1.0) == 1 && ari_exponent64(0x1.fffffffffffffp1023) == 1024);
    cr_assert(ari_exponent64(-(double)INFINITY) == ARI_EXP_NONFINITE);
    cr_assert(ari_exponent64((double)NAN) == ARI_EXP_NONFINITE);
    for (int e = -1073; e <= 1023; e++)
        cr_assert(is_exponent(ldexp(1.25, e), ari_exponent64(ldexp(1.25, e))), "2^%d", e);
}

CLAIM(scale2_equals_ldexp_for_every_shift)
{
    static const double values[] = {1.0,        -1.5,        0x1.fffffffffffffp0, 0x1.0000000000001p-1022, 0x1p-1074,
                                    0x1.8p-700, -0x1.7p1023, 0x1.555555p600,      0x1.fffffffffffffp-500,  0x3p-1074};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        for (int32_t k = -2300; k <= 2300; k++) {
            const double want = ldexp(values[i], k);
            cr_assert(ari_bits64(ari_scale2(values[i], k)) == ari_bits64(want), "%a * 2^%d: %a, expected %a", values[i],
                      k, ari_scale2(values[i], k), want);
        }
    cr_assert(ari_scale2(0x1p-1074, INT32_MAX) == (double)INFINITY && ari_scale2(0x1p1023, INT32_MIN) == 0.0);
    cr_assert(ari_scale2(0.0, INT32_MAX) == 0.0);
}

CLAIM(keys_order_like_values_and_come_back)
{
    float before = -0x1.fffffep127f;
    for (uint64_t step = 0; step < 0x1fe00000u; step += 9973) { /* every finite value from the smallest up, by key */
        const int32_t key = (int32_t)((int64_t)step * 8 - 0x7f7fffff);
        if (key >= 0x7f800000)
            break;
        const float x = ari_key32_value(key);
        cr_assert(ari_key32(x) == key, "key %d became %d", key, ari_key32(x));
        cr_assert(x >= before, "%a after %a", (double)x, (double)before);
        before = x;
    }
    cr_assert(ari_key32(-0.0f) == 0 && ari_key32(0.0f) == 0);
    cr_assert(ari_key32(-0x1p-149f) == -1 && ari_key32(0x1p-149f) == 1);
    cr_assert(ari_bits32(ari_key32_value(0)) == 0u);
}

CLAIM(keys_of_non_finite_values_win_every_maximum)
{
    cr_assert(ari_key32(INFINITY) == INT32_MAX && ari_key32(-INFINITY) == INT32_MAX);
    cr_assert(ari_key32(ari_float32(0xffc00000u)) == INT32_MAX && ari_key32(ari_float32(0x7f800001u)) == INT32_MAX);
    cr_assert(ari_bits32(ari_key32_value(INT32_MAX)) == ARI_NAN_BITS);
    cr_assert(ari_key32(0x1.fffffep127f) < INT32_MAX && ari_key32(-0x1.fffffep127f) > INT32_MIN);
}

CLAIM(canonical_changes_nan_alone)
{
    cr_assert(ari_bits32(ari_canonical32(ari_float32(0xffffffffu))) == ARI_NAN_BITS);
    cr_assert(ari_bits32(ari_canonical32(ari_float32(0x7f800001u))) == ARI_NAN_BITS);
    cr_assert(ari_bits32(ari_canonical32(-0.0f)) == 0x80000000u);
    cr_assert(ari_bits32(ari_canonical32(-INFINITY)) == 0xff800000u);
    cr_assert(ari_bits32(ari_canonical32(0x1p-149f)) == 1u);
}

CLAIM(int64_becomes_the_nearest_binary64)
{
    static const int64_t edges[] = {0,
                                    1,
                                    -1,
                                    INT64_MAX,
                                    INT64_MIN,
                                    (1LL << 53) + 1,
                                    -((1LL << 53) + 1),
                                    1LL << 32,
                                    -(1LL << 32),
                                    (1LL << 54) + 2,
                                    (1LL << 54) + 6,
                                    0xffffffffLL,
                                    -0xffffffffLL};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++)
        cr_assert(ari_bits64(ari_double64(edges[i])) == ari_bits64((double)edges[i]), "%lld", (long long)edges[i]);
    for (uint64_t i = 0; i < 200000; i++) {
        const uint64_t high = ari_random_u32(11, 2 * i, 0, 0), low = ari_random_u32(11, 2 * i + 1, 0, 0);
        const int64_t s = (int64_t)((high << 32) | low) >> (i % 64);
        cr_assert(ari_bits64(ari_double64(s)) == ari_bits64((double)s), "%lld", (long long)s);
    }
}

CLAIM(rint_rounds_ties_to_even)
{
    cr_assert(ari_rint(0.5) == 0.0 && ari_rint(1.5) == 2.0 && ari_rint(-2.5) == -2.0 && ari_rint(-0.25) == 0.0);
    cr_assert(ari_bits64(ari_rint(-0.25)) == 0x8000000000000000u);
    cr_assert(ari_rint(0x1.8p60) == 0x1.8p60);
}

EVERY_CLAIM(bits)
