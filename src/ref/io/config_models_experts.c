/* SPDX-License-Identifier: Apache-2.0 */
/* Models of Llama's form with experts. */
#include <math.h>

#include "ref/core/atomic_file.h"
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

/* A number that the class takes from the file, and that is one of the activation's own here. */
static ar_status expect_number(const ari_json_at *at, const char *key, double value, const char *wanted)
{
    double said = value;
    AR_TRY(ari_json_real_or(at, key, &said));
    return said == value ? AR_OK : ari_config_refuse_key(at, key, wanted);
}

/* Of transformers' configuration_gpt_oss.py. The softmax over the chosen logits is that over all, divided by its sum over
 * the chosen. */
ar_status ari_config_gpt_oss(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {.arch = AR_ARCH_GPT_OSS,
                                        .called = "GPT-OSS",
                                        .kv_heads = 8,
                                        .positions = 131072,
                                        .rope = {.theta = 150000.0},
                                        .head_dim = 64,
                                        .norm_eps = 1e-5};
    static const ari_experts_form experts = {
        .n = 128, .per_token = 4, .one_width = true, .normalised = true, .balance_weight = 0.001};
    AR_TRY(ari_config_llama_form(c, at, &form));
    if (ari_json_get(at, "rope_parameters") == NULL && ari_json_get(at, "rope_scaling") == NULL)
        c->rope = (ar_rope){.kind = AR_ROPE_YARN,
                            .theta = c->rope.theta,
                            .factor = 32,
                            .beta_fast = 32,
                            .beta_slow = 1,
                            .original_positions = 4096};
    AR_TRY(expect_number(at, "swiglu_limit", 7.0, "7"));
    AR_TRY(expect_number(at, "swiglu_alpha", 1.702, "1.702"));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", true, "GPT-OSS's experts have biases"));
    AR_TRY(
        ari_config_expect_bias(at, "norm_topk_prob", true, "GPT-OSS's weights are a softmax over a token's experts"));
    c->qkv_bias = true;
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    c->out_bias = c->qkv_bias;
    AR_TRY(ari_config_window_pattern(c, at, 2));
    if (json_object_get(at->object, "sliding_window") == NULL)
        c->window = 128;
    AR_TRY(ari_config_experts(c, at, &experts));
    c->activation = AR_ACT_CLAMPED;
    c->sinks = c->experts.bias = true;
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

/* --- latent attention --------------------------------------------------------------------------------------------- */

/* What there is of YaRN's factor in the scale of the scores besides that in cosines and sines. */
static double mscale_of(const ar_rope *r)
{
    const bool any = r->kind == AR_ROPE_YARN && r->mscale_all_dim > 0.0 && r->factor > 1.0;
    return any ? 0.1 * r->mscale_all_dim * log(r->factor) + 1.0 : 1.0;
}

/* The rotation is of the features of a key that all heads share, and so is the file's head_dim, where it has one. */
static ar_status read_latent_rope(ar_config *c, const ari_json_at *at)
{
    static const ari_rope_form form = {.partial = false};
    bool interleaved = true;
    c->head_dim = c->latent.rope_dim;
    AR_TRY(ari_config_rope(c, at, &form));
    AR_TRY(ari_json_bool_or(at, "rope_interleave", &interleaved));
    c->rope.rotary_dim = c->latent.rope_dim;
    c->rope.last = true;
    c->rope.interleaved = interleaved;
    return AR_OK;
}

static ar_status read_latent(ar_config *c, const ari_json_at *at)
{
    ar_latent *l = &c->latent;
    size_t plain = 128;
    *l = (ar_latent){.kv_rank = 512, .q_rank = 1536, .rope_dim = 64, .value_dim = 128};
    AR_TRY(ari_config_dim_or(at, "kv_lora_rank", &l->kv_rank));
    if (json_is_null(json_object_get(at->object, "q_lora_rank")))
        l->q_rank = 0;
    AR_TRY(ari_config_dim_or(at, "q_lora_rank", &l->q_rank));
    AR_TRY(ari_config_dim_or(at, "qk_nope_head_dim", &plain));
    AR_TRY(ari_config_dim_or(at, "qk_rope_head_dim", &l->rope_dim));
    AR_TRY(ari_config_dim_or(at, "v_head_dim", &l->value_dim));
    if (l->rope_dim % 2 != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'qk_rope_head_dim' is %zu, expected an even number",
                            ARI_SHOW(at->name), l->rope_dim);
    if (c->kv_heads != c->heads)
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: key 'num_key_value_heads' is %zu, expected the %zu heads, which all have their own "
                            "keys and values",
                            ARI_SHOW(at->name), c->kv_heads, c->heads);
    AR_TRY(read_latent_rope(c, at));
    c->head_dim = plain + l->rope_dim;
    const double m = mscale_of(&c->rope);
    c->query_scalar = (double)c->head_dim / (m * m * m * m);
    return AR_OK;
}

static ar_status read_deepseek(ar_config *c, const ari_json_at *at, const ari_llama_form *form,
                               const ari_experts_form *experts)
{
    AR_TRY(ari_config_window_none(at));
    AR_TRY(ari_config_llama_form(c, at, form));
    AR_TRY(ari_config_expect_bias(at, "mlp_bias", false, "DeepSeek's MLPs have no biases"));
    AR_TRY(ari_config_attention_bias(c, at));
    AR_TRY(read_latent(c, at));
    AR_TRY(ari_config_score_experts(c, at, experts));
    ari_config_note_llama(c, at, KNOWS_EXPERTS);
    return AR_OK;
}

/* Of transformers' configuration_deepseek_v2.py. */
ar_status ari_config_deepseek_v2(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_DEEPSEEK, .called = "DeepSeek-V2", .positions = 2048, .head_dim = 1, .two_ropes = true};
    static const ari_experts_form experts = {.n = 64, .ffn = 1407, .shared = 2, .softmax = true};
    if (ari_json_get(at, "rope_interleave") != NULL && !json_is_true(ari_json_get(at, "rope_interleave")))
        return ari_config_refuse_key(at, "rope_interleave", "true");
    return read_deepseek(c, at, &form, &experts);
}

/* Of transformers' configuration_deepseek_v3.py. The layers for further tokens are not computed there either. */
ar_status ari_config_deepseek_v3(ar_config *c, const ari_json_at *at)
{
    static const ari_llama_form form = {
        .arch = AR_ARCH_DEEPSEEK, .called = "DeepSeek-V3", .positions = 4096, .head_dim = 1, .two_ropes = true};
    static const ari_experts_form experts = {.n = 256,
                                             .per_token = 8,
                                             .ffn = 2048,
                                             .shared = 1,
                                             .normalised = true,
                                             .dense = 3,
                                             .groups = 8,
                                             .kept = 4,
                                             .scale = 2.5};
    return read_deepseek(c, at, &form, &experts);
}
