/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/run/plot.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "anyrank/training.h"
#include "ref/core/size.h"
#include "ref/io/file.h"
#include "ref/io/json.h"

/* Pixels of the picture, and where the axes stand in it. */
enum { WIDTH = 860, HEIGHT = 440, LEFT = 70, RIGHT = 790, TOP = 66, BOTTOM = 390, MOST_POINTS = 20000 };

/* An axis's range, and the pixels of its ends. */
typedef struct axis {
    double low, high;
    double at_low, at_high;
} axis;

static const char style_sheet[] =
    "text{font:12px system-ui,sans-serif;fill:#333}.title{font-size:15px;font-weight:600}.quiet{fill:#777}"
    ".paper{fill:#fff}.grid{stroke:#e3e3e3;fill:none}.axis{stroke:#888;fill:none}"
    ".faint{stroke:#8fb4de;stroke-width:1;fill:none}.bold{stroke:#1c5fad;stroke-width:2;fill:none}"
    ".aside{stroke:#b8860b;stroke-width:1;stroke-dasharray:4 3;fill:none}"
    ".mark{stroke:#999;stroke-dasharray:2 3;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#ddd}.quiet{fill:#999}.paper{fill:#16181c}.grid{stroke:#2c3036}"
    ".axis{stroke:#777}.faint{stroke:#47678c}.bold{stroke:#7db4f0}.aside{stroke:#d9b14a}.mark{stroke:#777}}";
static const char *const class_names[] = {"faint", "bold", "aside"}; /* in the order of ari_plot_style */

/* --- numbers ------------------------------------------------------------------------------------------------------ */

double ari_plot_tick(double range)
{
    const double power = pow(10.0, floor(log10(range / 4.0)));
    const double units = range / 4.0 / power; /* of [1, 10) */
    return power * (units >= 5.0 ? 5.0 : units >= 2.0 ? 2.0 : 1.0);
}

void ari_plot_smooth(double *smooth, const double *y, size_t n, double window)
{
    const double keep = 1.0 - 2.0 / (window + 1.0);
    double sum = 0.0, weight = 0.0;
    for (size_t i = 0; i < n; i++) { /* those before it, and then those after it */
        smooth[i] = sum;
        sum = (sum + y[i]) * keep;
    }
    sum = 0.0;
    for (size_t i = n; i-- > 0;) {
        smooth[i] += y[i] + sum;
        sum = (sum + y[i]) * keep;
    }
    for (size_t i = 0; i < n; i++) {
        weight =
            keep > 0.0 ? (1.0 + keep - pow(keep, (double)i + 1.0) - pow(keep, (double)(n - i))) / (1.0 - keep) : 1.0;
        smooth[i] /= weight;
    }
}

static double pixel(const axis *a, double x)
{
    return a->at_low + (x - a->low) / (a->high - a->low) * (a->at_high - a->at_low);
}

static void widen(axis *a, double x)
{
    if (x < a->low)
        a->low = x;
    if (x > a->high)
        a->high = x;
}

/* The finite points of the lines of one side. False where there are none. */
static bool range_of(axis *x, axis *y, const ari_plot *p, bool right)
{
    bool any = false;
    for (size_t i = 0; i < p->n; i++) {
        const ari_plot_line *l = &p->lines[i];
        for (size_t k = 0; (l->style == ARI_PLOT_ASIDE) == right && k < l->n; k++) {
            if (!isfinite(l->x[k]) || !isfinite(l->y[k]))
                continue;
            any = true;
            widen(x, l->x[k]);
            widen(y, l->y[k]);
        }
    }
    return any;
}

/* Ends on ticks; a range of nothing gets one around it. */
static void round_ends(axis *a)
{
    if (!(a->high > a->low)) {
        const double around = a->high != 0.0 ? fabs(a->high) * 0.1 : 1.0;
        a->low -= around;
        a->high += around;
    }
    const double tick = ari_plot_tick(a->high - a->low);
    a->low = floor(a->low / tick) * tick;
    a->high = ceil(a->high / tick) * tick;
}

/* --- drawing ------------------------------------------------------------------------------------------------------ */

static void put_text(FILE *to, const char *text)
{
    const bool utf8 = ari_utf8_valid(text, strlen(text));
    for (const unsigned char *c = (const unsigned char *)text; *c != '\0'; c++) {
        if (*c == '&')
            fputs("&amp;", to);
        else if (*c == '<')
            fputs("&lt;", to);
        else if (*c == '>')
            fputs("&gt;", to);
        else
            fputc(*c < 0x20 || *c == 0x7f || (*c >= 0x80 && !utf8) ? '?' : *c, to);
    }
}

void ari_plot_label(FILE *to, double x, double y, const char *attributes, const char *text)
{
    fprintf(to, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    put_text(to, text);
    fputs("</text>\n", to);
}

static void put_number(FILE *to, double x, double y, const char *attributes, double value, double tick)
{
    char text[32];
    snprintf(text, sizeof text, "%.6g", fabs(value) < tick * 1e-6 ? 0.0 : value);
    ari_plot_label(to, x, y, attributes, text);
}

static size_t ticks_of(const axis *a, double tick)
{
    return (size_t)floor((a->high - a->low) / tick + 1.0 + 1e-6);
}

static void put_axes(FILE *to, const axis *x, const axis *y, const axis *right, const ari_plot *p)
{
    double tick = ari_plot_tick(y->high - y->low);
    for (size_t i = 0; i < ticks_of(y, tick); i++) {
        const double at = pixel(y, y->low + (double)i * tick);
        fprintf(to, "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n", LEFT, at, RIGHT);
        put_number(to, LEFT - 8, at + 4, "text-anchor=\"end\"", y->low + (double)i * tick, tick);
    }
    tick = ari_plot_tick(x->high - x->low);
    const double first = ceil(x->low / tick) * tick;
    for (size_t i = 0; first + (double)i * tick <= x->high + tick * 1e-6; i++) {
        const double value = first + (double)i * tick;
        fprintf(to, "<path class=\"axis\" d=\"M%.1f %dv5\"/>\n", pixel(x, value), BOTTOM);
        put_number(to, pixel(x, value), BOTTOM + 19, "text-anchor=\"middle\"", value, tick);
    }
    fprintf(to, "<path class=\"axis\" d=\"M%d %dH%d\"/>\n", LEFT, BOTTOM, RIGHT);
    ari_plot_label(to, (LEFT + RIGHT) / 2.0, BOTTOM + 40, "text-anchor=\"middle\"", p->x_name);
    ari_plot_label(to, LEFT - 8, TOP - 12, "text-anchor=\"end\"", p->y_name);
    if (!right)
        return;
    tick = ari_plot_tick(right->high - right->low);
    for (size_t i = 0; i < ticks_of(right, tick); i++)
        put_number(to, RIGHT + 8, pixel(right, right->low + (double)i * tick) + 4, "class=\"quiet\"",
                   right->low + (double)i * tick, tick);
    ari_plot_label(to, RIGHT + 8, TOP - 12, "class=\"quiet\"", p->r_name);
}

static void put_line(FILE *to, const ari_plot_line *l, const axis *x, const axis *y)
{
    const size_t stride = (l->n + MOST_POINTS - 1) / MOST_POINTS;
    bool broken = true;
    fprintf(to, "<path class=\"%s\" d=\"", class_names[l->style]);
    for (size_t i = 0; i < l->n; i += i + 1 < l->n && i + stride >= l->n ? l->n - 1 - i : stride) {
        if (!isfinite(l->x[i]) || !isfinite(l->y[i])) {
            broken = true;
            continue;
        }
        fprintf(to, "%c%.2f %.2f", broken ? 'M' : 'L', pixel(x, l->x[i]), pixel(y, l->y[i]));
        broken = false;
    }
    fputs("\"/>\n", to);
}

static void put_legend(FILE *to, const ari_plot *p)
{
    double at = RIGHT;
    for (size_t i = p->n; i-- > 0;) {
        at -= 7.0 * (double)strlen(p->lines[i].name) + 40.0;
        fprintf(to, "<path class=\"%s\" d=\"M%.1f %dh22\"/>\n", class_names[p->lines[i].style], at, TOP - 16);
        ari_plot_label(to, at + 28, TOP - 12, "class=\"quiet\"", p->lines[i].name);
    }
}

static void put_mark(FILE *to, const ari_plot *p, const axis *x)
{
    if (!(p->mark >= x->low && p->mark <= x->high))
        return;
    fprintf(to, "<path class=\"mark\" d=\"M%.1f %dV%d\"/>\n", pixel(x, p->mark), TOP, BOTTOM);
    ari_plot_label(to, pixel(x, p->mark) + 4, TOP + 12, "class=\"quiet\"", p->mark_name);
}

void ari_plot_begin(FILE *to, int width, int height, int left, const char *title, const char *subtitle,
                    const char *style)
{
    fprintf(to,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "role=\"img\">\n<title>",
            width, height, width, height);
    put_text(to, title);
    fprintf(to, "</title>\n<style>%s%s</style>\n<rect class=\"paper\" width=\"100%%\" height=\"100%%\"/>\n",
            style_sheet, style);
    ari_plot_label(to, left, 22, "class=\"title\"", title);
    ari_plot_label(to, left, 40, "class=\"quiet\"", subtitle);
}

static ar_status draw_lines(FILE *to, const void *what)
{
    const ari_plot *p = what;
    axis x = {(double)INFINITY, (double)-INFINITY, LEFT, RIGHT};
    axis left = {(double)INFINITY, (double)-INFINITY, BOTTOM, TOP};
    axis right = {0.0, (double)-INFINITY, BOTTOM, TOP}; /* from 0 on: a constant rate is no noise */
    const bool has_left = range_of(&x, &left, p, false), has_right = range_of(&x, &right, p, true);
    if (!has_left)
        return ar_error_set(AR_ERR_ARG, "a plot without a point: expected a line with a finite value");
    round_ends(&left);
    round_ends(&right);
    if (!(x.high > x.low)) {
        x.low -= 0.5;
        x.high += 0.5;
    }
    ari_plot_begin(to, WIDTH, HEIGHT, LEFT, p->title, p->subtitle, "");
    put_axes(to, &x, &left, has_right ? &right : NULL, p);
    put_mark(to, p, &x);
    for (size_t i = 0; i < p->n; i++)
        put_line(to, &p->lines[i], &x, p->lines[i].style == ARI_PLOT_ASIDE ? &right : &left);
    put_legend(to, p);
    fputs("</svg>\n", to);
    return AR_OK;
}

ar_status ari_plot_save(const char *path, ar_status (*draw)(FILE *to, const void *what), const void *what)
{
    ARI_OWNED char *text = NULL;
    size_t length = 0;
    FILE *to = open_memstream(&text, &length);
    if (!to)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a plot", path);
    ar_status st = draw(to, what);
    if (!ari_text_closed(to, &text) && st == AR_OK)
        st = ar_error_set(AR_ERR_MEMORY, "%s: no memory for a plot", path);
    if (st == AR_OK)
        st = ari_file_write(path, text, length);
    return st;
}

ar_status ari_plot_write(const ari_plot *p, const char *path)
{
    return ari_plot_save(path, draw_lines, p);
}

/* --- the curve of a training run ---------------------------------------------------------------------------------- */
/* Below this many steps there is nothing to smooth; a window is this part of the curve. */
enum { LEAST_SMOOTHED = 20, WINDOWS = 20 };

/* The curve without its gaps, smoothed. */
static void smooth_losses(double *smooth, const double *loss, size_t n)
{
    size_t known = 0;
    while (known < n && !isfinite(loss[known]))
        smooth[known++] = (double)NAN;
    ari_plot_smooth(smooth + known, loss + known, n - known, (double)n / WINDOWS + 1.0);
}

static ar_status write_plot(const ar_training_report *r, const ar_training_options *o, double *room, const char *path)
{
    const size_t n = (size_t)r->steps;
    double *step = room, *loss = room + n, *smooth = room + 2 * n;
    char layout[96], title[256], end[96], subtitle[256];
    for (size_t i = 0; i < n; i++) {
        step[i] = (double)i + 1.0;
        loss[i] = (double)r->loss[i];
    }
    smooth_losses(smooth, loss, n);
    const ari_plot_line lines[] = {{"loss", ARI_PLOT_FAINT, step, loss, n},
                                   {"learning rate", ARI_PLOT_ASIDE, step, r->lr, n},
                                   {"smoothed", ARI_PLOT_BOLD, step, smooth, n}};
    ar_parallel_text(layout, sizeof layout, &o->run.parallel);
    snprintf(title, sizeof title, "%s, %s", r->config.name, layout);
    if (r->weights_hash[0])
        snprintf(end, sizeof end, "weights after step %" PRIu64 ": %.12s", r->steps, r->weights_hash);
    else
        snprintf(end, sizeof end, "diverged after step %" PRIu64, r->steps);
    snprintf(subtitle, sizeof subtitle, "%zu sequences of %zu tokens a step; %s", o->run.batch, o->run.seq, end);
    const ari_plot p = {.title = title,
                        .subtitle = subtitle,
                        .x_name = "step",
                        .y_name = "loss",
                        .r_name = "lr",
                        .lines = lines,
                        .n = n >= LEAST_SMOOTHED ? 3 : 2,
                        .mark = r->first > 0 ? (double)r->first + 0.5 : (double)NAN,
                        .mark_name = "resumed"};
    return ari_plot_write(&p, path);
}

ar_status ar_training_plot(const ar_training_report *r, const ar_training_options *o, const char *path)
{
    ARI_OWNED double *room = NULL;
    size_t count = 0;
    if (r->steps == 0)
        return ar_error_set(AR_ERR_ARG, "%s: no step was taken, so there is nothing to draw", path);
    AR_TRY(ari_mul_size(&count, (size_t)r->steps, 3));
    AR_TRY(ARI_ALLOC(&room, count, "a plot"));
    return write_plot(r, o, room, path);
}
