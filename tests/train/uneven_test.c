/* SPDX-License-Identifier: Apache-2.0 */
/* Samples, targets, lengths and masks that ranks do not share evenly: every tensor has one rank's bits, however gradients
 * are put into buckets, and under every kind of optimizer. */
#include "recorded.h"
#include "ref/models/parallel_private.h"
#include "support/bits.h"

enum { B = 3, S = 4, STEPS = 2 };

typedef struct data {
    int64_t ids[STEPS][B * S], labels[STEPS][B * S];
    uint8_t padding[STEPS][B * S];
    ar_batch batch[STEPS];
} data;

static void fill(data *d)
{
    for (size_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < (size_t)(B * S); i++) {
            d->ids[step][i] = (int64_t)((i * 5 + step * 3 + i / S) % 11);
            d->labels[step][i] = (int64_t)((i * 3 + step) % 11);
            d->padding[step][i] = 1;
        }
        d->batch[step] = (ar_batch){.batch = B, .seq = S, .input_ids = d->ids[step], .labels = d->labels[step]};
    }
}

static void ignore(data *d, size_t step, size_t sample)
{
    for (size_t i = 0; i < S; i++)
        d->labels[step][sample * S + i] = AR_IGNORE_INDEX;
}

/* The first two have as many ranks as samples or fewer, the others ranks without samples. */
static const ar_parallel layouts[] = {
    {.dp = 2, .micro_batches = 2}, /* 2 samples and 1: an empty micro-batch */
    {.dp = 3},
    {.dp = 4},
    {.dp = 7, .zero = 1},
    {.tp = 2, .dp = 4, .sp = true},
    {.tp = 2, .dp = 5, .zero = 1, .sp = true, .keep_gathered = true},
    {.tp = 4, .dp = 3}, /* more tensor-parallel ranks than KV heads: groups of replicas */
};
static const ar_ddp_options buckets[] = {
    {.bucket_bytes = 0},
    {.bucket_bytes = 400, .mode = AR_BUCKETS_EAGER},
    {.bucket_bytes = 1 << 20, .find_unused = true},
    {.bucket_bytes = 900, .order = AR_BUCKETS_BY_SIZE},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts, BUCKETS = sizeof buckets / sizeof *buckets };

static ari_cluster_options job_of(const ar_config *c, const data *d)
{
    ari_cluster_options o = adamw_job(c, d->batch, STEPS);
    o.run.clip = 0.5;
    return o;
}

static void expect_all(const ar_config *c, const data *d)
{
    ari_cluster_options o = job_of(c, d);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (size_t i = 0; i < LAYOUTS; i++) {
        o.run.ddp = buckets[i % BUCKETS];
        expect_one_ranks_bits(whole, &o, &layouts[i]);
    }
}

Test(uneven, ranks_without_samples_take_part_in_every_step)
{
    static const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2, AR_ARCH_STACK};
    static data d;
    fill(&d);
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const ar_config c = match_config(archs[i], 1);
        expect_all(&c, &d);
    }
}

Test(uneven, ranks_of_whose_tokens_none_is_a_target_add_zeros)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static data d;
    fill(&d);
    ignore(&d, 0, 1); /* with dp=3 all of rank 1, with more all of one */
    ignore(&d, 1, 0);
    ignore(&d, 1, 2);
    expect_all(&c, &d);
}

Test(uneven, a_step_without_targets_comes_between_others)
{
    const ar_config c = match_config(AR_ARCH_GPT2, 1);
    static data d;
    fill(&d);
    for (size_t sample = 0; sample < B; sample++)
        ignore(&d, 0, sample);
    expect_all(&c, &d);
}

Test(uneven, samples_of_every_length_go_with_their_masks)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static const size_t lengths[STEPS][B] = {{4, 1, 3}, {0, 2, 4}};
    static data d;
    fill(&d);
    for (size_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < (size_t)(B * S); i++) {
            d.padding[step][i] = i % S < lengths[step][i / S];
            if (!d.padding[step][i])
                d.labels[step][i] = AR_IGNORE_INDEX;
        }
        d.batch[step].padding_mask = d.padding[step];
    }
    expect_all(&c, &d);
}

/* Masks go with their samples, in micro-batches that come one after the other and all first. */
Test(uneven, additive_masks_go_with_their_samples)
{
    static const ar_parallel few[] = {
        {.dp = 3}, {.micro_batches = 3}, {.dp = 2, .micro_batches = 2, .forward_first = true}, {.tp = 4, .dp = 2}};
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static float additive[B * S * S];
    static data d;
    fill(&d);
    fill_values(additive, B * S * S, 9, 2.0);
    for (size_t step = 0; step < STEPS; step++) {
        for (size_t i = 0; i < (size_t)(B * S); i++)
            d.padding[step][i] = i % 5 != 3;
        d.batch[step].padding_mask = d.padding[step];
        d.batch[step].additive_mask = additive;
        d.batch[step].mask_batch = B;
        d.batch[step].mask_heads = 1;
    }
    const ari_cluster_options o = job_of(&c, &d);
    expect_layouts(&o, few, sizeof few / sizeof *few);
}

Test(uneven, every_kind_of_optimizer_has_the_baselines_bits)
{
    static const ar_optimizer_options kinds[] = {
        {.kind = AR_OPTIMIZER_SGD, .lr = 0.1},
        {.kind = AR_OPTIMIZER_SGD, .lr = 0.1, .momentum = 0.7, .nesterov = true, .weight_decay = 0.2},
        {.kind = AR_OPTIMIZER_ADAM, .lr = 0.01, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.3},
        {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.4},
        {.kind = AR_OPTIMIZER_ADAMW, .lr = 0.01, .beta1 = 0.0, .beta2 = 0.0, .eps = 1e-8}};
    static const ar_parallel few[] = {{.tp = 2}, {.tp = 4}, {.dp = 2}};
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static data d;
    fill(&d);
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        ari_cluster_options o = job_of(&c, &d);
        o.run.optimizer = kinds[i];
        o.run.clip = i % 2 ? 0.01 : 0.0;
        expect_layouts(&o, few, sizeof few / sizeof *few);
    }
}

/* Documents one after the other, and rows that begin late. */
Test(uneven, positions_are_each_rows_own)
{
    static const int64_t positions[STEPS][B * S] = {{0, 1, 2, 3, /**/ 0, 1, 0, 1, /**/ 0, 0, 0, 1},
                                                    {8, 7, 6, 5, /**/ 0, 0, 1, 2, /**/ 3, 4, 5, 6}};
    static const ar_arch archs[] = {AR_ARCH_LLAMA, AR_ARCH_GPT2};
    static data d;
    fill(&d);
    for (size_t step = 0; step < STEPS; step++)
        d.batch[step].position_ids = positions[step];
    for (size_t i = 0; i < sizeof archs / sizeof *archs; i++) {
        const ar_config c = match_config(archs[i], 1);
        expect_all(&c, &d);
    }
}

/* 3, 3, 3 and 1 rows of the vocabulary, of as many elements as three vectors and one: ranks that sorted their own
 * gradients would reduce others than their peers. */
Test(uneven, parts_of_the_vocabulary_do_not_change_the_order_of_buckets)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static const ar_parallel some[] = {{.tp = 4, .sp = true}, {.tp = 4, .dp = 2, .sp = true}};
    static data d;
    fill(&d);
    c.vocab = 10;
    for (size_t i = 0; i < (size_t)(B * S * STEPS); i++) {
        d.ids[i / (B * S)][i % (B * S)] %= 10;
        d.labels[i / (B * S)][i % (B * S)] %= 10;
    }
    ari_cluster_options o = job_of(&c, &d);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (size_t i = 0; i < 2 * BUCKETS; i++) {
        o.run.ddp = buckets[i / 2];
        o.run.ddp.order = AR_BUCKETS_BY_SIZE;
        expect_one_ranks_bits(whole, &o, &some[i % 2]);
    }
}

/* What is refused: a micro-batch that no rank has a sample for. */
Test(uneven, more_micro_batches_than_samples_of_any_rank_are_refused)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    const ar_plan plan = {0};
    const ar_parallel fits = {.dp = 2, .micro_batches = 2}, many = {.dp = 4, .micro_batches = 2};
    cr_expect_ok(ari_parallel_check(&fits, &c, &plan, B, S));
    cr_expect_refused(ari_parallel_check(&many, &c, &plan, B, S), AR_ERR_ARG,
                      "2 micro-batches cannot share the 1 sample of a rank");
    cr_expect_eq(ari_parallel_check(&many, &c, &plan, 0, S), AR_OK, "a batch that is not known yet");
}

/* Of a parameter that two groups match the last one counts; where it names no decay, the rule decides and not the group
 * before it. The baseline, written apart, is what the record is held to. */
Test(uneven, the_last_group_that_matches_counts)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    static data d;
    fill(&d);
    ari_cluster_options o = job_of(&c, &d);
    o.run.optimizer.weight_decay = 0.01;
    o.run.optimizer.groups = 3;
    o.run.optimizer.group[0] = (ar_param_group){.glob = "*", .lr_scale = 1.0, .weight_decay = 0.5};
    o.run.optimizer.group[1] = (ar_param_group){.glob = "*norm*", .lr_scale = 2.0, .weight_decay = NAN};
    o.run.optimizer.group[2] = (ar_param_group){.glob = "*mlp*", .lr_scale = 0.5, .weight_decay = 0.0};
    OWNED(recorded_free) recorded *whole = record(&o);
    expect_one_ranks_bits(whole, &o, &layouts[4]);
}
