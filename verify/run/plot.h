/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "anyrank/status.h"

/* Line plots as SVG files of their own: no script, no font, no network; light or dark as the reader's system is. */

typedef enum ari_plot_style {
    ARI_PLOT_FAINT, /* what scatters: thin and pale */
    ARI_PLOT_BOLD,  /* what is to be seen */
    ARI_PLOT_ASIDE  /* dashed, by the axis on the right */
} ari_plot_style;

typedef struct ari_plot_line {
    const char *name; /* in the legend */
    ari_plot_style style;
    const double *x, *y; /* [n], x not falling; where one is not finite the line is broken */
    size_t n;
} ari_plot_line;

typedef struct ari_plot {
    const char *title, *subtitle;         /* any bytes; what is no UTF-8 becomes '?' */
    const char *x_name, *y_name, *r_name; /* of the axes; r_name: the right one's */
    const ari_plot_line *lines;           /* [n] */
    size_t n;
    double mark; /* a thin upright line here, with its name; NaN: none */
    const char *mark_name;
} ari_plot;

/** Writes the file, whole or not at all. Beyond 20000 points a line has evenly chosen ones. Errors: AR_ERR_ARG (no line
 *  has a finite point), AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plot_write(const ari_plot *p, const char *path);
/** smooth[i]: mean of all y, each weighted by (1 - a)^|i - k|, a = 2/(window + 1): an exponential average to both
 *  sides, which does not lag behind the curve. */
void ari_plot_smooth(double *smooth, const double *y, size_t n, double window);
/** The distance of ticks: 1, 2 or 5 times a power of ten, so that a range > 0 has 4 to 10 of them. */
double ari_plot_tick(double range);

/* --- pieces of such files ----------------------------------------------------------------------------------------- */

/** The head of a file of width x height pixels with its title and subtitle (any bytes) at `left`, in the upper 50.
 *  Classes of what follows: title, quiet, grid, axis; `style` is CSS of more. The file ends with "</svg>\n". */
void ari_plot_begin(FILE *to, int width, int height, int left, const char *title, const char *subtitle,
                    const char *style);
/** Text that begins at (x, y), any bytes; attributes: of its element. */
void ari_plot_label(FILE *to, double x, double y, const char *attributes, const char *text);
/** Writes what `draw` draws of `what`, whole or not at all. Errors: those of draw, AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_plot_save(const char *path, ar_status (*draw)(FILE *to, const void *what), const void *what);
