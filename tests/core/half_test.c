/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/float_bits.h"
#include "support/together.h"
#include "tests/sim/plain_number.h"

/* BF16 and F16 against their definition in exact double arithmetic: all 65,536 values one way, and the other way every
 * boundary between two neighbours with the fp32 numbers beside it. */
typedef struct format {
    const char *name;
    ar_dtype dtype;
    float (*widen)(uint16_t h);
    uint16_t (*round)(float x);
} format;

static const format formats[2] = {{"BF16", AR_BF16, ari_f32_of_bf16, ari_bf16_of_f32},
                                  {"F16", AR_F16, ari_f32_of_f16, ari_f16_of_f32}};

static int infinity_of(const format *f)
{
    return plain_half_infinity(f->dtype);
}

static double value_of(const format *f, int code)
{
    return plain_half_magnitude(f->dtype, code);
}

static void expect_rounded(const format *f, double x, int code)
{
    const float f32 = (float)x;
    cr_assert_eq((double)f32, x, "%s: %a is an fp32 number", f->name, x);
    cr_assert_eq(f->round(f32), code, "%s of %a: %04x, %04x expected", f->name, x, f->round(f32), code);
    cr_assert_eq(f->round(-f32), code | 0x8000, "%s of %a: %04x, %04x expected", f->name, -x, f->round(-f32),
                 code | 0x8000);
}

CLAIM(every_code_widens_to_its_value)
{
    for (int which = 0; which < 2; which++) {
        const format *f = &formats[which];
        for (int code = 0; code < 65536; code++) {
            const int magnitude = code & 0x7fff;
            const float x = f->widen((uint16_t)code);
            cr_assert_eq(ari_bits32(x) >> 31, (uint32_t)code >> 15, "%s %04x: sign", f->name, code);
            if (magnitude > infinity_of(f))
                cr_assert(isnan(x), "%s %04x: %a", f->name, code, (double)x);
            else if (magnitude == infinity_of(f))
                cr_assert(isinf(x), "%s %04x: %a", f->name, code, (double)x);
            else
                cr_assert_eq((double)fabsf(x), value_of(f, magnitude), "%s %04x: %a", f->name, code, (double)x);
        }
    }
}

CLAIM(every_code_survives_the_way_there_and_back)
{
    for (int which = 0; which < 2; which++) {
        const format *f = &formats[which];
        for (int code = 0; code < 65536; code++) {
            const uint16_t back = f->round(f->widen((uint16_t)code));
            if ((code & 0x7fff) > infinity_of(f))
                cr_assert_gt(back & 0x7fff, infinity_of(f), "%s %04x: NaN became %04x", f->name, code, back);
            else
                cr_assert_eq(back, code, "%s %04x became %04x", f->name, code, back);
        }
    }
}

CLAIM(ties_go_to_the_even_neighbour_and_all_else_to_the_nearest)
{
    for (int which = 0; which < 2; which++) {
        const format *f = &formats[which];
        for (int code = 0; code < infinity_of(f); code++) {
            const double low = value_of(f, code), high = value_of(f, code + 1), middle = low + (high - low) / 2;
            const int even = code % 2 == 0 ? code : code + 1;
            expect_rounded(f, low, code);
            expect_rounded(f, middle, even);
            if ((float)middle > 0)
                expect_rounded(f, (double)nextafterf((float)middle, 0), code);
            expect_rounded(f, (double)nextafterf((float)middle, INFINITY), code + 1);
        }
    }
}

CLAIM(random_numbers_round_to_the_nearest)
{
    uint64_t state = 1;
    for (int i = 0; i < 2000000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
        const float x = fabsf(ari_float32((uint32_t)(state >> 32)));
        for (int which = 0; which < 2; which++) {
            const format *f = &formats[which];
            const int code = f->round(x), infinity = infinity_of(f);
            if (isnan(x)) {
                cr_assert(code > infinity && code <= 0x7fff, "%s of NaN: %04x", f->name, code);
                continue;
            }
            cr_assert_leq(code, infinity, "%s of %a: %04x", f->name, (double)x, code);
            const double limit = value_of(f, infinity), at = (double)x < limit ? (double)x : limit;
            const double off = fabs(at - value_of(f, code));
            if (code > 0)
                cr_assert_leq(off, fabs(at - value_of(f, code - 1)), "%s of %a: %04x", f->name, (double)x, code);
            if (code < infinity)
                cr_assert_leq(off, fabs(at - value_of(f, code + 1)), "%s of %a: %04x", f->name, (double)x, code);
        }
    }
}

CLAIM(nan_stays_nan_where_only_its_lowest_bits_say_so)
{
    const float nan = ari_float32(0xff800001u);
    cr_assert_eq(ari_bf16_of_f32(nan), 0xffc0);
    cr_assert_eq(ari_f16_of_f32(nan), 0xfe00);
}

EVERY_CLAIM(half)
