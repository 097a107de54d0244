/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations where ranks share a sequence: copies of KV heads by hand, and lint's silence.
 * Random layouts are compared with what runs record in random_layouts_test. */
#include "ref/models/parallel_private.h"
#include "tests/verify/ops_find.h"
#include "verify/lint/lint_private.h"

/* 8 heads of 4 on 4 KV heads, 64 positions. */
#define MODEL LLAMA(32, 24, 48, 2, 8, 4, 4, false)

/* With tp=2 and inner=4 eight ranks share 8 heads on 4 KV heads: two hold each. */
Test(ops_context, neighbours_may_hold_copies_of_a_kv_head)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = case_of(&c, (ar_parallel){.tp = 2, .cp = 4, .cp_inner = 4}, 2, 64, AR_NUMERICS_NATIVE);
    const found attention = all_of(&t, ARI_OPERATION_ATTENTION, ARI_PASS_FORWARD);
    LOCAL(attention.op[0].input[0], 2, 64, 4);
    LOCAL(attention.op[0].input[1], 2, 64, 4);
    cr_expect_eq(attention.op[0].input[1].copies, 2);
    /* A head of q, k and v to each of 3 neighbours; back of k and v to the one that has none of the two copies. */
    const found there = all_of(&t, ARI_OPERATION_HEADS, ARI_PASS_FORWARD);
    const found back = all_of(&t, ARI_OPERATION_HEADS, ARI_PASS_BACKWARD);
    cr_expect_eq(there.op[0].call[0].elements, 3 * 2 * 64 * (1 + 1 + 1) * 4);
    cr_expect_eq(back.op[1].call[0].elements, 2 * 64 * (3 * 1 + 1 * 1 + 1 * 1) * 4);
    const found product = all_of(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD);
    cr_expect_eq(product.op[0].weight[1].copies, 1, "of the weights each rank of tp has other heads");
}

static ar_status sum_calls(void *user, const ari_operation *op)
{
    double *sent = user;
    for (int i = 0; i < op->calls; i++) {
        size_t bytes = 0;
        AR_TRY(ari_call_bytes(&bytes, &op->call[i]));
        *sent += (double)bytes / (double)op->call[i].ranks;
    }
    return AR_OK;
}

static const ar_parallel layouts[] = {
    {.tp = 2},
    {.tp = 8, .sp = true, .keep_gathered = true},
    {.cp = 4},
    {.cp = 4, .zigzag = true},
    {.cp = 4, .cp_inner = 2},
    {.cp = 4, .cp_inner = 4},
    {.tp = 2, .cp = 2},
    {.tp = 2, .cp = 4, .cp_inner = 4},
    {.tp = 8, .cp = 2, .sp = true},
    {.tp = 2, .cp = 4, .cp_inner = 2, .sp = true, .zigzag = true, .micro_batches = 2},
    {.dp = 2, .tp = 2, .cp = 2, .zero = 1},
    {.dp = 2, .cp = 4, .cp_inner = 2, .zero = 1, .micro_batches = 2},
};

static const char *const models[] = {MODEL, GPT2(31, 32, 48, 2, 8), STACK(31, 24, 48, 2, 8, 8),
                                     MIXTRAL(32, 32, 48, 2, 8, 4, 5, 2)};

/* What the ranks send, each by its own list, is what a run of all of them is said to move. */
Test(ops_context, the_ranks_lists_add_up_to_the_bytes_of_the_run)
{
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < 2 * sizeof layouts / sizeof *layouts; i++) {
            ari_step_case t = case_of(&c, layouts[i / 2], 2, 64, i % 2 ? AR_NUMERICS_NATIVE : AR_NUMERICS_EXACT);
            uint64_t bytes = 0;
            double sent = 0.0;
            t.run.batch = 3;
            t.run.clip = 1.0;
            cr_assert_ok(ari_traffic_bytes(&bytes, &t));
            for (int r = 0; r < ar_parallel_world(&t.run.parallel); r++)
                cr_assert_ok(ari_operations(&t, ARI_OPS_STEP, r, sum_calls, &sent));
            cr_expect_float_eq(sent, (double)bytes, 0.5, "%s, layout %zu: %.1f, %zu", c.name, i, sent, (size_t)bytes);
        }
    }
}

Test(ops_context, lint_finds_nothing_in_legal_layouts)
{
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        const ar_config c = config_of(models[m]);
        for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) {
            ari_step_case t = case_of(&c, layouts[i], 2, 64, AR_NUMERICS_EXACT);
            OWNED(ari_lint_report_destroy) ar_lint_report *r = NULL;
            char text[96];
            t.run.batch = 4;
            ari_parallel_text(text, sizeof text, &layouts[i]);
            if (c.arch == AR_ARCH_GPT2 && layouts[i].tp * layouts[i].cp_inner > 8)
                continue; /* no copies of KV heads */
            cr_assert_ok(ari_lint(&r, &t.run, &c));
            for (size_t k = 0; k < r->count; k++)
                cr_expect(false, "%s, %s: %s of %s (%s, %s) along %s: has %s, needs %s", c.name, text,
                          ari_lint_rule_name(r->finding[k].rule), r->finding[k].module, r->finding[k].operation,
                          r->finding[k].pass, r->finding[k].axis, r->finding[k].has, r->finding[k].needs);
        }
    }
}
