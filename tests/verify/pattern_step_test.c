/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes that sequence parallelism, micro-batches, dropout and the update leave, each spoiled by hand. */
#include "support/together.h"
#include "tests/verify/pattern_support.h"

TestSuite(pattern_step, .timeout = 300);

/* --- sums over ranks that share out positions --------------------------------------------------------------------- */

/* The reference becomes the sum of `n` contributions that have nothing to do with each other. */
static float contribution(size_t i, int k)
{
    return noise(i * 7 + 1000003 * (size_t)(k + 1));
}

static void sum_contributions(world *w, int n)
{
    for (size_t i = 0; i < w->count; i++) {
        w->reference[i] = 0.0f;
        for (int k = 0; k < n; k++)
            w->reference[i] += contribution(i, k);
    }
    world_refresh(w);
}

static float own_contribution(const world *w, int r, size_t i, float reference)
{
    (void)reference;
    return contribution(i, r % w->d.tp);
}

static void tokens_with_one_ranks_part_of_a_sum_miss_a_reduce_scatter(void)
{
    for (int dp = 1; dp <= 2; dp++) {
        world w;
        mesh(&w, "lm_head", 'b', dp, 3, 3, SHAPE(2, 6, 24), 1);
        w.d.sp = true;
        sum_contributions(&w, 3);
        spoil(&w, own_contribution);
        expect_cause(&w, "missing_reduce_scatter");
        expect_hint(&w, "about 1/3 of the reference");
        w.d.sp = false; /* without sequence parallelism positions are not shared out */
        expect_cause(&w, "unknown");
        world_free(&w);
    }
}

static void a_rank_whose_tokens_have_no_gradient_does_not_count_as_right(void)
{
    world w;
    mesh(&w, "lm_head", 'b', 1, 3, 3, SHAPE(2, 3, 96), 1);
    w.d.sp = true;
    sum_contributions(&w, 3);
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = i / 96 % 3 == 2 ? 0.0f : w.reference[i];
    world_refresh(&w);
    for (size_t i = 0; i < w.count; i++) {
        for (int r = 0; r < 2; r++) {
            if (at(&w, r, i))
                *at(&w, r, i) = contribution(i, r);
        }
    }
    expect_cause(&w, "missing_reduce_scatter");
    for (size_t i = 0; i < w.count; i++) {
        for (int r = 0; r < 2; r++) {
            if (at(&w, r, i))
                *at(&w, r, i) = 0.0f;
        }
    }
    expect_cause(&w, "no_backward");
    w.d.name = "transformer.h.0.ln_2";
    expect_cause(&w, "norm_backward_missing");
    expect_no_hint(&w, "zeros from");
    world_free(&w);
}

static float unrelated(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r, (void)reference;
    return contribution(i, 9);
}

static float half_and_more(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r;
    return 0.5f * reference + 2.0f * contribution(i, 9);
}

static void values_that_are_no_part_of_the_sum_miss_no_reduce_scatter(void)
{
    world w;
    mesh(&w, "lm_head", 'b', 1, 2, 3, SHAPE(2, 6, 24), 1);
    w.d.sp = true;
    sum_contributions(&w, 2);
    spoil(&w, unrelated);
    expect_cause(&w, "unknown");
    spoil(&w, half_and_more); /* its share is a half, but it is too large for a part */
    expect_no_hint(&w, "reduce-scatter");
    world_free(&w);
}

/* --- shards of unlike sizes --------------------------------------------------------------------------------------- */

/* Shards of 4, 4 and 3 rows; what all have in common, 3 rows, went to every rank. */
static void uneven_broadcast(world *w)
{
    sharded(w, "transformer.wte.weight", 'i', 3, 2, SHAPE(11, 8), 0);
    for (size_t i = 0; i < w->count; i++) {
        const size_t row = i / 8;
        const int owner = row < 4 ? 0 : row < 8 ? 1 : 2;
        const size_t local = row - (size_t)owner * 4;
        if (owner > 0 && local < 3)
            *at(w, owner, i) = w->reference[local * 8 + i % 8];
    }
}

static void one_shard_sent_to_ranks_of_unlike_sizes_is_recognised(void)
{
    world w;
    uneven_broadcast(&w);
    expect_cause(&w, "shards_seeded_alike");
    expect_hint(&w, "rank 1 has rank 0's, rank 2 has rank 0's");
    *at(&w, 1, 7 * 8) += 0.5f; /* the row that the others do not have is neither */
    expect_cause(&w, "part_of_one_rank");
    world_free(&w);
}

/* --- positions under dropout -------------------------------------------------------------------------------------- */

static void a_table_of_positions_shows_through_dropout(void)
{
    world w;
    mesh(&w, "transformer.drop", 'f', 2, 2, 3, SHAPE(6, 4, 16), 1);
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = (i * 2654435761u >> 7) % 5 == 0 ? 0.0f : w.reference[i];
    world_refresh(&w);
    for (int r = 1; r < 4; r += 2) {
        for (size_t i = 0; i < w.count; i++) {
            float *value = at(&w, r, i);
            if (value && *value != 0.0f)
                *value += noise(i % 64 + 5000);
        }
    }
    expect_cause(&w, "positions");
    world_free(&w);
}

/* Of two samples in which hardly an element is kept twice every difference repeats itself. */
static void differences_that_occur_once_are_no_table(void)
{
    world w;
    mesh(&w, "transformer.drop", 'f', 1, 1, 3, SHAPE(2, 4, 16), -1);
    for (size_t i = 0; i < w.count; i++)
        w.reference[i] = (i / 64 == 0) == (i % 2 == 0) ? w.reference[i] : 0.0f;
    world_refresh(&w);
    for (size_t i = 0; i < w.count; i++) {
        if (w.reference[i] != 0.0f)
            *at(&w, 0, i) += noise(i + 5000);
    }
    expect_cause(&w, "unknown");
    world_free(&w);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Four samples' contributions, alike in part; those of the first two come with the others' inputs. */
static void other_inputs(world *w)
{
    mesh(w, "transformer.h.3.mlp.c_proj.weight", 'g', 1, 1, 2, SHAPE(16, 24), -1);
    w->d.batch = 4;
    w->d.seq = 4;
    w->d.micro_batches = 2;
    w->d.forward_first = true;
    for (size_t i = 0; i < w->count; i++)
        w->reference[i] = noise(i) + contribution(i, 0) + contribution(i, 1);
    world_refresh(w);
    for (size_t i = 0; i < w->count; i++)
        *at(w, 0, i) = noise(i) + contribution(i, 2) + contribution(i, 1);
}

static void an_input_of_another_micro_batch_is_suspected_where_all_went_forward_first(void)
{
    world w;
    other_inputs(&w);
    expect_cause(&w, "input_of_other_micro_batch");
    expect_no_hint(&w, "leading dimensions");
    w.d.forward_first = false;
    expect_cause(&w, "input_overwritten");
    w.d.forward_first = true;
    for (size_t i = 0; i < w.count; i++) /* a part of the sum */
        *at(&w, 0, i) = noise(i);
    expect_cause(&w, "one_sample");
    world_free(&w);
}

static float a_third(const world *w, int r, size_t i, float reference)
{
    (void)w, (void)r, (void)i;
    return reference / 3.0f;
}

static void a_factor_of_a_row_parallel_bias_alone_is_the_tensor_parallel_groups(void)
{
    world w;
    mesh(&w, "transformer.h.3.mlp.c_proj.bias", 'g', 3, 3, 1, SHAPE(96), -1);
    spoil(&w, a_third);
    expect_cause(&w, "averaged_again");
    expect_hint(&w, "averaged over tp");
    expect_no_hint(&w, "dp");
    w.d.name = "transformer.h.3.ln_2.weight"; /* any other may be either's */
    expect_hint(&w, "averaged over dp where the sum was wanted, or the same over tp");
    world_free(&w);
}

/* Two data-parallel ranks with one sample of 8 tokens each. */
static void a_bias_gradient_over_the_wrong_axis_ends_with_the_tokens_of_a_rank(void)
{
    world w;
    mesh(&w, "layers.1.mlp.w2.bias", 'g', 2, 1, 1, SHAPE(48), -1);
    w.d.batch = 2;
    w.d.seq = 8;
    for (size_t i = 0; i < w.count; i++) {
        for (int r = 0; r < 2; r++)
            *at(&w, r, i) = i < 8 ? 20.0f * noise(i + 300) : 0.0f;
    }
    expect_hint(&w, "only the first 8 elements are written, one for each of the 8 tokens");
    world_free(&w);
}

/* --- updates ------------------------------------------------------------------------------------------------------ */

/* Weights that a step moved by a thousandth of their size; factor[r % 2] times as far. */
static void updated(world *w, float first, float second, float **before)
{
    mesh(w, "model.norm.weight", 'n', 1, 2, 1, SHAPE(96), -1);
    *before = malloc(w->count * sizeof **before);
    cr_assert_not_null(*before);
    for (size_t i = 0; i < w->count; i++) {
        const float update = 1e-3f * noise(i + 77);
        (*before)[i] = w->reference[i];
        *at(w, 0, i) = w->reference[i] + first * update;
        *at(w, 1, i) = w->reference[i] + second * update;
        w->reference[i] += update;
    }
    w->d.before = *before;
}

static void expect_update(float first, float second, const char *text)
{
    float *before = NULL;
    world w;
    updated(&w, first, second, &before);
    expect_hint(&w, text);
    w.d.before = NULL; /* beside the weights themselves it is nothing */
    expect_no_hint(&w, text);
    world_free(&w);
    free(before);
}

static void updates_by_a_constant_factor_are_recognised(void)
{
    expect_update(0.5f, 0.5f, "the update is 0.5 times the expected");
    expect_update(1.25f, 2.0f, "a factor of its own, from 1.25");
    expect_update(0.0f, 0.0f, "no update");
    expect_update(-1.0f, -1.0f, "its sign is wrong");
    expect_update(1.0f, 0.5f, "the update is 0.5 times the expected on rank 1, and not on the others");
}

static void an_update_of_little_more_than_its_decay_is_a_factor(void)
{
    float *before = NULL;
    world w;
    updated(&w, 1.0f, 1.0f, &before);
    for (size_t i = 0; i < w.count; i++) {
        const float decay = 1e-4f * before[i], step = 1e-3f * noise(i + 77);
        w.reference[i] = before[i] - decay + step;
        *at(&w, 0, i) = *at(&w, 1, i) = before[i] - decay + 0.01f * step;
    }
    expect_hint(&w, "the update is 0.01 times the expected");
    world_free(&w);
    free(before);
}

static void an_update_in_another_direction_is_no_factor(void)
{
    float *before = NULL;
    world w;
    updated(&w, 1.0f, 1.0f, &before);
    for (size_t i = 0; i < w.count; i++)
        *at(&w, 1, i) = before[i] + 1e-3f * noise(i + 900);
    expect_cause(&w, "replicas_apart");
    expect_no_hint(&w, "factor of its own");
    world_free(&w);
    free(before);
}

Test(pattern_step, every_claim)
{
    TOGETHER(tokens_with_one_ranks_part_of_a_sum_miss_a_reduce_scatter,
             a_rank_whose_tokens_have_no_gradient_does_not_count_as_right,
             values_that_are_no_part_of_the_sum_miss_no_reduce_scatter,
             one_shard_sent_to_ranks_of_unlike_sizes_is_recognised, a_table_of_positions_shows_through_dropout,
             differences_that_occur_once_are_no_table,
             an_input_of_another_micro_batch_is_suspected_where_all_went_forward_first,
             a_factor_of_a_row_parallel_bias_alone_is_the_tensor_parallel_groups,
             a_bias_gradient_over_the_wrong_axis_ends_with_the_tokens_of_a_rank,
             updates_by_a_constant_factor_are_recognised, an_update_of_little_more_than_its_decay_is_a_factor,
             an_update_in_another_direction_is_no_factor);
}
