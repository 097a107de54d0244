/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>

#include "anyrank/activation.h"
#include "ref/core/atomic_file.h"
#include "ref/io/config_parts.h"

/* Sizes must be given: a file that leaves out hidden_size is damaged, not a 7B model. What Hugging Face itself leaves
 * out or writes as null has its defaults (transformers, the models' configuration_NAME.py). */

#define COUNT(list) (sizeof(list) / sizeof *(list))

static ar_status read_kv_heads(ar_config *c, const ari_json_at *at, const ari_llama_form *form)
{
    const bool absent = json_object_get(at->object, "num_key_value_heads") == NULL;
    c->kv_heads = absent && form->kv_heads > 0 ? form->kv_heads : c->heads;
    if (absent && c->heads % c->kv_heads != 0)
        return ari_json_wrong(at, "num_key_value_heads",
                              " is missing, and the %zu that %s has then do not divide the %zu heads", c->kv_heads,
                              form->called, c->heads);
    return ari_config_dim_or(at, "num_key_value_heads", &c->kv_heads);
}

/* The id whose uses torch.nn.Embedding leaves out of the gradient: below 0 counted from the vocabulary's end. GPT-NeoX
 * has none, nor has a vocabulary that does not reach the class's own. */
static ar_status read_padding(ar_config *c, const ari_json_at *at, const ari_llama_form *form)
{
    const json_t *said = json_object_get(at->object, "pad_token_id");
    if (said != NULL && !json_is_null(said) && !json_is_integer(said))
        return ari_json_wrong(at, "pad_token_id", " is not a whole number, expected one or null");
    const json_int_t from = said == NULL ? (json_int_t)form->pad_id : json_integer_value(said);
    const json_int_t vocab = (json_int_t)c->vocab, id = from < 0 ? from + vocab : from;
    const bool inside = id >= 0 && id < vocab, padded = form->arch != AR_ARCH_GPT_NEOX;
    if (said != NULL && padded && !inside)
        return ari_json_wrong(at, "pad_token_id", " is %" JSON_INTEGER_FORMAT ", expected an id of the %zu, or null",
                              from, c->vocab);
    c->pads = inside && (said == NULL ? form->pads : json_is_integer(said)) && padded;
    c->pad_id = c->pads ? (size_t)id : 0;
    return AR_OK;
}

/* Blocks for further tokens, which transformers leaves out: they are trained where the file has the weight of their
 * losses, by Megatron's name. */
static ar_status read_mtp(ar_config *c, const ari_json_at *at)
{
    size_t depth = 0;
    AR_TRY(ari_json_size_or(at, "num_nextn_predict_layers", 0, AR_MAX_MTP, &depth));
    AR_TRY(ari_json_real_or(at, "mtp_loss_scaling_factor", &c->mtp_weight));
    if (!(c->mtp_weight >= 0.0 && c->mtp_weight <= 1e6))
        return ari_json_wrong(at, "mtp_loss_scaling_factor", " is %g, expected from 0 to 1e6", c->mtp_weight);
    if (c->mtp_weight > 0.0 && depth == 0)
        return ari_json_wrong(at, "mtp_loss_scaling_factor", " without 'num_nextn_predict_layers'");
    if (c->mtp_weight > 0.0)
        c->mtp = depth;
    c->mtp_unused = depth - c->mtp;
    return AR_OK;
}

ar_status ari_config_expect_bias(const ari_json_at *at, const char *key, bool has, const char *model)
{
    bool said = has;
    AR_TRY(ari_json_bool_or(at, key, &said));
    if (said != has)
        return ari_json_wrong(at, key, " is %s, but %s; expected %s or no such key", said ? "true" : "false", model,
                              has ? "true" : "false");
    return AR_OK;
}

/* The biases that have Llama's keys. */
static ar_status read_biases(ar_config *c, const ari_json_at *at, const ari_llama_form *form)
{
    char why[64];
    bool attention = false;
    snprintf(why, sizeof why, "%s has no biases", form->called);
    if (form->biases == ARI_BIASES_NONE)
        AR_TRY(ari_config_expect_bias(at, "attention_bias", false, why));
    else if (form->biases <= ARI_BIASES_BOTH)
        AR_TRY(ari_json_bool_or(at, "attention_bias", &attention));
    c->qkv_bias = c->out_bias = attention;
    if (form->biases == ARI_BIASES_OWN)
        return AR_OK;
    snprintf(why, sizeof why, "%s's MLP has no biases", form->called);
    return form->biases == ARI_BIASES_BOTH ? ari_json_bool_or(at, "mlp_bias", &c->mlp_bias)
                                           : ari_config_expect_bias(at, "mlp_bias", false, why);
}

/* Notes what no model of the form has. Those with keys of their own know none of the others' norms and biases. */
static void note_keys(ar_config *c, const ari_json_at *at, const ari_llama_form *form)
{
    enum { SHARED = 18, ALL = 34 };
    const char *keys[ALL + ARI_OWN_KEYS] = {
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "head_dim", "num_nextn_predict_layers",
        "mtp_loss_scaling_factor", "hidden_act", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
        "original_max_position_embeddings", "sliding_window", "layer_types",
        /* of those that have Llama's norms and biases */
        "rms_norm_eps", "attention_bias", "mlp_bias", "use_sliding_window",
        "_sliding_window_pattern" /* where layer_types says it already */,
        /* of Qwen's models, and of those with experts */
        "max_window_layers", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", "qkv_bias",
        "mlp_layer_types"};
    size_t n = form->own[0] ? SHARED : form->experts ? ALL : form->window == ARI_WINDOW_QWEN2 ? ALL - 10 : ALL - 11;
    for (size_t i = 0; i < ARI_OWN_KEYS && form->own[i]; i++)
        keys[n++] = form->own[i];
    ari_config_note_others(c, "", at->object, keys, n);
}

ar_status ari_config_llama_form(ar_config *c, const ari_json_at *at, const ari_llama_form *form)
{
    c->arch = form->arch;
    c->norm_place = form->norm_place;
    c->qk_norm = form->qk_norm;
    c->norm = AR_NORM_RMS;
    c->gated = true;
    c->final_norm = true;
    c->activation = form->activation_key ? AR_ACT_GELU_TANH : AR_ACT_SILU;
    c->norm_eps = form->norm_eps > 0.0 ? form->norm_eps : 1e-6;
    c->max_positions = form->positions;
    c->head_dim = form->head_dim;
    c->tied = form->tied;
    if (form->window == ARI_WINDOW_NONE)
        AR_TRY(ari_config_window_none(at));
    AR_TRY(ari_config_dim(at, "vocab_size", &c->vocab));
    AR_TRY(read_padding(c, at, form));
    AR_TRY(ari_config_dim(at, "hidden_size", &c->hidden));
    AR_TRY(ari_config_dim(at, "intermediate_size", &c->ffn));
    AR_TRY(ari_json_size(at, "num_hidden_layers", 1, ARI_CONFIG_MAX_LAYERS, &c->layers));
    AR_TRY(ari_config_dim(at, "num_attention_heads", &c->heads));
    AR_TRY(read_kv_heads(c, at, form));
    AR_TRY(ari_config_dim_or(at, "max_position_embeddings", &c->max_positions));
    if (ari_json_get(at, "head_dim") != NULL)
        AR_TRY(ari_config_dim(at, "head_dim", &c->head_dim));
    else if (form->head_dim == 0)
        AR_TRY(ari_config_head_dim(c, at, "hidden_size", "num_attention_heads"));
    AR_TRY(ari_config_activation(at, form->activation_key ? form->activation_key : "hidden_act", &c->activation));
    AR_TRY(ari_json_real_or(at, "rms_norm_eps", &c->norm_eps));
    AR_TRY(ari_json_bool_or(at, "tie_word_embeddings", &c->tied));
    AR_TRY(read_mtp(c, at));
    if (!form->two_ropes)
        AR_TRY(ari_config_rope(c, at, &form->rope));
    AR_TRY(read_biases(c, at, form));
    if (form->window != ARI_WINDOW_NONE && form->window != ARI_WINDOW_OWN)
        AR_TRY(ari_config_windows(c, at, form->window, form->window_number, form->called));
    if (form->more)
        AR_TRY(form->more(c, at));
    if (form->experts)
        AR_TRY((form->experts->scored && !form->experts->one_width ? ari_config_score_experts
                                                                   : ari_config_experts)(c, at, form));
    note_keys(c, at, form);
    return AR_OK;
}

/* --- models ------------------------------------------------------------------------------------------------------- */

static const ari_llama_form llama = {.called = "Llama", .positions = 2048, .biases = ARI_BIASES_BOTH};

static ar_status read_qwen2(ar_config *c, const ari_json_at *at)
{
    c->qkv_bias = true;
    return ari_config_expect_bias(at, "attention_bias", true,
                                  "Qwen2 always has biases of q, k and v, and none of the output");
}

static const ari_llama_form qwen2 =
    ARI_FORM(.called = "Qwen2", .kv_heads = 32, .positions = 32768, .biases = ARI_BIASES_OWN_ATTENTION,
             .window = ARI_WINDOW_QWEN2, .window_number = 28, .more = read_qwen2);

static const ari_llama_form mistral =
    ARI_FORM(.called = "Mistral", .kv_heads = 8, .positions = 131072, .biases = ARI_BIASES_NONE,
             .window = ARI_WINDOW_EVERYWHERE, .window_number = 4096);

static const ari_llama_form phi3 =
    ARI_FORM(.arch = AR_ARCH_PHI3, .called = "Phi-3", .positions = 4096, .pads = true, .pad_id = 32000,
             .norm_eps = 1e-5, .rope = {.partial = true, .phi3 = true, .original = 4096}, .biases = ARI_BIASES_NONE,
             .window = ARI_WINDOW_EVERYWHERE);

static const ari_llama_form qwen3 =
    ARI_FORM(.arch = AR_ARCH_QWEN3, .called = "Qwen3", .kv_heads = 32, .positions = 32768, .head_dim = 128,
             .qk_norm = AR_QK_NORM_HEAD, .window = ARI_WINDOW_QWEN2, .window_number = 28);

static const ari_llama_form olmo2 =
    ARI_FORM(.arch = AR_ARCH_OLMO2, .called = "OLMo2", .positions = 2048, .norm_eps = 1e-5, .pads = true, .pad_id = 1,
             .norm_place = AR_NORM_AFTER, .qk_norm = AR_QK_NORM_WIDTH);

/* --- Gemma -------------------------------------------------------------------------------------------------------- */

/* All Gemma models: norms that multiply by 1 + weight, rows of the embedding times the root of the hidden size. */
static void set_gemma(ar_config *c)
{
    c->norm_plus_one = true;
    c->embed_scale = sqrt((double)c->hidden);
}

/* The activation has two keys, of which the class reads one: the other may repeat it. */
static ar_status check_activation(const ari_json_at *at, const ar_config *c, const char *key, const char *other)
{
    ar_activation said = c->activation;
    AR_TRY(ari_config_activation(at, other, &said));
    if (said != c->activation)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys '%s' and '%s' name two activations, expected one",
                            ARI_SHOW(at->name), key, other);
    return AR_OK;
}

/* In the first files "gelu" meant its tanh form. */
static ar_status read_gemma(ar_config *c, const ari_json_at *at)
{
    set_gemma(c);
    c->activation = c->activation == AR_ACT_GELU_ERF ? AR_ACT_GELU_TANH : c->activation;
    return check_activation(at, c, "hidden_act", "hidden_activation");
}

static const ari_llama_form gemma =
    ARI_FORM(.called = "Gemma", .kv_heads = 16, .positions = 8192, .head_dim = 256, .tied = true, .pads = true,
             .activation_key = "hidden_act", .more = read_gemma);

static ar_status read_cap(const ari_json_at *at, const char *key, double *cap)
{
    if (json_is_null(json_object_get(at->object, key)))
        *cap = 0.0;
    AR_TRY(ari_json_real_or(at, key, cap));
    if (!(*cap >= 0.0) || isinf(*cap) || (*cap == 0.0 && ari_json_get(at, key) != NULL))
        return ari_json_wrong(at, key, " is %g, expected a positive number or null", *cap);
    return AR_OK;
}

static ar_status read_gemma2(ar_config *c, const ari_json_at *at)
{
    set_gemma(c);
    AR_TRY(check_activation(at, c, "hidden_activation", "hidden_act"));
    c->score_cap = 50.0;
    c->logit_cap = 30.0;
    c->query_scalar = 256.0;
    AR_TRY(ari_config_positive(at, "query_pre_attn_scalar", &c->query_scalar));
    AR_TRY(read_cap(at, "attn_logit_softcapping", &c->score_cap));
    return read_cap(at, "final_logit_softcapping", &c->logit_cap);
}

static const ari_llama_form gemma2 =
    ARI_FORM(.arch = AR_ARCH_OLMO2, .called = "Gemma 2", .kv_heads = 4, .positions = 8192, .head_dim = 256,
             .tied = true, .pads = true, .activation_key = "hidden_activation", .norm_place = AR_NORM_AROUND,
             .window = ARI_WINDOW_PATTERN, .window_number = 2, .more = read_gemma2);

/* One of the two rotations of rope_parameters. */
static ar_status read_nested_rope(ar_config *c, const ari_json_at *at, const char *key, ar_rope *rope)
{
    static const ari_rope_form form = {.partial = false};
    const json_t *all = ari_json_get(at, "rope_parameters"), *object = json_object_get(all, key);
    if (object == NULL || json_is_null(object))
        return AR_OK;
    if (!json_is_object(object))
        return ari_json_wrong(at, "rope_parameters", ": '%s' is not an object", key);
    if (ari_json_get(at, "original_max_position_embeddings") != NULL) /* transformers does not look there then */
        return ari_config_refuse_key(at, "original_max_position_embeddings", "it in 'rope_parameters' alone");
    const ari_rope_object o = {at, {object, at->name, at->code}, key, "default", &form};
    return ari_config_rope_object(c, rope, &o);
}

ar_status ari_config_two_ropes(ar_config *c, const ari_json_at *at, double global, double local)
{
    const ari_rope_form form = {.theta = global};
    const json_t *scaling = ari_json_get(at, "rope_scaling");
    static const char full[] = "full_attention", sliding[] = "sliding_attention";
    const json_t *nested = ari_json_get(at, "rope_parameters");
    AR_TRY(ari_config_positive(at, "rope_local_base_freq", &local));
    AR_TRY(ari_config_positive(at, "rope_theta", &global));
    c->local_rope = (ar_rope){.kind = AR_ROPE_DEFAULT, .theta = local};
    if (nested == NULL && scaling != NULL && json_object_get(scaling, "rope_type") == NULL)
        return ari_json_wrong(at, "rope_scaling",
                              " has no 'rope_type', without which transformers scales nothing here");
    if (nested == NULL)
        return ari_config_rope(c, at, &form);
    if (scaling != NULL)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys 'rope_parameters' and 'rope_scaling' are both set, expected one",
                            ARI_SHOW(at->name));
    if (json_object_get(nested, full) == NULL && json_object_get(nested, sliding) == NULL)
        return ari_json_wrong(at, "rope_parameters", " has neither '%s' nor '%s', expected an object of each", full,
                              sliding);
    c->rope = (ar_rope){.kind = AR_ROPE_DEFAULT, .theta = global};
    AR_TRY(read_nested_rope(c, at, full, &c->rope));
    return read_nested_rope(c, at, sliding, &c->local_rope);
}

/* transformers reads attn_logit_softcapping and does not compute it: it is refused. */
static ar_status read_gemma3(ar_config *c, const ari_json_at *at)
{
    size_t pattern = 6;
    set_gemma(c);
    c->query_scalar = 256.0;
    AR_TRY(check_activation(at, c, "hidden_activation", "hidden_act"));
    AR_TRY(ari_config_positive(at, "query_pre_attn_scalar", &c->query_scalar));
    AR_TRY(read_cap(at, "final_logit_softcapping", &c->logit_cap));
    AR_TRY(ari_json_size_or(at, "sliding_window_pattern", 1, ARI_CONFIG_MAX_DIM, &pattern));
    AR_TRY(ari_config_windows(c, at, ARI_WINDOW_PATTERN, pattern, "Gemma 3"));
    return ari_config_two_ropes(c, at, 1000000.0, 10000.0);
}

static const ari_llama_form gemma3 =
    ARI_FORM(.arch = AR_ARCH_OLMO2, .called = "Gemma 3", .kv_heads = 4, .positions = 131072, .head_dim = 256,
             .tied = true, .pads = true, .two_ropes = true, .activation_key = "hidden_activation",
             .norm_place = AR_NORM_AROUND, .qk_norm = AR_QK_NORM_HEAD, .window = ARI_WINDOW_OWN, .more = read_gemma3);

/* --- all of them -------------------------------------------------------------------------------------------------- */

/* Keys that several models, or one with many, read. */
#define GEMMA2_KEYS "hidden_activation query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping"
#define GEMMA3_KEYS \
    "hidden_activation query_pre_attn_scalar final_logit_softcapping sliding_window_pattern rope_local_base_freq"
#define GRANITE_KEYS "embedding_multiplier attention_multiplier residual_multiplier logits_scaling"
#define EXPERTS_KEYS "num_experts num_local_experts shared_expert_intermediate_size output_router_logits"
#define GPT_OSS_KEYS "num_experts num_local_experts output_router_logits swiglu_limit swiglu_alpha"
#define MINIMAX_KEYS \
    "num_local_experts use_qk_norm qk_norm_type use_routing_bias scoring_func rotary_dim partial_rotary_factor"
#define SCORES_KEYS                                                                                     \
    "n_routed_experts n_shared_experts first_k_dense_replace n_group topk_group routed_scaling_factor " \
    "scoring_func topk_method"
#define LATENT_KEYS                                                                                               \
    SCORES_KEYS " num_experts q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim " \
                "rope_interleave"

const ari_model_reader *ari_model_readers(size_t *n)
{
    static const ari_model_reader readers[] = {
        {"llama", "llama", &llama, NULL, ""},
        {"qwen2", "qwen2", &qwen2, NULL, ""},
        {"mistral", "mistral", &mistral, NULL, ""},
        {"qwen3", "qwen3", &qwen3, NULL, ""},
        {"olmo2", "olmo2", &olmo2, NULL, ""},
        {"gemma", "gemma", &gemma, NULL, "hidden_activation"},
        {"gemma2", "gemma2", &gemma2, NULL, GEMMA2_KEYS},
        {"gemma3_text", "gemma3", &gemma3, NULL, GEMMA3_KEYS},
        {"phi3", "phi3", &phi3, NULL, "partial_rotary_factor"},
        {"mixtral", "mixtral", &ari_config_mixtral, NULL, EXPERTS_KEYS},
        {"minimax_m2", "minimaxm2", NULL, ari_config_minimax_m2, MINIMAX_KEYS},
        {"qwen2_moe", "qwen2moe", &ari_config_qwen2_moe, NULL, EXPERTS_KEYS},
        {"qwen3_moe", "qwen3moe", &ari_config_qwen3_moe, NULL, EXPERTS_KEYS},
        {"olmoe", "olmoe", &ari_config_olmoe, NULL, EXPERTS_KEYS},
        {"gpt_oss", "gptoss", &ari_config_gpt_oss, NULL, GPT_OSS_KEYS},
        {"dots1", "dots1", &ari_config_dots1, NULL, SCORES_KEYS " partial_rotary_factor"},
        {"glm4_moe", "glm4moe", &ari_config_glm4_moe, NULL, SCORES_KEYS " use_qk_norm partial_rotary_factor"},
        {"glm", "glm", &ari_config_glm, NULL, "partial_rotary_factor"},
        {"ernie4_5", "ernie4_5", &ari_config_ernie4_5, NULL, ""},
        {"glm4", "glm4", &ari_config_glm4, NULL, "partial_rotary_factor"},
        {"ministral", "ministral", &ari_config_ministral, NULL, ""},
        {"olmo3", "olmo3", &ari_config_olmo3, NULL, ""},
        {"exaone4", "exaone4", &ari_config_exaone4, NULL, "sliding_window_pattern"},
        {"smollm3", "smollm3", &ari_config_smollm3, NULL, "no_rope_layers no_rope_layer_interval"},
        {"granite", "granite", &ari_config_granite, NULL, GRANITE_KEYS},
        {"seed_oss", "seedoss", &ari_config_seed_oss, NULL, "attention_out_bias"},
        {"stablelm", "stablelm", &ari_config_stablelm, NULL, "partial_rotary_factor use_parallel_residual"},
        {"gpt_neox", "gptneox", NULL, ari_config_gpt_neox, "rotary_pct partial_rotary_factor use_parallel_residual"},
        {"cohere", "cohere", &ari_config_cohere, NULL, "logit_scale"},
        {"cohere2", "cohere2", &ari_config_cohere2, NULL, "logit_scale sliding_window_pattern"},
        {"starcoder2", "starcoder2", &ari_config_starcoder2, NULL, ""},
        {"deepseek_v2", "deepseekv2", &ari_config_deepseek_v2, NULL, LATENT_KEYS},
        {"deepseek_v3", "deepseekv3", &ari_config_deepseek_v3, NULL, LATENT_KEYS},
        {"glm4_moe_lite", "glm4moelite", &ari_config_glm4_moe_lite, NULL, LATENT_KEYS},
        {"kimi_k2", "deepseekv3", &ari_config_deepseek_v3, NULL, LATENT_KEYS},
        {"gpt2", "gpt2", NULL, ari_config_gpt2, ""},
        {"anyrank-stack", "", NULL, ari_config_stack, ""}};
    *n = COUNT(readers);
    return readers;
}
