/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/shared/table.h"
#include "tests/support/test.h"

/* The command's files are no part of the library. */
#include "cli/shared/progress.c"
#include "cli/shared/table.c"

/* What a table prints; free the text. */
static char *printed(ari_table *t, int indent)
{
    char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    cr_assert_ok(ari_table_end(t, to, indent));
    fclose(to);
    return text;
}

Test(table, columns_are_as_wide_as_their_widest_cell)
{
    const ari_column columns[] = {{"layout", ARI_LEFT}, {"bytes", ARI_RIGHT}, {"result", ARI_LEFT}};
    const char *const cells[] = {"tp 2", "1,048,576", "same", "tp 16 sp", "7", "different"};
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < 6; i++)
        ari_table_cell(&t, "%s", cells[i]);
    OWNED(free) char *text = printed(&t, 2);
    cr_assert_str_eq(text, "  layout        bytes  result\n"
                           "  tp 2      1,048,576  same\n"
                           "  tp 16 sp          7  different\n");
}

Test(table, widths_count_characters_and_lines_end_without_spaces)
{
    const ari_column columns[] = {{NULL, ARI_LEFT}, {NULL, ARI_LEFT}};
    const char *const cells[] = {"\xc3\xa9\xc3\xa9", "x", "abc", "y", "z"};
    ari_table t = ARI_TABLE(columns);
    for (size_t i = 0; i < 5; i++)
        ari_table_cell(&t, "%s", cells[i]);
    OWNED(free) char *text = printed(&t, 0);
    cr_assert_str_eq(text, "\xc3\xa9\xc3\xa9   x\nabc  y\nz\n");
}

Test(table, markdown_has_titles_alignment_and_no_bar_in_a_cell)
{
    const ari_column columns[] = {{"name", ARI_LEFT}, {"bytes", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    OWNED(free) char *text = NULL;
    size_t size = 0;
    FILE *to = open_memstream(&text, &size);
    ari_table_row(&t, "q|k|v\t12\to_proj");
    cr_assert_ok(ari_table_markdown(&t, to));
    fclose(to);
    cr_assert_str_eq(text, "| name | bytes |\n|---|---:|\n| q\\|k\\|v | 12 |\n| o_proj |  |\n");
}

Test(table, a_row_has_its_cells_between_tabs)
{
    const ari_column columns[] = {{"a", ARI_LEFT}, {"b", ARI_LEFT}, {"c", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    ari_table_row(&t, "%d\t%s\t%d", 1, "", 3);
    ari_table_cell(&t, "x\ty");
    OWNED(free) char *text = printed(&t, 0);
    cr_assert_str_eq(text, "a    b  c\n1       3\nx\ty\n");
}

Test(table, a_table_grows_past_its_first_room)
{
    const ari_column columns[] = {{"n", ARI_RIGHT}};
    ari_table t = ARI_TABLE(columns);
    for (int i = 0; i < 1000; i++)
        ari_table_cell(&t, "%d", i);
    OWNED(free) char *text = printed(&t, 0);
    cr_assert_not_null(strstr(text, "\n999\n"));
    cr_assert_eq(strlen(text), 4 * 1001);
}

Test(table, numbers_read_as_a_person_writes_them)
{
    cr_assert_str_eq(ARI_COUNT(0), "0");
    cr_assert_str_eq(ARI_COUNT(999), "999");
    cr_assert_str_eq(ARI_COUNT(1000), "1,000");
    cr_assert_str_eq(ARI_COUNT(UINT64_MAX), "18,446,744,073,709,551,615");
    cr_assert_str_eq(ARI_BYTES(0), "0 B");
    cr_assert_str_eq(ARI_BYTES(999), "999 B");
    cr_assert_str_eq(ARI_BYTES(1000), "1.0 kB");
    cr_assert_str_eq(ARI_BYTES(999949), "999.9 kB");
    cr_assert_str_eq(ARI_BYTES(999999), "1.0 MB");
    cr_assert_str_eq(ARI_BYTES(UINT64_MAX), "18.4 EB");
    cr_assert_str_eq(ARI_SECONDS(0.0), "0.0 us");
    cr_assert_str_eq(ARI_SECONDS(4.356e-4), "435.6 us");
    cr_assert_str_eq(ARI_SECONDS(0.99996e-3), "1.0 ms");
    cr_assert_str_eq(ARI_SECONDS(0.0123), "12.3 ms");
    cr_assert_str_eq(ARI_SECONDS(0.99996), "1.00 s");
    cr_assert_str_eq(ARI_SECONDS(99.99), "99.99 s");
    cr_assert_str_eq(ARI_SECONDS(119.7), "2 min 00 s");
    cr_assert_str_eq(ARI_SECONDS(3601), "60 min 01 s");
    cr_assert_str_eq(ARI_SECONDS(-1.0), "?");
}

Test(progress, the_line_fits_the_terminal_and_keeps_both_ends)
{
    char line[256];
    ari_progress_line(line, sizeof line, 40, 3.2, 0.5, "short");
    cr_assert_str_eq(line, " 50 %  3 s  short");
    ari_progress_line(line, sizeof line, 40, 3.2, -1.0, "model.layers.0.self_attn.q_proj.weight:grad");
    cr_assert_str_eq(line, "3 s  model.layers.0.s..proj.weight:grad");
    cr_assert_eq(strlen(line), 39);
    for (int width = 20; width < 100; width++) {
        ari_progress_line(line, sizeof line, width, 12345.0, 2.0,
                          "a name that is longer than the narrow terminals here");
        cr_assert_lt((int)strlen(line), width);
    }
    ari_progress_line(line, 30, 200, 1.0, 0.1, "a name that is longer than the buffer it is written to");
    cr_assert_lt((int)strlen(line), 30);
}

Test(progress, nothing_is_shown_where_stderr_is_no_terminal)
{
    SCOPED(ari_progress_end) ari_progress p;
    ari_progress_begin(&p, &(ari_common){.quiet = false});
    cr_assert(isatty(STDERR_FILENO) == 1 || !p.is_enabled);
    ari_progress_begin(&p, &(ari_common){.quiet = true});
    cr_assert_not(p.is_enabled);
    p.start_ns = 0; /* long ago: only `on` keeps it from printing */
    ari_progress_update(&p, 0.5, "work");
    cr_assert_not(p.shown);
}

Test(progress, a_program_reads_lines_of_json_also_of_a_quiet_job)
{
    ari_progress p;
    int pipe_of[2];
    char text[256] = "";
    cr_assert_eq(pipe(pipe_of), 0);
    ari_progress_begin(&p, &(ari_common){.quiet = true, .progress_fd = pipe_of[1]});
    ari_progress_update(&p, 0.25, "a \"name\"");
    ari_progress_update(&p, 0.5, "sooner than a tenth of a second later");
    p.last_ns = 0;
    ari_progress_update(&p, -1.0, "b");
    ari_progress_end(&p);
    close(pipe_of[1]);
    cr_assert_gt(read(pipe_of[0], text, sizeof text - 1), 0);
    json_t *first = json_loads(text, JSON_DISABLE_EOF_CHECK, NULL);
    char *second = strchr(text, '\n');
    cr_assert(first && second);
    cr_assert_eq(json_real_value(json_object_get(first, "fraction")), 0.25);
    cr_assert_str_eq(json_string_value(json_object_get(first, "what")), "a \"name\"");
    json_t *last = json_loads(second + 1, 0, NULL);
    cr_assert(last && json_is_null(json_object_get(last, "fraction")), "%s", second + 1);
    json_decref(first);
    json_decref(last);
    close(pipe_of[0]);
}
