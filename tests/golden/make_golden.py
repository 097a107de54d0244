#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the golden models beside this file: small models of Hugging Face's transformers with random weights, one batch,
and the loss, logits, hidden states and gradients that PyTorch computes from them in fp32 on a CPU with eager attention.
The models of BATCHES are plain, and their batch has what a batch may have: labels, a mask, positions, documents. Those of
LOSSES have another loss: label smoothing, z-loss. Those of PACKED, EXPERTS and VARIANTS also have outputs64 and grads64, computed in fp64.
Those of TRAINED also have the losses of twenty AdamW steps and the weights after them, those of MUON of twenty of Muon.
Those of DEFAULTS have a config.json of sizes alone: all else is what the class says. defaults.json has all of what it
says, for sizes that need no weights.

Run by hand, never by the tests; it needs torch, transformers and safetensors from PyPI:

    python3 tests/golden/make_golden.py [NAME ...]

The committed files were made with torch 2.11.0 and transformers 5.17.0, those of BATCHES, of DEFAULTS and of
newer rotary positions with torch 2.15.0 and transformers 5.23.0; provenance.json of each case says so, with the seed.
Another version writes the same tensors up to round-off. `--check` compares with what is there and writes nothing.
"""
import argparse
import contextlib
import copy
import inspect
import json
import math
import pathlib

import safetensors.torch
import torch
import transformers
from transformers import (DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, Dots1Config, Dots1ForCausalLM, Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GemmaConfig,
                          GemmaForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig,
                          MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Olmo2Config, Olmo2ForCausalLM,
                          OlmoeConfig, OlmoeForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                          Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)

from further_tokens import WithFurther

HERE = pathlib.Path(__file__).resolve().parent

SMALL = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "use_cache": False,
         "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}

LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.02, 1.05, 1.1, 1.3, 1.7], "long_factor": [1.1, 1.5, 2.3, 4.1, 7.7, 9.3]}

# name: (config class, model class, its keys, sequence, seed, keys of the file that replace those that transformers 5
# writes). Weights are drawn wide (initializer_range 0.2): with the default every attention row would be nearly uniform,
# and a mask that is off by one would hardly show.
CASES = {
    # Biases of q, k and v; the window that the file has is not in use.
    "qwen2-tiny": (Qwen2Config, Qwen2ForCausalLM,
                   {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                    "rope_theta": 1000000.0, "tie_word_embeddings": True}, 24, 11,
                   # as Qwen2's files of transformers 4 say it
                   {"rope_parameters": None, "rope_theta": 1000000.0, "layer_types": None, "sliding_window": 8,
                    "use_sliding_window": False, "max_window_layers": 2}),
    # Layer 0 sees all, layers 1 and 2 five keys.
    "qwen2-window-tiny": (Qwen2Config, Qwen2ForCausalLM,
                          {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                           "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, 24, 12,
                          {"layer_types": None}),
    # The layers that slide are named one by one.
    "qwen2-layers-tiny": (Qwen2Config, Qwen2ForCausalLM,
                          {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
                           "use_sliding_window": True, "sliding_window": 3,
                           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, 19, 13, {}),
    # Every layer slides; heads wider than hidden / heads.
    "mistral-window-tiny": (MistralConfig, MistralForCausalLM,
                            {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
                             "sliding_window": 7, "rope_theta": 10000.0, "rms_norm_eps": 1e-5}, 24, 14, {}),
    # All three bands of frequencies: waves of 6, 11, 20 (kept), 36, 63 (blended), 113 .. 1112 (slowed) positions.
    "llama3-rope-tiny": (LlamaConfig, LlamaForCausalLM,
                         {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20,
                          "rope_parameters": {"rope_type": "llama3", "rope_theta": 316.0, "factor": 4.0,
                                              "low_freq_factor": 1.0, "high_freq_factor": 3.0,
                                              "original_max_position_embeddings": 64},
                          "max_position_embeddings": 256}, 48, 15,
                         # as Llama 3.1's file has it
                         {"rope_parameters": None, "rope_theta": 316.0,
                          "rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0,
                                           "high_freq_factor": 3.0, "original_max_position_embeddings": 64}}),
    # Biases everywhere, heads narrower than hidden / heads, positions divided by 2, one matrix for both ends.
    "llama-bias-headdim-tiny": (LlamaConfig, LlamaForCausalLM,
                                {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 4,
                                 "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                                 "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
                                 "rms_norm_eps": 1e-5}, 20, 16, {}),
    # 40 positions of a model of 24: theta grows from 100 to 436.
    "llama-dynamic-tiny": (LlamaConfig, LlamaForCausalLM,
                           {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 24,
                            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}}, 40, 41,
                           # as files of transformers 4 say it
                           {"rope_parameters": None, "rope_theta": 100.0,
                            "rope_scaling": {"type": "dynamic", "factor": 4.0}}),
    # Pairs 0 and 1 keep their frequencies, 2 to 5 are blended, 6 to 9 are slowed; cosines and sines times 1.1386.
    "qwen2-yarn-tiny": (Qwen2Config, Qwen2ForCausalLM,
                        {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 20,
                         "max_position_embeddings": 128,
                         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
                                             "original_max_position_embeddings": 64, "beta_fast": 4.0,
                                             "beta_slow": 0.25}}, 32, 42, {}),
    # Both ends of the ramp between two pairs, and another factor of attention, of mscale and mscale_all_dim.
    "mistral-yarn-mscale-tiny": (MistralConfig, MistralForCausalLM,
                                 {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
                                  "sliding_window": None, "max_position_embeddings": 160,
                                  "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 10.0,
                                                      "original_max_position_embeddings": 16, "beta_fast": 2,
                                                      "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.5,
                                                      "truncate": False}}, 32, 43, {}),
    # 24 positions of a model first trained on 32: the short factors; the factor of attention follows from 96/32.
    "llama-longrope-tiny": (LlamaConfig, LlamaForCausalLM,
                            {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2,
                             "max_position_embeddings": 96, "rope_parameters": LONGROPE}, 24, 44, {}),
    # 40 positions: the long ones.
    "llama-longrope-long-tiny": (LlamaConfig, LlamaForCausalLM,
                                 {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 2,
                                  "max_position_embeddings": 96,
                                  "rope_parameters": {**LONGROPE, "attention_factor": 1.25}}, 40, 45, {}),
    # Norms of queries and keys, head by head; heads wider than hidden / heads.
    "qwen3-tiny": (Qwen3Config, Qwen3ForCausalLM,
                   {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6},
                   20, 41, {}),
    # Norms after attention and MLP, and of all queries and all keys of a token.
    "olmo2-tiny": (Olmo2Config, Olmo2ForCausalLM,
                   {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}, 20, 42, {}),
    # Norms that multiply by 1 + weight, the embedding scaled, one KV head.
    "gemma-tiny": (GemmaConfig, GemmaForCausalLM,
                   {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": None},
                   20, 43, {}),
    # Four norms a block, caps so low that they bend, layer 0 slides and layer 1 sees all.
    "gemma2-tiny": (Gemma2Config, Gemma2ForCausalLM,
                    {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
                     "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.5, "final_logit_softcapping": 3.0,
                     "pad_token_id": None}, 20, 44, {"layer_types": None}),
    # Layers 0 and 1 see six keys and turn by one theta, layer 2 sees all and turns by another, slowed.
    "gemma3-tiny": (Gemma3TextConfig, Gemma3ForCausalLM,
                    {**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12, "pad_token_id": None,
                     "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                     "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                                         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}},
                    20, 45, {}),
    # Packed q | k | v and gate | up, a window in every layer, 8 of the 12 features of a head turn.
    "phi3-tiny": (Phi3Config, Phi3ForCausalLM,
                  {**SMALL, "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9,
                   "pad_token_id": None,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67}},
                  24, 51,
                  # as Phi-3's and Phi-4's files of transformers 4 say it
                  {"rope_parameters": None, "rope_theta": 100.0, "rope_scaling": None, "partial_rotary_factor": 0.67}),
    # As many KV heads as query heads; the long factors, and what follows from 128/16 of cosines and sines.
    "phi3-longrope-tiny": (Phi3Config, Phi3ForCausalLM,
                           {**SMALL, "num_attention_heads": 2, "max_position_embeddings": 128, "pad_token_id": None,
                            "original_max_position_embeddings": 16, "tie_word_embeddings": True,
                            "rope_parameters": {key: value for key, value in LONGROPE.items() if "orig" not in key}},
                           24, 52,
                           # as Phi-3-mini-128k's file has it
                           {"rope_parameters": None, "rope_theta": 10000.0, "original_max_position_embeddings": 16,
                            "rope_scaling": {"type": "longrope", "short_factor": LONGROPE["short_factor"],
                                             "long_factor": LONGROPE["long_factor"]}}),
    # Grouped KV heads, a part of the head, and the short factors.
    "phi3-longrope-short-tiny": (Phi3Config, Phi3ForCausalLM,
                                 {**SMALL, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
                                  "max_position_embeddings": 128, "original_max_position_embeddings": 32,
                                  "pad_token_id": None,
                                  "rope_parameters": {"rope_type": "longrope", "rope_theta": 1000.0,
                                                      "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.2, 1.9],
                                                      "long_factor": [1.4, 3.0, 9.0]}}, 20, 53, {}),
}
BATCH = 2

FEW = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "use_cache": False, "max_position_embeddings": 32,
       "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
# Models with experts: as CASES, and what is done to the router's weights [E, h] of each layer. Files have each expert's
# parameters by themselves, as on the Hub and in transformers 4.
EXPERTS = {
    # Two of five experts.
    "experts/mixtral-tiny": (MixtralConfig, MixtralForCausalLM,
                     {**FEW, "intermediate_size": 12, "num_local_experts": 5, "num_experts_per_tok": 2}, 14, 81, {}),
    # One of three experts, whose weight is not normalised; layer 0 has an MLP, and no token of layer 1 goes to expert 2.
    "experts/qwen3moe-tiny": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
                      {**FEW, "intermediate_size": 20, "moe_intermediate_size": 10, "num_experts": 3,
                       "num_experts_per_tok": 1, "head_dim": 6, "mlp_only_layers": [0], "num_hidden_layers": 3},
                      14, 82, {}),
    # A shared expert with a gate; normalised; every second layer has experts.
    "experts/qwen2moe-tiny": (Qwen2MoeConfig, Qwen2MoeForCausalLM,
                      {**FEW, "intermediate_size": 20, "moe_intermediate_size": 6, "num_experts": 4,
                       "num_experts_per_tok": 3, "shared_expert_intermediate_size": 14, "norm_topk_prob": True,
                       "decoder_sparse_step": 2}, 14, 83, {}),
    # Norms of all heads together.
    "experts/olmoe-tiny": (OlmoeConfig, OlmoeForCausalLM,
                   {**FEW, "intermediate_size": 12, "num_experts": 7, "num_experts_per_tok": 2, "pad_token_id": None},
                   14, 84, {}),
    # Every token goes to expert 0, and padding is dispatched as well.
    "experts/mixtral-padding-tiny": (MixtralConfig, MixtralForCausalLM,
                             {**FEW, "intermediate_size": 8, "num_local_experts": 3}, 14, 85, {}),
    # The class's own balancing loss, of all layers together, without what is padding.
    "experts/mixtral-balance-padding-tiny": (
        MixtralConfig, MixtralForCausalLM,
        {**FEW, "intermediate_size": 8, "num_local_experts": 4, "output_router_logits": True,
         "router_aux_loss_coef": 0.7}, 14, 86, {}),
    # The same of the layers that have experts alone, whose weights are not normalised.
    "experts/qwen3moe-balance-tiny": (
        Qwen3MoeConfig, Qwen3MoeForCausalLM,
        {**FEW, "intermediate_size": 20, "moe_intermediate_size": 10, "num_experts": 5, "num_experts_per_tok": 2,
         "head_dim": 6, "mlp_only_layers": [1], "num_hidden_layers": 3, "output_router_logits": True,
         "router_aux_loss_coef": 0.4}, 14, 87, {}),
    "experts/mixtral-sequence-padding-tiny": (
        MixtralConfig, MixtralForCausalLM, {**FEW, "intermediate_size": 8, "num_local_experts": 4}, 14, 88, {}),
    "experts/olmoe-batch-tiny": (
        OlmoeConfig, OlmoeForCausalLM, {**FEW, "intermediate_size": 8, "num_experts": 6, "num_experts_per_tok": 2,
                                        "pad_token_id": None}, 14, 89, {}),
    # Sigmoids and a bias; two of nine experts, in two of three groups; half of a head turns; layer 0 has an MLP.
    "experts/glm4moe-tiny": (Glm4MoeConfig, Glm4MoeForCausalLM,
                     {**FEW, "intermediate_size": 20, "moe_intermediate_size": 10, "n_routed_experts": 9,
                      "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
                      "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 8,
                      "use_qk_norm": True, "attention_bias": True, "num_mtp_layers": 0}, 14, 90, {}),
    # One of five experts, not divided by the sum; two shared ones; layer 2 sees six keys.
    "experts/dots1-tiny": (Dots1Config, Dots1ForCausalLM,
                   {**FEW, "intermediate_size": 20, "moe_intermediate_size": 6, "n_routed_experts": 5,
                    "n_shared_experts": 2, "num_experts_per_tok": 1, "routed_scaling_factor": 1.5,
                    "first_k_dense_replace": 1, "num_hidden_layers": 3, "head_dim": 6, "attention_bias": True,
                    "sliding_window": 6, "max_window_layers": 2}, 14, 91, {}),
}
# Latent attention: sizes of which no two are equal.
LATENT = {**FEW, "num_key_value_heads": 4, "q_lora_rank": 7, "kv_lora_rank": 5, "qk_nope_head_dim": 6,
          "qk_rope_head_dim": 4, "v_head_dim": 3, "intermediate_size": 20, "moe_intermediate_size": 6,
          "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hidden_layers": 3,
          "first_k_dense_replace": 1}
# Positions of which the scaling is seen in the frequencies, the cosines and the scores.
MSCALE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16,
          "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.8}
EXPERTS.update({
    # Queries of a low rank, biases, two of eight experts in two of four groups.
    "experts/deepseek-v3-tiny": (DeepseekV3Config, DeepseekV3ForCausalLM,
                         {**LATENT, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_mtp_layers": 0,
                          "attention_bias": True, "max_position_embeddings": 128, "rope_parameters": MSCALE}, 14, 92,
                         # as DeepSeek-V3's file has it
                         {"rope_parameters": None, "rope_theta": 100.0,
                          "rope_scaling": {**{k: v for k, v in MSCALE.items() if "rope" not in k}, "type": "yarn"}}),
    # Queries of the input, three heads, halves in place of pairs, one of five experts, not divided by the sum.
    "experts/deepseek-v3-plain-tiny": (DeepseekV3Config, DeepseekV3ForCausalLM,
                               {**LATENT, "hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3,
                                "q_lora_rank": None, "intermediate_size": 21, "moe_intermediate_size": 9,
                                "n_routed_experts": 5, "num_experts_per_tok": 1, "n_group": 1,
                                "topk_group": 1, "norm_topk_prob": False, "rope_interleave": False, "v_head_dim": 11,
                                "num_mtp_layers": 0, "tie_word_embeddings": True}, 14, 112, {}),
    # A softmax, of three of four groups, times 1.5; two shared experts.
    "experts/deepseek-v2-tiny": (DeepseekV2Config, DeepseekV2ForCausalLM,
                         {**LATENT, "kv_lora_rank": 8, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 3,
                          "routed_scaling_factor": 1.5, "n_shared_experts": 2, "num_experts_per_tok": 3,
                          "max_position_embeddings": 128, "rope_parameters": MSCALE}, 14, 110, {}),
    # As V2-Lite: queries of the input, no groups; every layer has experts.
    "experts/deepseek-v2-lite-tiny": (DeepseekV2Config, DeepseekV2ForCausalLM,
                              {**LATENT, "kv_lora_rank": 8, "q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 0,
                               "num_hidden_layers": 2}, 14, 95, {}),
})
EXPERTS.update({
    # Mixtral's names, with norms of all of a token's q and k, and a bias beside the router; half of a head turns.
    "experts/minimaxm2-tiny": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM,
                       {**FEW, "intermediate_size": 10, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8,
                        "rotary_dim": 4, "num_hidden_layers": 2}, 14, 101, {}),
    # DeepSeek-V3's form by the name of another, whose layers say one by one which has an MLP.
    "experts/glm4moelite-tiny": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM,
                         {**{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"}, "q_lora_rank": 5,
                          "n_routed_experts": 6, "mlp_layer_types": ["dense", "sparse", "sparse"],
                          "routed_scaling_factor": 1.8}, 14, 96, {}),
})
EXPERTS.update({
    # Two further tokens; no layer of the model is without experts, as those of the blocks.
    "experts/deepseek-v3-mtp-tiny": (DeepseekV3Config, DeepseekV3ForCausalLM,
                             {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0,
                              "num_hidden_layers": 2}, 14, 131,
                             {"num_nextn_predict_layers": 2, "mtp_loss_scaling_factor": 0.3}),
})
EXPERTS.update({
    # Sinks, biases everywhere, gates and ups beyond the limits; layer 0 sees five keys.
    "experts/gpt-oss-tiny": (GptOssConfig, GptOssForCausalLM,
                     {**FEW, "intermediate_size": 12, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6,
                      "sliding_window": 5, "pad_token_id": None, "max_position_embeddings": 128,
                      "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "truncate": False,
                                          "original_max_position_embeddings": 16, "beta_fast": 4.0,
                                          "beta_slow": 0.5}}, 14, 120, {"layer_types": None}),
    # The class's own balancing loss; padding, no biases of attention.
    "experts/gpt-oss-padding-tiny": (GptOssConfig, GptOssForCausalLM,
                             {**FEW, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 3,
                              "head_dim": 8, "sliding_window": 6, "attention_bias": False, "pad_token_id": None,
                              "output_router_logits": True, "router_aux_loss_coef": 0.5}, 14, 121, {}),
})
# Losses of routers that the class has not: what is balanced, its weight, and that of the z-loss (ar_router_losses).
ROUTED = {"experts/mixtral-sequence-padding-tiny": ("sequence", 0.6, 0.02),
          "experts/olmoe-batch-tiny": ("batch", 0.5, 0.01)}
CASES.update(EXPERTS)

GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2}
# Models that differ from Llama, or one that does, in a rule for their layers, a norm or a bias.
VARIANTS = {
    # Layer 1 slides; heads wider than hidden / heads.
    "variants/ministral-tiny": (transformers.MinistralConfig, transformers.MinistralForCausalLM,
                                {**GROUPED, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 5,
                                 "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, 20, 81, {}),
    # Layer 0 slides and turns by the plain rotation, layer 1 by YaRN's.
    "variants/olmo3-tiny": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM,
                            {**GROUPED, "pad_token_id": None, "sliding_window": 6,
                             "layer_types": ["sliding_attention", "full_attention"],
                             "max_position_embeddings": 64,
                             "rope_parameters": {
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                                 "full_attention": {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0,
                                                    "original_max_position_embeddings": 16, "beta_fast": 4.0,
                                                    "beta_slow": 0.25}}}, 20, 92, {}),
    # Layer 2 sees all and does not turn.
    "variants/exaone4-tiny": (transformers.Exaone4Config, transformers.Exaone4ForCausalLM,
                              {**GROUPED, "num_hidden_layers": 3, "head_dim": 8, "sliding_window": 6,
                               "sliding_window_pattern": 3}, 20, 93, {"layer_types": None}),
    # Layers 0 and 1 turn, layer 2 does not.
    "variants/smollm3-tiny": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM,
                              {**GROUPED, "num_hidden_layers": 3, "no_rope_layer_interval": 3, "pad_token_id": None,
                               "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, 20, 84,
                              {"no_rope_layers": None, "layer_types": None}),
    # Windows in the layers without rotary positions, biases.
    "variants/smollm3-window-tiny": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM,
                                     {**GROUPED, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0],
                                      "use_sliding_window": True, "sliding_window": 5, "mlp_bias": True,
                                      "pad_token_id": 3}, 20, 85, {"layer_types": None}),
    # Biases of q, k and v and of the output, heads wider than hidden / heads.
    "variants/seed-oss-tiny": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM,
                               {**GROUPED, "head_dim": 8, "attention_out_bias": True, "attention_dropout": 0.0,
                                "residual_dropout": 0.0}, 20, 86, {}),
    # LayerNorm, of each head the first 4 of 12 features turn.
    "variants/stablelm-tiny": (transformers.StableLmConfig, transformers.StableLmForCausalLM,
                               {**SMALL, "num_attention_heads": 2, "num_key_value_heads": 1, "use_qkv_bias": True,
                                "partial_rotary_factor": 0.34}, 20, 87, {}),
    # Factors of the embedding, the scores, what is added to the residual, and the logits.
    "variants/granite-tiny": (transformers.GraniteConfig, transformers.GraniteForCausalLM,
                              {**GROUPED, "embedding_multiplier": 3.0, "attention_multiplier": 0.3,
                               "residual_multiplier": 0.4, "logits_scaling": 0.7}, 20, 89, {}),
    # Norms before and after, biases of q, k and v, of each head the pairs of the first 4 of 8 features turn.
    "variants/glm4-tiny": (transformers.Glm4Config, transformers.Glm4ForCausalLM,
                           {**GROUPED, "head_dim": 8, "attention_bias": True, "pad_token_id": None}, 20, 96, {}),
    # Gate and up packed, one KV head.
    "variants/glm-tiny": (transformers.GlmConfig, transformers.GlmForCausalLM,
                          {**GROUPED, "head_dim": 8, "attention_bias": True, "pad_token_id": None}, 20, 97, {}),
    # Biases everywhere, neighbouring features turn together.
    "variants/ernie4-5-tiny": (transformers.Ernie4_5Config, transformers.Ernie4_5ForCausalLM,
                               {**GROUPED, "head_dim": 8, "use_bias": True, "pad_token_id": 5}, 20, 98, {}),
    # Attention and MLP beside each other: behind one LayerNorm without offset, with a factor of the logits; the same
    # with windows, and layers without rotary positions; behind LayerNorm.
    "variants/cohere-tiny": (transformers.CohereConfig, transformers.CohereForCausalLM,
                             {**GROUPED, "logit_scale": 0.3, "attention_bias": True,
                              "pad_token_id": None}, 20, 99, {}),
    "variants/cohere2-tiny": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM,
                              {**GROUPED, "logit_scale": 0.3, "num_hidden_layers": 3,
                               "sliding_window": 5, "sliding_window_pattern": 2, "pad_token_id": 7}, 20, 100,
                              {"layer_types": None, "sliding_window_pattern": 2}),
    "variants/stablelm-parallel-tiny": (transformers.StableLmConfig, transformers.StableLmForCausalLM,
                                        {**GROUPED, "use_qkv_bias": True,
                                         "use_parallel_residual": True,
                                         "partial_rotary_factor": 0.67}, 20, 101, {}),
    # Attention and MLP behind a LayerNorm each, q, k and v of each head beside each other, 6 of 12 features turn.
    "variants/gpt-neox-tiny": (transformers.GPTNeoXConfig, transformers.GPTNeoXForCausalLM,
                               {**SMALL, "num_attention_heads": 2, "rotary_pct": 0.5, "hidden_dropout": 0.0}, 20, 102,
                               {}),
    # GPT-2's MLP, biases everywhere, a window.
    "variants/starcoder2-tiny": (transformers.Starcoder2Config, transformers.Starcoder2ForCausalLM,
                                 {**GROUPED, "sliding_window": 7}, 20, 88, {}),
}
CASES.update(VARIANTS)

# Models that are trained from their weights: the seed of the batches. No token is so near to another expert that a
# rounding could send it there: the k-th logit of a token and the next one differ by 5e-4 at least.
TRAINED = {"experts/mixtral-tiny": 1, "experts/qwen2moe-tiny": 1}
TRAINING = {"optimizer": "AdamW", "lr": 0.001, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1,
            "decay_all_parameters": True, "steps": 20}
# And those that torch.optim.Muon trains at this rate, its Newton-Schulz made fp32: the seed, what the rate is adjusted by.
MUON_RATE = 0.003
MUON = {"experts/mixtral-tiny": (1, "original"), "phi3-tiny": (2, "match_rms_adamw")}


def lead(name, model):
    """Routers, drawn wide, that lead where the cases say."""
    routers = [p for n, p in model.named_parameters() if n.endswith(("mlp.gate.weight", "mlp.router.weight"))]
    for router in routers:
        router.normal_(0.0, 0.6)
    if name == "experts/qwen3moe-tiny":
        routers[0][2] = (routers[0][0] + routers[0][1]) / 2  # between the two, so never the largest
    if name == "experts/mixtral-padding-tiny":
        for router in routers:
            router[0] = 0.0  # of x, -x and 0 one of the two largest is 0
            router[2] = -router[1]


def columns_apart(path, last, tensor):
    """GPT-OSS's, [E, in, out] or of biases [E, out]; of gate_up_proj gate and up take turns."""
    kind = "bias" if last.endswith("_bias") else "weight"
    parts = {"gate_proj": tensor[..., ::2], "up_proj": tensor[..., 1::2]} if "gate_up" in last else {"down_proj": tensor}
    return {f"{path}.experts.{i}.{part}.{kind}": one.T.contiguous() if kind == "weight" else one.contiguous()
            for part, stacked in parts.items() for i, one in enumerate(stacked)}


def apart(name, tensors):
    """A model's tensors as its files have them: the parameters of each expert by themselves."""
    if CASES[name][0] not in {case[0] for case in EXPERTS.values()}:
        return tensors
    mixtral, interleaved = "mixtral" in name or "minimax" in name, "gpt-oss" in name
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    made = {}
    for key, tensor in tensors.items():
        path, _, last = key.rpartition(".experts.")
        if mixtral and ".mlp." in key:
            path, key = path.replace(".mlp", ".block_sparse_moe"), key.replace(".mlp.", ".block_sparse_moe.")
        if not path:
            made[key] = tensor
            continue
        if interleaved:
            made.update(columns_apart(path, last, tensor))
            continue
        parts = tensor.chunk(2, dim=1) if last == "gate_up_proj" else (tensor,)
        for part, stacked in zip(names[:2] if last == "gate_up_proj" else names[2:], parts, strict=True):
            made.update({f"{path}.experts.{i}.{part}.weight": one for i, one in enumerate(stacked)})
    return made


def draw_labels(ids, vocab):
    """Of no relation to the ids; every row starts with a prompt that is left out, as are some tokens after it."""
    labels = torch.randint(0, vocab, ids.shape)
    for row in range(ids.shape[0]):
        labels[row, :3 + 2 * row] = -100
    labels[0, 7] = labels[1, 9:11] = -100
    return labels


def ends(ids, *lengths):
    """A padding mask [b, s]: the tokens of each row, then padding."""
    return torch.stack([(torch.arange(ids.shape[1]) < n).long() for n in lengths])


def hidden_unless(seen):
    """An additive mask: 0 where a key is seen, else -inf. transformers takes a mask of four dimensions as it is, so it must
    hide the keys that come later as well."""
    causal = torch.ones(seen.shape[-2:], dtype=torch.bool).tril()
    return torch.zeros(seen.shape).masked_fill(~(seen & causal), -math.inf)


def padding(ids, vocab):
    """No labels: what the tokens of the padding predict counts as well, so that gradients depend on the mask."""
    return {"attention_mask": ends(ids, 9, 12)}


def padding_labels(ids, vocab):
    """As in fine-tuning: padding has no label. The mask is seen in the outputs of the padding alone."""
    mask = ends(ids, 13, 8)
    return {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def additive(ids, vocab):
    """One mask for all samples and heads, with holes."""
    seen = torch.rand(1, 1, ids.shape[1], ids.shape[1]) < 0.6
    seen |= torch.eye(ids.shape[1], dtype=torch.bool)  # every query sees a key
    return {"attention_mask": hidden_unless(seen)}


def additive_heads(ids, vocab):
    """Each sample and each of the 4 heads has its own, with numbers for the keys that are seen."""
    size = (BATCH, 4, ids.shape[1], ids.shape[1])
    seen = (torch.rand(size) < 0.7) | torch.eye(ids.shape[1], dtype=torch.bool)
    return {"attention_mask": hidden_unless(seen) + torch.randn(size)}


def labels(ids, vocab):
    return {"labels": draw_labels(ids, vocab)}


def restarting(lengths):
    """Positions of documents that follow each other in a row, and the number of each token's document."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return positions, torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])


def documents(ids, vocab):
    """A mask keeps the documents apart. Learned positions show where each starts; rotary ones would not, whose scores
    depend on differences alone."""
    positions, number = restarting(((6, 5, 3), (4, 10)))
    return {"position_ids": positions,
            "attention_mask": hidden_unless((number[:, :, None] == number[:, None, :])[:, None])}


def documents_seen(ids, vocab):
    """Attention crosses the documents. The mask of ones says so: without a mask transformers takes positions that restart
    for documents and keeps them apart by itself."""
    return {"position_ids": restarting(((5, 9), (3, 7, 4)))[0], "attention_mask": torch.ones_like(ids)}


def positions(ids, vocab):
    """One row of positions for all samples, with a step back and a step of more than one."""
    steps = torch.cat([torch.arange(5), torch.arange(2, 7), torch.arange(11, 15)])
    return {"position_ids": steps[None], "attention_mask": torch.ones_like(ids)}


def flattened(ids, vocab):
    """Without a mask, positions that restart or jump keep documents apart; the ids are the labels, so that the last token of
    each predicts the first of the next."""
    jump = torch.cat([torch.arange(4), torch.arange(6, 10), torch.arange(6)])
    return {"position_ids": torch.stack([restarting(((6, 1, 7),))[0][0], jump])}


def packed_rows(ids, vocab):
    """Documents of each row, the shorter list padded with the row's end; positions and targets are left to them."""
    return {"cu_seqlens": torch.tensor([[0, 5, 6, 11, 14], [0, 8, 14, 14, 14]], dtype=torch.int32)}


def packed_ends(ids, vocab):
    """A row begins and ends with a document of one token, or of two of them."""
    return {"cu_seqlens": torch.tensor([[0, 1, 6, 13, 14], [0, 1, 2, 13, 14]], dtype=torch.int32)}


def packed_flat(ids, vocab):
    """One sequence of all documents with all that DataCollatorWithFlattening gives for it; some labels are left out."""
    lengths = (9, 1, 12, 6)
    labels = draw_labels(torch.cat([ids, ids]), vocab)[:1]
    for first in (0, 9, 10, 22):
        labels[0, first] = -100
    return {"cu_seqlens": torch.tensor([0, 9, 10, 22, 28], dtype=torch.int32), "labels": labels,
            "position_ids": restarting((lengths,))[0]}


def arguments(batch):
    """What a model of transformers is called with. The documents of cu_seqlens become positions, where there are none, a
    block-diagonal mask, and labels that leave out the first token of each: no document predicts the next one's."""
    ids, cu = batch["input_ids"], batch.get("cu_seqlens")
    given = {"labels": ids, **{name: t for name, t in batch.items() if name != "cu_seqlens"}}
    if cu is None:
        return given
    place = torch.arange(ids.shape[1])
    number = torch.stack([torch.searchsorted(row, place.int(), right=True) for row in cu.reshape(len(ids), -1)])
    begins = torch.stack([torch.cat([torch.tensor([True]), row[1:] != row[:-1]]) for row in number])
    first = torch.cummax(torch.where(begins, place, 0), 1).values
    given["attention_mask"] = hidden_unless((number[:, :, None] == number[:, None, :])[:, None])
    given.setdefault("position_ids", place - first)
    given["documents"] = number
    given["labels"] = given["labels"].masked_fill(begins, -100)
    return given


SMALLER = {"vocab_size": 32, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = (LlamaConfig, LlamaForCausalLM,
         {**SMALLER, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "max_position_embeddings": 32, "rope_theta": 100.0})
GPT2 = (GPT2Config, GPT2LMHeadModel,
        {**SMALLER, "n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 4, "n_positions": 16, "attn_pdrop": 0.0,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0})
# name: the model, the seed, what the batch holds beside input_ids. 14 tokens in a row.
BATCHES = {
    "gpt2-padding-tiny": (GPT2, 21, padding),
    "llama-padding-tiny": (LLAMA, 22, padding),
    "llama-padding-labels-tiny": (LLAMA, 23, padding_labels),
    "gpt2-additive-tiny": (GPT2, 24, additive),
    "llama-additive-tiny": (LLAMA, 25, additive_heads),
    "gpt2-labels-tiny": (GPT2, 26, labels),
    "llama-labels-tiny": (LLAMA, 27, labels),
    "gpt2-documents-tiny": (GPT2, 28, documents),
    "llama-documents-tiny": (LLAMA, 29, documents_seen),
    "gpt2-positions-tiny": (GPT2, 30, positions),
    "llama-positions-tiny": (LLAMA, 31, positions),
    "gpt2-flattened-tiny": (GPT2, 37, flattened),
}
# name: the model, the seed, what the batch holds, its rows; with more positions where a row holds all documents.
PACKED = {
    "llama-packed-tiny": (LLAMA, 35, packed_rows, (2, 14)),
    "gpt2-packed-ends-tiny": (GPT2, 37, packed_ends, (2, 14)),
    "gpt2-packed-tiny": ((*GPT2[:2], {**GPT2[2], "n_positions": 32}), 36, packed_flat, (1, 28)),
}
# name: the model, the seed, what the batch holds, label smoothing and the weight of the z-loss.
LOSSES = {
    "llama-smoothing-tiny": (LLAMA, 32, labels, 0.1, 0.0),
    "gpt2-z-loss-tiny": (GPT2, 33, labels, 0.0, 0.02),
    "gpt2-smoothing-z-loss-tiny": (GPT2, 34, padding, 0.25, 0.01),
}
# name: further tokens, and the weight of their losses.
FURTHER = {"experts/deepseek-v3-mtp-tiny": (2, 0.3), "llama-mtp-packed-tiny": (3, 0.6)}
PACKED["llama-mtp-packed-tiny"] = ((*LLAMA[:2], {**LLAMA[2], "tie_word_embeddings": True}), 132, packed_ends, (2, 14))
BATCHES.update({name: case[:3] for name, case in (*LOSSES.items(), *PACKED.items())})
CASES.update({name: (*model, 14, seed, {}) for name, (model, seed, _) in BATCHES.items()})
for packed, keys in (("llama-mtp-packed-tiny", {"num_nextn_predict_layers": 3, "mtp_loss_scaling_factor": 0.6}),):
    CASES[packed] = (*CASES[packed][:-1], keys)

SIZES = {"vocab_size": 32, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
# name: the classes, and all that the file says: sizes, and what the class has no usable value of. Heads keep the
# class's own features in Qwen3 and Gemma; KV heads are given where the class has more than a small model.
DEFAULTS = {
    "llama-defaults-tiny": (LlamaConfig, LlamaForCausalLM, SIZES),
    "mistral-defaults-tiny": (MistralConfig, MistralForCausalLM,
                              {**SIZES, "hidden_size": 32, "num_attention_heads": 16}),  # 8 KV heads
    "qwen2-defaults-tiny": (Qwen2Config, Qwen2ForCausalLM, {**SIZES, "num_key_value_heads": 2}),
    "qwen3-defaults-tiny": (Qwen3Config, Qwen3ForCausalLM,
                            {**SIZES, "hidden_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo2-defaults-tiny": (Olmo2Config, Olmo2ForCausalLM, SIZES),
    "gemma-defaults-tiny": (GemmaConfig, GemmaForCausalLM,
                            {**SIZES, "hidden_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gemma2-defaults-tiny": (Gemma2Config, Gemma2ForCausalLM, {**SIZES, "num_key_value_heads": 2, "head_dim": 8}),
    # Six layers: the last alone has the other theta.
    "gemma3-defaults-tiny": (Gemma3TextConfig, Gemma3ForCausalLM,
                             {**SIZES, "num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 8}),
    # The class pads with an id that a small vocabulary does not have.
    "phi3-defaults-tiny": (Phi3Config, Phi3ForCausalLM, {**SIZES, "pad_token_id": None}),
    "gpt2-defaults-tiny": (GPT2Config, GPT2LMHeadModel,
                           {"vocab_size": 32, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    "experts/mixtral-defaults-tiny": (MixtralConfig, MixtralForCausalLM,
                              {**SIZES, "hidden_size": 16, "num_attention_heads": 8}),  # 8 KV heads, 8 experts
    # 8 KV heads; of fewer experts than the class has, all four go into a token.
    "experts/gpt-oss-defaults-tiny": (GptOssConfig, GptOssForCausalLM,
                              {**SIZES, "intermediate_size": 8, "hidden_size": 16, "num_attention_heads": 8,
                               "head_dim": 4, "num_local_experts": 4}),
}
CASES.update({name: (*case, 12, 62 + i, {}) for i, (name, case) in enumerate(DEFAULTS.items())})


@contextlib.contextmanager
def float_is(dtype):
    """transformers computes norms, rotary angles, softmax and loss in "float32" whatever the model's dtype; in fp64 they
    must not."""
    names = {"float32": torch.float32, "float": torch.float}
    method = torch.Tensor.float
    for name in names:
        setattr(torch, name, dtype)
    torch.Tensor.float = lambda self: self.to(dtype)
    try:
        yield
    finally:
        torch.Tensor.float = method
        for name, was in names.items():
            setattr(torch, name, was)


def bands(config):
    """How many frequencies Llama 3's scaling keeps, blends and divides: a golden case that lacks one proves less."""
    o = getattr(config, "rope_parameters", None)  # GPT-2 has none
    if not o or o.get("rope_type") != "llama3":
        return
    d, n = config.head_dim, o["original_max_position_embeddings"]
    waves = [2 * math.pi * o["rope_theta"] ** (2 * i / d) for i in range(d // 2)]
    kept = sum(w < n / o["high_freq_factor"] for w in waves)
    slowed = sum(w > n / o["low_freq_factor"] for w in waves)
    print("  waves", [round(w) for w in waves], "kept", kept, "blended", len(waves) - kept - slowed, "slowed", slowed)
    assert kept and slowed and kept + slowed < len(waves)


def loss_of(name, out, labels):
    """The model's own loss, or the cross entropy of position s and label s + 1 with what LOSSES adds: PyTorch's label
    smoothing, and PaLM's z-loss, the mean of log(sum of exp(logits))^2 over the same positions."""
    if name not in LOSSES:
        return out.loss
    smoothing, z_loss = LOSSES[name][3:]
    logits, target = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    entropy = torch.nn.functional.cross_entropy(logits, target, label_smoothing=smoothing)
    return entropy + z_loss * logits[target != -100].logsumexp(-1).square().mean()


def routers_loss(name, model, out, mask):
    """ROUTED's losses by their formulas: of each layer with experts, over the tokens that are no padding."""
    balance, weight, z = ROUTED[name]
    k, total = model.config.num_experts_per_tok, 0.0
    rows, length = mask.shape
    for logits in out.router_logits:
        experts = logits.shape[-1]
        p = logits.softmax(-1).view(rows, length, experts)
        chosen = torch.zeros_like(p).scatter(-1, p.topk(k, dim=-1).indices, 1.0) * mask[:, :, None]
        p, lse = p * mask[:, :, None], logits.logsumexp(-1).view(rows, length) * mask
        over = 1 if balance == "sequence" else (0, 1)
        tokens = mask.sum(over).to(p.dtype)
        cost = (chosen.sum(over) * p.sum(over)).sum(-1) * experts / (k * tokens ** 2)
        total = total + weight * cost.mean() + z * lse.square().sum() / mask.sum()
    return total


def names_of(model, named):
    return model.files(named) if isinstance(model, WithFurther) else named


def further(name, model):
    return WithFurther(model, *FURTHER[name]) if name in FURTHER else model


def run(name, model, batch):
    """{"outputs": .., "grads": ..} of one forward and backward pass."""
    given = arguments(batch)
    if not isinstance(model, WithFurther):
        given.pop("documents", None)
    out = model(**given, output_hidden_states=True, **({"output_router_logits": True} if name in ROUTED else {}))
    loss = loss_of(name, out, given["labels"])
    if name in ROUTED:
        mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
        loss = loss - model.config.router_aux_loss_coef * out.aux_loss + routers_loss(name, model, out, mask)
    loss.backward()
    outputs = {"loss": loss.detach().reshape(1), "logits": out.logits.detach()}
    outputs.update({f"hidden_states.{i}": h.detach().contiguous() for i, h in enumerate(out.hidden_states)})
    return {"outputs": outputs, "grads": {n: p.grad for n, p in names_of(model, model.named_parameters())}}


def compute(name):
    config_class, model_class, keys, seq, seed, replaced = CASES[name]
    torch.manual_seed(seed)
    # Wider where heads are narrow, or the gradients of queries and keys would be small differences of large terms.
    config = config_class(**keys, initializer_range=0.3 if name in DEFAULTS else 0.2)
    config._attn_implementation = config._experts_implementation = "eager"
    bands(config)
    model = further(name, model_class(config)).float().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):  # zeros in a fresh model: dropping them would go unnoticed
                wide = parameter_name.endswith("gate_up_proj_bias") and name not in DEFAULTS  # beyond the limits
                parameter.normal_(0.0, 4.0 if wide else 0.3)
            elif parameter_name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
            elif parameter_name.endswith("eh_proj.weight"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in parameter_name or ".ln_" in parameter_name:
                parameter.uniform_(*((-0.5, 0.5) if name.startswith("gemma") else (0.5, 1.5)))
        if name in EXPERTS:
            lead(name, model)
    ids = torch.randint(0, config.vocab_size, PACKED[name][3] if name in PACKED else (BATCH, seq))
    batch = {"input_ids": ids}
    if name in BATCHES:
        batch.update(BATCHES[name][2](ids, config.vocab_size))
    if "padding" in name and name in EXPERTS:
        batch.update(padding_labels(ids, config.vocab_size))
    biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    for bias in biases.values():  # zeros in a fresh model, and not negative
        bias.normal_(0.0, 0.3)
    weights = {n: p.detach() for n, p in names_of(model, (*model.named_parameters(), *biases.items()))}
    computed = run(name, model, batch)
    if name in PACKED or name.startswith(("experts/", "variants/")):
        with float_is(torch.float64):
            wide = further(name, model_class(config)).double().eval()
            wide.load_state_dict(model.state_dict())  # exact: every fp32 number is one of fp64
            computed.update({f"{file}64": tensors for file, tensors in run(name, wide, batch).items()})
    written = json.loads(config.to_json_string(use_diff=False))
    if name in DEFAULTS:
        written = {"model_type": written["model_type"], **keys}
    written["architectures"] = [model_class.__name__]
    for key, value in replaced.items():
        if value is None:
            written.pop(key, None)
        else:
            written[key] = value
    for file, tensors in {"model": weights, **computed}.items():
        computed[file] = apart(name, tensors)
    if "gpt-oss" in name:  # whose files have all experts of a layer together
        computed.update(model=weights, apart=computed["model"])
    return written, {"batch": batch, **computed}, seed


def write(name):
    config, files, seed = compute(name)
    batch, outputs = files["batch"], files["outputs"]
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    for file, tensors in files.items():
        safetensors.torch.save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{file}.safetensors",
                                    metadata={"format": "pt"})
    over = ("the positions whose next label is not -100" if "labels" in batch else
            "all positions but the last of each document" if "cu_seqlens" in batch else "b*(s-1) positions")
    note = f"float32, eager attention, CPU; loss = mean next-token cross entropy over {over}"
    provenance = {"torch": torch.__version__, "transformers": transformers.__version__, "seed": seed,
                  "script": "tests/golden/make_golden.py", "note": note}
    if name in LOSSES:
        provenance.update(zip(("label_smoothing", "z_loss"), LOSSES[name][3:]))
    if name in ROUTED:
        provenance.update(zip(("balance", "balance_weight", "router_z_loss"), ROUTED[name]))
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=1) + "\n")
    # What was written is what Hugging Face reads: the file's own keys must describe the model that was run.
    model = CASES[name][1].from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    model = model.float().eval()
    given = {n: t for n, t in arguments(batch).items() if n != "documents"}
    again = model(**given)
    loss = loss_of(name, again, arguments(batch)["labels"])
    assert name in ROUTED or name in FURTHER or torch.equal(loss.detach(), outputs["loss"][0]), name
    assert torch.equal(again.logits.detach(), outputs["logits"]), name
    print(f"  {name}: loss {outputs['loss'].item():.6f}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def newton_schulz(grad, coefficients, steps, eps, original=torch.optim._muon._zeropower_via_newtonschulz):
    """torch's own text; only the type that it converts to is another."""
    source = inspect.getsource(original).replace("torch.bfloat16", "torch.float32")
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    return scope[original.__name__](grad, coefficients, steps, eps)


def matrices(model):
    """Views of the parameters, each a matrix: q, k, v, gate, up and each expert by themselves."""
    c, views = model.config, []
    for name, p in model.named_parameters():
        if p.ndim < 2 or "embed" in name or "lm_head" in name or name.endswith("mlp.gate.weight"):
            continue
        head = c.hidden_size // c.num_attention_heads
        widths = ((c.hidden_size, c.num_key_value_heads * head, c.num_key_value_heads * head) if "qkv_proj" in name else
                  (p.shape[-2] // 2,) * 2 if "gate_up_proj" in name else (p.shape[-2],))
        for whole in (p,) if p.ndim == 2 else range(p.shape[0]):
            at = 0
            for width in widths:
                rows = slice(at, at + width)
                views.append((p, rows if p.ndim == 2 else (whole, rows)))
                at += width
    return views


class Muon:
    """torch.optim.Muon of the matrices, torch.optim.AdamW of the other parameters."""

    def __init__(self, model, adjust, adamw):
        torch.optim._muon._zeropower_via_newtonschulz = newton_schulz
        self.views = matrices(model)
        self.own = [torch.nn.Parameter(p.detach()[at].clone()) for p, at in self.views]
        inside = {id(p) for p, _ in self.views}
        others = [p for p in model.parameters() if id(p) not in inside]
        self.muon = torch.optim.Muon(self.own, lr=adamw["lr"], weight_decay=TRAINING["weight_decay"],
                                     momentum=0.95, nesterov=True, adjust_lr_fn=adjust)
        self.adamw = torch.optim.AdamW(others, **adamw)
        self.model = model

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        for own, (p, at) in zip(self.own, self.views, strict=True):
            own.grad = p.grad[at].clone()
        self.muon.step()
        self.adamw.step()
        with torch.no_grad():
            for own, (p, at) in zip(self.own, self.views, strict=True):
                p[at] = own


def train(name, muon=False):
    """The batches, in each of which a token is followed by the one five further on, the losses, the last weights."""
    model = CASES[name][1].from_pretrained(HERE / name, attn_implementation="eager", experts_implementation="eager")
    model = model.float().train()
    torch.manual_seed(MUON[name][0] if muon else TRAINED[name])
    vocab = model.config.vocab_size
    ids = (torch.randint(0, vocab, (TRAINING["steps"], BATCH, 1)) + 5 * torch.arange(32)) % vocab
    adamw = {"lr": MUON_RATE if muon else TRAINING["lr"], "betas": tuple(TRAINING["betas"]), "eps": TRAINING["eps"],
             "weight_decay": TRAINING["weight_decay"]}
    optimizer = Muon(model, MUON[name][1], adamw) if muon else torch.optim.AdamW(model.parameters(), **adamw)
    losses = []
    for batch in ids:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return ids, losses, apart(name, {n: p.detach() for n, p in model.named_parameters()})


def write_training(name, muon=False):
    ids, losses, weights = train(name, muon)
    folder, meta, first = HERE / name, {"format": "pt"}, "muon" if muon else "train"
    said = {**TRAINING, "losses": losses}
    if muon:
        said.update(optimizer="Muon", lr=MUON_RATE, momentum=0.95, adjust_lr_fn=MUON[name][1])
    (folder / f"{first}.json").write_text(json.dumps(said, indent=1) + "\n")
    safetensors.torch.save_file({"input_ids": ids}, folder / f"{first}_batches.safetensors", metadata=meta)
    safetensors.torch.save_file({n: t.contiguous() for n, t in weights.items()}, folder / f"{first}_final.safetensors",
                                metadata=meta)
    print(f"  {name}: trained from {losses[0]:.6f} to {losses[-1]:.6f}")


def check_training(name, muon=False):
    _, losses, weights = train(name, muon)
    first = "muon" if muon else "train"
    said = json.loads((HERE / name / f"{first}.json").read_text())["losses"]
    stored = safetensors.torch.load_file(HERE / name / f"{first}_final.safetensors")
    assert stored.keys() == weights.keys()
    worst = max((stored[n] - t).abs().max().item() for n, t in weights.items())
    print(f"  {name}: trained weights differ by {worst:.2e}")
    assert worst < TRAINING["lr"] / 20 and max(abs(a - b) for a, b in zip(said, losses, strict=True)) < 1e-5


def check(name):
    _, files, _ = compute(name)
    worst = 0.0
    for file, tensors in files.items():
        if not file.startswith(("outputs", "grads")):
            continue
        stored = safetensors.torch.load_file(HERE / name / f"{file}.safetensors")
        assert stored.keys() == tensors.keys()
        for n, t in tensors.items():
            worst = max(worst, ((stored[n] - t).abs().max() / stored[n].abs().max()).item())
    print(f"  {name}: worst difference {worst:.2e} of the largest element of a tensor")
    assert worst < 1e-5


def defaults():
    """Of each class what a file may say, and what it then means: (keys, all that transformers makes of them)."""
    large = {"hidden_size": 4096, "num_hidden_layers": 13, "num_attention_heads": 64}
    said = [(case[0], large) for case in DEFAULTS.values()]
    slides = {**large, "num_hidden_layers": 30, "use_sliding_window": True}
    said += [(kind, slides) for kind in (Qwen2Config, Qwen3Config, Qwen2MoeConfig, Qwen3MoeConfig)]
    said += [(kind, large) for kind in (Qwen2MoeConfig, Qwen3MoeConfig, OlmoeConfig)]
    said.append((Phi3Config, {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                              "max_position_embeddings": 8192,
                              "rope_parameters": {key: value for key, value in LONGROPE.items() if "_factor" in key or
                                                  key == "rope_type"}}))
    needed = ("vocab_size", "intermediate_size", "n_embd", "n_layer", "n_head", "n_positions")
    made = []
    for config_class, keys in said:
        keys = {key: value for key, value in keys.items() if key not in config_class.attribute_map}
        full = json.loads(config_class(**copy.deepcopy(keys)).to_json_string(use_diff=False))
        keys.update({key: full[key] for key in ("model_type", *needed) if key in full})
        made.append({"stated": keys, "full": full})
    return made


def write_defaults():
    said = {"transformers": transformers.__version__, "script": "tests/golden/make_golden.py", "configs": defaults()}
    (HERE / "defaults.json").write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")


def check_defaults():
    said = json.loads((HERE / "defaults.json").read_text())["configs"]
    for stored, now in zip(said, defaults(), strict=True):
        for config in (stored["full"], now["full"]):
            config.pop("transformers_version")
        assert stored == now, stored["stated"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--check", action="store_true", help="compare with the files that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for name in options.names or CASES:
        (check if options.check else write)(name)
        if name in TRAINED:
            (check_training if options.check else write_training)(name)
        if name in MUON:
            (check_training if options.check else write_training)(name, True)
    if not options.names:
        (check_defaults if options.check else write_defaults)()


if __name__ == "__main__":
    main()
