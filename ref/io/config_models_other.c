/* SPDX-License-Identifier: Apache-2.0 */
/* Models of other forms than Llama's. */
#include "anyrank/activation.h"
#include "ref/io/config_parts.h"

#define COUNT(list) (sizeof(list) / sizeof *(list))

ar_status ari_config_head_dim(ar_config *c, const ari_json_at *at, const char *hidden_key, const char *heads_key)
{
    if (c->hidden % c->heads != 0)
        return ari_json_wrong(at, hidden_key, " is %zu, expected a multiple of '%s', %zu", c->hidden, heads_key,
                              c->heads);
    c->head_dim = c->hidden / c->heads;
    return AR_OK;
}

ar_status ari_config_own_head_dim(ar_config *c, const ari_json_at *at)
{
    size_t said = 0;
    AR_TRY(ari_config_dim_or(at, "head_dim", &said));
    AR_TRY(ari_config_head_dim(c, at, "hidden_size", "num_attention_heads"));
    if (said > 0 && said != c->head_dim)
        return ari_json_wrong(at, "head_dim", " is %zu, expected hidden_size / num_attention_heads, %zu", said,
                              c->head_dim);
    return AR_OK;
}

/* Other names that Hugging Face gives GPT-2's sizes; where a file has both they must agree. */
static ar_status check_alias(const ari_json_at *at, const char *alias, const char *key, size_t value)
{
    size_t said = value;
    AR_TRY(ari_config_dim_or(at, alias, &said));
    if (said != value)
        return ari_json_wrong(at, alias, " is %zu, but '%s', which means the same, is %zu", said, key, value);
    return AR_OK;
}

static ar_status check_aliases(const ar_config *c, const ari_json_at *at)
{
    AR_TRY(check_alias(at, "hidden_size", "n_embd", c->hidden));
    AR_TRY(check_alias(at, "max_position_embeddings", "n_positions", c->max_positions));
    AR_TRY(check_alias(at, "num_attention_heads", "n_head", c->heads));
    return check_alias(at, "num_hidden_layers", "n_layer", c->layers);
}

ar_status ari_config_gpt2(ar_config *c, const ari_json_at *at)
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
        return ari_json_wrong(at, "scale_attn_weights", " is false, only true is supported");
    /* reorder_and_upcast_attn moves the scale and widens the scores: the same mathematics, so it may be either. n_ctx
     * is n_positions in older files; nothing reads it. */
    ari_config_note_others(c, "", at->object, keys, COUNT(keys));
    return check_aliases(c, at);
}

ar_status ari_config_stack(ar_config *c, const ari_json_at *at)
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
    AR_TRY(ari_config_own_head_dim(c, at));
    AR_TRY(ari_config_activation(at, "hidden_act", &c->activation));
    AR_TRY(ari_json_real_or(at, "layer_norm_eps", &c->norm_eps));
    ari_config_note_others(c, "", at->object, keys, COUNT(keys));
    return ari_json_bool_or(at, "causal", &c->causal);
}
