/* SPDX-License-Identifier: Apache-2.0 */
/* A report for programs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"
#include "ref/io/json.h"
#include "verify/compare/report.h"
#include "verify/read/placement.h"

static const char *const states[] = {
    [AR_VERIFY_SAME] = "same",        [AR_VERIFY_DIFFERENT] = "different", [AR_VERIFY_SHAPE] = "shape",
    [AR_VERIFY_DTYPE] = "dtype",      [AR_VERIFY_MISSING] = "missing",     [AR_VERIFY_UNEXPECTED] = "unexpected",
    [AR_VERIFY_REPLICAS] = "replicas"};

static json_t *make_integer(uint64_t n)
{
    return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

static json_t *index_of(const ar_verify_row *r, size_t element)
{
    size_t coords[AR_ST_MAX_DIMS] = {0};
    ari_coordinates(coords, element, r->ndim, r->shape);
    return ari_json_sizes(coords, (size_t)r->ndim);
}

static void set(json_t *o, const char *key, double x)
{
    json_object_set_new(o, key, ari_json_number(x));
}

static void set_measures(json_t *o, const ar_verify_row *r)
{
    set(o, "max_abs", r->max_abs);
    set(o, "max_rel", r->max_rel);
    json_object_set_new(o, "max_ulp", make_integer(r->max_ulp));
    set(o, "rms", r->rms);
    set(o, "rms_reference", r->rms_reference);
    set(o, "max_reference", r->max_reference);
    set(o, "cosine", r->cosine);
    set(o, "scale", r->scale);
    set(o, "factor_allowed", r->factor_allowed);
    json_object_set_new(o, "nan", json_pack("[o,o]", make_integer(r->nan[0]), make_integer(r->nan[1])));
    json_object_set_new(o, "inf", json_pack("[o,o]", make_integer(r->inf[0]), make_integer(r->inf[1])));
    set(o, "allowed", r->allowed);
    set(o, "ratio", r->ratio);
}

/* Writes an element's index and its two values, or nulls if there is none, for example for different shapes. */
static void set_place(json_t *o, const ar_verify_row *r, const ar_verify_element *e, const char *const keys[3],
                      bool has_element)
{
    json_object_set_new(o, keys[0], has_element ? index_of(r, e->index) : json_null());
    for (int k = 0; k < 2; k++)
        json_object_set_new(o, keys[1 + k], has_element ? ari_json_number(e->value[k]) : json_null());
}

static void set_places(json_t *o, const ar_verify_row *r)
{
    static const char *const worst[] = {"index", "reference", "actual"}, *const first_keys[] = {"first_index",
                                                                                                "first_reference",
                                                                                                "first_actual"};
    const bool has_element = r->state == AR_VERIFY_DIFFERENT || r->copies_differ;
    set_place(o, r, &r->worst, worst, has_element);
    set_place(o, r, &r->first, first_keys, has_element);
    json_object_set_new(o, "rank",
                        !has_element || r->copies_differ || r->ranks[0] < 0 ? json_null() : json_integer(r->ranks[0]));
    json_object_set_new(o, "ranks", r->copies_differ ? json_pack("[i,i]", r->ranks[0], r->ranks[1]) : json_null());
    json_object_set_new(o, "copies_of",
                        r->copies_differ ? json_string(r->in_reference ? "reference" : "other") : json_null());
}

/* Sets the fields of a row's explanation before there is one. */
static void set_unexplained(json_t *o)
{
    static const char *const keys[] = {"pattern", "hint", "cause", "confidence", "look_at", "evidence"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        json_object_set_new(o, keys[i], json_null());
}

/* Fields common to all rows. */
static json_t *row_head(const ar_verify_row *r)
{
    const char pass[] = {r->pass, '\0'};
    json_t *o = json_object();
    json_object_set_new(o, "tensor", ari_json_text(r->name));
    json_object_set_new(o, "state", json_string(states[r->state]));
    json_object_set_new(o, "pass", r->pass == '?' ? json_null() : json_string(pass));
    json_object_set_new(o, "step", json_integer(r->step));
    json_object_set_new(o, "dtype", json_string(ar_dtype_name(r->dtype)));
    json_object_set_new(o, "other_dtype", json_string(ar_dtype_name(r->other_dtype)));
    json_object_set_new(o, "shape", ari_json_sizes(r->shape, (size_t)r->ndim));
    json_object_set_new(o, "other_shape", ari_json_sizes(r->other_shape, (size_t)r->other_ndim));
    json_object_set_new(o, "elements", make_integer(r->elements));
    json_object_set_new(o, "elements_different", make_integer(r->elements_different));
    json_object_set_new(o, "bits_different", make_integer(r->bits_different));
    return o;
}

static json_t *row_json(const ar_verify_row *r)
{
    json_t *o = row_head(r);
    set_measures(o, r);
    set_places(o, r);
    set_unexplained(o);
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

static bool is_lost(const ar_verify_row *r)
{
    return r->lost_gradient;
}

static bool is_unjudged(const ar_verify_row *r)
{
    return r->unjudged;
}

static bool is_excused_by_reduction(const ar_verify_row *r)
{
    return r->excused_by_reduction;
}

static json_t *names_where(const ar_verify_report *r, bool (*holds)(const ar_verify_row *))
{
    json_t *a = json_array();
    for (size_t i = 0; i < r->rows; i++) {
        if (holds(&r->row[i]))
            json_array_append_new(a, ari_json_text(r->row[i].name));
    }
    return a;
}

static json_t *rule_json(const ar_verify_report *r)
{
    switch (r->rule) {
    case AR_VERIFY_ULP:
        return json_pack("{s:s, s:o}", "name", "ulp", "ulp", make_integer(r->ulp));
    case AR_VERIFY_TOLERANCE:
        return json_pack("{s:s, s:f, s:f}", "name", "tolerance", "rtol", r->rtol, "atol", r->atol);
    case AR_VERIFY_SENSITIVITY:
        return json_pack("{s:s, s:o}", "name", "sensitivity", "allows", ari_json_text(r->allows));
    case AR_VERIFY_BITS:
        break;
    }
    return json_pack("{s:s}", "name", "bits");
}

static void set_facts(json_t *o, const ar_verify_report *r)
{
    size_t copies = 0;
    for (size_t i = 0; i < r->rows; i++)
        copies += r->row[i].copies_differ;
    json_object_set_new(o, "result", json_string(!r->same ? "different" : r->unjudged > 0 ? "unjudged" : "same"));
    json_object_set_new(o, "reference", ari_json_text(r->reference));
    json_object_set_new(o, "other", ari_json_text(r->other));
    json_object_set_new(o, "rule", rule_json(r));
    json_object_set_new(o, "tensors", make_integer(r->compared));
    json_object_set_new(o, "tensors_different", make_integer(r->different));
    json_object_set_new(o, "elements", make_integer(r->elements));
    json_object_set_new(o, "elements_different", make_integer(r->elements_different));
    json_object_set_new(o, "missing", names_of(r, AR_VERIFY_MISSING));
    json_object_set_new(o, "unexpected", names_of(r, AR_VERIFY_UNEXPECTED));
    json_object_set_new(o, "lost_gradients", names_where(r, is_lost));
    json_object_set_new(o, "unjudged", names_where(r, is_unjudged));
    json_object_set_new(o, "reduced", json_string(r->reduced));
    json_object_set_new(o, "excused_by_reduction", names_where(r, is_excused_by_reduction));
    json_object_set_new(o, "tensors_with_different_copies", make_integer(copies));
    json_object_set_new(o, "left_out", ari_json_sizes(r->left_out, 2));
    json_object_set_new(o, "tensors_routed", make_integer(r->routed));
    json_object_set_new(o, "tensors_ragged", make_integer(r->ragged));
    json_object_set_new(o, "tensors_reordered", make_integer(r->reordered));
    json_object_set_new(o, "tensors_reshaped", make_integer(r->reshaped));
    json_object_set_new(o, "unwritten",
                        json_pack("[o, o]", ari_json_text(r->unwritten[0]), ari_json_text(r->unwritten[1])));
    json_object_set_new(o, "tensors_renamed", make_integer(r->renamed));
    json_object_set_new(o, "wrappers",
                        json_pack("[o, o]", ari_json_text(r->wrappers[0]), ari_json_text(r->wrappers[1])));
    json_object_set_new(o, "tensors_drifting", make_integer(r->drift));
    json_object_set_new(o, "elements_doubted", make_integer(r->elements_doubted));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "exact_numerics", json_boolean(r->exact_numerics));
    json_object_set_new(o, "bytes", make_integer(r->bytes));
    set(o, "seconds", r->seconds);
}

/* --- the whole ---------------------------------------------------------------------------------------------------- */

static json_t *bins_of(const ar_verify_row *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < AR_VERIFY_ULP_BINS; i++)
        json_array_append_new(list, json_integer((json_int_t)r->ulp_bins[i]));
    return list;
}

/* Returns a row for the report page, with its histogram and heat map. Equal tensors, of which there are many, need only
 * their line in the table. */
static json_t *page_row(const ar_verify_row *r)
{
    const ar_verify_map *m = &r->map;
    if (r->state == AR_VERIFY_SAME && r->bits_different == 0)
        return row_head(r);
    json_t *o = row_json(r), *cells = json_array();
    json_object_set_new(o, "bins", bins_of(r));
    for (size_t i = 0; m->cell && i < m->rows * m->cols; i++)
        json_array_append_new(cells, ari_json_number((double)m->cell[i]));
    json_object_set_new(o, "map", cells);
    json_object_set_new(o, "map_shape", ari_json_sizes((const size_t[]){m->rows, m->cols}, 2));
    json_object_set_new(o, "matrix", ari_json_sizes((const size_t[]){m->matrix_rows, m->matrix_cols}, 2));
    return o;
}

json_t *ari_verify_report_json(const ar_verify_report *r)
{
    json_t *o = json_object(), *worst = json_array();
    set_facts(o, r);
    json_object_set_new(o, "mesh", ari_mesh_json(&r->mesh));
    json_object_set_new(o, "first", r->first == SIZE_MAX ? json_null() : row_json(&r->row[r->first]));
    for (size_t i = 0; i < r->different; i++)
        json_array_append_new(worst, row_json(&r->row[r->worst_order[i]]));
    json_object_set_new(o, "worst", worst);
    return o;
}

json_t *ari_verify_row_json(const ar_verify_report *r, const char *tensor)
{
    for (size_t i = 0; tensor && i < r->rows; i++) {
        if (strcmp(r->row[i].name, tensor) == 0)
            return row_json(&r->row[i]);
    }
    return NULL;
}

json_t *ari_verify_rows_json(const ar_verify_report *r)
{
    json_t *rows = json_array();
    for (size_t i = 0; i < r->rows; i++)
        json_array_append_new(rows, page_row(&r->row[i]));
    return rows;
}
