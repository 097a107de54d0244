/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>

#include "anyrank/config.h"
#include "support/together.h"

#define LLAMA                                                                                    \
    "{\"model_type\":\"llama\",\"vocab_size\":256,\"hidden_size\":64,\"intermediate_size\":176," \
    "\"num_hidden_layers\":2,\"num_attention_heads\":8}"
#define GPT2 "{\"model_type\":\"gpt2\",\"vocab_size\":256,\"n_embd\":64,\"n_layer\":2,\"n_head\":4,\"n_positions\":128}"
#define STACK                                                                                            \
    "{\"model_type\":\"anyrank-stack\",\"vocab_size\":256,\"hidden_size\":64,\"intermediate_size\":176," \
    "\"num_hidden_layers\":2,\"num_attention_heads\":8}"

/* `base` with `key` set to the JSON `value`, or removed where that is NULL. */
static ar_status parse_with(ar_config *c, const char *base, const char *key, const char *value)
{
    json_t *o = json_loads(base, 0, NULL);
    cr_assert_not_null(o);
    if (value == NULL)
        json_object_del(o, key);
    else
        cr_assert_eq(json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL)), 0, "%s", value);
    OWNED(free) char *text = json_dumps(o, 0);
    ar_error_clear();
    const ar_status st = ar_config_parse(c, text, strlen(text), "x/config.json");
    json_decref(o);
    return st;
}

static ar_config parse(const char *text)
{
    ar_config c;
    cr_assert_ok(ar_config_parse(&c, text, strlen(text), "x"));
    return c;
}

CLAIM(golden_llama_is_read)
{
    ar_config c;
    cr_assert_ok(ar_config_load(&c, TEST_GOLDEN_DIR "/llama-gqa-tiny"));
    cr_expect_str_eq(c.name, "llama-gqa-tiny");
    cr_expect(c.arch == AR_ARCH_LLAMA && c.norm == AR_NORM_RMS && c.activation == AR_ACT_SILU && c.gated);
    cr_expect(c.vocab == 256 && c.hidden == 64 && c.layers == 2 && c.heads == 8 && c.kv_heads == 2);
    cr_expect(c.head_dim == 8 && c.ffn == 176 && c.max_positions == 128);
    cr_expect(c.rope.kind == AR_ROPE_DEFAULT && c.rope.theta == 10000 && !c.learned_positions);
    cr_expect(c.norm_eps == 1e-5 && c.initializer_range == 0.02 && c.config_dropout == 0);
    cr_expect(c.final_norm && c.causal && !c.tied && !c.qkv_bias && !c.out_bias && !c.mlp_bias);
    cr_assert_ok(ar_config_load(&c, TEST_GOLDEN_DIR "/llama-mqa-tied-tiny/config.json"));
    cr_expect_str_eq(c.name, "llama-mqa-tied-tiny");
    cr_expect(c.tied && c.hidden == 48 && c.heads == 4 && c.kv_heads == 1 && c.head_dim == 12 && c.norm_eps == 1e-6);
}

CLAIM(golden_gpt2_is_read)
{
    ar_config c;
    cr_assert_ok(ar_config_load(&c, TEST_GOLDEN_DIR "/gpt2-tiny/"));
    cr_expect_str_eq(c.name, "gpt2-tiny");
    cr_expect(c.arch == AR_ARCH_GPT2 && c.norm == AR_NORM_LAYER && c.activation == AR_ACT_GELU_TANH && !c.gated);
    cr_expect(c.vocab == 256 && c.hidden == 64 && c.layers == 2 && c.heads == 4 && c.kv_heads == 4);
    cr_expect(c.head_dim == 16 && c.ffn == 256 && c.max_positions == 64); /* n_inner null: 4*D */
    cr_expect(!c.rope.kind && c.learned_positions && c.final_norm && c.tied && c.causal);
    cr_expect(c.qkv_bias && c.out_bias && c.mlp_bias && c.norm_eps == 1e-5);
    cr_expect_eq(c.config_dropout, 0); /* summary_first_dropout belongs to another head */
}

CLAIM(bundled_models_are_the_documented_ones)
{
    ar_config c;
    cr_assert_ok(ar_config_load(&c, TEST_DATA_DIR "/llama-demo"));
    cr_expect_str_eq(c.name, "llama-demo");
    cr_expect(c.vocab == 256 && c.hidden == 256 && c.layers == 4 && c.heads == 8 && c.kv_heads == 2 && c.ffn == 688);
    cr_expect(c.head_dim == 32 && c.max_positions == 2048 && c.rope.theta == 10000 && !c.tied && c.gated);
    cr_assert_ok(ar_config_load(&c, TEST_DATA_DIR "/gpt2-demo"));
    cr_expect(c.vocab == 256 && c.hidden == 192 && c.layers == 4 && c.heads == 12 && c.ffn == 768);
    cr_expect(c.max_positions == 1024 && c.tied && c.config_dropout == 0);
    cr_assert_ok(ar_config_load(&c, TEST_DATA_DIR "/stack-demo"));
    cr_expect(c.vocab == 256 && c.hidden == 128 && c.layers == 2 && c.heads == 8 && c.kv_heads == 4 && c.ffn == 344);
    cr_expect(c.arch == AR_ARCH_STACK && !c.rope.kind && !c.learned_positions && !c.final_norm && c.causal && !c.tied);
    cr_expect(c.mlp_bias && !c.qkv_bias && !c.out_bias && c.activation == AR_ACT_GELU_TANH && c.norm == AR_NORM_LAYER);
}

CLAIM(what_may_be_left_out_has_its_default)
{
    ar_config c = parse(LLAMA);
    cr_expect(c.kv_heads == 8 && c.head_dim == 8 && c.max_positions == 2048 && c.activation == AR_ACT_SILU);
    cr_expect(c.norm_eps == 1e-6 && c.rope.kind == AR_ROPE_DEFAULT && c.rope.theta == 10000 && !c.tied && !c.mlp_bias);
    c = parse(GPT2);
    cr_expect(c.ffn == 256 && c.activation == AR_ACT_GELU_TANH && c.norm_eps == 1e-5 && c.tied);
    c = parse(STACK);
    cr_expect(c.kv_heads == 8 && c.max_positions == 4096 && c.activation == AR_ACT_GELU_TANH && c.norm_eps == 1e-5);
    cr_expect(c.causal && c.initializer_range == 0.02);
}

CLAIM(rotary_positions_are_read_from_either_form)
{
    static const struct {
        const char *key, *value;
        double theta, factor;
    } cases[] = {{"rope_theta", "500000", 500000, 1},
                 {"rope_scaling", "null", 10000, 1},
                 {"rope_scaling", "{\"type\":\"linear\",\"factor\":2.5}", 10000, 2.5},
                 {"rope_scaling", "{\"rope_type\":\"linear\",\"type\":\"linear\",\"factor\":4}", 10000, 4},
                 {"rope_scaling", "{\"rope_type\":\"default\"}", 10000, 1},
                 {"rope_parameters", "{\"rope_theta\":1e6,\"rope_type\":\"default\"}", 1e6, 1},
                 {"rope_parameters", "{\"rope_theta\":1e6}", 1e6, 1},
                 {"rope_parameters", "{\"rope_type\":\"linear\",\"factor\":8.0,\"rope_theta\":20000}", 20000, 8},
                 {"rope_parameters", "{\"partial_rotary_factor\":1.0}", 10000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ar_config c;
        cr_expect_ok(parse_with(&c, LLAMA, cases[i].key, cases[i].value));
        cr_expect_eq(c.rope.kind, cases[i].factor > 1 ? AR_ROPE_LINEAR : AR_ROPE_DEFAULT, "%s", cases[i].value);
        cr_expect(c.rope.theta == cases[i].theta, "%s", cases[i].value);
        cr_expect(c.rope.kind == AR_ROPE_DEFAULT || c.rope.factor == cases[i].factor, "%s", cases[i].value);
    }
}

typedef struct set_case {
    const char *base, *key, *value; /* value NULL: removed */
} set_case;

CLAIM(harmless_and_neutral_keys_are_accepted)
{
    static const set_case cases[] = {{LLAMA, "architectures", "null"},
                                     {LLAMA, "torch_dtype", "\"bfloat16\""},
                                     {LLAMA, "no_such_key", "{\"a\":[1]}"},
                                     {LLAMA, "sliding_window", "null"},
                                     {LLAMA, "use_sliding_window", "false"},
                                     {LLAMA, "pretraining_tp", "1"},
                                     {LLAMA, "quantization_config", "null"},
                                     {LLAMA, "layer_types", "[\"full_attention\",\"full_attention\"]"},
                                     {LLAMA, "num_experts", "0"},
                                     {LLAMA, "head_dim", "null"},
                                     {LLAMA, "head_dim", "10"},
                                     {LLAMA, "num_key_value_heads", "null"},
                                     {LLAMA, "num_key_value_heads", "1"},
                                     {LLAMA, "hidden_act", "\"gelu\""},
                                     {LLAMA, "rms_norm_eps", "0"},
                                     {LLAMA, "vocab_size", "2147483648"},
                                     {GPT2, "reorder_and_upcast_attn", "true"},
                                     {GPT2, "tie_word_embeddings", "false"},
                                     {GPT2, "n_inner", "100"},
                                     {GPT2, "add_cross_attention", "false"},
                                     {GPT2, "activation_function", "\"gelu_pytorch_tanh\""},
                                     {STACK, "causal", "false"},
                                     {STACK, "head_dim", "8"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ar_config c;
        cr_expect_eq(parse_with(&c, cases[i].base, cases[i].key, cases[i].value), AR_OK, "%s %s: %s", cases[i].key,
                     cases[i].value, ar_error_message());
    }
}

CLAIM(biases_and_activations_follow_their_keys)
{
    ar_config c;
    cr_assert_ok(parse_with(&c, LLAMA, "attention_bias", "true"));
    cr_expect(c.qkv_bias && c.out_bias && !c.mlp_bias);
    cr_assert_ok(parse_with(&c, LLAMA, "mlp_bias", "true"));
    cr_expect(!c.qkv_bias && !c.out_bias && c.mlp_bias);
    cr_assert_ok(parse_with(&c, LLAMA, "hidden_act", "\"gelu\""));
    cr_expect_eq(c.activation, AR_ACT_GELU_ERF);
    cr_assert_ok(parse_with(&c, LLAMA, "hidden_act", "\"swish\""));
    cr_expect_eq(c.activation, AR_ACT_SILU);
    cr_assert_ok(parse_with(&c, GPT2, "activation_function", "\"relu\""));
    cr_expect_eq(c.activation, AR_ACT_RELU);
    cr_assert_ok(parse_with(&c, GPT2, "tie_word_embeddings", "false"));
    cr_expect_not(c.tied);
    cr_assert_ok(parse_with(&c, STACK, "causal", "false"));
    cr_expect_not(c.causal);
}

CLAIM(the_largest_dropout_is_kept_for_the_note)
{
    ar_config c;
    cr_assert_ok(parse_with(&c, GPT2, "resid_pdrop", "0.1"));
    cr_expect_eq(c.config_dropout, 0.1);
    cr_assert_ok(parse_with(&c, LLAMA, "attention_dropout", "0.25"));
    cr_expect_eq(c.config_dropout, 0.25);
}

/* Whatever is refused says which key; the config stays as it was. */
static void refuse_all(const set_case *cases, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        ar_config c, before;
        memset(&c, 0x5a, sizeof c);
        memset(&before, 0x5a, sizeof before);
        char quoted[64];
        snprintf(quoted, sizeof quoted, "'%s'", cases[i].key);
        const char *value = cases[i].value == NULL ? "(none)" : cases[i].value;
        cr_expect_eq(parse_with(&c, cases[i].base, cases[i].key, cases[i].value), AR_ERR_CONFIG, "%s = %s",
                     cases[i].key, value);
        cr_expect_says(quoted);
        cr_expect_says("x/config.json");
        cr_expect_eq(memcmp(&c, &before, sizeof c), 0, "%s = %s wrote", cases[i].key, value);
    }
}

CLAIM(missing_keys_are_named)
{
    static const set_case cases[] = {{LLAMA, "model_type", NULL},
                                     {LLAMA, "vocab_size", NULL},
                                     {LLAMA, "hidden_size", NULL},
                                     {LLAMA, "intermediate_size", NULL},
                                     {LLAMA, "num_hidden_layers", NULL},
                                     {LLAMA, "num_attention_heads", NULL},
                                     {LLAMA, "hidden_size", "null"},
                                     {GPT2, "vocab_size", NULL},
                                     {GPT2, "n_embd", NULL},
                                     {GPT2, "n_layer", NULL},
                                     {GPT2, "n_head", NULL},
                                     {GPT2, "n_positions", NULL},
                                     {STACK, "vocab_size", NULL},
                                     {STACK, "hidden_size", NULL},
                                     {STACK, "intermediate_size", NULL},
                                     {STACK, "num_hidden_layers", NULL},
                                     {STACK, "num_attention_heads", NULL},
                                     {STACK, "model_type", "null"}};
    refuse_all(cases, sizeof cases / sizeof cases[0]);
}

CLAIM(ill_typed_and_absurd_values_are_named)
{
    static const set_case cases[] = {
        {LLAMA, "vocab_size", "\"256\""},
        {LLAMA, "vocab_size", "0"},
        {LLAMA, "vocab_size", "-256"},
        {LLAMA, "vocab_size", "2147483649"},
        {LLAMA, "vocab_size", "9223372036854775807"},
        {LLAMA, "hidden_size", "64.0"},
        {LLAMA, "hidden_size", "true"},
        {LLAMA, "hidden_size", "[64]"},
        {LLAMA, "hidden_size", "0"},
        {LLAMA, "hidden_size", "63"},
        {LLAMA, "num_hidden_layers", "0"},
        {LLAMA, "num_hidden_layers", "{}"},
        {LLAMA, "num_attention_heads", "0"},
        {LLAMA, "intermediate_size", "0"},
        {LLAMA, "num_key_value_heads", "0"},
        {LLAMA, "num_key_value_heads", "3"},
        {LLAMA, "num_key_value_heads", "16"},
        {LLAMA, "head_dim", "0"},
        {LLAMA, "head_dim", "7"},
        {LLAMA, "head_dim", "\"8\""},
        {LLAMA, "max_position_embeddings", "0"},
        {LLAMA, "max_position_embeddings", "1e9"},
        {LLAMA, "rms_norm_eps", "\"1e-5\""},
        {LLAMA, "rope_theta", "0"},
        {LLAMA, "rope_theta", "-1"},
        {LLAMA, "rope_theta", "false"},
        {LLAMA, "attention_bias", "1"},
        {LLAMA, "mlp_bias", "\"true\""},
        {LLAMA, "tie_word_embeddings", "0"},
        {LLAMA, "initializer_range", "-0.02"},
        {LLAMA, "hidden_act", "\"gelu_fast\""},
        {LLAMA, "hidden_act", "3"},
        {LLAMA, "attention_dropout", "1.5"},
        {LLAMA, "attention_dropout", "-0.1"},
        {LLAMA, "attention_dropout", "\"0\""},
        {GPT2, "n_embd", "63"},
        {GPT2, "n_inner", "0"},
        {GPT2, "n_head", "128"},
        {GPT2, "activation_function", "\"tanh\""},
        {STACK, "hidden_size", "65"},
        {STACK, "num_key_value_heads", "5"},
        {STACK, "head_dim", "16"},
        {STACK, "causal", "\"no\""},
    };
    refuse_all(cases, sizeof cases / sizeof cases[0]);
    ar_config c;
    cr_expect_refused(parse_with(&c, LLAMA, "rms_norm_eps", "-1e-5"), AR_ERR_CONFIG, "eps");
}

CLAIM(keys_that_change_the_mathematics_are_refused)
{
    static const set_case cases[] = {
        {LLAMA, "sliding_window", "4096"},
        {LLAMA, "partial_rotary_factor", "0.5"},
        {LLAMA, "quantization_config", "{\"bits\":4}"},
        {LLAMA, "pretraining_tp", "2"},
        {LLAMA, "attn_logit_softcapping", "50.0"},
        {LLAMA, "final_logit_softcapping", "30"},
        {LLAMA, "query_pre_attn_scalar", "224"},
        {LLAMA, "logit_scale", "0.0625"},
        {LLAMA, "embedding_multiplier", "12"},
        {LLAMA, "layer_types", "[\"full_attention\",\"sliding_attention\"]"},
        {LLAMA, "layer_types", "\"full_attention\""},
        {LLAMA, "num_local_experts", "8"},
        {LLAMA, "use_qk_norm", "true"},
        {LLAMA, "pruned_heads", "{\"0\":[1]}"},
        {LLAMA, "is_encoder_decoder", "true"},
        {GPT2, "add_cross_attention", "true"},
        {GPT2, "scale_attn_weights", "false"},
        {GPT2, "scale_attn_by_inverse_layer_idx", "true"},
    };
    refuse_all(cases, sizeof cases / sizeof cases[0]);
}

CLAIM(unsupported_rotary_positions_are_refused)
{
    static const struct {
        const char *key, *value, *says;
    } cases[] = {{"rope_scaling", "{\"type\":\"proportional\",\"factor\":2}", "'proportional'"},
                 {"rope_scaling", "{\"rope_type\":\"llama3\",\"factor\":8}", "'low_freq_factor'"},
                 {"rope_parameters", "{\"rope_type\":\"yarn\"}", "'factor'"},
                 {"rope_parameters", "{\"rope_type\":\"longrope\"}", "'short_factor'"},
                 {"rope_scaling", "{\"factor\":2}", "'rope_type'"},
                 {"rope_scaling", "{\"type\":\"linear\"}", "'factor'"},
                 {"rope_scaling", "{\"type\":\"linear\",\"factor\":0}", "'factor'"},
                 {"rope_scaling", "{\"type\":\"linear\",\"factor\":\"2\"}", "'factor'"},
                 {"rope_scaling", "{\"type\":\"linear\",\"rope_type\":\"default\",\"factor\":2}", "differ"},
                 {"rope_scaling", "{\"type\":3}", "'type'"},
                 {"rope_scaling", "2.0", "'rope_scaling'"},
                 {"rope_parameters", "[]", "'rope_parameters'"},
                 {"rope_parameters", "{\"rope_theta\":-1}", "'rope_theta'"},
                 {"rope_parameters", "{\"partial_rotary_factor\":0.25}", "'partial_rotary_factor'"},
                 {"rope_parameters", "{\"full_attention\":{\"rope_theta\":1e4}}", "'full_attention'"}};
    ar_config c;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        cr_expect_refused(parse_with(&c, LLAMA, cases[i].key, cases[i].value), AR_ERR_CONFIG, cases[i].says);
    }
    static const char theta[] = "{\"model_type\":\"llama\",\"vocab_size\":1,\"hidden_size\":2,\"intermediate_size\":1,"
                                "\"num_hidden_layers\":1,\"num_attention_heads\":1,\"rope_theta\":1e4";
    char text[512];
    snprintf(text, sizeof text, "%s,\"rope_parameters\":{\"rope_theta\":1e5}}", theta);
    cr_expect_eq(ar_config_parse(&c, text, strlen(text), "x"), AR_ERR_CONFIG);
    snprintf(text, sizeof text, "%s,\"rope_parameters\":{},\"rope_scaling\":{\"type\":\"default\"}}", theta);
    cr_expect_eq(ar_config_parse(&c, text, strlen(text), "x"), AR_ERR_CONFIG);
    snprintf(text, sizeof text, "%s}", theta);
    cr_expect_ok(ar_config_parse(&c, text, strlen(text), "x"));
}

CLAIM(sizes_whose_products_overflow_are_absurd)
{
    static const char *const bad[] = {
        "{\"model_type\":\"llama\",\"vocab_size\":2147483648,\"hidden_size\":2147483648,\"intermediate_size\":1,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":1}",
        "{\"model_type\":\"llama\",\"vocab_size\":1,\"hidden_size\":2,\"intermediate_size\":1,"
        "\"num_hidden_layers\":1,\"num_attention_heads\":2147483648,\"head_dim\":2147483648}",
        "{\"model_type\":\"gpt2\",\"vocab_size\":1,\"n_embd\":1073741824,\"n_layer\":65536,\"n_head\":1,"
        "\"n_positions\":1}",
        "{\"model_type\":\"gpt2\",\"vocab_size\":1,\"n_embd\":1073741824,\"n_layer\":1,\"n_head\":1,"
        "\"n_positions\":2147483648}"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        ar_config c;
        cr_expect_refused(ar_config_parse(&c, bad[i], strlen(bad[i]), "x"), AR_ERR_CONFIG, "absurd");
    }
}

CLAIM(more_layers_than_anybody_has_are_refused_by_name)
{
    ar_config c;
    cr_expect_refused(parse_with(&c, LLAMA, "num_hidden_layers", "65537"), AR_ERR_CONFIG, "num_hidden_layers");
    cr_expect_ok(parse_with(&c, GPT2, "n_layer", "65536"));
}

CLAIM(an_unknown_model_type_lists_the_known_ones)
{
    ar_config c;
    cr_expect_refused(parse_with(&c, LLAMA, "model_type", "\"gemma4\""), AR_ERR_CONFIG,
                      "'gemma4', expected one of 'llama', 'qwen2', 'mistral', 'qwen3', ");
    cr_expect_refused(parse_with(&c, LLAMA, "model_type", "\"gpt-2\""), AR_ERR_CONFIG, "did you mean 'gpt2'?");
    cr_expect_eq(parse_with(&c, LLAMA, "model_type", "7"), AR_ERR_CONFIG);
}

/* A suggestion would invite to rename it. */
CLAIM(another_architecture_is_never_suggested)
{
    static const char *const others[] = {"\"mixtral\"", "\"qwen3\"",     "\"qwen2_moe\"", "\"gptj\"",
                                         "\"llama4\"",  "\"ministral\"", "\"gpt_neo\""};
    ar_config c;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        cr_expect_eq(parse_with(&c, LLAMA, "model_type", others[i]), AR_ERR_CONFIG);
        cr_expect_null(strstr(ar_error_message(), "did you mean"), "%s", ar_error_message());
    }
    cr_expect_refused(parse_with(&c, LLAMA, "model_type", "\"LLaMA\""), AR_ERR_CONFIG, "did you mean 'llama'?");
}

CLAIM(another_models_file_under_a_known_type_is_refused)
{
    static const char *const right[] = {"[\"LlamaForCausalLM\"]",
                                        "[\"LLaMAForCausalLM\"]",
                                        "[\"LlamaModel\"]",
                                        "[]",
                                        "[\"LlamaForSequenceClassification\"]",
                                        "null"};
    static const char *const wrong[] = {"[\"GemmaForCausalLM\"]", "[\"LlamaMoEForCausalLM\"]", "[\"Qwen2Model\"]",
                                        "[\"LlamaForCausalLM\", \"Gemma2ForCausalLM\"]"};
    ar_config c;
    for (size_t i = 0; i < sizeof right / sizeof *right; i++)
        cr_expect_eq(parse_with(&c, LLAMA, "architectures", right[i]), AR_OK, "%s: %s", right[i], ar_error_message());
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        cr_expect_refused(parse_with(&c, LLAMA, "architectures", wrong[i]), AR_ERR_CONFIG, "'model_type' is 'llama'");
    }
    cr_expect_ok(parse_with(&c, GPT2, "architectures", "[\"GPT2LMHeadModel\"]"));
    cr_expect_eq(parse_with(&c, LLAMA, "hidden_activation", "\"gelu_pytorch_tanh\""), AR_ERR_CONFIG);
    cr_expect_ok(parse_with(&c, LLAMA, "hidden_activation", "null"));
}

CLAIM(what_is_not_an_object_or_not_json_is_told_apart)
{
    ar_config c;
    cr_expect_eq(ar_config_parse(&c, "[]", 2, "x"), AR_ERR_CONFIG);
    cr_expect_eq(ar_config_parse(&c, "null", 4, "x"), AR_ERR_FORMAT); /* jansson wants an array or object at the top */
    cr_expect_refused(ar_config_parse(&c, "{\"a\":1,}", 8, "x"), AR_ERR_FORMAT, "line 1, column 8");
    cr_expect_eq(ar_config_parse(&c, "", 0, "x"), AR_ERR_FORMAT);
    cr_expect_eq(ar_config_parse(NULL, "{}", 2, "x"), AR_ERR_ARG);
    cr_expect_eq(ar_config_load(&c, "/no/such/model"), AR_ERR_IO);
    cr_expect_eq(ar_config_load(&c, "/tmp/.."), AR_ERR_IO); /* a folder without config.json */
    cr_expect_says("config.json");
}

EVERY_CLAIM(config)
