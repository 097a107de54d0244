/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps under data parallelism, micro-batches and tensor parallelism have one rank's bits in every tensor. */
#include "tests/train/recorded.h"

#include <math.h>

#include "support/bits.h"
#include "support/match.h"

TestSuite(train_step, .timeout = 300);

enum { B = 7, S = 8, STEPS = 3 };

/* Seven samples, which no number of ranks but 1 and 7 shares evenly; sample k has k targets, the last one no more than
 * the one before. */
typedef struct data {
    int64_t ids[STEPS][B * S], labels[STEPS][B * S];
    ar_batch batch[STEPS];
} data;

static void fill_data(data *d)
{
    for (size_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < (size_t)(B * S); i++) {
            const size_t sample = i / S, position = i % S;
            d->ids[step][i] = (int64_t)((i * 7 + step * 3 + sample) % 11);
            d->labels[step][i] = position >= S - sample ? d->ids[step][i] : AR_IGNORE_INDEX;
        }
        d->batch[step] = (ar_batch){.batch = B, .seq = S, .input_ids = d->ids[step], .labels = d->labels[step]};
    }
}

static ari_cluster_options job_of(const ar_config *c, const data *d, int steps)
{
    return (ari_cluster_options){.config = c,
                                 .batch = d->batch,
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

static void expect_all_layouts(const ari_cluster_options *o)
{
    recorded *whole = record(o);
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++)
        expect_one_ranks_bits(whole, o, &layouts[i]);
    recorded_free(whole);
}

/* Heads that four ranks share. */
static ar_config config_of(ar_arch arch)
{
    ar_config c = match_config(arch, 1);
    c.kv_heads = 4;
    return c;
}

Test(train_step, every_layout_of_uneven_samples_and_targets_has_one_ranks_bits)
{
    static const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    data d;
    fill_data(&d);
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const ar_config c = config_of(archs[i]);
        const ari_cluster_options o = job_of(&c, &d, 2);
        expect_all_layouts(&o);
    }
}

Test(train_step, adamw_with_clipping_has_one_ranks_bits_on_every_layout)
{
    const ar_config c = config_of(AR_ARCH_LLAMA);
    data d;
    fill_data(&d);
    ari_cluster_options o = job_of(&c, &d, 3);
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.optimizer.lr = 0.05;
    o.run.clip = 0.01;
    expect_all_layouts(&o);
}

Test(train_step, masks_go_with_their_samples)
{
    const ar_config c = config_of(AR_ARCH_LLAMA);
    uint8_t padding[B * S];
    float additive[B * S * S];
    data d;
    fill_data(&d);
    for (size_t i = 0; i < sizeof padding; i++)
        padding[i] = i % 5 != 3;
    fill_values(additive, B * S * S, 9, 2.0);
    d.batch[0].padding_mask = padding;
    d.batch[0].additive_mask = additive;
    d.batch[0].mask_batch = B;
    d.batch[0].mask_heads = 1;
    const ari_cluster_options o = job_of(&c, &d, 0);
    expect_all_layouts(&o);
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
    const ar_config c = config_of(AR_ARCH_LLAMA);
    data d;
    fill_data(&d);
    ari_cluster_options o = job_of(&c, &d, 3);
    o.run.optimizer = (ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 0.25};
    recorded *r = record(&o);
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
    recorded_free(r);
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
    const ar_config c = config_of(AR_ARCH_GPT2);
    data d;
    fill_data(&d);
    ari_cluster_options o = job_of(&c, &d, 2);
    recorded *two = record(&o);
    o.weights = find_new;
    o.weights_user = two;
    o.batch = &d.batch[1];
    o.run.steps = 0;
    recorded *second = record(&o);
    cr_expect_eq(memcmp(&second->loss[0], &two->loss[1], sizeof(float)), 0, "%a, not %a", (double)two->loss[1],
                 (double)second->loss[0]);
    for (size_t i = 0; i < second->n; i++) {
        const recorded_tensor *t = &second->at[i];
        const recorded_tensor *u = t->pass == 'i' ? NULL : recorded_find(two, t->name, t->pass, 2);
        cr_expect(t->pass == 'i' || (u && memcmp(t->values, u->values, t->count * sizeof(float)) == 0), "%s:%c",
                  t->name, t->pass);
    }
    recorded_free(second);
    recorded_free(two);
}

Test(train_step, clipping_scales_the_gradients_to_the_norm_asked_for)
{
    const ar_config c = config_of(AR_ARCH_LLAMA);
    data d;
    fill_data(&d);
    ari_cluster_options o = job_of(&c, &d, 1);
    o.run.optimizer = (ar_optimizer_options){.kind = AR_OPTIMIZER_SGD, .lr = 1.0};
    o.run.clip = 0.125;
    recorded *r = record(&o);
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
    recorded_free(r);
}

Test(train_step, a_batch_without_targets_has_loss_nan_and_gradients_of_plus_0)
{
    const ar_config c = config_of(AR_ARCH_LLAMA);
    data d;
    fill_data(&d);
    for (size_t i = 0; i < (size_t)(B * S); i++)
        d.labels[0][i] = AR_IGNORE_INDEX;
    ari_cluster_options o = job_of(&c, &d, 1);
    o.run.clip = 1.0;
    recorded *r = record(&o);
    static const float zeros[1000];
    cr_expect(isnan(r->loss[0]));
    for (size_t i = 0; i < r->n; i++) {
        const recorded_tensor *t = &r->at[i];
        if (t->pass != 'g' && t->pass != 'c')
            continue;
        cr_assert_leq(t->count, sizeof zeros / sizeof *zeros);
        cr_expect_eq(memcmp(t->values, zeros, t->count * sizeof(float)), 0, "%s:%c", t->name, t->pass);
    }
    recorded_free(r);
    expect_all_layouts(&o);
}
