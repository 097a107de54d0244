/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/axis.h"
#include "tests/support/test.h"

static const ar_parallel layout = {.pp = 2, .dp = 3, .cp = 6, .cp_inner = 3, .tp = 5};
enum { WORLD = 180 };

/* rank = (((pp * 3 + dp) * 2 + place) * 3 + neighbour) * 5 + tp. */
static int number(const int *at)
{
    return (((at[ARI_AXIS_PP] * 3 + at[ARI_AXIS_DP]) * 2 + at[ARI_AXIS_RING]) * 3 + at[ARI_AXIS_INNER]) * 5 +
           at[ARI_AXIS_TP];
}

Test(axis, a_rank_is_numbered_by_its_places_outermost_first)
{
    const ari_ranks ranks = ari_ranks_of(&layout);
    cr_assert_eq(ari_ranks_along(&ranks, ARI_ALL_AXES), WORLD);
    for (int r = 0; r < WORLD; r++) {
        int at[ARI_PLACED_AXES];
        for (int i = 0; i < ARI_PLACED_AXES; i++)
            at[i] = ari_place_along(&ranks, r, 1u << i);
        cr_expect_eq(number(at), r);
        cr_expect_eq(ari_place_along(&ranks, r, ARI_CUTS_POSITIONS), at[ARI_AXIS_RING] * 3 + at[ARI_AXIS_INNER]);
        cr_expect_eq(ari_place_along(&ranks, r, ARI_CUTS_LAYERS | ARI_CUTS_FEATURES),
                     at[ARI_AXIS_PP] * 5 + at[ARI_AXIS_TP]);
    }
}

Test(axis, extents_that_are_not_given_count_as_one)
{
    const ar_parallel some = {.cp = 4, .tp = 2};
    cr_expect_eq(ari_extent(&some, ARI_CUTS_DATA), 4);
    cr_expect_eq(ari_extent(&some, ARI_CUTS_LAYERS), 1);
    cr_expect_eq(ari_extent(&some, 1 << ARI_AXIS_RING), 4);
    cr_expect_eq(ari_layout_as_given(&some, ARI_LAYOUT_PP), 0);
    cr_expect_eq(ari_layout_extent(&some, ARI_LAYOUT_PP), 1);
}
