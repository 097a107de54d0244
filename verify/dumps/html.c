/* SPDX-License-Identifier: Apache-2.0 */
/* A report for programs, and as a page of its own. The page is verify/dumps/report_page.html, which the build puts into
 * the library; what it shows is written into it where it says so. */
#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/io/json.h"
#include "verify/dump/placement.h"
#include "verify/dumps/report.h"
#include "verify/dumps/verify_private.h"

/* Made by cmake/Embed.cmake. */
extern const unsigned char ari_report_page[];
extern const unsigned long ari_report_page_bytes;

static const char *const states[] = {
    [AR_VERIFY_SAME] = "same",        [AR_VERIFY_DIFFERENT] = "different", [AR_VERIFY_SHAPE] = "shape",
    [AR_VERIFY_DTYPE] = "dtype",      [AR_VERIFY_MISSING] = "missing",     [AR_VERIFY_UNEXPECTED] = "unexpected",
    [AR_VERIFY_REPLICAS] = "replicas"};

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
    set(o, "factor_allowed", r->factor_allowed);
    json_object_set_new(o, "nan", json_pack("[o,o]", whole(r->nan[0]), whole(r->nan[1])));
    json_object_set_new(o, "inf", json_pack("[o,o]", whole(r->inf[0]), whole(r->inf[1])));
    set(o, "allowed", r->allowed);
    set(o, "ratio", r->ratio);
}

static void set_places(json_t *o, const ar_verify_row *r)
{
    json_object_set_new(o, "index", index_of(r, r->worst.index));
    set(o, "reference", r->worst.value[0]);
    set(o, "actual", r->worst.value[1]);
    json_object_set_new(o, "first_index", index_of(r, r->first.index));
    set(o, "first_reference", r->first.value[0]);
    set(o, "first_actual", r->first.value[1]);
    if (r->copies_differ) {
        json_object_set_new(o, "ranks", json_pack("[i,i]", r->ranks[0], r->ranks[1]));
        json_object_set_new(o, "copies_of", json_string(r->in_reference ? "reference" : "other"));
    } else {
        json_object_set_new(o, "rank", r->ranks[0] < 0 ? json_null() : json_integer(r->ranks[0]));
    }
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
    json_object_set_new(o, "elements", whole(r->elements));
    json_object_set_new(o, "elements_different", whole(r->elements_different));
    json_object_set_new(o, "bits_different", whole(r->bits_different));
    return o;
}

json_t *ari_verify_row_json(const ar_verify_row *r, bool places)
{
    json_t *o = row_head(r);
    set_measures(o, r);
    if (places)
        set_places(o, r);
    json_object_set_new(o, "pattern", ari_json_text(r->pattern));
    json_object_set_new(o, "hint", ari_json_text(r->hint));
    json_object_set_new(o, "cause", r->evidence.cause ? json_string(r->evidence.cause) : json_null());
    json_object_set_new(o, "evidence", ari_json_evidence(&r->evidence));
    json_object_set_new(o, "considered", ari_json_considered(&r->evidence));
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

static json_t *lost_gradients(const ar_verify_report *r)
{
    json_t *a = json_array();
    for (size_t i = 0; i < r->rows; i++) {
        if (r->row[i].lost_gradient)
            json_array_append_new(a, ari_json_text(r->row[i].name));
    }
    return a;
}

static json_t *unjudged(const ar_verify_report *r)
{
    json_t *a = json_array();
    for (size_t i = 0; i < r->rows; i++) {
        if (r->row[i].unjudged)
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

static json_t *ratio_json(const ar_verify_ratio *r)
{
    if (r->q == 0)
        return json_null();
    return json_pack("{s:[i,i], s:o, s:o}", "ratio", (int)r->p, (int)r->q, "tensors", whole(r->count), "of",
                     whole(r->among));
}

static json_t *facts_json(const ar_verify_report *r)
{
    const ar_verify_facts *f = &r->facts;
    json_t *apart = json_array();
    for (int d = 0; d < r->mesh.ndim; d++) {
        if (f->apart_along[d])
            json_array_append_new(apart, json_string(r->mesh.dim[d].name));
    }
    return json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:i, s:i, s:b, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:b, s:b, s:b}",
                     "steps", f->steps, "batch", whole(f->batch), "seq", whole(f->seq), "heads", whole(f->heads),
                     "kv_heads", whole(f->kv_heads), "targets", whole(f->targets), "micro_batches", f->micro_batches,
                     "dp", f->dp, "exact_numerics", f->exact_numerics, "sp", f->sp, "exact", whole(f->exact), "loss",
                     ratio_json(&f->loss), "norm", ratio_json(&f->norm), "gradients", ratio_json(&f->gradients),
                     "copies_apart", whole(f->copies_apart), "apart_along", apart, "has_m", f->has_m, "has_v", f->has_v,
                     "has_new", f->has_new);
}

void ari_verify_set_facts(json_t *o, const ar_verify_report *r)
{
    size_t copies = 0;
    for (size_t i = 0; i < r->rows; i++)
        copies += r->row[i].copies_differ;
    json_object_set_new(o, "result", json_string(!r->same ? "different" : r->unjudged > 0 ? "unjudged" : "same"));
    json_object_set_new(o, "reference", ari_json_text(r->reference));
    json_object_set_new(o, "other", ari_json_text(r->other));
    json_object_set_new(o, "rule", rule_json(r));
    json_object_set_new(o, "tensors", whole(r->compared));
    json_object_set_new(o, "tensors_different", whole(r->different));
    json_object_set_new(o, "elements", whole(r->elements));
    json_object_set_new(o, "elements_different", whole(r->elements_different));
    json_object_set_new(o, "missing", names_of(r, AR_VERIFY_MISSING));
    json_object_set_new(o, "unexpected", names_of(r, AR_VERIFY_UNEXPECTED));
    json_object_set_new(o, "lost_gradients", lost_gradients(r));
    json_object_set_new(o, "unjudged", unjudged(r));
    json_object_set_new(o, "tensors_with_different_copies", whole(copies));
    json_object_set_new(o, "left_out", ari_json_sizes(r->left_out, 2));
    json_object_set_new(o, "tensors_routed", whole(r->routed));
    json_object_set_new(o, "tensors_ragged", whole(r->ragged));
    json_object_set_new(o, "tensors_reordered", whole(r->reordered));
    json_object_set_new(o, "unwritten",
                        json_pack("[o, o]", ari_json_text(r->unwritten[0]), ari_json_text(r->unwritten[1])));
    json_object_set_new(o, "tensors_renamed", whole(r->renamed));
    json_object_set_new(o, "wrappers",
                        json_pack("[o, o]", ari_json_text(r->wrappers[0]), ari_json_text(r->wrappers[1])));
    json_object_set_new(o, "tensors_drifting", whole(r->drift));
    json_object_set_new(o, "elements_doubted", whole(r->elements_doubted));
    json_object_set_new(o, "rounded_before_first", whole(r->rounded));
    json_object_set_new(o, "ranks", json_integer(r->ranks));
    json_object_set_new(o, "explained", json_boolean(r->explained));
    json_object_set_new(o, "unexplained", r->unexplained[0] ? ari_json_text(r->unexplained) : json_null());
    json_object_set_new(o, "facts", r->same || !r->explained ? json_null() : facts_json(r));
    json_object_set_new(o, "bytes", whole(r->bytes));
    set(o, "seconds", r->seconds);
}

/* --- the page ----------------------------------------------------------------------------------------------------- */

/* A cell is a character: "0" the same, "z" not finite, else one of LEVELS, as many to each power of ten, from `low` to
 * `high`. Maps of the first tensors are as fine as they were made, those of the others so coarse that a page of
 * hundreds stays below a megabyte. */
enum { LEVELS = 60, FINE_MAPS = 32, CELLS_OF_OTHERS = 300000 };
static const char level_names[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/* The largest of f by f cells; not finite if one is not. */
static double coarse_cell(const ar_verify_map *m, size_t f, size_t row, size_t col)
{
    double most = 0.0;
    for (size_t y = row * f; y < (row + 1) * f && y < m->rows; y++) {
        for (size_t x = col * f; x < (col + 1) * f && x < m->cols; x++) {
            const double cell = (double)m->cell[y * m->cols + x];
            most = isfinite(cell) ? fmax(most, cell) : (double)INFINITY;
            if (!isfinite(most))
                return most;
        }
    }
    return most;
}

static void find_range(double *low, double *high, const ar_verify_map *m)
{
    *high = 0.0;
    *low = (double)INFINITY;
    for (size_t i = 0; i < m->rows * m->cols; i++) {
        const double cell = (double)m->cell[i];
        *high = isfinite(cell) ? fmax(*high, cell) : *high;
        *low = cell > 0.0 ? fmin(*low, cell) : *low;
    }
    *low = fmin(fmax(*low, *high * 1e-6), *high); /* what is smaller looks like nothing beside the largest */
}

static char level_of(double cell, double low, double high)
{
    if (cell == 0.0 || !isfinite(cell))
        return cell == 0.0 ? '0' : 'z';
    const double all = high > low ? log(high / low) : 0.0;
    const double part = all > 0.0 ? log(fmax(cell, low) / low) / all : 1.0;
    return level_names[1 + (size_t)lrint(part * (LEVELS - 1))];
}

/* Adds nothing where there is no map. Errors: AR_ERR_MEMORY. */
static ar_status set_map(json_t *o, const ar_verify_map *m, size_t f)
{
    double low, high;
    char *text;
    if (!m->cell)
        return AR_OK;
    const size_t rows = (m->rows + f - 1) / f, cols = (m->cols + f - 1) / f;
    AR_TRY(ari_alloc_zero((void **)&text, rows * cols + 1, 1, "a picture"));
    find_range(&low, &high, m);
    for (size_t i = 0; i < rows * cols; i++)
        text[i] = level_of(coarse_cell(m, f, i / cols, i % cols), low, high);
    json_object_set_new(o, "map", json_string(text));
    json_object_set_new(o, "map_range", json_pack("[f, f]", low, high));
    json_object_set_new(o, "map_shape", json_pack("[I, I]", (json_int_t)rows, (json_int_t)cols));
    json_object_set_new(o, "matrix", json_pack("[I, I]", (json_int_t)m->matrix_rows, (json_int_t)m->matrix_cols));
    free(text);
    return AR_OK;
}

/* The number of cells along each side of a map that become one, in all but the first FINE_MAPS. */
static size_t coarseness(const ar_verify_report *r)
{
    size_t cells = 0, f = 1;
    for (size_t i = 0, seen = 0; i < r->rows; i++) {
        const ar_verify_map *m = &r->row[i].map;
        if (m->cell && seen++ >= FINE_MAPS)
            cells += m->rows * m->cols;
    }
    while (cells / (f * f) > CELLS_OF_OTHERS)
        f++;
    return f;
}

static json_t *bins_of(const ar_verify_row *r)
{
    json_t *list = json_array();
    for (size_t i = 0; i < AR_VERIFY_ULP_BINS; i++)
        json_array_append_new(list, json_integer((json_int_t)r->ulp_bins[i]));
    return list;
}

/* A line in the table is enough for the many equal tensors. */
static ar_status row_of(json_t **gives, const ar_verify_row *r, size_t f)
{
    if (r->state == AR_VERIFY_SAME && r->bits_different == 0) {
        *gives = row_head(r);
        return AR_OK;
    }
    *gives = ari_verify_row_json(r, true);
    json_object_set_new(*gives, "bins", bins_of(r));
    return set_map(*gives, &r->map, f);
}

/* A count that may be "none". */
static json_t *row_number(size_t row, size_t rows)
{
    return row < rows ? json_integer((json_int_t)row) : json_null();
}

static ar_status report_of(json_t **gives, const ar_verify_report *r)
{
    json_t *o = json_object(), *rows = json_array();
    ar_status st = AR_OK;
    ari_verify_set_facts(o, r);
    json_object_set_new(o, "first", row_number(r->first, r->rows));
    json_object_set_new(o, "worst", row_number(r->worst, r->rows));
    json_object_set_new(o, "mesh", ari_mesh_json(&r->mesh));
    json_object_set_new(o, "rows", rows);
    const size_t coarse = coarseness(r);
    for (size_t i = 0, maps = 0; i < r->rows && st == AR_OK; i++) {
        json_t *row;
        st = row_of(&row, &r->row[i], maps < FINE_MAPS ? 1 : coarse);
        maps += r->row[i].map.cell != NULL;
        json_array_append_new(rows, row);
    }
    *gives = o;
    return st;
}

ar_status ari_verify_html(const ar_verify_report *r, const char *path)
{
    if (!r || !path)
        return ar_error_set(AR_ERR_ARG, "ari_verify_html: no %s", r ? "path" : "report");
    json_auto_t *report = NULL;
    AR_TRY(report_of(&report, r));
    return ari_json_save_page(report, ari_report_page, ari_report_page_bytes, path);
}
