/* SPDX-License-Identifier: Apache-2.0 */
/* Twenty AdamW steps from the weights of PyTorch's runs have the baseline's bits on every layout; that the baseline's
 * losses and final weights are PyTorch's is held by baseline_training_golden_test. */
#include "tests/verify/support.h"

static const struct {
    const char *name;
    size_t layouts;
    ar_parallel layout[10];
} cases[] = {
    {"gpt2-tiny",
     10,
     {{.tp = 1},
      {.tp = 2},
      {.tp = 4, .sp = true},
      {.dp = 2},
      {.dp = 2, .tp = 2, .sp = true},
      {.micro_batches = 2},
      {.pp = 2, .micro_batches = 2, .schedule = AR_PP_GPIPE},
      {.pp = 4, .stages = {4, {0, 1, 1, 0}}, .micro_batches = 2},
      {.pp = 2, .virtual_stages = 2, .stages = {4, {0, 1, 1, 0}}, .micro_batches = 2, .schedule = AR_PP_INTERLEAVED},
      {.tp = 2, .micro_batches = 2, .forward_first = true, .sp = true, .keep_gathered = true}}},
    {"llama-gqa-tiny",
     10,
     {{.tp = 1},
      {.tp = 2, .sp = true},
      {.tp = 4},
      {.tp = 4, .sp = true},
      {.tp = 8, .sp = true},
      {.dp = 2},
      {.dp = 2, .tp = 4, .sp = true},
      {.micro_batches = 2},
      {.pp = 2, .dp = 2, .tp = 2},
      {.pp = 4, .stages = {4, {0, 1, 1, 0}}, .tp = 2, .sp = true, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE}}},
    {"experts/mixtral-tiny",
     6,
     {{.tp = 1},
      {.tp = 2, .sp = true, .overlap = 2, .recompute = {AR_RECOMPUTE_FULL, 1}},
      {.cp = 2, .zigzag = true, .tp = 2},
      {.pp = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
      {.cp = 4, .cp_inner = 2, .zero = 2},
      {.dp = 2, .tp = 4, .zero = 3}}},
    {"experts/qwen2moe-tiny",
     4,
     {{.micro_batches = 2, .recompute = {AR_RECOMPUTE_SELECTIVE, 1}},
      {.tp = 2, .sp = true, .keep_gathered = true},
      {.cp = 2, .tp = 2},
      {.dp = 2, .tp = 2, .sp = true, .zero = 1}}},
};

Test(golden_training, twenty_steps_have_the_baselines_bits_on_every_layout)
{
    for (size_t i = 0; i < (small_only() ? 1 : sizeof cases / sizeof *cases); i++) {
        char folder[600];
        snprintf(folder, sizeof folder, "%s/%s", TEST_GOLDEN_DIR, cases[i].name);
        const size_t from = small_only() ? cases[i].layouts - 1 : 0;
        ar_check_options o = check_layouts(folder, cases[i].layout + from, cases[i].layouts - from, 2, 32);
        o.run.steps = 20;
        o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
        OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
        expect_same(r, cases[i].name);
    }
}
