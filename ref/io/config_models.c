/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/config_parts.h"
#include "ref/io/file.h"

/* Sizes must be given: a file that leaves out hidden_size is damaged, not a 7B model. What Hugging Face itself leaves
 * out or writes as null has its defaults (transformers, configuration_llama.py and configuration_gpt2.py). */

ar_status ari_config_llama(ar_config *c, const ari_json_at *at)
{
    bool attention_bias = false;
    c->arch = AR_ARCH_LLAMA;
    c->norm = AR_NORM_RMS;
    c->gated = true;
    c->final_norm = true;
    c->activation = AR_ACT_SILU;
    c->norm_eps = 1e-6;
    c->max_positions = 2048;
    AR_TRY(ari_config_dim(at, "vocab_size", &c->vocab));
    AR_TRY(ari_config_dim(at, "hidden_size", &c->hidden));
    AR_TRY(ari_config_dim(at, "intermediate_size", &c->ffn));
    AR_TRY(ari_json_size(at, "num_hidden_layers", 1, ARI_CONFIG_MAX_LAYERS, &c->layers));
    AR_TRY(ari_config_dim(at, "num_attention_heads", &c->heads));
    c->kv_heads = c->heads;
    AR_TRY(ari_config_dim_or(at, "num_key_value_heads", &c->kv_heads));
    AR_TRY(ari_config_dim_or(at, "max_position_embeddings", &c->max_positions));
    if (ari_json_get(at, "head_dim") != NULL)
        AR_TRY(ari_config_dim(at, "head_dim", &c->head_dim));
    else
        AR_TRY(ari_config_head_dim(c, at, "hidden_size", "num_attention_heads"));
    AR_TRY(ari_config_activation(at, "hidden_act", &c->activation));
    AR_TRY(ari_json_real_or(at, "rms_norm_eps", &c->norm_eps));
    AR_TRY(ari_json_bool_or(at, "tie_word_embeddings", &c->tied));
    AR_TRY(ari_json_bool_or(at, "attention_bias", &attention_bias));
    AR_TRY(ari_json_bool_or(at, "mlp_bias", &c->mlp_bias));
    c->qkv_bias = c->out_bias = attention_bias;
    return ari_config_rope(c, at);
}

ar_status ari_config_gpt2(ar_config *c, const ari_json_at *at)
{
    bool scaled = true;
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
    /* reorder_and_upcast_attn moves the scale and widens the scores: the same mathematics, so it may be either. */
    return AR_OK;
}

ar_status ari_config_stack(ar_config *c, const ari_json_at *at)
{
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
    return ari_json_bool_or(at, "causal", &c->causal);
}
