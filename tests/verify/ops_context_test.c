/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a step's operations where ranks share a sequence: worked numbers by hand, and lint's silence about them.
 * Random layouts are compared with what runs record in random_layouts_test. */
#include "anyrank/lint.h"
#include "tests/verify/ops_find.h"

/* 8 heads of 4 on 4 KV heads, 64 positions. */
#define MODEL LLAMA(32, 24, 48, 2, 8, 4, 4, false)

/* Each of 4 ranks keeps 16 positions in all layers; keys and values go round in 3 hops of 2 x 16 x (4 + 4) x 4
 * elements, and so does nothing else. */
Test(ops_context, a_ring_passes_keys_and_values_on)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = case_of(&c, (ar_parallel){.cp = 4}, 2, 64, AR_NUMERICS_NATIVE);
    const found norm = all_of(&t, ARI_OPERATION_NORM, ARI_PASS_FORWARD);
    cr_assert_eq(norm.n, 2);
    LOCAL(norm.op[0].input[0], 2, 16, 24);
    cr_expect_eq(norm.op[0].input[0].shape[1], 64);
    cr_expect_eq(all_of(&t, ARI_OPERATION_HEADS, ARI_PASS_FORWARD).n, 0);
    for (int pass = ARI_PASS_FORWARD; pass <= ARI_PASS_BACKWARD; pass++) {
        const found ring = all_of(&t, ARI_OPERATION_RING, (ari_operation_pass)pass);
        cr_assert(ring.n == 1 && ring.op[0].calls == 1);
        const ari_op_call *hops = &ring.op[0].call[0];
        cr_expect(hops->kind == ARI_CALL_EXCHANGE && hops->over == ARI_OVER_RING && hops->repeats == 3);
        cr_expect_eq(hops->elements, 2 * 16 * (4 + 4) * 4);
    }
    const found attention = all_of(&t, ARI_OPERATION_ATTENTION, ARI_PASS_FORWARD);
    LOCAL(attention.op[0].input[0], 2, 16, 32);
    LOCAL(attention.op[0].input[1], 2, 64, 16);
    LOCAL(attention.op[0].output[0], 2, 16, 32);
}

/* Two neighbours that exchange heads for positions, in a ring of two: q of 4 heads and 32 positions, k and v of 2
 * heads. Of 2 x 32 x (4 + 2 + 2) x 4 elements each of the two sends the other half; then of the context. */
Test(ops_context, neighbours_exchange_heads_for_positions)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = case_of(&c, (ar_parallel){.cp = 4, .cp_inner = 2}, 2, 64, AR_NUMERICS_NATIVE);
    const found heads = all_of(&t, ARI_OPERATION_HEADS, ARI_PASS_FORWARD);
    cr_assert_eq(heads.n, 2);
    LOCAL(heads.op[0].input[0], 2, 16, 32);
    LOCAL(heads.op[0].output[0], 2, 32, 16);
    LOCAL(heads.op[0].output[1], 2, 32, 8);
    LOCAL(heads.op[1].input[0], 2, 32, 16);
    LOCAL(heads.op[1].output[0], 2, 16, 32);
    cr_expect(heads.op[0].call[0].kind == ARI_CALL_ALL_TO_ALL && heads.op[0].call[0].over == ARI_OVER_INNER);
    cr_expect_eq(heads.op[0].call[0].elements, 2 * 32 * (4 + 2 + 2) * 4);
    cr_expect_eq(heads.op[1].call[0].elements, 2 * 32 * 4 * 4);
    const found ring = all_of(&t, ARI_OPERATION_RING, ARI_PASS_FORWARD);
    LOCAL(ring.op[0].output[0], 2, 32, 16);
    LOCAL(ring.op[0].output[1], 2, 64, 8);
    cr_expect_eq(ring.op[0].call[0].elements, 2 * 32 * (2 + 2) * 4);
}

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

/* Sequence parallelism cuts the 16 positions of a rank once more; q|k|v see all 16. */
Test(ops_context, sequence_parallelism_cuts_the_own_positions)
{
    const ar_config c = config_of(MODEL);
    const ari_step_case t = case_of(&c, (ar_parallel){.tp = 2, .cp = 4, .sp = true}, 2, 64, AR_NUMERICS_NATIVE);
    LOCAL(all_of(&t, ARI_OPERATION_NORM, ARI_PASS_FORWARD).op[0].input[0], 2, 8, 24);
    LOCAL(all_of(&t, ARI_OPERATION_PRODUCT, ARI_PASS_FORWARD).op[0].input[0], 2, 16, 24);
}

/* Exact: the exponents of both operands' rows, and for each of 2 samples the sums [out, in] of int64; of longer
 * sequences two. Native: nothing, the sum over dp completes the terms. */
Test(ops_context, exact_weight_gradients_are_one_sum_over_all_positions)
{
    const ar_config c = config_of(MODEL);
    ari_step_case t = case_of(&c, (ar_parallel){.dp = 2, .cp = 4}, 2, 64, AR_NUMERICS_EXACT);
    t.run.batch = 4;
    const found down = all_of(&t, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD);
    const ari_op_call *call = down.op[0].call;
    cr_assert_eq(down.op[0].role, ARI_DOWN);
    cr_assert_eq(down.op[0].calls, 2);
    cr_expect(call[0].over == ARI_OVER_CP && call[0].ranks == 4 && call[0].elements == 2 * (24 + 48));
    cr_expect(call[1].kind == ARI_CALL_REDUCE_SCATTER && call[1].elements == 24 * 48 && call[1].repeats == 2);
    t.run.seq = 8192;
    cr_expect_eq(all_of(&t, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD).op[0].call[1].elements, 2 * 24 * 48);
    t.run.numerics = AR_NUMERICS_NATIVE;
    cr_expect_eq(all_of(&t, ARI_OPERATION_WEIGHT_GRADIENT, ARI_PASS_BACKWARD).op[0].calls, 0);
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
                cr_assert_ok(ari_operations(&t, r, sum_calls, &sent));
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
            OWNED(ar_lint_report_destroy) ar_lint_report *r = NULL;
            char text[96];
            t.run.batch = 4;
            ar_parallel_text(text, sizeof text, &layouts[i]);
            if (c.arch == AR_ARCH_GPT2 && layouts[i].tp * layouts[i].cp_inner > 8)
                continue; /* no copies of KV heads */
            cr_assert_ok(ar_lint(&r, &t.run, &c));
            for (size_t k = 0; k < r->count; k++)
                cr_expect(false, "%s, %s: %s of %s (%s, %s) along %s: has %s, needs %s", c.name, text,
                          ar_lint_rule_name(r->finding[k].rule), r->finding[k].module, r->finding[k].operation,
                          r->finding[k].pass, r->finding[k].axis, r->finding[k].has, r->finding[k].needs);
        }
    }
}
