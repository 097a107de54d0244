/* SPDX-License-Identifier: Apache-2.0 */
/* Training steps of models with ZeRO have one rank's bits in every tensor: shares of gradients, whole weights. */
#include "tests/train/batches.h"
#include "tests/train/recorded.h"

#include "support/small.h"

enum { B = 6, S = 8, STEPS = 2 };

static ari_cluster_options job_of(const ar_config *c, const ar_batch *d, ar_optimizer_kind kind)
{
    ari_cluster_options o = adamw_job(c, d, STEPS);
    o.run.ddp = ar_ddp_defaults();
    o.run.optimizer = ar_optimizer_defaults(kind);
    o.run.optimizer.lr = 0.05;
    o.run.optimizer.momentum = kind == AR_OPTIMIZER_SGD ? 0.9 : 0.0;
    o.run.optimizer.nesterov = kind == AR_OPTIMIZER_SGD;
    return o;
}

/* 5 and 7 cut most buckets unevenly, and 7 is more ranks than samples. */
static const ar_parallel layouts[] = {{.dp = 2, .zero = 1},
                                      {.dp = 5, .zero = 1, .micro_batches = 2},
                                      {.dp = 7, .zero = 1},
                                      {.tp = 2, .dp = 2, .zero = 1},
                                      {.tp = 4, .dp = 2, .sp = true, .zero = 1},
                                      {.tp = 2, .dp = 3, .sp = true, .micro_batches = 2, .zero = 1},
                                      {.dp = 6, .zero = 1, .dp_replicate = 2, .micro_batches = 2},
                                      {.tp = 2, .cp = 2, .dp = 2, .zero = 1, .dp_replicate = 2},
                                      {.zero = 1}};
/* One bucket a parameter; a few to a bucket, none of which the larger ones fit in; all in one. */
static const size_t bucket_bytes[] = {0, 600, AR_BUCKET_BYTES};

/* Every layout with one of the bucket sizes, in either mode and order. */
static void expect_all_layouts(const ar_config *c, ar_optimizer_kind kind, size_t first)
{
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(c, d, kind);
    OWNED(recorded_free) recorded *whole = record(&o);
    const size_t n = sizeof layouts / sizeof *layouts;
    for (size_t i = first % (small_only() ? 3 : 1); i < n; i += small_only() ? 3 : 1) {
        o.run.ddp.bucket_bytes = bucket_bytes[(first + i) % 3];
        o.run.ddp.mode = (first + i) % 2 ? AR_BUCKETS_EAGER : AR_BUCKETS_OVERLAP;
        o.run.ddp.order = i % 2 ? AR_BUCKETS_BY_SIZE : AR_BUCKETS_REVERSE;
        expect_one_ranks_bits(whole, &o, &layouts[i]);
    }
}

Test(zero_step, llama_has_one_ranks_bits_tied_or_not)
{
    ar_config c = config_of(AR_ARCH_LLAMA, 1, 2);
    c.tied = false;
    expect_all_layouts(&c, AR_OPTIMIZER_ADAMW, 0);
    c.tied = true;
    expect_all_layouts(&c, AR_OPTIMIZER_SGD, 1);
}

Test(zero_step, gpt2_has_one_ranks_bits_in_transposed_and_packed_weights)
{
    ar_config c = config_of(AR_ARCH_GPT2, 1, 4);
    expect_all_layouts(&c, AR_OPTIMIZER_ADAM, 2);
}

Test(zero_step, a_stack_has_one_ranks_bits)
{
    const ar_config c = config_of(AR_ARCH_STACK, 1, 4);
    expect_all_layouts(&c, AR_OPTIMIZER_ADAMW, 1);
}

Test(zero_step, native_shares_have_the_bits_of_native_ranks_without)
{
    const ar_config c = config_of(AR_ARCH_GPT2, 1, 4);
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d, AR_OPTIMIZER_ADAMW);
    o.run.numerics = AR_NUMERICS_NATIVE;
    for (size_t b = 0; b < 3; b++) {
        ari_cluster_result without, with;
        o.run.ddp.bucket_bytes = bucket_bytes[b];
        o.run.parallel = (ar_parallel){.tp = 2, .dp = 3};
        cr_assert_ok(ari_cluster_run(&without, &o));
        o.run.parallel.zero = 1;
        cr_assert_ok(ari_cluster_run(&with, &o));
        cr_expect_eq(memcmp(with.loss, without.loss, STEPS * sizeof(float)), 0, "buckets of %zu bytes: %a, not %a",
                     bucket_bytes[b], (double)with.loss[STEPS - 1], (double)without.loss[STEPS - 1]);
        free(with.loss);
        free(without.loss);
    }
}

Test(zero_step, each_rank_keeps_its_part_of_the_state)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 2);
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d, AR_OPTIMIZER_ADAMW);
    ari_cluster_result result;
    ar_rank_memory whole[3], share[3];
    o.run.parallel = (ar_parallel){.dp = 3};
    o.memory = whole;
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    o.run.parallel.zero = 1;
    o.memory = share;
    cr_assert_ok(ari_cluster_run(&result, &o));
    free(result.loss);
    const size_t two_moments = 2 * sizeof(float); /* the first ranks of a slice may have one element more */
    cr_expect_geq(3 * share[0].optimizer, whole[0].optimizer);
    for (int r = 0; r < 3; r++)
        cr_expect_leq(share[r].optimizer, whole[r].optimizer / 3 + two_moments, "rank %d: %zu of %zu bytes", r,
                      share[r].optimizer, whole[r].optimizer);
}

/* --- mistakes ----------------------------------------------------------------------------------------------------- */

/* The gradients of the first step are right, its weights are not. */
static void expect_wrong_weights(ar_fault fault)
{
    const ar_config c = config_of(AR_ARCH_LLAMA, 1, 2);
    const ar_parallel p = {.dp = 2, .zero = 1};
    ar_batch *d = batches(B, S, false);
    ari_cluster_options o = job_of(&c, d, AR_OPTIMIZER_ADAMW);
    OWNED(recorded_free) recorded *whole = record(&o);
    o.run.fault = fault;
    const verdict a = compare_layout(whole, &o, &p), b = compare_layout(whole, &o, &p);
    cr_expect_gt(a.different, 0, "%s", ar_fault_name(fault));
    cr_expect_eq(a.covered, a.elements, "%s", ar_fault_name(fault));
    cr_expect(a.first[0] && a.first[strlen(a.first) - 1] == 'n', "%s: first %s", ar_fault_name(fault), a.first);
    cr_expect(a.different == b.different && memcmp(a.loss, b.loss, sizeof a.loss) == 0, "%s: not the same each time",
              ar_fault_name(fault));
}

Test(zero_step, weights_that_are_not_gathered_show)
{
    expect_wrong_weights(AR_FAULT_zero_gather_missing);
}

Test(zero_step, a_share_of_the_wrong_gradient_shows)
{
    expect_wrong_weights(AR_FAULT_zero_shards_misaligned);
}
