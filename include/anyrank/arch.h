/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_ARCH_H
#define ANYRANK_ARCH_H

#include "anyrank/status.h"

AR_BEGIN_DECLS

/* Model architecture: the transformers class(es) that each stands for, with their parameter names. */
typedef enum ar_arch {
    AR_ARCH_LLAMA,      /* LlamaForCausalLM and architectures with the same structure and parameter names */
    AR_ARCH_GPT2,       /* GPT2LMHeadModel */
    AR_ARCH_STACK,      /* this project's test model: embedding, pre-LayerNorm blocks, loss = sum of the output */
    AR_ARCH_QWEN3,      /* Qwen3ForCausalLM: Llama with norms of queries and keys */
    AR_ARCH_OLMO2,      /* Olmo2, Gemma2, Gemma3ForCausalLM: Llama with norms after attention and MLP */
    AR_ARCH_PHI3,       /* Phi3ForCausalLM: Llama with packed q|k|v and gate|up weights */
    AR_ARCH_MIXTRAL,    /* MixtralForCausalLM: Llama with experts instead of the MLP */
    AR_ARCH_QWEN2_MOE,  /* Qwen2MoeForCausalLM: Mixtral with other names, a shared expert, some MLP layers */
    AR_ARCH_QWEN3_MOE,  /* Qwen3Moe, OlmoeForCausalLM: Qwen2-MoE with norms of queries and keys, no shared expert */
    AR_ARCH_GLM4_MOE,   /* Glm4Moe, Dots1ForCausalLM: Qwen3-MoE with sigmoid routing and an ungated shared expert */
    AR_ARCH_STARCODER2, /* Starcoder2ForCausalLM: GPT-2's structure with Llama's names and RoPE */
    AR_ARCH_DEEPSEEK,   /* DeepseekV2, DeepseekV3ForCausalLM: Glm4Moe with multi-head latent attention */
    AR_ARCH_GLM4,       /* Glm4ForCausalLM: Gemma2's structure with other names and packed gate|up weights */
    AR_ARCH_GPT_OSS,    /* GptOssForCausalLM: Mixtral with biases and attention sinks */
    AR_ARCH_GPT_NEOX    /* GPTNeoXForCausalLM: GPT-2 with RoPE and a parallel residual */
} ar_arch;

typedef struct ar_config ar_config; /* architecture and sizes of a model: anyrank/config.h */

AR_END_DECLS
#endif
