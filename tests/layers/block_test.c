/* SPDX-License-Identifier: Apache-2.0 */
/* Norms, MLPs and attention inside a block: every tensor a block reports, forward and backward, has the bits of the
 * independent baseline's on 1, 2 and 4 ranks, and stands where the baseline has it in the order of execution. */
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 3, S = 6, H = 12 };
static const int one_two_four[] = {1, 2, 4, 0};
static const int one_two[] = {1, 2, 0};
static const int one_only[] = {1, 0};

/* The block of a config, with data of its own, against the baseline's. */
static void expect_same_bits(const ar_config *c, const ar_batch *masks, ar_mlp_order order, const int *tps)
{
    static float x[B * S * H], dy[B * S * H];
    fill_values(x, B * S * H, 3, 2.0);
    fill_values(dy, B * S * H, 4, 0.25);
    match_case m = {.config = *c, .batch = masks ? *masks : (ar_batch){0}, .order = order, .x = x, .dy = dy, .seed = 5};
    m.batch.batch = B;
    m.batch.seq = S;
    size_t tensors = 0;
    cr_assert_eq(match(&m, tps, &tensors), AR_OK, "arch %d, %zu/%zu heads, activation %d, order %d: %s", (int)c->arch,
                 c->heads, c->kv_heads, (int)c->activation, (int)order, ar_error_message());
    cr_assert_gt(tensors, 40);
}

/* --- norms and MLPs ----------------------------------------------------------------------------------------------- */

Test(block, both_norms_have_the_baselines_bits)
{
    for (int kind = AR_NORM_LAYER; kind <= AR_NORM_RMS; kind++) {
        ar_config c = match_config(AR_ARCH_STACK, 1);
        c.norm = (ar_norm_kind)kind;
        expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two);
        c.norm_eps = 0.5; /* large enough to show in every bit of rstd */
        expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two);
    }
}

Test(block, plain_and_gated_mlps_have_the_baselines_bits_for_every_activation_and_order)
{
    static const ar_arch archs[] = {AR_ARCH_STACK, AR_ARCH_LLAMA};
    for (int i = 0; i < 4 * AR_ACT_NONE; i++) {
        ar_config c = match_config(archs[i & 1], 1);
        c.kv_heads = c.heads;
        c.activation = (ar_activation)(i / 4);
        c.mlp_bias = i & 2;
        expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two_four);
        expect_same_bits(&c, NULL, AR_MLP_ROW_COLUMN, one_two_four);
    }
}

Test(block, transposed_weights_have_the_baselines_bits_in_both_orders)
{
    const ar_config c = match_config(AR_ARCH_GPT2, 1);
    expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two_four);
    expect_same_bits(&c, NULL, AR_MLP_ROW_COLUMN, one_two_four);
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

Test(block, grouped_heads_have_the_baselines_bits_with_and_without_rope_and_causality)
{
    for (size_t kv_heads = 1; kv_heads <= 4; kv_heads *= 2) {
        for (int variant = 0; variant < 8; variant++) {
            ar_config c = match_config(AR_ARCH_LLAMA, 1);
            c.kv_heads = kv_heads; /* 1: multi-query, 2: grouped-query, 4: multi-head */
            c.causal = variant & 1;
            c.rope.kind = variant & 2 ? AR_ROPE_DEFAULT : AR_ROPE_NONE;
            c.qkv_bias = c.out_bias = variant & 4;
            expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW,
                             kv_heads == 1   ? one_only
                             : kv_heads == 2 ? one_two
                                             : one_two_four);
        }
    }
}

Test(block, rope_factor_and_theta_have_the_baselines_bits)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    c.rope = (ar_rope){.kind = AR_ROPE_LINEAR, .theta = 500000.0, .factor = 8.0};
    c.head_dim = 6;
    expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two);
}

Test(block, fused_qkv_has_the_baselines_bits)
{
    ar_config c = match_config(AR_ARCH_GPT2, 1);
    for (int variant = 0; variant < 4; variant++) {
        c.causal = variant & 1;
        c.qkv_bias = c.out_bias = variant & 2;
        expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two_four);
    }
}

Test(block, more_heads_than_features_of_the_model_have_the_baselines_bits)
{
    ar_config c = match_config(AR_ARCH_STACK, 1);
    c.heads = 8; /* heads * head_dim = 40 > hidden */
    c.kv_heads = 4;
    c.head_dim = 5;
    expect_same_bits(&c, NULL, AR_MLP_COLUMN_ROW, one_two_four);
}

Test(block, padding_mask_with_a_fully_masked_row_has_the_baselines_bits)
{
    /* Sample 1 has a masked first key: under causality its query 0 sees nothing. Sample 2 has no visible key at all. */
    static const uint8_t padding[B * S] = {1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0};
    const ar_batch masks = {.padding_mask = padding};
    for (int causal = 0; causal < 2; causal++) {
        ar_config c = match_config(AR_ARCH_LLAMA, 1);
        c.kv_heads = 4;
        c.causal = causal;
        expect_same_bits(&c, &masks, AR_MLP_COLUMN_ROW, one_two_four);
        c = match_config(AR_ARCH_GPT2, 1);
        c.causal = causal;
        expect_same_bits(&c, &masks, AR_MLP_COLUMN_ROW, one_two_four);
    }
}

Test(block, additive_mask_has_the_baselines_bits_for_every_broadcast)
{
    static float mask[B * 4 * S * S];
    static const uint8_t padding[B * S] = {1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1};
    fill_values(mask, B * 4 * S * S, 9, 3.0);
    for (size_t i = 0; i < B * 4 * S * S; i += 7)
        mask[i] = -INFINITY;
    for (size_t k = 0; k < S; k++)
        mask[2 * S + k] = -INFINITY; /* query 2 of sample 0, head 0 sees nothing */
    for (size_t variant = 0; variant < 8; variant++) {
        const ar_batch masks = {.additive_mask = mask,
                                .mask_batch = variant & 1 ? B : 1,
                                .mask_heads = variant & 2 ? 4 : 1,
                                .padding_mask = variant & 4 ? padding : NULL};
        ar_config c = match_config(AR_ARCH_STACK, 1);
        c.kv_heads = 4;
        c.causal = variant & 4;
        expect_same_bits(&c, &masks, AR_MLP_COLUMN_ROW, one_two_four);
    }
}

/* --- the comparison itself ---------------------------------------------------------------------------------------- */

Test(block, one_flipped_bit_of_the_reference_is_found)
{
    static float x[B * S * H], dy[B * S * H];
    fill_values(x, B * S * H, 3, 2.0);
    fill_values(dy, B * S * H, 4, 0.25);
    match_case m = {.config = match_config(AR_ARCH_STACK, 1), .batch = {B, S}, .x = x, .dy = dy, .seed = 5};
    SCOPED(match_weights_fini) match_weights w = {.seed = m.seed};
    SCOPED(ari_reference_fini) ari_reference r = {0};
    cr_assert_ok(match_baseline(&m, &w, &r));
    cr_assert_ok(match_ranks(&m, &w, &r, 2));
    for (size_t i = 0; i < r.count; i++) {
        float *value = &r.tensor[i].values[r.tensor[i].count - 1], kept = *value;
        *value = nextafterf(kept, 4.0f);
        cr_assert_eq(match_ranks(&m, &w, &r, 2), AR_ERR_DATA, "%s: not found", r.tensor[i].name);
        *value = kept;
    }
}
