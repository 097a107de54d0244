/* SPDX-License-Identifier: Apache-2.0 */
/* Which numbers of ranks KV heads can be shared by, or copied to. That copies have the baseline's bits is
 * context_attention_test.c's. */
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "support/match.h"
#include "tests/support/test.h"

static ar_config config_of(size_t heads, size_t kv_heads)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.ffn = 96;
    return c;
}

Test(kv_replica, ranks_divide_the_kv_heads_or_are_a_multiple_of_them)
{
    const ar_plan plan = {0};
    const struct {
        size_t heads, kv_heads;
        int tp;
        bool legal;
    } at[] = {{32, 8, 1, true},   {32, 8, 4, true},  {32, 8, 16, true}, {32, 8, 32, true}, {32, 8, 3, false},
              {12, 3, 1, true},   {12, 3, 3, true},  {12, 3, 6, true},  {12, 3, 12, true}, {12, 3, 2, false},
              {12, 3, 4, false},  {24, 6, 4, false}, {24, 6, 12, true}, {8, 2, 8, true},   {8, 1, 8, true},
              {12, 12, 12, true}, {8, 8, 16, false}, {12, 4, 6, false}};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        ar_config c = config_of(at[i].heads, at[i].kv_heads);
        const ar_status st = ari_config_check_ranks(&c, at[i].tp, &plan);
        cr_assert_eq(st, at[i].legal ? AR_OK : AR_ERR_INDIVISIBLE, "%zu/%zu heads, tp=%d: %d", at[i].heads,
                     at[i].kv_heads, at[i].tp, (int)st);
    }
}

Test(kv_replica, the_error_names_the_kv_heads_and_what_would_be_right)
{
    const ar_plan plan = {0};
    const ar_config c = config_of(24, 6);
    cr_assert_eq(ari_config_check_ranks(&c, 4, &plan), AR_ERR_INDIVISIBLE);
    cr_assert_str_eq(ar_error_message(),
                     "the number of KV heads = 6 cannot be split over tp=4, nor copied to it evenly; use a tp that "
                     "divides 6, or a multiple of 6 that divides the 24 query heads");
}

Test(kv_replica, inner_neighbours_share_the_heads_of_every_tensor_parallel_rank)
{
    const struct {
        size_t heads, kv_heads;
        int tp, inner;
        bool legal;
    } at[] = {{32, 8, 1, 8, true},  {32, 8, 2, 4, true},  {32, 8, 4, 8, true},  {32, 8, 8, 4, true},
              {32, 8, 16, 2, true}, {32, 8, 1, 3, false}, {32, 8, 8, 8, false}, {32, 8, 16, 4, false},
              {12, 3, 1, 6, true},  {12, 3, 1, 2, false}, {12, 3, 1, 4, false}, {12, 3, 3, 4, true},
              {12, 1, 2, 3, true},  {12, 12, 1, 12, true}};
    const ar_plan plan = {0};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        ar_config c = config_of(at[i].heads, at[i].kv_heads);
        const ar_parallel p = {.tp = at[i].tp, .cp = at[i].inner, .cp_inner = at[i].inner};
        const ar_status st = ari_parallel_check(&p, &c, &plan, 0, 0);
        cr_assert_eq(st, at[i].legal ? AR_OK : AR_ERR_INDIVISIBLE, "%zu/%zu heads, tp=%d, inner cp %d: %d", at[i].heads,
                     at[i].kv_heads, at[i].tp, at[i].inner, (int)st);
    }
}

Test(kv_replica, the_error_names_the_heads_that_neighbours_cannot_share)
{
    const ar_plan plan = {0};
    ar_config c = config_of(12, 3);
    const ar_parallel p = {.cp = 5, .cp_inner = 5}, q = {.cp = 2, .cp_inner = 2};
    snprintf(c.name, sizeof c.name, "m");
    cr_assert_eq(ari_parallel_check(&p, &c, &plan, 0, 0), AR_ERR_INDIVISIBLE);
    cr_assert_str_eq(ar_error_message(),
                     "the 12 query heads of a tensor-parallel rank of m cannot be shared by 5 inner "
                     "neighbours of cp; use an inner cp that divides 12");
    cr_assert_eq(ari_parallel_check(&q, &c, &plan, 0, 0), AR_ERR_INDIVISIBLE);
    cr_assert_str_eq(ar_error_message(),
                     "the 3 KV heads of a tensor-parallel rank of m cannot be shared by 2 inner neighbours of cp, nor "
                     "copied to them evenly; use an inner cp that divides 3, or a multiple of 3 that divides the 12 "
                     "query heads");
}
