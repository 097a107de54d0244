/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/models/names.h"

const ari_outer_names *ari_outer_names_of(ar_arch arch)
{
    static const ari_outer_names llama = {.token = "model.embed_tokens",
                                          .embedded = "model.embed_tokens",
                                          .blocks = "model.layers",
                                          .final_norm = "model.norm",
                                          .head = "lm_head"};
    static const ari_outer_names gpt2 = {.token = "transformer.wte",
                                         .position = "transformer.wpe",
                                         .embedded = "transformer.drop",
                                         .blocks = "transformer.h",
                                         .final_norm = "transformer.ln_f",
                                         .head = "lm_head"};
    static const ari_outer_names stack = {.token = "embed", .embedded = "embed", .blocks = "layers"};
    switch (arch) {
    case AR_ARCH_LLAMA:
        return &llama;
    case AR_ARCH_GPT2:
        return &gpt2;
    case AR_ARCH_STACK:
        break;
    }
    return &stack;
}

const ari_block_names *ari_block_names_of(ar_arch arch)
{
    static const ari_block_names llama = {.norm1 = "input_layernorm",
                                          .norm2 = "post_attention_layernorm",
                                          .attention = "self_attn",
                                          .mlp = "mlp",
                                          .q = "q_proj",
                                          .k = "k_proj",
                                          .v = "v_proj",
                                          .out = "o_proj",
                                          .first = "gate_proj",
                                          .up = "up_proj",
                                          .second = "down_proj"};
    static const ari_block_names gpt2 = {.norm1 = "ln_1",
                                         .norm2 = "ln_2",
                                         .attention = "attn",
                                         .mlp = "mlp",
                                         .q = "c_attn",
                                         .out = "c_proj",
                                         .first = "c_fc",
                                         .second = "c_proj"};
    static const ari_block_names stack = {.norm1 = "ln1",
                                          .norm2 = "ln2",
                                          .attention = "attn",
                                          .mlp = "mlp",
                                          .q = "wq",
                                          .k = "wk",
                                          .v = "wv",
                                          .out = "wo",
                                          .first = "w1",
                                          .second = "w2"};
    switch (arch) {
    case AR_ARCH_LLAMA:
        return &llama;
    case AR_ARCH_GPT2:
        return &gpt2;
    case AR_ARCH_STACK:
        break;
    }
    return &stack;
}
