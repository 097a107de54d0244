/* SPDX-License-Identifier: Apache-2.0 */
/* How many parameters a config has, against numbers worked out elsewhere. */
#include "anyrank/model.h"
#include "support/together.h"

static size_t count(const char *json)
{
    ar_config c;
    size_t n = 0;
    cr_assert_ok(ar_config_parse(&c, json, strlen(json), "model"));
    cr_assert_ok(ar_config_parameters(&c, &n));
    return n;
}

CLAIM(published_models_have_their_published_size)
{
    /* Llama-3-8B and the smallest GPT-2 (124 million, its head tied) */
    cr_expect_eq(count("{\"model_type\": \"llama\", \"vocab_size\": 128256, \"hidden_size\": 4096, "
                       "\"intermediate_size\": 14336, \"num_hidden_layers\": 32, \"num_attention_heads\": 32, "
                       "\"num_key_value_heads\": 8, \"tie_word_embeddings\": false}"),
                 8030261248u);
    cr_expect_eq(count("{\"model_type\": \"gpt2\", \"vocab_size\": 50257, \"n_embd\": 768, \"n_layer\": 12, "
                       "\"n_head\": 12, \"n_positions\": 1024}"),
                 124439808u);
}

CLAIM(a_tied_head_is_counted_once)
{
    static const char format[] = "{\"model_type\": \"llama\", \"vocab_size\": 100, \"hidden_size\": 8, "
                                 "\"intermediate_size\": 12, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, "
                                 "\"num_key_value_heads\": 1, \"tie_word_embeddings\": %s}";
    char tied[400], untied[400];
    snprintf(tied, sizeof tied, format, "true");
    snprintf(untied, sizeof untied, format, "false");
    /* q, o 8x8; k, v 4x8; gate, up, down 12x8; three norms of 8 */
    cr_expect_eq(count(tied), 800u + 2 * 64 + 2 * 32 + 3 * 96 + 3 * 8);
    cr_expect_eq(count(untied) - count(tied), 800u);
}

CLAIM(a_sum_that_overflows_is_refused)
{
    ar_config c = {.arch = AR_ARCH_STACK,
                   .vocab = SIZE_MAX / 4,
                   .hidden = 8,
                   .layers = 1,
                   .heads = 1,
                   .kv_heads = 1,
                   .head_dim = 8,
                   .ffn = 8};
    size_t n = 0;
    cr_expect_eq(ar_config_parameters(&c, &n), AR_ERR_OVERFLOW, "%s", ar_error_message());
}

EVERY_CLAIM(parameters)
