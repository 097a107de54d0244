/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps of the baseline: the scalar definitions by hand, the baseline's own text of them by formulas written
 * here once more, clipping, and that the weights which a step leaves are those that the next one uses. */
#include "tests/baseline/support.h"

#include "ref/numerics/optimizer.h"
#include "support/together.h"

/* The constants of the step that begins, of a parameter without options of its own. */
static ari_optimizer_constants begin_step(ari_optimizer_clock *clock, const ar_optimizer_options *o)
{
    ari_optimizer_tick(clock, o);
    return ari_optimizer_constants_of(clock, o, 1.0, o->weight_decay);
}

/* --- the scalar definitions by hand ------------------------------------------------------------------------------- */

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

/* --- steps of a model --------------------------------------------------------------------------------------------- */

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

/* The three formulas as a textbook has them, on floats, in the order of numerics.md section 6. */
static float sgd_formula(const ar_optimizer_options *o, int step, float w, float *m, float g)
{
    if (o->weight_decay != 0.0)
        g = g + (float)o->weight_decay * w;
    if (o->momentum != 0.0) {
        *m = step == 1 ? g : (float)o->momentum * *m + g;
        g = o->nesterov ? g + (float)o->momentum * *m : *m;
    }
    return w - (float)o->lr * g;
}

static float adam_formula(const ar_optimizer_options *o, int step, float w, float *m, float *v, float g)
{
    double power1 = o->beta1, power2 = o->beta2;
    for (int i = 1; i < step; i++) {
        power1 *= o->beta1;
        power2 *= o->beta2;
    }
    if (o->kind == AR_OPTIMIZER_ADAMW)
        w = w * (float)(1.0 - o->lr * o->weight_decay);
    else if (o->weight_decay != 0.0)
        g = g + (float)o->weight_decay * w;
    *m = *m + (float)(1.0 - o->beta1) * (g - *m);
    *v = (float)o->beta2 * *v + ((float)(1.0 - o->beta2) * g) * g;
    const float denominator = sqrtf(*v) / (float)sqrt(1.0 - power2) + (float)o->eps;
    return w - (float)(o->lr / (1.0 - power1)) * (*m / denominator);
}

static const taped *previous(const tape *t, const char *name, int step)
{
    return step == 1 ? tape_find_step(t, name, 'i', 1) : tape_find_step(t, name, 'n', step - 1);
}

/* Every new weight of three steps from the gradient (times `factor` of its step) and the weight before. */
static size_t check_formula(const tape *t, const char *name, const ar_optimizer_options *o, const float factor[STEPS])
{
    const size_t count = tape_find_step(t, name, 'i', 1)->count;
    ari_optimizer_clock clock = {0};
    ari_optimizer_constants k[STEPS];
    for (int step = 1; step <= STEPS; step++)
        k[step - 1] = begin_step(&clock, o);
    for (size_t i = 0; i < count; i++) {
        float m = 0.0F, v = 0.0F, m_scalar = 0.0F, v_scalar = 0.0F;
        for (int step = 1; step <= STEPS; step++) {
            const float w = (float)previous(t, name, step)->values[i];
            const float g = (float)tape_find_step(t, name, 'g', step)->values[i] * factor[step - 1];
            const float expected =
                o->kind == AR_OPTIMIZER_SGD ? sgd_formula(o, step, w, &m, g) : adam_formula(o, step, w, &m, &v, g);
            float scalar = w;
            if (o->kind == AR_OPTIMIZER_SGD)
                ari_sgd_update(&k[step - 1], &scalar, &m_scalar, g);
            else
                ari_adam_update(&k[step - 1], &scalar, &m_scalar, &v_scalar, g);
            const double got = tape_find_step(t, name, 'n', step)->values[i];
            cr_assert_eq(got, (double)expected, "%s[%zu] after step %d: %.9g, expected %.9g", name, i, step, got,
                         (double)expected);
            cr_assert_eq(scalar, expected, "%s[%zu] after step %d: %.9g by the scalar definition", name, i, step,
                         (double)scalar);
        }
    }
    return count;
}

static void check_optimizer(const ar_optimizer_options *o)
{
    SCOPED(tape_clear) tape t = {0};
    const float one[STEPS] = {1.0F, 1.0F, 1.0F};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    train(&t, &c, AR_MODE_EXACT, o, 0.0);
    size_t elements = 0, moved = 0;
    for (size_t i = 0; i < t.n && t.at[i].pass == 'i'; i++) {
        elements += check_formula(&t, t.at[i].name, o, one);
        const taped *last = tape_find_step(&t, t.at[i].name, 'n', STEPS);
        for (size_t k = 0; k < last->count; k++)
            moved += last->values[k] != t.at[i].values[k];
    }
    cr_assert(moved > elements * 9 / 10, "%zu of %zu elements moved", moved, elements);
}

CLAIM(sgd_follows_its_formula)
{
    check_optimizer(&(ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 0.1});
    check_optimizer(&(ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9});
    check_optimizer(&(ar_optimizer_options){
        .kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.03});
}

CLAIM(adam_and_adamw_follow_their_formulas)
{
    ar_optimizer_options o = {
        .kind = AR_OPTIMIZER_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.0};
    check_optimizer(&o);
    o.weight_decay = 0.1;
    check_optimizer(&o);
    o.kind = AR_OPTIMIZER_ADAMW;
    check_optimizer(&o);
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

/* --- the next step uses what this one left ------------------------------------------------------------------------ */

static const float *taped_weight(void *user, const char *name, size_t count)
{
    static float values[60][1200];
    static size_t used;
    const taped *a = tape_find_step(user, name, 'n', 2);
    float *to = values[used++ % 60];
    cr_assert(a->count == count && count <= 1200);
    for (size_t i = 0; i < count; i++)
        to[i] = (float)a->values[i];
    return to;
}

/* The third step of three, and a run of its own that is given the weights after the second: same bits throughout. That
 * the stacked and turned copies of the weights follow is seen in every activation. */
static void check_continuation(ar_arch arch)
{
    SCOPED(tape_clear) tape all = {0}, last = {0};
    const ar_config c = tiny_config(arch, 2);
    ar_batch batch[STEPS];
    double loss = NAN;
    three_batches(batch);
    train(&all, &c, AR_MODE_EXACT, &plain_sgd, 0.0);
    const ar_baseline_options o = {.mode = AR_MODE_EXACT,
                                   .weights = taped_weight,
                                   .weights_user = &all,
                                   .emit = tape_emit,
                                   .emit_user = &last,
                                   .steps = 1,
                                   .optimizer = plain_sgd};
    cr_assert_ok(ar_baseline_run(&c, &o, &batch[2], &loss));
    size_t compared = 0;
    for (size_t i = 0; i < last.n; i++) {
        const taped *a = &last.at[i];
        if (a->pass == 'i')
            continue;
        const taped *b = tape_find_step(&all, a->name, a->pass, 3);
        cr_assert(a->count == b->count && memcmp(a->values, b->values, a->count * sizeof(double)) == 0, "%s:%c",
                  a->name, a->pass);
        compared++;
    }
    cr_assert_gt(compared, 60);
    cr_assert_neq(tape_find_step(&all, "loss", 'f', 1)->values[0], loss);
}

CLAIM(a_step_starts_from_the_weights_of_the_one_before)
{
    check_continuation(AR_ARCH_LLAMA);
    check_continuation(AR_ARCH_GPT2);
    check_continuation(AR_ARCH_STACK);
}

/* 'i' once, then each step forward, backward and gradients, the norm, new weights in the order of first use. */
CLAIM(a_step_emits_its_values_in_order)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_GPT2, 1);
    train(&t, &c, AR_MODE_EXACT, &plain_sgd, 1.0);
    size_t at = 0, parameters = 0;
    while (t.at[at].pass == 'i')
        cr_assert_eq(t.at[at++].step, 1);
    parameters = at;
    cr_assert_eq(parameters, 2 + 12 + 2);
    for (int step = 1; step <= STEPS; step++) {
        size_t gradients = 0;
        for (; t.at[at].pass == 'f'; at++)
            cr_assert_eq(t.at[at].step, step);
        cr_assert_str_eq(t.at[at - 1].name, "loss");
        for (; t.at[at].pass == 'b' || t.at[at].pass == 'g'; at++)
            gradients += t.at[at].pass == 'g';
        cr_assert_eq(gradients, parameters);
        cr_assert(t.at[at].pass == 'c' && t.at[at].ndim == 0 && strcmp(t.at[at].name, "grad_norm") == 0);
        at++;
        for (size_t i = 0; i < parameters; i++, at++) {
            cr_assert(t.at[at].pass == 'n' && t.at[at].step == step, "%s:%c", t.at[at].name, t.at[at].pass);
            cr_assert_str_eq(t.at[at].name, t.at[i].name);
            cr_assert_eq(t.at[at].ndim, t.at[i].ndim);
            cr_assert_eq(memcmp(t.at[at].shape, t.at[i].shape, sizeof t.at[i].shape), 0);
        }
    }
    cr_assert_eq(at, t.n);
}

/* --- clipping ----------------------------------------------------------------------------------------------------- */

static double norm_of(const tape *t, int step)
{
    double sum = 0.0;
    for (size_t i = 0; i < t->n; i++)
        if (t->at[i].pass == 'g' && t->at[i].step == step)
            for (size_t k = 0; k < t->at[i].count; k++)
                sum += t->at[i].values[k] * t->at[i].values[k];
    return sqrt(sum);
}

/* In binary64 the sum of some thousand squares errs by far less than half a unit of fp32; so does the exact one, whose
 * terms are good to 2^-60 of the largest. Equal, unless the norm lies next to a tie. */
CLAIM(the_norm_is_that_of_all_gradients_and_scales_them)
{
    SCOPED(tape_clear) tape t = {0};
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 2);
    train(&t, &c, AR_MODE_EXACT, &plain_sgd, 0.125);
    float factor[STEPS];
    for (int step = 1; step <= STEPS; step++) {
        const double norm = tape_find_step(&t, "grad_norm", 'c', step)->values[0];
        cr_assert_eq(norm, (double)(float)norm_of(&t, step));
        cr_assert_gt(norm, 0.125);
        factor[step - 1] = (float)(0.125 / (norm + 1e-6));
    }
    size_t elements = 0;
    for (size_t i = 0; i < t.n && t.at[i].pass == 'i'; i++)
        elements += check_formula(&t, t.at[i].name, &plain_sgd, factor);
    cr_assert_gt(elements, 1000);
}

CLAIM(a_norm_below_the_limit_changes_nothing)
{
    static tape clipped, plain;
    const ar_config c = tiny_config(AR_ARCH_LLAMA, 1);
    const ar_number_mode modes[] = {AR_MODE_EXACT, AR_MODE_FP32, AR_MODE_F64};
    for (int mode = 0; mode < 3; mode++) {
        train(&clipped, &c, modes[mode], &plain_sgd, 1e6);
        train(&plain, &c, modes[mode], &plain_sgd, 0.0);
        cr_assert_eq(clipped.n, plain.n + STEPS);
        for (size_t i = 0; i < plain.n; i++) {
            const taped *a = &plain.at[i];
            const taped *b = tape_find_step(&clipped, a->name, a->pass, a->step);
            cr_assert_eq(memcmp(a->values, b->values, a->count * sizeof(double)), 0, "%s:%c", a->name, a->pass);
        }
        const double norm = tape_find_step(&clipped, "grad_norm", 'c', 2)->values[0];
        cr_assert_float_eq(norm, norm_of(&clipped, 2), 1e-5 * norm);
        tape_clear(&clipped);
        tape_clear(&plain);
    }
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

/* --- options ------------------------------------------------------------------------------------------------------ */

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
