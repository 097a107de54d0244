/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps of the baseline: the scalar definitions by hand, new weights in binary64, norms that are not finite. That
 * the baseline's own text follows the definitions every check holds, whose ranks compute the same bits from them. */
#include "tests/baseline/support.h"

#include "ref/numerics/optimizer.h"
#include "support/together.h"

/* The constants of the step that begins, of a parameter without options of its own. */
static ari_optimizer_constants begin_step(ari_optimizer_clock *clock, const ar_optimizer_options *o)
{
    ari_optimizer_tick(clock, o);
    return ari_optimizer_constants_of(clock, o, 1.0, o->weight_decay);
}

CLAIM(sgd_by_hand)
{
    const ar_optimizer_options o = {.kind = AR_OPTIMIZER_SGD, .lr = 0.5, .momentum = 0.5, .weight_decay = 0.25};
    ari_optimizer_clock clock = {0};
    ari_optimizer_constants k = begin_step(&clock, &o);
    float w = 4.0F, m = 77.0F;
    ari_sgd_update(&k, &w, &m, 1.0F); /* g' = 1 + 4/4 = 2 = m; w = 4 - 2/2 */
    cr_assert(w == 3.0F && m == 2.0F, "%g %g", (double)w, (double)m);
    k = begin_step(&clock, &o);
    ari_sgd_update(&k, &w, &m, 0.25F); /* g' = 1/4 + 3/4 = 1; m = 2/2 + 1 = 2; w = 3 - 1 */
    cr_assert(w == 2.0F && m == 2.0F, "%g %g", (double)w, (double)m);
    cr_assert_eq(clock.steps, 2);
}

CLAIM(nesterov_looks_one_momentum_ahead)
{
    const ar_optimizer_options o = {.kind = AR_OPTIMIZER_SGD, .lr = 1.0, .momentum = 0.5, .nesterov = true};
    ari_optimizer_clock clock = {0};
    const ari_optimizer_constants k = begin_step(&clock, &o);
    float w = 4.0F, m = 0.0F;
    ari_sgd_update(&k, &w, &m, 2.0F); /* m = 2; w = 4 - (2 + 1) */
    cr_assert(w == 1.0F && m == 2.0F, "%g %g", (double)w, (double)m);
}

/* m = 2/2 = 1, v = 4/2 = 2; lr/(1 - 1/2) = 1/2; sqrt(2)/sqrt(1/2) = 2, and eps is lost in it: the step is 1/2 * 1/2. */
CLAIM(adam_and_adamw_by_hand)
{
    ar_optimizer_options o = {
        .kind = AR_OPTIMIZER_ADAM, .lr = 0.25, .beta1 = 0.5, .beta2 = 0.5, .eps = 1e-8, .weight_decay = 0.25};
    ari_optimizer_clock clock = {0};
    ari_optimizer_constants k = begin_step(&clock, &o);
    float w = 4.0F, m = 0.0F, v = 0.0F;
    ari_adam_update(&k, &w, &m, &v, 1.0F); /* g' = 1 + 4/4 */
    cr_assert(w == 3.75F && m == 1.0F && v == 2.0F, "%g %g %g", (double)w, (double)m, (double)v);
    o.kind = AR_OPTIMIZER_ADAMW;
    clock = (ari_optimizer_clock){0};
    k = begin_step(&clock, &o);
    w = 4.0F;
    m = v = 0.0F;
    ari_adam_update(&k, &w, &m, &v, 2.0F); /* 4*(1 - 1/16) - 1/4 */
    cr_assert(w == 3.5F && m == 1.0F && v == 2.0F, "%g %g %g", (double)w, (double)m, (double)v);
    k = begin_step(&clock, &o);
    cr_assert(clock.beta1_t == 0.25 && clock.beta2_t == 0.25 && k.step_size == (float)(0.25 / 0.75));
}

CLAIM(what_is_not_a_number_becomes_the_one_nan)
{
    const ar_optimizer_options o = {.kind = AR_OPTIMIZER_ADAMW, .lr = 1.0, .beta1 = 0.5, .beta2 = 0.5, .eps = 1.0};
    ari_optimizer_clock clock = {0};
    const ari_optimizer_constants k = begin_step(&clock, &o);
    float w = 1.0F, m = 0.0F, v = 0.0F;
    ari_adam_update(&k, &w, &m, &v, ari_float32(0xffc12345U));
    cr_assert(ari_bits32(w) == ARI_NAN_BITS && ari_bits32(m) == ARI_NAN_BITS && ari_bits32(v) == ARI_NAN_BITS);
    cr_assert_eq(ari_bits32(ari_clipped(ari_float32(0xff800001U), 1.0F)), ARI_NAN_BITS);
}

/* 3 and 4 in units of 2^-140, where squares are no longer fp32 or binary64 values. */
CLAIM(the_norm_of_tiny_gradients_is_exact)
{
    const float g[] = {3.0F * 0x1p-140F, -4.0F * 0x1p-140F, 0.0F};
    const int32_t e = ari_exponent32(g[1]);
    int64_t high = 0, low = 0;
    for (int i = 0; i < 3; i++) {
        high += ari_norm_high(ari_norm_square(g[i], e));
        low += ari_norm_low(ari_norm_square(g[i], e));
    }
    cr_assert_eq(ari_norm_value(high, low, e), 5.0F * 0x1p-140F);
    cr_assert_eq(ari_bits32(ari_norm_value(0, 0, ARI_EXP_ZERO)), 0);
    cr_assert_eq(ari_bits32(ari_norm_value(0, 0, ARI_EXP_NONFINITE)), ARI_NAN_BITS);
    cr_assert_eq(ari_clip_factor(1.0, 4.0F), (float)(1.0 / (4.0 + 1e-6)));
    cr_assert_eq(ari_clip_factor(1.0, 0.5F), 1.0F);
    cr_assert_eq(ari_clip_factor(1.0, 0.0F), 1.0F);
}

static const int64_t three_steps[3 * 15] = {3, 1, 4, 1, 5, 9, 2, 6, 5, 3,  5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6,
                                            4, 3, 3, 8, 3, 2, 7, 9, 5, 10, 2, 8, 8, 4, 1, 9, 7, 1, 6, 9, 3, 9};

enum { STEPS = 3 };

static void three_batches(ar_batch batch[STEPS])
{
    for (size_t i = 0; i < STEPS; i++)
        batch[i] = (ar_batch){.batch = 3, .seq = 5, .input_ids = three_steps + 15 * i};
}

static void train(tape *t, const ar_config *c, ar_number_mode mode, const ar_optimizer_options *optimizer, double clip)
{
    ar_batch batch[STEPS];
    double loss[STEPS] = {NAN, NAN, NAN};
    three_batches(batch);
    const ar_baseline_options o = {.mode = mode,
                                   .seed = 7,
                                   .emit = tape_emit,
                                   .emit_user = t,
                                   .begin_step = tape_begin,
                                   .steps = STEPS,
                                   .optimizer = *optimizer,
                                   .clip = clip};
    cr_assert_ok(ar_baseline_run(c, &o, batch, loss));
    for (int step = 1; step <= STEPS; step++)
        cr_assert_eq(tape_find_step(t, "loss", 'f', step)->values[0], loss[step - 1]);
}

static const taped *previous(const tape *t, const char *name, int step)
{
    return step == 1 ? tape_find_step(t, name, 'i', 1) : tape_find_step(t, name, 'n', step - 1);
}

static const ar_optimizer_options plain_sgd = {.kind = AR_OPTIMIZER_SGD, .lr = 0.25};

/* In binary64 nothing rounds to fp32: new weights are the formula in binary64. */
CLAIM(binary64_weights_are_not_rounded)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    size_t beyond = 0;
    train(&t, &c, AR_MODE_F64, &plain_sgd, 0.0);
    for (size_t i = 0; i < t.n && t.at[i].pass == 'i'; i++)
        for (int step = 1; step <= STEPS; step++)
            for (size_t k = 0; k < t.at[i].count; k++) {
                const double w = previous(&t, t.at[i].name, step)->values[k];
                const double g = tape_find_step(&t, t.at[i].name, 'g', step)->values[k];
                const double got = tape_find_step(&t, t.at[i].name, 'n', step)->values[k];
                cr_assert_eq(got, w - 0.25 * g, "%s[%zu] after step %d", t.at[i].name, k, step);
                beyond += got != (double)(float)got;
            }
    cr_assert_gt(beyond, 100);
}

static const float *infinite_weight(void *user, const char *name, size_t count)
{
    static float values[1200];
    (void)user;
    cr_assert_leq(count, 1200);
    for (size_t i = 0; i < count; i++)
        values[i] = 0.25F;
    if (strcmp(name, "model.norm.weight") == 0)
        values[3] = INFINITY;
    return values;
}

CLAIM(a_norm_that_is_not_finite_ends_the_run_before_any_update)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    ar_batch batch[STEPS];
    double loss[STEPS] = {5.0, 6.0, 7.0};
    three_batches(batch);
    ar_baseline_options o = {.mode = AR_MODE_EXACT,
                             .weights = infinite_weight,
                             .emit = tape_emit,
                             .emit_user = &t,
                             .steps = STEPS,
                             .optimizer = plain_sgd,
                             .clip = 1.0};
    cr_assert_refused(ar_baseline_run(&c, &o, batch, loss), AR_ERR_DATA, "gradient norm of step 1");
    cr_assert(loss[0] == 5.0 && loss[1] == 6.0 && loss[2] == 7.0);
    for (size_t i = 0; i < t.n; i++)
        cr_assert_neq(t.at[i].pass, 'n');
    tape_clear(&t);
    o.clip = 0.0; /* nobody asked for it: NaN passes, as everywhere */
    cr_assert_ok(ar_baseline_run(&c, &o, batch, loss));
    cr_assert(isnan(loss[2]));
}

CLAIM(refuses_options_out_of_range)
{
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_batch batch = tiny_batch();
    const ar_baseline_options wrong[] = {{.steps = -1},
                                         {.steps = 1, .forward_only = true},
                                         {.steps = 1, .clip = -1.0},
                                         {.steps = 1, .clip = NAN},
                                         {.steps = 1, .clip = INFINITY},
                                         {.dropout = 1.0},
                                         {.dropout = -0.1},
                                         {.dropout = NAN},
                                         {.loss.label_smoothing = 1.0},
                                         {.loss.label_smoothing = -0.1},
                                         {.loss.label_smoothing = NAN},
                                         {.loss.z_loss = -1e-4},
                                         {.loss.z_loss = INFINITY},
                                         {.loss.z_loss = NAN},
                                         {.noise_seed = 1},
                                         {.optimizer.kind = (ar_optimizer_kind)9}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        double loss = 3.0;
        cr_expect_eq(ar_baseline_run(&c, &wrong[i], &batch, &loss), AR_ERR_ARG, "option %zu", i);
        cr_expect_eq(loss, 3.0);
    }
}

/* The second batch has a token that the model does not know: nothing runs. */
CLAIM(looks_at_every_batch_before_the_first_step)
{
    static tape t;
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const int64_t unknown[5] = {1, 2, 11, 3, 4};
    const ar_batch batch[2] = {tiny_batch(), {.batch = 1, .seq = 5, .input_ids = unknown}};
    double loss[2];
    const ar_baseline_options o = {.emit = tape_emit, .emit_user = &t, .steps = 2, .optimizer = plain_sgd};
    cr_assert_eq(ar_baseline_run(&c, &o, batch, loss), AR_ERR_DATA);
    cr_assert_eq(t.n, 0);
}

/* Batches of a step may have shapes of their own. */
CLAIM(steps_may_have_batches_of_other_shapes)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    const ar_batch batch[2] = {tiny_batch(), {.batch = 1, .seq = 9, .input_ids = tiny_ids}};
    double loss[2];
    const ar_baseline_options o = {
        .seed = 7, .emit = tape_emit, .emit_user = &t, .begin_step = tape_begin, .steps = 2, .optimizer = plain_sgd};
    cr_assert_ok(ar_baseline_run(&c, &o, batch, loss));
    cr_assert_eq(tape_find_step(&t, "lm_head", 'f', 1)->shape[1], 5);
    cr_assert_eq(tape_find_step(&t, "lm_head", 'f', 2)->shape[1], 9);
}

EVERY_CLAIM(baseline_optimizer)
