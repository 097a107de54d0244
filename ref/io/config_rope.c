/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary positions, as transformers reads them (modeling_rope_utils.py). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/io/config_parts.h"
#include "ref/io/file.h"

/* --- one number --------------------------------------------------------------------------------------------------- */

/* A number from `least` on, 0 or 1. *out is left as it is where the key is absent. */
static ar_status read_from(const ari_json_at *at, const char *key, double least, double *out)
{
    AR_TRY(ari_json_real_or(at, key, out));
    if (!(*out >= least))
        return ari_json_wrong(at, key, " is %g, expected a number from %g", *out, least);
    return AR_OK;
}

/* At least 1 in every file; smaller ones would make positions larger than anybody trained. */
static ar_status read_factor(const ari_json_at *rope, double *factor)
{
    AR_TRY(ari_json_real(rope, "factor", factor));
    return read_from(rope, "factor", 1, factor);
}

/* The positions that the model was first trained on: beside the object or in it; Hugging Face takes all of them where
 * neither says, or what the class has beside it. */
static ar_status read_original(const ar_config *c, const ari_rope_object *o, size_t *out)
{
    static const char key[] = "original_max_position_embeddings";
    size_t outer = o->form->original;
    *out = c->max_positions;
    AR_TRY(ari_config_dim_or(&o->rope, key, out));
    AR_TRY(ari_config_dim_or(o->at, key, &outer));
    if (outer > 0 && ari_json_get(&o->rope, key) != NULL && outer != *out)
        return ari_json_wrong(&o->rope, key, " is %zu, but %zu beside it", *out, outer);
    *out = outer > 0 ? outer : *out;
    return AR_OK;
}

/* --- the types ---------------------------------------------------------------------------------------------------- */

static ar_status read_default(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    (void)c, (void)r, (void)o;
    return AR_OK;
}

static ar_status read_linear(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    (void)c;
    return read_factor(&o->rope, &r->factor);
}

/* Longer sequences than the file names are what this type is for: up to `factor` times as long. */
static ar_status read_dynamic(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    AR_TRY(read_factor(&o->rope, &r->factor));
    if (strcmp(o->key, "rope_parameters") != 0 && strcmp(o->key, "rope_scaling") != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: rope_type 'dynamic' of some layers is not supported",
                            ARI_SHOW(o->rope.name));
    if (ar_rope_dim(r, c->head_dim) <= 2)
        return ar_error_set(AR_ERR_CONFIG, "%s: rope_type 'dynamic' of %zu features that turn, expected more than 2",
                            ARI_SHOW(o->rope.name), ar_rope_dim(r, c->head_dim));
    const double longest = floor(r->factor * (double)c->max_positions);
    r->original_positions = c->max_positions;
    c->max_positions = longest < (double)ARI_CONFIG_MAX_DIM ? (size_t)longest : ARI_CONFIG_MAX_DIM;
    return AR_OK;
}

static ar_status read_yarn(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    const ari_json_at *rope = &o->rope;
    AR_TRY(read_original(c, o, &r->original_positions));
    r->factor = (double)c->max_positions / (double)r->original_positions;
    if (!json_is_null(json_object_get(rope->object, "factor")))
        AR_TRY(ari_json_real(rope, "factor", &r->factor)); /* it may be null, and not be absent */
    AR_TRY(read_from(rope, "factor", 1, &r->factor));
    r->beta_fast = 32;
    r->beta_slow = 1;
    AR_TRY(ari_config_positive(rope, "beta_fast", &r->beta_fast));
    AR_TRY(ari_config_positive(rope, "beta_slow", &r->beta_slow));
    if (r->beta_fast < r->beta_slow)
        return ari_json_wrong(rope, "beta_fast", " is %g, expected at least beta_slow, %g", r->beta_fast, r->beta_slow);
    if (!(r->theta > 1))
        return ari_json_wrong(rope, "rope_theta", " is %g, expected more than 1 with rope_type 'yarn'", r->theta);
    AR_TRY(read_from(rope, "mscale", 0, &r->mscale));
    AR_TRY(read_from(rope, "mscale_all_dim", 0, &r->mscale_all_dim));
    if (ari_json_get(rope, "attention_factor") != NULL)
        AR_TRY(ari_config_positive(rope, "attention_factor", &r->attention_factor));
    r->truncate = !json_is_null(json_object_get(rope->object, "truncate")); /* Python's None is false */
    return ari_json_bool_or(rope, "truncate", &r->truncate);
}

static ar_status read_llama3(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    AR_TRY(read_factor(&o->rope, &r->factor));
    AR_TRY(ari_json_real(&o->rope, "low_freq_factor", &r->low_freq_factor));
    AR_TRY(ari_json_real(&o->rope, "high_freq_factor", &r->high_freq_factor));
    AR_TRY(ari_config_positive(&o->rope, "low_freq_factor", &r->low_freq_factor));
    if (!(r->high_freq_factor > r->low_freq_factor))
        return ari_json_wrong(&o->rope, "high_freq_factor", " is %g, expected more than low_freq_factor, %g",
                              r->high_freq_factor, r->low_freq_factor);
    return read_original(c, o, &r->original_positions);
}

/* A positive number for each pair. */
static ar_status read_factors(const ari_json_at *rope, const char *key, float *out, size_t pairs)
{
    const json_t *list = NULL;
    AR_TRY(ari_json_array(rope, key, &list));
    if (json_array_size(list) != pairs)
        return ari_json_wrong(rope, key, " has %zu entries, expected one for each of %zu pairs", json_array_size(list),
                              pairs);
    for (size_t i = 0; i < pairs; i++) {
        const json_t *value = json_array_get(list, i);
        const float factor = (float)json_number_value(value);
        if (!json_is_number(value) || !(factor > 0) || isinf(factor))
            return ari_json_wrong(rope, key, ": entry %zu is %s%.9g, expected a positive number", i,
                                  json_is_number(value) ? "" : "not a number but ", (double)factor);
        out[i] = factor;
    }
    return AR_OK;
}

static ar_status read_longrope(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    const ari_json_at *rope = &o->rope;
    const size_t pairs = ar_rope_dim(r, c->head_dim) / 2;
    if (pairs > AR_ROPE_PAIRS)
        return ar_error_set(AR_ERR_CONFIG, "%s: rope_type 'longrope' of %zu pairs of features, supported are %d",
                            ARI_SHOW(rope->name), pairs, AR_ROPE_PAIRS);
    AR_TRY(read_original(c, o, &r->original_positions));
    AR_TRY(read_factors(rope, "short_factor", r->short_factor, pairs));
    AR_TRY(read_factors(rope, "long_factor", r->long_factor, pairs));
    r->factor = (double)c->max_positions / (double)r->original_positions;
    if (ari_json_get(rope, "factor") != NULL)
        AR_TRY(read_factor(rope, &r->factor));
    if (ari_json_get(rope, "attention_factor") != NULL)
        return ari_config_positive(rope, "attention_factor", &r->attention_factor);
    if (r->factor > 1 && r->original_positions < 2)
        return ari_json_wrong(
            rope, "original_max_position_embeddings",
            " is 1, of which the attention factor cannot be made, expected at least 2, or an 'attention_factor'");
    return AR_OK;
}

enum { ROPE_KEYS = 9 };
static const struct rope_type {
    char name[12];
    ar_rope_kind kind;
    ar_status (*read)(ar_config *c, ar_rope *r, const ari_rope_object *o);
    const char *keys[ROPE_KEYS]; /* that it reads besides those of all types */
} types[] = {
    {"default", AR_ROPE_DEFAULT, read_default, {NULL}},
    {"linear", AR_ROPE_LINEAR, read_linear, {"factor"}},
    {"dynamic", AR_ROPE_DYNAMIC, read_dynamic, {"factor"}},
    {"yarn",
     AR_ROPE_YARN,
     read_yarn,
     {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
      "mscale_all_dim", "truncate"}},
    {"llama3",
     AR_ROPE_LLAMA3,
     read_llama3,
     {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
    {"longrope",
     AR_ROPE_LONGROPE,
     read_longrope,
     {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}},
};
#define ALL_TYPES "'default', 'linear', 'dynamic', 'yarn', 'llama3' and 'longrope'"
#define PHI3_TYPES "'default' and 'longrope'"

/* `type` is the older spelling of `rope_type`; Phi-3 calls longrope by two older names. */
static ar_status read_type(const ari_rope_object *o, const struct rope_type **out)
{
    const char *type = NULL, *older = NULL;
    AR_TRY(ari_json_string_or(&o->rope, "rope_type", &type));
    AR_TRY(ari_json_string_or(&o->rope, "type", &older));
    if (type != NULL && older != NULL && strcmp(type, older) != 0)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys 'rope_type' and 'type' differ: '%s' and '%s'",
                            ARI_SHOW(o->rope.name), ARI_SHOW(type), ARI_SHOW(older));
    type = type ? type : older ? older : o->otherwise;
    if (type == NULL)
        return ari_json_wrong(&o->rope, "rope_type", " is missing, expected one of %s",
                              o->form->phi3 ? PHI3_TYPES : ALL_TYPES);
    if (o->form->phi3 && (strcmp(type, "su") == 0 || strcmp(type, "yarn") == 0))
        type = "longrope";
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        const bool allowed = !o->form->phi3 || types[i].kind == AR_ROPE_DEFAULT || types[i].kind == AR_ROPE_LONGROPE;
        if (allowed && strcmp(type, types[i].name) == 0) {
            *out = &types[i];
            return AR_OK;
        }
    }
    return ari_json_wrong(&o->rope, "rope_type", " is '%s', supported are %s", ARI_SHOW(type),
                          o->form->phi3 ? PHI3_TYPES : ALL_TYPES);
}

/* --- the object --------------------------------------------------------------------------------------------------- */

/* The part of a head that turns, int(head_dim*factor): beside the object or in it. */
static ar_status read_partial(const ar_config *c, ar_rope *r, const ari_json_at *at, bool supported, double share)
{
    double partial = share > 0.0 ? share : 1;
    AR_TRY(ari_json_real_or(at, "partial_rotary_factor", &partial));
    if (!supported && partial != 1)
        return ari_json_wrong(at, "partial_rotary_factor", " is %g, only 1 is supported", partial);
    if (partial == 1) {
        r->rotary_dim = ari_json_get(at, "partial_rotary_factor") != NULL ? 0 : r->rotary_dim;
        return AR_OK;
    }
    const size_t dim = partial > 0 && partial < 1 ? (size_t)((double)c->head_dim * partial) : 0;
    if (dim == 0 || dim % 2 != 0)
        return ari_json_wrong(
            at, "partial_rotary_factor",
            " is %g, of heads of %zu features: expected one from 0 to 1 with which an even number of features turns",
            partial, c->head_dim);
    r->rotary_dim = dim;
    return AR_OK;
}

/* Rotations of several axes, or that differ by layer where the model's do not. */
static ar_status refuse_inside(const ari_json_at *rope)
{
    if (ari_json_get(rope, "mrope_section") != NULL)
        return ari_config_refuse_key(rope, "mrope_section", "null");
    const char *inner;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)rope->object, inner, value)
    {
        if (json_is_object(value))
            return ari_json_wrong(rope, ARI_SHOW(inner), ": positions that differ by layer are not supported");
    }
    return AR_OK;
}

ar_status ari_config_rope_object(ar_config *c, ar_rope *r, const ari_rope_object *o)
{
    static const char *const common[] = {"type", "rope_type", "rope_theta", "partial_rotary_factor"};
    const char *keys[4 + ROPE_KEYS];
    const struct rope_type *type = NULL;
    const double outer = r->theta;
    size_t used = 0;
    AR_TRY(refuse_inside(&o->rope));
    AR_TRY(read_partial(c, r, &o->rope, o->form->partial, 0.0));
    AR_TRY(ari_config_positive(&o->rope, "rope_theta", &r->theta));
    if (ari_json_get(o->at, "rope_theta") != NULL && r->theta != outer)
        return ari_json_wrong(&o->rope, "rope_theta", " is %g, but %g beside it", r->theta, outer);
    AR_TRY(read_type(o, &type));
    r->kind = type->kind;
    AR_TRY(type->read(c, r, o));
    for (; used < sizeof common / sizeof *common; used++)
        keys[used] = common[used];
    for (size_t i = 0; type->keys[i]; i++)
        keys[used++] = type->keys[i];
    ari_config_note_others(c, o->key, o->rope.object, keys, used);
    return AR_OK;
}

static ar_status read_object(ar_config *c, const ari_json_at *at, const ari_rope_form *form, const char *key,
                             const char *otherwise)
{
    char name[2 * ARI_PRINTABLE];
    const json_t *object = NULL;
    AR_TRY(ari_json_object(at, key, &object));
    snprintf(name, sizeof name, "%s: in '%s'", ARI_SHOW(at->name), key);
    return ari_config_rope_object(c, &c->rope, &(ari_rope_object){at, {object, name, at->code}, key, otherwise, form});
}

ar_status ari_config_rope(ar_config *c, const ari_json_at *at, const ari_rope_form *form)
{
    c->rope = (ar_rope){.kind = AR_ROPE_DEFAULT, .theta = form->theta > 0.0 ? form->theta : 10000.0};
    AR_TRY(ari_config_positive(at, "rope_theta", &c->rope.theta));
    const bool inside = json_object_get(ari_json_get(at, "rope_parameters"), "partial_rotary_factor") != NULL;
    AR_TRY(read_partial(c, &c->rope, at, form->partial, inside ? 0.0 : form->share));
    const bool now = ari_json_get(at, "rope_parameters") != NULL, before = ari_json_get(at, "rope_scaling") != NULL;
    if (now && before)
        return ar_error_set(AR_ERR_CONFIG, "%s: keys 'rope_parameters' and 'rope_scaling' are both set, expected one",
                            ARI_SHOW(at->name));
    if (now)
        return read_object(c, at, form, "rope_parameters", "default");
    return before ? read_object(c, at, form, "rope_scaling", NULL) : AR_OK;
}
