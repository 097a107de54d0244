/* SPDX-License-Identifier: Apache-2.0 */
/* Asks anyrank.explain why a report's first tensor differs; the same call writes the report's page. */
#include "verify/explain/explain.h"

#include <stdio.h>
#include <string.h>

#include "cli/verify/report.h"
#include "ref/io/json.h"
#include "verify/compare/report.h"

/* Returns what the options specify about the second run; NULL if memory is short. */
static json_t *known_json(const ar_verify_options *o)
{
    const struct {
        const char *name;
        int size;
    } axes[] = {{"dp", o->dp}, {"cp", o->cp}, {"tp", o->tp}};
    json_t *mesh = json_object();
    for (size_t i = 0; i < sizeof axes / sizeof *axes; i++) {
        if (axes[i].size > 1)
            json_object_set_new(mesh, axes[i].name, json_integer(axes[i].size));
    }
    return json_pack("{s:o, s:I, s:I}", "mesh", mesh, "heads", (json_int_t)o->heads, "kv_heads",
                     (json_int_t)o->kv_heads);
}

static json_t *text_or_null(const char *text)
{
    return text ? ari_json_text(text) : json_null();
}

ar_status ari_verify_ask(ari_verify_cause *cause, const ar_verify_report *r, const ar_verify_options *o,
                         const json_t *report, const char *page, bool explain)
{
    json_auto_t *extended_report = json_deep_copy(report);
    json_object_set_new(extended_report, "known", known_json(o));
    if (page)
        json_object_set_new(extended_report, "rows", ari_verify_rows_json(r));
    json_auto_t *request =
        json_pack("{s:O, s:o, s:o, s:o, s:b}", "report", extended_report, "map", text_or_null(o->map), "reference_map",
                  text_or_null(o->reference_map), "page", text_or_null(page), "explain", explain);
    if (!request)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a report");
    AR_TRY(ari_explain(&cause->answer, cause->failure, sizeof cause->failure, request));
    const char *error = json_string_value(json_object_get(cause->answer, "error"));
    if (error) {
        snprintf(cause->failure, sizeof cause->failure, "%s", error);
        json_decref(cause->answer);
        cause->answer = NULL;
    }
    if (!page || cause->answer)
        return AR_OK;
    char failure[sizeof cause->failure];
    json_object_set_new(request, "explain", json_false()); /* the page needs no numpy */
    json_auto_t *written = NULL;
    AR_TRY(ari_explain(&written, failure, sizeof failure, request));
    if (!written || json_object_get(written, "error"))
        return ar_error_set(AR_ERR_UNSUPPORTED, "--html: %s",
                            written ? json_string_value(json_object_get(written, "error")) : failure);
    return AR_OK;
}

/* Copies the explanation of a tensor to its row in the list of all rows. */
static void set_explained(json_t *report, json_t *first_row, const ar_verify_report *r)
{
    const json_t *worst = json_object_get(report, "worst");
    const char *tensor = json_string_value(json_object_get(first_row, "tensor"));
    json_auto_t *row_of_one = ari_verify_row_json(r, tensor); /* which only one dump may have */
    if (row_of_one)
        json_object_update_missing(first_row, row_of_one);
    json_object_set(report, "first", first_row);
    for (size_t i = 0; tensor && i < json_array_size(worst); i++) {
        json_t *row = json_array_get(worst, i);
        if (strcmp(json_string_value(json_object_get(row, "tensor")), tensor) == 0)
            json_object_update(row, first_row);
    }
}

void ari_verify_cause_json(json_t *report, const ar_verify_report *r, const ari_verify_cause *cause)
{
    json_t *first_row = json_object_get(cause->answer, "first");
    const json_t *rounded = json_object_get(cause->answer, "rounded_before_first");
    if (first_row)
        set_explained(report, first_row, r);
    json_object_set_new(report, "rounded_before_first", json_integer(json_integer_value(rounded)));
    json_object_set_new(report, "explained", json_boolean(!cause->failure[0]));
    json_object_set(report, "explanation", cause->answer ? cause->answer : json_null());
    json_object_set_new(report, "unexplained", cause->failure[0] ? ari_json_text(cause->failure) : json_null());
}

void ari_verify_cause_fini(ari_verify_cause *cause)
{
    json_decref(cause->answer);
}
