/* SPDX-License-Identifier: Apache-2.0 */
/* Pipelines that defer the gradients of weights: those of experts are made at once, so that several micro-batches' values
 * meet in one reduction, and travel in the bytes that so many need. */
#include "tests/verify/support.h"

#define WIDE_MIXTRAL                                                                                         \
    "{\"architectures\": [\"MixtralForCausalLM\"], \"model_type\": \"mixtral\", \"vocab_size\": 16, "        \
    "\"hidden_size\": 32, \"intermediate_size\": 32, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, " \
    "\"num_key_value_heads\": 1, \"num_local_experts\": 4, \"num_experts_per_tok\": 2, "                     \
    "\"max_position_embeddings\": 64, \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"hidden_act\": \"silu\"}"

Test(deferred_sums, of_several_micro_batches_are_one)
{
    static const ar_parallel layout[] = {
        {.pp = 2, .dp = 5, .zero = 3, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
        {.pp = 2, .dp = 5, .zero = 2, .micro_batches = 2, .schedule = AR_PP_ZERO_BUBBLE},
    };
    OWNED(end_folder) char *folder = new_model(WIDE_MIXTRAL);
    ar_check_options o = check_layouts(folder, layout, sizeof layout / sizeof *layout, 10, 4);
    o.run.precision = AR_PRECISION_BF16;
    OWNED(ar_check_report_destroy) ar_check_report *r = check_or_fail(&o);
    expect_same(r, "bf16");
}
