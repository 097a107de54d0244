/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps under data parallelism, micro-batches and tensor parallelism have one rank's bits in every tensor. */
#include "tests/train/batches.h"
#include "tests/train/recorded.h"

#include "support/bits.h"

enum { B = 7, S = 8, STEPS = 3 };

static ari_cluster_options job_of(const ar_config *c, const ar_batch *d, int steps)
{
    return (ari_cluster_options){.config = c,
                                 .batch = d,
                                 .run.steps = (uint64_t)steps,
                                 .run.seed = 5,
                                 .run.optimizer = {.kind = AR_OPTIMIZER_SGD, .lr = 0.5, .momentum = 0.9}};
}

static const ar_parallel layouts[] = {
    {.dp = 2},
    {.dp = 3},
    {.dp = 7},
    {.micro_batches = 2},
    {.micro_batches = 3},
    {.micro_batches = 7, .forward_first = true},
    {.dp = 2, .micro_batches = 2},
    {.dp = 3, .micro_batches = 3}, /* of 3, 2 and 2 samples: a rank has an empty one */
    {.dp = 3, .micro_batches = 2, .forward_first = true},
    {.tp = 2, .dp = 2},
    {.tp = 2, .dp = 3, .micro_batches = 3},
    {.tp = 4, .dp = 2, .micro_batches = 2, .forward_first = true}};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

Test(train_step, every_layout_of_uneven_samples_and_targets_has_one_ranks_bits)
{
    static const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    ar_batch *d = batches(B, S, true);
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const ar_config c = config_of(archs[i], 1, 4);
        const ari_cluster_options o = job_of(&c, d, 2);
        expect_layouts(&o, layouts, LAYOUTS);
    }
}

Test(train_step, adamw_with_clipping_has_one_ranks_bits_on_every_layout)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = job_of(&c, d, 3);
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 0.05;
    o.run.clip = 0.01;
    expect_layouts(&o, layouts, LAYOUTS);
}

Test(train_step, every_kind_of_optimizer_has_the_baselines_bits)
{
    static const ar_optimizer_options kinds[] = {
        {.kind = AR_OPTIMIZER_SGD, .lr = 0.1},
        {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.7, .nesterov = true, .weight_decay = 0.2},
        {.kind = AR_OPTIMIZER_ADAM, .lr = 0.01, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.3},
        {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.4},
        {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.0, .beta2 = 0.0, .eps = 1e-8}};
    static const ar_parallel few[] = {{.tp = 2}, {.tp = 4}, {.dp = 2}};
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    ar_batch *d = batches(B, S, true);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        ari_cluster_options o = job_of(&c, d, STEPS);
        o.run.optimizer = kinds[i];
        o.run.clip = i % 2 ? 0.01 : 0.0;
        expect_layouts(&o, few, sizeof few / sizeof *few);
    }
}

Test(train_step, masks_go_with_their_samples)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    uint8_t padding[B * S];
    float additive[B * S * S];
    ar_batch *d = batches(B, S, true);
    for (size_t i = 0; i < sizeof padding; i++)
        padding[i] = i % 5 != 3;
    fill_values(additive, B * S * S, 9, 2.0);
    d[0].padding_mask = padding;
    d[0].additive_mask = additive;
    d[0].mask_batch = B;
    d[0].mask_heads = 1;
    const ari_cluster_options o = job_of(&c, d, 0);
    expect_layouts(&o, layouts, LAYOUTS);
}

/* --- what a step is ----------------------------------------------------------------------------------------------- */

static float largest_difference(const recorded *r, const char *name, uint32_t step)
{
    const recorded_tensor *now = recorded_find(r, name, 'n', step);
    const recorded_tensor *before =
        step > 1 ? recorded_find(r, name, 'n', step - 1) : recorded_find(r, name, 'i', step);
    float largest = 0.0f;
    cr_assert(now && before);
    for (size_t i = 0; i < now->count; i++)
        largest = fmaxf(largest, fabsf(now->values[i] - before->values[i]));
    return largest;
}

Test(train_step, each_step_changes_the_weights_from_its_own_gradients)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = job_of(&c, d, 3);
    o.run.optimizer = (ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 0.25};
    OWNED(recorded_free) recorded *r = record(&o);
    for (uint32_t step = 1; step <= 3; step++) {
        const recorded_tensor *g = recorded_find(r, "model.norm.weight", 'g', step);
        const recorded_tensor *w = recorded_find(r, "model.norm.weight", 'n', step);
        const recorded_tensor *b = step > 1 ? recorded_find(r, "model.norm.weight", 'n', step - 1)
                                            : recorded_find(r, "model.norm.weight", 'i', 1);
        cr_assert(g && w && b);
        for (size_t i = 0; i < w->count; i++)
            cr_expect_eq(w->values[i], b->values[i] - 0.25f * g->values[i], "step %u", (unsigned)step);
        cr_expect_gt(largest_difference(r, "model.layers.0.mlp.up_proj.weight", step), 0.0f);
    }
}

static const float *find_new(void *user, const char *name, size_t count)
{
    const recorded_tensor *t = recorded_find(user, name, 'n', 1);
    return t && t->count == count ? t->values : NULL;
}

/* Packed weights are kept from step to step: were those of the first step used again, a run that starts from the new
 * weights would know. */
Test(train_step, the_second_step_runs_with_the_new_weights)
{
    const ar_config c = config_of(AR_ARCH_GPT2, 1, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = job_of(&c, d, 2);
    OWNED(recorded_free) recorded *two = record(&o);
    o.weights = find_new;
    o.weights_user = two;
    o.batch = &d[1];
    o.run.steps = 0;
    OWNED(recorded_free) recorded *second = record(&o);
    cr_expect_eq(memcmp(&second->loss[0], &two->loss[1], sizeof(float)), 0, "%a, not %a", (double)two->loss[1],
                 (double)second->loss[0]);
    for (size_t i = 0; i < second->n; i++) {
        const recorded_tensor *t = &second->at[i];
        const recorded_tensor *u = t->pass == 'i' ? NULL : recorded_find(two, t->name, t->pass, 2);
        cr_expect(t->pass == 'i' || (u && memcmp(t->values, u->values, t->count * sizeof(float)) == 0), "%s:%c",
                  t->name, t->pass);
    }
}

Test(train_step, clipping_scales_the_gradients_to_the_norm_asked_for)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    ar_batch *d = batches(B, S, true);
    ari_cluster_options o = job_of(&c, d, 1);
    o.run.optimizer = (ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 1.0};
    o.run.clip = 0.125;
    OWNED(recorded_free) recorded *r = record(&o);
    const recorded_tensor *norm = recorded_find(r, "grad_norm", 'c', 1);
    double gradients = 0.0, changes = 0.0;
    for (size_t i = 0; i < r->n; i++) {
        const recorded_tensor *g = &r->at[i];
        if (g->pass != 'g')
            continue;
        const recorded_tensor *w = recorded_find(r, g->name, 'n', 1), *b = recorded_find(r, g->name, 'i', 1);
        for (size_t k = 0; k < g->count; k++) {
            gradients += (double)g->values[k] * (double)g->values[k];
            changes += pow((double)w->values[k] - (double)b->values[k], 2);
        }
    }
    cr_assert(norm && norm->count == 1);
    cr_expect_float_eq((double)norm->values[0], sqrt(gradients), 1e-6 * sqrt(gradients));
    cr_expect_gt(sqrt(gradients), 0.25);
    cr_expect_float_eq(sqrt(changes), 0.125, 1e-5); /* the weights' rounding: 0.5*2^-24 an element of up to 1 */
}

Test(train_step, a_batch_without_targets_has_loss_nan_and_gradients_of_plus_0)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 4);
    ar_batch *d = batches(B, S, true);
    int64_t none[B * S];
    for (size_t i = 0; i < (size_t)(B * S); i++)
        none[i] = AR_IGNORE_INDEX;
    d[0].labels = none;
    ari_cluster_options o = job_of(&c, d, 1);
    o.run.clip = 1.0;
    OWNED(recorded_free) recorded *r = record(&o);
    static const float zeros[1000];
    cr_expect(isnan(r->loss[0]));
    for (size_t i = 0; i < r->n; i++) {
        const recorded_tensor *t = &r->at[i];
        if (t->pass != 'g' && t->pass != 'c')
            continue;
        cr_assert_leq(t->count, sizeof zeros / sizeof *zeros);
        cr_expect_eq(memcmp(t->values, zeros, t->count * sizeof(float)), 0, "%s:%c", t->name, t->pass);
    }
    expect_layouts(&o, layouts, LAYOUTS);
}
