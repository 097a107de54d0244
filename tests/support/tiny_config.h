/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* A model of each family of a few hundred weights: 11 ids, width 8, 4 heads of 4, a middle of 12. */
#include "anyrank/activation.h"
#include "anyrank/config.h"
#include "tests/support/row.h"

static inline ar_config tiny_config(ar_arch arch, size_t layers)
{
    const bool stack = arch == AR_ARCH_STACK, gpt2 = arch == AR_ARCH_GPT2, plain = stack || gpt2;
    return (ar_config)ROW(.arch = arch, .name = "tiny", .vocab = 11, .hidden = 8, .layers = layers, .heads = 4,
                          .kv_heads = gpt2 ? 4 : 2, .head_dim = 4, .ffn = 12, .max_positions = 9,
                          .activation = plain ? AR_ACT_GELU_TANH : AR_ACT_SILU, .gated = !plain,
                          .norm = plain ? AR_NORM_LAYER : AR_NORM_RMS, .norm_eps = 1e-5,
                          .rope = {.kind = plain ? AR_ROPE_NONE : AR_ROPE_DEFAULT, .theta = 100.0},
                          .learned_positions = gpt2, .qkv_bias = gpt2, .out_bias = gpt2, .mlp_bias = plain,
                          .final_norm = !stack, .tied = gpt2, .causal = true, .initializer_range = 0.3);
}
