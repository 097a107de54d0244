/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes in a mesh of data- and tensor-parallel ranks, each spoiled by hand as the mistake would. */
#include "support/together.h"
#include "tests/verify/pattern_support.h"

TestSuite(pattern_layout, .timeout = 300);

/* --- sums over a group -------------------------------------------------------------------------------------------- */

/* A part of the reference for each of `n`: they add up to it. */
static float part_of(size_t i, int k, int n, float reference)
{
    const double even = (double)reference / n, off = 0.3 * (double)noise(i + 7);
    return (float)(k == 0 ? even + off : k == 1 ? even - off : even);
}

static float part_of_dp(const world *w, int r, size_t i, float reference)
{
    return part_of(i, r / w->d.tp, w->d.dp, reference);
}

static float part_of_tp(const world *w, int r, size_t i, float reference)
{
    return part_of(i, r % w->d.tp, w->d.tp, reference);
}

static void gradients_that_were_not_added_over_dp_say_so(void)
{
    for (int dim = -1; dim < 2; dim++) {
        world w;
        mesh(&w, "model.layers.0.mlp.up_proj.weight", 'g', 2, 2, 2, SHAPE(8, 12), dim);
        spoil(&w, part_of_dp);
        expect_cause(&w, "missing_all_reduce");
        expect_hint(&w, "missing all-reduce over dp");
        expect_no_hint(&w, "over tp");
        world_free(&w);
    }
}

static void gradients_that_were_not_added_over_tp_say_so_beside_other_groups(void)
{
    world w;
    mesh(&w, "model.norm.weight", 'g', 3, 2, 1, SHAPE(96), -1);
    w.d.sp = true;
    spoil(&w, part_of_tp);
    expect_cause(&w, "missing_all_reduce");
    expect_hint(&w, "missing all-reduce over tp");
    expect_hint(&w, "its own positions only");
    world_free(&w);
}

static void activations_of_each_group_are_looked_at_alone(void)
{
    world w;
    mesh(&w, "model.layers.0.mlp", 'b', 2, 2, 3, SHAPE(3, 4, 12), -1);
    spoil(&w, part_of_tp);
    expect_cause(&w, "missing_all_reduce");
    expect_hint(&w, "over tp");
    world_free(&w);
}

static float own_features_only(const world *w, int r, size_t i, float reference)
{
    const size_t width = w->shape[2] / (size_t)w->d.tp;
    return i % w->shape[2] / width == (size_t)(r % w->d.tp) ? reference : 0.0f;
}

static void a_missing_gather_is_seen_in_a_group_and_its_ranks_are_counted_from_its_first(void)
{
    world w;
    mesh(&w, "model.layers.0.mlp", 'b', 2, 2, 3, SHAPE(4, 4, 12), -1);
    for (size_t i = w.count / 2; i < w.count; i++) { /* the second group alone */
        *at(&w, 2, i) = own_features_only(&w, 2, i, w.reference[i]);
        *at(&w, 3, i) = own_features_only(&w, 3, i, w.reference[i]);
    }
    expect_cause(&w, "missing_all_gather");
    expect_hint(&w, "counted from 2");
    world_free(&w);
}

/* --- means over parts --------------------------------------------------------------------------------------------- */

/* Samples of 4 over 3 ranks: 2, 1 and 1. */
static double share_of(int rank)
{
    return rank == 0 ? 0.5 : 0.25;
}

static float mean_of_means(const world *w, int r, size_t i, float reference)
{
    (void)i;
    return (float)((double)reference / (w->d.dp * share_of(r / w->d.tp)));
}

static float sum_of_means(const world *w, int r, size_t i, float reference)
{
    (void)i;
    return (float)((double)reference / share_of(r / w->d.tp));
}

static void means_of_unlike_numbers_of_samples_are_told_from_their_sums(void)
{
    world w;
    mesh(&w, "lm_head.logits", 'b', 3, 2, 3, SHAPE(4, 3, 8), 2);
    spoil(&w, mean_of_means);
    expect_cause(&w, "mean_of_means");
    expect_hint(&w, "from 0.666667 to 1.33333");
    world_refresh(&w);
    spoil(&w, sum_of_means);
    expect_cause(&w, "sum_of_local_means");
    expect_hint(&w, "data-parallel ranks");
    world_free(&w);
}

static void the_loss_of_ranks_that_divided_by_their_own_count_is_a_mean_of_means(void)
{
    world w;
    mesh(&w, "loss", 'f', 3, 1, 0, SHAPE(1), -1);
    w.d.batch = 4;
    spoil(&w, mean_of_means);
    expect_cause(&w, "mean_of_means");
    expect_no_hint(&w, "softmax");
    world_free(&w);
}

/* Three samples in two micro-batches of two and one: 3/(2*2) and 3/(2*1). */
static float mean_of_micro_batches(const world *w, int r, size_t i, float reference)
{
    (void)r;
    return reference * (i < w->count / 3 * 2 ? 0.75f : 1.5f);
}

static void means_over_micro_batches_are_recognised(void)
{
    world w;
    mesh(&w, "lm_head.logits", 'b', 1, 1, 3, SHAPE(3, 4, 8), -1);
    w.d.micro_batches = 2;
    spoil(&w, mean_of_micro_batches);
    expect_cause(&w, "mean_of_means");
    expect_hint(&w, "micro-batches");
    w.d.micro_batches = 1; /* without them it is a factor for each row */
    expect_cause(&w, "row_statistic");
    world_free(&w);
}

static float doubled(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r, (void)i;
    return 2.0f * reference;
}

static void a_factor_is_that_of_the_group_that_has_so_many_ranks(void)
{
    world w;
    mesh(&w, "model.norm.weight", 'g', 2, 3, 1, SHAPE(96), -1);
    spoil(&w, doubled);
    expect_hint(&w, "dp = 2 ranks");
    world_free(&w);
    mesh(&w, "model.norm.weight", 'g', 3, 2, 1, SHAPE(96), -1);
    spoil(&w, doubled);
    expect_hint(&w, "summed over tp");
    world_free(&w);
}

static void a_division_by_the_number_of_micro_batches_is_told_from_half_a_value(void)
{
    world w;
    mesh(&w, "lm_head.logits", 'b', 1, 1, 3, SHAPE(3, 4, 8), -1);
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 0, i) = 0.5f * w.reference[i];
    w.d.micro_batches = 2;
    expect_cause(&w, "averaged_again");
    expect_hint(&w, "2 micro-batches");
    w.d.micro_batches = 4;
    expect_cause(&w, "half_is_missing");
    world_free(&w);
}

static void heads_left_before_tokens_on_each_rank_are_recognised(void)
{
    enum { SEQ = 5, HEADS = 3, HEAD = 4, LANES = HEADS * HEAD };
    world w;
    sharded(&w, "model.layers.0.self_attn.context", 'f', 2, 3, SHAPE(2, SEQ, 2 * LANES), 2);
    w.d.head_dim = HEAD;
    for (size_t i = 0; i < w.count; i++) {
        const size_t lane = i % (2 * LANES), rank = lane / LANES, token = i / (2 * LANES) % SEQ;
        const size_t k = token * LANES + lane % LANES; /* of [heads, tokens, head] */
        *at(&w, (int)rank, i) = w.reference[at3(&w, i / (2 * LANES * SEQ), k / HEAD % SEQ,
                                                rank * LANES + k / (HEAD * SEQ) * HEAD + k % HEAD)];
    }
    expect_cause(&w, "heads_and_tokens_exchanged");
    w.d.head_dim = 0; /* any number of heads is a guess */
    expect_no_hint(&w, "heads and tokens exchanged");
    world_free(&w);
}

/* --- sums over another group -------------------------------------------------------------------------------------- */

/* What rank k of 4 adds to a part of 192 elements that it shares with its neighbour. */
static float share(size_t i, int k)
{
    return noise(i % 192 * 4 + (size_t)k + 500);
}

static void sums_over_ranks_of_different_parts_are_of_the_wrong_group(void)
{
    world w;
    grouped(&w, "model.layers.0.self_attn.k_rope", 'b', 4, 2, 2, SHAPE(24, 16), 0);
    w.d.tp = 4;
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = share(i, i < 192 ? 0 : 2) + share(i, i < 192 ? 1 : 3);
    world_refresh(&w);
    for (size_t i = 0; i < w.count; i++) {
        for (int r = 0; r < 4; r++) {
            if (at(&w, r, i))
                *at(&w, r, i) = share(i, r % 2) + share(i, r % 2 + 2);
        }
    }
    expect_cause(&w, "wrong_group");
    expect_hint(&w, "(ranks 0, 2; 1, 3)");
    *at(&w, 1, 7) += 1.0f; /* one value that its group does not have */
    expect_no_hint(&w, "wrong group");
    world_free(&w);
}

/* --- the gradients' norm ------------------------------------------------------------------------------------------ */

static float norm_of_own(const world *w, int r, size_t i, float reference)
{
    (void)i;
    return reference * (r % w->d.tp ? 0.6f : 0.8f);
}

static float norm_counted_twice(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r, (void)i;
    return reference * 1.1f;
}

static void norms_of_shards_and_norms_that_count_twice_are_told_apart(void)
{
    world w;
    mesh(&w, "grad_norm", 'c', 2, 2, 0, SHAPE(1), -1);
    w.reference[0] = 5.0f;
    world_refresh(&w);
    spoil(&w, norm_of_own);
    expect_cause(&w, "norm_of_own_shards");
    expect_hint(&w, "squares is 5)");
    spoil(&w, norm_counted_twice);
    expect_cause(&w, "norm_counts_twice");
    world_free(&w);
}

/* --- ranks of the wrong group ------------------------------------------------------------------------------------- */

static float always_zero(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r, (void)i, (void)reference;
    return 0.0f;
}

static float zero_after_the_first_group(const world *w, int r, size_t i, float reference)
{
    (void)i;
    return r < w->d.tp ? reference : 0.0f;
}

static void groups_after_the_first_that_are_all_wrong_took_the_world_rank(void)
{
    world w;
    mesh(&w, "model.embed_tokens", 'f', 2, 2, 3, SHAPE(4, 3, 8), -1);
    spoil(&w, zero_after_the_first_group);
    expect_cause(&w, "world_rank_in_group");
    spoil(&w, always_zero); /* not if the first group is wrong too */
    expect_cause(&w, "never_written");
    world_free(&w);
}

/* --- tokens ------------------------------------------------------------------------------------------------------- */

/* [b, s, h] of two ranks' [b, s/2, h], one after the other. */
static void leave_in_rank_order(world *w)
{
    const size_t b = w->shape[0], s = w->shape[1], h = w->shape[2], part = s / 2;
    for (int r = 0; r < w->d.ranks; r++) {
        for (size_t i = 0; i < b * s; i++) {
            const size_t rank = i / (b * part), sample = i / part % b, from = sample * s + rank * part + i % part;
            for (size_t k = 0; k < h; k++) {
                if (at(w, r, i * h + k))
                    *at(w, r, i * h + k) = w->reference[from * h + k];
            }
        }
    }
}

static void tokens_left_in_the_order_of_the_ranks_are_recognised_in_a_sharded_product(void)
{
    world w;
    mesh(&w, "model.layers.0.self_attn.q_proj", 'f', 1, 2, 3, SHAPE(3, 8, 8), 2);
    leave_in_rank_order(&w);
    expect_cause(&w, "gathered_in_rank_order");
    world_free(&w);
}

static void tokens_in_any_other_order_are_recognised_and_values_that_are_nobodys_are_not(void)
{
    world w;
    mesh(&w, "model.layers.0.self_attn.q_proj", 'f', 1, 2, 3, SHAPE(2, 4, 8), 2);
    for (int r = 0; r < 2; r++) {
        for (size_t i = 0; i < w.count; i++) {
            const size_t row = i / 8, from = 7 - row; /* reversed */
            if (at(&w, r, i))
                *at(&w, r, i) = w.reference[from * 8 + i % 8];
        }
    }
    expect_cause(&w, "sequence_reversed");
    expect_no_hint(&w, "order of the ranks");
    *at(&w, 0, 0) += 0.5f;
    expect_cause(&w, "unknown");
    world_free(&w);
}

/* --- ids ---------------------------------------------------------------------------------------------------------- */

static void rows_of_the_batchs_ids_alone_are_one_use_of_a_tied_weight(void)
{
    static const int64_t ids[] = {2, 5, 5, 11};
    world w;
    mesh(&w, "transformer.wte.weight", 'g', 1, 2, 2, SHAPE(12, 8), 0);
    w.d.ids = ids;
    w.d.batch = w.d.seq = 2;
    for (size_t k = 0; k < 4; k++) {
        for (size_t c = 0; c < 8; c++)
            *at(&w, ids[k] < 6 ? 0 : 1, (size_t)ids[k] * 8 + c) = 0.01f * (float)c;
    }
    expect_hint(&w, "exactly the rows of the 3 ids");
    *at(&w, 1, 7 * 8) += 1.0f; /* one row more */
    expect_cause(&w, "unknown");
    world_free(&w);
}

static void rows_of_ids_that_occur_again_were_written_over(void)
{
    static const int64_t ids[] = {2, 5, 5, 11, 11, 8};
    world w;
    mesh(&w, "model.embed_tokens.weight", 'g', 1, 2, 2, SHAPE(12, 8), 0);
    w.d.ids = ids;
    w.d.batch = 2;
    w.d.seq = 3;
    for (size_t c = 0; c < 8; c++) {
        *at(&w, 0, 5 * 8 + c) = noise(c + 900);
        *at(&w, 1, 11 * 8 + c) = noise(c + 950);
    }
    expect_cause(&w, "repeated_ids");
    *at(&w, 0, 3 * 8) += 1.0f; /* an id that the batch does not have */
    expect_cause(&w, "unknown");
    world_free(&w);
}

static void rows_that_pad_a_vocabulary_have_no_gradient(void)
{
    enum { FIRST = 34, VOCAB = 40 };
    world w;
    mesh(&w, "lm_head.weight", 'g', 1, 1, 2, SHAPE(VOCAB, 8), -1);
    w.d.hidden = true;
    memset(w.reference + FIRST * 8, 0, (VOCAB - FIRST) * 8 * sizeof *w.reference);
    world_refresh(&w);
    for (size_t i = FIRST * 8; i < w.count; i++)
        *at(&w, 0, i) = 0.01f * noise(i + 900);
    expect_cause(&w, "vocabulary_padding");
    expect_hint(&w, "only the last 6 ids (from 34 on)");
    w.d.hidden = false; /* a check's vocabulary is never padded */
    expect_cause(&w, "unknown");
    world_free(&w);
}

static void the_last_ids_of_a_vocabulary_that_was_rounded_down_belong_to_nobody(void)
{
    world w;
    mesh(&w, "lm_head", 'f', 1, 1, 3, SHAPE(2, 3, 11), -1);
    w.d.ranks = w.d.tp = 1;
    for (size_t row = 0; row < 6; row++)
        *at(&w, 0, row * 11 + 10) = -INFINITY;
    expect_cause(&w, "unknown"); /* one rank does not round */
    world_free(&w);
    world_begin(&w, "lm_head", 'f', 3, 3, SHAPE(2, 3, 11));
    for (int r = 0; r < 3; r++)
        cr_assert_eq(ar_layout_shard_uneven(&w.layout[r], 3, SHAPE(2, 3, 11), 2, r, 3), AR_OK);
    world_end(&w);
    for (size_t row = 0; row < 6; row++) {
        for (size_t id = 9; id < 11; id++)
            *at(&w, 2, row * 11 + id) = -INFINITY;
    }
    expect_hint(&w, "the last 2 of 11 ids belong to nobody");
    world_free(&w);
}

/* --- norms -------------------------------------------------------------------------------------------------------- */

/* A norm with a bias: 12 lanes are padded to 16, which stretches what stands before the bias. */
static void a_norm_over_padded_lanes_is_recognised(void)
{
    world w;
    mesh(&w, "transformer.h.0.ln_1", 'f', 1, 2, 3, SHAPE(2, 3, 12), -1);
    for (size_t i = 0; i < w.count; i++) {
        const float bias = 0.05f * noise(i % 12 + 99), before = w.reference[i] - bias;
        for (int r = 0; r < 2; r++)
            *at(&w, r, i) = before * sqrtf(16.0f / 12.0f) + bias;
    }
    expect_hint(&w, "taken over 16 lanes, padding included");
    for (size_t i = 0; i < w.count; i++) {
        const float bias = 0.05f * noise(i % 12 + 99), before = w.reference[i] - bias;
        for (int r = 0; r < 2; r++)
            *at(&w, r, i) = before * (1.5f + 0.1f * (float)(i / 12)) + bias;
    }
    expect_cause(&w, "norm_statistic");
    expect_no_hint(&w, "padding included");
    world_free(&w);
}

Test(pattern_layout, every_claim)
{
    TOGETHER(
        gradients_that_were_not_added_over_dp_say_so, gradients_that_were_not_added_over_tp_say_so_beside_other_groups,
        activations_of_each_group_are_looked_at_alone,
        a_missing_gather_is_seen_in_a_group_and_its_ranks_are_counted_from_its_first,
        means_of_unlike_numbers_of_samples_are_told_from_their_sums,
        the_loss_of_ranks_that_divided_by_their_own_count_is_a_mean_of_means, means_over_micro_batches_are_recognised,
        a_factor_is_that_of_the_group_that_has_so_many_ranks,
        a_division_by_the_number_of_micro_batches_is_told_from_half_a_value,
        heads_left_before_tokens_on_each_rank_are_recognised, sums_over_ranks_of_different_parts_are_of_the_wrong_group,
        norms_of_shards_and_norms_that_count_twice_are_told_apart,
        groups_after_the_first_that_are_all_wrong_took_the_world_rank,
        tokens_left_in_the_order_of_the_ranks_are_recognised_in_a_sharded_product,
        tokens_in_any_other_order_are_recognised_and_values_that_are_nobodys_are_not,
        rows_of_the_batchs_ids_alone_are_one_use_of_a_tied_weight, rows_of_ids_that_occur_again_were_written_over,
        rows_that_pad_a_vocabulary_have_no_gradient,
        the_last_ids_of_a_vocabulary_that_was_rounded_down_belong_to_nobody, a_norm_over_padded_lanes_is_recognised);
}
