/* SPDX-License-Identifier: Apache-2.0 */
/* Row sums, and the element steps of a contraction, against their text in plain arithmetic. */
#include "ref/numerics/integer_sum.h"
#include "ref/numerics/philox.h"
#include "support/together.h"

__extension__ typedef __int128 wide_int;

static uint32_t word(uint64_t i)
{
    return ari_random_u32(0x1257, i, 0, 0);
}

static float random_finite(uint64_t i)
{
    const uint32_t u = word(i);
    return ari_float32((u & 0x7f800000u) == 0x7f800000u ? u & 0xbfffffffu : u);
}

CLAIM(row_bits_leave_room_for_n_terms)
{
    cr_assert(ari_rowsum_bits(0) == 40 && ari_rowsum_bits(1) == 40);
    cr_assert(ari_rowsum_bits((1u << 22) - 1) == 40 && ari_rowsum_bits(1u << 22) == 39);
    cr_assert(ari_rowsum_bits((1u << 23) - 1) == 39 && ari_rowsum_bits(1u << 23) == 38);
    for (size_t n = 1; n < (size_t)1 << 40; n = n * 3 + 1) {
        const int32_t p = ari_rowsum_bits(n);
        const int32_t log_up = (int32_t)ceil(log2((double)n + 1.0)); /* n below 2^40: no power of two is missed */
        cr_assert(p == (62 - log_up < 40 ? 62 - log_up : 40), "n %zu: %d", n, p);
        cr_assert(((wide_int)n << p) < (wide_int)1 << 62, "n %zu", n);
    }
}

/* The sum by its text: e by comparison, q by ldexp and rint, S in 128 bits. */
static double plain_row_sum(const double *x, size_t n)
{
    double largest = 0.0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return (double)NAN;
        largest = fabs(x[i]) > largest ? fabs(x[i]) : largest;
    }
    if (largest == 0.0)
        return 0.0;
    int e = -1100, length = 0;
    while (largest >= ldexp(1.0, e))
        e++;
    while (((size_t)1 << length) < n + 1)
        length++;
    const int p = 62 - length < 40 ? 62 - length : 40;
    wide_int s = 0;
    for (size_t i = 0; i < n; i++)
        s += (wide_int)rint(ldexp(x[i], p - e));
    return ldexp((double)s, e - p);
}

/* The same from the header's steps, the row cut at `cut` as two ranks would hold it, the second one from its end. */
static double stepped_row_sum(const double *x, size_t n, size_t cut)
{
    int32_t e = ARI_EXP_ZERO;
    for (size_t i = 0; i < n; i++)
        e = ari_exponent64(x[i]) > e ? ari_exponent64(x[i]) : e;
    const int32_t p = ari_rowsum_bits(n);
    int64_t left = 0, right = 0;
    for (size_t i = 0; i < cut; i++)
        left = ari_add64(left, ari_rowsum_quantise(x[i], e, p));
    for (size_t i = n; i-- > cut;)
        right = ari_add64(right, ari_rowsum_quantise(x[i], e, p));
    return ari_rowsum_value(ari_add64(left, right), e, p);
}

CLAIM(row_sums_match_their_text_however_they_are_cut)
{
    static double x[4000];
    for (uint64_t trial = 0; trial < 300; trial++) {
        const size_t n = 1 + word(trial) % 4000;
        for (size_t i = 0; i < n; i++) { /* fp32 values of all sizes, of like sizes, and products of two */
            const double a = (double)random_finite(trial * 10000 + 2 * i),
                         b = (double)random_finite(trial * 10000 + 2 * i + 1);
            const double like = (double)(int32_t)word(trial * 10000 + 5000 + i) * 0x1p-31;
            x[i] = trial % 3 == 0 ? a : (trial % 3 == 1 ? like : a * b);
        }
        const double want = plain_row_sum(x, n);
        for (size_t cut = 0; cut <= n; cut += n / 3 + 1) {
            const double got = stepped_row_sum(x, n, cut);
            cr_assert(ari_bits64(got) == ari_bits64(want), "trial %d cut %zu: %a, expected %a", (int)trial, cut, got,
                      want);
        }
    }
}

CLAIM(row_sum_edges)
{
    const double zeros[] = {0.0, -0.0}, tiny[] = {0x1p-298, 0x1p-298, -0x1p-297}, smallest[] = {0x1p-1074, 0x1p-1073};
    const double bad[] = {1.0, (double)INFINITY}, nan[] = {(double)NAN};
    cr_assert(ari_bits64(stepped_row_sum(zeros, 2, 1)) == 0u, "a row of zeros is +0");
    cr_assert(ari_bits64(stepped_row_sum(tiny, 3, 1)) == 0u, "products of two subnormals cancel exactly, to +0");
    cr_assert(stepped_row_sum(smallest, 2, 1) == 0x3p-1074, "binary64 subnormals too");
    cr_assert(stepped_row_sum(bad, 2, 1) != stepped_row_sum(bad, 2, 1) && isnan(stepped_row_sum(nan, 1, 0)));
    cr_assert(ari_rowsum_quantise(5.0, ARI_EXP_ZERO, 40) == 0 && ari_rowsum_quantise(5.0, ARI_EXP_NONFINITE, 40) == 0);
    cr_assert(ari_rowsum_quantise((double)NAN, 3, 40) == 0 && ari_rowsum_quantise(-(double)INFINITY, 3, 40) == 0);
}

CLAIM(row_steps_round_ties_to_even)
{
    cr_assert(ari_rowsum_quantise(0.5, 40, 40) == 0 && ari_rowsum_quantise(1.5, 40, 40) == 2);
    cr_assert(ari_rowsum_quantise(-2.5, 40, 40) == -2 && ari_rowsum_quantise(-3.5, 40, 40) == -4);
}

static int32_t plain_quantise(float a, int32_t c, int32_t e)
{
    const double y = rint(ldexp((double)a, c + 25 - e));
    return (int32_t)fmin(fmax(y, -33554431.0), 33554431.0);
}

CLAIM(contraction_step_matches_its_text_for_every_size)
{
    for (uint64_t i = 0; i < 300000; i++) {
        const float a = random_finite(2 * i);
        const int32_t c = (int32_t)(word(2 * i + 1) % 277) - 148;
        const int32_t own = ari_exponent32(a) == ARI_EXP_ZERO ? 0 : ari_exponent32(a) + c;
        const int32_t e = own + (int32_t)((word(2 * i + 1) >> 16) % 60); /* the row's largest is the same or larger */
        cr_assert(ari_contract_quantise(a, c, e) == plain_quantise(a, c, e), "%a c %d e %d: %d, expected %d", (double)a,
                  c, e, ari_contract_quantise(a, c, e), plain_quantise(a, c, e));
    }
}

CLAIM(contraction_step_clamps_and_flags)
{
    cr_assert(ari_contract_quantise(0x1.fffffep0f, 0, 1) == 33554430);
    cr_assert(ari_contract_quantise(0x1.fffffep0f, -200, -199) == 33554430);
    cr_assert(ari_contract_quantise(4.0f, 0, 1) == ARI_CONTRACT_LIMIT, "never past the limit");
    cr_assert(ari_contract_quantise(-4.0f, 0, 1) == -ARI_CONTRACT_LIMIT);
    cr_assert(ari_contract_quantise(1.0f, 0, ARI_EXP_ZERO) == 0 &&
              ari_contract_quantise(1.0f, 0, ARI_EXP_NONFINITE) == 0);
    cr_assert(ari_contract_quantise(NAN, 0, ARI_EXP_NONFINITE) == 0);
    cr_assert(ari_contract_quantise(-0.0f, 3, 5) == 0);
}

CLAIM(exponent_of_a_shifted_value_is_that_of_the_product)
{
    for (uint64_t i = 0; i < 100000; i++) {
        const float a = random_finite(2 * i);
        const int32_t c = (int32_t)(word(2 * i + 1) % 277) - 148, sign = word(2 * i + 1) >> 31 ? 1 : -1;
        const int32_t got = ari_contract_exponent(a, ari_contract_shift(c, sign));
        cr_assert(got == ari_exponent64(ldexp((double)a, sign * c)), "%a c %d sign %d: %d", (double)a, c, sign, got);
    }
}

CLAIM(columns_of_zeros_take_part_in_no_exponent_but_flag)
{
    const int32_t none = ari_contract_shift(ARI_EXP_ZERO, -1);
    cr_assert(ari_contract_exponent(3.0f, none) == ARI_EXP_ZERO);
    cr_assert(ari_contract_exponent(NAN, none) == ARI_EXP_NONFINITE);
    cr_assert(ari_contract_exponent(-INFINITY, -7) == ARI_EXP_NONFINITE);
    cr_assert(ari_contract_exponent(-0.0f, 7) == ARI_EXP_ZERO);
    cr_assert(ari_contract_exponent(3.0f, ari_contract_shift(ARI_EXP_NONFINITE, 1)) == 2,
              "a flagged column counts as 0");
}

CLAIM(contraction_value_rounds_twice_as_the_text_says)
{
    for (uint64_t i = 0; i < 200000; i++) {
        const uint64_t high = word(3 * i), low = word(3 * i + 1);
        const int64_t s = (int64_t)((high << 32) | low) >> (i % 64);
        const int32_t e = (int32_t)(word(3 * i + 2) % 500) - 250, f = (int32_t)((word(3 * i + 2) >> 16) % 200) - 100;
        const float want = (float)ldexp((double)s, e + f - 50);
        cr_assert(ari_bits32(ari_contract_value(s, e, f)) == ari_bits32(want), "%lld, %d, %d", (long long)s, e, f);
    }
}

CLAIM(contraction_value_carries_flags)
{
    cr_assert(ari_bits32(ari_contract_value(0, 3, 4)) == 0u);
    cr_assert(ari_bits32(ari_contract_value(7, ARI_EXP_ZERO, 4)) == 0u);
    cr_assert(ari_bits32(ari_contract_value(7, 4, ARI_EXP_ZERO)) == 0u);
    cr_assert(ari_bits32(ari_contract_value(0, ARI_EXP_NONFINITE, 4)) == ARI_NAN_BITS);
    cr_assert(ari_bits32(ari_contract_value(0, ARI_EXP_ZERO, ARI_EXP_NONFINITE)) == ARI_NAN_BITS, "NaN wins over zero");
    cr_assert(ari_bits32(ari_contract_value2(0, 0, ARI_EXP_NONFINITE, ARI_EXP_ZERO)) == ARI_NAN_BITS);
    cr_assert(ari_bits32(ari_contract_value(INT64_MAX, 128, 128)) == 0x7f800000u, "a finite sum may overflow");
    cr_assert(ari_bits32(ari_contract_value(INT64_MIN, 128, 128)) == 0xff800000u);
}

static uint32_t plain_value2(int64_t hi, int64_t lo, int32_t e, int32_t f)
{
    const wide_int exact = (wide_int)hi * ((wide_int)1 << 32) + lo;
    return ari_bits32((float)ldexp((double)exact, e + f - 50));
}

CLAIM(two_limbs_equal_the_128_bit_integer)
{
    for (uint64_t i = 0; i < 300000; i++) {
        const uint64_t a = word(4 * i), b = word(4 * i + 1), c = word(4 * i + 2), d = word(4 * i + 3);
        const int64_t hi = (int64_t)((a << 32) | b) >> (i % 63 + 1), lo = (int64_t)((c << 32) | d) >> (i % 17);
        const uint32_t got = ari_bits32(ari_contract_value2(hi, lo, 3, -20)), want = plain_value2(hi, lo, 3, -20);
        cr_assert(got == want, "%lld, %lld: %08x, expected %08x", (long long)hi, (long long)lo, got, want);
    }
}

/* fp32 ties that only the lowest bit of a long sum breaks; fl64 comes between, so the tie must be one of 53 bits. */
CLAIM(two_limbs_see_the_last_bit)
{
    for (int bits = 33; bits < 62; bits++) {
        const int64_t one = 1LL << bits;
        for (int64_t nudge = -1; nudge <= 1; nudge++)
            for (int64_t sign = -1; sign <= 1; sign += 2)
                for (int shift = 0; shift < 60 && shift < bits; shift++) {
                    const int64_t hi = sign * (one + (one >> shift)), lo = nudge;
                    cr_assert(ari_bits32(ari_contract_value2(hi, lo, 0, 0)) == plain_value2(hi, lo, 0, 0), "%lld, %lld",
                              (long long)hi, (long long)lo);
                    const uint64_t odd = (uint64_t)shift + 1u;
                    const wide_int exact = (wide_int)hi * ((wide_int)1 << 32) + (wide_int)odd;
                    cr_assert(ari_bits64(ari_double96(hi, odd)) == ari_bits64((double)exact));
                }
    }
}

CLAIM(the_block_is_the_longest_that_fits)
{
    const wide_int largest = (wide_int)ARI_CONTRACT_LIMIT * ARI_CONTRACT_LIMIT, two_63 = (wide_int)1 << 63;
    cr_assert(largest * ARI_CONTRACT_BLOCK < two_63);
}

EVERY_CLAIM(integer_sum)
