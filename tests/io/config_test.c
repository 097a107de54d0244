/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/activation.h"
#include "io/config_text.h"

#define LLAMA                                                                          \
    "{'model_type':'llama','vocab_size':256,'hidden_size':64,'intermediate_size':176," \
    "'num_hidden_layers':2,'num_attention_heads':8}"
#define GPT2 "{'model_type':'gpt2','vocab_size':256,'n_embd':64,'n_layer':2,'n_head':4,'n_positions':128}"
#define STACK                                                                                  \
    "{'model_type':'anyrank-stack','vocab_size':256,'hidden_size':64,'intermediate_size':176," \
    "'num_hidden_layers':2,'num_attention_heads':8}"

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
    ar_config c = config_read(LLAMA, "");
    cr_expect(c.kv_heads == 8 && c.head_dim == 8 && c.max_positions == 2048 && c.activation == AR_ACT_SILU);
    cr_expect(c.norm_eps == 1e-6 && c.rope.kind == AR_ROPE_DEFAULT && c.rope.theta == 10000 && !c.tied && !c.mlp_bias);
    c = config_read(GPT2, "");
    cr_expect(c.ffn == 256 && c.activation == AR_ACT_GELU_TANH && c.norm_eps == 1e-5 && c.tied);
    c = config_read(STACK, "");
    cr_expect(c.kv_heads == 8 && c.max_positions == 4096 && c.activation == AR_ACT_GELU_TANH && c.norm_eps == 1e-5);
    cr_expect(c.causal && c.initializer_range == 0.02);
}

CLAIM(rotary_positions_are_read_from_either_form)
{
    static const struct {
        const char *more;
        double theta, factor;
    } cases[] = {{"'rope_theta':500000", 500000, 1},
                 {"'rope_scaling':null", 10000, 1},
                 {"'rope_scaling':{'type':'linear','factor':2.5}", 10000, 2.5},
                 {"'rope_scaling':{'rope_type':'linear','type':'linear','factor':4}", 10000, 4},
                 {"'rope_scaling':{'rope_type':'default'}", 10000, 1},
                 {"'rope_parameters':{'rope_theta':1e6,'rope_type':'default'}", 1e6, 1},
                 {"'rope_parameters':{'rope_theta':1e6}", 1e6, 1},
                 {"'rope_parameters':{'rope_type':'linear','factor':8.0,'rope_theta':20000}", 20000, 8},
                 {"'rope_parameters':{'partial_rotary_factor':1.0}", 10000, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const ar_config c = config_read(LLAMA, cases[i].more);
        cr_expect_eq(c.rope.kind, cases[i].factor > 1 ? AR_ROPE_LINEAR : AR_ROPE_DEFAULT, "%s", cases[i].more);
        cr_expect(c.rope.theta == cases[i].theta, "%s", cases[i].more);
        cr_expect(c.rope.kind == AR_ROPE_DEFAULT || c.rope.factor == cases[i].factor, "%s", cases[i].more);
    }
}

CLAIM(harmless_and_neutral_keys_are_accepted)
{
    config_each(
        LLAMA,
        "{'architectures':[null,['LlamaForCausalLM'],['LLaMAForCausalLM'],['LlamaModel'],[],"
        "['LlamaForSequenceClassification']],'torch_dtype':['bfloat16'],'no_such_key':[{'a':[1]}],"
        "'sliding_window':[null],'use_sliding_window':[false],'pretraining_tp':[1,2],'hidden_activation':[null],"
        "'quantization_config':[null,{},{'bits':4}],'layer_types':[['full_attention','full_attention']],'num_experts':[0],"
        "'head_dim':[null,10],'num_key_value_heads':[null,1],'hidden_act':['gelu','gelu_fast'],'rms_norm_eps':[0],"
        "'vocab_size':[2147483648]}",
        false);
    config_each(GPT2,
                "{'reorder_and_upcast_attn':[true],'tie_word_embeddings':[false],'n_inner':[100],"
                "'add_cross_attention':[false],'activation_function':['gelu_pytorch_tanh'],'n_layer':[65536],"
                "'architectures':[['GPT2LMHeadModel']]}",
                false);
    config_each(STACK, "{'causal':[false],'head_dim':[8]}", false);
}

CLAIM(biases_and_activations_follow_their_keys)
{
    ar_config c = config_read(LLAMA, "'attention_bias':true");
    cr_expect(c.qkv_bias && c.out_bias && !c.mlp_bias);
    c = config_read(LLAMA, "'mlp_bias':true");
    cr_expect(!c.qkv_bias && !c.out_bias && c.mlp_bias);
    cr_expect_eq(config_read(LLAMA, "'hidden_act':'gelu'").activation, AR_ACT_GELU_ERF);
    cr_expect_eq(config_read(LLAMA, "'hidden_act':'swish'").activation, AR_ACT_SILU);
    cr_expect_eq(config_read(GPT2, "'activation_function':'relu'").activation, AR_ACT_RELU);
    cr_expect_not(config_read(GPT2, "'tie_word_embeddings':false").tied);
    cr_expect_not(config_read(STACK, "'causal':false").causal);
}

CLAIM(the_largest_dropout_is_kept_for_the_note)
{
    cr_expect_eq(config_read(GPT2, "'resid_pdrop':0.1").config_dropout, 0.1);
    cr_expect_eq(config_read(LLAMA, "'attention_dropout':0.25").config_dropout, 0.25);
}

CLAIM(missing_keys_are_named)
{
    config_each(LLAMA,
                "{'model_type':['removed'],'vocab_size':['removed'],'hidden_size':['removed',null],"
                "'intermediate_size':['removed'],'num_hidden_layers':['removed'],'num_attention_heads':['removed']}",
                true);
    config_each(GPT2,
                "{'vocab_size':['removed'],'n_embd':['removed'],'n_layer':['removed'],'n_head':['removed'],"
                "'n_positions':['removed']}",
                true);
    config_each(STACK,
                "{'vocab_size':['removed'],'hidden_size':['removed'],'intermediate_size':['removed'],"
                "'num_hidden_layers':['removed'],'num_attention_heads':['removed'],'model_type':[null]}",
                true);
}

CLAIM(ill_typed_and_absurd_values_are_named)
{
    config_each(LLAMA,
                "{'vocab_size':['256',0,-256,2147483649,9223372036854775807],'hidden_size':[64.0,true,[64],0,63],"
                "'num_hidden_layers':[0,{},65537],'num_attention_heads':[0],'intermediate_size':[0],"
                "'num_key_value_heads':[0,3,16],'head_dim':[0,7,'8'],'max_position_embeddings':[0,1e9],"
                "'rms_norm_eps':['1e-5'],'rope_theta':[0,-1,false],'attention_bias':[1],'mlp_bias':['true'],"
                "'tie_word_embeddings':[0],'initializer_range':[-0.02],'hidden_act':['quick_gelu',3],"
                "'attention_dropout':[1.5,-0.1,'0'],'hidden_activation':['gelu_pytorch_tanh'],'model_type':[7]}",
                true);
    config_refused(LLAMA, "'rms_norm_eps':-1e-5", "eps");
    config_each(GPT2, "{'n_embd':[63],'n_inner':[0],'n_head':[128],'activation_function':['tanh']}", true);
    config_each(STACK, "{'hidden_size':[65],'num_key_value_heads':[5],'head_dim':[16],'causal':['no']}", true);
}

CLAIM(keys_that_change_the_mathematics_are_refused)
{
    config_each(LLAMA,
                "{'sliding_window':[4096],'partial_rotary_factor':[0.5],"
                "'attn_logit_softcapping':[50.0],'final_logit_softcapping':[30],"
                "'query_pre_attn_scalar':[224],'logit_scale':[0.0625],'embedding_multiplier':[12],"
                "'layer_types':[['full_attention','sliding_attention'],'full_attention'],'num_local_experts':[8],"
                "'use_qk_norm':[true],'pruned_heads':[{'0':[1]}],'is_encoder_decoder':[true]}",
                true);
    config_each(GPT2,
                "{'add_cross_attention':[true],'scale_attn_weights':[false],"
                "'scale_attn_by_inverse_layer_idx':[true]}",
                true);
}

#define ONE                                                                                             \
    "{'model_type':'llama','vocab_size':1,'hidden_size':2,'intermediate_size':1,'num_hidden_layers':1," \
    "'num_attention_heads':1}"
#define ONE_GPT2 "{'model_type':'gpt2','vocab_size':1,'n_embd':1073741824,'n_layer':1,'n_head':1,'n_positions':1}"

CLAIM(unsupported_rotary_positions_are_refused)
{
    static const refused_config cases[] = {
        {LLAMA, "'rope_scaling':{'type':'proportional','factor':2}", "'proportional'"},
        {LLAMA, "'rope_scaling':{'rope_type':'llama3','factor':8}", "'low_freq_factor'"},
        {LLAMA, "'rope_parameters':{'rope_type':'yarn'}", "'factor'"},
        {LLAMA, "'rope_parameters':{'rope_type':'longrope'}", "'short_factor'"},
        {LLAMA, "'rope_scaling':{'factor':2}", "'rope_type'"},
        {LLAMA, "'rope_scaling':{'type':'linear'}", "'factor'"},
        {LLAMA, "'rope_scaling':{'type':'linear','factor':0}", "'factor'"},
        {LLAMA, "'rope_scaling':{'type':'linear','factor':'2'}", "'factor'"},
        {LLAMA, "'rope_scaling':{'type':'linear','rope_type':'default','factor':2}", "differ"},
        {LLAMA, "'rope_scaling':{'type':3}", "'type'"},
        {LLAMA, "'rope_scaling':2.0", NULL},
        {LLAMA, "'rope_parameters':[]", NULL},
        {LLAMA, "'rope_parameters':{'rope_theta':-1}", "'rope_theta'"},
        {LLAMA, "'rope_parameters':{'partial_rotary_factor':0.25}", "'partial_rotary_factor'"},
        {LLAMA, "'rope_parameters':{'full_attention':{'rope_theta':1e4}}", "'full_attention'"},
        {ONE, "'rope_theta':1e4,'rope_parameters':{'rope_theta':1e5}", ""},
        {ONE, "'rope_theta':1e4,'rope_parameters':{},'rope_scaling':{'type':'default'}", ""},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
    config_read(ONE, "'rope_theta':1e4");
}

CLAIM(sizes_whose_products_overflow_are_absurd)
{
    static const refused_config cases[] = {
        {ONE, "'vocab_size':2147483648,'hidden_size':2147483648", "absurd"},
        {ONE, "'num_attention_heads':2147483648,'head_dim':2147483648", "absurd"},
        {ONE_GPT2, "'n_layer':65536", "absurd"},
        {ONE_GPT2, "'n_positions':2147483648", "absurd"},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
}

CLAIM(an_unknown_model_type_lists_the_known_ones)
{
    config_refused(LLAMA, "'model_type':'gemma4'", "'gemma4', expected one of 'llama', 'qwen2', 'mistral', 'qwen3', ");
    config_refused(LLAMA, "'model_type':'gpt-2'", "did you mean 'gpt2'?");
    config_refused(LLAMA, "'model_type':'LLaMA'", "did you mean 'llama'?");
    config_refused(LLAMA, "'model_type':null", "key 'model_type' is missing, expected one of 'llama', ");
}

/* A suggestion would invite to rename it. */
CLAIM(another_architecture_is_never_suggested)
{
    static const char *const others[] = {
        "'model_type':'phimoe'", "'model_type':'dbrx'",    "'model_type':'minimax_m3'", "'model_type':'gptj'",
        "'model_type':'llama4'", "'model_type':'gpt_neo'", "'model_type':'ministral3'"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        config_refused(LLAMA, others[i], "");
        cr_expect_null(strstr(ar_error_message(), "did you mean"), "%s", ar_error_message());
    }
}

CLAIM(another_models_file_under_a_known_type_is_refused)
{
    static const char *const wrong[] = {"'architectures':['GemmaForCausalLM']",
                                        "'architectures':['LlamaMoEForCausalLM']", "'architectures':['Qwen2Model']",
                                        "'architectures':['LlamaForCausalLM','Gemma2ForCausalLM']"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        config_refused(LLAMA, wrong[i], "'model_type' is 'llama'");
}

CLAIM(what_is_not_an_object_or_not_json_is_told_apart)
{
    ar_config c;
    cr_expect_eq(ar_config_parse(&c, "[]", 2, "x"), AR_ERR_CONFIG);
    cr_expect_eq(ar_config_parse(&c, "null", 4, "x"), AR_ERR_FORMAT); /* jansson wants an array or object at the top */
    cr_expect_refused(ar_config_parse(&c, "{\"a\":1,}", 8, "x"), AR_ERR_FORMAT, "x: not JSON: column 8");
    cr_expect_eq(ar_config_parse(&c, "", 0, "x"), AR_ERR_FORMAT);
    cr_expect_eq(ar_config_parse(NULL, "{}", 2, "x"), AR_ERR_ARG);
    cr_expect_eq(ar_config_load(&c, "/no/such/model"), AR_ERR_IO);
    cr_expect_eq(ar_config_load(&c, "/tmp/.."), AR_ERR_IO); /* a folder without config.json */
    cr_expect_says("config.json");
}

EVERY_CLAIM(config)
