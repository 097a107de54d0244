/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of data parallelism, of micro-batches and of clipping: each changes what it should, where it should, and
 * nothing where there is nothing to get wrong. */
#include "tests/train/recorded.h"

#include "support/match.h"

enum { B = 5, S = 6 };

/* Sample k has k targets: ranks and micro-batches of any number hold different counts. */
static int64_t ids[B * S], labels[B * S];

static ari_cluster_options job_of(const ar_config *c, ar_batch *batch, bool even)
{
    for (size_t i = 0; i < (size_t)(B * S); i++) {
        ids[i] = (int64_t)(i * 5 % 11);
        labels[i] = even || i % S >= S - i / S ? ids[i] : AR_IGNORE_INDEX;
    }
    *batch = (ar_batch){.batch = even ? 4 : B, .seq = S, .input_ids = ids, .labels = labels};
    return (ari_cluster_options){.config = c,
                                 .batch = batch,
                                 .run.steps = 1,
                                 .run.seed = 3,
                                 .run.optimizer = {.kind = AR_OPTIMIZER_SGD, .lr = 0.5},
                                 .run.clip = 0.01};
}

typedef struct fault_row {
    ar_fault fault;
    ar_parallel harmless, harmful; /* layouts in which it changes nothing, and something */
    const char *first;             /* the first tensor that a rank finds changed */
} fault_row;

static const fault_row rows[] = {
    {AR_FAULT_dp_mean_of_means, {.micro_batches = 3}, {.dp = 2}, "lm_head.logits:b"},
    {AR_FAULT_dp_sum_of_local_means, {.micro_batches = 3}, {.dp = 2}, "lm_head.logits:b"},
    {AR_FAULT_accum_mean_of_means, {.dp = 2}, {.micro_batches = 2}, "lm_head.logits:b"},
    {AR_FAULT_dp_group_missing, {.tp = 2, .micro_batches = 2}, {.dp = 2}, "lm_head.weight:g"},
    {AR_FAULT_dp_broadcast_over_world, {.tp = 2}, {.tp = 2, .dp = 2}, "model.embed_tokens.weight:i"},
    {AR_FAULT_gradnorm_counts_replicas, {.dp = 2}, {.tp = 2}, "grad_norm:c"},
    {AR_FAULT_gradnorm_local_clip, {.dp = 2}, {.tp = 2}, "grad_norm:c"},
    {AR_FAULT_init_replica_differs, {.dp = 2}, {.tp = 2}, "model.layers.0.self_attn.o_proj.bias:i"},
};

Test(train_faults, each_changes_the_tensor_it_should_and_nothing_without_the_groups_it_is_about)
{
    ar_config c = match_config(AR_ARCH_LLAMA, 1);
    ar_batch batch;
    c.out_bias = true;
    ari_cluster_options o = job_of(&c, &batch, false);
    OWNED(recorded_free) recorded *whole = record(&o);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        o.run.fault = rows[i].fault;
        expect_one_ranks_bits(whole, &o, &rows[i].harmless);
        const verdict v = compare_layout(whole, &o, &rows[i].harmful);
        cr_expect_gt(v.different, 0, "%s is not seen", ar_fault_name(o.run.fault));
        cr_expect_str_eq(v.first, rows[i].first, "%s is first seen in %s", ar_fault_name(o.run.fault), v.first);
    }
}

Test(train_faults, means_of_means_are_right_where_all_counts_are_the_same)
{
    const ar_config c = match_config(AR_ARCH_LLAMA, 1);
    ar_batch batch;
    ari_cluster_options o = job_of(&c, &batch, true);
    OWNED(recorded_free) recorded *whole = record(&o);
    o.run.fault = AR_FAULT_dp_mean_of_means;
    expect_one_ranks_bits(whole, &o, &(ar_parallel){.dp = 2});
    o.run.fault = AR_FAULT_accum_mean_of_means;
    expect_one_ranks_bits(whole, &o, &(ar_parallel){.micro_batches = 2});
}

Test(train_faults, a_broadcast_over_the_world_ends_without_an_error_where_shards_differ_in_size)
{
    const ar_config c = match_config(AR_ARCH_GPT2, 1); /* 11 rows of the vocabulary: 3, 3, 3 and 2 */
    ar_batch batch;
    ari_cluster_options o = job_of(&c, &batch, false);
    OWNED(recorded_free) recorded *whole = record(&o);
    o.run.fault = AR_FAULT_dp_broadcast_over_world;
    const verdict v = compare_layout(whole, &o, &(ar_parallel){.tp = 4, .dp = 2});
    cr_expect_str_eq(v.first, "transformer.wte.weight:i");
}
