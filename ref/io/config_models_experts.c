/* SPDX-License-Identifier: Apache-2.0 */
/* Models of Llama's form with experts. */
#include <math.h>

#include "anyrank/activation.h"
#include "ref/core/atomic_file.h"
#include "ref/io/config_parts.h"

static const ari_experts_form mixtral =
    ARI_FORM(.n = 8, .per_token = 2, .one_width = true, .normalised = true, .w123 = true, .balance_weight = 0.001);
const ari_llama_form ari_config_mixtral =
    ARI_FORM(.arch = AR_ARCH_MIXTRAL, .called = "Mixtral", .kv_heads = 8, .positions = 131072,
             .rope = {.theta = 1000000.0}, .norm_eps = 1e-5, .biases = ARI_BIASES_NONE, .window = ARI_WINDOW_EVERYWHERE,
             .experts = &mixtral);

static const ari_experts_form minimax_m2 =
    ARI_FORM(.n = 256, .per_token = 8, .one_width = true, .normalised = true, .w123 = true, .scored = true);
/* Of transformers' configuration_minimax_m2.py: Mixtral's names, with norms of q and k and a router of sigmoids. Files
 * say in rotary_dim which features turn, where no partial_rotary_factor does. */
ar_status ari_config_minimax_m2(ar_config *c, const ari_json_at *at)
{
    ari_llama_form form = ARI_FORM(.arch = AR_ARCH_MIXTRAL, .called = "MiniMax-M2", .kv_heads = 8, .positions = 196608,
                                   .rope = {.theta = 5000000.0, .partial = true}, .head_dim = 128,
                                   .qk_norm = AR_QK_NORM_WIDTH, .biases = ARI_BIASES_NONE, .experts = &minimax_m2);
    const char *kind = "per_layer", *scores = "sigmoid";
    bool norms = true, bias = true;
    size_t head = form.head_dim, turned = 0;
    AR_TRY(ari_json_string_or(at, "qk_norm_type", &kind));
    AR_TRY(ari_json_string_or(at, "scoring_func", &scores));
    AR_TRY(ari_json_bool_or(at, "use_qk_norm", &norms));
    AR_TRY(ari_json_bool_or(at, "use_routing_bias", &bias));
    AR_TRY(ari_config_dim_or(at, "head_dim", &head));
    AR_TRY(ari_config_dim_or(at, "rotary_dim", &turned));
    if (strcmp(kind, "per_layer") != 0 || !norms)
        return ari_config_refuse_key(at, "qk_norm_type", "'per_layer', with 'use_qk_norm' true");
    if (strcmp(scores, "sigmoid") != 0 || !bias)
        return ari_config_refuse_key(at, "scoring_func", "'sigmoid', with 'use_routing_bias' true");
    if (turned % 2 != 0 || turned > head)
        return ari_json_wrong(at, "rotary_dim", " is %zu, expected an even number up to the %zu features", turned,
                              head);
    form.rope.share = (double)turned / (double)head;
    return ari_config_llama_form(c, at, &form);
}

static ar_status read_qwen2_moe(ar_config *c, const ari_json_at *at)
{
    c->qkv_bias = true;
    return ari_json_bool_or(at, "qkv_bias", &c->qkv_bias);
}

static const ari_experts_form qwen2_moe =
    ARI_FORM(.n = 60, .per_token = 4, .ffn = 1408, .shared = 5632, .balance_weight = 0.001);
const ari_llama_form ari_config_qwen2_moe =
    ARI_FORM(.arch = AR_ARCH_QWEN2_MOE, .called = "Qwen2-MoE", .kv_heads = 16, .positions = 32768,
             .biases = ARI_BIASES_OWN_ATTENTION, .window = ARI_WINDOW_QWEN2_MOE, .window_number = 28,
             .experts = &qwen2_moe, .more = read_qwen2_moe);

/* use_sliding_window is of all layers. */
static ar_status read_qwen3_moe(ar_config *c, const ari_json_at *at)
{
    bool slides = false;
    AR_TRY(ari_json_bool_or(at, "use_sliding_window", &slides));
    return slides ? ari_config_windows(c, at, ARI_WINDOW_EVERYWHERE, 4096, "Qwen3-MoE") : AR_OK;
}

static const ari_experts_form qwen3_moe = {.n = 128, .per_token = 8, .ffn = 768, .balance_weight = 0.001};
const ari_llama_form ari_config_qwen3_moe =
    ARI_FORM(.arch = AR_ARCH_QWEN3_MOE, .called = "Qwen3-MoE", .kv_heads = 4, .positions = 32768,
             .qk_norm = AR_QK_NORM_HEAD, .window = ARI_WINDOW_OWN, .experts = &qwen3_moe, .more = read_qwen3_moe);

static const ari_experts_form olmoe = {.n = 64, .per_token = 8, .one_width = true, .balance_weight = 0.01};
const ari_llama_form ari_config_olmoe =
    ARI_FORM(.arch = AR_ARCH_QWEN3_MOE, .called = "OLMoE", .positions = 4096, .norm_eps = 1e-5, .pads = true,
             .pad_id = 1, .qk_norm = AR_QK_NORM_WIDTH, .experts = &olmoe);

/* A number that the class takes from the file, and that is one of the activation's own here. */
static ar_status expect_number(const ari_json_at *at, const char *key, double value, const char *wanted)
{
    double said = value;
    AR_TRY(ari_json_real_or(at, key, &said));
    return said == value ? AR_OK : ari_config_refuse_key(at, key, wanted);
}

/* Of transformers' configuration_gpt_oss.py. The softmax over the chosen logits is that over all, divided by its sum over
 * the chosen. */
static ar_status read_gpt_oss(ar_config *c, const ari_json_at *at)
{
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
    c->qkv_bias = true;
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    c->out_bias = c->qkv_bias;
    if (json_object_get(at->object, "sliding_window") == NULL)
        c->window = 128;
    c->activation = AR_ACT_CLAMPED;
    c->sinks = true;
    return AR_OK;
}

static const ari_experts_form gpt_oss =
    ARI_FORM(.n = 128, .per_token = 4, .one_width = true, .normalised = true, .bias = true, .balance_weight = 0.001);
const ari_llama_form ari_config_gpt_oss =
    ARI_FORM(.arch = AR_ARCH_GPT_OSS, .called = "GPT-OSS", .kv_heads = 8, .positions = 131072,
             .rope = {.theta = 150000.0}, .head_dim = 64, .norm_eps = 1e-5, .biases = ARI_BIASES_OWN,
             .window = ARI_WINDOW_PATTERN, .window_number = 2, .experts = &gpt_oss, .more = read_gpt_oss);

/* Of transformers' configuration_dots1.py. */
static const ari_experts_form dots1 = {.ffn = 1408, .scored = true};
const ari_llama_form ari_config_dots1 =
    ARI_FORM(.arch = AR_ARCH_GLM4_MOE, .called = "dots.llm1", .kv_heads = 32, .positions = 2048,
             .qk_norm = AR_QK_NORM_HEAD, .window = ARI_WINDOW_DOTS1, .window_number = 62, .experts = &dots1);

/* Of transformers' configuration_glm4_moe.py. The layers for further tokens (num_nextn_predict_layers), which stand
 * behind those of the model, are not computed there either. */
static ar_status read_glm4_moe(ar_config *c, const ari_json_at *at)
{
    bool normed = false;
    AR_TRY(ari_json_bool_or(at, "attention_bias", &c->qkv_bias));
    AR_TRY(ari_json_bool_or(at, "use_qk_norm", &normed));
    c->qk_norm = normed ? AR_QK_NORM_HEAD : AR_QK_NORM_NONE;
    return AR_OK;
}

static const ari_experts_form glm4_moe =
    ARI_FORM(.n = 128, .per_token = 8, .ffn = 1408, .shared = 1, .normalised = true, .dense = 1, .scored = true);
const ari_llama_form ari_config_glm4_moe =
    ARI_FORM(.arch = AR_ARCH_GLM4_MOE, .called = "GLM-4.5", .kv_heads = 8, .positions = 131072, .norm_eps = 1e-5,
             .rope = {.partial = true, .share = 0.5}, .biases = ARI_BIASES_OWN_ATTENTION, .experts = &glm4_moe,
             .more = read_glm4_moe);

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
    bool interleaved = !json_is_null(json_object_get(at->object, "rope_interleave")); /* Python's None is false */
    if (ari_json_get(at, "head_dim") != NULL && c->head_dim != c->latent.rope_dim)
        return ari_json_wrong(at, "head_dim", " is %zu, but 'qk_rope_head_dim', which means the same, is %zu",
                              c->head_dim, c->latent.rope_dim);
    c->head_dim = c->latent.rope_dim;
    AR_TRY(ari_config_rope(c, at, &form));
    AR_TRY(ari_json_bool_or(at, "rope_interleave", &interleaved));
    c->rope.rotary_dim = c->latent.rope_dim;
    c->rope.last = true;
    c->rope.interleaved = interleaved;
    return AR_OK;
}

/* plain: features of a key that do not turn, where the file does not say. */
static ar_status read_latent(ar_config *c, const ari_json_at *at, ar_latent otherwise, size_t plain)
{
    ar_latent *l = &c->latent;
    *l = otherwise;
    AR_TRY(ari_config_dim_or(at, "kv_lora_rank", &l->kv_rank));
    if (json_is_null(json_object_get(at->object, "q_lora_rank")))
        l->q_rank = 0;
    AR_TRY(ari_config_dim_or(at, "q_lora_rank", &l->q_rank));
    AR_TRY(ari_config_dim_or(at, "qk_nope_head_dim", &plain));
    AR_TRY(ari_config_dim_or(at, "qk_rope_head_dim", &l->rope_dim));
    AR_TRY(ari_config_dim_or(at, "v_head_dim", &l->value_dim));
    if (l->rope_dim % 2 != 0)
        return ari_json_wrong(at, "qk_rope_head_dim", " is %zu, expected an even number", l->rope_dim);
    if (c->kv_heads != c->heads)
        return ari_json_wrong(at, "num_key_value_heads",
                              " is %zu, expected the %zu heads, which all have their own keys and values", c->kv_heads,
                              c->heads);
    AR_TRY(read_latent_rope(c, at));
    c->head_dim = plain + l->rope_dim;
    const double m = mscale_of(&c->rope);
    c->query_scalar = (double)c->head_dim / (m * m * m * m);
    return AR_OK;
}

static ar_status read_deepseek_v3(ar_config *c, const ari_json_at *at)
{
    return read_latent(c, at, (ar_latent){.kv_rank = 512, .q_rank = 1536, .rope_dim = 64, .value_dim = 128}, 128);
}

/* Of transformers' configuration_deepseek_v2.py. */
static ar_status read_deepseek_v2(ar_config *c, const ari_json_at *at)
{
    if (ari_json_get(at, "rope_interleave") != NULL && !json_is_true(ari_json_get(at, "rope_interleave")))
        return ari_config_refuse_key(at, "rope_interleave", "true");
    return read_deepseek_v3(c, at);
}

static const ari_experts_form deepseek_v2 = {.n = 64, .ffn = 1407, .shared = 2, .softmax = true, .scored = true};
const ari_llama_form ari_config_deepseek_v2 =
    ARI_FORM(.arch = AR_ARCH_DEEPSEEK, .called = "DeepSeek-V2", .positions = 2048, .head_dim = 1, .two_ropes = true,
             .experts = &deepseek_v2, .more = read_deepseek_v2);

/* Of transformers' configuration_deepseek_v3.py. The layers for further tokens are not computed there either. */
static const ari_experts_form deepseek_v3 =
    ARI_FORM(.n = 256, .per_token = 8, .ffn = 2048, .shared = 1, .normalised = true, .dense = 3, .groups = 8, .kept = 4,
             .scale = 2.5, .scored = true);
const ari_llama_form ari_config_deepseek_v3 =
    ARI_FORM(.arch = AR_ARCH_DEEPSEEK, .called = "DeepSeek-V3", .positions = 4096, .head_dim = 1, .two_ropes = true,
             .experts = &deepseek_v3, .more = read_deepseek_v3);

/* Of transformers' configuration_glm4_moe_lite.py: DeepSeek-V3's form. */
static ar_status read_glm4_moe_lite(ar_config *c, const ari_json_at *at)
{
    return read_latent(c, at, (ar_latent){.kv_rank = 512, .q_rank = 768, .rope_dim = 64, .value_dim = 256}, 192);
}

static const ari_experts_form glm4_moe_lite =
    ARI_FORM(.n = 64, .per_token = 4, .ffn = 1536, .shared = 1, .normalised = true, .dense = 1, .typed = true,
             .scale = 1.8, .scored = true);
const ari_llama_form ari_config_glm4_moe_lite =
    ARI_FORM(.arch = AR_ARCH_DEEPSEEK, .called = "GLM-4.7-Flash", .positions = 202752, .head_dim = 1, .norm_eps = 1e-5,
             .two_ropes = true, .experts = &glm4_moe_lite, .more = read_glm4_moe_lite);
