/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/emulated/avx.h"
#include "tests/support/test.h"

/* The emulated instructions (emulated/avx.h) where the product alone would not show that they are another's: numbers
 * from the pseudocode of Intel's Intrinsics Guide, worked out by hand. */
static __m256i counting(uint32_t first)
{
    return (__m256i)((emulated_u32x8){0, 1, 2, 3, 4, 5, 6, 7} + first);
}

static void expect_lanes(const char *what, __m256i got, const uint32_t *want)
{
    const emulated_u32x8 lane = (emulated_u32x8)got;
    for (size_t i = 0; i < 8; i++)
        cr_expect_eq(lane[i], want[i], "%s, lane %zu: got %u, expected %u", what, i, lane[i], want[i]);
}

Test(emulated_avx, unpacking_stays_within_halves)
{
    const __m256i a = counting(0), b = counting(10);
    expect_lanes("lo 32", _mm256_unpacklo_epi32(a, b), (const uint32_t[]){0, 10, 1, 11, 4, 14, 5, 15});
    expect_lanes("hi 32", _mm256_unpackhi_epi32(a, b), (const uint32_t[]){2, 12, 3, 13, 6, 16, 7, 17});
    expect_lanes("lo 64", _mm256_unpacklo_epi64(a, b), (const uint32_t[]){0, 1, 10, 11, 4, 5, 14, 15});
    expect_lanes("hi 64", _mm256_unpackhi_epi64(a, b), (const uint32_t[]){2, 3, 12, 13, 6, 7, 16, 17});
}

Test(emulated_avx, a_permutation_takes_halves_of_either_operand)
{
    const __m256i a = counting(0), b = counting(10);
    expect_lanes("0x20", _mm256_permute2x128_si256(a, b, 0x20), (const uint32_t[]){0, 1, 2, 3, 10, 11, 12, 13});
    expect_lanes("0x31", _mm256_permute2x128_si256(a, b, 0x31), (const uint32_t[]){4, 5, 6, 7, 14, 15, 16, 17});
    expect_lanes("0x83", _mm256_permute2x128_si256(a, b, 0x83), (const uint32_t[]){14, 15, 16, 17, 0, 0, 0, 0});
}

/* The array ends where the mask does: AddressSanitizer would see a read behind it. */
Test(emulated_avx, a_masked_load_reads_what_the_mask_has)
{
    const int three[3] = {7, 8, 9};
    const __m256i mask = (__m256i)(emulated_u32x8){0x80000000u, 0x7fffffffu, 0xffffffffu};
    expect_lanes("101", _mm256_maskload_epi32(three, mask), (const uint32_t[]){7, 0, 9, 0, 0, 0, 0, 0});
}

/* Halves are integers with signs; what passes 2^31 wraps around instead of stopping there. */
Test(emulated_avx, pairs_of_halves_are_multiplied_with_signs_and_wrap_around)
{
    const struct {
        uint32_t sum, a, b, want;
    } cases[] = {
        {5, 0x00030002u, 0x00050007u, 5 + 15 + 14},           {0, 0xffff0001u, 0x00010001u, 0}, /* -1 + 1 */
        {1, 0x8000ffffu, 0x7fff8000u, 0xc0010001u},           /* -2^15*(2^15 - 1) + 2^15 + 1 */
        {0x7fffffffu, 0x10001000u, 0x10001000u, 0x81ffffffu}, /* 2^31 - 1 + 2^25 */
        {0x80000000u, 0x1000f000u, 0xf0000000u, 0x7f000000u}, /* -2^31 - 2^24 */
        {0, 0x80008000u, 0x80008000u, 0x80000000u},           /* 2^31 */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        emulated_u32x16 sum = {0}, a = sum, b = sum;
        emulated_u32x8 half_sum = {0}, half_a = half_sum, half_b = half_sum;
        sum[2 * i] = half_sum[i] = cases[i].sum;
        a[2 * i] = half_a[i] = cases[i].a;
        b[2 * i] = half_b[i] = cases[i].b;
        const emulated_u32x16 all = (emulated_u32x16)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
        for (size_t lane = 0; lane < 16; lane++)
            cr_expect_eq(all[lane], lane == 2 * i ? cases[i].want : 0, "case %zu, lane %zu of 16: got %x", i, lane,
                         all[lane]);
        uint32_t want[8] = {0};
        want[i] = cases[i].want;
        expect_lanes("dpwssd", _mm256_dpwssd_avx_epi32((__m256i)half_sum, (__m256i)half_a, (__m256i)half_b), want);
        want[i] -= cases[i].sum;
        expect_lanes("madd", _mm256_madd_epi16((__m256i)half_a, (__m256i)half_b), want);
    }
}
