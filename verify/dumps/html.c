/* SPDX-License-Identifier: Apache-2.0 */
/* A report as a page of its own. The page is verify/dumps/report_page.html, which the build puts into the library; what
 * it shows is written into it where it says so. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/verify.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/json.h"

/* Made by cmake/Embed.cmake. */
extern const unsigned char ari_report_page[];
extern const unsigned long ari_report_page_bytes;

static const char place_of_data[] = "@REPORT@";

static json_t *place_of(const ar_verify_row *r, size_t element)
{
    size_t index[AR_ST_MAX_DIMS] = {0};
    ari_coordinates(index, element, r->ndim, r->shape);
    return ari_json_sizes(index, (size_t)r->ndim);
}

static json_t *count_of(size_t n)
{
    return json_integer((json_int_t)n);
}

static json_t *pair_of(const double *value)
{
    json_t *list = json_array();
    json_array_append_new(list, ari_json_number(value[0]));
    json_array_append_new(list, ari_json_number(value[1]));
    return list;
}

static const char *const states[] = {
    [AR_VERIFY_SAME] = "same",        [AR_VERIFY_DIFFERENT] = "different", [AR_VERIFY_SHAPE] = "shape",
    [AR_VERIFY_DTYPE] = "dtype",      [AR_VERIFY_MISSING] = "missing",     [AR_VERIFY_UNEXPECTED] = "unexpected",
    [AR_VERIFY_REPLICAS] = "replicas"};

/* Three digits are enough for a colour, and keep the page small. */
static json_t *map_of(const ar_verify_row *r)
{
    json_t *list = json_array();
    for (size_t i = 0; r->map && i < r->map_rows * r->map_cols; i++) {
        char digits[32];
        const double cell = (double)r->map[i];
        snprintf(digits, sizeof digits, "%.3g", cell);
        json_array_append_new(list, isfinite(cell) ? json_real(strtod(digits, NULL)) : json_integer(-1));
    }
    return list;
}

static json_t *bins_of(const ar_verify_row *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < AR_VERIFY_ULP_BINS; i++)
        json_array_append_new(list, json_integer((json_int_t)r->ulp_bins[i]));
    return list;
}

static void add_values(json_t *o, const ar_verify_row *r)
{
    json_object_set_new(o, "nan", json_pack("[I, I]", (json_int_t)r->nan[0], (json_int_t)r->nan[1]));
    json_object_set_new(o, "inf", json_pack("[I, I]", (json_int_t)r->inf[0], (json_int_t)r->inf[1]));
    json_object_set_new(o, "max_abs", ari_json_number(r->max_abs));
    json_object_set_new(o, "max_rel", ari_json_number(r->max_rel));
    json_object_set_new(o, "rms", ari_json_number(r->rms));
    json_object_set_new(o, "rms_reference", ari_json_number(r->rms_reference));
    json_object_set_new(o, "max_ulp", json_integer((json_int_t)r->max_ulp));
    json_object_set_new(o, "cosine", ari_json_number(r->cosine));
    json_object_set_new(o, "scale", ari_json_number(r->scale));
    json_object_set_new(o, "allowed", ari_json_number(r->allowed));
    json_object_set_new(o, "ratio", ari_json_number(r->ratio));
    json_object_set_new(o, "first", place_of(r, r->first));
    json_object_set_new(o, "first_value", pair_of(r->first_value));
    json_object_set_new(o, "worst", place_of(r, r->worst));
    json_object_set_new(o, "worst_value", pair_of(r->worst_value));
    json_object_set_new(o, "ranks", json_pack("[i, i]", r->ranks[0], r->ranks[1]));
    json_object_set_new(o, "in_reference", json_boolean(r->in_reference));
    json_object_set_new(o, "pattern", ari_json_text(r->pattern));
    json_object_set_new(o, "hint", ari_json_text(r->hint));
    json_object_set_new(o, "bins", bins_of(r));
    json_object_set_new(o, "map", map_of(r));
    json_object_set_new(o, "map_shape", json_pack("[I, I]", (json_int_t)r->map_rows, (json_int_t)r->map_cols));
    json_object_set_new(o, "matrix", json_pack("[I, I]", (json_int_t)r->matrix_rows, (json_int_t)r->matrix_cols));
}

static json_t *row_of(const ar_verify_row *r)
{
    const char pass[2] = {r->pass ? r->pass : '?', '\0'};
    const bool only_other = r->state == AR_VERIFY_UNEXPECTED;
    json_t *o = json_object();
    json_object_set_new(o, "name", ari_json_text(r->name));
    json_object_set_new(o, "state", json_string(states[r->state]));
    json_object_set_new(o, "pass", json_string(pass));
    json_object_set_new(o, "step", json_integer(r->step));
    json_object_set_new(o, "dtype", json_string(ar_dtype_name(only_other ? r->other_dtype : r->dtype)));
    json_object_set_new(o, "other_dtype", json_string(ar_dtype_name(r->other_dtype)));
    json_object_set_new(o, "shape",
                        only_other ? ari_json_sizes(r->other_shape, (size_t)r->other_ndim)
                                   : ari_json_sizes(r->shape, (size_t)r->ndim));
    json_object_set_new(o, "other_shape", ari_json_sizes(r->other_shape, (size_t)r->other_ndim));
    json_object_set_new(o, "elements", count_of(r->elements));
    json_object_set_new(o, "different", count_of(r->elements_different));
    json_object_set_new(o, "bits_different", count_of(r->bits_different));
    /* Of the many that are the same a line in the table is enough. */
    if (r->state != AR_VERIFY_SAME || r->bits_different > 0)
        add_values(o, r);
    return o;
}

static json_t *mesh_of(const ar_verify_report *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < r->mesh_dims; i++)
        json_array_append_new(list, json_pack("[s, i]", r->mesh[i].name, r->mesh[i].size));
    return list;
}

/* A count that may be "none". */
static json_t *row_number(size_t row, size_t rows)
{
    return row < rows ? json_integer((json_int_t)row) : json_null();
}

static json_t *report_of(const ar_verify_report *r)
{
    static const char *const rules[] = {[AR_VERIFY_BITS] = "bits",
                                        [AR_VERIFY_ULP] = "ulp",
                                        [AR_VERIFY_TOLERANCE] = "tolerance",
                                        [AR_VERIFY_SENSITIVITY] = "sensitivity"};
    json_t *o = json_object(), *rows = json_array();
    json_object_set_new(o, "same", json_boolean(r->same));
    json_object_set_new(o, "reference", ari_json_text(r->reference));
    json_object_set_new(o, "other", ari_json_text(r->other));
    json_object_set_new(o, "rule", json_string(rules[r->rule]));
    json_object_set_new(o, "ulp", json_integer((json_int_t)r->ulp));
    json_object_set_new(o, "rtol", ari_json_number(r->rtol));
    json_object_set_new(o, "atol", ari_json_number(r->atol));
    json_object_set_new(o, "compared", count_of(r->compared));
    json_object_set_new(o, "different", count_of(r->different));
    json_object_set_new(o, "missing", count_of(r->missing));
    json_object_set_new(o, "unexpected", count_of(r->unexpected));
    json_object_set_new(o, "elements", count_of(r->elements));
    json_object_set_new(o, "elements_different", count_of(r->elements_different));
    json_object_set_new(o, "first", row_number(r->first, r->rows));
    json_object_set_new(o, "worst", row_number(r->worst, r->rows));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "mesh", mesh_of(r));
    for (size_t i = 0; i < r->rows; i++)
        json_array_append_new(rows, row_of(&r->row[i]));
    if (json_object_set_new(o, "rows", rows) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

/* JSON inside a script element: a name that holds "</script>" must not end it. */
static ar_status write_json(ari_out *out, const char *json)
{
    while (*json) {
        const size_t n = strcspn(json, "<");
        AR_TRY(ari_out_write(out, json, n));
        json += n;
        if (*json == '<') {
            AR_TRY(ari_out_write(out, "\\u003c", 6));
            json++;
        }
    }
    return AR_OK;
}

static ar_status write_page(ari_out *out, const char *json)
{
    const char *page = (const char *)ari_report_page, *data = strstr(page, place_of_data);
    if (!data)
        return ar_error_set(AR_ERR_INTERNAL, "the page of the report has no place for it");
    const char *rest = data + sizeof place_of_data - 1;
    AR_TRY(ari_out_write(out, page, (size_t)(data - page)));
    AR_TRY(write_json(out, json));
    return ari_out_write(out, rest, ari_report_page_bytes - (size_t)(rest - page));
}

ar_status ar_verify_html(const ar_verify_report *r, const char *path)
{
    if (!r || !path)
        return ar_error_set(AR_ERR_ARG, "ar_verify_html: no %s", r ? "path" : "report");
    json_t *report = report_of(r);
    char *json = report ? json_dumps(report, JSON_COMPACT) : NULL;
    json_decref(report);
    if (!json)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for the report", ARI_SHOW(path));
    ari_out *out = NULL;
    ar_status st = ari_out_create(&out, path);
    if (st == AR_OK) {
        st = write_page(out, json);
        if (st == AR_OK)
            st = ari_out_commit(out);
        else
            ari_out_discard(out);
    }
    free(json);
    return st;
}
