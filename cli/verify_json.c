/* SPDX-License-Identifier: Apache-2.0 */
/* The stable JSON of verify: docs/verify.md lists its fields. */
#include "cli/command.h"
#include "cli/verify_report.h"
#include "ref/core/size.h"
#include "ref/io/json.h"

static const char *const state_names[] = {"same", "different", "shape", "dtype", "missing", "unexpected", "replicas"};

static json_t *whole(uint64_t n)
{
    return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

static json_t *index_of(const ar_verify_row *r, size_t element)
{
    size_t at[AR_ST_MAX_DIMS] = {0};
    ari_coordinates(at, element, r->ndim, r->shape);
    return ari_json_sizes(at, (size_t)r->ndim);
}

static void set(json_t *o, const char *key, double x)
{
    json_object_set_new(o, key, ari_json_number(x));
}

static void set_measures(json_t *o, const ar_verify_row *r)
{
    set(o, "max_abs", r->max_abs);
    set(o, "max_rel", r->max_rel);
    json_object_set_new(o, "max_ulp", whole(r->max_ulp));
    set(o, "rms", r->rms);
    set(o, "rms_reference", r->rms_reference);
    set(o, "max_reference", r->max_reference);
    set(o, "cosine", r->cosine);
    set(o, "scale", r->scale);
    json_object_set_new(o, "nan", json_pack("[o,o]", whole(r->nan[0]), whole(r->nan[1])));
    json_object_set_new(o, "inf", json_pack("[o,o]", whole(r->inf[0]), whole(r->inf[1])));
    set(o, "allowed", r->allowed);
    set(o, "ratio", r->ratio);
}

static void set_places(json_t *o, const ar_verify_row *r)
{
    json_object_set_new(o, "index", index_of(r, r->worst));
    set(o, "reference", r->worst_value[0]);
    set(o, "actual", r->worst_value[1]);
    json_object_set_new(o, "first_index", index_of(r, r->first));
    set(o, "first_reference", r->first_value[0]);
    set(o, "first_actual", r->first_value[1]);
    if (r->copies_differ) {
        json_object_set_new(o, "ranks", json_pack("[i,i]", r->ranks[0], r->ranks[1]));
        json_object_set_new(o, "copies_of", json_string(r->in_reference ? "reference" : "other"));
    } else {
        json_object_set_new(o, "rank", r->ranks[0] < 0 ? json_null() : json_integer(r->ranks[0]));
    }
}

static json_t *row_json(const ar_verify_row *r)
{
    const char pass[] = {r->pass, '\0'};
    json_t *o = json_object();
    json_object_set_new(o, "tensor", ari_json_text(r->name));
    json_object_set_new(o, "state", json_string(state_names[r->state]));
    json_object_set_new(o, "pass", r->pass == '?' ? json_null() : json_string(pass));
    json_object_set_new(o, "step", json_integer(r->step));
    json_object_set_new(o, "dtype", json_string(ar_dtype_name(r->dtype)));
    json_object_set_new(o, "other_dtype", json_string(ar_dtype_name(r->other_dtype)));
    json_object_set_new(o, "shape", ari_json_sizes(r->shape, (size_t)r->ndim));
    json_object_set_new(o, "other_shape", ari_json_sizes(r->other_shape, (size_t)r->other_ndim));
    json_object_set_new(o, "elements", whole(r->elements));
    json_object_set_new(o, "elements_different", whole(r->elements_different));
    json_object_set_new(o, "bits_different", whole(r->bits_different));
    set_measures(o, r);
    if (r->state == AR_VERIFY_DIFFERENT || r->copies_differ)
        set_places(o, r);
    json_object_set_new(o, "pattern", ari_json_text(r->pattern));
    json_object_set_new(o, "hint", ari_json_text(r->hint));
    return o;
}

static json_t *names_of(const ar_verify_report *r, ar_verify_state state)
{
    json_t *a = json_array();
    for (size_t i = 0; i < r->rows; i++) {
        if (r->row[i].state == state)
            json_array_append_new(a, ari_json_text(r->row[i].name));
    }
    return a;
}

static json_t *rule_json(const ar_verify_report *r)
{
    switch (r->rule) {
    case AR_VERIFY_ULP:
        return json_pack("{s:s, s:o}", "name", "ulp", "ulp", whole(r->ulp));
    case AR_VERIFY_TOLERANCE:
        return json_pack("{s:s, s:f, s:f}", "name", "tolerance", "rtol", r->rtol, "atol", r->atol);
    case AR_VERIFY_SENSITIVITY:
        return json_pack("{s:s, s:o}", "name", "sensitivity", "allows", ari_json_text(r->allows));
    case AR_VERIFY_BITS:
        break;
    }
    return json_pack("{s:s}", "name", "bits");
}

json_t *ari_verify_json(const ar_verify_report *r)
{
    json_t *o = ari_json_begin("verify"), *worst = json_array();
    for (size_t i = 0; i < r->different; i++)
        json_array_append_new(worst, row_json(&r->row[r->worst_order[i]]));
    json_object_set_new(o, "result", json_string(r->same ? "same" : "different"));
    json_object_set_new(o, "reference", ari_json_text(r->reference));
    json_object_set_new(o, "other", ari_json_text(r->other));
    json_object_set_new(o, "rule", rule_json(r));
    json_object_set_new(o, "tensors", whole(r->compared));
    json_object_set_new(o, "tensors_different", whole(r->different));
    json_object_set_new(o, "elements", whole(r->elements));
    json_object_set_new(o, "elements_different", whole(r->elements_different));
    json_object_set_new(o, "missing", names_of(r, AR_VERIFY_MISSING));
    json_object_set_new(o, "unexpected", names_of(r, AR_VERIFY_UNEXPECTED));
    json_object_set_new(o, "tensors_with_different_copies", whole(ari_verify_copies(r)));
    json_object_set_new(o, "left_out", ari_json_sizes(r->left_out, 2));
    json_object_set_new(o, "tensors_drifting", whole(r->drift));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "bytes", whole(r->bytes));
    set(o, "seconds", r->seconds);
    json_object_set_new(o, "first", r->first == SIZE_MAX ? json_null() : row_json(&r->row[r->first]));
    if (json_object_set_new(o, "worst", worst) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}
