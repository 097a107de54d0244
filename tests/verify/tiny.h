/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations so small that a check of one takes milliseconds. Heads and widths divide by 1, 2, 3, 4, 6 and 12; the
 * vocabulary of 257 by none of them; the heads' features are not the hidden size; queries share KV heads. */
#ifndef TESTS_VERIFY_TINY_H
#define TESTS_VERIFY_TINY_H

#define LLAMA(vocab, hidden, ffn, layers, heads, kv, d, tied)                                                 \
    "{\"model_type\": \"llama\", \"vocab_size\": " #vocab ", \"hidden_size\": " #hidden                       \
    ", \"intermediate_size\": " #ffn ", \"num_hidden_layers\": " #layers ", \"num_attention_heads\": " #heads \
    ", \"num_key_value_heads\": " #kv ", \"head_dim\": " #d                                                   \
    ", \"hidden_act\": \"silu\", \"max_position_embeddings\": 128, \"rms_norm_eps\": 1e-5, "                  \
    "\"rope_theta\": 10000.0, \"tie_word_embeddings\": " #tied ", \"initializer_range\": 0.2}"

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

#endif
