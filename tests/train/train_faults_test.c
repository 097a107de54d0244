/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of data parallelism, of micro-batches and of clipping change nothing where there is nothing to get wrong. What
 * they change elsewhere is in tests/verify/fault_expected.h. */
#include "tests/train/recorded.h"

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

static const struct {
    const char *fault;
    ar_parallel harmless;
    bool even; /* batches of which every sample has as many targets */
} rows[] = {
    {"dp_mean_of_means", {.micro_batches = 3}, false},
    {"dp_mean_of_means", {.dp = 2}, true},
    {"dp_sum_of_local_means", {.micro_batches = 3}, false},
    {"accum_mean_of_means", {.dp = 2}, false},
    {"accum_mean_of_means", {.micro_batches = 2}, true},
    {"dp_group_missing", {.tp = 2, .micro_batches = 2}, false},
    {"dp_broadcast_over_world", {.tp = 2}, false},
    {"gradnorm_counts_replicas", {.dp = 2}, false},
    {"gradnorm_local_clip", {.dp = 2}, false},
    {"init_replica_differs", {.dp = 2}, false},
};

Test(train_faults, none_changes_a_layout_without_the_groups_it_is_about)
{
    for (int even = 0; even < 2; even++) {
        ar_config c = match_config(AR_ARCH_LLAMA, 1);
        ar_batch batch;
        c.out_bias = true;
        ari_cluster_options o = job_of(&c, &batch, even);
        OWNED(recorded_free) recorded *whole = record(&o);
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            o.run.fault = rows[i].fault;
            if (rows[i].even == even)
                expect_one_ranks_bits(whole, &o, &rows[i].harmless);
        }
    }
}
