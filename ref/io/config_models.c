/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/out.h"
#include "ref/io/config_parts.h"

/* Sizes must be given: a file that leaves out hidden_size is damaged, not a 7B model. What Hugging Face itself leaves
 * out or writes as null has its defaults (transformers, the models' configuration_NAME.py). */

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* What differs between the models of Llama's form where a file says nothing. */
typedef struct llama_form {
    const char *called;
    size_t kv_heads; /* 0: as many as query heads */
    size_t positions;
    ari_rope_form rope;
} llama_form;

static ar_status read_kv_heads(ar_config *c, const ari_json_at *at, const llama_form *form)
{
    const bool absent = json_object_get(at->object, "num_key_value_heads") == NULL;
    c->kv_heads = absent && form->kv_heads > 0 ? form->kv_heads : c->heads;
    if (absent && c->heads % c->kv_heads != 0)
        return ar_error_set(
            AR_ERR_CONFIG,
            "%s: key 'num_key_value_heads' is missing, and the %zu that %s has then do not divide the %zu heads",
            ARI_SHOW(at->name), c->kv_heads, form->called, c->heads);
    return ari_config_dim_or(at, "num_key_value_heads", &c->kv_heads);
}

static ar_status read_llama_form(ar_config *c, const ari_json_at *at, const llama_form *form)
{
    c->arch = AR_ARCH_LLAMA;
    c->norm = AR_NORM_RMS;
    c->gated = true;
    c->final_norm = true;
    c->activation = AR_ACT_SILU;
    c->norm_eps = 1e-6;
    c->max_positions = form->positions;
    AR_TRY(ari_config_dim(at, "vocab_size", &c->vocab));
    AR_TRY(ari_config_dim(at, "hidden_size", &c->hidden));
    AR_TRY(ari_config_dim(at, "intermediate_size", &c->ffn));
    AR_TRY(ari_json_size(at, "num_hidden_layers", 1, ARI_CONFIG_MAX_LAYERS, &c->layers));
    AR_TRY(ari_config_dim(at, "num_attention_heads", &c->heads));
    AR_TRY(read_kv_heads(c, at, form));
    AR_TRY(ari_config_dim_or(at, "max_position_embeddings", &c->max_positions));
    if (ari_json_get(at, "head_dim") != NULL)
        AR_TRY(ari_config_dim(at, "head_dim", &c->head_dim));
    else
        AR_TRY(ari_config_head_dim(c, at, "hidden_size", "num_attention_heads"));
    AR_TRY(ari_config_activation(at, "hidden_act", &c->activation));
    AR_TRY(ari_json_real_or(at, "rms_norm_eps", &c->norm_eps));
    AR_TRY(ari_json_bool_or(at, "tie_word_embeddings", &c->tied));
    return ari_config_rope(c, at, &form->rope);
}

/* fewer: how many of the last keys the model does not know. */
static void note_llama_form(ar_config *c, const ari_json_at *at, size_t fewer)
{
    static const char *const keys[] = {
        /* sizes */
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "head_dim",
        /* what is computed */
        "hidden_act", "rms_norm_eps", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
        "original_max_position_embeddings", "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window",
        "layer_types", "max_window_layers"};
    ari_config_note_others(c, "", at->object, keys, COUNT(keys) - fewer);
}

static ar_status read_llama(ar_config *c, const ari_json_at *at)
{
    static const llama_form form = {.called = "Llama", .positions = 2048};
    bool attention_bias = false;
    AR_TRY(ari_config_window_none(at));
    AR_TRY(read_llama_form(c, at, &form));
    AR_TRY(ari_json_bool_or(at, "attention_bias", &attention_bias));
    AR_TRY(ari_json_bool_or(at, "mlp_bias", &c->mlp_bias));
    c->qkv_bias = c->out_bias = attention_bias;
    note_llama_form(c, at, 1);
    return AR_OK;
}

/* A choice of Llama's that another model has made for good: a file that says otherwise describes something else. */
static ar_status expect_bias(const ari_json_at *at, const char *key, bool has, const char *model)
{
    bool said = has;
    AR_TRY(ari_json_bool_or(at, key, &said));
    if (said != has)
        return ar_error_set(AR_ERR_CONFIG, "%s: key '%s' is %s, but %s; expected %s or no such key", ARI_SHOW(at->name),
                            key, said ? "true" : "false", model, has ? "true" : "false");
    return AR_OK;
}

static ar_status read_qwen2(ar_config *c, const ari_json_at *at)
{
    static const llama_form form = {.called = "Qwen2", .kv_heads = 32, .positions = 32768};
    AR_TRY(read_llama_form(c, at, &form));
    AR_TRY(expect_bias(at, "attention_bias", true, "Qwen2 always has biases of q, k and v, and none of the output"));
    AR_TRY(expect_bias(at, "mlp_bias", false, "Qwen2's MLP has no biases"));
    c->qkv_bias = true;
    AR_TRY(ari_config_window_qwen2(c, at));
    note_llama_form(c, at, 0);
    return AR_OK;
}

static ar_status read_mistral(ar_config *c, const ari_json_at *at)
{
    static const llama_form form = {.called = "Mistral", .kv_heads = 8, .positions = 131072};
    AR_TRY(read_llama_form(c, at, &form));
    AR_TRY(expect_bias(at, "attention_bias", false, "Mistral has no biases"));
    AR_TRY(expect_bias(at, "mlp_bias", false, "Mistral has no biases"));
    AR_TRY(ari_config_window_mistral(c, at));
    note_llama_form(c, at, 1);
    return AR_OK;
}

/* Other names that Hugging Face gives GPT-2's sizes; where a file has both they must agree. */
static ar_status check_alias(const ari_json_at *at, const char *alias, const char *key, size_t value)
{
    size_t said = value;
    AR_TRY(ari_config_dim_or(at, alias, &said));
    if (said != value)
        return ar_error_set(AR_ERR_CONFIG, "%s: key '%s' is %zu, but '%s', which means the same, is %zu",
                            ARI_SHOW(at->name), alias, said, key, value);
    return AR_OK;
}

static ar_status check_aliases(const ar_config *c, const ari_json_at *at)
{
    AR_TRY(check_alias(at, "hidden_size", "n_embd", c->hidden));
    AR_TRY(check_alias(at, "max_position_embeddings", "n_positions", c->max_positions));
    AR_TRY(check_alias(at, "num_attention_heads", "n_head", c->heads));
    return check_alias(at, "num_hidden_layers", "n_layer", c->layers);
}

static ar_status read_gpt2(ar_config *c, const ari_json_at *at)
{
    static const char *const keys[] = {
        /* sizes */
        "vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner", "n_ctx", "hidden_size",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
        /* what is computed */
        "activation_function", "layer_norm_epsilon", "tie_word_embeddings", "scale_attn_weights",
        "reorder_and_upcast_attn", "sliding_window", "use_sliding_window", "layer_types"};
    bool scaled = true;
    AR_TRY(ari_config_window_none(at));
    c->arch = AR_ARCH_GPT2;
    c->norm = AR_NORM_LAYER;
    c->learned_positions = c->final_norm = c->tied = true;
    c->qkv_bias = c->out_bias = c->mlp_bias = true;
    c->activation = AR_ACT_GELU_TANH; /* gelu_new */
    c->norm_eps = 1e-5;
    AR_TRY(ari_config_dim(at, "vocab_size", &c->vocab));
    AR_TRY(ari_config_dim(at, "n_embd", &c->hidden));
    AR_TRY(ari_json_size(at, "n_layer", 1, ARI_CONFIG_MAX_LAYERS, &c->layers));
    AR_TRY(ari_config_dim(at, "n_head", &c->heads));
    AR_TRY(ari_config_dim(at, "n_positions", &c->max_positions));
    c->kv_heads = c->heads;
    c->ffn = 4 * c->hidden;
    AR_TRY(ari_config_dim_or(at, "n_inner", &c->ffn));
    AR_TRY(ari_config_head_dim(c, at, "n_embd", "n_head"));
    AR_TRY(ari_config_activation(at, "activation_function", &c->activation));
    AR_TRY(ari_json_real_or(at, "layer_norm_epsilon", &c->norm_eps));
    AR_TRY(ari_json_bool_or(at, "tie_word_embeddings", &c->tied));
    AR_TRY(ari_json_bool_or(at, "scale_attn_weights", &scaled));
    if (!scaled)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'scale_attn_weights' is false, only true is supported",
                            ARI_SHOW(at->name));
    /* reorder_and_upcast_attn moves the scale and widens the scores: the same mathematics, so it may be either. n_ctx
     * is n_positions in older files; nothing reads it. */
    ari_config_note_others(c, "", at->object, keys, COUNT(keys));
    return check_aliases(c, at);
}

static ar_status read_stack(ar_config *c, const ari_json_at *at)
{
    static const char *const keys[] = {
        /* sizes */
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
        /* what is computed */
        "hidden_act", "layer_norm_eps", "causal", "layer_types", "sliding_window", "use_sliding_window"};
    AR_TRY(ari_config_window_none(at));
    c->arch = AR_ARCH_STACK;
    c->norm = AR_NORM_LAYER;
    c->mlp_bias = true;
    c->activation = AR_ACT_GELU_TANH;
    c->norm_eps = 1e-5;
    c->max_positions = 4096;
    AR_TRY(ari_config_dim(at, "vocab_size", &c->vocab));
    AR_TRY(ari_config_dim(at, "hidden_size", &c->hidden));
    AR_TRY(ari_config_dim(at, "intermediate_size", &c->ffn));
    AR_TRY(ari_json_size(at, "num_hidden_layers", 1, ARI_CONFIG_MAX_LAYERS, &c->layers));
    AR_TRY(ari_config_dim(at, "num_attention_heads", &c->heads));
    c->kv_heads = c->heads;
    AR_TRY(ari_config_dim_or(at, "num_key_value_heads", &c->kv_heads));
    AR_TRY(ari_config_dim_or(at, "max_position_embeddings", &c->max_positions));
    AR_TRY(ari_config_head_dim(c, at, "hidden_size", "num_attention_heads"));
    size_t head_dim = c->head_dim;
    AR_TRY(ari_config_dim_or(at, "head_dim", &head_dim));
    if (head_dim != c->head_dim)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'head_dim' is %zu, expected hidden_size / num_attention_heads, %zu",
                            ARI_SHOW(at->name), head_dim, c->head_dim);
    AR_TRY(ari_config_activation(at, "hidden_act", &c->activation));
    AR_TRY(ari_json_real_or(at, "layer_norm_eps", &c->norm_eps));
    ari_config_note_others(c, "", at->object, keys, COUNT(keys));
    return ari_json_bool_or(at, "causal", &c->causal);
}

const ari_model_reader *ari_model_readers(size_t *n)
{
    static const ari_model_reader readers[] = {{"llama", "llama", read_llama},
                                               {"qwen2", "qwen2", read_qwen2},
                                               {"mistral", "mistral", read_mistral},
                                               {"gpt2", "gpt2", read_gpt2},
                                               {"anyrank-stack", "", read_stack}};
    *n = COUNT(readers);
    return readers;
}
