/* SPDX-License-Identifier: Apache-2.0 */
/* Copies and shards: every detector fires on its trace and is silent on a near miss. */
#include "tests/verify/pattern_support.h"
#include "verify/diagnose/roles.h"

/* Rank r has a share of its own of every element; together they are the reference. */
static float partial(const world *w, int r, size_t i, float x)
{
    for (int k = 0; k < r && r + 1 == w->d.ranks; k++)
        x -= noise(i * 64 + (size_t)k + 99991);
    return r + 1 < w->d.ranks ? noise(i * 64 + (size_t)r + 99991) : x;
}

/* A row-parallel bias is added after the sum, so every part has it. */
VALUE(partial_with_bias, partial(w, r, i, x) + noise(i % 12 + 4321))
VALUE(partial_with_bias_and_noise, partial_with_bias(w, r, i, x) + (r == 0 && i % 7 == 0 ? 0.1f * noise(i) : 0.0f))
VALUE(partial_but_1_percent, partial(w, r, i, x) + (r == 1 ? 0.01f * noise(i + 7) : 0.0f))
VALUE(partial_in_part, i < 6 ? partial(w, r, i, x) : x)
VALUE(partial_beside_a_wrong_part, i < 6 ? partial(w, r, i, x) : 2.0f * x)
VALUE(two_wholes_and_two_opposites, r < 2 ? x : r == 2 ? noise(i + 1000) : -x - noise(i + 1000))
VALUE(one_in_10000, (size_t)r == i % 2 ? x * 1.0001f : x)
VALUE(half_of_a_head, r % 2 ? x - noise(i + 5000) : noise(i + 5000))
VALUE(local_mean, r == 0 ? x + noise(i + 1000) : r == 1 ? x + noise(i + 2000) : x - noise(i + 1000) - noise(i + 2000))
VALUE(rank_1_alone, r == 1 ? x : 0.0f)

/* Outside its own block of features each rank holds so many times noise. */
VALUE(own_features, column(w, i) / (w->shape[2] / (size_t)w->d.ranks) == (size_t)r ? x : w->by[0] * noise(i + 777))
VALUE(own_features_but_one, r == 1 && i == 5 ? own_features(w, r, i, x) + 1.0f : own_features(w, r, i, x))
VALUE(own_tokens, (token(w, i) < 4) == (r == 0) ? x : 0.0f)
VALUE(rank_2_drifted, r == 2 ? noise(i + 400) : x)
VALUE(unrelated, noise(i * 3 + (size_t)r + 7000))

static const trace of_replicas[] = {
    {"parts of a sum", "model.layers.3.mlp", 'b', WHOLE(2, 2, 8, 12), partial, CAUSE("missing_all_reduce"),
     HINT("over tp: the values of the ranks add up to the reference", "no rank has it"),
     PATTERN("the copies differ from each other"), ALSO(3, 5, 9, 17, 33)},
    {"parts of a sum in some elements", "model.norm.weight", 'g', WHOLE(2, 24), partial_in_part,
     CAUSE("missing_all_reduce"), PATTERN("elements 0..5")},
    {"parts of a sum beside equal copies that are wrong", "model.norm.weight", 'g', WHOLE(2, 24),
     partial_beside_a_wrong_part, NO("add up")},
    {"parts that add up though two ranks have the whole", "model.layers.3.mlp", 'b', WHOLE(4, 2, 8, 12),
     two_wholes_and_two_opposites, CAUSE("missing_all_reduce"), HINT("ranks 0..1 have it")},
    {"parts with a bias each", "layers.3.mlp.linear_fc2", 'f', WHOLE(2, 2, 5, 12), partial_with_bias,
     CAUSE("missing_all_reduce"), HINT("a bias that every rank added to its part"), ALSO(4, 8)},
    {"parts with something that is no vector", "layers.3.mlp.linear_fc2", 'f', WHOLE(2, 2, 5, 12),
     partial_with_bias_and_noise, NO("a bias that every rank added"), ALSO(4, 8)},
    {"a sum that misses one percent", "model.layers.3.mlp", 'b', WHOLE(3, 2, 8, 12), partial_but_1_percent,
     CAUSE("unknown")},
    {"copies that scarcely differ", "x", 'b', WHOLE(2, 2, 8, 12), one_in_10000, CAUSE("wrong_scalar"), NO("mean")},
    {"KV heads add up over their own copies", "model.layers.0.self_attn.k", 'b', GROUPED(4, 2, 2, 2, 8, 16),
     half_of_a_head, CAUSE("missing_all_reduce")},
    {"means of each rank", "model.norm.weight", 'g', WHOLE(3, 200), local_mean, CAUSE("missing_average")},
    {"the value on one rank among zeros", "x", 'f', WHOLE(4, 2, 8, 12), rank_1_alone, CAUSE("missing_broadcast"),
     HINT("missing broadcast or all-reduce over tp: rank 1 has the value")},
    {"the own block among zeros", "transformer.h.3.mlp.c_fc", 'b', WHOLE(4, 2, 8, 16), own_features,
     CAUSE("missing_all_gather"),
     HINT("missing all-gather along features: every rank has its own 1/4 of them right and zeros elsewhere")},
    {"the own block of a gradient among zeros", "h.0.rel.weight", 'g', WHOLE(4, 2, 8, 16), own_features,
     CAUSE("missing_all_reduce"), HINT("every rank has its own 1/4 of the", "the ranks' sum is the gradient")},
    {"the own block among rubbish", "transformer.h.3.mlp.c_fc", 'b', WHOLE(4, 2, 8, 16), own_features,
     CAUSE("missing_all_gather"), HINT("along features", "never arrived"), BY(3.0f)},
    {"one wrong value in the own block", "transformer.h.3.mlp.c_fc", 'b', WHOLE(4, 2, 8, 16), own_features_but_one,
     CAUSE("unknown"), BY(3.0f)},
    {"own tokens among zeros", "model.norm", 'f', WHOLE(2, 3, 8, 4), own_tokens, CAUSE("missing_all_gather"),
     HINT("along tokens")},
    {"one copy that drifted", "model.norm.weight", 'i', WHOLE(4, 50), rank_2_drifted, CAUSE("replicas_apart"),
     HINT("the copy of ranks 0..1, 3 is right, that of rank 2 is not"), PATTERN("on rank 2 only")},
    {"copies without a relation", "x", 'b', WHOLE(3, 2, 8, 12), unrelated, CAUSE("unknown"),
     HINT("each rank computed from data of its own")},
};

Test(pattern_replica, every_trace_is_named)
{
    EXPECT_TRACES(of_replicas);
}

/* What the reference has at index i of rank r's part if that is where rank `from` stands. */
static float in_place_of(const world *w, int r, size_t i, int from)
{
    const int dim = w->t->on.dim;
    const size_t stride = ari_volume(w->shape + dim + 1, w->d.ndim - dim - 1);
    return w->reference[i + (w->layout[from].box[0].global[dim] - w->layout[r].box[0].global[dim]) * stride];
}

VALUE(shard_of_the_first, in_place_of(w, r, i, 0))
VALUE(shard_of_the_next, in_place_of(w, r, i, (r + 1) % w->d.ranks))
/* 4 ranks, 2 heads: the first rank that holds head r mod 2. */
VALUE(head_modulo, in_place_of(w, r, i, r % 2 * 2))
VALUE(zero, 0.0f)
VALUE(zeros_at_first, i < 36 ? 0.0f : x)
VALUE(zero_on_rank_1, r == 1 ? 0.0f : x)
VALUE(noise_on_rank_1, r == 1 ? noise(i) : x)

/* A shard of two blocks that holds what an even cut of the whole would give the rank: i is in block `part` of it. */
static float cut_as_one(const world *w, int r, size_t i, float x)
{
    const size_t half = w->count / 2, own = half / (size_t)w->d.ranks, part = i / half;
    (void)x;
    return w->reference[(size_t)r * half + part * own + (i % half - (size_t)r * own)];
}

VALUE(tokens_rotated_by_rank, w->reference[i / 24 * 24 + (i % 24 / 6 + (size_t)r) % 4 * 6 + i % 6])
/* [2 ranks, 3 samples, 2 tokens, 5] in place of [3, 4, 5]. */
VALUE(parts_in_a_row, w->reference[(i / 10 % 3 * 2 + i / 30) * 10 + i % 10])
VALUE(first_chunk_twice, w->reference[i % 10])

/* Of shards of [2, 3, 64]: local features from `by[0]` on are zero on as many ranks as by[1] says, from by[2] on all. */
static float without_tail(const world *w, int r, size_t i, float x)
{
    const float local = (float)(column(w, i) % (w->shape[2] / (size_t)w->d.ranks));
    return ((float)r < w->by[1] && local >= w->by[0]) || (w->by[2] > 0.0f && local >= w->by[2]) ? 0.0f : x;
}

static const trace of_shards[] = {
    {"equal seeds of rows", "lm_head.weight", 'i', SHARDED(3, 0, 12, 6), shard_of_the_first,
     CAUSE("shards_seeded_alike"), HINT("rank 1 has rank 0's, rank 2 has rank 0's"), PATTERN("on ranks 1..2 of 3"),
     NEAR(2, 70, 0.5f, "part_of_one_rank")},
    {"equal seeds of columns", "lm_head.weight", 'i', SHARDED(3, 1, 12, 6), shard_of_the_first,
     CAUSE("shards_seeded_alike"), HINT("rank 1 has rank 0's, rank 2 has rank 0's"), PATTERN("on ranks 1..2 of 3")},
    {"constant shards prove no repetition", "lm_head.weight", 'i', SHARDED(2, 0, 12, 6), zero_on_rank_1,
     CAUSE("never_written"), OF(zeros_at_first)},
    {"rotated shards", "model.layers.0.mlp.act", 'f', SHARDED(4, 2, 2, 3, 8), shard_of_the_next,
     CAUSE("shards_rotated"), HINT("rotated order: rank r holds that of rank r + 1 mod 4")},
    {"micro-batches of ranks in another order", "model.layers.0.mlp", 'f', PACKED(2, 8, 3, 5), cut_as_one,
     CAUSE("batch_order")},
    {"a copy of zeros that should be beside one with values", "model.pos_emb", 'i', WHOLE(2, 8, 5), noise_on_rank_1,
     CAUSE("replicas_apart"), HINT("the copy of rank 0 is right, that of rank 1 is not"), OF(zero)},
    {"a packed tensor split as one block", "mlp.gate_up.weight", 'i', PACKED(2, 16, 5), cut_as_one,
     CAUSE("packed_cut_as_one"), HINT("rank 0's part 1 is rank 1's part 0")},
    {"the wrong KV head", "model.layers.0.self_attn.k_proj.weight", 'i', GROUPED(4, 2, 0, 8, 6), head_modulo,
     CAUSE("wrong_kv_head"), HINT("wrong KV head: rank r holds head r mod 2")},
    {"tokens in rotated blocks", "model.layers.0.mlp.up_proj", 'f', WHOLE(4, 2, 8, 3), tokens_rotated_by_rank,
     CAUSE("token_blocks_rotated"), NEAR(2, 7, 1.0f, "replicas_apart")},
    {"parts gathered in a row", "x", 'f', WHOLE(2, 3, 4, 5), parts_in_a_row, CAUSE("gathered_in_rank_order"),
     NEAR(1, 20, 1.0f, "unknown")},
    {"a repeated chunk", "x", 'f', WHOLE(2, 1, 4, 5), first_chunk_twice, CAUSE("shard_repeated")},
    {"heads divided twice", "model.layers.0.self_attn.context", 'f', SHARDED(4, 2, 2, 3, 64), without_tail,
     CAUSE("divided_twice"),
     HINT("heads: every rank has only the first 4 of its 16 features right (1 of 4 heads), the rest is zero",
          "1/4 for 4 ranks: the local head count was divided by the number of ranks twice"),
     PATTERN("heads 1..3, 5..7, 9..11, ... (12 in all)"), BY(4, 4), KNOWN(.head_dim = 4)},
    {"heads that do not divide, divided twice", "model.layers.0.self_attn.context", 'f', SHARDED(2, 2, 2, 3, 24),
     without_tail, CAUSE("divided_twice"), HINT("3 / 2 rounded down"), BY(4, 2), KNOWN(.head_dim = 4)},
    {"shards without their end", "model.layers.0.mlp.up_proj", 'f', SHARDED(4, 2, 2, 3, 64), without_tail,
     CAUSE("shard_tail_missing"), BY(12, 4),
     HINT("shards: every rank has only the first 12 of its 16 features right, the rest is zero")},
    {"a tail on some ranks alone", "model.layers.0.self_attn.context", 'f', SHARDED(4, 2, 2, 3, 64), without_tail,
     CAUSE("zeros_of_ranks"), BY(4, 3)},
    {"a longer tail on some ranks", "model.layers.0.self_attn.context", 'f', SHARDED(4, 2, 2, 3, 64), without_tail,
     CAUSE("partly_written"), BY(4, 3, 8)},
    {"no head at all", "transformer.h.0.attn.context", 'f', SHARDED(4, 2, 2, 3, 16), zero, CAUSE("no_head_computed"),
     PATTERN("all 96 elements, each zero where the reference is not; on all 4 ranks")},
};

Test(pattern_shard, every_trace_is_named)
{
    EXPECT_TRACES(of_shards);
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
