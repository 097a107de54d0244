/* SPDX-License-Identifier: Apache-2.0 */
#include <criterion/criterion.h>

#include "tests/cpu/emulated/avx512.h"

/* The emulated instructions (emulated/avx512.h) where the product alone would not show that they are another's: numbers
 * from the pseudocode of Intel's Intrinsics Guide, worked out by hand. */
TestSuite(emulated_avx512, .timeout = 300);

static __m256i counting(uint32_t first)
{
    __m256i r;
    for (uint32_t i = 0; i < 8; i++)
        r.lane[i] = first + i;
    return r;
}

static void expect_lanes(const char *what, __m256i got, const uint32_t *want)
{
    for (size_t i = 0; i < 8; i++)
        cr_expect_eq(got.lane[i], want[i], "%s, lane %zu: got %u, expected %u", what, i, got.lane[i], want[i]);
}

Test(emulated_avx512, multiply_add_takes_52_bits_of_operands_and_product)
{
    const struct {
        uint64_t a, b, c, want;
    } cases[] = {
        {5, 3, 4, 17},
        {UINT64_MAX, 1, 1, 0},                                                    /* the sum has 64 bits */
        {0, (uint64_t)1 << 26, (uint64_t)1 << 26, 0},                             /* 2^52 is cut off */
        {7, ((uint64_t)1 << 26) + 1, (uint64_t)1 << 26, 7 + ((uint64_t)1 << 26)}, /* 2^52 + 2^26 */
        {0, ((uint64_t)1 << 52) + 3, 2, 6},                                       /* the left factor has 52 bits */
        {0, 2, ((uint64_t)1 << 63) + 3, 6},                                       /* and so has the right one */
        {0, ((uint64_t)1 << 52) - 1, ((uint64_t)1 << 52) - 1, 1},                 /* (2^52 - 1)^2 modulo 2^52 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        __m512i a = _mm512_setzero_si512(), b = a, c = a;
        a.lane[i] = cases[i].a;
        b.lane[i] = cases[i].b;
        c.lane[i] = cases[i].c;
        const __m512i got = _mm512_madd52lo_epu64(a, b, c);
        for (size_t lane = 0; lane < 8; lane++) {
            const uint64_t want = lane == i ? cases[i].want : 0;
            cr_expect_eq(got.lane[lane], want, "case %zu, lane %zu: got %llx, expected %llx", i, lane,
                         (unsigned long long)got.lane[lane], (unsigned long long)want);
        }
    }
}

Test(emulated_avx512, lanes_are_widened_without_a_sign_and_shifted_by_themselves)
{
    const __m512i wide = _mm512_cvtepu32_epi64(_mm256_set1_epi32(-1));
    const __m512i moved = _mm512_slli_epi64(wide, 40), gone = _mm512_slli_epi64(wide, 64);
    for (size_t i = 0; i < 8; i++) {
        cr_expect_eq(wide.lane[i], 0xffffffffu);
        cr_expect_eq(moved.lane[i], 0xffffff0000000000u);
        cr_expect_eq(gone.lane[i], 0u);
    }
}

Test(emulated_avx512, unpacking_stays_within_halves)
{
    const __m256i a = counting(0), b = counting(10);
    expect_lanes("lo 32", _mm256_unpacklo_epi32(a, b), (const uint32_t[]){0, 10, 1, 11, 4, 14, 5, 15});
    expect_lanes("hi 32", _mm256_unpackhi_epi32(a, b), (const uint32_t[]){2, 12, 3, 13, 6, 16, 7, 17});
    expect_lanes("lo 64", _mm256_unpacklo_epi64(a, b), (const uint32_t[]){0, 1, 10, 11, 4, 5, 14, 15});
    expect_lanes("hi 64", _mm256_unpackhi_epi64(a, b), (const uint32_t[]){2, 3, 12, 13, 6, 7, 16, 17});
}

Test(emulated_avx512, a_permutation_takes_halves_of_either_operand)
{
    const __m256i a = counting(0), b = counting(10);
    expect_lanes("0x20", _mm256_permute2x128_si256(a, b, 0x20), (const uint32_t[]){0, 1, 2, 3, 10, 11, 12, 13});
    expect_lanes("0x31", _mm256_permute2x128_si256(a, b, 0x31), (const uint32_t[]){4, 5, 6, 7, 14, 15, 16, 17});
    expect_lanes("0x83", _mm256_permute2x128_si256(a, b, 0x83), (const uint32_t[]){14, 15, 16, 17, 0, 0, 0, 0});
}

/* The array ends where the mask does: AddressSanitizer would see a read behind it. */
Test(emulated_avx512, a_masked_load_reads_what_the_mask_has)
{
    const uint32_t three[3] = {7, 8, 9};
    expect_lanes("0b101", _mm256_maskz_loadu_epi32(5, three), (const uint32_t[]){7, 0, 9, 0, 0, 0, 0, 0});
}
