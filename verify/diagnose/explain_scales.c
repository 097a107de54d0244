/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number that is another one for each slice, shard or sample. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"

/* --- a factor for each slice -------------------------------------------------------------------------------------- */

/* Along a dimension: each slice's factor; false unless each has one. */
static bool slice_factors(const ari_whole *w, int dim, ari_factor_sums *s)
{
    const ari_grid *g = &w->view.grid;
    size_t inner = 1, wrong = 0, apart = 0;
    double first = 0.0;
    bool far = false;
    for (int i = dim + 1; i < g->nd; i++)
        inner *= g->shape[i];
    memset(s, 0, g->shape[dim] * sizeof *s);
    for (size_t i = 0; i < w->count; i++) {
        ari_factor_sums *at = &s[i / inner % g->shape[dim]];
        const double v = (double)w->val[i], r = (double)w->ref[i];
        at->vr += v * r;
        at->rr += r * r;
        at->vv += v * v;
        at->n += ari_off(w, i);
    }
    for (size_t k = 0; k < g->shape[dim]; k++) {
        if (s[k].n == 0)
            continue;
        const double factor = ari_factor_of(&s[k]);
        const double size = (double)(w->count / g->shape[dim]), left = s[k].vv - s[k].vr * factor;
        if (!(s[k].rr > 0.0) || !(fabs(factor) > 1e-9) ||
            !(left <= fmax(1e-9, 0.25 * w->relative * w->relative) * s[k].vv + size * w->absolute * w->absolute) ||
            !(left <= 1e-3 * s[k].vv))
            return false;
        first = wrong++ ? first : factor;
        apart +=
            fabs(factor - first) > fmax(2e-5, w->relative) * fabs(first) + 4.0 * w->absolute * sqrt(size / s[k].rr);
        far = far || fabs(factor - 1.0) > 2e-3;
    }
    return wrong > 1 && apart > 0 && far && w->count / g->shape[dim] >= 8;
}

/* If part k of the samples was divided by its own count T_k in place of T, it is the reference times T/T_k, or, where
 * the P parts were averaged after that, T/(P T_k): then the sum of the inverse factors is 1, or P. */
static bool say_means(ari_clue *f, const ari_factor_sums *s, size_t n, double low, double high)
{
    double inverse = 0.0;
    size_t parts = 0;
    for (size_t k = 0; k < n; k++) {
        if (k > 0 && ari_is_near(ari_factor_of(&s[k]), ari_factor_of(&s[k - 1])))
            continue;
        inverse += 1.0 / ari_factor_of(&s[k]);
        parts++;
    }
    const bool averaged = fabs(inverse - (double)parts) <= 1e-4 * (double)parts;
    if (parts < 2 || (!averaged && fabs(inverse - 1.0) > 1e-4))
        return false;
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    ari_say(&t,
            "%s: runs of samples are the reference times a factor of their own, from %.6g to %.6g, and the sum of "
            "1/factor is %.6g: each of %zu ranks or micro-batches divided by its own number of target tokens, and the "
            "results were %s; all must divide by the count of the global batch",
            averaged ? "mean of means" : "sum of local means", low, high, inverse, parts,
            averaged ? "averaged" : "added");
    return true;
}

static void say_scales(ari_clue *f, const ari_whole *w, int dim, const ari_factor_sums *s)
{
    const size_t n = w->view.grid.shape[dim];
    double low = INFINITY, high = -INFINITY;
    for (size_t k = 0; k < n; k++) {
        low = s[k].rr > 0.0 ? fmin(low, ari_factor_of(&s[k])) : low;
        high = s[k].rr > 0.0 ? fmax(high, ari_factor_of(&s[k])) : high;
    }
    if (strcmp(ari_axis_name(w, dim, false), "sample") == 0 && say_means(f, s, n, low, high))
        return;
    ari_text t = ari_find(f, ARI_SHAPE + 7);
    ari_say(&t, "each %s is scaled by a factor of its own, from %.6g to %.6g, and not otherwise changed",
            ari_axis_name(w, dim, false), low, high);
    if (dim == w->view.grid.nd - 1)
        ari_say(&t, ": a gain (norm weight) that was applied twice, or left out, or a scale of another tensor");
    else
        ari_say(&t, ": a statistic of each %s is wrong (a variance, a mean square, a denominator, a weight of samples)",
                ari_axis_name(w, dim, false));
}

/* --- a factor for each shard -------------------------------------------------------------------------------------- */

typedef struct shards {
    int dim;
    size_t n, inner; /* shards; elements of one that lie side by side */
    ari_factor_sums s[ARI_MOST_RANKS];
} shards;

/* Sums of every index of a dimension: those of shards are sums of them. */
static ar_status sum_slices(ari_factor_sums **gives, const ari_whole *w, int dim)
{
    const ari_grid *g = &w->view.grid;
    size_t inner = 1;
    ari_factor_sums *slice = NULL;
    AR_TRY(ari_alloc_zero((void **)&slice, g->shape[dim], sizeof *slice, g->d->name));
    for (int i = dim + 1; i < g->nd; i++)
        inner *= g->shape[i];
    for (size_t i = 0, k = 0; i < w->count; k = k + 1 < g->shape[dim] ? k + 1 : 0) {
        for (const size_t end = i + inner; i < end; i++) {
            slice[k].vr += (double)w->val[i] * (double)w->ref[i];
            slice[k].rr += (double)w->ref[i] * (double)w->ref[i];
            slice[k].vv += (double)w->val[i] * (double)w->val[i];
        }
    }
    *gives = slice;
    return AR_OK;
}

/* Whether an element is the reference times a factor; what rounding left in the reference is scaled with it. */
static bool is_scaled(const ari_whole *w, size_t i, double factor)
{
    const double expected = factor * (double)w->ref[i], off = fabs((double)w->val[i] - expected);
    return off <= fmax(1.0, fabs(factor)) * w->absolute + (w->relative + 0x1p-21) * fabs(expected);
}

static size_t outer_of(const ari_grid *g, int dim)
{
    size_t outer = 1;
    for (int i = 0; i < dim; i++)
        outer *= g->shape[i];
    return outer;
}

/* The standard error of a factor; of the sums' elements, there are `outer` times as many as counted. */
static double noise_in_factor(const ari_factor_sums *s, size_t outer)
{
    const double left = s->vv - s->vr * ari_factor_of(s);
    return sqrt(fmax(left, 0.0) / s->rr / (double)(s->n * outer));
}

/* Whether every shard of n along a dimension has a factor, and not all the same. */
static bool shards_scale(shards *p, const ari_whole *w, int dim, size_t n, const ari_factor_sums *slice)
{
    const ari_grid *g = &w->view.grid;
    const size_t outer = outer_of(g, dim);
    bool apart = false;
    *p = (shards){.dim = dim, .n = n, .inner = g->shape[dim] / n};
    for (int i = dim + 1; i < g->nd; i++)
        p->inner *= g->shape[i];
    for (size_t i = 0; i < g->shape[dim]; i++) {
        ari_factor_sums *s = &p->s[i / (g->shape[dim] / n)];
        s->vr += slice[i].vr;
        s->rr += slice[i].rr;
        s->vv += slice[i].vv;
        s->n += p->inner / (g->shape[dim] / n);
    }
    for (size_t k = 0; k < n; k++) {
        const double factor = ari_factor_of(&p->s[k]);
        if (!isfinite(factor) || fabs(factor) < 1e-9 || fabs(factor) * w->max_ref <= 4.0 * w->absolute)
            return false;
        const double unsure = noise_in_factor(&p->s[k], outer) + noise_in_factor(&p->s[0], outer);
        apart = apart || fabs(factor - ari_factor_of(&p->s[0])) > fmax(1e-3 * fabs(factor), 6.0 * unsure);
    }
    double worst = 0.0;
    for (size_t i = 0; apart && i < w->count; i++) {
        const double expected = ari_factor_of(&p->s[i / p->inner % n]) * (double)w->ref[i];
        if (!is_scaled(w, i, ari_factor_of(&p->s[i / p->inner % n])))
            return false;
        worst = fmax(worst, fabs((double)w->val[i] - expected));
    }
    return apart && ari_explains(w, worst);
}

static void say_shards(ari_clue *f, const ari_whole *w, const shards *p)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    snprintf(f->value, sizeof f->value, "each shard a constant times the reference");
    ari_say(&t, "each of %zu shards of the %s has a factor of its own:", p->n, ari_axis_name(w, p->dim, true));
    for (size_t k = 0; k < p->n && k < 6; k++)
        ari_say(&t, " %.5g", ari_factor_of(&p->s[k]));
    ari_say(&t, "%s; each rank divided, clipped or scaled by its own count, norm or size in place of the group's",
            p->n > 6 ? " ..." : "");
}

static ar_status seek_shards(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    shards p;
    for (int dim = 0; dim < g->nd && f->confidence == ARI_SILENT; dim++) {
        ari_factor_sums *slice = NULL;
        AR_TRY(sum_slices(&slice, w, dim));
        for (size_t n = 2; n <= ARI_MOST_RANKS && n < g->shape[dim] && f->confidence == ARI_SILENT; n++) {
            if (g->shape[dim] % n == 0 && w->count / n >= 8 && shards_scale(&p, w, dim, n, slice))
                say_shards(f, w, &p);
        }
        free(slice);
    }
    return AR_OK;
}

/* --- a factor for each shard of each row -------------------------------------------------------------------------- */

/* Whether a run of features is the reference times a number. */
static bool run_scales(const ari_whole *w, size_t from, size_t n, double *factor)
{
    ari_factor_sums s = {0};
    for (size_t i = from; i < from + n; i++) {
        s.vr += (double)w->val[i] * (double)w->ref[i];
        s.rr += (double)w->ref[i] * (double)w->ref[i];
    }
    *factor = s.rr > 0.0 ? ari_factor_of(&s) : 1.0;
    for (size_t i = from; i < from + n; i++) {
        if (!is_scaled(w, i, *factor))
            return false;
    }
    return true;
}

/* Whether each row's n runs of features have factors, which differ from run to run. */
static bool row_shards_scale(const ari_whole *w, size_t n, double *low, double *high)
{
    const size_t cols = w->view.grid.cols, size = cols / n;
    size_t apart = 0;
    *low = INFINITY;
    *high = -INFINITY;
    for (size_t row = 0; row < w->view.grid.rows; row++) {
        double first = 1.0, factor = 1.0;
        for (size_t k = 0; k < n; k++) {
            if (!run_scales(w, row * cols + k * size, size, &factor))
                return false;
            first = k == 0 ? factor : first;
            apart += fabs(factor - first) > 1e-3 + w->relative;
            *low = fmin(*low, factor);
            *high = fmax(*high, factor);
        }
    }
    return apart * 4 > w->view.grid.rows * n && *low > 0.0;
}

static void seek_row_shards(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    double low, high;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n * 4 <= g->cols && g->nd > 1; n++) {
        if (g->cols % n != 0 || !row_shards_scale(w, n, &low, &high))
            continue;
        ari_text t = ari_find(f, ARI_IDENTITY + 1);
        snprintf(f->value, sizeof f->value, "each shard of each %s a constant times the reference",
                 ari_axis_name(w, g->nd - 2, false));
        ari_say(&t,
                "in each %s, each of %zu shards of the %s has a factor of its own (%.4g to %.4g): a statistic of the "
                "row (mean square, variance, maximum, denominator) taken over one rank's part in place of all of it",
                ari_axis_name(w, g->nd - 2, false), n, ari_axis_name(w, g->nd - 1, true), low, high);
        return;
    }
}

/* Rows beside rounding: each is the reference times a number; what differs beyond rounding has one apart from 1. */
static void seek_rows(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    double low = INFINITY, high = -INFINITY;
    size_t scaled = 0;
    if (g->nd < 3 || g->cols < 8 || !w->noisy)
        return;
    for (size_t row = 0; row < g->rows; row++) {
        double factor = 1.0;
        size_t off = 0;
        if (!run_scales(w, row * g->cols, g->cols, &factor))
            return;
        for (size_t i = row * g->cols; i < (row + 1) * g->cols; i++)
            off += ari_off(w, i);
        if (off == 0)
            continue;
        scaled++;
        low = fmin(low, factor);
        high = fmax(high, factor);
    }
    if (scaled < 8 || !(low > 0.0) || !(high > low * 1.02))
        return;
    ari_text t = ari_find(f, ARI_SHAPE + 5);
    snprintf(f->value, sizeof f->value, "each %s a constant times the reference", ari_axis_name(w, g->nd - 2, false));
    ari_say(
        &t,
        "each of %zu %s is scaled by a factor of its own, from %.4g to %.4g, and not otherwise changed: a statistic "
        "of the row is wrong (mean square, variance, the softmax's denominator), as when it covers one shard alone",
        scaled, ari_axis_name(w, g->nd - 2, true), low, high);
}

ar_status ari_seek_scales(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    ari_factor_sums *s = NULL;
    if (w->view.survey.total.nan > 0)
        return AR_OK;
    AR_TRY(seek_shards(f, w));
    for (int dim = 0; dim < g->nd && f->confidence == ARI_SILENT && g->nd > 1; dim++) {
        if (g->shape[dim] < 2)
            continue;
        AR_TRY(ari_alloc((void **)&s, g->shape[dim], sizeof *s, g->d->name));
        if (slice_factors(w, dim, s))
            say_scales(f, w, dim, s);
        free(s);
    }
    if (f->confidence == ARI_SILENT)
        seek_row_shards(f, w);
    if (f->confidence == ARI_SILENT)
        seek_rows(f, w);
    return AR_OK;
}
