/* SPDX-License-Identifier: Apache-2.0 */
/* Pairs of features turned by an angle of their position: rotary embeddings at other positions, or with other
 * frequencies. */
#include <complex.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/explain_impl.h"

/* Where positions and pairs lie. */
typedef struct turns {
    int dim;             /* of positions */
    size_t seq, head, n; /* positions, elements of a head, pairs of one */
    size_t near, apart;  /* pair p begins at p*near; its second element is `apart` further on */
    double _Complex *z;  /* [seq][n]: sum over heads and samples of value times conjugate reference */
    double length, both; /* sum of |value||reference| of pairs that differ; of |sum| over positions and pairs */
    double vv, rr;
} turns;

static void add_pair(turns *t, const ari_whole *w, size_t i, size_t k, size_t pos, size_t pair)
{
    const double a = (double)w->ref[i], b = (double)w->ref[k], x = (double)w->val[i], y = (double)w->val[k];
    if (!ari_off(w, i) && !ari_off(w, k))
        return;
    t->z[pos * t->n + pair] += CMPLX(x * a + y * b, y * a - x * b);
    t->length += hypot(a, b) * hypot(x, y);
    t->vv += x * x + y * y;
    t->rr += a * a + b * b;
}

/* Whether every pair that differs was turned, by an angle of its position and its place in the head alone. */
static bool are_turned(turns *t, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    t->length = t->both = t->vv = t->rr = 0.0;
    memset(t->z, 0, t->seq * t->n * sizeof *t->z);
    for (size_t start = 0; start < w->count; start += t->head) {
        const size_t pos = ari_grid_index(g, start, t->dim);
        for (size_t p = 0; p < t->n; p++)
            add_pair(t, w, start + p * t->near, start + p * t->near + t->apart, pos, p);
    }
    for (size_t i = 0; i < t->seq * t->n; i++)
        t->both += cabs(t->z[i]);
    return t->length > 0.0 && t->both > 0.999 * t->length && fabs(t->vv / t->rr - 1.0) < 2e-3;
}

/* What the angles leave of the differences, relative to them; noise is turned by no angle. */
static double left_by(const turns *t, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    double left = 0.0, all = 0.0;
    for (size_t at = 0; at < w->count / t->head * t->n; at++) {
        const size_t p = at % t->n, start = at / t->n * t->head, i = start + p * t->near, k = i + t->apart;
        const double _Complex z = t->z[ari_grid_index(g, start, t->dim) * t->n + p];
        const double _Complex r = CMPLX((double)w->ref[i], (double)w->ref[k]);
        const double _Complex v = CMPLX((double)w->val[i], (double)w->val[k]);
        const double off = cabs(v - r), rest = cabs(z) > 0.0 ? cabs(v - r * (z / cabs(z))) : off;
        left += rest * rest;
        all += off * off;
    }
    return left / all;
}

static double wrapped(double angle)
{
    return remainder(angle, 6.283185307179586);
}

/* The angle of the fastest pair at a position, which turns by 1 from one position to the next. */
static double angle_at(const turns *t, size_t pos)
{
    return carg(t->z[pos * t->n]);
}

static bool differs_at(const turns *t, size_t pos)
{
    for (size_t p = 0; p < t->n; p++) {
        if (fabs(carg(t->z[pos * t->n + p])) > 1e-3)
            return true;
    }
    return false;
}

/* Whether the fastest pair is turned by `by` times the position, everywhere. */
static bool turns_with_position(const turns *t, double by)
{
    for (size_t pos = 0; pos < t->seq; pos++) {
        if (fabs(wrapped(angle_at(t, pos) - by * (double)pos)) > 0.02)
            return false;
    }
    return true;
}

/* The number of positions that turns the fastest pair by this angle; 0: none of at most `most`. */
static long positions_of(double angle, long most)
{
    for (long k = 1; k <= most; k++) {
        if (fabs(wrapped(angle - (double)k)) < 0.01)
            return k;
        if (fabs(wrapped(angle + (double)k)) < 0.01)
            return -k;
    }
    return 0;
}

static void say_positions(ari_text *t, const turns *r)
{
    size_t first = 0, last = r->seq;
    while (first < r->seq && !differs_at(r, first))
        first++;
    while (last > first && !differs_at(r, last - 1))
        last--;
    const double angle = angle_at(r, first);
    bool same = true;
    for (size_t pos = first; pos < last; pos++)
        same = same && fabs(wrapped(angle_at(r, pos) - angle)) < 0.02;
    const long by = positions_of(angle, (long)r->seq * 2);
    if (fabs(angle) < 1e-3 && first > 0 && same)
        ari_say(t, "the fastest pair is right and slower ones are not: another rope_theta, scaling or head size");
    else if (by != 0 && same && last == r->seq)
        ari_say(t,
                "from position %zu on, every position counts as %ld %s: an offset of the positions (a rank's or a "
                "chunk's start, a cache's length)",
                first, labs(by), by > 0 ? "later" : "earlier");
    else if (by != 0 && first > 0)
        ari_say(t,
                "positions before %zu are right, and %zu counts as %ld %s: positions counted from each shard's or "
                "sample's own start",
                first, first, labs(by), by > 0 ? "later" : "earlier");
    else
        ari_say(t, "other positions, or other frequencies (position %zu is the first, its fastest pair turned by %.4g)",
                first, angle);
}

static void say_turns(ari_clue *f, const ari_whole *w, const turns *r)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 2);
    snprintf(f->value, sizeof f->value, "pairs of features turned");
    ari_say(&t,
            "RoPE: each pair of features (%s) keeps its length and is turned by an angle of its position, the same for "
            "all heads and samples that differ: ",
            r->near == 1 ? "of two halves of a head" : "of neighbours");
    if (turns_with_position(r, -1.0))
        ari_say(&t, "the rotation is missing");
    else if (turns_with_position(r, -2.0))
        ari_say(&t, "it goes the wrong way round (the sign of the sine)");
    else if (turns_with_position(r, 1.0))
        ari_say(&t, "it was applied twice");
    else
        say_positions(&t, r);
    if (w->view.grid.d->pass == 'b')
        ari_say(&t, "; a gradient is turned back by the same angles");
}

ar_status ari_seek_rope(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    const char pass = g->d->pass;
    turns t = {.dim = g->nd - 2, .head = g->nd == 4 ? g->cols : g->nd == 3 ? ari_head_size(w, 2) : 0};
    if ((pass != 'f' && pass != 'b') || t.head < 4 || t.head % 2 || g->cols % t.head || w->inner ||
        w->view.survey.total.nan > 0 || w->view.survey.different < 16)
        return AR_OK;
    if (g->nd == 4 && strcmp(ari_axis_name(w, 1, false), "token") == 0)
        t.dim = 1;
    t.seq = g->shape[t.dim];
    t.n = t.head / 2;
    AR_TRY(ari_alloc((void **)&t.z, t.seq * t.n, sizeof *t.z, g->d->name));
    for (int halves = 1; halves >= 0 && f->confidence == ARI_SILENT; halves--) {
        t.near = halves ? 1 : 2;
        t.apart = halves ? t.n : 1;
        if (t.seq > 1 && are_turned(&t, w) && left_by(&t, w) < 0.05)
            say_turns(f, w, &t);
    }
    free(t.z);
    return AR_OK;
}
