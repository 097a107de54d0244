/* SPDX-License-Identifier: Apache-2.0 */
/* Random legal layouts of random small models, trained for a step or two: every tensor, hash and count of bytes is the
 * baseline's or what was predicted. The seeds are always the same unless ANYRANK_TEST_SEED and ANYRANK_TEST_DRAWS ask
 * for others; tests/extended/random_layouts.c runs more of them. */
#include "support/layout_draw.h"
#include "support/small.h"
#include "tests/support/test.h"

enum { FIRST_SEED = 1, FIRST_CONTEXT = 236, FIRST_STAGES = 214, FIRST_FAMILY = 92, FIRST_EXPERTS = 105 };

Test(random_layouts, every_tensor_has_the_baselines_bits)
{
    cr_assert_eq(layout_draws_run(DRAW_TENSORS, FIRST_SEED, by_scale(24, 28, 120), stderr), 0);
}

Test(random_layouts, sequences_that_ranks_share_have_the_baselines_bits)
{
    cr_assert_eq(layout_draws_run(DRAW_CONTEXTS, FIRST_CONTEXT, by_scale(12, 12, 60), stderr), 0);
}

Test(random_layouts, layers_and_state_that_ranks_share_have_the_baselines_bits)
{
    cr_assert_eq(layout_draws_run(DRAW_STAGES, FIRST_STAGES, by_scale(8, 10, 60), stderr), 0);
}

Test(random_layouts, every_family_has_the_baselines_bits_and_what_is_predicted)
{
    cr_assert_eq(layout_draws_run(DRAW_FAMILIES, FIRST_FAMILY, by_scale(20, 20, 60), stderr), 0);
}

Test(random_layouts, models_with_experts_have_the_baselines_bits_and_what_is_predicted)
{
    cr_assert_eq(layout_draws_run(DRAW_EXPERTS, FIRST_EXPERTS, by_scale(8, 20, 100), stderr), 0);
}

Test(random_layouts, a_seed_makes_the_same_draw_again)
{
    for (uint64_t seed = 1; seed < 50; seed++) {
        char one[LAYOUT_DRAW_TEXT], two[LAYOUT_DRAW_TEXT], other[LAYOUT_DRAW_TEXT];
        layout_draw a, b, c;
        layout_draw_make(&a, DRAW_TENSORS, seed);
        layout_draw_make(&b, DRAW_TENSORS, seed);
        layout_draw_make(&c, DRAW_TENSORS, seed + 1);
        layout_draw_text(one, sizeof one, &a);
        layout_draw_text(two, sizeof two, &b);
        layout_draw_text(other, sizeof other, &c);
        cr_expect_str_eq(one, two);
        cr_expect_str_neq(one, other);
    }
}
