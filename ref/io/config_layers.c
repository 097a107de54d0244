/* SPDX-License-Identifier: Apache-2.0 */
/* Sliding windows, as transformers has them (masking_utils.py): query i sees the keys j with i - j < window. */
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/io/config_parts.h"

static const char full[] = "full_attention", sliding[] = "sliding_attention";

/* --- models without ----------------------------------------------------------------------------------------------- */

static bool is_off(const json_t *value)
{
    return value == NULL || json_is_false(value);
}

ar_status ari_config_layer_kinds(const ari_json_at *at, const char *key, size_t layers, const char *const kinds[2],
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
    return ari_config_layer_kinds(at, "layer_types", layers, kinds, out);
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
