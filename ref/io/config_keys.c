/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/io/config_parts.h"
#include "ref/io/file.h"

ar_status ari_config_dim(const ari_json_at *at, const char *key, size_t *out)
{
    return ari_json_size(at, key, 1, ARI_CONFIG_MAX_DIM, out);
}

ar_status ari_config_dim_or(const ari_json_at *at, const char *key, size_t *out)
{
    return ari_json_size_or(at, key, 1, ARI_CONFIG_MAX_DIM, out);
}

ar_status ari_config_activation(const ari_json_at *at, const char *key, ar_activation *out)
{
    static const struct {
        char name[20];
        ar_activation value;
    } names[] = {{"gelu", AR_ACT_GELU_ERF},
                 {"gelu_new", AR_ACT_GELU_TANH},
                 {"gelu_pytorch_tanh", AR_ACT_GELU_TANH},
                 {"gelu_tanh", AR_ACT_GELU_TANH},
                 {"silu", AR_ACT_SILU},
                 {"swish", AR_ACT_SILU},
                 {"relu", AR_ACT_RELU}};
    const char *text = NULL;
    AR_TRY(ari_json_string_or(at, key, &text));
    if (text == NULL)
        return AR_OK;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strcmp(text, names[i].name) == 0) {
            *out = names[i].value;
            return AR_OK;
        }
    }
    return ar_error_set(
        AR_ERR_CONFIG,
        "%s: key '%s' is '%s', expected gelu, gelu_new, gelu_pytorch_tanh, gelu_tanh, silu, swish or relu",
        ARI_SHOW(at->name), key, ARI_SHOW(text));
}

ar_status ari_config_head_dim(ar_config *c, const ari_json_at *at, const char *hidden_key, const char *heads_key)
{
    if (c->hidden % c->heads != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: key '%s' is %zu, expected a multiple of '%s', %zu", ARI_SHOW(at->name),
                            hidden_key, c->hidden, heads_key, c->heads);
    c->head_dim = c->hidden / c->heads;
    return AR_OK;
}

/* --- rotary positions --------------------------------------------------------------------------------------------- */
static ar_status read_theta(const ari_json_at *at, double *theta)
{
    AR_TRY(ari_json_real_or(at, "rope_theta", theta));
    if (!(*theta > 0))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_theta' is %g, expected a positive number", ARI_SHOW(at->name),
                            *theta);
    return AR_OK;
}

/* `type` is the older spelling of `rope_type`. */
static ar_status read_rope_type(const ari_json_at *rope, const char **type)
{
    const char *older = NULL;
    AR_TRY(ari_json_string_or(rope, "rope_type", type));
    AR_TRY(ari_json_string_or(rope, "type", &older));
    if (*type != NULL && older != NULL && strcmp(*type, older) != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys 'rope_type' and 'type' differ: '%s' and '%s'",
                            ARI_SHOW(rope->name), ARI_SHOW(*type), ARI_SHOW(older));
    *type = *type == NULL ? older : *type;
    return AR_OK;
}

static ar_status read_scaling(ar_config *c, const ari_json_at *rope, const char *otherwise)
{
    const char *type = NULL;
    AR_TRY(read_rope_type(rope, &type));
    type = type == NULL ? otherwise : type;
    if (type == NULL)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_type' is missing, expected 'default' or 'linear'",
                            ARI_SHOW(rope->name));
    if (strcmp(type, "linear") == 0) {
        AR_TRY(ari_json_real(rope, "factor", &c->rope_factor));
        if (!(c->rope_factor >= 1))
            return ar_error_set(AR_ERR_CONFIG, "%s: key 'factor' is %g, expected a number from 1", ARI_SHOW(rope->name),
                                c->rope_factor);
        return AR_OK;
    }
    if (strcmp(type, "default") == 0)
        return AR_OK;
    return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_type' is '%s', supported are 'default' and 'linear'",
                        ARI_SHOW(rope->name), ARI_SHOW(type));
}

static ar_status read_rope_object(ar_config *c, const ari_json_at *at, const char *key, const char *otherwise)
{
    char name[2 * ARI_PRINTABLE];
    const json_t *object = NULL;
    AR_TRY(ari_json_object(at, key, &object));
    snprintf(name, sizeof name, "%s: in '%s'", ARI_SHOW(at->name), key);
    const ari_json_at rope = {object, name, at->code};
    double partial = 1;
    AR_TRY(ari_json_real_or(&rope, "partial_rotary_factor", &partial));
    if (partial != 1)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'partial_rotary_factor' is %g, only 1 is supported", name, partial);
    const char *inner;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, inner, value) if (json_is_object(value)) return ar_error_set(
        AR_ERR_CONFIG, "%s: key '%s': positions that differ by layer are not supported", name, ARI_SHOW(inner));
    double theta = c->rope_theta;
    AR_TRY(read_theta(&rope, &theta));
    if (ari_json_get(at, "rope_theta") != NULL && theta != c->rope_theta)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_theta' is %g, but %g beside it", name, theta, c->rope_theta);
    c->rope_theta = theta;
    return read_scaling(c, &rope, otherwise);
}

ar_status ari_config_rope(ar_config *c, const ari_json_at *at)
{
    c->rope = true;
    c->rope_theta = 10000;
    AR_TRY(read_theta(at, &c->rope_theta));
    const bool now = ari_json_get(at, "rope_parameters") != NULL, before = ari_json_get(at, "rope_scaling") != NULL;
    if (now && before)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys 'rope_parameters' and 'rope_scaling' are both set, expected one",
                            ARI_SHOW(at->name));
    if (now)
        return read_rope_object(c, at, "rope_parameters", "default");
    return before ? read_rope_object(c, at, "rope_scaling", NULL) : AR_OK;
}

/* --- what is not computed ----------------------------------------------------------------------------------------- */
typedef enum neutral { NULL_OR_FALSE, ZERO, ONE, FULL_ATTENTION, EMPTY } neutral;

static bool is_full_attention(const json_t *value)
{
    if (!json_is_array(value))
        return false;
    for (size_t i = 0; i < json_array_size(value); i++) {
        const char *text = json_string_value(json_array_get(value, i));
        if (text == NULL || strcmp(text, "full_attention") != 0)
            return false;
    }
    return true;
}

static bool is_neutral(const json_t *value, neutral kind)
{
    switch (kind) {
    case ZERO:
        return json_is_false(value) || (json_is_number(value) && json_number_value(value) == 0);
    case ONE:
        return json_is_number(value) && json_number_value(value) == 1;
    case FULL_ATTENTION:
        return is_full_attention(value);
    case EMPTY:
        return (json_is_object(value) && json_object_size(value) == 0) ||
               (json_is_array(value) && json_array_size(value) == 0);
    case NULL_OR_FALSE:
    default:
        return json_is_false(value);
    }
}

ar_status ari_config_refuse(const ari_json_at *at)
{
    static const struct {
        char key[32];
        neutral kind;
    } keys[] = {{"quantization_config", EMPTY},
                {"pruned_heads", EMPTY},
                {"sliding_window", NULL_OR_FALSE},
                {"use_sliding_window", NULL_OR_FALSE},
                {"attention_chunk_size", NULL_OR_FALSE},
                {"layer_types", FULL_ATTENTION},
                {"partial_rotary_factor", ONE},
                {"rotary_pct", ONE},
                {"rope_interleaved", NULL_OR_FALSE},
                {"rope_interleave", NULL_OR_FALSE},
                {"no_rope_layers", EMPTY},
                {"alibi", NULL_OR_FALSE},
                {"pretraining_tp", ONE},
                {"attn_logit_softcapping", NULL_OR_FALSE},
                {"final_logit_softcapping", NULL_OR_FALSE},
                {"attn_logit_cap", NULL_OR_FALSE},
                {"logits_soft_cap", NULL_OR_FALSE},
                {"query_pre_attn_scalar", NULL_OR_FALSE},
                {"logit_scale", ONE},
                {"logits_scaling", ONE},
                {"embedding_multiplier", ONE},
                {"attention_multiplier", NULL_OR_FALSE},
                {"residual_multiplier", ONE},
                {"scale_embedding", NULL_OR_FALSE},
                {"clip_qkv", NULL_OR_FALSE},
                {"use_qk_norm", NULL_OR_FALSE},
                {"qk_norm", NULL_OR_FALSE},
                {"qk_layernorm", NULL_OR_FALSE},
                {"parallel_attn", NULL_OR_FALSE},
                {"use_parallel_residual", NULL_OR_FALSE},
                {"num_local_experts", ZERO},
                {"num_experts", ZERO},
                {"n_routed_experts", ZERO},
                {"is_encoder_decoder", NULL_OR_FALSE},
                {"add_cross_attention", NULL_OR_FALSE},
                {"scale_attn_by_inverse_layer_idx", NULL_OR_FALSE}};
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const json_t *value = ari_json_get(at, keys[i].key);
        if (value == NULL || is_neutral(value, keys[i].kind))
            continue;
        static const char wanted[][40] = {"null or false", "0", "1", "'full_attention' for every layer",
                                          "empty or null"};
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: key '%s' changes the mathematics in a way that is not supported, expected %s",
                            ARI_SHOW(at->name), keys[i].key, wanted[keys[i].kind]);
    }
    return AR_OK;
}

/* --- between keys ------------------------------------------------------------------------------------------------- */
/* Parameters, counted a little high, so that no later sum of sizes can wrap: below 2^60 elements, 2^62 bytes. */
static bool size_is_sane(const ar_config *c)
{
    size_t q = 0, kv = 0, attention = 0, mlp = 0, block = 0, all = 0, table = 0;
    const size_t rows = c->vocab > c->max_positions ? c->vocab : c->max_positions;
    if (__builtin_mul_overflow(c->heads, c->head_dim, &q) || q > ARI_CONFIG_MAX_DIM)
        return false;
    kv = c->kv_heads * c->head_dim; /* at most q */
    if (__builtin_mul_overflow(2 * q + 2 * kv + 4, c->hidden, &attention) ||
        __builtin_mul_overflow(3 * c->ffn + 4, c->hidden, &mlp) || __builtin_add_overflow(attention, mlp, &block) ||
        __builtin_mul_overflow(block, c->layers, &all) || __builtin_mul_overflow(3 * rows, c->hidden, &table) ||
        __builtin_add_overflow(all, table, &all))
        return false;
    return all < (size_t)1 << 60;
}

ar_status ari_config_check(const ar_config *c, const ari_json_at *at)
{
    const char *name = ARI_SHOW(at->name);
    if (c->kv_heads > c->heads || c->heads % c->kv_heads != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'num_key_value_heads' is %zu, expected a divisor of the %zu heads",
                            name, c->kv_heads, c->heads);
    if (c->rope && c->head_dim % 2 != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'head_dim' is %zu, expected an even number for rotary positions",
                            name, c->head_dim);
    if (!(c->norm_eps >= 0) || isinf(c->norm_eps))
        return ar_error_set(AR_ERR_CONFIG, "%s: the normalisation's eps is %g, expected a finite number from 0", name,
                            c->norm_eps);
    if (!(c->initializer_range >= 0) || isinf(c->initializer_range))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'initializer_range' is %g, expected a finite number from 0", name,
                            c->initializer_range);
    if (!size_is_sane(c))
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: absurd sizes: vocabulary %zu, hidden %zu, %zu layers, %zu heads of %zu, MLP %zu", name,
                            c->vocab, c->hidden, c->layers, c->heads, c->head_dim, c->ffn);
    return AR_OK;
}
