/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/reduce.h"
#include "tests/sim/plain.h"
#include "tests/support/test.h"

/* The kernels against the plain operations, element by element, with NaN, infinities, zeros of both signs and
 * subnormals among the inputs, and lengths that leave every remainder of a vector. */
enum { LENGTH = 133, ARRAYS = 4, ROUNDS = 40 };
typedef struct arrays {
    ar_dtype t;
    ar_op op;
    unsigned char in[ARRAYS][8 * LENGTH], out[8 * LENGTH];
} arrays;

static void fill(arrays *a, uint64_t seed)
{
    for (int i = 0; i < ARRAYS; i++)
        plain_fill_with(a->in[i], a->t, seed, i, LENGTH, true);
}

/* Elements [0, n) of `out` are in[0] op in[1] op ...; where a sum or product is NaN, any NaN is. */
static void check(const arrays *a, const void *out, int joined, size_t n)
{
    const size_t e = plain_size(a->t);
    const bool any_nan = plain_is_float(a->t) && a->op != AR_MAX && a->op != AR_MIN;
    for (size_t i = 0; i < n; i++) {
        unsigned char want[8];
        const unsigned char *got = (const unsigned char *)out + i * e;
        memcpy(want, a->in[0] + i * e, e);
        for (int k = 1; k < joined; k++)
            plain_combine(want, a->in[k] + i * e, a->t, a->op);
        if (any_nan && isnan(plain_load_float(want, a->t)) && isnan(plain_load_float(got, a->t)))
            continue;
        cr_assert_eq(first_difference(want, got, e), -1, "%s op %d of %d, element %zu of %zu", ar_dtype_name(a->t),
                     (int)a->op, joined, i, n);
    }
}

static void check_kernels(arrays *a, size_t n)
{
    const ari_reduce kernel = ari_reduce_kernel(a->t, a->op);
    const size_t bytes = n * plain_size(a->t);
    static const unsigned char untouched[8] = {7, 7, 7, 7, 7, 7, 7, 7};
    unsigned char place[8 * LENGTH];
    memset(a->out, 7, sizeof a->out);
    kernel.pair(a->out, a->in[0], a->in[1], n);
    check(a, a->out, 2, n);
    kernel.four(a->out, a->in[0], a->in[1], a->in[2], a->in[3], n);
    check(a, a->out, 4, n);
    if (n < LENGTH)
        cr_assert_eq(first_difference(a->out + bytes, untouched, plain_size(a->t)), -1, "past the end");
    for (int k = 0; k < ARRAYS; k++) {
        const void *in[ARRAYS] = {a->in[0], a->in[1], a->in[2], a->in[3]};
        memcpy(place, a->in[k], sizeof place);
        in[k] = place;
        kernel.four(place, in[0], in[1], in[2], in[3], n);
        check(a, place, 4, n);
        memcpy(place, a->in[k], sizeof place);
        if (k < 2)
            kernel.pair(place, in[0], in[1], n);
        if (k < 2)
            check(a, place, 2, n);
    }
}

Test(reduce, every_type_and_operation_is_the_plain_one_in_place_or_not)
{
    arrays a;
    for (int t = 0; t < PLAIN_DTYPES; t++) {
        for (int op = 0; op < PLAIN_OPS; op++) {
            a.t = plain_dtypes[t];
            a.op = (ar_op)op;
            for (size_t round = 0; round < ROUNDS; round++) {
                fill(&a, round);
                check_kernels(&a, round < 34 ? round : LENGTH - round % 3);
            }
        }
    }
}

static void expect_f32(ar_op op, float x, float y, uint32_t bits)
{
    float out;
    ari_reduce_kernel(AR_F32, op).pair(&out, &x, &y, 1);
    cr_assert_eq(first_difference(&out, &bits, 4), -1, "op %d of %a and %a is %a", (int)op, (double)x, (double)y,
                 (double)out);
}

Test(reduce, maximum_and_minimum_of_floats_know_nan_and_the_sign_of_zero)
{
    expect_f32(AR_MAX, 0.0f, -0.0f, 0);
    expect_f32(AR_MAX, -0.0f, 0.0f, 0);
    expect_f32(AR_MAX, -0.0f, -0.0f, 0x80000000u);
    expect_f32(AR_MIN, 0.0f, -0.0f, 0x80000000u);
    expect_f32(AR_MIN, -0.0f, 0.0f, 0x80000000u);
    expect_f32(AR_MAX, -NAN, INFINITY, 0x7fc00000u);
    expect_f32(AR_MIN, 1.0f, -NAN, 0x7fc00000u);
    expect_f32(AR_MAX, -INFINITY, -2.0f, 0xc0000000u);
    expect_f32(AR_MIN, -1.0f, -2.0f, 0xc0000000u);
}

static void expect_half(ar_dtype t, ar_op op, uint16_t x, uint16_t y, uint16_t want)
{
    uint16_t out;
    ari_reduce_kernel(t, op).pair(&out, &x, &y, 1);
    cr_assert_eq(out, want, "%s op %d of %04x and %04x is %04x, not %04x", ar_dtype_name(t), (int)op, x, y, out, want);
}

Test(reduce, sixteen_bits_round_after_each_operation)
{
    expect_half(AR_BF16, AR_SUM, 0x4380, 0x3f80, 0x4380);      /* 256 + 1: a tie, to even */
    expect_half(AR_BF16, AR_SUM, 0x4381, 0x3f80, 0x4382);      /* 258 + 1: a tie, to even */
    expect_half(AR_BF16, AR_SUM, 0x7f7f, 0x7f7f, 0x7f80);      /* the largest, twice: infinity */
    expect_half(AR_F16, AR_SUM, 0x6800, 0x3c00, 0x6800);       /* 2048 + 1 */
    expect_half(AR_F16, AR_SUM, 0x0001, 0x0001, 0x0002);       /* subnormal */
    expect_half(AR_F16, AR_MAX, 0xfe01, 0x3c00, 0x7e00);       /* NaN */
    expect_half(AR_BF16, AR_MIN, 0x0000, 0x8000, 0x8000);      /* -0 */
    const uint16_t ones[4] = {0x4380, 0x3f80, 0x3f80, 0x3f80}; /* 256 + 1 + 1 + 1, rounded thrice */
    uint16_t out;
    ari_reduce_kernel(AR_BF16, AR_SUM).four(&out, &ones[0], &ones[1], &ones[2], &ones[3], 1);
    cr_assert_eq(out, 0x4380);
}

Test(reduce, integers_wrap)
{
    const int32_t large[2] = {INT32_MAX, 1};
    int32_t i32 = -7;
    uint8_t u8[2] = {200, 100};
    ari_reduce_kernel(AR_I32, AR_SUM).pair(&i32, &large[0], &large[1], 1);
    cr_assert_eq(i32, INT32_MIN);
    ari_reduce_kernel(AR_U8, AR_SUM).pair(u8, &u8[0], &u8[1], 1);
    cr_assert_eq(u8[0], 44);
}
