/* SPDX-License-Identifier: Apache-2.0 */
/* What must hold of the production account whatever the model and the layout; where it shares a quantity with anyrank's
 * own account, both have the same. */
#include "support/layout_draw.h"
#include "tests/planner/shapes.h"

enum { DRAWS = 150 };

static ari_planned planned_of(const layout_draw *d)
{
    ari_planned p = {.step = {.config = &d->config, .run = d->run}, .flash = d->seed % 2 == 0};
    p.step.run.steps = 1;
    p.step.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    p.step.run.numerics = AR_NUMERICS_NATIVE;
    return p;
}

static double states(const ari_memory *m)
{
    return m->bytes[ARI_MEMORY_WEIGHTS] + m->bytes[ARI_MEMORY_GRADIENTS] + m->bytes[ARI_MEMORY_MASTER] +
           m->bytes[ARI_MEMORY_OPTIMIZER];
}

static double kept(const ari_memory *m)
{
    return shape_kept(m) + m->bytes[ARI_MEMORY_OUTER] + m->bytes[ARI_MEMORY_LOGITS];
}

/* Elements of fp32 here, of 16 bits there. */
static void expect_weights_of_both(const ari_planned *p, const char *text)
{
    const ari_memory production = shape_memory(p);
    ari_planned runs = *p;
    double most = 0.0;
    runs.flash = false;
    runs.step.run.precision = AR_PRECISION_F32;
    for (int r = 0; r < p->step.run.parallel.tp; r++) {
        ari_memory own;
        cr_assert_eq(ari_memory_own(&own, &runs, r), AR_OK, "%s: %s", text, ar_error_message());
        most = own.bytes[ARI_MEMORY_WEIGHTS] > most ? own.bytes[ARI_MEMORY_WEIGHTS] : most;
    }
    cr_expect_eq(production.bytes[ARI_MEMORY_WEIGHTS] / 2.0, most / 4.0, "%.0f, own %.0f: %s",
                 production.bytes[ARI_MEMORY_WEIGHTS] / 2.0, most / 4.0, text);
}

static void expect_samples_in_proportion(const ari_planned *p, const char *text)
{
    ari_planned more = *p;
    more.step.run.parallel.dp = more.step.run.parallel.micro_batches = 1;
    const ari_memory one = shape_memory(&more);
    more.step.run.batch *= 3;
    const ari_memory three = shape_memory(&more);
    cr_expect_eq(kept(&three), 3.0 * kept(&one), "%s", text);
    cr_expect_eq(states(&three), states(&one), "%s", text);
}

static void expect_less_by_recomputation(ari_planned p, const char *text)
{
    double before = HUGE_VAL;
    for (int k = AR_RECOMPUTE_NONE; k <= AR_RECOMPUTE_FULL; k++) {
        p.step.run.parallel.recompute.part = (ar_recompute)k;
        const ari_memory m = shape_memory(&p);
        cr_expect_leq(shape_kept(&m), before, "%s: %d", text, k);
        before = shape_kept(&m);
    }
}

static void expect_less_by_zero(ari_planned p, const char *text)
{
    double before = HUGE_VAL;
    for (p.step.run.parallel.zero = 0; p.step.run.parallel.zero <= 3; p.step.run.parallel.zero++) {
        const ari_memory m = shape_memory(&p);
        cr_expect_leq(states(&m), before, "%s: zero %d", text, p.step.run.parallel.zero);
        before = states(&m);
    }
}

/* A stage has at most what a rank without stages has, and one of few layers less than all of it. */
static void expect_stages_within(ari_planned p, const char *text)
{
    const ari_memory all = shape_memory(&p);
    p.step.run.parallel.pp = (int)p.step.config->layers;
    const ari_memory stage = shape_memory(&p);
    if (p.step.run.parallel.pp == 1)
        cr_expect_eq(ari_memory_sum(&stage), ari_memory_sum(&all), "%s", text);
    else
        cr_expect_lt(stage.bytes[ARI_MEMORY_WEIGHTS], all.bytes[ARI_MEMORY_WEIGHTS], "%s", text);
}

Test(accounts, random_layouts_keep_what_they_must)
{
    for (uint64_t seed = 1; seed <= DRAWS; seed++) {
        layout_draw d;
        char text[LAYOUT_DRAW_TEXT];
        layout_draw_make(&d, DRAW_TENSORS, seed);
        uint64_t of_plan = seed;
        cr_assert_ok(layout_draw_add_plan(&d, &of_plan));
        layout_draw_text(text, sizeof text, &d);
        const ari_planned p = planned_of(&d);
        expect_weights_of_both(&p, text);
        expect_samples_in_proportion(&p, text);
        expect_less_by_recomputation(p, text);
        expect_less_by_zero(p, text);
        expect_stages_within(p, text);
        ar_plan_fini(&d.run.plan);
    }
}
