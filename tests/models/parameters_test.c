/* SPDX-License-Identifier: Apache-2.0 */
/* How many parameters a config has, against numbers worked out elsewhere. */
#include "anyrank/config.h"
#include "anyrank/run.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "ref/models/plan_private.h"
#include "support/together.h"
#include "verify/lint/lint_private.h"

static size_t count(const char *json)
{
    ar_config c;
    size_t n = 0;
    cr_assert_ok(ar_config_parse(&c, json, strlen(json), "model"));
    cr_assert_ok(ari_config_parameters(&c, &n));
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
    cr_expect_eq(ari_config_parameters(&c, &n), AR_ERR_OVERFLOW, "%s", ar_error_message());
}

/* Every function that takes a config of the caller's own; a plan reads no sizes. */
static void expect_arch_refused(const ar_config *c, const char *words)
{
    ar_plan plan = {0};
    ar_block_split split;
    ar_outer_split outer;
    ar_block_options options;
    char name[64];
    cr_expect_refused(ari_config_block(c, 0, &options, name, sizeof name), AR_ERR_ARG, words);
    cr_expect_refused(ari_plan_block(&plan, c, 0, false, &split), AR_ERR_ARG, words);
    cr_expect_refused(ari_plan_outer(&plan, c, false, &outer), AR_ERR_ARG, words);
    cr_expect_refused(ari_plan_check(&plan, c, false), AR_ERR_ARG, words);
    cr_expect_refused(ari_plan_check_declared(&plan, c, false), AR_ERR_ARG, words);
}

static void expect_config_refused(const ar_config *c, const char *words)
{
    const ar_run run = {.batch = 1, .seq = 1};
    ar_plan plan = {0};
    ar_lint_report *report = NULL;
    size_t n = 0;
    cr_expect_refused(ari_config_parameters(c, &n), AR_ERR_ARG, words);
    cr_expect_refused(ari_config_check_ranks(c, 2, &plan), AR_ERR_ARG, words);
    cr_expect_refused(ari_parallel_check(&run.parallel, c, &plan, 1, 1), AR_ERR_ARG, words);
    cr_expect_refused(ar_run_check(&run, c), AR_ERR_ARG, words);
    cr_expect_refused(ari_lint(&report, &run, c), AR_ERR_ARG, words);
}

CLAIM(a_config_of_the_callers_own_is_read_with_care)
{
    static const char json[] = "{\"model_type\": \"llama\", \"vocab_size\": 100, \"hidden_size\": 8, "
                               "\"intermediate_size\": 12, \"num_hidden_layers\": 1, \"num_attention_heads\": 2}";
    ar_config good, c;
    ar_plan plan = {0};
    cr_assert_ok(ar_config_parse(&good, json, sizeof json - 1, "model"));
    c = good;
    c.arch = (ar_arch)99;
    expect_config_refused(&c, "config: arch 99, expected 0 to 14");
    expect_arch_refused(&c, "config: arch 99, expected 0 to 14");
    cr_expect_refused(ari_plan_default(&plan, c.arch), AR_ERR_ARG, "config: arch 99, expected 0 to 14");
    cr_expect_refused(ar_plan_add(&plan, c.arch, "*", AR_STYLE_COLWISE), AR_ERR_ARG,
                      "config: arch 99, expected 0 to 14");
    cr_expect_refused(ari_plan_add_mlp_order(&plan, c.arch, AR_MLP_ROW_COLUMN), AR_ERR_ARG,
                      "config: arch 99, expected 0 to 14");
    c = good;
    c.activation = (ar_activation)-1;
    expect_config_refused(&c, "config: activation -1, expected 0 to 5");
    c = good;
    c.kv_heads = 0;
    expect_config_refused(&c, "config: kv_heads is 0, expected at least 1");
    cr_expect_refused(ari_config_check_inner(&good, 0, 2, &plan), AR_ERR_ARG, "tp=0 is not a number of ranks");
    c.kv_heads = 3;
    expect_config_refused(&c, "config: kv_heads is 3, expected a divisor of the 2 heads");
}

EVERY_CLAIM(parameters)
