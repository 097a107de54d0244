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
