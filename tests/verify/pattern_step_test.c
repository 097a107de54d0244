/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes that sequence parallelism, micro-batches, dropout and the update leave, each spoiled by hand. */
#include "tests/verify/pattern_support.h"

/* Contributions to a sum that have nothing to do with each other. */
static float contribution(size_t i, int k)
{
    return noise(i * 7 + 1000003 * (size_t)(k + 1));
}

static float sum_of(size_t i, int n)
{
    float sum = 0.0f;
    for (int k = 0; k < n; k++)
        sum += contribution(i, k);
    return sum;
}

VALUE(of_three, sum_of(i, 3))
VALUE(of_two, sum_of(i, 2))
VALUE(own_contribution, contribution(i, tp_rank(w, r)))
/* The last rank's tokens have no gradient. */
VALUE(of_three_but_the_last, token(w, i) == 2 ? 0.0f : sum_of(i, 3))
VALUE(own_contribution_but_the_last, r == 2 ? x : contribution(i, r))
VALUE(zero, 0.0f)
VALUE(unrelated, contribution(i, 9))
VALUE(half_and_more, 0.5f * x + 2.0f * contribution(i, 9))

/* Shards of 4, 4 and 3 rows of 8; what all have in common, 3 rows, went to every rank. */
VALUE(three_rows_of_the_first, r > 0 && i / 8 % 4 < 3 ? w->reference[i % 32] : x)
VALUE(dropped, (i * 2654435761u >> 7) % 5 == 0 ? 0.0f : x)
VALUE(other_table_on_odd_ranks, r % 2 && x != 0.0f ? x + noise(i % 64 + 5000) : x)
VALUE(each_kept_once, (i / 64 == 0) == (i % 2 == 0) ? x : 0.0f)
VALUE(each_kept_moved, x != 0.0f ? x + noise(i + 5000) : x)

/* Four samples' contributions, alike in part; those of the first two come with the others' inputs. */
VALUE(of_all_samples, noise(i) + contribution(i, 0) + contribution(i, 1))
VALUE(of_other_inputs, noise(i) + contribution(i, 2) + contribution(i, 1))
VALUE(one_part, noise(i))
VALUE(a_third, x / 3.0f)
VALUE(first_8_elements, i < 8 ? 20.0f * noise(i + 300) : 0.0f)

VALUE(weight_before, noise(i))
/* A step moves weights by a thousandth of their size, and after a decay of a tenth of that. */
VALUE(updated, noise(i) + 1e-3f * noise(i + 77))
VALUE(updated_times, noise(i) + w->by[r] * (1e-3f * noise(i + 77)))
/* On rank 1 each element's by up to 0.8 % more. */
VALUE(about_half, noise(i) + (0.5f + (r == 1 ? 0.004f * fabsf(noise(i + 300)) : 0.0f)) * (1e-3f * noise(i + 77)))
VALUE(decayed, noise(i) - 1e-4f * noise(i) + 1e-3f * noise(i + 77))
VALUE(decayed_alone, noise(i) - 1e-4f * noise(i) + 0.01f * (1e-3f * noise(i + 77)))
VALUE(rank_1_elsewhere, noise(i) + 1e-3f * noise(r == 1 ? i + 900 : i + 77))

#define C_PROJ "transformer.h.3.mlp.c_proj.weight"
#define NORM "model.norm.weight"

#define TOKENS(dp) "lm_head", 'b', MESH(dp, 3, 1, 2, 6, 24), own_contribution, OF(of_three)
#define LAST_RANK MESH(1, 3, 1, 2, 3, 96)
#define SP KNOWN(.sp = true)
#define UPDATED NORM, 'n', MESH(1, 2, -1, 96)
#define TIMES(...) updated_times, OF(updated), BY(__VA_ARGS__), .before = weight_before
#define MICRO_BATCHES .batch = 4, .seq = 4, .micro_batches = 2
#define PRODUCT C_PROJ, 'g', MESH(1, 1, -1, 16, 24)

static const trace traces[] = {
    {"tokens with one rank's part of a sum", TOKENS(1), CAUSE("missing_reduce_scatter"),
     HINT("about 1/3 of the reference"), SP},
    {"tokens with one rank's part, without sp", TOKENS(1), CAUSE("unknown")},
    {"tokens of two groups", TOKENS(2), CAUSE("missing_reduce_scatter"), HINT("about 1/3 of the reference"), SP},
    {"tokens of two groups, without sp", TOKENS(2), CAUSE("unknown")},
    {"a rank whose tokens have no gradient does not count as right", "lm_head", 'b', LAST_RANK,
     own_contribution_but_the_last, OF(of_three_but_the_last), CAUSE("missing_reduce_scatter"), SP},
    {"such a rank among zeros", "lm_head", 'b', LAST_RANK, zero, OF(of_three_but_the_last), CAUSE("no_backward"), SP},
    {"such a rank among zeros of a norm", "transformer.h.0.ln_2", 'b', LAST_RANK, zero, OF(of_three_but_the_last),
     CAUSE("norm_backward_missing"), NO("zeros from"), SP},
    {"values that are no part of the sum", "lm_head", 'b', MESH(1, 2, 1, 2, 6, 24), unrelated, OF(of_two),
     CAUSE("unknown"), SP},
    {"a share of a half that is too large for a part", "lm_head", 'b', MESH(1, 2, 1, 2, 6, 24), half_and_more,
     OF(of_two), NO("reduce-scatter"), SP},
    {"one shard sent to ranks of unlike sizes, whose last row is neither", "transformer.wte.weight", 'i',
     SHARDED(3, 0, 11, 8), three_rows_of_the_first, CAUSE("shards_seeded_alike"),
     HINT("rank 1 has rank 0's, rank 2 has rank 0's"), NEAR(1, 7 * 8, 0.5f, "part_of_one_rank")},
    {"a table of positions shows through dropout", "transformer.drop", 'f', MESH(2, 2, 1, 6, 4, 16),
     other_table_on_odd_ranks, OF(dropped), CAUSE("positions")},
    {"differences that occur once are no table", "transformer.drop", 'f', MESH(1, 1, -1, 2, 4, 16), each_kept_moved,
     OF(each_kept_once), CAUSE("unknown")},
    {"an input of another micro-batch where all went forward first", PRODUCT, of_other_inputs, OF(of_all_samples),
     CAUSE("input_of_other_micro_batch"), NO("leading dimensions"), KNOWN(MICRO_BATCHES, .forward_first = true)},
    {"such an input where they did not", PRODUCT, of_other_inputs, OF(of_all_samples), CAUSE("input_overwritten"),
     KNOWN(MICRO_BATCHES)},
    {"a part of the sum", PRODUCT, one_part, OF(of_all_samples), CAUSE("one_sample"),
     KNOWN(MICRO_BATCHES, .forward_first = true)},
    {"a factor of a row-parallel bias alone", "transformer.h.3.mlp.c_proj.bias", 'g', MESH(3, 3, -1, 96), a_third,
     CAUSE("averaged_again"), HINT("averaged over tp"), NO("dp")},
    {"that of any other may be either's", "transformer.h.3.ln_2.weight", 'g', MESH(3, 3, -1, 96), a_third,
     CAUSE("averaged_again"), HINT("averaged over dp where the sum was wanted, or the same over tp")},
    {"a bias gradient ends with the tokens of a rank", "layers.1.mlp.w2.bias", 'g', MESH(2, 1, -1, 48),
     first_8_elements, CAUSE("bias_gradient_wrong_axis"),
     HINT("only the first 8 elements are written, one for each of the 8 tokens"), KNOWN(.batch = 2, .seq = 8)},
    {"half an update", UPDATED, TIMES(0.5f, 0.5f), CAUSE("update_scaled"),
     HINT("the update is 0.5 times the expected")},
    {"half an update, which no rank's factor gives exactly", "model.embed_tokens.weight", 'n', MESH(1, 2, 0, 16, 6),
     about_half, OF(updated), CAUSE("update_scaled"), NO("factor of its own"), .before = weight_before},
    {"a factor of each rank", UPDATED, TIMES(1.25f, 2.0f), CAUSE("update_of_ranks_apart"),
     HINT("a factor of its own, from 1.25")},
    {"no update", UPDATED, TIMES(0.0f, 0.0f), CAUSE("no_update"), HINT("no update")},
    {"the other way", UPDATED, TIMES(-1.0f, -1.0f), CAUSE("update_sign"), HINT("its sign is wrong")},
    {"half on one rank", UPDATED, TIMES(1.0f, 0.5f), CAUSE("update_of_ranks_apart"),
     HINT("the update is 0.5 times the expected on rank 1, and not on the others")},
    {"an update of little more than its decay", UPDATED, decayed_alone, CAUSE("update_scaled"), OF(decayed),
     HINT("the update is 0.01 times the expected"), .before = weight_before},
    {"an update in another direction", UPDATED, rank_1_elsewhere, OF(updated), CAUSE("replicas_apart"),
     NO("factor of its own"), .before = weight_before},
};

Test(pattern_step, every_trace_is_named)
{
    EXPECT_TRACES(traces);
}
