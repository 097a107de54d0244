/* SPDX-License-Identifier: Apache-2.0 */
/* Differences that repeat: one vector added to every token, one table added to every sample, one factor per token. */
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/pattern_impl.h"
#include "verify/diagnose/roles.h"

/* --- the same vector for every token, the same table for every sample --------------------------------------------- */

/* Difference modulo a period of consecutive elements. */
typedef struct period {
    size_t length;
    double *sum; /* [length] */
    size_t *n;   /* [length] */
} period;

/* Dropout zeroes an element on both sides, and says nothing of the difference there. */
static bool is_dropped(const period *p, const ari_case *c, const ari_run *run, size_t i)
{
    return p->length > c->grid.cols && c->grid.d->pass == 'f' && run->value[i] == 0.0f && run->ref[i] == 0.0f;
}

static void add_differences(period *p, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        size_t at = run.index % p->length; /* a row never crosses the end of a period */
        for (size_t i = 0; i < run.count; i++, at++) {
            p->sum[at] += (double)run.value[i] - (double)run.ref[i];
            p->n[at] += !is_dropped(p, c, &run, i);
        }
    }
}

/* What the mean over the periods leaves of the differences, relative to their size. */
static double spread(const period *p, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    double error = 0.0, size = 0.0;
    while (ari_runs_next(&it, &run)) {
        size_t at = run.index % p->length;
        for (size_t i = 0; i < run.count; i++, at++) {
            if (is_dropped(p, c, &run, i))
                continue;
            const double delta = (double)run.value[i] - (double)run.ref[i], off = delta - p->sum[at] / (double)p->n[at];
            error += off * off;
            size += delta * delta;
        }
    }
    return sqrt(error / size);
}

/* Whether there is much to compare: a place that one period alone has agrees with itself. */
static bool repeats(const period *p)
{
    size_t places = 0, all = 0;
    for (size_t i = 0; i < p->length; i++) {
        places += p->n[i] > 0;
        all += p->n[i];
    }
    return all >= places + places / 2;
}

static ar_status spread_over(double *out, const ari_case *c, size_t length)
{
    ar_status st = AR_OK;
    period p = {length, NULL, NULL};
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&p.sum, length, sizeof *p.sum, c->grid.d->name));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&p.n, length, sizeof *p.n, c->grid.d->name));
    add_differences(&p, c);
    *out = repeats(&p) ? spread(&p, c) : (double)INFINITY;
done:
    free(p.sum);
    free(p.n);
    return st;
}

static void say_vector(ari_clue *f, const ari_case *c, double spread_of_it)
{
    const ari_difference *d = c->grid.d;
    const ari_tally *all = &c->survey.total;
    ari_text t = ari_find(f, ARI_TRACE + 7);
    ari_say(
        &t,
        "%s: the same vector is added to each of the %zu tokens (it varies by %.0e of its size; root mean square %.2g "
        "against %.2g of the values)",
        d->pass == 'f' ? "a bias counted more than once, or left out" : "a constant vector added to every gradient row",
        c->grid.rows, spread_of_it, sqrt(all->dd / (double)all->different), sqrt(all->rr / (double)all->different));
    if (ari_is_row_parallel(d) && d->pass == 'f' && ari_tp_of(d) > 1)
        ari_say(&t, "; a row-parallel bias is added once, after the sum over tp, or it counts %d times", ari_tp_of(d));
}

static void say_table(ari_clue *f, const ari_case *c, double spread_of_it)
{
    const ari_grid *g = &c->grid;
    ari_text t = ari_find(f, ARI_SHAPE + 12);
    ari_say(&t,
            "positions: the difference is the same for all %zu samples (it varies by %.0e of its size), so it depends "
            "on the token's position alone; learned positions looked up by a local index, counted twice, or left out",
            g->shape[0], spread_of_it);
}

ar_status ari_detect_vector(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    const ari_survey *s = &c->survey;
    const bool activation = g->d->pass == 'f' || g->d->pass == 'b';
    if (!activation || g->d->ndim < 2 || g->rows < 2 || s->total.nan > 0 ||
        !(s->total.max_difference > 0x1p-18 * s->max_reference))
        return AR_OK;
    double varies = INFINITY;
    AR_TRY(spread_over(&varies, c, g->cols));
    if (varies <= 1e-3) {
        say_vector(f, c, varies);
        return AR_OK;
    }
    if (g->d->ndim != 3 || g->shape[0] < 2 || g->shape[1] < 2)
        return AR_OK;
    AR_TRY(spread_over(&varies, c, g->shape[1] * g->cols));
    if (varies <= 1e-3)
        say_table(f, c, varies);
    return AR_OK;
}

/* --- a factor for each row ---------------------------------------------------------------------------------------- */

typedef struct row_sums {
    double vr, rr, vv;
    size_t n;
} row_sums;

typedef struct row_factors {
    double low, high;
    size_t scaled; /* rows with a factor other than 1 */
    bool possible;
} row_factors;

static void end_row(row_factors *f, row_sums *s)
{
    /* |v - (vr/rr) r|^2 = vv - vr^2/rr; binary64 leaves 1e-16 of vv, so 1e-10 of it is well above cancellation. */
    const double factor = s->vr / s->rr, left = s->vv - s->vr * factor;
    if (s->n > 0 && s->rr > 0.0) {
        f->possible = f->possible && left <= 1e-10 * s->vv && s->n >= 8;
        f->low = factor < f->low ? factor : f->low;
        f->high = factor > f->high ? factor : f->high;
        f->scaled += fabs(factor - 1.0) > 1e-4;
    } else if (s->n > 0) {
        f->possible = f->possible && s->vv == 0.0;
    }
    *s = (row_sums){0.0, 0.0, 0.0, 0};
}

ar_status ari_detect_row_factor(ari_clue *f, const ari_case *c)
{
    const ari_grid *g = &c->grid;
    row_factors all = {INFINITY, -INFINITY, 0, true};
    row_sums sums = {0.0, 0.0, 0.0, 0};
    size_t current = 0;
    if (g->d->pass != 'f' && g->d->pass != 'b')
        return AR_OK;
    ari_runs it = ari_runs_of(g);
    ari_run run;
    while (all.possible && ari_runs_next(&it, &run)) {
        if (run.row != current)
            end_row(&all, &sums);
        current = run.row;
        for (size_t i = 0; i < run.count; i++) {
            const double v = (double)run.value[i], r = (double)run.ref[i];
            sums.vr += v * r;
            sums.rr += r * r;
            sums.vv += v * v;
        }
        sums.n += run.count;
    }
    end_row(&all, &sums);
    if (!all.possible || all.scaled < 2 || !(all.low > 0.0))
        return AR_OK;
    ari_text t = ari_find(f, ARI_SHAPE + 5);
    ari_say(&t,
            "each of %zu %s is scaled by a factor of its own, from %.6g to %.6g, and not otherwise changed: a per-row "
            "statistic is wrong (%s), as when it includes padded lanes or covers the shard alone",
            all.scaled, ari_dim_name(g, g->nd - 2 < 0 ? 0 : g->nd - 2, true), all.low, all.high,
            ari_name_is(g->d->name) & ARI_IS_PROBS ? "the softmax's denominator"
                                                   : "a variance, a mean square or a denominator");
    return AR_OK;
}
