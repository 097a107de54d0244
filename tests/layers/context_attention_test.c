/* SPDX-License-Identifier: Apache-2.0 */
/* Attention over a sequence that context-parallel ranks share, and of fewer KV heads than tensor-parallel ranks: every
 * tensor of a block, its probabilities and gradients among them, has the bits of the independent baseline's, round the
 * ring, by inner neighbours, and both, and on ranks that hold copies of one KV head. */
#include "gpu/device_private.h"
#include "support/bits.h"
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 2, S = 24, H = 12 };

static ar_config config_of(size_t heads, size_t kv_heads)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    c.heads = heads;
    c.kv_heads = kv_heads;
    c.ffn = 48;
    c.max_positions = S;
    c.qkv_bias = c.out_bias = true;
    return c;
}

static match_case block_of(const ar_config *c)
{
    static float x[B * S * H], dy[B * S * H];
    fill_values(x, B * S * H, 13, 2.0);
    fill_values(dy, B * S * H, 14, 0.25);
    return (match_case){.config = *c, .batch = {.batch = B, .seq = S}, .x = x, .dy = dy, .seed = 15};
}

static void expect_same_bits(const match_case *c, const ar_parallel *layouts, size_t n)
{
    SCOPED(match_weights_fini) match_weights w = {.seed = c->seed};
    SCOPED(ari_reference_fini) ari_reference r = {0};
    cr_assert_ok(match_baseline(c, &w, &r));
    for (size_t i = 0; i < n; i++) {
        const ar_parallel *l = &layouts[i];
        match_case m = *c;
        m.run.parallel = *l;
        cr_expect_eq(match_ranks(&m, &w, &r, l->tp), AR_OK, "%zu/%zu heads, tp=%d cp=%d inner %d zigzag %d sp %d: %s",
                     c->config.heads, c->config.kv_heads, l->tp, l->cp, l->cp_inner, l->zigzag, l->sp,
                     ar_error_message());
    }
}

#define COUNT(list) (sizeof(list) / sizeof *(list))

static const ar_parallel layouts[] = {
    {.tp = 1, .cp = 2},
    {.tp = 1, .cp = 3, .zigzag = true},
    {.tp = 1, .cp = 2, .cp_inner = 2},
    {.tp = 1, .cp = 4, .cp_inner = 2, .zigzag = true},
    {.tp = 2, .cp = 2, .zigzag = true, .sp = true},
    {.tp = 2, .cp = 2, .cp_inner = 2, .sp = true},
    {.tp = 1, .cp = 8, .cp_inner = 2},
};

Test(context_attention, every_layout_has_the_baselines_bits)
{
    for (int rope = 0; rope < 2; rope++) {
        ar_config c = config_of(8, 4);
        c.rope.kind = rope == 1 ? AR_ROPE_DEFAULT : AR_ROPE_NONE;
        c.causal = rope == 1;
        const match_case m = block_of(&c);
        expect_same_bits(&m, layouts, COUNT(layouts));
    }
}

Test(context_attention, windows_shorter_and_longer_than_a_chunk_have_the_baselines_bits)
{
    static const size_t windows[] = {1, 3, 5, 13};
    for (size_t i = 0; i < COUNT(windows); i++) {
        ar_config c = config_of(4, 4);
        c.window = windows[i];
        const match_case m = block_of(&c);
        expect_same_bits(&m, layouts, 5);
    }
}

/* Copies of a KV head on tensor-parallel ranks, on neighbours, and on both; with a ring they share its gradient too. */
Test(context_attention, copies_of_kv_heads_have_the_baselines_bits)
{
    static const ar_parallel copied[] = {
        {.tp = 1, .cp = 4, .cp_inner = 4},
        {.tp = 2, .cp = 2, .cp_inner = 2},
        {.tp = 2, .cp = 6, .cp_inner = 6, .sp = true},
        {.tp = 4, .cp = 2},
        {.tp = 2, .cp = 4, .cp_inner = 2, .zigzag = true, .sp = true},
        {.tp = 2, .cp = 12, .cp_inner = 6, .zigzag = true},
    };
    for (size_t kv_heads = 1; kv_heads <= 2; kv_heads++) {
        const ar_config c = config_of(12, kv_heads);
        const match_case m = block_of(&c);
        expect_same_bits(&m, copied, COUNT(copied));
    }
}

Test(context_attention, fewer_kv_heads_than_tensor_parallel_ranks_have_the_baselines_bits)
{
    static const struct {
        size_t heads, kv_heads;
        int tps[6];
    } cases[] = {{12, 1, {2, 3, 4, 6, 12}}, {8, 2, {2, 4, 8}}, {12, 3, {3, 6, 12}}};
    for (size_t i = 0; i < 4 * sizeof cases / sizeof *cases; i++) {
        ar_config c = config_of(cases[i / 4].heads, cases[i / 4].kv_heads);
        c.rope.kind = i & 1 ? AR_ROPE_DEFAULT : AR_ROPE_NONE;
        match_case m = block_of(&c);
        m.run.parallel.sp = i & 2;
        cr_expect_eq(match(&m, cases[i / 4].tps, NULL), AR_OK, "%zu query and %zu KV heads, sp %d: %s", c.heads,
                     c.kv_heads, m.run.parallel.sp, ar_error_message());
    }
}

Test(context_attention, masks_documents_positions_and_dropout_go_by_the_place_in_the_sequence)
{
    static uint8_t padding[B * S];
    static float additive[B * 8 * S * S];
    static int64_t positions[B * S];
    static int32_t documents[B * S];
    const ar_config c = config_of(8, 4);
    match_case m = block_of(&c);
    for (size_t i = 0; i < B * S; i++) {
        padding[i] = i % S < S - 3 * (i / S);
        positions[i] = (int64_t)((i * 7 + i / S) % S);
        documents[i] = (int32_t)(i % S / (5 + i / S));
    }
    fill_values(additive, B * 8 * S * S, 5, 1.0);
    for (size_t i = 0; i < B * 8 * S * S; i += 11)
        additive[i] = -INFINITY;
    m.batch.padding_mask = padding;
    m.batch.additive_mask = additive;
    m.batch.mask_batch = B;
    m.batch.mask_heads = 8;
    m.batch.position_ids = positions;
    m.batch.documents = documents;
    m.run.dropout = 0.3;
    expect_same_bits(&m, layouts, COUNT(layouts));
}

/* A block alone, on lengths that no model's layout would have: the attention looks at them itself. */
Test(context_attention, a_sequence_that_cannot_be_shared_out_is_refused)
{
    const ar_config c = config_of(4, 4);
    match_case m = block_of(&c);
    SCOPED(match_weights_fini) match_weights w = {.seed = m.seed};
    SCOPED(ari_reference_fini) ari_reference r = {0};
    cr_assert_ok(match_baseline(&m, &w, &r));
    m.batch.seq = 10; /* 2 ranks have 5 positions each, and a zigzag has 4 chunks */
    m.run.parallel.cp = 2;
    m.run.parallel.zigzag = true;
    cr_expect_refused(match_ranks(&m, &w, &r, 1), AR_ERR_INDIVISIBLE, "10");
}

static const ar_parallel folded = {.tp = 1, .cp = 6, .cp_inner = 2, .zigzag = true};

Test(context_attention, every_schedule_of_the_ranks_has_the_baselines_bits)
{
    const ar_config c = config_of(4, 1);
    match_case m = block_of(&c);
    m.run.sim.explore = true;
    for (m.run.sim.schedule_seed = 1; m.run.sim.schedule_seed <= 12; m.run.sim.schedule_seed++)
        expect_same_bits(&m, &folded, 1);
}

Test(context_attention, a_device_without_the_hosts_memory_has_the_baselines_bits)
{
    ar_device *device = NULL;
    const ar_config c = config_of(4, 2);
    match_case m = block_of(&c);
    if (ari_device_emulated_create(&device) == AR_ERR_UNSUPPORTED)
        cr_skip_test("%s", ar_error_message());
    ar_device_destroy(device);
    m.run.device.kind = AR_DEVICE_EMULATED;
    expect_same_bits(&m, &folded, 1);
}
