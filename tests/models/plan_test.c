/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/config.h"
#include "ref/models/model_private.h"
#include "ref/models/plan_private.h"
#include "support/together.h"

static ar_config gpt2(void)
{
    ar_config c = {.arch = AR_ARCH_GPT2,
                   .vocab = 50,
                   .layers = 2,
                   .hidden = 12,
                   .heads = 6,
                   .kv_heads = 6,
                   .ffn = 24,
                   .head_dim = 2};
    return c;
}

CLAIM(the_last_matching_rule_decides_and_no_rules_mean_the_default)
{
    const ar_config c = gpt2();
    SCOPED(ar_plan_fini) ar_plan p = {0};
    ar_block_split split;
    cr_assert_ok(ar_plan_add(&p, c.arch, "transformer.h.1.mlp.c_fc", AR_STYLE_ROWWISE));
    cr_assert_ok(ar_plan_add(&p, c.arch, "transformer.h.1.mlp.c_proj", AR_STYLE_COLWISE));
    cr_assert_ok(ari_plan_block(&p, &c, 0, false, &split));
    cr_assert_eq(split.mlp.first.style, AR_STYLE_COLWISE);
    cr_assert_ok(ari_plan_block(&p, &c, 1, false, &split));
    cr_assert_eq(split.mlp.first.style, AR_STYLE_ROWWISE, "layer 1 alone is split the other way");
    cr_assert_ok(ari_config_check_ranks(&c, 3, &p));

    SCOPED(ar_plan_fini) ar_plan ordered = {.mlp_order = AR_MLP_ROW_COLUMN};
    cr_assert_ok(ar_plan_add(&ordered, c.arch, "transformer.h.1.mlp.c_fc", AR_STYLE_COLWISE));
    cr_assert_ok(ar_plan_add(&ordered, c.arch, "transformer.h.1.mlp.c_proj", AR_STYLE_ROWWISE));
    cr_assert_ok(ari_plan_block(&ordered, &c, 0, false, &split));
    cr_assert(split.mlp.first.style == AR_STYLE_ROWWISE && split.mlp.second.style == AR_STYLE_COLWISE);
    cr_assert_ok(ari_plan_block(&ordered, &c, 1, false, &split));
    cr_assert_eq(split.mlp.first.style, AR_STYLE_COLWISE, "a rule that is added to the default plan keeps its order");
}

CLAIM(what_this_version_cannot_split_is_refused_by_name)
{
    const ar_config c = gpt2();
    SCOPED(ar_plan_fini) ar_plan p = {0};
    cr_assert_ok(ar_plan_add(&p, c.arch, "*.attn.c_attn", AR_STYLE_ROWWISE));
    cr_assert_refused(ari_plan_check(&p, &c, false), AR_ERR_UNSUPPORTED, "transformer.h.0.attn.c_attn is rowwise");

    SCOPED(ar_plan_fini) ar_plan half = {0};
    cr_assert_ok(ar_plan_add(&half, c.arch, "*.mlp.c_fc", AR_STYLE_ROWWISE));
    cr_assert_refused(ari_config_check_ranks(&c, 2, &half), AR_ERR_UNSUPPORTED, "transformer.h.0.mlp.c_fc is rowwise");
}

CLAIM(a_rule_that_does_not_fit_is_refused)
{
    char longest[AR_PLAN_GLOB + 1];
    memset(longest, 'x', AR_PLAN_GLOB);
    longest[AR_PLAN_GLOB] = '\0';
    SCOPED(ar_plan_fini) ar_plan p = {0};
    cr_assert_eq(ar_plan_add(&p, AR_ARCH_LLAMA, longest, AR_STYLE_COLWISE), AR_ERR_ARG);
    ar_status st = AR_OK;
    for (int i = 0; i <= AR_PLAN_RULES && st == AR_OK; i++)
        st = ar_plan_add(&p, AR_ARCH_LLAMA, "x", AR_STYLE_COLWISE);
    cr_assert_eq(st, AR_ERR_ARG);
    cr_assert_eq(p.rules, (size_t)AR_PLAN_RULES);
}

EVERY_CLAIM(plan)
