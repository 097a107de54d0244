/* SPDX-License-Identifier: Apache-2.0 */
/* How far a weight may be off whose gradient is mere rounding: literal gradients, moments worked out by hand. */
#include "tests/verify/support.h"
#include "verify/check/check_run.h"
#include "verify/reference/sensitivity.h"

enum { ELEMENTS = 4 };

typedef struct world {
    ari_reference ref;
    uint8_t flags[ELEMENTS], *rounds[16];
    ar_optimizer_options optimizer;
    double clip;
} world;

static void emit(world *w, const char *name, char pass, double allowed, const double *values)
{
    const size_t shape[] = {ELEMENTS};
    cr_assert_ok(ari_reference_emit(&w->ref, name, pass, pass == 'c' ? 0 : 1, shape, values));
    w->ref.tensor[w->ref.count - 1].allowed = allowed;
    w->rounds[w->ref.count - 1] = pass == 'g' ? w->flags : NULL;
}

/* One parameter: what it begins as, and of each step its gradient with an allowance of 1e-6, and what it becomes. */
static void world_init(world *w, ar_optimizer_kind kind, int steps, const double (*gradients)[ELEMENTS])
{
    static const double weights[ELEMENTS] = {0.5, 0.5, 0.0, 0.0};
    *w = (world){.flags = {1, 1, 1, 0}, .optimizer = ar_optimizer_defaults(kind)};
    emit(w, "w", 'i', 1e-3, weights);
    for (int t = 1; t <= steps; t++) {
        ari_reference_begin(&w->ref, t);
        emit(w, "w", 'g', 1e-6, gradients[t - 1]);
        emit(w, "w", 'n', 1e-3, weights);
    }
    cr_assert_ok(ari_reference_finish(&w->ref));
}

static void world_fini(world *w)
{
    ari_reference_fini(&w->ref);
}

static const float *allow(world *w, int steps)
{
    const ari_adam_case c = {.optimizer = &w->optimizer, .steps = steps, .clip = w->clip, .rounds = w->rounds};
    cr_assert_ok(ari_adam_allow(&w->ref, &c));
    return w->ref.tensor[ari_reference_find_in(&w->ref, "w", 'n', steps)].allowed_each;
}

static void expect_near(const float *beside, size_t element, double expected)
{
    cr_assert_not_null(beside);
    cr_expect(fabs((double)beside[element] - expected) <= 1e-6 * expected, "element %zu: %g, not %g", element,
              (double)beside[element], expected);
}

Test(adam_allowance, a_first_step_moves_a_weight_by_the_learning_rate_and_later_ones_by_little_more)
{
    const ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    cr_expect(fabs(ari_adam_reach(&o, 1) - 1.0) < 1e-9);
    /* (0.1/0.19)^2 * 1.999 * (1 + 0.81/0.999) */
    cr_expect(fabs(ari_adam_reach(&o, 2) - sqrt(0.01 / 0.0361 * 1.999 * (1.0 + 0.81 / 0.999))) < 1e-9);
    cr_expect(ari_adam_reach(&o, 100000) < 7.3 && ari_adam_reach(&o, 100000) > 7.2);
}

/* Whatever the gradients: the worst ones by the inequality are g_j = (b1/b2)^j, newest first. */
Test(adam_allowance, the_reach_is_reached_and_not_passed)
{
    const double b1 = 0.9, b2 = 0.95;
    ar_optimizer_options o = ar_optimizer_defaults(AR_OPTIMIZER_ADAM);
    o.beta1 = b1;
    o.beta2 = b2;
    for (int steps = 1; steps <= 30; steps++) {
        double m = 0.0, v = 0.0;
        for (int t = 1; t <= steps; t++) {
            const double g = pow(b1 / b2, steps - t);
            m = b1 * m + (1.0 - b1) * g;
            v = b2 * v + (1.0 - b2) * g * g;
        }
        const double moved = o.lr * m / (1.0 - pow(b1, steps)) / sqrt(v / (1.0 - pow(b2, steps)));
        cr_expect(fabs(moved / (o.lr * ari_adam_reach(&o, steps)) - 1.0) < 1e-9, "step %d: %g", steps, moved);
    }
}

/* The doubt is 1e-6; beside it eps, 1e-8, is little. */
Test(adam_allowance, a_gradient_within_its_own_allowance_may_go_either_way_and_a_large_one_may_not)
{
    static const double gradients[][ELEMENTS] = {{1e-6, 1.0, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_ADAM, 1, gradients);
    const float *beside = allow(&w, 1);
    expect_near(beside, 0, 2e-3);
    expect_near(beside, 1, 2e-3 * 1e-6 / (1.0 - 1e-6 + 1e-8));
    expect_near(beside, 2, 2e-3); /* zero here, and something else in a run that rounds */
    cr_expect_eq(beside[3], 0.0f, "zero in every run");
    cr_expect(w.ref.tensor[2].allowed > 1e-7 && w.ref.tensor[2].allowed < 2e-7, "a step of 0.5 is 6e-8: %g",
              w.ref.tensor[2].allowed);
}

Test(adam_allowance, what_a_step_did_stays_and_a_large_gradient_ends_the_doubt)
{
    static const double gradients[][ELEMENTS] = {{0.0, 1.0, 0.0, 0.0}, {1.0, 1e-9, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_ADAMW, 2, gradients);
    w.optimizer.weight_decay = 100.0; /* 1 - lr*decay = 0.9 */
    const float *beside = allow(&w, 2);
    cr_expect(beside[0] > 0.9f * 2e-3f && beside[0] < 0.9f * 2.01e-3f, "%g", (double)beside[0]);
    cr_expect(beside[1] > 0.0f && beside[1] < 1e-8f, "the first gradient is most of the moments: %g",
              (double)beside[1]);
    expect_near(beside, 2, 0.9 * 2e-3 + 2.0 * w.optimizer.lr * ari_adam_reach(&w.optimizer, 2));
}

Test(adam_allowance, a_group_and_a_warm_up_scale_what_a_step_may_do)
{
    static const double gradients[][ELEMENTS] = {{0.0, 0.0, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_ADAM, 1, gradients);
    w.optimizer.warmup_steps = 4; /* a quarter of the rate */
    w.optimizer.groups = 1;
    w.optimizer.group[0] = (ar_param_group){.glob = "w", .lr_scale = 3.0};
    expect_near(allow(&w, 1), 2, 2.0 * 0.75e-3);
}

Test(adam_allowance, a_decay_that_is_part_of_the_gradient_decides_the_sign)
{
    static const double gradients[][ELEMENTS] = {{0.0, 0.0, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_ADAM, 1, gradients);
    w.optimizer.weight_decay = 0.01; /* of 0.5 */
    const float *beside = allow(&w, 1);
    expect_near(beside, 0, 2e-3 * 1e-6 / (0.005 - 1e-6 + 1e-8));
    expect_near(beside, 2, 2e-3);
}

/* What is allowed of an element with a gradient of 1, clipped to a norm of 5. */
static double clipped(double norm, double allowed)
{
    static const double gradients[][ELEMENTS] = {{1.0, 0.0, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_ADAM, 1, gradients);
    w.clip = 5.0;
    emit(&w, "grad_norm", 'c', allowed, &norm);
    free(w.ref.by_name);
    w.ref.by_name = NULL;
    cr_assert_ok(ari_reference_finish(&w.ref));
    const float *beside = allow(&w, 1);
    cr_assert_not_null(beside);
    return (double)beside[0];
}

static void expect_share(double found, double gradient, double doubt)
{
    const double expected = 2e-3 * fmin(1.0, doubt / (fmax(gradient - doubt, 0.0) + 1e-8));
    cr_expect(fabs(found - expected) <= 1e-4 * expected, "%g, not %g", found, expected);
}

/* The factor is 5/norm, and at most 5/(norm - allowed) or 1; where 1 is the most, 5/(norm + allowed) is further
 * away. */
Test(adam_allowance, clipping_scales_a_gradient_and_its_doubt_and_adds_its_own)
{
    expect_share(clipped(4.0, 0.5), 1.0, 1e-6);
    expect_share(clipped(10.0, 1.0), 0.5, 5.0 / 9.0 - 0.5 + 5.0 / 9.0 * 1e-6);
    expect_share(clipped(100.0, 1000.0), 0.05, 0.95 + 1e-6);
    expect_share(clipped(5.0, 1.0), 1.0, 1.0 / 6.0 + 7.0 / 6.0 * 1e-6);
}

Test(adam_allowance, leaves_weights_after_other_optimizers_alone)
{
    static const double gradients[][ELEMENTS] = {{0.0, 0.0, 0.0, 0.0}};
    SCOPED(world_fini) world w;
    world_init(&w, AR_OPTIMIZER_SGD, 1, gradients);
    cr_expect_null(allow(&w, 1));
    cr_expect_eq(w.ref.tensor[2].allowed, 1e-3);
}

/* Drawn with these settings, ten elements of a weight have gradients of 1e-8 where 1e-4 is rounding. */
Test(adam_allowance, a_run_with_gradients_that_are_rounding_is_within)
{
    const ar_parallel layouts[] = {{.tp = 1}, {.tp = 2, .sp = true}, {.dp = 2}};
    OWNED(end_folder) char *folder = new_model(tiny_models[TINY_LLAMA]);
    ar_check_options o = check_layouts(folder, layouts, 3, 2, 6);
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 1.0;
    o.run.clip = 1.0;
    o.run.dropout = 0.9;
    o.run.seed = 88;
    o.run.numerics = AR_NUMERICS_NATIVE;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    for (size_t i = 0; i < r->runs; i++)
        cr_expect(r->run[i].max_ratio > 0.0 && r->run[i].max_ratio < 1.0, "layout %zu: %g in %s", i,
                  r->run[i].max_ratio, r->run[i].ratio_tensor);
}

/* A run against the allowance of another learning rate: gradients are right, and the first weights are not. */
static void expect_found(double factor, const char *tensor)
{
    static const int64_t ids[2 * 2 * 5] = {3, 1, 256, 128, 5, 9, 129, 6, 64, 3, 7, 8, 200, 100, 1, 0, 12, 90, 33, 5};
    const ar_config config = config_of(tiny_models[TINY_LLAMA]);
    ar_batch batch[] = {{.batch = 2, .seq = 5, .input_ids = ids}, {.batch = 2, .seq = 5, .input_ids = ids + 10}};
    const ar_check_options o = {.run.steps = 2,
                                .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                .run.numerics = AR_NUMERICS_NATIVE,
                                .skip_f64 = true};
    float loss[2];
    ari_check_base base = {.config = config, .batch = batch, .loss = loss};
    cr_assert_ok(ari_check_baseline(&base, &o));
    ari_cluster_options cluster = cluster_of(&config, batch, 2);
    cluster.run.steps = 2;
    cluster.run.optimizer = o.run.optimizer;
    cluster.run.numerics = o.run.numerics;
    cluster.run.optimizer.lr *= factor;
    SCOPED(ari_check_run_fini) ar_check_run run = {0};
    cr_assert_ok(ari_check_run(&run, &base.ref, &cluster));
    cr_expect(!run.error && run.has_difference == (tensor != NULL), "a factor of %g: ratio %g", factor, run.max_ratio);
    if (tensor)
        cr_expect(strcmp(run.first.tensor, tensor) == 0 && run.first.step == 1 && run.max_ratio > 1.0, "%s",
                  run.first.tensor);
    ari_reference_fini(&base.ref);
}

Test(adam_allowance, a_learning_rate_that_is_off_by_a_thousandth_is_found_in_the_first_weights)
{
    expect_found(1.0, NULL);
    expect_found(1.001, "model.embed_tokens.weight:new");
}

Test(adam_allowance, faults_of_clipping_and_of_reduction_are_found)
{
    static const struct {
        const char *fault;
        ar_parallel layout;
        const char *tensor;
    } cases[] = {{"gradnorm_local_clip", {.tp = 2}, "grad_norm:clip"},
                 {"gradnorm_counts_replicas", {.tp = 2}, "grad_norm:clip"},
                 {"dp_group_missing", {.dp = 2}, "lm_head.weight:grad"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i += small_only() ? 2 : 1) {
        OWNED(end_folder) char *folder = new_model(tiny_models[TINY_LLAMA]);
        ar_check_options o = check_layouts(folder, &cases[i].layout, 1, 2, 6);
        o.run.steps = 2;
        o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
        o.run.clip = 1.0;
        o.run.dropout = 0.9;
        o.run.numerics = AR_NUMERICS_NATIVE;
        o.run.fault = cases[i].fault;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect(r->run[0].result == AR_CHECK_DIFFERENT && r->run[0].max_ratio > 1.0, "case %zu", i);
        cr_expect_str_eq(r->run[0].first.tensor, cases[i].tensor);
    }
}
