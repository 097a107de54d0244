/* SPDX-License-Identifier: Apache-2.0 */
/* Slices of a dimension that stand in another slice's place: which, and by what rule. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_slices.h"

/* --- one slice against another ------------------------------------------------------------------------------------ */

/* In (-1, 1): a weight of an element's place in a slice, so that slices of the same values in another order differ. */
static double weight_of(size_t i)
{
    uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return (double)(int64_t)x * 0x1p-63;
}

static size_t place(const ari_axis *a, size_t slice, size_t i)
{
    return (i / a->inner * a->n + slice) * a->inner + i % a->inner;
}

/* Whether slice i of the other is slice j of the reference; *worst: the largest that is off. */
static bool is_slice(const ari_whole *w, const ari_axis *a, size_t i, size_t j, double *worst)
{
    for (size_t k = 0; k < a->size; k++) {
        const float v = w->val[place(a, i, k)], r = w->ref[place(a, j, k)];
        if (!ari_holds(w, v, (double)r))
            return false;
        if (!ari_same_bits(v, r))
            *worst = fmax(*worst, fabs((double)v - (double)r));
    }
    return true;
}

typedef struct projected {
    double at;
    size_t slice;
} projected;

static int by_projection(const void *a, const void *b)
{
    const projected *x = a, *y = b;
    return x->at != y->at ? (x->at < y->at ? -1 : 1) : (x->slice > y->slice) - (x->slice < y->slice);
}

static void project(projected *out, const float *data, const ari_axis *a)
{
    for (size_t i = 0; i < a->n; i++)
        out[i] = (projected){0.0, i};
    for (size_t k = 0; k < a->size; k++) {
        const double weight = weight_of(k);
        for (size_t i = 0; i < a->n; i++)
            out[i].at += weight * (double)data[place(a, i, k)];
    }
}

/* What a slice is: nothing in it differs; it has one value alone, or values too small to tell, so that it says nothing
 * of where it is from; or neither. */
static void survey_slice(const ari_whole *w, ari_axis *a, size_t i)
{
    const float first = w->val[place(a, i, 0)];
    double largest = 0.0;
    bool wrong = false, varies = a->size == 1;
    for (size_t k = 0; k < a->size; k++) {
        const size_t at = place(a, i, k);
        wrong = wrong || ari_off(w, at);
        varies = varies || !ari_same_bits(first, w->val[at]);
        largest = fmax(largest, fabs((double)w->val[at]));
    }
    a->wrong[i] = wrong;
    a->plain[i] = !varies || largest <= 8.0 * w->absolute;
}

/* --- where each slice is from ------------------------------------------------------------------------------------- */

enum { MOST_TRIED = 24 };

static size_t source_of(const ari_whole *w, ari_axis *a, const projected *sorted, double at, size_t i)
{
    const size_t expected = i > 0 && a->from[i - 1] < a->n ? (a->from[i - 1] + 1) % a->n : i;
    if (is_slice(w, a, i, i, &a->worst))
        return i;
    if (is_slice(w, a, i, expected, &a->worst))
        return expected;
    const double reach =
        (w->absolute + 0.1 * w->relative * w->max_ref + 1e-6 * fabs(at)) * (4.0 + sqrt((double)a->size));
    size_t low = 0, high = a->n;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (sorted[middle].at < at - reach)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t tried = 0; low < a->n && sorted[low].at <= at + reach && tried < MOST_TRIED; low++, tried++) {
        if (is_slice(w, a, i, sorted[low].slice, &a->worst))
            return sorted[low].slice;
    }
    return a->n;
}

/* False as soon as too many wrong slices are no slice of the reference. */
static bool trace(const ari_whole *w, ari_axis *a, projected *sorted, projected *wanted)
{
    project(sorted, w->ref, a);
    project(wanted, w->val, a);
    qsort(sorted, a->n, sizeof *sorted, by_projection);
    for (size_t i = 0; i < a->n; i++)
        survey_slice(w, a, i);
    for (size_t i = 0; i < a->n; i++) {
        a->from[i] = a->wrong[i] ? source_of(w, a, sorted, wanted[i].at, i) : i;
        a->wrongs += a->wrong[i];
        a->lost += a->from[i] == a->n;
        a->moved += a->from[i] != i && a->from[i] != a->n && !a->plain[i];
        if (a->lost > a->n / 6 + 2)
            return false;
    }
    return a->moved > 0;
}

static void axis_fini(ari_axis *a)
{
    free(a->from);
    free(a->wrong);
    free(a->plain);
}

static ar_status axis_init(ari_axis *a, const ari_whole *w, int dim, size_t outer, size_t n, size_t inner)
{
    *a = (ari_axis){.dim = dim, .n = n, .inner = inner, .size = outer * inner};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&a->from, n, sizeof *a->from, w->view.grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&a->wrong, n, sizeof *a->wrong, w->view.grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&a->plain, n, sizeof *a->plain, w->view.grid.d->name));
done:
    if (st != AR_OK)
        axis_fini(a);
    return st;
}

/* Looks along one axis and lets the rule be named. */
static ar_status look(ari_clue *f, const ari_whole *w, int dim, size_t outer, size_t n, size_t inner)
{
    ari_axis a;
    projected *sorted = NULL, *wanted = NULL;
    if (n < 2)
        return AR_OK;
    AR_TRY(axis_init(&a, w, dim, outer, n, inner));
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&sorted, n, sizeof *sorted, w->view.grid.d->name));
    AR_TRY_TO(done, st, ari_alloc((void **)&wanted, n, sizeof *wanted, w->view.grid.d->name));
    ari_clue own = {0};
    if (trace(w, &a, sorted, wanted))
        ari_name_order(&own, w, &a);
    if (own.confidence > f->confidence)
        *f = own;
done:
    free(sorted);
    free(wanted);
    axis_fini(&a);
    return st;
}

/* Of [b, s, h]: the parts of n ranks, [b, s/n, h] each, one after the other. Tokens of equal values have no place of
 * their own, so each is held against the place that this would give it. */
static bool is_rank_major(const ari_whole *w, size_t n, double *worst)
{
    const ari_grid *g = &w->view.grid;
    const size_t b = g->shape[0], s = g->shape[1], part = s / n;
    const ari_axis a = {.n = g->rows, .inner = g->cols, .size = g->cols};
    *worst = 0.0;
    for (size_t i = 0; i < g->rows; i++) {
        const size_t from = i / part % b * s + i / (b * part) * part + i % part;
        if (!is_slice(w, &a, i, from, worst))
            return false;
    }
    return ari_explains(w, *worst);
}

static void seek_rank_major(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const bool activation = g->d->pass == 'f' || g->d->pass == 'b';
    double worst = 0.0;
    if (g->nd != 3 || !activation || g->shape[0] < 2 || w->view.survey.different < 8)
        return;
    for (size_t n = 2; n <= ARI_MOST_RANKS && n <= g->shape[1]; n++) {
        if (g->shape[1] % n != 0 || !is_rank_major(w, n, &worst))
            continue;
        ari_text t = ari_find(f, ARI_IDENTITY + 8);
        snprintf(f->value, sizeof f->value, "the reference's values in another place");
        ari_say(&t,
                "tokens gathered over %zu ranks left one part after the other ([ranks, b, s/N, h] in place of [b, s, "
                "h]): for more than one sample an all-gather along tokens must put each sample's parts together; ",
                n);
        ari_say_exactness(&t, w, worst);
        return;
    }
}

ar_status ari_seek_order(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    if (w->count < 2)
        return AR_OK;
    seek_rank_major(f, w);
    for (int dim = 0; dim < g->nd; dim++) {
        size_t outer = 1, inner = 1;
        for (int i = 0; i < g->nd; i++) {
            outer *= i < dim ? g->shape[i] : 1;
            inner *= i > dim ? g->shape[i] : 1;
        }
        AR_TRY(look(f, w, dim, outer, g->shape[dim], inner));
    }
    /* Tokens of all samples in one row: what mixes samples and tokens. */
    if (g->nd > 2 && f->confidence < ARI_IDENTITY)
        AR_TRY(look(f, w, ARI_AXIS_ROWS, 1, g->rows, g->cols));
    return AR_OK;
}
