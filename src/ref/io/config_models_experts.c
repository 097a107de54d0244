/* SPDX-License-Identifier: Apache-2.0 */
/* Models of Llama's form with experts. */
#include "ref/io/config_parts.h"

ar_status ari_config_mixtral(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {.arch = AR_ARCH_MIXTRAL,
                                        .called = "Mixtral",
                                        .kv_heads = 8,
                                        .positions = 131072,
                                        .rope = {.theta = 1000000.0},
                                        .norm_eps = 1e-5};
    static const ari_experts_form experts = {
        .n = 8, .per_token = 2, .one_width = true, .normalised = true, .w123 = true, .balance_weight = 0.001};
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "attention_bias", false, "Mixtral has no biases"));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "Mixtral has no biases"));
    AR_TRY(ari_config_expect_bias(at, "norm_topk_prob", true, "Mixtral always divides a token's weights by their sum"));
    AR_TRY(ari_config_window_everywhere(c, at, 0, "Mixtral"));
    AR_TRY(ari_config_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

ar_status ari_config_qwen2_moe(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_QWEN2_MOE, .called = "Qwen2-MoE", .kv_heads = 16, .positions = 32768};
    static const ari_experts_form experts = {
        .n = 60, .per_token = 4, .ffn = 1408, .shared = 5632, .balance_weight = 0.001};
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "Qwen2-MoE's MLPs have no biases"));
    c->qkv_bias = true;
    AR_TRY(ari_json_bool_or(at, "qkv_bias", &c->qkv_bias));
    AR_TRY(ari_config_window_qwen2(c, at, true));
    AR_TRY(ari_config_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

/* use_sliding_window is of all layers. */
ar_status ari_config_qwen3_moe(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_QWEN3_MOE, .called = "Qwen3-MoE", .kv_heads = 4, .positions = 32768};
    static const ari_experts_form experts = {.n = 128, .per_token = 8, .ffn = 768, .balance_weight = 0.001};
    bool slides = false;
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "Qwen3-MoE's MLPs have no biases"));
    AR_TRY(ari_config_attention_bias(c, at));
    c->qk_norm = AR_QK_NORM_HEAD;
    AR_TRY(ari_json_bool_or(at, "use_sliding_window", &slides));
    if (slides)
        AR_TRY(ari_config_window_everywhere(c, at, 4096, "Qwen3-MoE"));
    AR_TRY(ari_config_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

ar_status ari_config_olmoe(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_QWEN3_MOE, .called = "OLMoE", .positions = 4096, .norm_eps = 1e-5, .pads = true, .pad_id = 1};
    static const ari_experts_form experts = {.n = 64, .per_token = 8, .one_width = true, .balance_weight = 0.01};
    AR_TRY(ari_config_window_none(at));
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "OLMoE's experts have no biases"));
    AR_TRY(ari_config_attention_bias(c, at));
    c->qk_norm = AR_QK_NORM_WIDTH;
    AR_TRY(ari_config_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

/* Of transformers' configuration_dots1.py. */
ar_status ari_config_dots1(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_GLM4_MOE, .called = "dots.llm1", .kv_heads = 32, .positions = 2048};
    static const ari_experts_form experts = {.ffn = 1408};
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "dots.llm1's MLPs have no biases"));
    AR_TRY(ari_config_attention_bias(c, at));
    c->qk_norm = AR_QK_NORM_HEAD;
    AR_TRY(ari_config_window_dots1(c, at));
    AR_TRY(ari_config_score_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

/* Of transformers' configuration_glm4_moe.py. The layers for further tokens (num_nextn_predict_layers), which stand
 * behind those of the model, are not computed there either. */
ar_status ari_config_glm4_moe(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {.arch = AR_ARCH_GLM4_MOE,
                                        .called = "GLM-4.5",
                                        .kv_heads = 8,
                                        .positions = 131072,
                                        .norm_eps = 1e-5,
                                        .rope = {.partial = true, .share = 0.5}};
    static const ari_experts_form experts = {
        .n = 128, .per_token = 8, .ffn = 1408, .shared = 1, .normalised = true, .dense = 1};
    bool normed = false;
    AR_TRY(ari_config_window_none(at));
    AR_TRY(ari_config_llama_form(c, at, &form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "GLM-4.5's MLPs have no biases"));
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    AR_TRY(ari_json_bool_or(at, "use_qk_norm", &normed));
    c->qk_norm = normed ? AR_QK_NORM_HEAD : AR_QK_NORM_NONE;
    AR_TRY(ari_config_score_experts(c, at, &experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}
