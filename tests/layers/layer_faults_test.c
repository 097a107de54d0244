/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes that layers make on request: which tensor shows each first, in layouts where it matters, and layouts where
 * it does not. */
#include "support/match.h"
#include "tests/support/test.h"

typedef struct fault_row {
    ar_fault fault;
    ar_arch arch;
    int tp, dp;
    bool sp, forward_first; /* forward_first: two micro-batches of it */
    const char *first;      /* in the baseline's order; NULL: nothing differs */
} fault_row;

static const fault_row table[] = {
    {AR_FAULT_sp_norm_grad_local, AR_ARCH_LLAMA, 2, 1, true, false, "model.norm.weight:grad"},
    {AR_FAULT_sp_norm_grad_local, AR_ARCH_LLAMA, 2, 1, false, false, NULL},
    {AR_FAULT_sp_row_bias_grad_local, AR_ARCH_GPT2, 2, 1, true, false, "transformer.h.0.mlp.c_proj.bias:grad"},
    {AR_FAULT_sp_row_bias_grad_local, AR_ARCH_GPT2, 2, 1, false, false, NULL},
    {AR_FAULT_sp_row_bias_grad_local, AR_ARCH_LLAMA, 2, 1, true, false, NULL},
    {AR_FAULT_sp_position_grad_local, AR_ARCH_GPT2, 2, 1, true, false, "transformer.wpe.weight:grad"},
    {AR_FAULT_sp_position_grad_local, AR_ARCH_GPT2, 4, 1, false, false, NULL},
    {AR_FAULT_positions_local, AR_ARCH_GPT2, 2, 1, true, false, "transformer.drop:fwd"},
    {AR_FAULT_positions_local, AR_ARCH_GPT2, 2, 1, false, false, NULL},
    {AR_FAULT_gather_batch_order, AR_ARCH_STACK, 2, 1, true, false, "layers.0.attn.wq:fwd"},
    {AR_FAULT_gather_batch_order, AR_ARCH_STACK, 2, 1, false, false, NULL},
    {AR_FAULT_gather_batch_order, AR_ARCH_STACK, 2, 2, true, true, NULL}, /* one sample at a time */
    {AR_FAULT_embedding_tied_once, AR_ARCH_GPT2, 1, 1, false, false, "transformer.wte.weight:grad"},
    {AR_FAULT_embedding_tied_once, AR_ARCH_LLAMA, 1, 1, false, false, NULL}, /* not tied */
    {AR_FAULT_silent_truncation, AR_ARCH_LLAMA, 2, 1, false, false, "model.embed_tokens:fwd"},
    {AR_FAULT_silent_truncation, AR_ARCH_LLAMA, 2, 1, true, false, "model.embed_tokens:fwd"},
    {AR_FAULT_silent_truncation, AR_ARCH_LLAMA, 1, 1, false, false, NULL},
    {AR_FAULT_world_rank_in_group, AR_ARCH_LLAMA, 2, 2, false, false, "model.embed_tokens:fwd"},
    {AR_FAULT_world_rank_in_group, AR_ARCH_LLAMA, 2, 1, true, false, NULL},
    {AR_FAULT_saved_input_overwritten, AR_ARCH_LLAMA, 1, 1, false, true, "lm_head.weight:grad"},
    {AR_FAULT_saved_input_overwritten, AR_ARCH_LLAMA, 2, 1, true, true, "lm_head.weight:grad"},
    {AR_FAULT_saved_input_overwritten, AR_ARCH_LLAMA, 2, 1, true, false, NULL},
    {AR_FAULT_norm_padded_lanes, AR_ARCH_LLAMA, 1, 1, false, false, "model.layers.0.input_layernorm:fwd"},
    {AR_FAULT_norm_padded_lanes, AR_ARCH_GPT2, 2, 1, true, false, "transformer.h.0.ln_1:fwd"},
    {AR_FAULT_bias_added_twice, AR_ARCH_GPT2, 1, 1, false, false, "transformer.h.0.attn.q:fwd"},
    {AR_FAULT_bias_added_twice, AR_ARCH_STACK, 2, 1, true, false, "layers.0.mlp.w1:fwd"},
    {AR_FAULT_bias_added_twice, AR_ARCH_LLAMA, 2, 1, true, false, NULL},
    {AR_FAULT_row_bias_partial_grad, AR_ARCH_STACK, 2, 1, true, false, "layers.0.mlp.w2.bias:grad"},
    {AR_FAULT_row_bias_partial_grad, AR_ARCH_STACK, 2, 1, false, false, "layers.0.mlp.w2.bias:grad"},
    {AR_FAULT_row_bias_partial_grad, AR_ARCH_STACK, 1, 1, false, false, NULL},
    {AR_FAULT_column_dx_not_reduced, AR_ARCH_LLAMA, 2, 1, true, false, "lm_head:bwd"},
    {AR_FAULT_row_bias_every_rank, AR_ARCH_GPT2, 2, 1, true, false, "transformer.h.0.attn.c_proj:fwd"},
};

Test(layer_faults, each_shows_where_it_was_made_and_nowhere_else)
{
    static const int64_t ids[2 * 8] = {0, 10, 3, 7, 1, 9, 4, 4, 2, 10, 8, 5, 6, 0, 3, 10};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        const fault_row *f = &table[i];
        const int tps[] = {f->tp, 0};
        match_case c = {.config = match_config(f->arch, 1),
                        .batch = {2, 8, ids},
                        .seed = 8,
                        .sp = f->sp,
                        .dp = f->dp,
                        .micro_batches = f->forward_first ? 2 : 1,
                        .forward_first = f->forward_first,
                        .fault = f->fault};
        const ar_status st = match(&c, tps, NULL);
        const char *name = ar_fault_name(f->fault);
        if (!f->first) {
            cr_assert_eq(st, AR_OK, "row %zu, %s: %s", i, name, ar_error_message());
            continue;
        }
        cr_assert_eq(st, AR_ERR_DATA, "row %zu, %s: nothing differs", i, name);
        cr_assert_not_null(strstr(ar_error_message(), f->first), "row %zu, %s: %s", i, name, ar_error_message());
    }
}

/* 4 positions a rank, in 2 chunks and at once. */
Test(layer_faults, chunks_put_down_or_multiplied_wrongly_show_in_the_first_product)
{
    static const int64_t ids[2 * 8] = {0, 10, 3, 7, 1, 9, 4, 4, 2, 10, 8, 5, 6, 0, 3, 10};
    static const ar_fault faults[] = {AR_FAULT_allgather_token_order, AR_FAULT_gather_batch_order,
                                      AR_FAULT_chunk_not_awaited};
    static const int tps[] = {2, 0};
    for (int i = 0; i < 4; i++) {
        match_case c = {.config = match_config(AR_ARCH_LLAMA, 1), .batch = {2, 8, ids}, .seed = 8, .sp = true};
        c.fault = faults[i < 3 ? i : 2];
        c.overlap = i < 3 ? 2 : 1;
        cr_assert_eq(match(&c, tps, NULL), i < 3 ? AR_ERR_DATA : AR_OK, "case %d: %s", i, ar_error_message());
        if (i < 3)
            cr_assert_not_null(strstr(ar_error_message(), "model.layers.0.self_attn.q_proj:fwd"), "case %d: %s", i,
                               ar_error_message());
    }
}

/* Lanes are padded to the next power of two, which a width of 16 is. */
Test(layer_faults, padded_lanes_do_no_harm_to_a_power_of_two)
{
    static const int tps[] = {2, 0};
    static const int64_t ids[2 * 4] = {0, 10, 3, 7, 1, 9, 4, 4};
    match_case c = {.config = match_config(AR_ARCH_GPT2, 1), .batch = {2, 4, ids}, .fault = AR_FAULT_norm_padded_lanes};
    c.config.hidden = 16;
    cr_assert_ok(match(&c, tps, NULL));
    c.config = match_config(AR_ARCH_LLAMA, 1);
    c.config.hidden = 16;
    c.config.norm_plus_one = true;
    cr_assert_ok(match(&c, tps, NULL));
}
