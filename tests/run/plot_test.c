/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/file.h"
#include "support/row.h"
#include "tests/support/temporary.h"
#include "tests/support/test.h"
#include "verify/run/plot.h"

enum { FILE_SIZE = 1 << 20 };

/* The file that a plot writes. free() */
static char *written(const ari_plot *p)
{
    SCOPED(temp_end) const temp_path made = temp_file("");
    cr_assert_ok(ari_plot_write(p, made.path));
    unsigned char *text = NULL;
    size_t n = 0;
    cr_assert_ok(ari_file_read(&text, &n, made.path, FILE_SIZE));
    return (char *)text;
}

/* How often a word stands in a text. */
static size_t count(const char *text, const char *word)
{
    size_t n = 0;
    for (const char *at = strstr(text, word); at; at = strstr(at + 1, word))
        n++;
    return n;
}

static ari_plot plot_of(const ari_plot_line *lines, size_t n)
{
    return (ari_plot)ROW(.title = "title", .subtitle = "", .x_name = "x", .y_name = "y", .r_name = "r", .lines = lines,
                         .n = n, .mark = (double)NAN);
}

Test(plot, ticks_are_round_and_there_are_4_to_10)
{
    static const double ranges[] = {1e-9, 0.07, 0.5, 1, 3, 7, 10, 99, 100, 123456, 1e12};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        const double tick = ari_plot_tick(ranges[i]), digit = tick / pow(10.0, floor(log10(tick * 1.0001)));
        cr_assert(fabs(digit - 1) < 1e-9 || fabs(digit - 2) < 1e-9 || fabs(digit - 5) < 1e-9, "%g", tick);
        cr_assert(ranges[i] / tick >= 4 - 1e-9 && ranges[i] / tick <= 10 + 1e-9, "%g of %g", tick, ranges[i]);
    }
}

Test(plot, a_smoothed_constant_is_that_constant)
{
    const double y[4] = {3, 3, 3, 3}, rising[3] = {0, 1, 1};
    double smooth[4];
    ari_plot_smooth(smooth, y, 4, 2.0);
    for (size_t i = 0; i < 4; i++)
        cr_assert_float_eq(smooth[i], 3.0, 1e-15);
    ari_plot_smooth(smooth, rising, 3, 3.0); /* weights 1, 1/2, 1/4 by distance */
    cr_assert_float_eq(smooth[0], 0.75 / 1.75, 1e-15);
    cr_assert_float_eq(smooth[1], 1.5 / 2.0, 1e-15);
    cr_assert_float_eq(smooth[2], 1.5 / 1.75, 1e-15);
}

Test(plot, a_smoothed_line_does_not_lag)
{
    double y[101], smooth[101];
    for (int i = 0; i < 101; i++)
        y[i] = 10.0 - 0.1 * i;
    ari_plot_smooth(smooth, y, 101, 6.0);
    cr_assert_float_eq(smooth[50], y[50], 1e-6);
}

Test(plot, every_point_is_drawn_and_a_gap_breaks_the_line)
{
    const double x[6] = {1, 2, 3, 4, 5, 6}, y[6] = {1, 2, (double)NAN, 4, 5, (double)INFINITY};
    const ari_plot_line line = {"loss", ARI_PLOT_FAINT, x, y, 6};
    const ari_plot p = plot_of(&line, 1);
    OWNED(free) char *text = written(&p);
    /* 1 and 5 are the lowest and the highest tick: pixels 390 and 66. */
    cr_assert_not_null(
        strstr(text, "<path class=\"faint\" d=\"M70.00 390.00L250.00 309.00M610.00 147.00L790.00 66.00\"/>"), "%s",
        text);
}

Test(plot, a_long_line_has_its_first_and_last_point)
{
    enum { N = 50001 };
    OWNED(free) double *x = malloc(N * sizeof *x);
    for (size_t i = 0; i < N; i++)
        x[i] = (double)i;
    const ari_plot_line line = {"loss", ARI_PLOT_FAINT, x, x, N};
    const ari_plot p = plot_of(&line, 1);
    OWNED(free) char *text = written(&p);
    cr_assert_not_null(strstr(text, "d=\"M70.00 "));
    cr_assert_not_null(strstr(text, "L790.00 "));
    cr_assert_leq(count(text, "L"), 20001);
    cr_assert_geq(count(text, "L"), 10000);
}

Test(plot, names_of_any_bytes_leave_the_xml_whole)
{
    const double x[2] = {1, 2};
    const ari_plot_line line = {"loss", ARI_PLOT_BOLD, x, x, 2};
    ari_plot p = plot_of(&line, 1);
    p.title = "<a & b>\x01\xff";
    p.subtitle = "\xc3\xa9";
    OWNED(free) char *text = written(&p);
    cr_assert_not_null(strstr(text, "<title>&lt;a &amp; b&gt;?\?</title>"));
    cr_assert_not_null(strstr(text, "\xc3\xa9"));
}

Test(plot, one_point_and_a_constant_have_axes)
{
    const double x[1] = {1}, y[1] = {0}, rate[1] = {0.001};
    const ari_plot_line lines[] = {{"loss", ARI_PLOT_FAINT, x, y, 1}, {"rate", ARI_PLOT_ASIDE, x, rate, 1}};
    const ari_plot p = plot_of(lines, 2);
    OWNED(free) char *text = written(&p);
    cr_assert_eq(count(text, "nan") + count(text, "inf"), 0);
    cr_assert_geq(count(text, "class=\"grid\""), 3);
}

Test(plot, nothing_to_draw_is_an_error_and_no_file)
{
    const double x[1] = {1}, y[1] = {(double)NAN};
    const ari_plot_line line = {"loss", ARI_PLOT_FAINT, x, y, 1};
    const ari_plot p = plot_of(&line, 1);
    cr_assert_eq(ari_plot_write(&p, "/tmp/anyrank-no-plot.svg"), AR_ERR_ARG);
    cr_assert_neq(access("/tmp/anyrank-no-plot.svg", F_OK), 0);
}
