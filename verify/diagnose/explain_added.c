/* SPDX-License-Identifier: Apache-2.0 */
/* The same thing added to every element, to every row, to every sample. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"

/* The mean difference at each place of a period of consecutive elements. */
typedef struct period {
    size_t length;
    double *mean;  /* [length] */
    double size;   /* root mean square of the differences */
    double spread; /* root mean square of what the means leave of them, relative to that */
} period;

static ar_status period_init(period *p, const ari_whole *w, size_t length)
{
    double left = 0.0, all = 0.0;
    *p = (period){.length = length};
    AR_TRY(ari_alloc_zero((void **)&p->mean, length, sizeof *p->mean, w->view.grid.d->name));
    for (size_t i = 0; i < w->count; i++)
        p->mean[i % length] += ((double)w->val[i] - (double)w->ref[i]) / (double)(w->count / length);
    for (size_t i = 0; i < w->count; i++) {
        const double apart = (double)w->val[i] - (double)w->ref[i], off = apart - p->mean[i % length];
        left += off * off;
        all += apart * apart;
    }
    p->size = sqrt(all / (double)w->count);
    p->spread = sqrt(left / all);
    return AR_OK;
}

/* Rounding of sums beside the reference leaves the spread at its own size. */
static bool repeats(const period *p, const ari_whole *w)
{
    return isfinite(p->spread) && p->size > 4.0 * w->absolute && p->spread <= 1e-3 + 0.3 * w->absolute / p->size;
}

/* --- whose vector it is ------------------------------------------------------------------------------------------- */

/* The factor that takes y to the mean differences, where those are any; 0 if there is none. */
static double times(const period *p, const float *y)
{
    double my = 0.0, yy = 0.0, mm = 0.0;
    size_t from = 0, to = p->length;
    while (from < to && fabs(p->mean[from]) < 1e-3 * p->size)
        from++;
    while (to > from && fabs(p->mean[to - 1]) < 1e-3 * p->size)
        to--;
    if (to - from < 4 || (to - from) * 16 < p->length)
        return 0.0;
    for (size_t i = from; i < to; i++) {
        my += p->mean[i] * (double)y[i];
        yy += (double)y[i] * (double)y[i];
        mm += p->mean[i] * p->mean[i];
    }
    return yy > 0.0 && my * my >= 0.9999 * yy * mm ? my / yy : 0.0;
}

/* The tensor of either dump whose values these are, times what; the same module's rather than another's. */
static ar_status find_source(const ar_dump_tensor **found, double *factor, const period *p, const ari_whole *w)
{
    const ar_dump *dumps[] = {w->known->reference, w->known->other};
    const char *own = w->view.grid.d->name;
    float *y = NULL;
    size_t alike = 0;
    *found = NULL;
    AR_TRY(ari_alloc((void **)&y, p->length, sizeof *y, own));
    for (size_t k = 0; k < 2; k++) {
        for (size_t i = 0; dumps[k] && i < ar_dump_count(dumps[k]); i++) {
            const ar_dump_tensor *t = ar_dump_at(dumps[k], i);
            size_t same = 1;
            if (t->count != p->length || t->count < 4 || ar_dump_read_f32(t, 0, t->count, y) != AR_OK)
                continue;
            const double by = times(p, y);
            while (t->name[same - 1] && t->name[same - 1] == own[same - 1])
                same++;
            if (by == 0.0 || same <= alike)
                continue;
            alike = same;
            *found = t;
            *factor = by;
        }
    }
    free(y);
    return AR_OK;
}

static void say_source(ari_text *t, const ar_dump_tensor *source, double factor)
{
    if (!source)
        return;
    const double whole = nearbyint(factor);
    ari_say(t, "; it is ");
    if (fabs(factor - whole) <= 1e-3 * fabs(factor))
        ari_say(t, "%.0f times ", whole);
    else
        ari_say(t, "%.5g times ", factor);
    ari_say(t, "%s", source->name);
    if (factor > 0.5 && fabs(factor - whole) <= 1e-3 * whole)
        ari_say(t, ", which counts %.0f times in place of once (added on every one of %.0f ranks before the sum)",
                whole + 1.0, whole + 1.0);
    else if (fabs(factor + 1.0) < 1e-3)
        ari_say(t, ", which was left out");
}

/* --- findings ----------------------------------------------------------------------------------------------------- */

static void say_constant(ari_clue *f, const ari_whole *w, const period *p)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 4);
    ari_say(
        &t,
        "a constant was added: the difference is %.6g in every one of the %zu elements (it varies by %.0e of its size)",
        p->mean[0], w->count, p->spread);
}

static ar_status say_vector(ari_clue *f, const ari_whole *w, const period *p)
{
    const bool bias = w->view.grid.d->pass == 'f';
    const ar_dump_tensor *source;
    double factor = 0.0;
    AR_TRY(find_source(&source, &factor, p, w));
    ari_text t = ari_find(f, source ? ARI_IDENTITY + 3 : ARI_TRACE + 8);
    ari_say(&t, "%s: the same vector is added to each of the %zu %ss (it varies by %.0e of its size, %.2g)",
            bias ? "a bias counted more than once, or left out" : "the difference is one vector", w->view.grid.rows,
            ari_axis_name(w, w->view.grid.nd - 2, false), p->spread, p->size);
    say_source(&t, source, factor);
    if (bias && !source)
        ari_say(&t, "; a row-parallel bias is added once, after the sum over tp, or it counts N times");
    return AR_OK;
}

static ar_status say_table(ari_clue *f, const ari_whole *w, const period *p)
{
    const ar_dump_tensor *source;
    double factor = 0.0;
    AR_TRY(find_source(&source, &factor, p, w));
    ari_text t = ari_find(f, ARI_TRACE + 6);
    ari_say(&t,
            "positions: the difference is the same for all %zu samples (it varies by %.0e of its size), so it "
            "depends on the position alone; learned positions looked up by a local index, counted twice, or left out",
            w->view.grid.shape[0], p->spread);
    say_source(&t, source, factor);
    return AR_OK;
}

/* Each row has a number of its own added to all its elements. */
static void seek_rows(ari_clue *f, const ari_whole *w)
{
    const size_t rows = w->view.grid.rows, cols = w->view.grid.cols;
    double left = 0.0, all = 0.0;
    for (size_t r = 0; r < rows; r++) {
        double mean = 0.0;
        for (size_t i = r * cols; i < (r + 1) * cols; i++)
            mean += ((double)w->val[i] - (double)w->ref[i]) / (double)cols;
        for (size_t i = r * cols; i < (r + 1) * cols; i++) {
            const double apart = (double)w->val[i] - (double)w->ref[i];
            left += (apart - mean) * (apart - mean);
            all += apart * apart;
        }
    }
    const double size = sqrt(all / (double)w->count), spread = sqrt(left / all);
    if (!(size > 4.0 * w->absolute) || !(spread <= 1e-3 + 0.3 * w->absolute / size))
        return;
    ari_text t = ari_find(f, ARI_TRACE);
    ari_say(&t,
            "each %s has one number of its own added to all its %s (it varies by %.0e of its size, %.2g): a mean, a "
            "maximum or a bias along the other dimension",
            ari_axis_name(w, w->view.grid.nd - 2, false), ari_axis_name(w, w->view.grid.nd - 1, true), spread, size);
}

ar_status ari_seek_added(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const size_t lengths[] = {1, g->cols, g->nd == 3 ? g->shape[1] * g->cols : 0};
    static ar_status (*const say[])(ari_clue *, const ari_whole *, const period *) = {NULL, say_vector, say_table};
    if (w->view.survey.total.nan > 0 || w->count < 8)
        return AR_OK;
    for (size_t i = 0; i < 3 && f->confidence == ARI_SILENT; i++) {
        period p;
        if (lengths[i] == 0 || lengths[i] * 2 > w->count || (i > 0 && lengths[i] == lengths[i - 1]))
            continue;
        AR_TRY(period_init(&p, w, lengths[i]));
        ar_status st = AR_OK;
        if (repeats(&p, w) && i == 0)
            say_constant(f, w, &p);
        else if (repeats(&p, w))
            st = say[i](f, w, &p);
        free(p.mean);
        AR_TRY(st);
    }
    if (f->confidence == ARI_SILENT && g->nd > 1 && g->cols >= 4)
        seek_rows(f, w);
    return AR_OK;
}
