/* SPDX-License-Identifier: Apache-2.0 */
/* Experts, as transformers has them (modeling_mixtral.py, modeling_qwen2_moe.py, modeling_olmoe.py): how many, how
 * wide, and which layers have them. */
#include <math.h>

#include "ref/core/atomic_file.h"
#include "ref/io/config_parts.h"

#define MOST_EXPERTS 65536

/* A key with two names, of which a file may have either. */
static ar_status read_number(const ari_json_at *at, size_t *n)
{
    const bool both = ari_json_get(at, "num_experts") != NULL && ari_json_get(at, "num_local_experts") != NULL;
    size_t other = 0;
    AR_TRY(ari_json_size_or(at, "num_experts", 0, MOST_EXPERTS, n));
    other = *n;
    AR_TRY(ari_json_size_or(at, "num_local_experts", 0, MOST_EXPERTS, n));
    if (both && other != *n)
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: keys 'num_experts' and 'num_local_experts' are %zu and %zu, expected "
                            "one number",
                            ARI_SHOW(at->name), other, *n);
    return AR_OK;
}

/* transformers adds the balancing loss where it gives the routers' logits out. */
static ar_status read_balance(ar_experts *e, const ari_json_at *at, double weight)
{
    bool wanted = false;
    AR_TRY(ari_json_bool_or(at, "output_router_logits", &wanted));
    AR_TRY(ari_json_real_or(at, "router_aux_loss_coef", &weight));
    if (!(weight >= 0.0) || isinf(weight))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'router_aux_loss_coef' is %g, expected a finite number from 0",
                            ARI_SHOW(at->name), weight);
    e->balance_weight = wanted ? weight : 0.0;
    return AR_OK;
}

static bool is_listed(const json_t *list, size_t layer)
{
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (json_integer_value(json_array_get(list, i)) == (json_int_t)layer)
            return true;
    }
    return false;
}

/* The layers that mlp_only_layers names, and those that decoder_sparse_step passes over, have an MLP. */
static ar_status read_dense_layers(ar_config *c, const ari_json_at *at)
{
    const json_t *only = NULL;
    size_t step = 1;
    AR_TRY(ari_json_size_or(at, "decoder_sparse_step", 1, ARI_CONFIG_MAX_DIM, &step));
    if (ari_json_get(at, "mlp_only_layers") != NULL)
        AR_TRY(ari_json_array(at, "mlp_only_layers", &only));
    for (size_t i = 0; i < json_array_size(only); i++) {
        if (!json_is_integer(json_array_get(only, i)))
            return ar_error_set(AR_ERR_CONFIG,
                                "%s: key 'mlp_only_layers': entry %zu is not a whole number, expected a layer's",
                                ARI_SHOW(at->name), i);
    }
    for (size_t i = 0; i < c->layers; i++)
        AR_TRY(ari_config_set_layer(c->dense, at, i, (i + 1) % step != 0 || is_listed(only, i), "experts"));
    return AR_OK;
}

ar_status ari_config_experts(ar_config *c, const ari_json_at *at, const ari_experts_form *form)
{
    ar_experts *e = &c->experts;
    *e = (ar_experts){.n = form->n,
                      .per_token = form->per_token,
                      .ffn = form->one_width ? c->ffn : form->ffn,
                      .shared = form->shared,
                      .normalised = form->normalised,
                      .w123 = form->w123};
    AR_TRY(read_number(at, &e->n));
    AR_TRY(ari_json_size_or(at, "num_experts_per_tok", 1, MOST_EXPERTS, &e->per_token));
    if (e->n == 0 && form->one_width)
        return ar_error_set(AR_ERR_CONFIG, "%s: there are 0 experts, expected at least 1", ARI_SHOW(at->name));
    if (e->n > 0 && e->per_token > e->n)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'num_experts_per_tok' is %zu, expected at most the %zu experts",
                            ARI_SHOW(at->name), e->per_token, e->n);
    if (!form->normalised)
        AR_TRY(ari_json_bool_or(at, "norm_topk_prob", &e->normalised));
    AR_TRY(read_balance(e, at, form->balance_weight));
    if (form->shared > 0)
        AR_TRY(ari_config_dim_or(at, "shared_expert_intermediate_size", &e->shared));
    if (form->one_width)
        return AR_OK;
    AR_TRY(ari_config_dim_or(at, "moe_intermediate_size", &e->ffn));
    return read_dense_layers(c, at);
}
