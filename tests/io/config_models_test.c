/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of Qwen2, Mistral and Llama 3 say beyond Llama's, and keys that nobody knows. */
#include "anyrank/activation.h"
#include "io/config_text.h"

#define MODEL(type)                                                                       \
    "{'model_type':'" type "','vocab_size':256,'hidden_size':64,'intermediate_size':176," \
    "'num_hidden_layers':4,'num_attention_heads':8,'num_key_value_heads':2}"
#define NEOX                                                                              \
    "{'model_type':'gpt_neox','vocab_size':256,'hidden_size':64,'intermediate_size':176," \
    "'num_hidden_layers':4,'num_attention_heads':8}"
#define LLAMA MODEL("llama")
#define QWEN2 MODEL("qwen2")
#define MISTRAL MODEL("mistral")
#define QWEN3 MODEL("qwen3")
#define OLMO2 MODEL("olmo2")
#define GEMMA MODEL("gemma")
#define GEMMA2 MODEL("gemma2")
#define GEMMA3 MODEL("gemma3_text")
#define GPT2 "{'model_type':'gpt2','vocab_size':256,'n_embd':64,'n_layer':2,'n_head':4,'n_positions':128}"

/* --- what a model is ---------------------------------------------------------------------------------------------- */

/* configuration_mixtral.py, configuration_qwen2_moe.py, configuration_qwen3_moe.py, configuration_olmoe.py. */
CLAIM(models_with_experts_have_their_number_width_and_weights)
{
    ar_config c = config_read(MODEL("mixtral"), "");
    cr_expect(c.arch == AR_ARCH_MIXTRAL && c.rope.theta == 1e6 && c.norm_eps == 1e-5 && c.window == 0);
    cr_expect(c.experts.n == 8 && c.experts.per_token == 2 && c.experts.ffn == 176 && c.experts.normalised);
    cr_expect(c.experts.w123 && c.experts.shared == 0 && ar_config_has_experts(&c, 3));
    c = config_read(MODEL("qwen2_moe"), "'mlp_only_layers':[3],'decoder_sparse_step':2,'moe_intermediate_size':24");
    cr_expect(c.arch == AR_ARCH_QWEN2_MOE && c.qkv_bias && c.ffn == 176 && c.experts.ffn == 24 && c.experts.n == 60);
    cr_expect(c.experts.shared == 5632 && c.experts.per_token == 4 && !c.experts.normalised);
    cr_expect(!ar_config_has_experts(&c, 0) && ar_config_has_experts(&c, 1) && !ar_config_has_experts(&c, 3));
    c = config_read(MODEL("qwen2_moe"), "'use_sliding_window':true,'sliding_window':5,'max_window_layers':3");
    cr_expect(ar_config_window(&c, 0) == 5 && ar_config_window(&c, 1) == 0 && ar_config_window(&c, 2) == 5 &&
              ar_config_window(&c, 3) == 0);
    c = config_read(MODEL("qwen3_moe"), "'num_experts':'removed','num_local_experts':16,'norm_topk_prob':true");
    cr_expect(c.arch == AR_ARCH_QWEN3_MOE && c.qk_norm == AR_QK_NORM_HEAD && c.experts.n == 16 && c.experts.normalised);
    cr_expect(c.experts.per_token == 8 && c.experts.ffn == 768 && c.experts.shared == 0);
    cr_expect_eq(config_read(MODEL("qwen3_moe"), "'use_sliding_window':true").window, 4096);
    c = config_read(MODEL("qwen3_moe"), "'num_experts':0,'use_qk_norm':true"); /* as Qwen3-Coder's file says */
    cr_expect(!ar_config_has_experts(&c, 0));
    c = config_read(MODEL("olmoe"), "'num_experts_per_tok':1");
    cr_expect(c.arch == AR_ARCH_QWEN3_MOE && c.qk_norm == AR_QK_NORM_WIDTH && c.norm_place == AR_NORM_BEFORE);
    cr_expect(c.experts.n == 64 && c.experts.per_token == 1 && c.experts.ffn == 176 && c.norm_eps == 1e-5);
}

/* configuration_gpt_oss.py. */
CLAIM(gpt_oss_has_sinks_biases_and_its_own_activation)
{
    ar_config c = config_read(MODEL("gpt_oss"), "");
    cr_expect(c.arch == AR_ARCH_GPT_OSS && c.sinks && c.experts.bias && c.experts.normalised && c.experts.n == 128);
    cr_expect(c.activation == AR_ACT_CLAMPED && c.qkv_bias && c.out_bias && c.experts.per_token == 4);
    cr_expect(ar_config_window(&c, 0) == 128 && ar_config_window(&c, 1) == 0 && c.norm_eps == 1e-5);
    cr_expect(c.rope.kind == AR_ROPE_YARN && c.rope.factor == 32 && c.rope.original_positions == 4096 &&
              !c.rope.truncate && c.rope.theta == 150000.0);
    c = config_read(MODEL("gpt_oss"), "'attention_bias':false,'swiglu_limit':7,'output_router_logits':true,"
                                      "'layer_types':['full_attention','full_attention','sliding_attention',"
                                      "'sliding_attention'],'sliding_window':9");
    cr_expect(!c.qkv_bias && !c.out_bias && c.experts.balance_weight == 0.001);
    cr_expect(ar_config_window(&c, 1) == 0 && ar_config_window(&c, 2) == 9);
    c = config_read(MODEL("gpt_oss"), "'quantization_config':{'quant_method':'mxfp4'}");
    cr_expect_str_eq(c.quantized, "mxfp4");
    c = config_read(MODEL("gpt_oss"), "'quantization_config':{'bits':4}");
    cr_expect_str_eq(c.quantized, "few bits");
    static const refused_config cases[] = {{MODEL("gpt_oss"), "'swiglu_limit':6", "expected 7"},
                                           {MODEL("gpt_oss"), "'swiglu_alpha':1.5", "expected 1.702"},
                                           {MODEL("gpt_oss"), "'mlp_bias':false", "experts have biases"},
                                           {MODEL("gpt_oss"), "'quantization_config':'mxfp4'", "is not an object"},
                                           {MODEL("gpt_oss"), "'norm_topk_prob':false", "always divides a token"},
                                           {MODEL("mixtral"), "'swiglu_limit':7", "clamped"}};
    configs_refused(cases, sizeof cases / sizeof *cases);
}

/* The classes' configuration_NAME.py. */
CLAIM(variants_differ_in_windows_rotations_norms_and_biases)
{
    ar_config c = config_read(MODEL("ministral"), "");
    cr_expect(c.arch == AR_ARCH_LLAMA && ar_config_window(&c, 3) == 4096 && c.max_positions == 131072);
    cr_expect_eq(config_read(MODEL("ministral"), "'sliding_window':null").window, 0);
    c = config_read(MODEL("olmo3"), "'max_position_embeddings':64,'rope_theta':500000,"
                                    "'rope_scaling':{'rope_type':'linear','factor':2}");
    cr_expect(c.arch == AR_ARCH_OLMO2 && c.qk_norm == AR_QK_NORM_WIDTH && c.norm_place == AR_NORM_AFTER &&
              c.pad_id == 1);
    cr_expect(ar_config_window(&c, 2) == 4096 && ar_config_window(&c, 3) == 0);
    cr_expect(ar_config_layer_rope(&c, 2)->kind == AR_ROPE_DEFAULT && ar_config_layer_rope(&c, 2)->theta == 5e5);
    cr_expect(ar_config_layer_rope(&c, 3)->kind == AR_ROPE_LINEAR && ar_config_layer_rope(&c, 3)->theta == 5e5);
    c = config_read(MODEL("exaone4"), "'sliding_window':8");
    cr_expect(c.qk_norm == AR_QK_NORM_HEAD && c.norm_place == AR_NORM_AFTER && c.norm_eps == 1e-5);
    cr_expect(ar_config_window(&c, 2) == 8 && ar_config_turns(&c, 2) && !ar_config_turns(&c, 3));
    c = config_read(MODEL("exaone4"), "'sliding_window':null");
    cr_expect(c.window == 0 && ar_config_turns(&c, 3));
    c = config_read(MODEL("exaone4"), "'sliding_window_pattern':'LLLG','layer_types':['full_attention',"
                                      "'sliding_attention','sliding_attention','sliding_attention']");
    cr_expect(!ar_config_turns(&c, 0) && ar_config_turns(&c, 1));
    c = config_read(MODEL("smollm3"), "");
    cr_expect(c.tied && c.rope.theta == 2e6 && c.window == 0 && ar_config_turns(&c, 2) && !ar_config_turns(&c, 3));
    c = config_read(MODEL("smollm3"), "'no_rope_layers':[0,1,1,0,1],'use_sliding_window':true,'sliding_window':8");
    cr_expect(!ar_config_turns(&c, 0) && ar_config_turns(&c, 1) && !ar_config_turns(&c, 3));
    cr_expect(ar_config_window(&c, 0) == 8 && ar_config_window(&c, 1) == 0);
    c = config_read(MODEL("seed_oss"), "");
    cr_expect(c.qkv_bias && !c.out_bias && !c.mlp_bias && c.head_dim == 128 && c.max_positions == 524288);
    cr_expect_eq(config_read(MODEL("seed_oss"), "'head_dim':null").head_dim, 8);
    cr_expect(config_read(MODEL("seed_oss"), "'attention_out_bias':true").out_bias);
    c = config_read(MODEL("stablelm"), "");
    cr_expect(c.norm == AR_NORM_LAYER && c.gated && c.rope.rotary_dim == 2 && !c.qkv_bias && c.norm_eps == 1e-5);
    c = config_read(MODEL("starcoder2"), "");
    cr_expect(c.arch == AR_ARCH_STARCODER2 && c.norm == AR_NORM_LAYER && !c.gated && c.tied && c.mlp_bias &&
              c.out_bias);
    cr_expect(c.activation == AR_ACT_GELU_TANH && c.initializer_range == 0.018042 && c.window == 0);
    static const struct {
        const char *base, *more, *told;
    } told[] = {{MODEL("stablelm"), "'use_bias':true", "use_bias"},
                {MODEL("stablelm"), "'norm_epsilon':0.1", "norm_epsilon"},
                {MODEL("starcoder2"), "'use_qkv_bias':false", "use_qkv_bias"},
                {MODEL("ministral"), "'use_sliding_window':false", "use_sliding_window"},
                {MISTRAL, "'sliding_window':8,'use_sliding_window':false", "use_sliding_window"}};
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        c = config_read(told[i].base, told[i].more);
        cr_expect(c.unknown_keys == 1 && strcmp(c.unknown[0], told[i].told) == 0, "%s: %s", told[i].more, c.unknown[0]);
    }
    c = config_read(MODEL("olmo3"), "'rope_parameters':{'full_attention':{'rope_theta':50},"
                                    "'sliding_attention':{'rope_theta':50}}");
    cr_expect(c.rope.theta == 50.0 && c.local_rope.theta == 50.0);
    c = config_read(MODEL("granite"), "'embedding_multiplier':12,'attention_multiplier':0.25,'residual_multiplier':0.5,"
                                      "'logits_scaling':8");
    cr_expect(c.embed_scale == 12.0 && c.query_scalar == 16.0 && c.branch_scale == 0.5 && c.logit_scale == 0.125);
    cr_expect_eq(config_read(MODEL("granite"), "").query_scalar, 1.0);
    c = config_read(MODEL("glm4"), "'head_dim':8");
    cr_expect(c.arch == AR_ARCH_GLM4 && c.norm_place == AR_NORM_AROUND && c.rope.interleaved && c.rope.rotary_dim == 4);
    c = config_read(MODEL("glm"), "'head_dim':8");
    cr_expect(c.arch == AR_ARCH_GLM4 && c.norm_place == AR_NORM_BEFORE && c.rope.interleaved);
    c = config_read(MODEL("ernie4_5"), "'head_dim':null,'use_bias':true");
    cr_expect(c.qkv_bias && c.out_bias && c.mlp_bias && c.tied && c.rope.theta == 5e5 && c.head_dim == 8);
    cr_expect(config_read(MODEL("ernie4_5"), "").head_dim == 128);
    c = config_read(MODEL("cohere"), "");
    cr_expect(c.norm == AR_NORM_LAYER && c.norm_no_bias && c.residual == AR_RESIDUAL_PARALLEL_ONE_NORM && c.tied);
    cr_expect(c.logit_scale == 0.0625 && c.rope.theta == 5e5 && c.rope.interleaved && !c.qkv_bias && c.window == 0);
    c = config_read(MODEL("cohere2"), "'sliding_window':8");
    cr_expect(c.rope.theta == 1e4 && ar_config_window(&c, 2) == 8 && ar_config_turns(&c, 2) && !ar_config_turns(&c, 3));
    cr_expect_eq(config_read(MODEL("cohere2"), "'sliding_window_pattern':2").unknown_keys, 0);
    c = config_read(NEOX, "");
    cr_expect(c.arch == AR_ARCH_GPT_NEOX && c.residual == AR_RESIDUAL_PARALLEL && c.activation == AR_ACT_GELU_ERF);
    cr_expect(c.rope.rotary_dim == 2 && c.rope.theta == 1e4 && c.qkv_bias && c.out_bias && c.mlp_bias && !c.gated);
    c = config_read(NEOX, "'rotary_pct':1,'rotary_emb_base':25000,'use_parallel_residual':false,"
                          "'attention_bias':false,'pad_token_id':0");
    cr_expect(c.rope.rotary_dim == 0 && c.rope.theta == 25000.0 && c.residual == AR_RESIDUAL_IN_TURN && !c.pads);
    cr_expect(!c.qkv_bias && !c.out_bias && c.mlp_bias && c.unknown_keys == 0);
    cr_expect_eq(config_read(NEOX, "'rotary_emb_base':500,'rope_theta':500").rope.theta, 500.0);
    cr_expect_eq(config_read(MODEL("stablelm"), "'use_parallel_residual':true").residual,
                 AR_RESIDUAL_PARALLEL_ONE_NORM);
    c = config_read(MODEL("glm4"), "'head_dim':8");
    cr_expect(c.qkv_bias && !c.out_bias && !c.mlp_bias &&
              !config_read(MODEL("glm4"), "'attention_bias':false").qkv_bias);
    static const refused_config cases[] = {
        {MODEL("glm4"), "'mlp_bias':true", "GLM-4's MLP has no biases"},
        {MODEL("granite"), "'residual_multiplier':0", "'residual_multiplier' is 0"},
        {MODEL("granite"), "'logits_scaling':-1", "'logits_scaling' is -1"},
        {MODEL("llama"), "'residual_multiplier':0.5", "'residual_multiplier'"},
        {MODEL("olmo3"), "'rope_theta':10000", "expected 500000 or no such key: versions of"},
        {GEMMA3, "'rope_scaling':{'type':'linear','factor':8}", "no 'rope_type'"},
        {GEMMA3,
         "'original_max_position_embeddings':64,'rope_parameters':{'full_attention':{'rope_type':'yarn','factor':2}}",
         "in 'rope_parameters' alone"},
        {MODEL("exaone4"), "'sliding_window_pattern':'LLLG'", "'sliding_window_pattern'"},
        {MODEL("smollm3"), "'no_rope_layers':[1,0]", "has 2 entries"},
        {MODEL("smollm3"), "'no_rope_layers':[1,0,1,2]", "entry 3 is not 0"},
        {MODEL("smollm3"), "'no_rope_layer_interval':0", "'no_rope_layer_interval'"},
        {MODEL("smollm3"), "'sliding_window':8", "'sliding_window'"},
        {MODEL("stablelm"), "'qk_layernorm':true", "'qk_layernorm'"},
        {NEOX, "'num_nextn_predict_layers':1,'mtp_loss_scaling_factor':0.1", "no names for"},
        {NEOX, "'partial_rotary_factor':1.0", "'rotary_pct' has it"},
        {NEOX, "'rope_theta':500", "GPT-NeoX turns by 'rotary_emb_base', 10000"},
        {NEOX, "'num_key_value_heads':1", "'num_key_value_heads' is 1"},
        {MODEL("llama"), "'rotary_pct':0.5", "'rotary_pct'"},
        {MODEL("cohere"), "'use_qk_norm':true", "'use_qk_norm'"},
        {QWEN3, "'use_qk_norm':false", "expected true"},
        {MODEL("cohere"), "'sliding_window':8", "'sliding_window'"},
        {MODEL("cohere"), "'sliding_window_pattern':4", "'sliding_window_pattern'"},
        {MODEL("cohere"), "'logit_scale':0", "'logit_scale' is 0"},
        {MODEL("llama"), "'use_parallel_residual':true", "'use_parallel_residual'"},
        {MODEL("starcoder2"), "'head_dim':16", "'head_dim' is 16"},
        {MODEL("llama"), "'no_rope_layers':[1,1,1,0]", "'no_rope_layers'"}};
    configs_refused(cases, sizeof cases / sizeof *cases);
}

CLAIM(a_scaled_rotation_may_have_its_own_theta)
{
    const char *const scaling = "'rope_scaling':{'rope_type':'linear','factor':8,'rope_theta':50}";
    cr_expect_eq(config_read(GEMMA3, scaling).rope.theta, 50.0);
    cr_expect_eq(config_read(GEMMA3, "'rope_scaling':{'rope_type':'linear','factor':8}").rope.theta, 1e6);
}

CLAIM(routers_are_balanced_where_transformers_gives_their_logits_out)
{
    cr_expect_eq(config_read(MODEL("mixtral"), "'router_aux_loss_coef':0.5").experts.balance_weight, 0.0);
    cr_expect_eq(config_read(MODEL("mixtral"), "'output_router_logits':true").experts.balance_weight, 0.001);
    cr_expect_eq(config_read(MODEL("qwen2_moe"), "'output_router_logits':true").experts.balance_weight, 0.001);
    cr_expect_eq(config_read(MODEL("olmoe"), "'output_router_logits':true").experts.balance_weight, 0.01);
    const ar_config c = config_read(MODEL("qwen3_moe"), "'output_router_logits':true,'router_aux_loss_coef':0.25");
    const ar_loss_options nothing = {0}, sequence = {.router = {AR_BALANCE_SEQUENCE, 0.1, 0.0}};
    cr_expect(c.experts.balance_weight == 0.25 && ar_config_balance(&c, &nothing) == AR_BALANCE_LAYERS);
    cr_expect_eq(ar_config_balance(&c, &sequence), AR_BALANCE_SEQUENCE);
}

CLAIM(what_cannot_be_of_experts_is_refused)
{
    static const refused_config cases[] = {
        {MODEL("mixtral"), "'num_experts_per_tok':9", "at most the 8 experts"},
        {MODEL("mixtral"), "'num_local_experts':0", "0 experts"},
        {MODEL("mixtral"), "'num_experts':4,'num_local_experts':8", "one number"},
        {MODEL("mixtral"), "'router_jitter_noise':0.1", NULL},
        {MODEL("mixtral"), "'output_router_logits':true,'router_aux_loss_coef':-1", "a finite number from 0"},
        {MODEL("olmoe"), "'clip_qkv':8.0", NULL},
        {MODEL("qwen2_moe"), "'mlp_only_layers':[1.5]", NULL},
        {MODEL("qwen3_moe"), "'decoder_sparse_step':0", NULL},
        {MODEL("qwen3_moe"), "'num_experts':1000000", NULL},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
}

/* configuration_glm4_moe.py, configuration_dots1.py. */
CLAIM(routers_of_sigmoids_have_deepseek_s_keys)
{
    ar_config c =
        config_read(MODEL("glm4_moe"), "'n_routed_experts':16,'n_group':4,'topk_group':2,'n_shared_experts':2,"
                                       "'moe_intermediate_size':24,'routed_scaling_factor':2.5,"
                                       "'num_nextn_predict_layers':1,'scoring_func':'sigmoid'");
    cr_expect(c.unknown_keys == 0 && c.mtp == 0 && c.mtp_unused == 1);
    cr_expect(c.arch == AR_ARCH_GLM4_MOE && c.qk_norm == AR_QK_NORM_NONE && c.rope.rotary_dim * 2 == c.head_dim);
    cr_expect(c.experts.n == 16 && c.experts.per_token == 8 && c.experts.shared == 48 && c.experts.ungated);
    cr_expect(c.experts.normalised && c.experts.scores.groups == 4 && c.experts.scores.kept == 2);
    cr_expect(c.experts.scores.scale == 2.5 && !ar_config_has_experts(&c, 0) && ar_config_has_experts(&c, 1));
    c = config_read(MODEL("glm4_moe"), "'num_nextn_predict_layers':2,'mtp_loss_scaling_factor':0.3");
    cr_expect(c.unknown_keys == 0 && c.mtp == 2 && c.mtp_weight == 0.3 && ar_config_blocks(&c) == c.layers + 2);
    cr_expect(ar_config_has_experts(&c, c.layers + 1));
    c = config_read(MODEL("glm4_moe_lite"), "'num_key_value_heads':8,'num_hidden_layers':3,'first_k_dense_replace':0,"
                                            "'mlp_layer_types':['dense','dense','sparse']");
    cr_expect(c.arch == AR_ARCH_DEEPSEEK && c.experts.n == 64 && c.latent.q_rank == 768 && c.head_dim == 256);
    cr_expect(!ar_config_has_experts(&c, 1) && ar_config_has_experts(&c, 2) && c.unknown_keys == 0);
    c = config_read(MODEL("kimi_k2"), "'architectures':['DeepseekV3ForCausalLM'],'num_key_value_heads':8");
    cr_expect(c.arch == AR_ARCH_DEEPSEEK && c.experts.n == 256 && c.unknown_keys == 0);
    c = config_read(MODEL("dots1"), "'n_routed_experts':6,'num_experts_per_tok':2,'n_shared_experts':1,"
                                    "'sliding_window':5,'max_window_layers':1");
    cr_expect(c.arch == AR_ARCH_GLM4_MOE && c.qk_norm == AR_QK_NORM_HEAD && !c.experts.normalised);
    cr_expect(ar_config_has_experts(&c, 0) && ar_config_window(&c, 0) == 0 && ar_config_window(&c, 1) == 5);
    c = config_read(MODEL("minimax_m2"), "'num_local_experts':6,'num_experts_per_tok':2,'head_dim':32,'rotary_dim':16,"
                                         "'qk_norm_type':'per_layer','use_routing_bias':true,'scoring_func':'sigmoid'");
    cr_expect(c.arch == AR_ARCH_MIXTRAL && c.qk_norm == AR_QK_NORM_WIDTH && c.rope.rotary_dim == 16);
    cr_expect(c.experts.n == 6 && c.experts.ffn == 176 && ar_config_router_bias(&c) && c.unknown_keys == 0);
    c = config_read(MODEL("minimax_m2"),
                    "'num_experts_per_tok':2,'head_dim':32,'rotary_dim':16,'partial_rotary_factor':1.0");
    cr_expect(c.rope.rotary_dim == 0, "transformers looks at rotary_dim only where there is no factor");
    c = config_read(MODEL("minimax_m2"),
                    "'num_experts_per_tok':2,'head_dim':8,'rotary_dim':4,'rope_scaling':{'type':'longrope',"
                    "'short_factor':[1,1.1],'long_factor':[2,3],'original_max_position_embeddings':8}");
    cr_expect(c.rope.rotary_dim == 4 && c.rope.kind == AR_ROPE_LONGROPE);
    static const refused_config cases[] = {
        {MODEL("minimax_m2"), "'num_experts_per_tok':2,'rotary_dim':15", "'rotary_dim' is 15"},
        {MODEL("minimax_m2"), "'use_qk_norm':false", "'qk_norm_type'"},
        {MODEL("minimax_m2"), "'use_routing_bias':false", "'scoring_func'"},
        {MODEL("minimax_m2"), "'output_router_logits':true", "'output_router_logits'"},
        {MODEL("dots1"), "'num_experts_per_tok':2,'n_shared_experts':1", "'n_routed_experts'"},
        {MODEL("glm4_moe"), "'mlp_layer_types':['dense','moe']", "'mlp_layer_types'"},
        {MODEL("glm4_moe_lite"), "'num_key_value_heads':8,'first_k_dense_replace':2", "'mlp_layer_types' beside it"},
        {MODEL("glm4_moe"), "'n_group':3", "expected groups of equal size"},
        {MODEL("glm4_moe"), "'n_group':128,'topk_group':128", "'n_group'"},
        {MODEL("glm4_moe"), "'n_group':32,'topk_group':1", "in those that stay enough"},
        {MODEL("glm4_moe"), "'n_shared_experts':0", "'n_shared_experts'"},
        {MODEL("glm4_moe"), "'mtp_loss_scaling_factor':0.3", "without 'num_nextn_predict_layers'"},
        {MODEL("glm4_moe"), "'num_nextn_predict_layers':2,'mtp_loss_scaling_factor':-1", "expected from 0 to 1e6"},
        {MODEL("glm4_moe"), "'num_nextn_predict_layers':9", "'num_nextn_predict_layers'"},
        {MODEL("glm4_moe"), "'scoring_func':'softmax'", "expected 'sigmoid'"},
        {MODEL("glm4_moe"), "'routed_scaling_factor':1e300", "expected a finite number"},
        {MODEL("glm4_moe"), "'q_lora_rank':4", "'q_lora_rank'"},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
}

/* configuration_deepseek_v3.py, configuration_deepseek_v2.py. */
CLAIM(latent_attention_has_deepseek_s_sizes_and_scale)
{
    const char *const all = "'num_key_value_heads':8,'n_routed_experts':16,'num_experts_per_tok':2,'n_group':4,"
                            "'topk_group':2,'q_lora_rank':null,'v_head_dim':96,'head_dim':64";
    ar_config c = config_read(MODEL("deepseek_v3"), all);
    cr_expect(c.arch == AR_ARCH_DEEPSEEK && c.head_dim == 192 && ar_config_value_dim(&c) == 96);
    cr_expect(c.latent.kv_rank == 512 && c.latent.q_rank == 0 && c.rope.rotary_dim == 64 && c.rope.last);
    cr_expect(c.rope.interleaved && c.query_scalar == 192.0 && ar_config_router_bias(&c));
    cr_expect(!ar_config_has_experts(&c, 2) && ar_config_has_experts(&c, 3) && c.experts.scores.scale == 2.5);
    c = config_read(MODEL("deepseek_v3"),
                    "'num_key_value_heads':8,'rope_interleave':false,'rope_theta':10000,'rope_scaling':{'type':'yarn',"
                    "'factor':40,'mscale':1.0,'mscale_all_dim':1.0,'original_max_position_embeddings':4096}");
    const char *const nulls = "'num_key_value_heads':8,'rope_interleave':null,'norm_topk_prob':null";
    cr_expect(!config_read(MODEL("deepseek_v3"), nulls).rope.interleaved);
    cr_expect(!config_read(MODEL("deepseek_v3"), nulls).experts.normalised);
    const double m = 0.1 * log(40.0) + 1.0;
    cr_expect(c.latent.q_rank == 1536 && !c.rope.interleaved && fabs(c.query_scalar * m * m * m * m - 192.0) < 1e-12);
    c = config_read(MODEL("deepseek_v2"), "'num_key_value_heads':8,'num_experts_per_tok':6,'n_group':8,'topk_group':3,"
                                          "'topk_method':'group_limited_greedy','routed_scaling_factor':16.0");
    cr_expect(c.experts.scores.softmax && c.experts.scores.groups == 8 && c.experts.scores.kept == 3);
    cr_expect(!ar_config_router_bias(&c) && c.experts.shared == 2 * 1407 && ar_config_has_experts(&c, 0));
    c = config_read(MODEL("deepseek_v2"), "'num_key_value_heads':8,'num_experts_per_tok':6,'n_group':8,'topk_group':3");
    cr_expect(c.experts.scores.groups == 1); /* greedy */
    static const refused_config cases[] = {
        {MODEL("deepseek_v3"), "'num_key_value_heads':4", "expected the 8 heads"},
        {MODEL("deepseek_v3"), "'num_key_value_heads':8,'qk_rope_head_dim':5", "an even number"},
        {MODEL("deepseek_v3"), "'num_key_value_heads':8,'head_dim':192", "which means the same, is 64"},
        {MODEL("deepseek_v3"), "'num_key_value_heads':8,'mlp_bias':true", "'mlp_bias'"},
        {MODEL("deepseek_v3"), "'num_key_value_heads':8,'kv_lora_rank':0", "'kv_lora_rank'"},
        {MODEL("deepseek_v3"), "'num_key_value_heads':8,'partial_rotary_factor':0.5", "'partial_rotary_factor'"},
        {MODEL("deepseek_v2"), "'num_key_value_heads':8", "'num_experts_per_tok'"},
        {MODEL("deepseek_v2"), "'num_key_value_heads':8,'num_experts_per_tok':6,'norm_topk_prob':true",
         "'norm_topk_prob'"},
        {MODEL("deepseek_v2"), "'num_key_value_heads':8,'num_experts_per_tok':6,'topk_method':'noaux_tc'",
         "'topk_method'"},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
}

/* Each key with values that change what is computed, of all four models; one of a row of keys stands for all. */
CLAIM(what_experts_do_not_have_here_is_refused_by_name)
{
    static const char *const models[] = {MODEL("mixtral"), MODEL("qwen2_moe"), MODEL("qwen3_moe"), MODEL("olmoe")};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        const refused_config cases[] = {
            {models[i], "'scoring_func':'sigmoid'",
             "key 'scoring_func' changes the mathematics: weights of experts are another function of the logits than "
             "their softmax; expected 'softmax' or no such key"},
            {models[i], "'moe_router_score_function':'sigmoid'", "expected 'softmax'"},
            {models[i], "'topk_method':'noaux_tc'", "expected 'greedy'"},
            {models[i], "'n_group':8", "'n_group' changes the mathematics: experts are chosen by groups"},
            {models[i], "'topk_group':4", "expected 1"},
            {models[i], "'routed_scaling_factor':2.5", "multiplied by a factor; expected 1"},
            {models[i], "'use_expert_bias':true", "a bias takes part in the choice"},
            {models[i], "'n_shared_experts':2", "further experts"},
            {models[i], "'num_shared_experts':1", "expected 0"},
            {models[i], "'expert_capacity_factor':1.25",
             "each rank drops tokens by its own count, so that the result depends on the number of ranks by "
             "definition; expected null"},
            {models[i], "'capacity_factor':1", "by definition"},
            {models[i], "'moe_expert_capacity_factor':0.0", "by definition"},
            {models[i], "'expert_capacity':64", "by definition"},
            {models[i], "'moe_token_drop_policy':'probs'", "tokens are dropped"},
            {models[i], "'drop_tokens':true", "tokens are dropped"},
            {models[i], "'apply_router_weight_on_input':true", "what goes into an expert"},
            {models[i], "'first_k_dense_replace':1", "mlp_only_layers"},
        };
        configs_refused(cases, sizeof cases / sizeof *cases);
        const ar_config c = config_read(
            models[i],
            "'scoring_func':'softmax','topk_method':'greedy','n_group':1,'topk_group':1,"
            "'routed_scaling_factor':1.0,'use_expert_bias':false,'n_shared_experts':0,'capacity_factor':null,"
            "'moe_expert_capacity_factor':-1,'drop_tokens':false,'first_k_dense_replace':0");
        cr_expect_eq(c.unknown_keys, 0, "%s: %s", models[i], c.unknown[0]);
    }
    const refused_config plain = {MODEL("mixtral"), "'norm_topk_prob':false", "always divides a token's weights"};
    configs_refused(&plain, 1);
}

/* configuration_gemma3.py, and Google's file for four billion parameters. */
CLAIM(of_a_file_that_describes_more_the_language_model_is_read)
{
    ar_config c = config_read(MODEL("gemma3"), "'tie_word_embeddings':false,'vision_config':{'hidden_size':1152},"
                                               "'text_config':{'model_type':'gemma3_text','hidden_size':2560,"
                                               "'intermediate_size':10240,'num_hidden_layers':34}");
    cr_expect(c.within && c.hidden == 2560 && c.vocab == 262208 && c.heads == 8 && c.kv_heads == 4 && !c.tied);
    cr_expect(!config_read(MODEL("llama"), "").within);
}

/* What a model lacks that is known and not computed. */
CLAIM(other_known_models_are_refused_by_what_they_have)
{
    static const refused_config cases[] = {
        {MODEL("phimoe"), "", "'phimoe', which is not computed: sparsemixer routes"},
        {MODEL("ernie4_5_moe"), "", "with other names; expected one of"},
        {MODEL("kimi_linear"), "", "'kimi_linear', which is not computed: most layers are Kimi Delta Attention"},
        {MODEL("qwen3_5"), "", "'qwen3_5', which is not computed: most layers are Gated DeltaNet"},
        {MODEL("qwen3_5_text"), "", "'qwen3_5_text', which is not computed: most layers are Gated DeltaNet"},
        {MODEL("qwen3_5_moe"), "'text_config':{'model_type':'qwen3_5_moe_text'}",
         "'qwen3_5_moe', which is not computed"},
        {MODEL("qwen3_5_moe_text"), "", "'qwen3_5_moe_text', which is not computed: most layers are Gated DeltaNet"},
        {MODEL("mamba"), "", "'mamba', which is not computed: every layer is a selective state-space model"},
        {MODEL("mamba2"), "", "'mamba2', which is not computed: every layer is a selective state-space model"},
        {MODEL("falcon_h1"), "", "'falcon_h1', which is not computed: in every layer a state-space model (Mamba-2)"},
        {MODEL("nemotron_h"), "", "'nemotron_h', which is not computed: layers of a state-space model (Mamba-2) stand"},
        {MODEL("deepseek_v32"), "", "'deepseek_v32', which is not computed: DeepSeek Sparse Attention: an indexer"},
        {MODEL("gemma3n"), "'text_config':{'model_type':'gemma3n_text'}", "reuse keys and values of others; expected"},
        {MODEL("gemma3n_text"), "", "'gemma3n_text', which is not computed: layers have embeddings of their own"},
        {MODEL("bert"), "", "'bert', which is not computed: it is an encoder: tokens attend in both directions"},
        {MODEL("t5"), "", "'t5', which is not computed: it has an encoder, cross-attention"},
        {MODEL("mt5"), "", "'mt5', which is not computed: it has an encoder, cross-attention"},
        {MODEL("mamba3"), "", "'mamba3', expected one of 'llama', "},
        {MODEL("bert_texts"), "", "'bert_texts', expected one of 'llama', "},
        {MODEL("gemma3"), "'text_config':{'model_type':'gemma9_text'}", "'gemma3', expected one of"},
        {MODEL("gemma3"), "'text_config':{'model_type':'gemma3_text'}", "key 'hidden_size' is missing"},
        {MODEL("llama"), "'text_config':{'model_type':'gemma3_text'}", "'text_config'"},
        {MODEL("another_moe"), "", "'another_moe', expected one of 'llama', "},
    };
    configs_refused(cases, sizeof cases / sizeof *cases);
}

/* torch.nn.Embedding's padding_idx: the class's own where the file has none, below 0 from the vocabulary's end. */
static void expect_pad(const char *base, const char *more, bool pads, size_t id)
{
    const ar_config c = config_read(base, more);
    cr_expect(c.pads == pads && c.pad_id == id, "%s, %s: %d, %zu", base, more, c.pads, c.pad_id);
}

CLAIM(uses_of_the_padding_id_are_no_part_of_the_gradient)
{
    expect_pad(GEMMA, "", true, 0);
    expect_pad(GEMMA2, "", true, 0);
    expect_pad(GEMMA3, "", true, 0);
    expect_pad(OLMO2, "", true, 1);
    expect_pad(QWEN3, "", false, 0);
    expect_pad(GEMMA, "'pad_token_id':null", false, 0);
    expect_pad(QWEN3, "'pad_token_id':3", true, 3);
    expect_pad(QWEN3, "'pad_token_id':-1", true, config_read(QWEN3, "").vocab - 1);
    expect_pad(LLAMA, "'pad_token_id':-256", true, 0);
    expect_pad(NEOX, "'pad_token_id':256", false, 0);
    config_refused(LLAMA, "'pad_token_id':256", "'pad_token_id' is 256, expected an id of the 256, or null");
    config_refused(LLAMA, "'pad_token_id':-257", "'pad_token_id' is -257");
    config_refused(QWEN3, "'pad_token_id':9223372036854775807", "'pad_token_id' is 9223372036854775807");
    config_refused(QWEN3, "'pad_token_id':-9223372036854775808", "'pad_token_id' is -9223372036854775808");
    config_refused(QWEN3, "'pad_token_id':true", "'pad_token_id'");
}

/* configuration_qwen2.py: 32, configuration_mistral.py: 8, configuration_llama.py: as many as query heads. null is the
 * latter for all. */
CLAIM(kv_heads_that_are_not_given_are_those_of_hugging_face)
{
    static const char most[] = "'vocab_size':9,'hidden_size':64,'intermediate_size':9,'num_hidden_layers':1";
    static const struct {
        const char *model;
        size_t kv_heads;
    } cases[] = {{"llama", 64}, {"qwen2", 32}, {"mistral", 8}, {"qwen3", 32},
                 {"olmo2", 64}, {"gemma", 16}, {"gemma2", 4}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char base[300];
        snprintf(base, sizeof base, "{'model_type':'%s',%s,'num_attention_heads':64,'head_dim':2}", cases[i].model,
                 most);
        cr_expect_eq(config_read(base, "").kv_heads, cases[i].kv_heads, "%s", cases[i].model);
        cr_expect_eq(config_read(base, "'num_key_value_heads':null").kv_heads, 64, "%s", cases[i].model);
        cr_expect_eq(config_read(base, "'num_key_value_heads':16").kv_heads, 16, "%s", cases[i].model);
    }
    config_refused("{'model_type':'qwen2','num_attention_heads':4}", most, "'num_key_value_heads' is missing");
}

/* --- sliding windows ---------------------------------------------------------------------------------------------- */

static void expect_windows(const char *base, const char *more, const size_t window[4])
{
    const ar_config c = config_read(base, more);
    for (size_t i = 0; i < 4; i++)
        cr_expect_eq(ar_config_window(&c, i), window[i], "%s: layer %zu has %zu, expected %zu", more, i,
                     ar_config_window(&c, i), window[i]);
}

CLAIM(qwen2_slides_where_its_file_says)
{
    static const struct {
        const char *more;
        size_t window[4];
    } cases[] = {
        {"", {0}},
        {"'sliding_window':7", {0}}, /* not in use */
        {"'sliding_window':7,'use_sliding_window':false,'max_window_layers':0", {0}},
        {"'sliding_window':7,'use_sliding_window':true", {0}}, /* from layer 28 on */
        {"'sliding_window':7,'use_sliding_window':true,'max_window_layers':1", {0, 7, 7, 7}},
        {"'sliding_window':7,'use_sliding_window':true,'max_window_layers':0", {7, 7, 7, 7}},
        {"'use_sliding_window':true,'max_window_layers':3", {0, 0, 0, 4096}},
        {"'sliding_window':null,'use_sliding_window':true,'max_window_layers':0", {0}},
        {"'sliding_window':7,'use_sliding_window':true,'max_window_layers':4,'layer_types':"
         "['sliding_attention','full_attention','full_attention','sliding_attention']",
         {7, 0, 0, 7}},
        {"'sliding_window':null,'use_sliding_window':false,'layer_types':"
         "['full_attention','full_attention','full_attention','full_attention']",
         {0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        expect_windows(QWEN2, cases[i].more, cases[i].window);
}

CLAIM(mistral_slides_everywhere_or_nowhere)
{
    expect_windows(MISTRAL, "", (size_t[4]){4096, 4096, 4096, 4096});
    expect_windows(MISTRAL, "'sliding_window':null", (size_t[4]){0});
    expect_windows(MISTRAL, "'sliding_window':5", (size_t[4]){5, 5, 5, 5});
    expect_windows(MISTRAL,
                   "'sliding_window':5,'layer_types':['sliding_attention','sliding_attention',"
                   "'sliding_attention','sliding_attention']",
                   (size_t[4]){5, 5, 5, 5});
}

CLAIM(a_window_that_is_not_in_use_is_no_window_of_llama)
{
    expect_windows(LLAMA, "'sliding_window':4096,'use_sliding_window':false", (size_t[4]){0});
}

/* The first 1024 layers each have a say. */
CLAIM(more_layers_than_bits_go_with_the_last_bit)
{
    static const char sizes[] = "{'model_type':'qwen2','vocab_size':9,'hidden_size':2,'intermediate_size':1,"
                                "'num_attention_heads':1,'num_key_value_heads':1,'num_hidden_layers':1100,"
                                "'use_sliding_window':true,'sliding_window':3}";
    ar_config c = config_read(sizes, "'max_window_layers':1023");
    cr_expect(ar_config_window(&c, 1022) == 0 && ar_config_window(&c, 1023) == 3 && ar_config_window(&c, 1099) == 3);
    config_refused(sizes, "'max_window_layers':1024", "1023 and layer 1024");
    c = config_read(sizes, "'max_window_layers':1100");
    cr_expect_eq(ar_config_window(&c, 1099), 0);
}

#define LLAMA3 "'rope_type':'llama3','factor':8,'low_freq_factor':1,'high_freq_factor':4"

CLAIM(scaling_of_llama_3_is_read_from_both_spellings)
{
    static const char *const cases[] = {
        "'rope_theta':5e5,'rope_scaling':{" LLAMA3 ",'original_max_position_embeddings':8192}",
        "'rope_parameters':{" LLAMA3 ",'rope_theta':5e5,'original_max_position_embeddings':8192}",
        "'rope_theta':5e5,'original_max_position_embeddings':8192,'rope_scaling':{" LLAMA3 "}",
        "'max_position_embeddings':8192,'rope_parameters':{'rope_theta':5e5," LLAMA3 "}"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ar_config c = config_read(LLAMA, cases[i]);
        const ar_rope *o = &c.rope;
        cr_expect(o->kind == AR_ROPE_LLAMA3 && o->theta == 5e5 && c.unknown_keys == 0, "%s", cases[i]);
        cr_expect(o->factor == 8 && o->low_freq_factor == 1 && o->high_freq_factor == 4, "%s", cases[i]);
        cr_expect_eq(o->original_positions, 8192, "%s", cases[i]);
    }
    cr_expect_eq(config_read(LLAMA, "").rope.kind, AR_ROPE_DEFAULT);
    cr_expect_eq(config_read(QWEN2, "'rope_scaling':{'type':'linear','factor':2.5}").rope.factor, 2.5);
}

#define TYPES(a, b, c, d) "'layer_types':['" a "','" b "','" c "','" d "']"
#define FULL "full_attention"
#define SLIDES "sliding_attention"
#define SCALED(factor, low, high)                                                                            \
    "'rope_scaling':{'type':'llama3','factor':" factor ",'low_freq_factor':" low ",'high_freq_factor':" high \
    ",'original_max_position_embeddings':8192}"

static const refused_config refused[] = {
    /* windows that make no sense */
    {MISTRAL, "'sliding_window':0", "'sliding_window' is 0"},
    {MISTRAL, "'sliding_window':-1", "'sliding_window' is -1"},
    {MISTRAL, "'sliding_window':4," TYPES(SLIDES, FULL, SLIDES, FULL), "entry 1 is 'full_attention'"},
    {MISTRAL, "'sliding_window':null," TYPES(FULL, FULL, FULL, SLIDES), "entry 3 is 'sliding_attention'"},
    {QWEN2, "'use_sliding_window':true,'sliding_window':0", "'sliding_window' is 0"},
    {QWEN2, "'layer_types':['full_attention']", "has 1 entries, expected one for each of 4 layers"},
    {QWEN2, "'layer_types':[1,2,3,4]", "entry 0 is not a string"},
    {QWEN2, TYPES(FULL, "chunked_attention", FULL, FULL), "entry 1 is 'chunked_attention'"},
    {QWEN2, "'sliding_window':4," TYPES(FULL, FULL, FULL, SLIDES), "'use_sliding_window' true"},
    {LLAMA, TYPES(FULL, FULL, FULL, SLIDES), "'layer_types'"},
    /* biases that a model does not have */
    {QWEN2, "'attention_bias':false", "'attention_bias' is false"},
    {QWEN2, "'mlp_bias':true", "'mlp_bias' is true"},
    {MISTRAL, "'attention_bias':true", "'attention_bias' is true"},
    {MISTRAL, "'mlp_bias':true", "'mlp_bias' is true"},
    /* scaling of Llama 3 that makes no sense */
    {LLAMA, SCALED("0.5", "1", "4"), "'factor' is 0.5"},
    {LLAMA, SCALED("'8'", "1", "4"), "'factor'"},
    {LLAMA, SCALED("8", "0", "4"), "'low_freq_factor' is 0"},
    {LLAMA, SCALED("8", "4", "4"), "'high_freq_factor' is 4"},
    {LLAMA, SCALED("8", "4", "1"), "'high_freq_factor' is 1"},
    {LLAMA, SCALED("8", "1", "null"), "'high_freq_factor' is missing"},
    {LLAMA, "'rope_scaling':{" LLAMA3 ",'original_max_position_embeddings':0}",
     "'original_max_position_embeddings' is 0"},
    {LLAMA, "'original_max_position_embeddings':4096," SCALED("8", "1", "4"),
     "'original_max_position_embeddings' is 8192, but 4096 beside it"},
    {LLAMA, "'original_max_position_embeddings':16384," SCALED("8", "1", "4"),
     "'original_max_position_embeddings' is 8192, but 16384 beside it"},
    {LLAMA, "'rope_scaling':{'type':'default','mrope_section':[16,24,24]}", "'mrope_section'"},
    /* keys that these do not compute */
    {QWEN3, "'mlp_bias':true", "'mlp_bias' is true"},
    {GEMMA, "'hidden_act':'silu','hidden_activation':'gelu_pytorch_tanh'", "two activations"},
    {GEMMA2, "'hidden_act':'silu'", "two activations"},
    {GEMMA2, "'final_logit_softcapping':-1", "'final_logit_softcapping' is -1"},
    {GEMMA2, "'attn_logit_softcapping':0", "'attn_logit_softcapping' is 0"},
    {GEMMA2, "'query_pre_attn_scalar':0", "'query_pre_attn_scalar' is 0"},
    {GEMMA2, "'sliding_window':null", "'sliding_window' is null"},
    {GEMMA3, "'sliding_window_pattern':0", "'sliding_window_pattern' is 0"},
    {GEMMA3, "'rope_parameters':{'rope_type':'default'}", "'rope_parameters' has neither"},
    {GEMMA3, "'rope_parameters':{'full_attention':3}", "'full_attention' is not an object"},
    /* keys of other models of the family */
    {GPT2, "'hidden_size':32", "'hidden_size' is 32, but 'n_embd', which means the same, is 64"},
};

CLAIM(what_these_models_do_not_have_is_refused)
{
    configs_refused(refused, sizeof refused / sizeof *refused);
    config_each(MISTRAL, "{'sliding_window':[4.5,'4'],'num_local_experts':[8]}", true);
    config_each(QWEN2,
                "{'use_sliding_window':[1],'max_window_layers':[-1],'layer_types':['full_attention'],"
                "'num_experts':[60],'shared_expert_intermediate_size':[5632]}",
                true);
    config_each(LLAMA,
                "{'sliding_window':[4],'use_sliding_window':[true],'is_causal':[false],"
                "'use_bidirectional_attention':[true],'scale_emb':[12],'scale_depth':[1.4],"
                "'kv_lora_rank':[512],'rope_local_base_freq':[1e4],'vision_config':[{'depth':2}],"
                "'per_layer_config':[{'0':{'num_key_value_heads':1}}],'moe':[true]}",
                true);
    config_each(GPT2, "{'sliding_window':[4],'num_attention_heads':[2]}", true);
    config_each(QWEN3, "{'num_experts':[8],'final_logit_softcapping':[30.0]}", true);
    config_each(OLMO2, "{'clip_qkv':[8.0],'sliding_window':[4],'hidden_activation':['silu']}", true);
    config_each(GEMMA, "{'attn_logit_softcapping':[50.0],'use_bidirectional_attention':[true]}", true);
    config_each(GEMMA2, "{'sliding_window_pattern':[3]}", true);
    config_each(GEMMA3, "{'attn_logit_softcapping':[50.0],'rope_local_base_freq':[-1]}", true);
    cr_expect_not(config_read(MISTRAL, "'attention_bias':false,'mlp_bias':false").qkv_bias);
}

/* --- what is noted ------------------------------------------------------------------------------------------------ */

CLAIM(keys_that_nobody_knows_are_noted_by_name)
{
    ar_config c = config_read(LLAMA, "'no_such_key':1,'torch_dtype':'bfloat16','another\\u001b':{},'unset':null");
    cr_expect_eq(c.unknown_keys, 2);
    cr_expect_str_eq(c.unknown[0], "no_such_key");
    cr_expect_str_eq(c.unknown[1], "another?"); /* no terminal sees what it holds */
    c = config_read(LLAMA, "'rope_scaling':{'type':'linear','factor':2,'beta_fast':32}");
    cr_expect_eq(c.unknown_keys, 1);
    cr_expect_str_eq(c.unknown[0], "rope_scaling.beta_fast");
    c = config_read(LLAMA, "'max_window_layers':1");
    cr_expect_str_eq(c.unknown[0], "max_window_layers");
    cr_expect_eq(config_read(QWEN2, "'max_window_layers':1").unknown_keys, 0);
    cr_expect_eq(config_read(GPT2, "'rope_theta':1e4").unknown_keys, 1);
}

CLAIM(more_unknown_keys_than_are_kept_are_counted)
{
    char more[600] = "";
    for (int i = 0; i < 11; i++)
        snprintf(more + strlen(more), sizeof more - strlen(more), "%s'key_%d':0", i > 0 ? "," : "", i);
    snprintf(more + strlen(more), sizeof more - strlen(more),
             ",'a_key_whose_name_is_longer_than_any_line_in_a_report_can_show':1");
    const ar_config c = config_read(MISTRAL, more);
    cr_expect_eq(c.unknown_keys, 12);
    cr_expect_str_eq(c.unknown[AR_CONFIG_NOTES - 1], "key_7");
}

EVERY_CLAIM(config_models)
