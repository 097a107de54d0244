/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "anyrank/training.h"
#include "ref/core/size.h"
#include "run/plot.h"

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
    double *room = NULL;
    size_t count = 0;
    if (r->steps == 0)
        return ar_error_set(AR_ERR_ARG, "%s: no step was taken, so there is nothing to draw", path);
    AR_TRY(ari_mul_size(&count, (size_t)r->steps, 3));
    AR_TRY(ari_alloc((void **)&room, count, sizeof *room, "a plot"));
    const ar_status st = write_plot(r, o, room, path);
    free(room);
    return st;
}
