/* SPDX-License-Identifier: Apache-2.0 */
/* Embedding, LM head and cross-entropy over a split vocabulary, in whole models: every tensor, the loss and every
 * gradient have the bits of the independent baseline's, and stand where it has them. */
#include "support/match.h"
#include "tests/support/test.h"

enum { B = 2, S = 6 };
static const int one_two_four[] = {1, 2, 4, 0};

/* A model of each architecture, with 4 KV heads so that 4 ranks are legal. */
static ar_config model_of(ar_arch arch, size_t vocab, bool tied)
{
    ar_config c = match_config(arch, 1);
    c.kv_heads = 4;
    c.vocab = vocab;
    c.tied = tied;
    return c;
}

static void expect_same_bits(const ar_config *c, const ar_batch *batch)
{
    const match_case m = {.config = *c, .batch = *batch, .seed = 8};
    size_t tensors = 0;
    cr_assert_eq(match(&m, one_two_four, &tensors), AR_OK, "arch %d, V %zu, tied %d: %s", (int)c->arch, c->vocab,
                 c->tied, ar_error_message());
    cr_assert_gt(tensors, 40);
}

static const struct {
    size_t vocab;
    int64_t ids[B * S];
} cases[] = {
    {32, {0, 15, 16, 31, 7, 8, 24, 23, 16, 15, 31, 0}},            /* edges of shards of 32, 16 and 8 rows */
    {257, {0, 64, 65, 129, 130, 128, 256, 195, 194, 255, 1, 256}}, /* rows 65, 65, 65, 62; 129, 128 */
    {5, {0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 4}},                     /* rows 2, 2, 1, 0: the last rank holds nothing */
    {1, {0}}, /* three ranks without rows; the loss is log 1 = 0 and every gradient of the head is zero */
    {11, {7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 3, 7}}, /* repeated ids add up */
};

/* Both uses of the ids: looked up, and targets. On all architectures, tied and not. */
Test(vocabulary, any_number_of_rows_a_rank_has_the_baselines_bits)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_batch batch = {.batch = B, .seq = S, .input_ids = cases[i].ids};
        for (int arch = AR_ARCH_LLAMA; arch <= AR_ARCH_STACK; arch++) {
            for (int tied = 0; tied < (arch == AR_ARCH_STACK ? 1 : 2); tied++) {
                const ar_config c = model_of((ar_arch)arch, cases[i].vocab, tied);
                expect_same_bits(&c, &batch);
            }
        }
    }
}

Test(vocabulary, without_a_target_the_loss_is_nan_and_gradients_are_zeros)
{
    static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1};
    static const int64_t labels[B * S] = {3, -100, -100, -100, -100, -100, 3, -100, -100, -100, -100, -100};
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids, .labels = labels};
    const match_case m = {.config = model_of(AR_ARCH_GPT2, 11, true), .batch = batch, .seed = 8};
    SCOPED(match_weights_fini) match_weights w = {.seed = m.seed};
    SCOPED(ari_reference_fini) ari_reference r = {0};
    cr_assert_ok(match_baseline(&m, &w, &r));
    cr_assert(isnan(r.loss));
    for (size_t i = 0; i < r.count; i++) {
        for (size_t k = 0; r.tensor[i].pass == 'g' && k < r.tensor[i].count; k++)
            cr_assert(r.tensor[i].values[k] == 0.0f && !signbit(r.tensor[i].values[k]), "%s", r.tensor[i].name);
    }
    for (int tp = 1; tp <= 4; tp *= 2)
        cr_assert_ok(match_ranks(&m, &w, &r, tp));
}

/* A sequence of one token has no target; a batch of one sample is the smallest. */
Test(vocabulary, the_smallest_batches_have_the_baselines_bits)
{
    static const int64_t ids[2] = {4, 9};
    for (size_t seq = 1; seq <= 2; seq++) {
        const ar_batch batch = {.batch = 1, .seq = seq, .input_ids = ids};
        const ar_config c = model_of(AR_ARCH_LLAMA, 11, true);
        expect_same_bits(&c, &batch);
    }
}

/* Logits of large magnitude: all of exp's results but the largest vanish, and log l is 0. */
Test(vocabulary, extreme_logits_have_the_baselines_bits)
{
    static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1};
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids};
    const match_case m = {.config = model_of(AR_ARCH_LLAMA, 11, false), .batch = batch, .seed = 8, .scale = 60.0};
    cr_assert_ok(match(&m, one_two_four, NULL));
}

static const ar_loss_options losses[] = {
    {.label_smoothing = 0.1}, {.z_loss = 0.02}, {.label_smoothing = 0.9, .z_loss = 0.5}};

/* Vocabularies that divide, that do not, and that leave ranks without rows; targets beside ignored ones. */
Test(vocabulary, smoothed_labels_and_z_loss_have_the_baselines_bits)
{
    static const int64_t ids[B * S] = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 2, 4};
    static const int64_t labels[B * S] = {4, -100, 0, 3, -100, 2, -100, 3, -100, -100, -100, 1};
    static const size_t vocabularies[] = {5, 32, 257};
    for (size_t i = 0; i < 3 * sizeof losses / sizeof *losses; i++) {
        const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids, .labels = i % 2 ? labels : NULL};
        const match_case m = {.config = model_of(i % 4 < 2 ? AR_ARCH_LLAMA : AR_ARCH_GPT2, vocabularies[i / 3], i % 2),
                              .batch = batch,
                              .seed = 8,
                              .run.loss = losses[i % 3]};
        size_t tensors = 0;
        cr_assert_eq(match(&m, one_two_four, &tensors), AR_OK, "case %zu: %s", i, ar_error_message());
        cr_assert_gt(tensors, 40);
    }
}

/* What a rank counts beside its own logits, padding or none, would show: with all logits alike the loss is log V with
 * any smoothing, and with a z-loss c more by c*(log V)^2. */
Test(vocabulary, of_equal_logits_smoothing_changes_nothing_and_the_z_loss_adds_its_square)
{
    static const int64_t ids[B * S] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0, 1};
    const ar_batch batch = {.batch = B, .seq = S, .input_ids = ids};
    match_case m = {.config = model_of(AR_ARCH_GPT2, 11, true), .batch = batch, .seed = 8, .scale = 0x1p-140};
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++) {
        SCOPED(match_weights_fini) match_weights w = {.seed = m.seed, .scale = m.scale};
        SCOPED(ari_reference_fini) ari_reference r = {0};
        m.run.loss = losses[i];
        cr_assert_ok(match_baseline(&m, &w, &r));
        cr_expect_float_eq(r.loss, log(11.0) * (1.0 + losses[i].z_loss * log(11.0)), 1e-6, "%.9g", r.loss);
        cr_expect_ok(match_ranks(&m, &w, &r, 4));
    }
}
