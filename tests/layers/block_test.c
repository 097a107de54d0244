/* SPDX-License-Identifier: Apache-2.0 */
/* Attention inside a block, with masks: every tensor a block reports, forward and backward, has the bits of the
 * independent baseline's on 1, 2 and 4 ranks, and stands where the baseline has it in the order of execution. Norms,
 * MLPs, activations, biases and rotary positions are random_models_test.c's. */
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 3, S = 6, H = 12 };

/* The block of a config, with data of its own, against the baseline's. */
static void expect_same_bits(const ar_config *c, const ar_batch *masks)
{
    static const int tps[] = {1, 2, 4, 0};
    static float x[B * S * H], dy[B * S * H];
    fill_values(x, B * S * H, 3, 2.0);
    fill_values(dy, B * S * H, 4, 0.25);
    match_case m = {.config = *c, .batch = masks ? *masks : (ar_batch){0}, .x = x, .dy = dy, .seed = 5};
    m.batch.batch = B;
    m.batch.seq = S;
    size_t tensors = 0;
    cr_assert_eq(match(&m, tps, &tensors), AR_OK, "arch %d, %zu/%zu heads: %s", (int)c->arch, c->heads, c->kv_heads,
                 ar_error_message());
    cr_assert_gt(tensors, 40);
}

Test(block, more_heads_than_features_of_the_model_have_the_baselines_bits)
{
    ar_config c = match_config(AR_ARCH_STACK, 1);
    c.heads = 8; /* heads * head_dim = 40 > hidden */
    c.kv_heads = 4;
    c.head_dim = 5;
    expect_same_bits(&c, NULL);
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
        expect_same_bits(&c, &masks);
        c = match_config(AR_ARCH_GPT2, 1);
        c.causal = causal;
        expect_same_bits(&c, &masks);
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
        expect_same_bits(&c, &masks);
    }
}

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
