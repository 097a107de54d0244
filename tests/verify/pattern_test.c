/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and shards: every detector fires on its trace and is silent on a near miss. */
#include "tests/verify/pattern_support.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

TestSuite(pattern_replica, .timeout = 300);
TestSuite(pattern_shard, .timeout = 300);

/* --- sums over copies --------------------------------------------------------------------------------------------- */

/* Partial values: rank r has a share of its own of every element; together they are the reference. */
static void make_partial(world *w)
{
    for (size_t i = 0; i < w->count; i++) {
        float rest = w->reference[i];
        for (int r = 0; r < w->d.ranks; r++) {
            const float part = r + 1 < w->d.ranks ? noise(i * 64 + (size_t)r + 99991) : rest;
            *at(w, r, i) = part;
            rest -= part;
        }
    }
}

Test(pattern_replica, partial_values_look_like_a_missing_all_reduce)
{
    for (int n = 2; n <= 64; n = n * 2 - 1) {
        world w;
        replicated(&w, "model.layers.3.mlp", 'b', n, 3, SHAPE(2, 8, 12));
        make_partial(&w);
        expect_cause(&w, "missing_all_reduce");
        expect_hint(&w, "over tp: the values of the ranks add up to the reference");
        expect_hint(&w, "no rank has it");
        expect_pattern(&w, "the copies differ from each other");
        world_free(&w);
    }
}

Test(pattern_replica, parts_that_add_up_though_two_ranks_have_the_whole)
{
    world w;
    replicated(&w, "model.layers.3.mlp", 'b', 4, 3, SHAPE(2, 8, 12));
    for (size_t i = 0; i < w.count; i++) {
        const float part = noise(i + 1000);
        *at(&w, 2, i) = part;
        *at(&w, 3, i) = -w.reference[i] - part;
    }
    expect_cause(&w, "missing_all_reduce");
    expect_hint(&w, "ranks 0..1 have it");
    world_free(&w);
}

/* A row-parallel bias is added after the sum, so every part has it. */
Test(pattern_replica, partial_values_with_a_bias_each_look_like_a_missing_all_reduce)
{
    for (int n = 2; n <= 8; n *= 2) {
        world w;
        replicated(&w, "layers.3.mlp.linear_fc2", 'f', n, 3, SHAPE(2, 5, 12));
        make_partial(&w);
        for (size_t i = 0; i < w.count; i++) {
            for (int r = 0; r < n; r++)
                *at(&w, r, i) += noise(i % 12 + 4321);
        }
        expect_cause(&w, "missing_all_reduce");
        expect_hint(&w, "a bias that every rank added to its part");
        for (size_t i = 0; i < w.count; i += 7) /* no vector any more */
            *at(&w, 0, i) += 0.1f * noise(i);
        expect_no_hint(&w, "a bias that every rank added");
        world_free(&w);
    }
}

Test(pattern_replica, a_sum_that_misses_one_percent_is_no_missing_all_reduce)
{
    world w;
    replicated(&w, "model.layers.3.mlp", 'b', 3, 3, SHAPE(2, 8, 12));
    make_partial(&w);
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 1, i) += 0.01f * noise(i + 7);
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_replica, copies_that_scarcely_differ_are_not_partial)
{
    world w;
    replicated(&w, "x", 'b', 2, 3, SHAPE(2, 8, 12));
    for (size_t i = 0; i < w.count; i++)
        *at(&w, (int)(i % 2), i) *= 1.0001f;
    expect_cause(&w, "wrong_scalar");
    expect_no_hint(&w, "mean");
    world_free(&w);
}

Test(pattern_replica, partial_kv_heads_add_up_over_their_own_copies)
{
    world w;
    grouped(&w, "model.layers.0.self_attn.k", 'b', 4, 2, 3, SHAPE(2, 8, 16), 2);
    for (size_t i = 0; i < w.count; i++) {
        const int first = at(&w, 0, i) ? 0 : 2;
        const float part = noise(i + 5000);
        *at(&w, first, i) = part;
        *at(&w, first + 1, i) = w.reference[i] - part;
    }
    expect_cause(&w, "missing_all_reduce");
    world_free(&w);
}

Test(pattern_replica, local_means_look_like_a_missing_average)
{
    world w;
    replicated(&w, "model.norm.weight", 'g', 3, 1, SHAPE(200));
    for (size_t i = 0; i < w.count; i++) {
        const float a = noise(i + 1000), b = noise(i + 2000);
        *at(&w, 0, i) = w.reference[i] + a;
        *at(&w, 1, i) = w.reference[i] + b;
        *at(&w, 2, i) = w.reference[i] - a - b;
    }
    expect_cause(&w, "missing_average");
    world_free(&w);
}

Test(pattern_replica, one_rank_with_the_value_among_zeros_looks_like_a_missing_broadcast)
{
    world w;
    replicated(&w, "x", 'f', 4, 3, SHAPE(2, 8, 12));
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 0, i) = *at(&w, 2, i) = *at(&w, 3, i) = 0.0f;
    expect_hint(&w, "missing broadcast or all-reduce over tp: rank 1 has the value");
    world_free(&w);
}

/* --- own block alone ---------------------------------------------------------------------------------------------- */

/* Outside its own block of features each rank holds `other` times noise. */
static void keep_own_features(world *w, float other)
{
    const size_t h = w->shape[2], part = h / (size_t)w->d.ranks;
    for (size_t i = 0; i < w->count; i++) {
        for (int r = 0; r < w->d.ranks; r++) {
            if (i % h / part != (size_t)r)
                *at(w, r, i) = other * noise(i + 777);
        }
    }
}

Test(pattern_replica, own_block_among_zeros_looks_like_a_missing_all_gather)
{
    world w;
    replicated(&w, "transformer.h.3.mlp.c_fc", 'b', 4, 3, SHAPE(2, 8, 16));
    keep_own_features(&w, 0.0f);
    expect_hint(&w, "missing all-gather along features: every rank has its own 1/4 of them right (rank 3: 12..15)");
    expect_hint(&w, "zeros elsewhere");
    world_free(&w);
}

Test(pattern_replica, own_block_among_rubbish_looks_like_a_missing_all_gather_too)
{
    world w;
    replicated(&w, "transformer.h.3.mlp.c_fc", 'b', 4, 3, SHAPE(2, 8, 16));
    keep_own_features(&w, 3.0f);
    expect_cause(&w, "missing_all_gather");
    expect_hint(&w, "along features");
    expect_hint(&w, "never arrived");
    world_free(&w);
}

Test(pattern_replica, one_wrong_value_inside_the_own_block_is_no_missing_all_gather)
{
    world w;
    replicated(&w, "transformer.h.3.mlp.c_fc", 'b', 4, 3, SHAPE(2, 8, 16));
    keep_own_features(&w, 3.0f);
    *at(&w, 1, 5) += 1.0f;
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_replica, own_tokens_among_zeros_are_named_tokens)
{
    world w;
    replicated(&w, "model.norm", 'f', 2, 3, SHAPE(3, 8, 4));
    for (size_t i = 0; i < w.count; i++)
        *at(&w, i / 4 % 8 < 4 ? 1 : 0, i) = 0.0f;
    expect_cause(&w, "missing_all_gather");
    expect_hint(&w, "along tokens");
    world_free(&w);
}

Test(pattern_replica, one_copy_that_drifted_is_named)
{
    world w;
    replicated(&w, "model.norm.weight", 'i', 4, 1, SHAPE(50));
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 2, i) = noise(i + 400);
    expect_hint(&w, "the copy of ranks 0..1, 3 is right, that of rank 2 is not");
    expect_pattern(&w, "on rank 2 only");
    world_free(&w);
}

Test(pattern_replica, copies_without_a_relation_are_said_to_differ)
{
    world w;
    replicated(&w, "x", 'b', 3, 3, SHAPE(2, 8, 12));
    for (size_t i = 0; i < w.count; i++) {
        for (int r = 0; r < 3; r++)
            *at(&w, r, i) = noise(i * 3 + (size_t)r + 7000);
    }
    expect_cause(&w, "unknown");
    expect_hint(&w, "each rank computed from data of its own");
    world_free(&w);
}

/* --- shards in the wrong place ------------------------------------------------------------------------------------ */

/* Rank r takes what the reference has where rank from(r) stands. */
static void take_shards(world *w, int dim, int (*from)(int, int))
{
    size_t stride = 1;
    for (int i = w->d.ndim - 1; i > dim; i--)
        stride *= w->shape[i];
    for (int r = 0; r < w->d.ranks; r++) {
        const size_t mine = w->layout[r].box[0].global[dim];
        const size_t other = w->layout[from(r, w->d.ranks)].box[0].global[dim];
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i))
                *at(w, r, i) = w->reference[i + other * stride - mine * stride];
        }
    }
}

static int from_first(int r, int n)
{
    (void)r;
    (void)n;
    return 0;
}

static int from_next(int r, int n)
{
    return (r + 1) % n;
}

Test(pattern_shard, equal_shards_look_like_equal_seeds)
{
    for (int dim = 0; dim < 2; dim++) {
        world w;
        sharded(&w, "lm_head.weight", 'i', 3, 2, SHAPE(12, 6), dim);
        take_shards(&w, dim, from_first);
        expect_cause(&w, "shards_seeded_alike");
        expect_hint(&w, "rank 1 has rank 0's, rank 2 has rank 0's");
        expect_pattern(&w, "on ranks 1..2 of 3");
        world_free(&w);
    }
}

Test(pattern_shard, one_other_value_in_a_repeated_shard_is_no_repetition)
{
    world w;
    sharded(&w, "lm_head.weight", 'i', 3, 2, SHAPE(12, 6), 0);
    take_shards(&w, 0, from_first);
    *at(&w, 2, 70) += 0.5f;
    expect_cause(&w, "part_of_one_rank");
    world_free(&w);
}

Test(pattern_shard, constant_shards_prove_no_repetition)
{
    world w;
    sharded(&w, "lm_head.weight", 'i', 2, 2, SHAPE(12, 6), 0);
    for (size_t i = 0; i < 36; i++)
        w.reference[i] = 0.0f;
    world_refresh(&w);
    for (size_t i = 36; i < 72; i++)
        *at(&w, 1, i) = 0.0f;
    expect_cause(&w, "never_written");
    world_free(&w);
}

Test(pattern_shard, rotated_shards_are_named)
{
    world w;
    sharded(&w, "model.layers.0.mlp.act", 'f', 4, 3, SHAPE(2, 3, 8), 2);
    take_shards(&w, 2, from_next);
    expect_hint(&w, "rotated order: rank r holds that of rank r + 1 mod 4");
    world_free(&w);
}

Test(pattern_shard, micro_batches_of_ranks_in_another_order_are_named)
{
    const size_t block[2] = {4, 4};
    world w;
    world_begin(&w, "model.layers.0.mlp", 'f', 2, 3, SHAPE(8, 3, 5));
    for (int r = 0; r < 2; r++)
        cr_assert_eq(ar_layout_packed(&w.layout[r], 3, w.shape, 0, block, 2, r, 2), AR_OK);
    world_end(&w);
    for (int r = 0; r < 2; r++)
        memcpy(w.local[r], w.reference + r * 60, 60 * sizeof(float));
    expect_cause(&w, "batch_order");
    world_free(&w);
}

Test(pattern_shard, a_copy_of_zeros_that_should_be_is_right_beside_one_with_values)
{
    world w;
    replicated(&w, "model.pos_emb", 'i', 2, 2, SHAPE(8, 5));
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = 0.0f;
    world_refresh(&w);
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 1, i) = noise(i);
    expect_cause(&w, "replicas_apart");
    expect_hint(&w, "the copy of rank 0 is right, that of rank 1 is not");
    world_free(&w);
}

Test(pattern_shard, a_packed_tensor_split_as_one_block_is_named)
{
    const size_t block[2] = {8, 8};
    world w;
    world_begin(&w, "mlp.gate_up.weight", 'i', 2, 2, SHAPE(16, 5));
    for (int r = 0; r < 2; r++)
        cr_assert_eq(ar_layout_packed(&w.layout[r], 2, w.shape, 0, block, 2, r, 2), AR_OK);
    world_end(&w);
    for (int r = 0; r < 2; r++)
        memcpy(w.local[r], w.reference + r * 40, 40 * sizeof(float));
    expect_cause(&w, "packed_cut_as_one");
    expect_hint(&w, "rank 0's part 1 is rank 1's part 0");
    world_free(&w);
}

static int from_head_modulo(int r, int n)
{
    (void)n;
    return r % 2 * 2; /* 4 ranks, 2 heads: the first rank that holds head r mod 2 */
}

Test(pattern_shard, the_wrong_kv_head_is_named)
{
    world w;
    grouped(&w, "model.layers.0.self_attn.k_proj.weight", 'i', 4, 2, 2, SHAPE(8, 6), 0);
    take_shards(&w, 0, from_head_modulo);
    expect_hint(&w, "wrong KV head: rank r holds head r mod 2");
    world_free(&w);
}

/* --- blocks in another order -------------------------------------------------------------------------------------- */

Test(pattern_shard, tokens_in_rotated_blocks_are_named)
{
    world w;
    replicated(&w, "model.layers.0.mlp.up_proj", 'f', 4, 3, SHAPE(2, 8, 3));
    for (int r = 0; r < 4; r++) {
        for (size_t i = 0; i < w.count; i++)
            *at(&w, r, i) = w.reference[i / 24 * 24 + (i % 24 / 6 + (size_t)r) % 4 * 6 + i % 6];
    }
    expect_cause(&w, "token_blocks_rotated");
    *at(&w, 2, 7) += 1.0f;
    expect_cause(&w, "replicas_apart");
    world_free(&w);
}

Test(pattern_shard, parts_gathered_in_a_row_are_named)
{
    world w;
    replicated(&w, "x", 'f', 2, 3, SHAPE(3, 4, 5));
    for (int r = 0; r < 2; r++) {
        for (size_t n = 0; n < 2; n++) {
            for (size_t b = 0; b < 3; b++)
                memcpy(&w.local[r][(n * 3 + b) * 10], &w.reference[(b * 2 + n) * 10], 10 * sizeof(float));
        }
    }
    expect_cause(&w, "gathered_in_rank_order");
    *at(&w, 1, 20) += 1.0f;
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_shard, a_repeated_chunk_is_named)
{
    world w;
    replicated(&w, "x", 'f', 2, 3, SHAPE(1, 4, 5));
    for (int r = 0; r < 2; r++)
        memcpy(&w.local[r][10], &w.reference[0], 10 * sizeof(float));
    expect_cause(&w, "shard_repeated");
    world_free(&w);
}

/* --- shards filled in part ---------------------------------------------------------------------------------------- */

/* Local features from `first` on become zero on ranks [0, ranks). */
static void clear_tail(world *w, size_t first, int ranks)
{
    const size_t part = w->shape[2] / (size_t)w->d.ranks;
    for (size_t i = 0; i < w->count; i++) {
        const int r = (int)(i % w->shape[2] / part);
        if (r < ranks && i % part >= first)
            *at(w, r, i) = 0.0f;
    }
}

Test(pattern_shard, heads_divided_twice_are_named)
{
    world w;
    sharded(&w, "model.layers.0.self_attn.context", 'f', 4, 3, SHAPE(2, 3, 64), 2);
    w.d.head_dim = 4;
    clear_tail(&w, 4, 4);
    expect_hint(&w, "heads: every rank has only the first 4 of its 16 features right (1 of 4 heads), the rest is zero");
    expect_hint(&w, "1/4 for 4 ranks: the local head count was divided by the number of ranks twice");
    expect_pattern(&w, "heads 1..3, 5..7, 9..11, ... (12 in all)");
    world_free(&w);
}

Test(pattern_shard, a_shard_without_its_end_is_named)
{
    world w;
    sharded(&w, "model.layers.0.mlp.up_proj", 'f', 4, 3, SHAPE(2, 3, 64), 2);
    clear_tail(&w, 12, 4);
    expect_cause(&w, "shard_tail_missing");
    expect_hint(&w, "shards: every rank has only the first 12 of its 16 features right, the rest is zero");
    world_free(&w);
}

Test(pattern_shard, a_tail_on_some_ranks_alone_is_no_divided_head_count)
{
    world w;
    sharded(&w, "model.layers.0.self_attn.context", 'f', 4, 3, SHAPE(2, 3, 64), 2);
    clear_tail(&w, 4, 3);
    expect_cause(&w, "zeros_of_ranks");
    clear_tail(&w, 8, 4);
    expect_cause(&w, "partly_written");
    world_free(&w);
}

Test(pattern_shard, no_head_at_all_is_named)
{
    world w;
    sharded(&w, "transformer.h.0.attn.context", 'f', 4, 3, SHAPE(2, 3, 16), 2);
    clear_tail(&w, 0, 4);
    expect_cause(&w, "no_head_computed");
    expect_pattern(&w, "all 96 elements, each zero where the reference is not; on all 4 ranks");
    world_free(&w);
}

/* The names of Hugging Face, GPT-2 and Megatron. */
Test(pattern_shard, modules_whose_inputs_are_split_are_known_by_everyones_names)
{
    static const char *const split[] = {"model.layers.0.self_attn.o_proj.weight",
                                        "transformer.h.0.attn.c_proj.bias",
                                        "decoder.layers.1.self_attention.linear_proj.weight",
                                        "decoder.layers.1.mlp.linear_fc2.bias",
                                        "layers.0.self_attention.dense.weight",
                                        "layers.0.mlp.dense_4h_to_h.weight"};
    static const char *const others[] = {"layers.0.mlp.dense_h_to_4h.weight",
                                         "layers.0.self_attention.linear_qkv.weight", "layers.0.mlp.linear_fc1.weight"};
    for (size_t i = 0; i < sizeof split / sizeof *split; i++)
        cr_expect(ari_name_is(split[i]) & ARI_IS_ROW_PARALLEL, "%s", split[i]);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        cr_expect_not(ari_name_is(others[i]) & ARI_IS_ROW_PARALLEL, "%s", others[i]);
}
