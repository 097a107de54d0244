/* SPDX-License-Identifier: Apache-2.0 */
/* The baseline's own sums against the other texts of the same definitions: the contraction in 128-bit integers, the
 * (t, H, L) accumulator, the element steps of a row sum. Exact claims, compared bit by bit. */
#include "tests/baseline/support.h"

#include "ref/baseline/run.h"
#include "ref/numerics/accumulator.h"
#include "ref/numerics/integer_sum.h"
#include "support/together.h"
#include "tests/support/contraction.h"

static uint64_t state = 88172645463325252U;

static uint32_t draw(void)
{
    state ^= state << 13; /* Marsaglia's xorshift64 */
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32);
}

/* A finite fp32 value whose exponent lies `spread` binades either side of 1. */
static float draw_float(int spread)
{
    const double unit = (double)draw() * 0x1p-31 - 1.0;
    const int e = spread == 0 ? 0 : (int)(draw() % (uint32_t)(2 * spread + 1)) - spread;
    return (float)ldexp(unit, e);
}

static const ar_baseline_options exact_options = {.mode = AR_MODE_EXACT};

static ari_bl_run exact_run(void)
{
    return (ari_bl_run){.o = &exact_options, .b = 1, .s = 1, .tokens = 1};
}

/* m x k and n x k from a and b, both ways. */
static void check_contraction(const char *what, size_t m, size_t n, size_t k, const float *a, const float *b,
                              bool scale)
{
    ari_bl_run run = exact_run();
    OWNED(free)
    double *c = malloc(m * n * sizeof *c), *wa = malloc(m * k * sizeof *wa), *wb = malloc(n * k * sizeof *wb);
    OWNED(free) float *expected = malloc(m * n * sizeof *expected);
    cr_assert(c != NULL && wa != NULL && wb != NULL && expected != NULL);
    for (size_t i = 0; i < m * k; i++)
        wa[i] = (double)a[i];
    for (size_t kk = 0; kk < k; kk++) /* b transposed: the strides must be followed */
        for (size_t j = 0; j < n; j++)
            wb[kk * n + j] = (double)b[j * k + kk];
    const ari_bl_matrix am = {wa, k, 1}, bm = {wb, 1, n};
    cr_assert_ok(ari_bl_contract(&run, c, m, n, k, am, bm, scale));
    cr_assert_ok(ar_contract_definition(expected, m, n, k, a, (ptrdiff_t)k, 1, b, (ptrdiff_t)k, 1, scale, false));
    for (size_t i = 0; i < m * n; i++) {
        const uint32_t got = ari_bits32((float)c[i]), want = ari_bits32(expected[i]);
        cr_assert(got == want, "%s: element [%zu, %zu] is %08x, expected %08x", what, i / n, i % n, got, want);
    }
    cr_assert_null(run.top, "memory is left");
}

CLAIM(contraction_is_the_definition_for_every_spread_of_exponents)
{
    enum { M = 5, N = 7, K = 33 };
    static float a[M * K], b[N * K];
    const int spread[] = {0, 3, 20, 70, 126};
    for (size_t r = 0; r < 5 * 40; r++) {
        for (size_t i = 0; i < M * K; i++)
            a[i] = draw() % 9 == 0 ? 0.0F : draw_float(spread[r % 5]);
        for (size_t i = 0; i < N * K; i++)
            b[i] = draw() % 9 == 0 ? -0.0F : draw_float(spread[r % 5]);
        check_contraction("random", M, N, K, a, b, r % 2 == 0);
    }
}

CLAIM(contraction_keeps_the_flags_of_the_definition)
{
    enum { M = 4, N = 5, K = 6 };
    float a[M * K], b[N * K];
    for (size_t i = 0; i < M * K; i++)
        a[i] = draw_float(4);
    for (size_t i = 0; i < N * K; i++)
        b[i] = draw_float(4);
    for (size_t kk = 0; kk < K; kk++)
        a[2 * K + kk] = b[3 * K + kk] = 0.0F; /* a row of zeros in each */
    for (size_t j = 0; j < N; j++)
        b[j * K + 4] = 0.0F; /* a column of zeros */
    check_contraction("zeros", M, N, K, a, b, true);
    a[0 * K + 4] = NAN; /* beside the column of zeros: flags its row all the same */
    check_contraction("NaN in A", M, N, K, a, b, true);
    b[1 * K + 2] = -INFINITY; /* also against A's row of zeros */
    check_contraction("infinity in B", M, N, K, a, b, true);
    check_contraction("infinity in B, not scaled", M, N, K, a, b, false);
}

CLAIM(contraction_of_more_than_8191_terms_is_the_definition)
{
    enum { M = 2, N = 3, K = 3 * 8191 + 5 };
    static float a[M * K], b[N * K];
    for (size_t i = 0; i < M * K; i++)
        a[i] = draw_float(1);
    for (size_t i = 0; i < N * K; i++)
        b[i] = draw_float(1);
    check_contraction("long", M, N, K, a, b, true);
    for (size_t i = 0; i < M * K; i++) /* the largest integers there are: the sum leaves 64 bits */
        a[i] = 0x1.fffffep0F;
    for (size_t i = 0; i < N * K; i++)
        b[i] = 0x1.fffffep0F;
    check_contraction("longest", M, N, K, a, b, true);
}

CLAIM(contraction_overflows_and_underflows_as_the_definition)
{
    const float a[] = {0x1p127F, 0x1p127F, 0x1p-149F, -0x1p-149F}, b[] = {4.0F, 4.0F, 0.25F, -0.5F};
    check_contraction("overflow", 2, 2, 2, a, b, true);
    check_contraction("overflow, not scaled", 2, 2, 2, a, b, false);
}

CLAIM(slices_give_the_accumulators_bits_in_any_order)
{
    ar_baseline_options in_bf16 = exact_options;
    in_bf16.bf16 = true;
    for (int r = 0; r < 6000; r++) {
        const bool narrow = r % 2 != 0; /* a matrix whose gradient is stored as bf16: slices of 13 bits */
        ari_bl_run run = exact_run();
        run.o = narrow ? &in_bf16 : &exact_options;
        float v[40];
        const size_t n = 1 + draw() % 40;
        for (size_t i = 0; i < n; i++)
            v[i] = draw() % 8 == 0 ? ari_float32(draw() & 0xff7fffffU) : draw_float(r / 2 % 127);
        uint8_t t = 0;
        int64_t high = 0, low = 0;
        ari_bl_sums sums;
        cr_assert_ok(ari_bl_sums_open(&run, &sums, 2, true));
        for (size_t i = 0; i < n; i++) {
            ari_acc_add(&t, &high, &low, v[i], narrow);
            ari_bl_sums_add(&sums, 1, &(double){(double)v[n - 1 - i]}, 1);
        }
        const uint32_t got = ari_bits32((float)ari_bl_sums_value(&sums, 1));
        const uint32_t want = ari_bits32(ari_acc_value(t, high, low, narrow));
        cr_assert(got == want, "round %d, %zu values: %08x, expected %08x", r, n, got, want);
        cr_assert_eq(ari_bits64(ari_bl_sums_value(&sums, 0)), 0U);
        ari_bl_release(&run, NULL);
    }
}

CLAIM(one_value_comes_back_and_a_nan_stays)
{
    ari_bl_run run = exact_run();
    const float values[] = {0x1p-149F, -0x1.fffffep127F, 1.0F, -0x1.234566p-20F, 0x1p-126F, 0x1.8p31F};
    ari_bl_sums sums;
    cr_assert_ok(ari_bl_sums_open(&run, &sums, 8, false));
    for (size_t i = 0; i < 6; i++) {
        ari_bl_sums_add(&sums, i, &(double){(double)values[i]}, 1);
        cr_assert_eq(ari_bits32((float)ari_bl_sums_value(&sums, i)), ari_bits32(values[i]));
    }
    ari_bl_sums_add(&sums, 6, &(double){-0.0}, 1);
    cr_assert_eq(ari_bits32((float)ari_bl_sums_value(&sums, 6)), 0U);
    ari_bl_sums_add(&sums, 7, (double[]){(double)INFINITY}, 1);
    ari_bl_sums_add(&sums, 7, &(double){1.0}, 1);
    cr_assert_eq(ari_bits32((float)ari_bl_sums_value(&sums, 7)), ARI_NAN_BITS);
    ari_bl_release(&run, NULL);
}

CLAIM(row_sum_is_the_definition)
{
    const ari_bl_run run = exact_run();
    static double x[300];
    for (int r = 0; r < 300; r++) {
        const size_t n = (size_t)r + 1;
        int32_t e = ARI_EXP_ZERO;
        for (size_t i = 0; i < n; i++) {
            x[i] = r % 3 == 0 ? (double)draw_float(10) : (double)draw_float(126) * (double)draw_float(126);
            e = ari_exponent64(x[i]) > e ? ari_exponent64(x[i]) : e;
        }
        int64_t s = 0;
        const int32_t p = ari_rowsum_bits(n);
        for (size_t i = 0; i < n; i++)
            s += ari_rowsum_quantise(x[n - 1 - i], e, p);
        cr_assert_eq(ari_bits64(ari_bl_row_sum(&run, x, n)), ari_bits64(ari_rowsum_value(s, e, p)));
    }
    x[1] = NAN;
    cr_assert_eq(ari_bits32((float)ari_bl_row_sum(&run, x, 3)), ARI_NAN_BITS);
    x[0] = x[1] = -0.0;
    cr_assert_eq(ari_bits64(ari_bl_row_sum(&run, x, 2)), 0U);
}

EVERY_CLAIM(baseline_sums)
