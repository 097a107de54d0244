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
