/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/cpu/emulated/neon.h"
#include "tests/support/test.h"

/* The emulated instructions (emulated/neon.h) where the product alone would not show that they are another's: numbers
 * from the pseudocode of Arm's Architecture Reference Manual, worked out by hand. */
static void expect_lanes(const char *what, int32x4_t got, const int32_t *want)
{
    for (size_t i = 0; i < 4; i++)
        cr_expect_eq(got.lane[i], want[i], "%s, lane %zu: got %d, expected %d", what, i, got.lane[i], want[i]);
}

/* Rows (1..8), (-1, 0, ..) by rows (1, 1, ..), (0, .., 0, 10). */
Test(emulated_neon, smmla_multiplies_two_rows_by_two_rows_of_eight)
{
    const int8x16_t a = {{1, 2, 3, 4, 5, 6, 7, 8, -1}}, b = {{1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 10}};
    expect_lanes("SMMLA", vmmlaq_s32((int32x4_t){{1000, 2000, 3000, 4000}}, a, b),
                 (const int32_t[]){1036, 2080, 2999, 4000});
    expect_lanes("SMMLA, exchanged", vmmlaq_s32(vdupq_n_s32(0), b, a), (const int32_t[]){36, -1, 80, 0});
}

Test(emulated_neon, smmla_takes_signed_bytes_and_wraps)
{
    const int8x16_t low = {{-128, -128, -128, -128, -128, -128, -128, -128}};
    expect_lanes("-128 by -128", vmmlaq_s32(vdupq_n_s32(0), low, low), (const int32_t[]){131072, 0, 0, 0});
    expect_lanes("beyond int32", vmmlaq_s32(vdupq_n_s32(INT32_MAX), low, low),
                 (const int32_t[]){INT32_MIN + 131071, INT32_MAX, INT32_MAX, INT32_MAX});
}

/* Lane 2 of b is (1, 10, 100, -100). */
Test(emulated_neon, sdot_multiplies_each_four_by_the_four_of_one_lane)
{
    const int8x16_t a = {{1, 1, 1, 1, 2, 0, 0, 0, 0, 0, 3, 0, -1, -2, -3, -4}};
    const int8x16_t b = {{9, 9, 9, 9, 9, 9, 9, 9, 1, 10, 100, -100, 9, 9, 9, 9}};
    expect_lanes("SDOT, lane 2", vdotq_laneq_s32((int32x4_t){{1, 2, 3, 4}}, a, b, 2),
                 (const int32_t[]){12, 4, 303, 4 - 1 - 20 - 300 + 400});
    expect_lanes("SDOT, lane 0", vdotq_laneq_s32(vdupq_n_s32(0), a, b, 0), (const int32_t[]){36, 18, 27, -90});
}

Test(emulated_neon, smlal_widens_products_and_takes_either_half)
{
    const int32x4_t a = {{1 << 30, -1, 7, INT32_MIN}}, by = {{0, 0, 0, 1 << 20}};
    const int64x2_t low = vmlal_laneq_s32((int64x2_t){{5, 6}}, vget_low_s32(a), by, 3);
    const int64x2_t high = vmlal_high_laneq_s32((int64x2_t){{5, 6}}, a, by, 3);
    cr_expect_eq(low.lane[0], 5 + ((int64_t)1 << 50));
    cr_expect_eq(low.lane[1], 6 - (1 << 20));
    cr_expect_eq(high.lane[0], 5 + 7 * (1 << 20));
    cr_expect_eq(high.lane[1], 6 - ((int64_t)1 << 51));
    cr_expect_eq(vmlal_laneq_s32(vdupq_n_s64(INT64_MAX), vget_low_s32(a), by, 3).lane[0],
                 INT64_MIN + ((int64_t)1 << 50) - 1);
}

Test(emulated_neon, loads_and_stores_keep_the_order_of_lanes)
{
    const int32_t from[5] = {1, 2, 3, 4, 5};
    const int64_t wide[2] = {6, 7};
    int32_t to[5] = {0};
    int64_t wide_to[2] = {0};
    vst1q_s32(to, vld1q_s32(from + 1));
    expect_lanes("whole", (int32x4_t){{to[0], to[1], to[2], to[3]}}, (const int32_t[]){2, 3, 4, 5});
    vst1_s32(to, vget_high_s32(vld1q_s32(from)));
    vst1_s32(to + 2, vget_low_s32(vld1q_s32(from)));
    expect_lanes("halves", (int32x4_t){{to[0], to[1], to[2], to[3]}}, (const int32_t[]){3, 4, 1, 2});
    cr_expect_eq(to[4], 0);
    vst1q_s64(wide_to, vld1q_s64(wide));
    cr_expect_eq(wide_to[0], 6);
    cr_expect_eq(wide_to[1], 7);
}
