/* SPDX-License-Identifier: Apache-2.0 */
/* Experts, as transformers has them (modeling_mixtral.py, modeling_qwen2_moe.py, modeling_olmoe.py,
 * modeling_glm4_moe.py): how many, how wide, and which layers have them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/io/config_parts.h"

/* --- kinds of layers ---------------------------------------------------------------------------------------------- */

/* Sliding windows, as transformers has them (masking_utils.py): query i sees the keys j with i - j < window. */

static const char full[] = "full_attention", sliding[] = "sliding_attention";

/* --- models without ----------------------------------------------------------------------------------------------- */

static bool is_off(const json_t *value)
{
    return value == NULL || json_is_false(value);
}

/* An array with an entry for each layer, of the two kinds, borrowed from the file; NULL where there is none. */
static ar_status config_layer_kinds(const ari_json_at *at, const char *key, size_t layers, const char *const kinds[2],
                                    const json_t **out)
{
    *out = NULL;
    if (ari_json_get(at, key) == NULL)
        return AR_OK;
    AR_TRY(ari_json_array(at, key, out));
    if (json_array_size(*out) != layers)
        return ari_json_wrong(at, key, " has %zu entries, expected one for each of %zu layers", json_array_size(*out),
                              layers);
    for (size_t i = 0; i < layers; i++) {
        const char *text = json_string_value(json_array_get(*out, i));
        if (text == NULL || (strcmp(text, kinds[0]) != 0 && strcmp(text, kinds[1]) != 0))
            return ari_json_wrong(at, key, ": entry %zu is %s%s%s, expected '%s' or '%s'", i,
                                  text == NULL ? "not a string" : "'", text == NULL ? "" : ARI_SHOW(text),
                                  text == NULL ? "" : "'", kinds[0], kinds[1]);
    }
    return AR_OK;
}

static ar_status layer_types(const ari_json_at *at, size_t layers, const json_t **out)
{
    static const char *const kinds[2] = {full, sliding};
    return config_layer_kinds(at, "layer_types", layers, kinds, out);
}

static bool is_sliding(const json_t *types, size_t layer)
{
    return strcmp(json_string_value(json_array_get(types, layer)), sliding) == 0;
}

ar_status ari_config_window_none(const ari_json_at *at)
{
    const json_t *use = ari_json_get(at, "use_sliding_window"), *types = ari_json_get(at, "layer_types");
    if (!is_off(use))
        return ari_config_refuse_key(at, "use_sliding_window", "null or false");
    if (use == NULL && !is_off(ari_json_get(at, "sliding_window"))) /* one that is not used may have any size */
        return ari_config_refuse_key(at, "sliding_window", "null or false");
    for (size_t i = 0; types != NULL && i < json_array_size(types); i++) {
        const char *text = json_string_value(json_array_get(types, i));
        if (text == NULL || strcmp(text, full) != 0)
            return ari_config_refuse_key(at, "layer_types", "'full_attention' for every layer");
    }
    return types == NULL || json_is_array(types)
               ? AR_OK
               : ari_config_refuse_key(at, "layer_types", "'full_attention' for every layer");
}

/* --- models with -------------------------------------------------------------------------------------------------- */

ar_status ari_config_set_layer(uint64_t set[AR_CONFIG_LAYER_BITS / 64], const ari_json_at *at, size_t layer, bool in,
                               const char *what)
{
    const size_t bit = layer < AR_CONFIG_LAYER_BITS ? layer : AR_CONFIG_LAYER_BITS - 1;
    const uint64_t mask = (uint64_t)1 << (bit % 64);
    uint64_t *word = &set[bit / 64];
    if (layer > bit && ((*word & mask) != 0) != in)
        return ar_error_set(
            AR_ERR_CONFIG,
            "%s: layer %zu and layer %zu differ in their %s, supported is a difference within the first %d layers",
            ARI_SHOW(at->name), bit, layer, what, AR_CONFIG_LAYER_BITS);
    *word |= in ? mask : 0;
    return AR_OK;
}

/* sliding_window; otherwise: where the key is absent, null is none. Classes that have no use_sliding_window use their
 * window all the same. */
static ar_status read_size(ar_config *c, const ari_json_at *at, size_t otherwise)
{
    if (json_object_get(at->object, "sliding_window") == NULL)
        c->window = otherwise;
    AR_TRY(ari_config_dim_or(at, "sliding_window", &c->window));
    if (c->window > 0 && json_is_false(ari_json_get(at, "use_sliding_window")))
        ari_config_note(c, "", "use_sliding_window");
    return AR_OK;
}

/* Whether a layer slides that layer_types does not name. */
static bool slides_by_number(const ar_config *c, ari_window_rule rule, size_t number, size_t layer)
{
    if (rule == ARI_WINDOW_PATTERN && number > 0)
        return (layer + 1) % number != 0;
    if (c->window == 0 || rule == ARI_WINDOW_PATTERN)
        return c->window > 0;
    if (rule == ARI_WINDOW_UNTURNED)
        return !ar_config_turns(c, layer);
    return rule == ARI_WINDOW_QWEN2_MOE ? layer < number && layer % 2 == 0 : layer >= number;
}

static ar_status check_everywhere(const ar_config *c, const ari_json_at *at, const json_t *types, const char *called)
{
    for (size_t i = 0; types != NULL && i < c->layers; i++) {
        if (is_sliding(types, i) != (c->window > 0))
            return ari_json_wrong(at, "layer_types", ": entry %zu is '%s', but %s's layers %s: expected '%s'", i,
                                  is_sliding(types, i) ? sliding : full, called,
                                  c->window > 0 ? "all have the 'sliding_window'" : "have no 'sliding_window' here",
                                  c->window > 0 ? sliding : full);
    }
    return AR_OK;
}

ar_status ari_config_windows(ar_config *c, const ari_json_at *at, ari_window_rule rule, size_t number,
                             const char *called)
{
    const bool asks = rule == ARI_WINDOW_QWEN2 || rule == ARI_WINDOW_QWEN2_MOE;
    const bool of_size = rule == ARI_WINDOW_EVERYWHERE || rule == ARI_WINDOW_UNTURNED;
    const json_t *types = NULL;
    bool use = !asks;
    if (asks)
        AR_TRY(ari_json_bool_or(at, "use_sliding_window", &use));
    if (asks || rule == ARI_WINDOW_DOTS1)
        AR_TRY(ari_json_size_or(at, "max_window_layers", 0, ARI_CONFIG_MAX_DIM, &number));
    if (use)
        AR_TRY(read_size(c, at, of_size ? number : 4096)); /* Hugging Face's default */
    AR_TRY(layer_types(at, c->layers, &types));
    if (rule == ARI_WINDOW_EVERYWHERE)
        return check_everywhere(c, at, types, called);
    for (size_t i = 0; i < c->layers; i++) {
        const bool slides = types != NULL ? is_sliding(types, i) : slides_by_number(c, rule, number, i);
        if (slides && c->window == 0 && rule == ARI_WINDOW_PATTERN)
            return ari_json_wrong(at, "sliding_window", " is null, but layer %zu is '%s': expected a number of keys", i,
                                  sliding);
        if (slides && c->window == 0)
            return ari_json_wrong(
                at, "layer_types",
                ": entry %zu is '%s', but there is no window: expected 'use_sliding_window' true and a "
                "'sliding_window'",
                i, sliding);
        AR_TRY(ari_config_set_layer(c->full_attention, at, i, !slides, "window"));
    }
    return AR_OK;
}

/* --- config experts ----------------------------------------------------------------------------------------------- */

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
        return ari_json_wrong(at, "router_aux_loss_coef", " is %g, expected a finite number from 0", weight);
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
            return ari_json_wrong(at, "mlp_only_layers", ": entry %zu is not a whole number, expected a layer's", i);
    }
    for (size_t i = 0; i < c->layers; i++)
        AR_TRY(ari_config_set_layer(c->dense, at, i, (i + 1) % step != 0 || is_listed(only, i), "experts"));
    return AR_OK;
}

ar_status ari_config_experts(ar_config *c, const ari_json_at *at, const ari_llama_form *model)
{
    const ari_experts_form *form = model->experts;
    char why[80];
    ar_experts *e = &c->experts;
    *e = (ar_experts){.n = form->n,
                      .per_token = form->per_token,
                      .ffn = form->one_width ? c->ffn : form->ffn,
                      .shared = form->shared,
                      .normalised = form->normalised,
                      .bias = form->bias,
                      .w123 = form->w123};
    AR_TRY(read_number(at, &e->n));
    AR_TRY(ari_json_size_or(at, "num_experts_per_tok", 1, MOST_EXPERTS, &e->per_token));
    if (e->n == 0 && form->one_width)
        return ar_error_set(AR_ERR_CONFIG, "%s: there are 0 experts, expected at least 1", ARI_SHOW(at->name));
    if (e->n > 0 && e->per_token > e->n)
        return ari_json_wrong(at, "num_experts_per_tok", " is %zu, expected at most the %zu experts", e->per_token,
                              e->n);
    snprintf(why, sizeof why, "%s always divides a token's weights by their sum", model->called);
    AR_TRY(form->normalised ? ari_config_expect_bias(at, "norm_topk_prob", true, why)
                            : ari_json_bool_or(at, "norm_topk_prob", &e->normalised));
    if (form->scored)
        e->scores = (ar_route_scores){.groups = 1, .kept = 1, .scale = 1.0};
    else
        AR_TRY(read_balance(e, at, form->balance_weight));
    if (form->shared > 0)
        AR_TRY(ari_config_dim_or(at, "shared_expert_intermediate_size", &e->shared));
    if (form->one_width)
        return AR_OK;
    AR_TRY(ari_config_dim_or(at, "moe_intermediate_size", &e->ffn));
    return read_dense_layers(c, at);
}

/* --- routers of DeepSeek's ------------------------------------------------------------------------------------------ */

/* Names that DeepSeek-V3's own code has for what these models always do. */
static ar_status expect_method(const ari_json_at *at, const char *key, const char *value)
{
    const char *text = NULL;
    AR_TRY(ari_json_string_or(at, key, &text));
    if (text != NULL && strcmp(text, value) != 0 && (strcmp(value, "softmax") == 0 || strcmp(text, "noaux_tc") != 0))
        return ari_json_wrong(at, key, " is '%s', expected '%s' or no such key", ARI_SHOW(text), value);
    return AR_OK;
}

/* DeepSeek-V2's, of which transformers never divides the weights by their sum. */
static ar_status read_softmax_scores(ar_experts *e, const ari_json_at *at, bool *grouped)
{
    const char *method = "greedy";
    AR_TRY(ari_json_string_or(at, "topk_method", &method));
    *grouped = strcmp(method, "group_limited_greedy") == 0;
    if (!*grouped && strcmp(method, "greedy") != 0)
        return ari_json_wrong(at, "topk_method", " is '%s', expected 'greedy' or 'group_limited_greedy'",
                              ARI_SHOW(method));
    if (e->normalised)
        return ari_config_refuse_key(at, "norm_topk_prob", "false");
    return expect_method(at, "scoring_func", "softmax");
}

static ar_status read_scores(ar_experts *e, const ari_json_at *at, const ari_experts_form *form)
{
    ar_route_scores *s = &e->scores;
    bool grouped = true;
    *s = (ar_route_scores){.groups = form->groups > 0 ? form->groups : 1,
                           .kept = form->kept > 0 ? form->kept : 1,
                           .scale = form->scale > 0.0 ? form->scale : 1.0,
                           .softmax = form->softmax};
    if (form->softmax) {
        AR_TRY(read_softmax_scores(e, at, &grouped));
    } else {
        AR_TRY(expect_method(at, "scoring_func", "sigmoid"));
        AR_TRY(expect_method(at, "topk_method", "noaux_tc"));
    }
    AR_TRY(grouped ? ari_json_size_or(at, "n_group", 1, AR_ROUTE_GROUPS, &s->groups) : AR_OK);
    AR_TRY(grouped ? ari_json_size_or(at, "topk_group", 1, AR_ROUTE_GROUPS, &s->kept) : AR_OK);
    AR_TRY(ari_json_real_or(at, "routed_scaling_factor", &s->scale));
    if (isinf((float)s->scale) || isnan(s->scale))
        return ari_json_wrong(at, "routed_scaling_factor", " is %g, expected a finite number", s->scale);
    const size_t each = e->n / s->groups;
    if (e->n % s->groups != 0 || s->kept > s->groups || (s->groups > 1 && each < 2 && !s->softmax) ||
        s->kept * each < e->per_token)
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: keys 'n_group' and 'topk_group' are %zu and %zu, of %zu experts, of which a token has "
                            "%zu: expected groups of equal size, two or more each, and in those that stay enough",
                            ARI_SHOW(at->name), s->groups, s->kept, e->n, e->per_token);
    return AR_OK;
}

/* The first layers have an MLP, or those that mlp_layer_types (transformers 5) calls dense. */
static ar_status read_first_layers(ar_config *c, const ari_json_at *at, const ari_experts_form *form)
{
    static const char *const kinds[2] = {"dense", "sparse"};
    const json_t *types = NULL;
    size_t first = form->dense;
    AR_TRY(ari_json_size_or(at, "first_k_dense_replace", 0, ARI_CONFIG_MAX_DIM, &first));
    AR_TRY(config_layer_kinds(at, "mlp_layer_types", c->layers, kinds, &types));
    if (form->typed && !types && first != form->dense)
        return ari_json_wrong(
            at, "first_k_dense_replace",
            " is %zu, and transformers does not read it; expected %zu, or 'mlp_layer_types' beside it", first,
            form->dense);
    for (size_t i = 0; i < c->layers; i++) {
        const bool dense = types ? strcmp(json_string_value(json_array_get(types, i)), kinds[0]) == 0 : i < first;
        AR_TRY(ari_config_set_layer(c->dense, at, i, dense, "experts"));
    }
    return AR_OK;
}

ar_status ari_config_score_experts(ar_config *c, const ari_json_at *at, const ari_llama_form *model)
{
    const ari_experts_form *form = model->experts;
    ar_experts *e = &c->experts;
    size_t shared = form->shared;
    *e = (ar_experts){
        .n = form->n, .per_token = form->per_token, .ffn = form->ffn, .normalised = form->normalised, .ungated = true};
    AR_TRY(form->n > 0 ? ari_json_size_or(at, "n_routed_experts", 1, MOST_EXPERTS, &e->n)
                       : ari_json_size(at, "n_routed_experts", 1, MOST_EXPERTS, &e->n));
    AR_TRY(form->per_token > 0 ? ari_json_size_or(at, "num_experts_per_tok", 1, e->n, &e->per_token)
                               : ari_json_size(at, "num_experts_per_tok", 1, e->n, &e->per_token));
    if (e->per_token > e->n)
        return ar_error_set(AR_ERR_CONFIG, "%s: %zu experts of a token, expected at most the %zu experts",
                            ARI_SHOW(at->name), e->per_token, e->n);
    AR_TRY(ari_config_dim_or(at, "moe_intermediate_size", &e->ffn));
    AR_TRY(form->shared > 0 ? ari_json_size_or(at, "n_shared_experts", 1, MOST_EXPERTS, &shared)
                            : ari_json_size(at, "n_shared_experts", 1, MOST_EXPERTS, &shared));
    if (e->ffn > ARI_CONFIG_MAX_DIM / shared)
        return ar_error_set(AR_ERR_CONFIG, "%s: %zu shared experts of width %zu are wider together than supported",
                            ARI_SHOW(at->name), shared, e->ffn);
    e->shared = shared * e->ffn;
    if (json_is_null(json_object_get(at->object, "norm_topk_prob")))
        e->normalised = false; /* as Python's None */
    AR_TRY(ari_json_bool_or(at, "norm_topk_prob", &e->normalised));
    AR_TRY(read_first_layers(c, at, form));
    return read_scores(e, at, form);
}
