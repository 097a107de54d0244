/* SPDX-License-Identifier: Apache-2.0 */
/* Traces of mistakes that show against the step before: stale gradients, Adam's counter, decay, shares of weights. */
#include "support/together.h"
#include "tests/verify/pattern_support.h"

TestSuite(pattern_state, .timeout = 300);

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Elements [from, count) are now times the reference plus last times the gradient of the step before. */
static void mixed(world *w, float **before, float now, float last, size_t from)
{
    mesh(w, "model.norm.weight", 'g', 2, 1, 1, SHAPE(96), -1);
    w->d.step = 3;
    *before = malloc(w->count * sizeof **before);
    cr_assert_not_null(*before);
    for (size_t i = 0; i < w->count; i++) {
        (*before)[i] = noise(i + 5000);
        for (int r = 0; r < 2 && i >= from; r++)
            *at(w, r, i) = now * w->reference[i] + last * (*before)[i];
    }
    w->d.last = *before;
}

static void expect_last(float now, float last, size_t from, const char *text)
{
    float *before = NULL;
    world w;
    mixed(&w, &before, now, last, from);
    expect_hint(&w, text);
    w.d.last = NULL; /* the first step has none before it */
    expect_no_hint(&w, "step 2");
    world_free(&w);
    free(before);
}

static void a_gradient_of_the_step_before_is_recognised(void)
{
    expect_last(0.0f, 1.0f, 0, "last step's value: every different element is the gradient of step 2, and nothing of");
    expect_last(0.0f, 1.0f, 40, "last step's value");
    expect_last(0.0f, 2.0f, 0, "the gradient of step 2 times 2, and nothing of this step's");
}

static void gradients_that_add_up_from_step_to_step_are_recognised(void)
{
    expect_last(1.0f, 1.0f, 0, "still in it: the gradient is the reference plus that of step 2");
    expect_last(0.5f, 2.0f, 0, "the gradient is 0.5 times the reference plus 2 times that of step 2");
}

static void a_gradient_without_the_last_ones_is_not_taken_for_one(void)
{
    float *before = NULL;
    world w;
    mixed(&w, &before, 2.0f, 0.0f, 0);
    expect_cause(&w, "reduced_again");
    for (size_t i = 0; i < w.count; i++) /* something foreign, too */
        *at(&w, 0, i) = w.reference[i] + before[i] + 0.01f * noise(i + 900);
    expect_cause(&w, "unknown");
    world_free(&w);
    free(before);
}

static void one_of_several_micro_batches_is_named(void)
{
    world w;
    mesh(&w, "lm_head.weight", 'g', 1, 1, 2, SHAPE(32, 24), -1);
    w.d.batch = 16;
    w.d.seq = 8;
    w.d.micro_batches = 4;
    for (size_t i = 0; i < w.count; i++) {
        w.reference[i] = 0.0f;
        for (size_t k = 0; k < 4; k++)
            w.reference[i] += noise(7 * i + 1000003 * (k + 1));
        *at(&w, 0, i) = noise(7 * i + 4 * 1000003);
    }
    expect_hint(&w, "as if one of 4 micro-batches counted");
    w.d.micro_batches = 0;
    expect_cause(&w, "partial_sum");
    expect_no_hint(&w, "second forward pass");
    w.d.recomputed = true; /* a foreign input may look alike */
    expect_cause(&w, "partial_sum");
    expect_hint(&w, "or, where its input is recomputed, the second forward pass");
    world_free(&w);
}

/* --- new weights -------------------------------------------------------------------------------------------------- */

enum { COUNT = 96 };

/* The weights of `ranks` replicas over dp before a step, which moves them by a thousandth of their size. */
static void stepped(world *w, float before[COUNT], int ranks)
{
    mesh(w, "model.norm.weight", 'n', ranks, 1, 1, SHAPE(COUNT), -1);
    for (size_t i = 0; i < COUNT; i++) {
        before[i] = w->reference[i];
        w->reference[i] += 1e-3f * noise(i + 77);
    }
    world_refresh(w);
    w->d.before = before;
    w->d.step = 1;
}

static void scale_update(world *w, int rank, const float before[COUNT], float factor)
{
    for (size_t i = 0; i < COUNT; i++)
        *at(w, rank, i) = before[i] + factor * (w->reference[i] - before[i]);
}

static void all_but_a_few_elements_are_no_percentage(void)
{
    world w;
    mesh(&w, "model.norm.weight", 'g', 1, 1, 1, SHAPE(1000), -1);
    for (size_t i = 2; i < w.count; i++)
        *at(&w, 0, i) = noise(i + 4000);
    expect_pattern(&w, "998 of 1000 elements, all but 2");
    for (size_t i = 2; i < 12; i++)
        *at(&w, 0, i) = w.reference[i];
    expect_pattern(&w, "988 of 1000 elements (99%)");
    world_free(&w);
}

/* sqrt(1 - 0.999^2)/(1 - 0.9^2) of sqrt(1 - 0.999)/(1 - 0.9). */
static const float second_of_first = 0.744136f;

static void the_correction_of_another_step_of_adam_is_named(void)
{
    float before[COUNT];
    world w;
    stepped(&w, before, 2);
    scale_update(&w, 0, before, second_of_first);
    scale_update(&w, 1, before, second_of_first);
    w.d.beta1 = 0.9;
    w.d.beta2 = 0.999;
    expect_hint(&w, "as that of step 2 would be in step 1");
    expect_hint(&w, "the counter was advanced without an update");
    w.d.beta1 = w.d.beta2 = 0.0; /* SGD has none */
    expect_cause(&w, "update_scaled");
    world_free(&w);
}

/* The update times what the moments lack at step 1: 1 - beta1, and one over the root of 1 - beta2. */
static void moments_that_were_not_corrected_are_named(void)
{
    static const struct {
        float factor;
        const char *which;
    } cases[] = {{0.1f, "first moment was"}, {31.6228f, "second moment was"}, {3.16228f, "moments were"}};
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        float before[COUNT];
        world w;
        stepped(&w, before, 2);
        scale_update(&w, 0, before, cases[k].factor);
        scale_update(&w, 1, before, cases[k].factor);
        w.d.beta1 = 0.9;
        w.d.beta2 = 0.999;
        expect_cause(&w, "adam_not_corrected");
        expect_hint(&w, cases[k].which);
        w.d.beta2 = 0.99;
        w.d.beta1 = 0.8;
        expect_cause(&w, "update_scaled");
        world_free(&w);
    }
}

static void replicas_that_count_their_steps_differently_are_named(void)
{
    float before[COUNT];
    world w;
    stepped(&w, before, 2);
    scale_update(&w, 1, before, second_of_first);
    w.d.beta1 = 0.9;
    w.d.beta2 = 0.999;
    expect_hint(&w, "on rank 1 and not on the others that hold it: they count their steps differently");
    scale_update(&w, 1, before, 0.8f); /* no step's */
    expect_cause(&w, "update_of_ranks_apart");
    world_free(&w);
}

static void decay_that_did_not_reach_a_replica_is_named(void)
{
    float before[COUNT];
    world w;
    stepped(&w, before, 2);
    for (size_t i = 0; i < COUNT; i++)
        *at(&w, 1, i) = w.reference[i] + 1e-4f * before[i];
    expect_cause(&w, "decay_of_ranks_apart");
    expect_hint(&w, "0.0001 times the weight before the step, on rank 1 and not on the others");
    for (size_t i = 0; i < COUNT; i++)
        *at(&w, 0, i) = *at(&w, 1, i) = w.reference[i] - 1e-4f * before[i];
    expect_cause(&w, "weight_decay");
    world_free(&w);
}

static void shares_that_were_not_gathered_are_named(void)
{
    float before[COUNT];
    world w;
    stepped(&w, before, 2);
    w.d.zero = true;
    for (size_t i = 0; i < COUNT; i++) /* a third is rank 0's */
        *at(&w, i < COUNT / 3 ? 1 : 0, i) = before[i];
    expect_cause(&w, "shares_not_gathered");
    expect_hint(&w, "on 2 of 2 ranks");
    w.d.zero = false;
    expect_cause(&w, "unknown");
    world_free(&w);
}

static void shares_that_do_not_line_up_are_named(void)
{
    float before[COUNT];
    world w;
    stepped(&w, before, 2);
    w.d.zero = true;
    for (size_t i = 0; i < COUNT; i++) {
        for (int r = 0; r < 2; r++)
            *at(&w, r, i) = before[i] + 1e-3f * noise((i + COUNT / 2) % COUNT + 77);
    }
    expect_cause(&w, "shares_misaligned");
    w.d.zero = false;
    expect_cause(&w, "unknown");
    world_free(&w);
}

Test(pattern_state, every_claim)
{
    TOGETHER(a_gradient_of_the_step_before_is_recognised, gradients_that_add_up_from_step_to_step_are_recognised,
             a_gradient_without_the_last_ones_is_not_taken_for_one, one_of_several_micro_batches_is_named,
             all_but_a_few_elements_are_no_percentage, the_correction_of_another_step_of_adam_is_named,
             moments_that_were_not_corrected_are_named, replicas_that_count_their_steps_differently_are_named,
             decay_that_did_not_reach_a_replica_is_named, shares_that_were_not_gathered_are_named,
             shares_that_do_not_line_up_are_named);
}
