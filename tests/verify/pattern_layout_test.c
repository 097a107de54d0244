/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes in a mesh of data- and tensor-parallel ranks, each spoiled by hand as the mistake would. */
#include "tests/verify/pattern_support.h"

/* A part of the reference for each of `n`: they add up to it. */
static float part_of(size_t i, int k, int n, float reference)
{
    const double even = (double)reference / n, off = 0.3 * (double)noise(i + 7);
    return (float)(k == 0 ? even + off : k == 1 ? even - off : even);
}

VALUE(part_of_dp, part_of(i, dp_rank(w, r), dp_of(w), x))
VALUE(part_twice, x + part_of(i, 1, 2, x))
VALUE(half_zero, i >= 48 ? 0.0f : x)
VALUE(by_element_on_rank_1, r == 1 ? x * (0.75f + 0.5f * noise(i + 4000)) : x)
VALUE(smaller_on_rank_1, r == 1 ? 0.2f * noise(i + 3000) : x)
VALUE(part_on_rank_1, r == 1 ? 0.5f * x + 0.5f * noise(i + 7) : x)
VALUE(half_of_the_mean_on_rank_1, r == 1 ? x + noise(i + 7) : x)
VALUE(half_of_the_sum, 0.5f * x + 0.5f * noise(i + 7))
VALUE(third_of_the_sum, x / 3.0f + 0.47f * noise(i + 7))
VALUE(own_tokens, token(w, i) / (w->shape[1] / 2) == (size_t)tp_rank(w, r) ? x : 0.0f)
VALUE(first_rank_alone, r == 0 ? x : 0.0f)
/* What one branch gives is whole on each rank, and the rest is shared out. */
VALUE(branch, noise(i + 70))
VALUE(branch_and_part, noise(i + 70) + part_of(i, tp_rank(w, r), tp_of(w), x - noise(i + 70)))
VALUE(part_of_tp, part_of(i, tp_rank(w, r), tp_of(w), x))
/* The second group alone has its own features alone. */
VALUE(own_features_of_rank_2_and_3,
      dp_rank(w, r) == 0 || column(w, i) / (w->shape[2] / 2) == (size_t)tp_rank(w, r) ? x : 0.0f)

/* The first group has parts of sums, the second values that are not numbers. */
VALUE(parts_then_nan, dp_rank(w, r) == 0 ? part_of_tp(w, r, i, x) : i % 12 == 5 ? NAN : x)
VALUE(twice_then_nan, dp_rank(w, r) == 0 ? 2.0f * x : i % 12 == 5 ? NAN : x)

/* Of [6, 4, 8], samples by three: a batch norm with the statistics of each three. */
static size_t three_of(size_t i)
{
    return i / 96 * 4 + i / 8 % 4;
}

VALUE(norm_of_three, x *(0.9f + 0.05f * (float)three_of(i)) + 0.3f * noise(three_of(i) + 50))
/* Of [2, 16, 8], tokens in 4 parts. */
VALUE(first_of_part, token(w, i) % 4 == 0 && token(w, i) > 0 ? noise(i + 60) : x)
VALUE(first_of_all, token(w, i) % 4 == 0 ? noise(i + 60) : x)
VALUE(some_thrice, i / 8 == 0 || i / 8 == 3 || i / 8 == 7 || i / 8 == 8 ? 3.0f * x : x)
VALUE(same_of_each_part_thrice, i / 8 % 3 == 1 ? 3.0f * x : x)
VALUE(more_on_later_ranks, r ? x * 1.07f : x * 1.01f)
VALUE(a_bit_apart, tp_rank(w, r) ? x * 1.001f : x * 0.999f)

/* Samples of 4 over 3 ranks: 2, 1 and 1. */
static double share_of(int rank)
{
    return rank == 0 ? 0.5 : 0.25;
}

VALUE(mean_of_means, (double)x / (dp_of(w) * share_of(dp_rank(w, r))))
VALUE(sum_of_means, (double)x / share_of(dp_rank(w, r)))
/* Three samples in two micro-batches of two and one: 3/(2*2) and 3/(2*1). */
/* Of [2, 6, 8], parts of 6, 3, 2 and 1 tokens. */
VALUE(means_of_tokens, x *(i / 8 < 6 ? 0.5f : i / 8 < 9 ? 1.0f : i / 8 < 11 ? 1.5f : 3.0f))
VALUE(mean_of_micro_batches, x *(i < w->count / 3 * 2 ? 0.75f : 1.5f))
VALUE(scaled, x * w->by[0])

enum { SEQ = 5, HEADS = 3, HEAD = 4, LANES = HEADS * HEAD };

/* Each rank of two has [heads, tokens, head] where [tokens, heads, head] is wanted. */
static float heads_before_tokens(const world *w, int r, size_t i, float x)
{
    const size_t lane = column(w, i) % LANES, k = token(w, i) * LANES + lane, sample = i / (2 * LANES * SEQ);
    (void)x;
    return w->reference[(sample * SEQ + k / HEAD % SEQ) * 2 * LANES + (size_t)r * LANES + k / (HEAD * SEQ) * HEAD +
                        k % HEAD];
}

/* What rank k of 4 adds to a part of 192 elements that it shares with its neighbour. */
static float share(size_t i, int k)
{
    return noise(i % 192 * 4 + (size_t)k + 500);
}

VALUE(sum_of_neighbours, i < 192 ? share(i, 0) + share(i, 1) : share(i, 2) + share(i, 3))
VALUE(sum_of_others, share(i, r % 2) + share(i, r % 2 + 2))
VALUE(five, 5.0f)
VALUE(norm_of_own, tp_rank(w, r) ? x * 0.6f : x * 0.8f)
VALUE(zero, 0.0f)
VALUE(wrong_on_rank_2_and_3, r > 1 ? noise(i + 600) : x)
VALUE(later_tokens_off, token(w, i) > 1 ? noise(i + 600) : x)
VALUE(first_group_alone, dp_rank(w, r) == 0 ? x : 0.0f)
VALUE(samples_of_world_rank, w->reference[i % (w->count / 2) + (size_t)(r % 2) * (w->count / 2)])

/* [3, 8, 8] of two ranks' [3, 4, 8], one after the other. */
VALUE(in_rank_order, w->reference[(i / 8 / 4 % 3 * 8 + i / 8 / 12 * 4 + i / 8 % 4) * 8 + i % 8])
/* [2, 4, 8] */
VALUE(reversed, w->reference[(7 - i / 8) * 8 + i % 8])

static const int64_t three_ids[] = {2, 5, 5, 11}, repeated[] = {2, 5, 5, 11, 11, 8};
VALUE(table_before, noise(i + 9000))
VALUE(rows_before, noise((size_t)three_ids[i / 8] * 8 + i % 8 + 9000))
VALUE(rows_of_the_ids, i / 8 == 2 || i / 8 == 5 || i / 8 == 11 ? 0.01f * (float)(i % 8) : x)
VALUE(rows_of_repeated_ids, i / 8 == 5 ? noise(i % 8 + 900) : i / 8 == 11 ? noise(i % 8 + 950) : x)

enum { FIRST = 34, VOCAB = 40 };
VALUE(without_padding, i < FIRST * 8 ? x : 0.0f)
VALUE(with_padding, i < FIRST * 8 ? x : 0.01f * noise(i + 900))
VALUE(last_ids_lost, i % 11 >= (size_t)w->by[0] ? -INFINITY : x)

/* A norm with a bias: 12 lanes are padded to 16, which stretches what stands before the bias. */
static float stretched(size_t i, float x, float by)
{
    const float bias = 0.05f * noise(i % 12 + 99);
    return (x - bias) * by + bias;
}

VALUE(over_16_lanes, stretched(i, x, sqrtf(16.0f / 12.0f)))
VALUE(over_other_lanes, stretched(i, x, 1.5f + 0.1f * (float)(i / 12)))

#define UP "model.layers.0.mlp.up_proj.weight"
#define UP_OUT "model.layers.0.mlp.up_proj"
#define Q_PROJ "model.layers.0.self_attn.q_proj"
#define CONTEXT "model.layers.0.self_attn.context"

#define NORM "model.norm.weight", 'g'
#define MICRO "lm_head.logits", 'b', MESH(1, 1, -1, 3, 4, 8)
#define LOGITS "lm_head.logits", 'b', MESH(3, 2, 2, 4, 3, 8)
#define EMBEDDING "model.embed_tokens", 'f', MESH(2, 2, -1, 4, 3, 8)
#define CUT_HEADS CONTEXT, 'f', SHARDED(2, 2, 2, SEQ, 2 * LANES), heads_before_tokens
#define PADDED_NORM "transformer.h.0.ln_1", 'f', MESH(1, 2, -1, 2, 3, 12)
#define PADDED "lm_head.weight", 'g', MESH(1, 1, -1, VOCAB, 8), with_padding, OF(without_padding)
#define REDUCED CAUSE("missing_all_reduce")
#define OVER_DP REDUCED, HINT("missing all-reduce over dp"), NO("over tp")

static double of_expert(size_t expert, size_t i)
{
    return (double)((i * 37 % 101 + 1) * (expert * expert + 1) + (i * 13 + expert * 29) % 17);
}
VALUE(each_expert, of_expert(i / 48, i % 48))
VALUE(mean_of_experts,
      (of_expert(0, i % 48) + of_expert(1, i % 48) + of_expert(2, i % 48) + of_expert(3, i % 48)) / 4.0)
VALUE(twice_on_rank_1, r == 1 ? 2.0f * x : x)

static const trace traces[] = {
    {"the mean of shards of one index each", "layers.0.ffn.w1", 'g', SHARDED(4, 0, 4, 6, 8), mean_of_experts,
     OF(each_expert), CAUSE("wrong_group"), HINT("the mean of all 4 shards"), KNOWN(RANKS(0, 0, 4))},
    {"a moment of one rank's decay rate", "model.norm.weight", 'v', WHOLE(2, 96), twice_on_rank_1, CAUSE("other_betas"),
     HINT("as large on rank 1")},
    {"gradients not added over dp", UP, 'g', MESH(2, 2, -1, 8, 12), part_of_dp, OVER_DP},
    {"a part of a sum on one rank", UP, 'g', MESH(2, 1, -1, 8, 12), part_on_rank_1, REDUCED, HINT("on rank 1 alone")},
    {"one of the parts of a mean on one rank", UP, 'g', MESH(2, 1, -1, 8, 12), half_of_the_mean_on_rank_1, REDUCED,
     HINT("(mean) over dp on rank 1 alone")},
    {"a part of a sum of which each has a share", UP, 'g', MESH(2, 1, -1, 8, 12), half_of_the_sum,
     CAUSE("missing_reduce_scatter"), KNOWN(.zero = true)},
    {"a part of a sum of which each has a share, of as many micro-batches", UP, 'g', MESH(2, 1, -1, 8, 12),
     half_of_the_sum, CAUSE("missing_reduce_scatter"), KNOWN(.zero = true, .micro_batches = 2, .batch = 2, .seq = 4)},
    {"a third of a sum on all of three ranks", UP, 'g', MESH(3, 1, -1, 8, 12), third_of_the_sum, REDUCED,
     HINT("what one of 3 ranks contributes")},
    {"an expert's gradient on the ranks with tokens", "model.layers.0.mlp.experts.3.down_proj.weight", 'g',
     MESH(2, 1, -1, 8, 12), first_rank_alone, REDUCED, HINT("had no tokens for it")},
    {"a part of one branch", "model.layers.0.mlp", 'b', MESH(1, 2, -1, 2, 4, 12), branch_and_part, REDUCED,
     HINT("each has all of model.layers.0.mlp.gate:bwd"),
     BESIDE("model.layers.0.mlp:bwd", "model.layers.0.mlp.gate:bwd", branch)},
    {"own positions alone of a cut value", UP_OUT, 'f', MESH(1, 2, 2, 2, 4, 12), own_tokens,
     CAUSE("missing_all_gather"), HINT("along the sequence"), KNOWN(.sp = true)},
    {"what rounding hides is no zero", UP, 'g', MESH(2, 1, -1, 8, 12), smaller_on_rank_1, NO("zeros from"),
     KNOWN(.allowed = 0.4, .noise = 0.4)},
    {"a factor of each element on one rank is no part of a sum", UP, 'g', MESH(2, 1, -1, 8, 12), by_element_on_rank_1,
     CAUSE("replicas_apart")},
    {"the others' parts added again to shares of gradients", UP, 'g', MESH(2, 1, -1, 8, 12), part_twice,
     CAUSE("reduced_again"), KNOWN(.step = 1, .zero = true)},
    {"the same in a later step", UP, 'g', MESH(2, 1, -1, 8, 12), part_twice, CAUSE("unknown"),
     KNOWN(.step = 2, .zero = true)},
    {"the same without shares", UP, 'g', MESH(2, 1, -1, 8, 12), part_twice, CAUSE("unknown"), KNOWN(.step = 1)},
    {"a share of a gradient alone", UP, 'g', WHOLE(1, 8, 12), half_zero, CAUSE("missing_reduce_scatter"),
     HINT("its share"), KNOWN(.zero = true, RANKS(2, 1, 1))},
    {"half of a gradient of two ranks", UP, 'g', MESH(2, 1, -1, 8, 12), half_zero, CAUSE("no_gradient"),
     HINT("got no gradient"), KNOWN(.zero = true)},
    {"half of a gradient without shares", UP, 'g', WHOLE(1, 8, 12), half_zero, CAUSE("no_gradient"),
     HINT("got no gradient"), KNOWN(RANKS(2, 1, 1))},
    {"the gradient of one of two packed weights", "model.layers.0.mlp.gate_up_proj.weight", 'g', WHOLE(1, 8, 12),
     half_zero, CAUSE("no_gradient"), HINT("got no gradient"), KNOWN(.zero = true, RANKS(2, 1, 1))},
    {"gradients of rows not added over dp", UP, 'g', MESH(2, 2, 0, 8, 12), part_of_dp, OVER_DP},
    {"gradients of columns not added over dp", UP, 'g', MESH(2, 2, 1, 8, 12), part_of_dp, OVER_DP},
    {"gradients not added over tp beside other groups", NORM, MESH(3, 2, -1, 96), part_of_tp, REDUCED,
     HINT("missing all-reduce over tp", "its own positions only"), KNOWN(.sp = true)},
    {"activations of each group are looked at alone", "model.layers.0.mlp", 'b', MESH(2, 2, -1, 3, 4, 12), part_of_tp,
     REDUCED, HINT("over tp")},
    {"ranks of a group are counted from its first", "model.layers.0.mlp", 'b', MESH(2, 2, -1, 4, 4, 12),
     own_features_of_rank_2_and_3, CAUSE("missing_all_gather"), HINT("counted from 2")},
    {"what is not a number in one group, beside another group's finding", "model.layers.0.mlp", 'b',
     MESH(2, 2, -1, 4, 4, 12), parts_then_nan, CAUSE("not_a_number"), PATTERN("16 NaN on ranks 2..3")},
    {"a copy that is not a number, beside a multiple", UP, 'g', MESH(2, 1, -1, 8, 12), twice_then_nan,
     CAUSE("not_a_number"), PATTERN("8 NaN on rank 1;")},
    {"batch norms of each rank's samples", "bn1", 'f', MESH(2, 1, -1, 6, 4, 8), norm_of_three, AMONG("bn1:fwd"),
     CAUSE("statistic_of_own_samples"), HINT("each of 2 blocks")},
    {"the first tokens of each part but the first", "conv", 'f', CP_MESH(1, 4, false, 1, -1, 2, 16, 8), first_of_part,
     CAUSE("halo_missing"), HINT("0 before and 1 behind the borders of 4")},
    {"the first tokens of each part", "conv", 'f', CP_MESH(1, 4, false, 1, -1, 2, 16, 8), first_of_all,
     CAUSE("unknown")},
    {"samples of other weights", "top", 'b', MESH(1, 1, -1, 12, 8), some_thrice, CAUSE("samples_weighted")},
    {"the same sample of each part", "top", 'b', MESH(1, 1, -1, 12, 8), same_of_each_part_thrice,
     CAUSE("wrong_scalar")},
    {"losses whose mean is right", "loss", 'f', MESH_VALUE(1, 2), a_bit_apart, CAUSE("loss_of_own_part")},
    {"losses of ranks with other samples", "loss", 'f', MESH_VALUE(2, 1), more_on_later_ranks,
     CAUSE("loss_of_own_part"), NO("softmax")},
    {"losses of ranks with other classes", "loss", 'f', MESH_VALUE(1, 2), more_on_later_ranks,
     CAUSE("loss_without_common_maximum")},
    {"means of unlike numbers of samples", LOGITS, mean_of_means, CAUSE("mean_of_means"),
     HINT("from 0.666667 to 1.33333")},
    {"their sum", LOGITS, sum_of_means, CAUSE("sum_of_local_means"), HINT("data-parallel ranks")},
    {"a loss of ranks that divided by their own count", "loss", 'f', MESH_VALUE(3, 1), mean_of_means,
     CAUSE("mean_of_means"), NO("softmax"), KNOWN(.batch = 4)},
    {"means of any parts of the tokens", "lm_head.logits", 'b', WHOLE(4, 2, 6, 8), means_of_tokens,
     CAUSE("mean_of_means"), HINT("each of 4 ranks or micro-batches", "(as 6 : 3 : 2 : 1)"), KNOWN(RANKS(1, 2, 2))},
    {"factors that no parts of as many ranks have", "lm_head.logits", 'b', WHOLE(3, 2, 6, 8), means_of_tokens,
     CAUSE("row_statistic"), KNOWN(RANKS(1, 3, 1))},
    {"means over micro-batches", MICRO, mean_of_micro_batches, CAUSE("mean_of_means"), HINT("micro-batches"),
     KNOWN(.micro_batches = 2)},
    {"without them a factor for each row", MICRO, mean_of_micro_batches, CAUSE("row_statistic"),
     KNOWN(.micro_batches = 1)},
    {"a factor of dp ranks", NORM, MESH(2, 3, -1, 96), scaled, CAUSE("reduced_again"), BY(2.0f), HINT("dp = 2 ranks")},
    {"a factor of dp ranks that each have a part", UP, 'g', SHARDED(2, 0, 8, 12), scaled, CAUSE("reduced_again"),
     BY(2.0f), HINT("of which each holds a part of its own"), KNOWN(RANKS(2, 1, 1))},
    {"a part of dp and tp ranks together", NORM, MESH(3, 5, -1, 96), scaled, CAUSE("averaged_again"), BY(1.0f / 15.0f),
     HINT("averaged over all of these")},
    {"a part of dp and cp ranks, as many as samples", NORM, CP_MESH(2, 2, false, 1, -1, 96), scaled,
     CAUSE("averaged_again"), BY(0.25f), HINT("1/dp*cp"), KNOWN(.batch = 4, .seq = 8)},
    {"a factor of a value that tp or cp ranks may have", "blocks.1.attn.o", 'f', CP_MESH(1, 2, false, 2, -1, 2, 4, 8),
     scaled, CAUSE("averaged_again"), BY(0.5f), HINT("averaged over tp")},
    {"a loss of all targets", "loss", 'f', MESH_VALUE(1, 2), scaled, CAUSE("sum_for_mean"), BY(28.0f),
     HINT("a sum where the mean was wanted"), KNOWN(.batch = 4, .seq = 8)},
    {"a factor of dp and tp ranks together", NORM, MESH(3, 5, -1, 96), scaled, CAUSE("sum_for_mean"), BY(15.0f),
     HINT("15 = dp*tp")},
    {"a factor of tp ranks", NORM, MESH(3, 2, -1, 96), scaled, CAUSE("reduced_again"), BY(2.0f),
     HINT("summed over tp")},
    {"a division by the number of micro-batches", MICRO, scaled, BY(0.5f), CAUSE("averaged_again"),
     HINT("2 micro-batches"), KNOWN(.micro_batches = 2)},
    {"half a value", MICRO, scaled, BY(0.5f), CAUSE("half_is_missing"), KNOWN(.micro_batches = 4)},
    {"heads left before tokens", CUT_HEADS, CAUSE("heads_and_tokens_exchanged"), KNOWN(.head_dim = HEAD)},
    {"of an unknown number of heads", CUT_HEADS, NO("heads and tokens exchanged")},
    {"sums over ranks of different parts", "model.layers.0.self_attn.k_rope", 'b', GROUPED(4, 2, 0, 24, 16),
     sum_of_others, OF(sum_of_neighbours), CAUSE("wrong_group"), HINT("(ranks 0, 2; 1, 3)"), KNOWN(RANKS(0, 0, 4)),
     NEAR(1, 7, 1.0f, "unknown")},
    {"norms of shards", "grad_norm", 'c', MESH_VALUE(2, 2), norm_of_own, OF(five), CAUSE("norm_of_own_shards"),
     HINT("squares is 5)")},
    {"a norm that counts twice", "grad_norm", 'c', MESH_VALUE(2, 2), scaled, BY(1.1f), OF(five),
     CAUSE("norm_counts_twice")},
    {"later tokens, which are those of the second group", "layers.0.core", 'f', CP_MESH(1, 2, false, 2, -1, 2, 4, 8),
     later_tokens_off, CAUSE("later_tokens")},
    {"a weight of two stages, wrong on the last", "transformer.wte.weight", 'n', WHOLE(4, 12, 8), wrong_on_rank_2_and_3,
     CAUSE("replicas_apart"), KNOWN(.mesh = {{2, 1, 1, 1, 2}})},
    {"groups after the first that are all wrong", EMBEDDING, first_group_alone, CAUSE("world_rank_in_group")},
    {"weights that one group alone has", UP, 'i', MESH(2, 2, 0, 8, 12), first_group_alone, CAUSE("missing_broadcast"),
     HINT("over dp: ranks 0..1 have the value")},
    {"samples by the rank in the world", EMBEDDING, samples_of_world_rank, CAUSE("world_rank_in_group"),
     HINT("r mod 2", "rank 1 has rank 2's")},
    {"groups that are all wrong", EMBEDDING, zero, CAUSE("never_written")},
    {"tokens left in the order of the ranks in a sharded product", Q_PROJ, 'f', MESH(1, 2, 2, 3, 8, 8), in_rank_order,
     CAUSE("gathered_in_rank_order")},
    {"tokens in any other order, and values that are nobody's", Q_PROJ, 'f', MESH(1, 2, 2, 2, 4, 8), reversed,
     CAUSE("sequence_reversed"), NO("order of the ranks"), NEAR(0, 0, 0.5f, "unknown")},
    {"rows of the batch's ids alone", "transformer.wte.weight", 'g', MESH(1, 2, 0, 12, 8), rows_of_the_ids,
     CAUSE("tied_weight"), HINT("exactly the rows of the 3 ids"), KNOWN(.ids = three_ids, .batch = 2, .seq = 2),
     NEAR(1, 7 * 8, 1.0f, "unknown")},
    {"rows of the table before the last update", "model.embed_tokens", 'f', WHOLE(2, 2, 2, 8), rows_before,
     CAUSE("stale_weights"), HINT("bit for bit"), KNOWN(.ids = three_ids, .batch = 2, .seq = 2, .step = 2),
     BESIDE("model.embed_tokens:fwd@2", "model.embed_tokens.weight:init", table_before), .other_shape = {12, 8},
     NEAR(1, 8, 0.25f, "unknown")},
    {"rows of ids that occur again", "model.embed_tokens.weight", 'g', MESH(1, 2, 0, 12, 8), rows_of_repeated_ids,
     CAUSE("repeated_ids"), KNOWN(.ids = repeated, .batch = 2, .seq = 3), NEAR(0, 3 * 8, 1.0f, "unknown")},
    {"rows that pad a vocabulary", PADDED, CAUSE("vocabulary_padding"), HINT("only the last 6 ids (from 34 on)"),
     KNOWN(.hidden = true)},
    {"a check's vocabulary is never padded", PADDED, CAUSE("unknown")},
    {"one rank does not round a vocabulary", "lm_head", 'f', MESH(1, 1, -1, 2, 3, 11), last_ids_lost, BY(10),
     CAUSE("unknown")},
    {"the last ids of a vocabulary that was rounded down", "lm_head", 'f', SHARDED(3, 2, 2, 3, 11), last_ids_lost,
     CAUSE("ids_of_nobody"), BY(9), HINT("the last 2 of 11 ids belong to nobody")},
    {"a norm over padded lanes", PADDED_NORM, over_16_lanes, CAUSE("norm_over_padding"),
     HINT("taken over 16 lanes, padding included")},
    {"a norm over anything else", PADDED_NORM, over_other_lanes, CAUSE("norm_statistic"), NO("padding included")},
};

Test(pattern_layout, every_trace_is_named)
{
    EXPECT_TRACES(traces);
}
