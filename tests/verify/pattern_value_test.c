/* SPDX-License-Identifier: Apache-2.0 */
/* Values, gradients, losses, places: every detector fires on its trace and is silent on a near miss. */
#include "tests/verify/pattern_support.h"

TestSuite(pattern_value, .timeout = 300);
TestSuite(pattern_part, .timeout = 300);

static void scale_all(world *w, float factor)
{
    for (int r = 0; r < w->d.ranks; r++) {
        for (size_t i = 0; i < w->count; i++) {
            if (at(w, r, i))
                *at(w, r, i) = w->reference[i] * factor;
        }
    }
}

static void set_everywhere(world *w, size_t i, float value)
{
    for (int r = 0; r < w->d.ranks; r++) {
        if (at(w, r, i))
            *at(w, r, i) = value;
    }
}

/* --- factors ------------------------------------------------------------------------------------------------------ */

Test(pattern_value, a_factor_of_the_number_of_ranks_is_a_second_reduction)
{
    world w;
    replicated(&w, "model.norm.weight", 'g', 3, 1, SHAPE(64));
    scale_all(&w, 3.0f);
    expect_hint(&w, "times 3 = N (N = 3 ranks): a value that was complete on every rank was summed");
    expect_pattern(&w, "each 3 = N times the reference; on all 3 ranks, whose copies are equal");
    scale_all(&w, 1.0f / 3.0f);
    expect_hint(&w, "= 1/N (N = 3 ranks): averaged");
    scale_all(&w, 2.0f);
    expect_cause(&w, "counted_twice");
    scale_all(&w, 0.731f);
    expect_cause(&w, "wrong_scalar");
    world_free(&w);
}

/* Every fifth element, or the first fifth, is zero, and what is left four fifths of the reference. */
static void expect_dropped(bool scattered, const char *cause)
{
    world w;
    replicated(&w, "transformer.drop", 'f', 2, 3, SHAPE(2, 20, 16));
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = (scattered ? i % 5 == 0 : i < w.count / 5) ? 0.0f : w.reference[i];
    world_refresh(&w);
    scale_all(&w, 0.8f);
    expect_cause(&w, cause);
    scale_all(&w, 0.7f); /* not the share that is left */
    expect_cause(&w, "wrong_scalar");
    world_free(&w);
}

Test(pattern_value, a_factor_of_the_share_that_is_not_zero_is_dropout_without_its_scale)
{
    expect_dropped(true, "dropout_without_scale");
    expect_dropped(false, "wrong_scalar");
}

Test(pattern_value, a_factor_of_the_number_of_tokens_is_a_mean_or_a_sum_too_many)
{
    static const char full[] = "model.layers.0.mlp.down_proj.weight:grad";
    world w;
    replicated(&w, "model.layers.0.mlp.down_proj.weight", 'g', 1, 2, SHAPE(16, 24));
    w.d.batch = 3;
    w.d.seq = 7;
    scale_all(&w, 1.0f / 21.0f);
    expect_beside(&w, full, NULL, "mean_over_tokens");
    scale_all(&w, 21.0f);
    expect_beside(&w, full, NULL, "sum_over_tokens");
    w.d.seq = 9; /* 27 tokens, 24 targets */
    expect_beside(&w, full, NULL, "reduced_again");
    world_free(&w);
}

Test(pattern_value, one_element_with_another_ratio_is_no_factor)
{
    world w;
    replicated(&w, "model.norm.weight", 'g', 3, 1, SHAPE(64));
    scale_all(&w, 3.0f);
    set_everywhere(&w, 5, w.reference[5] * 3.01f);
    expect_no_hint(&w, "times 3");
    world_free(&w);
}

Test(pattern_value, a_factor_of_some_elements_is_told_of_those)
{
    world w;
    sharded(&w, "model.layers.0.mlp.up_proj.weight", 'g', 2, 2, SHAPE(8, 6), 0);
    for (size_t i = 24; i < 48; i++)
        *at(&w, 1, i) = w.reference[i] * 2.0f;
    expect_pattern(&w, "24 of 48 elements (50%), each 2 = N times the reference: rows 4 onward; on rank 1 only");
    world_free(&w);
}

Test(pattern_value, the_scale_of_a_shard_is_computed_from_its_size)
{
    world w;
    sharded(&w, "model.layers.0.self_attn.q_proj.weight", 'i', 2, 2, SHAPE(32, 32), 0);
    scale_all(&w, 1.15470053837925f);
    expect_hint(&w, "times 1.1547: initial scale from the shard's size, sqrt((32 + 32) / (16 + 32))");
    scale_all(&w, 1.41421356237f);
    expect_hint(&w, "times 1.41421: initial scale from the shard's size, sqrt(2), as 1/sqrt(fan_in)");
    scale_all(&w, 1.2f);
    expect_cause(&w, "init_scale");
    expect_no_hint(&w, "shard's size");
    world_free(&w);
}

Test(pattern_value, a_factor_for_each_rank_is_its_own_norm)
{
    world w;
    sharded(&w, "x.weight", 'n', 2, 2, SHAPE(8, 6), 0);
    for (size_t i = 0; i < 48; i++)
        *at(&w, (int)(i / 24), i) = w.reference[i] * (i < 24 ? 0.5f : 0.8f);
    expect_hint(&w, "a constant of its own, from 0.5 to 0.8");
    world_free(&w);
}

Test(pattern_value, of_two_elements_an_odd_ratio_says_nothing)
{
    world w;
    replicated(&w, "x.weight", 'g', 2, 1, SHAPE(64));
    set_everywhere(&w, 9, w.reference[9] * 1.37f);
    expect_cause(&w, "unknown");
    world_free(&w);
}

/* --- zero, masks, NaN, rounding ----------------------------------------------------------------------------------- */

Test(pattern_value, zeros_are_told_by_what_they_are_in)
{
    world w;
    replicated(&w, "model.layers.3.post_attention_layernorm", 'b', 2, 3, SHAPE(2, 4, 5));
    /* The last token of each sample has no gradient in the reference either. */
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = i / 5 % 4 == 3 ? 0.0f : w.reference[i];
    scale_all(&w, 0.0f);
    expect_cause(&w, "norm_backward_missing");
    expect_pattern(&w, "30 of 40 elements (75%), every one that is not zero in the reference, each zero");
    w.d.pass = 'g';
    expect_cause(&w, "no_gradient");
    w.d.pass = 'b';
    w.d.name = "model.layers.3.mlp";
    expect_cause(&w, "no_backward");
    w.d.pass = 'f';
    expect_cause(&w, "never_written");
    set_everywhere(&w, 3, w.reference[3]);
    expect_hint(&w, "29 elements were never written");
    set_everywhere(&w, 4, 1e-9f);
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_value, zeros_in_other_places_are_another_mask)
{
    world w;
    sharded(&w, "transformer.h.0.attn.probs", 'f', 2, 4, SHAPE(2, 4, 5, 5), 1);
    for (size_t i = 0; i < w.count; i += 3)
        w.reference[i] = 0.0f;
    world_refresh(&w);
    for (int r = 0; r < 2; r++) {
        for (size_t i = 0; i < w.count; i++) {
            if (at(&w, r, i))
                *at(&w, r, i) = i % 4 == 0 ? 0.0f : i % 3 == 0 ? 0.5f : w.reference[i];
        }
    }
    expect_cause(&w, "mask_of_shard_index");
    expect_hint(&w, "the element's index in the full tensor");
    w.d.step = 2; /* such a mask would have differed in the first step */
    expect_cause(&w, "mask_of_other_seed");
    *at(&w, 0, 1) += 0.25f;
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_value, nan_is_counted)
{
    world w;
    replicated(&w, "x", 'f', 2, 3, SHAPE(2, 4, 5));
    set_everywhere(&w, at3(&w, 1, 2, 3), NAN);
    set_everywhere(&w, at3(&w, 0, 1, 1), NAN);
    expect_hint(&w, "not a number in 4 of the 4 different values held");
    expect_pattern(&w, "2 of 40 elements (5%)");
    expect_pattern(&w, "4 NaN over the ranks");
    world_free(&w);
}

Test(pattern_value, a_nan_in_both_is_no_difference)
{
    world w;
    replicated(&w, "x", 'f', 2, 3, SHAPE(2, 4, 5));
    w.reference[7] = NAN;
    world_refresh(&w);
    expect_pattern(&w, "no element differs");
    world_free(&w);
}

Test(pattern_value, differences_of_rounding_are_called_that)
{
    world w;
    replicated(&w, "x", 'f', 2, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, w.reference[i] * (1.0f + 2e-7f * noise(i + 9)));
    expect_cause(&w, "rounding");
    w.d.exact = true; /* sums in any order have the same bits */
    expect_cause(&w, "small_change");
    w.d.unsteady = true;
    expect_cause(&w, "unordered_sum");
    w.d.exact = w.d.unsteady = false;
    set_everywhere(&w, 30, w.reference[30] + 1e-4f);
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_value, sixteen_bit_storage_is_recognised)
{
    world w;
    replicated(&w, "model.norm", 'f', 2, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++) {
        uint32_t u;
        memcpy(&u, &w.reference[i], sizeof u);
        u &= 0xffffe000u;
        float v;
        memcpy(&v, &u, sizeof v);
        set_everywhere(&w, i, v);
    }
    expect_cause(&w, "fewer_bits");
    set_everywhere(&w, 30, w.reference[30] * 1.0011f);
    expect_cause(&w, "unknown");
    world_free(&w);
}

/* --- repeats from token to token ---------------------------------------------------------------------------------- */

Test(pattern_value, a_vector_added_to_every_token_is_a_bias)
{
    for (int n = 1; n <= 4; n++) {
        world w;
        replicated(&w, "transformer.h.0.attn.c_proj", 'f', n, 3, SHAPE(2, 8, 16));
        for (size_t i = 0; i < w.count; i++)
            set_everywhere(&w, i, w.reference[i] + 0.1f * noise(i % 16 + 300));
        expect_hint(&w,
                    "a bias counted more than once, or left out: the same vector is added to each of the 16 tokens");
        for (size_t i = 0; i < 16; i++)
            set_everywhere(&w, i, w.reference[i]);
        expect_cause(&w, "unknown");
        world_free(&w);
    }
}

Test(pattern_value, a_bias_missing_on_one_rank_of_a_sharded_output_is_a_bias)
{
    world w;
    sharded(&w, "model.layers.0.mlp.up_proj", 'f', 2, 3, SHAPE(2, 8, 16), 2);
    for (size_t i = 0; i < w.count; i++) {
        if (i % 16 >= 8)
            *at(&w, 1, i) += noise(i % 16);
    }
    expect_hint(&w, "the same vector is added to each of the 16 tokens");
    expect_pattern(&w, "features 8 onward; on rank 1 only");
    world_free(&w);
}

Test(pattern_value, a_table_added_to_every_sample_is_positions)
{
    world w;
    replicated(&w, "transformer.drop", 'f', 2, 3, SHAPE(4, 8, 6));
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, w.reference[i] + (i % 48 >= 24 ? noise(i % 48 + 300) : 0.0f));
    expect_hint(&w, "positions: the difference is the same for all 4 samples");
    expect_pattern(&w, "tokens 4 onward");
    set_everywhere(&w, at3(&w, 2, 7, 1), 3.0f);
    expect_cause(&w, "part_of_one_rank");
    world_free(&w);
}

Test(pattern_value, a_factor_for_each_token_is_a_row_statistic)
{
    world w;
    replicated(&w, "model.norm", 'f', 2, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, w.reference[i] * (1.5f + 0.5f * noise(i / 16 + 70)));
    expect_hint(&w, "each of 16 tokens is scaled by a factor of its own");
    set_everywhere(&w, 30, w.reference[30]);
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_value, a_number_for_each_token_is_added_to_its_row)
{
    world w;
    replicated(&w, "model.layers.0.self_attn.scores", 'f', 1, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, w.reference[i] + noise(i / 16 + 70));
    expect_beside(&w, "model.layers.0.self_attn.scores:fwd", NULL, "row_number_added");
    set_everywhere(&w, 30, w.reference[30]);
    expect_beside(&w, "model.layers.0.self_attn.scores:fwd", NULL, "unknown");
    world_free(&w);
}

/* --- the loss ----------------------------------------------------------------------------------------------------- */

Test(pattern_part, a_loss_is_explained_by_whether_the_ranks_agree)
{
    world w;
    replicated(&w, "loss", 'f', 2, 0, NULL);
    w.reference[0] = 5.5f;
    w.local[0][0] = 5.4f;
    w.local[1][0] = 5.7f;
    expect_cause(&w, "loss_without_common_maximum");
    w.local[0][0] = w.local[1][0] = 5.51f;
    expect_hint(&w, "target logit: the loss is off by 0.01");
    expect_pattern(&w, "the one value; on both ranks, whose copies are equal");
    w.local[0][0] = w.local[1][0] = 5.5f + 0.693147180559945f;
    expect_hint(&w, "the reference plus log(2)");
    w.local[0][0] = w.local[1][0] = 11.0f;
    expect_hint(&w, "times 2 = N");
    w.local[0][0] = 2.0f;
    w.local[1][0] = 3.5f;
    expect_cause(&w, "missing_all_reduce");
    world_free(&w);
}

/* --- embeddings --------------------------------------------------------------------------------------------------- */

/* Tokens 3, 9 and 20 looked up one id, token 5 another. */
static void embedding(world *w)
{
    replicated(w, "model.embed_tokens", 'f', 2, 3, SHAPE(3, 8, 4));
    memcpy(w->reference + 9 * 4, w->reference + 3 * 4, 4 * sizeof(float));
    memcpy(w->reference + 20 * 4, w->reference + 3 * 4, 4 * sizeof(float));
    world_refresh(w);
}

Test(pattern_part, wrong_rows_of_one_id_are_a_shards_edge)
{
    world w;
    embedding(&w);
    for (size_t i = 0; i < 4; i++) {
        set_everywhere(&w, 3 * 4 + i, 1e30f);
        set_everywhere(&w, 9 * 4 + i, 1e30f);
        set_everywhere(&w, 20 * 4 + i, 1e30f);
    }
    expect_hint(
        &w,
        "ids at a shard's edge: the 3 wrong tokens hold 1 id (equal reference rows), and no token with it is right");
    expect_hint(&w, "belongs to two shards, whose rows were added as bit patterns");
    expect_pattern(&w, "every feature of 3 tokens: [0, 3], [1, 1], [2, 4]");
    for (size_t i = 0; i < 4; i++)
        set_everywhere(&w, 9 * 4 + i, w.reference[9 * 4 + i]);
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_part, gradients_of_a_shards_first_row_are_an_edge)
{
    world w;
    sharded(&w, "transformer.wte.weight", 'g', 4, 2, SHAPE(16, 4), 0);
    for (size_t i = 8 * 4; i < 9 * 4; i++)
        set_everywhere(&w, i, noise(i + 60));
    expect_hint(&w, "ids at a shard's edge: only id 8 differs");
    for (size_t i = 9 * 4; i < 10 * 4; i++)
        set_everywhere(&w, i, noise(i + 60));
    expect_cause(&w, "part_of_one_rank");
    world_free(&w);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

Test(pattern_part, a_bias_gradient_of_one_element_a_token_is_the_wrong_axis)
{
    world w;
    replicated(&w, "transformer.h.3.mlp.c_proj.bias", 'g', 2, 1, SHAPE(96));
    w.d.batch = 2;
    w.d.seq = 16;
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, i < 32 ? noise(i + 3000) : 0.0f);
    expect_cause(&w, "bias_gradient_wrong_axis");
    expect_hint(&w, "only the first 32 elements are written, one for each of the 32 tokens");
    w.d.batch = 8;
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, i % 16 == 15 ? 0.0f : noise(i + 3000));
    expect_hint(&w, "zero at elements 15, 31, ... alone, where the last tokens of the samples stand");
    world_free(&w);
}

Test(pattern_part, a_bias_gradient_near_the_reference_is_not_the_wrong_axis)
{
    world w;
    replicated(&w, "transformer.h.3.mlp.c_proj.bias", 'g', 2, 1, SHAPE(96));
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, w.reference[i] + 0.3f * noise(i + 3000));
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_part, equal_gradients_over_the_wrong_axis_count_features_for_tokens)
{
    world w;
    replicated(&w, "layers.1.mlp.w2.bias", 'g', 4, 1, SHAPE(128));
    w.d.batch = 8;
    w.d.seq = 64;
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = 512.0f;
    scale_all(&w, 0.25f);
    expect_hint(&w, "0.25 = 128 features / 512 tokens: a bias gradient summed over the wrong axis");
    world_free(&w);
}

/* Samples 0 .. of 8: each adds noise of its own to every element. */
static void sum_of_samples(world *w, size_t first, size_t last, float *out)
{
    for (size_t i = 0; i < w->count; i++) {
        out[i] = 0.0f;
        for (size_t s = first; s < last; s++)
            out[i] += noise(i * 8 + s + 40000) + 0.3f * noise(i + 90000);
    }
}

Test(pattern_part, one_sample_of_eight_is_a_part_of_the_sum)
{
    world w;
    sharded(&w, "model.layers.0.mlp.down_proj.weight", 'g', 2, 2, SHAPE(32, 64), 1);
    w.d.batch = 8;
    w.d.seq = 4;
    float *part = malloc(w.count * sizeof *part);
    cr_assert_not_null(part);
    sum_of_samples(&w, 0, 8, w.reference);
    sum_of_samples(&w, 0, 1, part);
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, part[i]);
    expect_cause(&w, "one_sample");
    expect_hint(&w, "about 1/8: as if one of 8 samples counted");
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, noise(i + 123456));
    expect_cause(&w, "other_input");
    expect_no_hint(&w, "a part of the sum");
    free(part);
    world_free(&w);
}

Test(pattern_part, an_input_overwritten_by_a_narrower_output_leaves_the_share_it_did_not_reach)
{
    world w;
    sharded(&w, "model.layers.0.mlp.down_proj.weight", 'g', 2, 2, SHAPE(24, 96), 1);
    w.d.batch = 8;
    for (size_t i = 0; i < w.count; i++) /* half of the sum is right, the other half is foreign */
        set_everywhere(&w, i, 0.5f * w.reference[i] + 0.7f * noise(i + 5000));
    expect_cause(&w, "input_overwritten");
    expect_hint(&w, "about 1 - 24/48");
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, 0.8f * w.reference[i] + 0.9f * noise(i + 5000));
    expect_hint(&w, "something foreign");
    expect_no_hint(&w, "1 - 24/48");
    w.d.batch = 2; /* nothing foreign in it, and both readings are near: the nearer one leads */
    for (size_t i = 0; i < w.count; i++)
        set_everywhere(&w, i, 0.5f * w.reference[i] + 0.4f * noise(i + 5000));
    expect_hint(&w, "about 1/2: as if one of 2 samples counted");
    expect_hint(&w, "also about 1 - 24/48");
    world_free(&w);
}

/* --- places ------------------------------------------------------------------------------------------------------- */

Test(pattern_part, the_first_sample_alone_right_is_leading_dimensions)
{
    world w;
    replicated(&w, "model.layers.0.mlp.act", 'f', 2, 3, SHAPE(3, 8, 4));
    for (size_t i = 32; i < w.count; i++)
        set_everywhere(&w, i, noise(i + 5000));
    expect_cause(&w, "first_sample_alone");
    expect_hint(&w, "only the first of 3 samples is right");
    expect_pattern(&w, "64 of 96 elements (67%): samples 1 onward; on both ranks, whose copies are equal");
    world_free(&w);
}

Test(pattern_part, one_wrong_shard_names_its_rank)
{
    world w;
    sharded(&w, "model.layers.0.mlp.up_proj", 'f', 4, 3, SHAPE(2, 8, 16), 2);
    for (size_t i = 0; i < w.count; i++) {
        if (i % 16 / 4 == 2)
            *at(&w, 2, i) = noise(i + 5000);
    }
    expect_hint(&w, "the shards of all other ranks are right; rank 2 read other weights");
    expect_pattern(&w, "features 8..11; on rank 2 only");
    world_free(&w);
}

Test(pattern_part, one_wrong_block_of_a_gathered_value_names_its_rank)
{
    world w;
    replicated(&w, "x", 'f', 4, 3, SHAPE(2, 8, 16));
    for (size_t i = 0; i < w.count; i++) {
        if (i % 16 / 4 == 2)
            set_everywhere(&w, i, noise(i + 5000));
    }
    expect_hint(&w, "only features 8..11 differ, the block that rank 2 of 4 contributes");
    world_free(&w);
}

Test(pattern_part, two_elements_in_each_others_place_are_exchanged)
{
    world w;
    replicated(&w, "model.norm.weight", 'g', 1, 1, SHAPE(96));
    set_everywhere(&w, 7, w.reference[70]);
    set_everywhere(&w, 70, w.reference[7]);
    expect_beside(&w, "model.norm.weight:grad", NULL, "two_exchanged");
    set_everywhere(&w, 70, w.reference[8]);
    expect_beside(&w, "model.norm.weight:grad", NULL, "few_elements");
    world_free(&w);
}

Test(pattern_part, one_element_has_a_place_and_no_invented_cause)
{
    world w;
    replicated(&w, "model.layers.0.mlp.act", 'f', 2, 3, SHAPE(3, 8, 4));
    set_everywhere(&w, at3(&w, 1, 5, 2), 7.0f);
    expect_pattern(&w, "1 of 96 elements (1%): sample 1, token 5, feature 2; on both ranks");
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_part, one_head_is_named)
{
    world w;
    sharded(&w, "model.layers.0.self_attn.q_proj", 'f', 2, 3, SHAPE(2, 4, 32), 2);
    w.d.head_dim = 4;
    for (size_t i = 0; i < w.count; i++) {
        if (i % 32 / 4 == 5)
            set_everywhere(&w, i, noise(i + 5000));
    }
    expect_pattern(&w, "head 5 (features 20..23); on rank 1 only");
    world_free(&w);
    sharded(&w, "model.layers.0.self_attn.probs", 'f', 2, 4, SHAPE(2, 4, 3, 3), 1);
    for (size_t i = 0; i < w.count; i++) {
        if (i / 9 % 4 == 3)
            set_everywhere(&w, i, noise(i + 5000));
    }
    expect_pattern(&w, ": head 3; on rank 1 only");
    world_free(&w);
}
