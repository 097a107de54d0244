/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"
#include "verify/dumps/verify_private.h"

enum { ROWS = 4 };

/* A difference, one that is the same, one of a name that is no UTF-8, one that would end the script. */
static void fill(ar_verify_report *r, ar_verify_row *row)
{
    static const char *const names[ROWS] = {"a.weight:grad", "b", "bad \xff name", "</script><script>alert(1)"};
    static float map[6] = {0.0f, 2.5f, INFINITY, 0.0f, 1.0f, 0.0f};
    for (int i = 0; i < ROWS; i++)
        row[i] = (ar_verify_row){.name = names[i],
                                 .pass = 'g',
                                 .step = 1,
                                 .dtype = AR_F32,
                                 .other_dtype = AR_F32,
                                 .ndim = 2,
                                 .shape = {2, 3},
                                 .other_ndim = 2,
                                 .other_shape = {2, 3},
                                 .elements = 6,
                                 .ranks = {-1, -1}};
    row[0].state = AR_VERIFY_DIFFERENT;
    row[0].elements_different = row[0].bits_different = 3;
    row[0].cosine = NAN;
    row[0].ratio = INFINITY;
    row[0].first.index = 1;
    row[0].worst.index = 5;
    row[0].map.cell = map;
    row[0].map.rows = 2;
    row[0].map.cols = 3;
    row[0].ulp_bins[AR_VERIFY_ULP_BINS - 1] = 3;
    snprintf(row[0].hint, sizeof row[0].hint, "missing all-reduce");
    row[2].state = AR_VERIFY_MISSING;
    row[3].state = AR_VERIFY_UNEXPECTED;
    *r = (ar_verify_report){.reference = "ref",
                            .other = "oth",
                            .row = row,
                            .rows = ROWS,
                            .compared = 2,
                            .different = 1,
                            .missing = 1,
                            .unexpected = 1,
                            .first = 0,
                            .worst = 0,
                            .ranks = 4,
                            .mesh = {1, {{"tp", 4}}}};
}

static char *written(void)
{
    ar_verify_report r;
    ar_verify_row row[ROWS];
    fill(&r, row);
    SCOPED(temp_end) const temp_path page = temp_file("");
    unsigned char *text = NULL;
    size_t length = 0;
    cr_assert_ok(ari_verify_html(&r, page.path));
    cr_assert_ok(ari_file_read(&text, &length, page.path, (size_t)1 << 24));
    return (char *)text;
}

/* What stands between the page's script element for data and its end. */
static json_t *data_of(const char *page)
{
    static const char before[] = "<script type=\"application/json\" id=\"data\">";
    const char *start = strstr(page, before);
    cr_assert_not_null(start);
    start += sizeof before - 1;
    const char *end = strstr(start, "</script>");
    cr_assert_not_null(end);
    json_t *data = NULL;
    cr_assert_ok(ari_json_parse(&data, start, (size_t)(end - start), "report"));
    return data;
}

Test(html, page_holds_the_report_as_json)
{
    OWNED(free) char *page = written();
    json_t *data = data_of(page);
    const json_t *rows = json_object_get(data, "rows"), *first = json_array_get(rows, 0);
    cr_assert_eq(json_array_size(rows), ROWS);
    cr_assert_str_eq(json_string_value(json_object_get(first, "state")), "different");
    cr_assert_str_eq(json_string_value(json_object_get(first, "hint")), "missing all-reduce");
    cr_assert_str_eq(json_string_value(json_object_get(first, "ratio")), "Infinity");
    cr_assert_eq(json_integer_value(json_array_get(json_object_get(first, "index"), 1)), 2);
    cr_assert_str_eq(json_string_value(json_object_get(first, "map")), "0yz010", "levels: highest, not finite, lowest");
    const json_t *range = json_object_get(first, "map_range");
    cr_assert_float_eq(json_real_value(json_array_get(range, 0)), 1.0, 0.0);
    cr_assert_float_eq(json_real_value(json_array_get(range, 1)), 2.5, 0.0);
    cr_assert_eq(json_integer_value(json_object_get(data, "first")), 0);
    json_decref(data);
}

Test(html, names_of_others_cannot_leave_the_data)
{
    OWNED(free) char *page = written();
    cr_assert_null(strstr(page, "<script>alert(1)"));
    json_t *data = data_of(page);
    const json_t *rows = json_object_get(data, "rows");
    cr_assert_str_eq(json_string_value(json_object_get(json_array_get(rows, 3), "tensor")),
                     "</script><script>alert(1)");
    cr_assert_str_eq(json_string_value(json_object_get(json_array_get(rows, 2), "tensor")), "bad ? name");
    json_decref(data);
}

Test(html, page_asks_for_nothing_from_the_network)
{
    OWNED(free) char *page = written();
    cr_assert_not_null(strstr(page, "default-src 'none'"));
    cr_assert_null(strstr(page, "http:"));
    cr_assert_null(strstr(page, "https:"));
    cr_assert_null(strstr(page, " src="));
}

Test(html, no_report_and_no_folder_are_errors)
{
    ar_verify_report r;
    ar_verify_row row[ROWS];
    fill(&r, row);
    cr_assert_eq(ari_verify_html(NULL, "x"), AR_ERR_ARG);
    cr_assert_eq(ari_verify_html(&r, "/nonexistent-folder/x.html"), AR_ERR_IO);
}
