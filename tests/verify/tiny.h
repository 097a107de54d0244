/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations so small that a check of one takes milliseconds. Heads and widths divide by 1, 2, 3, 4, 6 and 12; the
 * vocabulary of 257 by none of them; the heads' features are not the hidden size; queries share KV heads. */
#pragma once

#define LLAMA(vocab, hidden, ffn, layers, heads, kv, d, tied)                                                 \
    "{\"model_type\": \"llama\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                       \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads \
    ", \"num_key_value_heads\": " #kv ", \"head_dim\": " #d                                                   \
    ", \"hidden_act\": \"silu\", \"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-5, "                  \
    "\"rope_theta\": 10000.0, \"tie_word_embeddings\": " #tied ", \"initializer_range\": 0.2}"

/* Sinks, biases, windows in every second layer (GPT-OSS). */
#define OPEN(vocab, hidden, ffn, layers, heads, kv, n, k)                                                              \
    "{\"model_type\": \"gpt_oss\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                              \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads          \
    ", \"num_key_value_heads\": " #kv ", \"head_dim\": 8, \"num_local_experts\": " #n ", \"num_experts_per_tok\": " #k \
    ", \"sliding_window\": 7, \"max_position_embeddings\": 128, "                                                      \
    "\"rope_scaling\": {\"rope_type\": \"default\"}, \"initializer_range\": 0.2}"

/* Two further tokens. */
#define FURTHER(vocab, hidden, ffn, layers, heads, kv, d)                                                     \
    "{\"model_type\": \"llama\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                       \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads \
    ", \"num_key_value_heads\": " #kv ", \"head_dim\": " #d                                                   \
    ", \"num_nextn_predict_layers\": 2, \"mtp_loss_scaling_factor\": 0.5, \"initializer_range\": 0.2}"

/* n experts of `ffn`, k for each token. */
#define WITH_EXPERTS(type, vocab, hidden, layers, heads, kv, ...)                                              \
    "{\"model_type\": \"" type "\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                     \
    ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads ", \"num_key_value_heads\": " #kv \
    ", \"max_position_embeddings\": 128, \"tie_word_embeddings\": false, \"initializer_range\": 0.2, " __VA_ARGS__ "}"
#define MIXTRAL(vocab, hidden, ffn, layers, heads, kv, n, k)                                             \
    WITH_EXPERTS("mixtral", vocab, hidden, layers, heads, kv,                                            \
                 "\"sliding_window\": null, \"intermediate_size\": " #ffn ", \"num_local_experts\": " #n \
                 ", \"num_experts_per_tok\": " #k)
/* And a shared expert of 60. The second layer has an MLP of 48. */
#define QWEN2_MOE(vocab, hidden, ffn, layers, heads, kv, n, k)                                          \
    WITH_EXPERTS("qwen2_moe", vocab, hidden, layers, heads, kv,                                         \
                 "\"intermediate_size\": 48, \"moe_intermediate_size\": " #ffn ", \"num_experts\": " #n \
                 ", \"num_experts_per_tok\": " #k                                                       \
                 ", \"shared_expert_intermediate_size\": 60, \"mlp_only_layers\": [1]")

/* A shared expert, and weights that are not normalised. */
#define QWEN_MOE(vocab, hidden, ffn, shared, layers, heads, kv, n, k)                                         \
    WITH_EXPERTS("qwen2_moe", vocab, hidden, layers, heads, kv,                                               \
                 "\"intermediate_size\": " #ffn ", \"moe_intermediate_size\": " #ffn ", \"num_experts\": " #n \
                 ", \"num_experts_per_tok\": " #k ", \"shared_expert_intermediate_size\": " #shared)

/* A router of sigmoids: a bias of the choice, groups of which half stay, a factor of 2.5; a shared expert without a gate. */
#define GLM_MOE(vocab, hidden, ffn, layers, heads, kv, n, k, groups, kept)                                          \
    WITH_EXPERTS("glm4_moe", vocab, hidden, layers, heads, kv,                                                      \
                 "\"intermediate_size\": " #ffn ", \"moe_intermediate_size\": " #ffn ", \"n_routed_experts\": " #n  \
                 ", \"num_experts_per_tok\": " #k ", \"n_shared_experts\": 1, \"n_group\": " #groups                \
                 ", \"topk_group\": " #kept ", \"norm_topk_prob\": true, \"routed_scaling_factor\": 2.5, "          \
                 "\"first_k_dense_replace\": 0, \"use_qk_norm\": true, \"attention_bias\": false, \"hidden_act\": " \
                 "\"silu\", \"rms_norm_eps\": 1e-5, \"rope_theta\": 10000.0, \"partial_rotary_factor\": 0.5")

/* Latent attention, queries without a rank. */
#define DEEPSEEK(vocab, hidden, ffn, layers, heads, rank, n, k)                                                   \
    WITH_EXPERTS(                                                                                                 \
        "deepseek_v3", vocab, hidden, layers, heads, heads,                                                       \
        "\"intermediate_size\": " #ffn ", \"moe_intermediate_size\": " #ffn ", \"n_routed_experts\": " #n         \
        ", \"num_experts_per_tok\": " #k ", \"n_shared_experts\": 1, \"n_group\": 2, \"topk_group\": 2, "         \
        "\"norm_topk_prob\": true, \"first_k_dense_replace\": 0, \"q_lora_rank\": null, \"kv_lora_rank\": " #rank \
        ", \"qk_nope_head_dim\": 8, \"qk_rope_head_dim\": 4, \"v_head_dim\": 8, \"rms_norm_eps\": 1e-6")

#define GPT2(vocab, hidden, inner, layers, heads)                                                          \
    "{\"model_type\": \"gpt2\", \"vocab_size\": " #vocab ", \"n_embd\": " #hidden ", \"n_inner\": " #inner \
    ", \"n_layer\": " #layers ", \"n_head\": " #heads                                                      \
    ", \"n_positions\": 128, \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-5, "        \
    "\"initializer_range\": 0.2}"

#define STACK(vocab, hidden, ffn, layers, heads, kv)                                                                  \
    "{\"model_type\": \"anyrank-stack\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                       \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads         \
    ", \"num_key_value_heads\": " #kv                                                                                 \
    ", \"hidden_act\": \"gelu_tanh\", \"layer_norm_eps\": 1e-5, \"max_position_embeddings\": 128, \"causal\": true, " \
    "\"initializer_range\": 0.2}"

static const char *const tiny_models[] = {LLAMA(257, 48, 72, 2, 24, 12, 4, false), GPT2(257, 48, 96, 2, 12),
                                          STACK(257, 48, 84, 2, 24, 12), LLAMA(257, 36, 60, 1, 12, 12, 6, true)};
static const char *const tiny_names[] = {"llama", "gpt2", "stack", "tied llama"};
enum { TINY_LLAMA, TINY_GPT2, TINY_STACK, TINY_TIED, TINY_MODELS };
