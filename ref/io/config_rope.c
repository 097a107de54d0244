/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/io/config_parts.h"
#include "ref/io/file.h"

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

/* At least 1 in every file; smaller ones would make positions larger than anybody trained. */
static ar_status read_factor(const ari_json_at *rope, double *factor)
{
    AR_TRY(ari_json_real(rope, "factor", factor));
    if (!(*factor >= 1))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'factor' is %g, expected a number from 1", ARI_SHOW(rope->name),
                            *factor);
    return AR_OK;
}

/* The positions that the model was first trained on: beside the object or in it; Hugging Face takes all of them where
 * neither says. */
static ar_status read_original(const ari_json_at *at, const ari_json_at *rope, size_t otherwise, size_t *out)
{
    static const char key[] = "original_max_position_embeddings";
    size_t outer = 0;
    *out = otherwise;
    AR_TRY(ari_config_dim_or(rope, key, out));
    AR_TRY(ari_config_dim_or(at, key, &outer));
    if (outer > 0 && ari_json_get(rope, key) != NULL && outer != *out)
        return ar_error_set(AR_ERR_CONFIG, "%s: key '%s' is %zu, but %zu beside it", ARI_SHOW(rope->name), key, *out,
                            outer);
    *out = outer > 0 ? outer : *out;
    return AR_OK;
}

static ar_status read_llama3(ar_config *c, const ari_json_at *at, const ari_json_at *rope)
{
    ar_rope_llama3 *o = &c->rope_llama3;
    AR_TRY(read_factor(rope, &o->factor));
    AR_TRY(ari_json_real(rope, "low_freq_factor", &o->low_freq_factor));
    AR_TRY(ari_json_real(rope, "high_freq_factor", &o->high_freq_factor));
    if (!(o->low_freq_factor > 0))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'low_freq_factor' is %g, expected a positive number",
                            ARI_SHOW(rope->name), o->low_freq_factor);
    if (!(o->high_freq_factor > o->low_freq_factor))
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'high_freq_factor' is %g, expected more than low_freq_factor, %g",
                            ARI_SHOW(rope->name), o->high_freq_factor, o->low_freq_factor);
    return read_original(at, rope, c->max_positions, &o->original_positions);
}

/* key: of the object, for notes. `otherwise`: the type where the object names none; NULL: it has to. */
static ar_status read_scaling(ar_config *c, const ari_json_at *at, const ari_json_at *rope, const char *key,
                              const char *otherwise)
{
    const char *type = NULL;
    AR_TRY(read_rope_type(rope, &type));
    type = type == NULL ? otherwise : type;
    if (type == NULL)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_type' is missing, expected 'default', 'linear' or 'llama3'",
                            ARI_SHOW(rope->name));
    static const char *const all[] = {
        "type",   "rope_type",       "rope_theta",       "partial_rotary_factor",
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"};
    size_t used = 4;
    if (strcmp(type, "linear") == 0) {
        used = 5;
        AR_TRY(read_factor(rope, &c->rope_factor));
    } else if (strcmp(type, "llama3") == 0) {
        used = sizeof all / sizeof *all;
        AR_TRY(read_llama3(c, at, rope));
    } else if (strcmp(type, "default") != 0) {
        return ar_error_set(AR_ERR_CONFIG,
                            "%s: key 'rope_type' is '%s', supported are 'default', 'linear' and 'llama3'",
                            ARI_SHOW(rope->name), ARI_SHOW(type));
    }
    ari_config_note_others(c, key, rope->object, all, used);
    return AR_OK;
}

/* Rotations of a part of the head, of several axes, or that differ by layer. */
static ar_status refuse_inside(const ari_json_at *rope)
{
    double partial = 1;
    AR_TRY(ari_json_real_or(rope, "partial_rotary_factor", &partial));
    if (partial != 1)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'partial_rotary_factor' is %g, only 1 is supported",
                            ARI_SHOW(rope->name), partial);
    if (ari_json_get(rope, "mrope_section") != NULL)
        return ari_config_refuse_key(rope, "mrope_section", "null");
    const char *inner;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)rope->object, inner, value)
    {
        if (json_is_object(value))
            return ar_error_set(AR_ERR_CONFIG, "%s: key '%s': positions that differ by layer are not supported",
                                ARI_SHOW(rope->name), ARI_SHOW(inner));
    }
    return AR_OK;
}

static ar_status read_rope_object(ar_config *c, const ari_json_at *at, const char *key, const char *otherwise)
{
    char name[2 * ARI_PRINTABLE];
    const json_t *object = NULL;
    AR_TRY(ari_json_object(at, key, &object));
    snprintf(name, sizeof name, "%s: in '%s'", ARI_SHOW(at->name), key);
    const ari_json_at rope = {object, name, at->code};
    AR_TRY(refuse_inside(&rope));
    double theta = c->rope_theta;
    AR_TRY(read_theta(&rope, &theta));
    if (ari_json_get(at, "rope_theta") != NULL && theta != c->rope_theta)
        return ar_error_set(AR_ERR_CONFIG, "%s: key 'rope_theta' is %g, but %g beside it", name, theta, c->rope_theta);
    c->rope_theta = theta;
    return read_scaling(c, at, &rope, key, otherwise);
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
