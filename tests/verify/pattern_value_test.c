/* SPDX-License-Identifier: Apache-2.0 */
/* Values, gradients, losses, places: every detector fires on its trace and is silent on a near miss. */
#include "tests/verify/pattern_support.h"

VALUE(scaled, x * w->by[0])
/* One element has another ratio. */
VALUE(scaled_but_the_fifth, x * w->by[i == 5])
VALUE(ninth_scaled, i == 9 ? x * 1.37f : x)
VALUE(second_shard_doubled, i >= 24 ? x * 2.0f : x)
VALUE(shards_scaled, x *(i < 24 ? 0.5f : 0.8f))
VALUE(each_fifth_zero, i % 5 == 0 ? 0.0f : x)
VALUE(first_fifth_zero, i < w->count / 5 ? 0.0f : x)

/* The last token of each sample has no gradient in the reference either. */
VALUE(last_token_zero, i / 5 % 4 == 3 ? 0.0f : x)
VALUE(zeros, 0.0f)
VALUE(zeros_but_the_third, i == 3 ? x : 0.0f)
VALUE(zeros_but_two, i == 3 ? x : i == 4 ? 1e-9f : 0.0f)
VALUE(each_third_zero, i % 3 == 0 ? 0.0f : x)
/* Of rows of 5: each third, and the ones after these. */
VALUE(without_first_of_three, i / 5 % 3 == 0 ? 0.0f : x)
VALUE(without_second_of_three, i / 5 % 3 == 1 ? 0.0f : i / 5 % 3 == 0 ? 0.5f + noise(i + 40) : x)
VALUE(later_rows_off, i / 5 % 8 < 3 ? x : noise(i + 70))
VALUE(other_mask, i % 4 == 0 ? 0.0f : i % 3 == 0 ? 0.5f : x)
VALUE(two_nan, i == 33 || i == 6 ? NAN : x) /* [1, 2, 3] and [0, 1, 1] of [2, 4, 5] */
VALUE(one_nan, i == 7 ? NAN : x)
VALUE(rounded, x *(1.0f + 2e-7f * noise(i + 9)))
VALUE(rounded_on_rank_1, r == 1 ? rounded(w, r, i, x) : x)
VALUE(rounded_but_one, i == 30 ? x + 1e-4f : rounded(w, r, i, x))

static float with_10_bits(const world *w, int r, size_t i, float x)
{
    uint32_t u;
    (void)w, (void)r, (void)i;
    memcpy(&u, &x, sizeof u);
    u &= 0xffffe000u;
    memcpy(&x, &u, sizeof u);
    return x;
}

VALUE(nearly_with_10_bits, with_10_bits(w, r, i, x *(1.0f + 0.01f * noise(i + 9))))
VALUE(with_10_bits_but_one, i == 30 ? x * 1.0011f : with_10_bits(w, r, i, x))

/* Of bf16, some by one step further from zero or nearer. */
VALUE(in_steps, 0.5f + rintf(127.0f * fabsf(x)) / 256.0f)
VALUE(a_step_off, i % 13 == 5 ? x + copysignf(1.0f / 256.0f, noise(i + 31)) : x)
VALUE(spread_evenly, x + 3e-3f * noise(i + 99))

VALUE(not_negative, x < 0.0f ? 0.0f : x)
VALUE(causal_scores, i % 12 > i / 12 % 12 ? 0.0f : 1.0f + noise(i))
VALUE(all_scores, i % 12 > i / 12 % 12 ? 2.0f + noise(i) : x * 0.5f)
VALUE(with_bias, x + 0.1f * noise(i % 16 + 300))
VALUE(with_bias_but_for_the_first, i < 16 ? x : with_bias(w, r, i, x))
VALUE(with_bias_on_rank_1, i % 16 >= 8 ? x + noise(i % 16) : x)
VALUE(with_table, x + (i % 48 >= 24 ? noise(i % 48 + 300) : 0.0f))
VALUE(with_table_and_one, i == 2 * 48 + 7 * 6 + 1 ? 3.0f : with_table(w, r, i, x))
VALUE(tokens_scaled, x *(1.5f + 0.5f * noise(i / 16 + 70)))
VALUE(tokens_scaled_but_one, i == 30 ? x : tokens_scaled(w, r, i, x))

#define FACTOR(f) "model.norm.weight", 'g', WHOLE(3, 64), scaled, BY(f)
#define EXPERT_WEIGHT "model.layers.1.mlp.experts.5.up_proj.weight"
#define EXPERT(f) EXPERT_WEIGHT, 'g', WHOLE(3, 8, 8), scaled, BY(f)
#define DROPOUT(f) "transformer.drop", 'f', WHOLE(2, 2, 20, 16), scaled, BY(f)
#define DOWN "model.layers.0.mlp.down_proj.weight"
#define PRODUCT DOWN, 'g', WHOLE(1, 16, 24), scaled, AMONG(DOWN ":grad")
#define INITIAL(f) "model.layers.0.self_attn.q_proj.weight", 'i', SHARDED(2, 0, 32, 32), scaled, BY(f)
#define VALUES WHOLE(2, 2, 8, 16)
#define C_PROJ "transformer.h.0.attn.c_proj", 'f', WHOLE(1, 2, 8, 16)

static const trace of_values[] = {
    {"a ReLU", "x", 'f', VALUES, not_negative, CAUSE("clipped"), HINT("a ReLU"), AMONG("x:fwd")},
    {"keys after the query", "transformer.h.0.attn.probs", 'f', WHOLE(1, 2, 2, 12, 12), all_scores, OF(causal_scores),
     CAUSE("causal_mask_missing"), AMONG("transformer.h.0.attn.probs:fwd")},
    {"N times the reference is a second reduction", FACTOR(3.0f), CAUSE("reduced_again"),
     HINT("times 3 = N (N = 3 ranks): a value that was complete on every rank was summed"),
     PATTERN("each 3 = N times the reference; on all 3 ranks, whose copies are equal")},
    {"a part of N", FACTOR(1.0f / 3.0f), CAUSE("averaged_again"), HINT("= 1/N (N = 3 ranks): averaged")},
    {"twice the reference", FACTOR(2.0f), CAUSE("counted_twice")},
    {"any other factor", FACTOR(0.731f), CAUSE("wrong_scalar")},
    {"any other factor, of an expert whose routes are made again", EXPERT(0.731f), KNOWN(.recomputed = true),
     CAUSE("routes_of_second_pass")},
    {"noise, of an expert whose routes are made again", EXPERT_WEIGHT, 'g', WHOLE(1, 16, 16), spread_evenly,
     KNOWN(.recomputed = true), AMONG(EXPERT_WEIGHT ":grad"), CAUSE("routes_of_second_pass"), HINT("spread evenly")},
    {"any other factor, of an expert", EXPERT(0.731f), CAUSE("wrong_scalar")},
    {"the number of ranks, of an expert whose routes are made again", EXPERT(3.0f), KNOWN(.recomputed = true),
     CAUSE("reduced_again")},
    {"the share that is not zero", DROPOUT(0.8f), OF(each_fifth_zero), CAUSE("dropout_without_scale")},
    {"not the share that is left", DROPOUT(0.7f), OF(each_fifth_zero), CAUSE("wrong_scalar")},
    {"the share, of zeros in one place", DROPOUT(0.8f), OF(first_fifth_zero), CAUSE("wrong_scalar")},
    {"not the share, of zeros in one place", DROPOUT(0.7f), OF(first_fifth_zero), CAUSE("wrong_scalar")},
    {"a mean over tokens", PRODUCT, BY(1.0f / 21.0f), CAUSE("mean_over_tokens"), KNOWN(.batch = 3, .seq = 7)},
    {"a sum over tokens", PRODUCT, BY(21.0f), CAUSE("sum_over_tokens"), KNOWN(.batch = 3, .seq = 7)},
    {"neither 27 tokens nor 24 targets", PRODUCT, BY(21.0f), CAUSE("reduced_again"), KNOWN(.batch = 3, .seq = 9)},
    {"one element with another ratio", "model.norm.weight", 'g', WHOLE(3, 64), scaled_but_the_fifth, BY(3.0f, 3.01f),
     NO("times 3")},
    {"a factor of some elements", "model.layers.0.mlp.up_proj.weight", 'g', SHARDED(2, 0, 8, 6), second_shard_doubled,
     PATTERN("24 of 48 elements (50%), each 2 = N times the reference: rows 4 onward; on rank 1 only")},
    {"Xavier's scale of a shard", INITIAL(1.15470053837925f), CAUSE("init_scale_of_shard"),
     HINT("times 1.1547: initial scale from the shard's size, the root of a ratio for one of 2 shards")},
    {"1/sqrt(fan_in) of a shard", INITIAL(1.41421356237f), CAUSE("init_scale_of_shard"),
     HINT("times 1.41421: initial scale from the shard's size, sqrt(2), as 1/sqrt(fan_in)")},
    {"a scale of no shard", INITIAL(1.2f), CAUSE("init_scale"), NO("shard's size")},
    {"steps of bf16 on each rank", "x.weight", 'g', SHARDED(2, 0, 32, 32), a_step_off, OF(in_steps), CAUSE("unknown")},
    {"a factor for each rank", "x.weight", 'n', SHARDED(2, 0, 8, 6), shards_scaled, CAUSE("scaled_by_rank"),
     HINT("a constant of its own, from 0.5 to 0.8")},
    {"of two elements an odd ratio says nothing", "x.weight", 'g', WHOLE(2, 64), ninth_scaled, CAUSE("unknown")},
    {"zeros of a norm's backward pass", "model.layers.3.post_attention_layernorm", 'b', WHOLE(2, 2, 4, 5), zeros,
     OF(last_token_zero), CAUSE("norm_backward_missing"),
     PATTERN("30 of 40 elements (75%), every one that is not zero in the reference, each zero")},
    {"zeros of a gradient", "model.layers.3.post_attention_layernorm", 'g', WHOLE(2, 2, 4, 5), zeros,
     OF(last_token_zero), CAUSE("no_gradient")},
    {"zeros of a backward pass", "model.layers.3.mlp", 'b', WHOLE(2, 2, 4, 5), zeros, OF(last_token_zero),
     CAUSE("no_backward")},
    {"zeros of a forward pass", "model.layers.3.mlp", 'f', WHOLE(2, 2, 4, 5), zeros, OF(last_token_zero),
     CAUSE("never_written")},
    {"zeros but one", "model.layers.3.mlp", 'f', WHOLE(2, 2, 4, 5), zeros_but_the_third, CAUSE("partly_written"),
     OF(last_token_zero), HINT("29 elements were never written")},
    {"zeros, and one that nearly is", "model.layers.3.mlp", 'f', WHOLE(2, 2, 4, 5), zeros_but_two, OF(last_token_zero),
     CAUSE("unknown")},
    {"zeros in other places", "transformer.h.0.attn.probs", 'f', SHARDED(2, 1, 2, 4, 5, 5), other_mask,
     OF(each_third_zero), CAUSE("mask_of_shard_index"), HINT("the element's index in the full tensor"),
     NEAR(0, 1, 0.25f, "unknown")},
    {"zeros in other places after the first step", "transformer.h.0.attn.probs", 'f', SHARDED(2, 1, 2, 4, 5, 5),
     other_mask, OF(each_third_zero), CAUSE("mask_of_other_seed"), NEAR(0, 1, 0.25f, "unknown"), KNOWN(.step = 2)},
    {"zeros in other places of an unknown run", "transformer.h.0.attn.probs", 'f', WHOLE(1, 2, 4, 5, 5), other_mask,
     OF(each_third_zero), CAUSE("mask_of_other_seed"), HINT("in a sharded region, of the index in the shard"),
     KNOWN(.hidden = true)},
    {"zeros where another layer has them", "transformer.h.0.attn.probs", 'f', SHARDED(2, 1, 2, 4, 5, 5), other_mask,
     OF(each_third_zero), CAUSE("mask_of_other_layer"), HINT("transformer.h.1.attn.probs:fwd"),
     BESIDE("transformer.h.0.attn.probs:fwd", "transformer.h.1.attn.probs:fwd", other_mask),
     NEAR(0, 1, 0.25f, "unknown")},
    {"gradients of other tokens", "model.norm", 'b', WHOLE(2, 2, 8, 5), without_second_of_three,
     OF(without_first_of_three), CAUSE("ignored_labels"), HINT("11 have one on one side alone")},
    {"other tokens in a block", "model.layers.0.mlp", 'b', WHOLE(2, 2, 8, 5), without_second_of_three,
     OF(without_first_of_three), CAUSE("mask_of_other_seed")},
    {"tokens from the third on", "model.layers.0.mlp", 'f', WHOLE(2, 4, 8, 5), later_rows_off, CAUSE("later_tokens")},
    {"gradients of tokens from the third on", "model.layers.0.mlp", 'b', WHOLE(2, 4, 8, 5), later_rows_off,
     CAUSE("unknown")},
    {"NaN is counted", "x", 'f', WHOLE(2, 2, 4, 5), two_nan, CAUSE("not_a_number"),
     HINT("not a number in 4 of the 4 different values held"), PATTERN("2 of 40 elements (5%)", "4 NaN on ranks 0..1")},
    {"NaN in both is no difference", "x", 'f', WHOLE(2, 2, 4, 5), NULL, OF(one_nan), PATTERN("no element differs")},
    {"differences of rounding", "x", 'f', VALUES, rounded, CAUSE("rounding")},
    {"none where sums in any order have the same bits", "x", 'f', VALUES, rounded, CAUSE("small_change"),
     KNOWN(.exact = true)},
    {"of parts, before their sum over tp", "model.layers.0.mlp.down_proj", 'f', MESH(1, 2, -1, 2, 8, 16), rounded,
     CAUSE("parts_rounded_first"), HINT("each of 2 ranks rounded its part"), KNOWN(.exact = true)},
    {"of parts, by a layer that sums none", "model.layers.0.mlp.up_proj", 'f', MESH(1, 2, -1, 2, 8, 16), rounded,
     CAUSE("small_change"), KNOWN(.exact = true)},
    {"none, in a run that differs from itself", "x", 'f', VALUES, rounded, CAUSE("unordered_sum"),
     KNOWN(.exact = true, .unsteady = true)},
    {"none in one copy, of such a run", "x", 'f', VALUES, rounded_on_rank_1, CAUSE("unordered_sum"),
     HINT("even the copies of one value differ"), KNOWN(.exact = true, .unsteady = true)},
    {"rounding and one more", "x", 'f', VALUES, rounded_but_one, CAUSE("unknown")},
    {"storage of sixteen bits", "model.norm", 'f', VALUES, with_10_bits, CAUSE("fewer_bits")},
    {"a sum in sixteen bits", "model.norm.weight", 'g', WHOLE(2, 96), nearly_with_10_bits, CAUSE("fewer_bits"),
     HINT("added up or sent in 16 bits")},
    {"sixteen bits and one more", "model.norm", 'f', VALUES, with_10_bits_but_one, CAUSE("unknown")},
    {"a vector added to every token", C_PROJ, with_bias, CAUSE("bias_counted_again"),
     HINT("a bias counted more than once, or left out: the same vector is added to each of the 16 tokens"),
     ALSO(2, 3, 4)},
    {"to every token but the first", C_PROJ, with_bias_but_for_the_first, CAUSE("unknown"), ALSO(2, 3, 4)},
    {"a bias missing on one rank of a sharded output", "model.layers.0.mlp.up_proj", 'f', SHARDED(2, 2, 2, 8, 16),
     with_bias_on_rank_1, CAUSE("bias_counted_again"), HINT("the same vector is added to each of the 16 tokens"),
     PATTERN("features 8 onward; on rank 1 only")},
    {"a table added to every sample", "transformer.drop", 'f', WHOLE(2, 4, 8, 6), with_table, CAUSE("positions"),
     HINT("positions: the difference is the same for all 4 samples"), PATTERN("tokens 4 onward")},
    {"a table and one more", "transformer.drop", 'f', WHOLE(2, 4, 8, 6), with_table_and_one, CAUSE("part_of_one_rank")},
    {"a factor for each token", "model.norm", 'f', VALUES, tokens_scaled, CAUSE("row_statistic"),
     HINT("each of 16 tokens is scaled by a factor of its own")},
    {"a factor for each token but one", "model.norm", 'f', VALUES, tokens_scaled_but_one, CAUSE("unknown")},
};

Test(pattern_value, every_trace_is_named)
{
    EXPECT_TRACES(of_values);
}

VALUE(loss, 5.5f)
VALUE(of_each_rank, w->by[r])

/* Tokens 3, 9 and 20 looked up one id. */
VALUE(embedded, i / 4 == 9 || i / 4 == 20 ? noise(3 * 4 + i % 4) : x)
VALUE(huge_of_an_id, i / 4 == 3 || i / 4 == 9 || i / 4 == 20 ? 1e30f : x)
VALUE(huge_of_an_id_but_once, i / 4 == 3 || i / 4 == 20 ? 1e30f : x)
VALUE(id_8_differs, i / 4 == 8 ? noise(i + 60) : x)
VALUE(ids_8_and_9_differ, i / 4 == 8 || i / 4 == 9 ? noise(i + 60) : x)
VALUE(first_32_elements, i < 32 ? noise(i + 3000) : 0.0f)
VALUE(all_but_last_tokens, i % 16 == 15 ? 0.0f : noise(i + 3000))
VALUE(noisy, x + 0.3f * noise(i + 3000))
VALUE(five_hundred_and_twelve, 512.0f)

/* Samples [0, n) of 8: each adds noise of its own to every element. */
static float sum_of_samples(size_t i, size_t n)
{
    float sum = 0.0f;
    for (size_t s = 0; s < n; s++)
        sum += noise(i * 8 + s + 40000) + 0.3f * noise(i + 90000);
    return sum;
}

VALUE(all_samples, sum_of_samples(i, 8))
VALUE(one_sample, sum_of_samples(i, 1))
VALUE(foreign, noise(i + 123456))
VALUE(partly_foreign, w->by[0] * x + w->by[1] * noise(i + 5000))
VALUE(foreign_on_each, w->by[0] * x + w->by[1] * noise(i + 5000 + (size_t)r * 1000))
VALUE(every_third_row_zero, i / 4 % 3 == 0 ? 0.0f : x)

VALUE(tokens_of_later_samples_wrong, i >= 32 && i / 4 % 8 == 3 ? noise(i + 5000) : x)
VALUE(later_samples_wrong, i >= 32 ? noise(i + 5000) : x)
VALUE(third_block_wrong, i % 16 / 4 == 2 ? noise(i + 5000) : x)
VALUE(two_exchanged, i == 7 ? w->reference[70] : i == 70 ? w->reference[7] : x)
VALUE(three_in_a_circle, i == 7 ? w->reference[70] : i == 70 ? w->reference[8] : x)
VALUE(one_is_7, i == 32 + 5 * 4 + 2 ? 7.0f : x)
VALUE(head_5_wrong, i % 32 / 4 == 5 ? noise(i + 5000) : x)
VALUE(head_3_wrong, i / 9 % 4 == 3 ? noise(i + 5000) : x)

#define LOSS "loss", 'f', ONE_VALUE(2), of_each_rank, OF(loss)
#define EMBEDDING "model.embed_tokens", 'f', WHOLE(2, 3, 8, 4)
#define IDS "transformer.wte.weight", 'g', SHARDED(4, 0, 16, 4)
#define BIAS "transformer.h.3.mlp.c_proj.bias", 'g', WHOLE(2, 96)
#define SHARDS DOWN, 'g', SHARDED(2, 1, 32, 64)
#define OVERWRITTEN DOWN, 'g', SHARDED(2, 1, 24, 96), partly_foreign

static const trace of_parts[] = {
    {"a loss whose ranks disagree", LOSS, BY(5.4f, 5.7f), CAUSE("loss_without_common_maximum")},
    {"a loss that is a little off", LOSS, CAUSE("target_logit"), BY(5.51f, 5.51f),
     HINT("target logit: the loss is off by 0.01"), PATTERN("the one value; on both ranks, whose copies are equal")},
    {"a loss of each half of the vocabulary", LOSS, CAUSE("loss_of_all_vocabularies"),
     BY(5.5f + 0.693147180559945f, 5.5f + 0.693147180559945f), HINT("the reference plus log(2)")},
    {"a loss that was added up", LOSS, CAUSE("reduced_again"), BY(11.0f, 11.0f), HINT("times 2 = N")},
    {"a loss in parts", LOSS, BY(2.0f, 3.5f), CAUSE("missing_all_reduce")},
    {"wrong rows of one id", EMBEDDING, huge_of_an_id, CAUSE("ids_at_shard_edge"), OF(embedded),
     HINT("ids at a shard's edge: the 3 wrong tokens hold 1 id (equal reference rows), and no token with it is right",
          "belongs to two shards, whose rows were added as bit patterns"),
     PATTERN("every feature of 3 tokens: [0, 3], [1, 1], [2, 4]")},
    {"wrong rows of one id but for one", EMBEDDING, huge_of_an_id_but_once, OF(embedded), CAUSE("unknown")},
    {"rows of many ids that are zero", EMBEDDING, every_third_row_zero, CAUSE("ids_of_other_shards"),
     AMONG("model.embed_tokens:fwd")},
    {"a gradient of a shard's first row", IDS, id_8_differs, CAUSE("ids_at_shard_edge"),
     HINT("ids at a shard's edge: only id 8 differs")},
    {"gradients of a shard's first two rows", IDS, ids_8_and_9_differ, CAUSE("part_of_one_rank")},
    {"a bias gradient of one element a token", BIAS, first_32_elements, CAUSE("bias_gradient_wrong_axis"),
     KNOWN(.batch = 2, .seq = 16), HINT("only the first 32 elements are written, one for each of the 32 tokens")},
    {"a bias gradient without last tokens", BIAS, all_but_last_tokens, CAUSE("bias_gradient_wrong_axis"),
     HINT("zero at elements 15, 31, ... alone, where the last tokens of the samples stand"),
     KNOWN(.batch = 8, .seq = 16)},
    {"a bias gradient that ends elsewhere", BIAS, first_32_elements, CAUSE("bias_gradient_wrong_axis"),
     KNOWN(.batch = 3, .seq = 16), HINT("zero from element 32 on")},
    {"a bias gradient of other sums", BIAS, foreign, CAUSE("bias_gradient_wrong_axis"), HINT("one sum a feature")},
    {"a bias gradient near the reference", BIAS, noisy, CAUSE("unknown")},
    {"a bias averaged, of as many features to a token as ranks", "layers.1.mlp.w2.bias", 'g', WHOLE(4, 128), scaled,
     CAUSE("averaged_again"), OF(five_hundred_and_twelve), BY(0.25f), KNOWN(.batch = 8, .seq = 64)},
    {"one sample of eight", SHARDS, one_sample, OF(all_samples), CAUSE("one_sample"),
     HINT("about 1/8: as if one of 8 samples counted"), KNOWN(.batch = 8, .seq = 4)},
    {"no part of the sum", SHARDS, foreign, OF(all_samples), CAUSE("other_input"), NO("a part of the sum"),
     KNOWN(.batch = 8, .seq = 4)},
    {"the share that a narrower output did not reach, the rest foreign", OVERWRITTEN, BY(0.5f, 0.7f),
     CAUSE("input_overwritten"), HINT("about 1 - 24/48"), KNOWN(.batch = 8)},
    {"another share, the rest foreign", OVERWRITTEN, CAUSE("input_overwritten"), BY(0.8f, 0.9f),
     HINT("something foreign"), NO("1 - 24/48"), KNOWN(.batch = 8)},
    {"another share on each rank, the rest foreign", DOWN, 'g', WHOLE(2, 24, 96), foreign_on_each, BY(0.8f, 0.9f),
     CAUSE("missing_all_reduce"), HINT("beside something foreign")},
    {"a share that a narrower output of another layer would leave", "model.layers.0.mlp.up_proj.weight", 'g',
     SHARDED(2, 0, 96, 24), partly_foreign, BY(0.5f, 0.4f), CAUSE("partial_sum"), NO("1 - 24/48")},
    {"a part of a sum of unknown terms", SHARDS, one_sample, OF(all_samples), CAUSE("partial_sum"),
     HINT("tokens, a micro-batch or one of two uses of a tied weight")},
    {"the other reading leads", DOWN, 'g', SHARDED(2, 1, 22, 96), partly_foreign, CAUSE("input_overwritten"),
     BY(0.55f, 0.45f), HINT("about 1 - 22/48", "or one of 2 samples counted alone"), KNOWN(.batch = 2)},
    {"of two readings the nearer one leads", OVERWRITTEN, CAUSE("one_sample"), BY(0.5f, 0.4f),
     HINT("about 1/2: as if one of 2 samples counted", "also about 1 - 24/48"), KNOWN(.batch = 2)},
    {"a token of each later sample", "model.layers.0.mlp.act", 'f', WHOLE(2, 3, 8, 4), tokens_of_later_samples_wrong,
     NO("only the first of 3 samples is right")},
    {"the first sample alone is right", "model.layers.0.mlp.act", 'f', WHOLE(2, 3, 8, 4), later_samples_wrong,
     CAUSE("first_sample_alone"), HINT("only the first of 3 samples is right"),
     PATTERN("64 of 96 elements (67%): samples 1 onward; on both ranks, whose copies are equal")},
    {"one wrong shard", "model.layers.0.mlp.up_proj", 'f', SHARDED(4, 2, 2, 8, 16), third_block_wrong,
     CAUSE("part_of_one_rank"), HINT("the shards of all other ranks are right; rank 2 read other weights"),
     PATTERN("features 8..11; on rank 2 only")},
    {"one wrong block of a gathered value", "x", 'f', WHOLE(4, 2, 8, 16), third_block_wrong, CAUSE("part_of_one_rank"),
     HINT("only shard 2 of 4 along dimension 2 differs")},
    {"two elements in each other's place", "model.norm.weight", 'g', WHOLE(1, 96), two_exchanged,
     CAUSE("two_exchanged"), AMONG("model.norm.weight:grad")},
    {"two elements in other places", "model.norm.weight", 'g', WHOLE(1, 96), three_in_a_circle, CAUSE("few_elements"),
     AMONG("model.norm.weight:grad")},
    {"one element has a place and no invented cause", "model.layers.0.mlp.act", 'f', WHOLE(2, 3, 8, 4), one_is_7,
     CAUSE("unknown"), PATTERN("1 of 96 elements (1%): sample 1, token 5, feature 2; on both ranks")},
    {"one head of features", "model.layers.0.self_attn.q_proj", 'f', SHARDED(2, 2, 2, 4, 32), head_5_wrong,
     PATTERN("head 5 (features 20..23); on rank 1 only"), KNOWN(.head_dim = 4)},
    {"one head of a dimension", "model.layers.0.self_attn.probs", 'f', SHARDED(2, 1, 2, 4, 3, 3), head_3_wrong,
     PATTERN(": head 3; on rank 1 only")},
};

Test(pattern_part, every_trace_is_named)
{
    EXPECT_TRACES(of_parts);
}
