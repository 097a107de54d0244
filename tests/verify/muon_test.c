/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of Muon under layouts that cut its matrices along every axis: the baseline's bits, and calls, bytes, products
 * and memory as predicted. That the baseline is torch.optim.Muon is held by baseline_training_golden_test. */
#include "tests/verify/support.h"

static const struct {
    const char *name; /* packed and stored transposed; packed with fewer KV heads; experts */
    size_t layouts;
    ar_parallel layout[6];
} cases[] = {
    {"gpt2-tiny",
     4,
     {{.dp = 2, .tp = 2, .sp = true, .zero = 1},
      {.dp = 3, .tp = 2, .zero = 3},
      {.pp = 2, .tp = 4, .micro_batches = 2},
      {.dp = 2, .cp = 2, .zero = 2}}},
    {"phi3-tiny", 3, {{.tp = 2, .dp = 2, .zero = 2}, {.tp = 2, .sp = true}, {.dp = 4, .dp_replicate = 2, .zero = 1}}},
    {"experts/qwen2moe-tiny",
     6,
     {{.tp = 2, .dp = 2, .zero = 3},
      {.dp = 2, .ep = 2, .zero = 1},
      {.tp = 2, .dp = 2, .sp = true, .ep = 4, .etp = 1},
      {.tp = 2, .dp = 2, .ep = 2, .zero = 2},
      {.pp = 2, .dp = 2, .ep = 2, .micro_batches = 2},
      {.cp = 2, .tp = 2, .sp = true}}},
};

/* Separate and packed, packed head by head, stored transposed, and with biases; more ranks than KV heads; with sinks;
 * latent ones whose queries have a rank or not. */
static const struct {
    const char *name;
    size_t layouts;
    ar_parallel layout[3];
} clipped[] = {
    {"gpt2-tiny", 2, {{.dp = 2, .tp = 2, .zero = 3}, {.cp = 2, .tp = 2}}},
    {"phi3-tiny", 2, {{.tp = 2, .sp = true, .dp = 2, .zero = 2}, {.cp = 2, .cp_inner = 2}}},
    {"variants/gpt-neox-tiny", 1, {{.tp = 2, .dp = 2}}},
    {"llama-gqa-tiny", 2, {{.pp = 2, .tp = 4, .micro_batches = 2}, {.dp = 3, .cp = 2, .zigzag = true, .zero = 1}}},
    {"qwen2-tiny", 1, {{.tp = 2, .dp = 2, .recompute = {AR_RECOMPUTE_FULL, 1}}}},
    {"experts/gpt-oss-tiny", 2, {{.tp = 2, .dp = 2, .zero = 1}, {.cp = 2, .cp_inner = 2, .dp = 2}}},
    {"experts/deepseek-v3-tiny",
     2,
     {{.tp = 2, .sp = true, .dp = 2, .zero = 3}, {.pp = 2, .cp = 2, .micro_batches = 2}}},
    {"experts/deepseek-v2-lite-tiny", 1, {{.tp = 2, .dp = 2, .zero = 2}}},
};

static void check_steps(const ar_check_options *o, const char *name)
{
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(o);
    expect_same(r, name);
}

Test(muon, whole_matrices_are_updated_alike_in_every_layout)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char folder[600];
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, cases[i].name);
        ar_check_options o = check_layouts(folder, cases[i].layout, cases[i].layouts, 4, 16);
        o.run.steps = 3;
        o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_MUON);
        o.run.optimizer.lr = 0.01;
        o.run.optimizer.match_rms = i == 1;
        o.run.clip = 0.5;
        check_steps(&o, cases[i].name);
        o.run.optimizer.shards = true;
        check_steps(&o, cases[i].name);
    }
}

/* Matrices in bf16, whose fp32 masters Muon updates; the others' second moments have the allowance of Adam. */
Test(muon, native_numerics_stay_within_the_allowance)
{
    static const ar_parallel layouts[] = {{.tp = 2, .dp = 2, .zero = 2}, {.tp = 4}};
    char folder[600];
    snprintf(folder, sizeof folder, "%s/phi3-tiny", TEST_GOLDEN_DIR);
    ar_check_options o = check_layouts(folder, layouts, 1, 4, 16);
    o.run.steps = 2;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_MUON);
    o.run.optimizer.qk_clip = 0.3;
    o.run.numerics = AR_NUMERICS_NATIVE;
    for (int i = 0; i < 2; i++) {
        o.run.precision = i == 0 ? AR_PRECISION_F32 : AR_PRECISION_BF16;
        o.run.optimizer.shards = i == 0;
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        cr_expect_eq(r->run[0].result, AR_CHECK_SAME, "precision %d: %s", i, r->run[0].first.hint);
    }
}

Test(muon, queries_and_keys_are_clipped_alike_in_every_layout)
{
    static const double bounds[] = {0.3, 1e6}; /* no logit reaches the second */
    for (size_t i = 0; i < sizeof clipped / sizeof *clipped; i++) {
        char folder[600], hash[2][65];
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, clipped[i].name);
        ar_check_options o = check_layouts(folder, clipped[i].layout, clipped[i].layouts, 4, 8);
        o.run.steps = 2;
        o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_MUON);
        o.run.optimizer.lr = 0.05;
        o.run.precision = i % 2 ? AR_PRECISION_BF16 : AR_PRECISION_F32;
        for (int k = 0; k < 2; k++) {
            o.run.optimizer.qk_clip = bounds[k];
            OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
            expect_same(r, clipped[i].name);
            snprintf(hash[k], sizeof hash[k], "%s", r->weights_hash);
        }
        cr_expect(strcmp(hash[0], hash[1]) != 0, "%s: nothing was clipped", folder);
    }
}
