/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/support/test.h"

/* The command's files are no part of the library; those that table_test.c has are linked. */
#include "cli/bugs/report.c"
#include "ref/core/fault_private.h"

/* Of layouts nothing is asked here. */
const char *const ari_mlp_order_names[] = {"column-row", "row-column", NULL};
const char ari_layout_of_fault[] = "";
const char *ari_layout_text(char *text, const ar_parallel *p, size_t batch)
{
    (void)p, (void)batch;
    return strcpy(text, "tp=2");
}
json_t *ari_layout_json(const ar_parallel *p, size_t batch, const char *members)
{
    (void)p, (void)batch, (void)members;
    return json_object();
}

static size_t lines_that_begin_with(const char *text, const char *with)
{
    size_t n = 0;
    for (const char *line = text; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        n += strncmp(line, with, strlen(with)) == 0;
    }
    return n;
}

/* One fault a line, whether or not it has columns for what curves show of it. */
Test(bugs, each_fault_is_a_line)
{
    enum { FAULTS = 128 };
    static ari_bug_run run[FAULTS];
    const int n = (int)ari_fault_count;
    cr_assert_leq(n, FAULTS);
    for (int i = 0; i < n; i++)
        run[i].fault = ari_fault_names[i];
    for (int curves = 0; curves < 2; curves++) {
        OWNED(free) char *text = NULL;
        size_t size = 0;
        FILE *to = open_memstream(&text, &size);
        cr_assert_ok(ari_bugs_print(to, run, n, curves));
        fclose(to);
        for (int i = 0; i < n; i++) {
            char name[64];
            snprintf(name, sizeof name, "%s ", ari_fault_names[i]);
            cr_expect_eq(lines_that_begin_with(text, name), 1, "%s: %s", curves ? "with curves" : "without", name);
        }
        cr_expect_eq(strstr(text, "1e-3 test") != NULL, curves);
    }
}
