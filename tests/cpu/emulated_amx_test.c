/* SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>

#include "tests/cpu/emulated/amx.h"
#include "tests/support/test.h"

/* The emulated tiles (emulated/amx.h) where the product alone would not show that they are another's: numbers from the
 * pseudocode of Intel's Architecture Instruction Set Extensions Programming Reference, worked out by hand. */
/* Tile 0 is 2 rows by 3 int32, tile 1 2 rows by 8 bytes, tile 2 2 rows by 12 bytes, tile 3 whole. */
static const uint8_t shapes[64] = {
    1, [16] = 12, [18] = 8, [20] = 12, [22] = 64, [48] = 2, [49] = 2, [50] = 2, [51] = 16};

/* Row m of a by column n of b, whose bytes 4k to 4k + 3 are side by side in row k. */
Test(emulated_amx, dpbssd_adds_products_of_four_signed_bytes)
{
    const int8_t a[2][8] = {{1, 2, 3, 4, 5, 6, 7, 8}, {-128, 0, 0, 0, 0, 0, 0, 1}};
    const int8_t b[2][12] = {{1, 1, 1, 1, 0, 0, 0, 10, -128, 0, 0, 0}, {1, 1, 1, 1, -1, 0, 0, 0, 0, 0, 0, 127}};
    const int32_t start[2][3] = {{100, 200, 300}, {INT32_MAX, 500, INT32_MAX}};
    const int32_t want[2][3] = {{100 + 36, 200 + 40 - 5, 300 - 128 + 1016},
                                {INT32_MAX - 127, 500, INT32_MIN + 16384 + 126}};
    int32_t got[2][3];
    _tile_loadconfig(shapes);
    _tile_loadd(0, start, sizeof start[0]);
    _tile_loadd(1, a, sizeof a[0]);
    _tile_loadd(2, b, sizeof b[0]);
    _tile_dpbssd(0, 1, 2);
    _tile_stored(0, got, sizeof got[0]);
    for (size_t i = 0; i < 6; i++)
        cr_expect_eq(got[i / 3][i % 3], want[i / 3][i % 3], "element %zu: got %d, expected %d", i, got[i / 3][i % 3],
                     want[i / 3][i % 3]);
    _tile_release();
}

/* A load takes the tile's rows, each a stride after the other, and a store writes no more; zeroing is of one tile. */
Test(emulated_amx, tiles_have_the_shapes_of_the_configuration)
{
    uint8_t from[3][16], to[3][16];
    for (size_t i = 0; i < sizeof from; i++)
        from[i / 16][i % 16] = (uint8_t)(i + 1);
    memset(to, 0, sizeof to);
    _tile_loadconfig(shapes);
    _tile_loadd(1, from, sizeof from[0]);
    _tile_loadd(2, from, sizeof from[0]);
    _tile_zero(2);
    _tile_stored(1, to, sizeof to[0]);
    for (size_t i = 0; i < sizeof to; i++)
        cr_expect_eq(to[i / 16][i % 16], i / 16 < 2 && i % 16 < 8 ? i + 1 : 0, "byte %zu", i);
    _tile_stored(2, to, sizeof to[0]);
    cr_expect_eq(to[1][11], 0);
    cr_expect_eq(to[1][7], 0);
}

Test(emulated_amx, tiles_are_refused_without_a_configuration, .signal = SIGABRT)
{
    _tile_zero(0);
}

Test(emulated_amx, tiles_are_gone_after_their_release, .signal = SIGABRT)
{
    _tile_loadconfig(shapes);
    _tile_zero(0);
    _tile_release();
    _tile_zero(0);
}

Test(emulated_amx, a_configuration_has_a_palette, .signal = SIGABRT)
{
    static const uint8_t none[64] = {0, [16] = 12, [48] = 2};
    _tile_loadconfig(none);
}

Test(emulated_amx, a_row_has_at_most_64_bytes, .signal = SIGABRT)
{
    static const uint8_t wide[64] = {1, [16] = 68, [48] = 2};
    _tile_loadconfig(wide);
}

/* a's row has 12 bytes, b only 2 rows. */
Test(emulated_amx, shapes_that_do_not_belong_together_are_refused, .signal = SIGABRT)
{
    _tile_loadconfig(shapes);
    _tile_dpbssd(0, 2, 1);
}
