/* SPDX-License-Identifier: Apache-2.0 */
/* The reference times a number: everywhere, in some slices, or a number for each slice. */
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/explain_impl.h"

/* Sums over elements that differ. */
typedef struct sums {
    double vr, rr, vv;
    size_t n;
} sums;

static double factor_of(const sums *s)
{
    return s->vr / s->rr;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 2e-5 * fabs(b);
}

/* --- numbers that mean something ---------------------------------------------------------------------------------- */

enum { MOST_RANKS = 64, NAMED = 80 };

/* What a factor is: an integer n and how it is used; 0: no such number. */
typedef struct meaning {
    int n;
    bool inverse, root;
    int power; /* of 2, from 8 on: a loss scale */
} meaning;

static meaning meaning_of(double factor)
{
    const double size = fabs(factor) < 1.0 ? 1.0 / fabs(factor) : fabs(factor);
    meaning m = {.inverse = fabs(factor) < 1.0};
    const double power = nearbyint(log2(size));
    if (power >= 8.0 && is_near(size, exp2(power)))
        m.power = (int)power;
    for (int n = 2; n <= MOST_RANKS && !m.power; n++) {
        if (is_near(size, n))
            m.n = n;
        if (n < 33 && is_near(size * size, n) && m.n == 0) {
            m.n = n;
            m.root = true;
        }
    }
    return m;
}

static void name_factor(char *out, size_t cap, double factor, const meaning *m)
{
    const char *sign = factor < 0.0 ? "-" : "";
    if (m->power)
        snprintf(out, cap, "%s2^%s%d", sign, m->inverse ? "-" : "", m->power);
    else if (m->n && m->root)
        snprintf(out, cap, "%.6g (%s%ssqrt(%d))", factor, sign, m->inverse ? "1/" : "", m->n);
    else if (m->n)
        snprintf(out, cap, "%s%s%d", sign, m->inverse ? "1/" : "", m->n);
    else if (is_near(fabs(factor), 1.0))
        snprintf(out, cap, "%s1", sign);
    else
        snprintf(out, cap, "%.6g", factor);
}

/* --- the same in other tensors ------------------------------------------------------------------------------------ */

enum { TENSORS_ASKED = 12, ELEMENTS_ASKED = 512 };

/* Whether this factor takes the reference's first elements of another tensor to the other's: 1, 0, or -1 where they
 * say nothing. */
static int factor_in(const ar_dump_tensor *r, const ar_dump_tensor *v, double factor)
{
    float a[ELEMENTS_ASKED], b[ELEMENTS_ASKED];
    const size_t n = r->count < ELEMENTS_ASKED ? r->count : ELEMENTS_ASKED, from = (r->count - n) / 2;
    sums s = {0};
    if (ar_dump_read_f32(r, from, n, a) != AR_OK || ar_dump_read_f32(v, from, n, b) != AR_OK)
        return -1;
    for (size_t i = 0; i < n; i++) {
        s.vr += (double)a[i] * (double)b[i];
        s.rr += (double)a[i] * (double)a[i];
        s.vv += (double)b[i] * (double)b[i];
    }
    if (!(s.rr > 0.0) || !(s.vv > 0.0))
        return -1;
    return fabs(factor_of(&s) - factor) <= 1e-4 * fabs(factor) && s.vv - s.vr * factor_of(&s) <= 1e-6 * s.vv;
}

/* Of other tensors of the same pass: how many have the factor too, of how many asked. */
static void ask_others(const ari_whole *w, double factor, size_t *same, size_t *asked)
{
    const ar_dump *r = w->known->reference, *v = w->known->other;
    const char pass = w->view.grid.d->pass;
    *same = *asked = 0;
    const size_t all = r && v ? ar_dump_count(r) : 0, step = all / TENSORS_ASKED + 1;
    for (size_t i = 0; i < all && *asked < TENSORS_ASKED; i += step) {
        const ar_dump_tensor *a = ar_dump_at(r, i), *b = a ? ar_dump_find(v, a->name) : NULL;
        if (!b || a == w->reference || a->count != b->count || a->count < 8 || ari_pass_of(w, a->name) != pass)
            continue;
        const int answer = factor_in(a, b, factor);
        *same += answer == 1;
        *asked += answer >= 0;
    }
}

/* --- words -------------------------------------------------------------------------------------------------------- */

/* "tp", "dp", or both if either could be it. */
static const char *over(const ari_whole *w, int n)
{
    const bool tp = w->known->tp == n, dp = w->known->dp == n;
    return tp && !dp ? "tp" : dp && !tp ? "dp" : "tp or dp";
}

static void say_rank_factor(ari_text *t, const ari_whole *w, const meaning *m, bool everywhere)
{
    const char pass = w->view.grid.d->pass;
    const char *group = everywhere && w->known->tp != m->n ? "dp" : over(w, m->n);
    if (m->inverse && everywhere && pass == 'g')
        ari_say(t,
                ": averaged over %d ranks or micro-batches where the sum was wanted, or divided by their number "
                "twice (a mean in place of a sum over dp)",
                m->n);
    else if (m->inverse)
        ari_say(t,
                ": looks like a missing all-reduce over %s of %d equal parts, or a mean over %d ranks in place of "
                "the sum (divided by N before each rank added its own)",
                group, m->n, m->n);
    else if (everywhere && pass == 'g')
        ari_say(t,
                ": a sum over %d ranks or micro-batches where the mean was wanted (dp), or each divided by its own "
                "number of targets in place of the global one",
                m->n);
    else
        ari_say(t,
                ": a value complete on each of %d ranks was added over %s (an all-reduce too many, or counted once "
                "per replica)",
                m->n, group);
    if (m->n == 2)
        ari_say(t, m->inverse ? "; or one of two equal contributions is missing" : "; or counted twice");
}

static void say_cause(ari_text *t, const ari_whole *w, double factor, const meaning *m, size_t same, size_t asked)
{
    const bool everywhere = asked > 0 && same == asked;
    const char pass = w->view.grid.d->pass;
    if (is_near(factor, -1.0))
        ari_say(t, ": the sign is flipped");
    else if (factor < 0.0)
        ari_say(t, ": the sign is flipped, and a scalar is wrong");
    else if (m->power)
        ari_say(t,
                m->inverse ? ": a loss scale divided out once too often" : ": a loss scale that was not divided out");
    else if (m->n && m->root && pass != 'g')
        ari_say(t, ": a scale by the square root of a size (a softmax scale, a fan, a number of ranks)");
    else if (m->n && !m->root)
        say_rank_factor(t, w, m, everywhere);
    else if (pass == 'g' && everywhere && factor < 1.0)
        ari_say(t, ": the gradient-clipping factor is in it (clipped on one side, or by another norm), or another "
                   "divisor of the loss");
    else if (everywhere)
        ari_say(t, ": one wrong scalar for the whole pass (the loss's divisor, a number of tokens)");
    else
        ari_say(t, ": one wrong scalar (a divisor, a clipping factor, a softmax scale, a number of tokens), not wrong "
                   "data");
    if (everywhere)
        ari_say(t, "; %zu other tensors looked at have the same factor", asked);
    else if (asked > 0 && same == 0)
        ari_say(t, "; %zu other tensors looked at do not have it", asked);
}

/* --- one factor -----------------------------------------------------------------------------------------------------
 */

static sums sums_of(const ari_whole *w)
{
    sums s = {0};
    for (size_t i = 0; i < w->count; i++) {
        const double v = (double)w->val[i], r = (double)w->ref[i];
        if (!ari_off(w, i))
            continue;
        s.vr += v * r;
        s.rr += r * r;
        s.vv += v * v;
        s.n++;
    }
    return s;
}

/* The largest |value - factor*reference| over what differs; infinity where it does not hold. */
static double worst_left(const ari_whole *w, double factor)
{
    const double beside = w->absolute * fmax(1.0, fabs(factor));
    double worst = 0.0;
    for (size_t i = 0; i < w->count; i++) {
        if (!ari_off(w, i))
            continue;
        const double expected = factor * (double)w->ref[i], left = fabs((double)w->val[i] - expected);
        if (!(left <= beside + (w->relative + 0x1p-21) * fabs(expected)))
            return INFINITY;
        worst = left > worst ? left : worst;
    }
    return worst;
}

ar_status ari_seek_factor(ari_clue *f, const ari_whole *w)
{
    const sums s = sums_of(w);
    const double factor = factor_of(&s), left = s.vv - s.vr * factor;
    char name[NAMED];
    size_t same = 0, asked = 0;
    if (w->count < 2 || !(s.vv > 0.0) || !(s.rr > 0.0) || !(fabs(factor - 1.0) > 1e-4) || !(fabs(factor) > 1e-9) ||
        !(left <= 1e-4 * s.vv))
        return AR_OK;
    const meaning m = meaning_of(factor);
    const double worst = worst_left(w, factor);
    const bool telling = m.n > 0 || m.power > 0 || is_near(factor, -1.0);
    if (!isfinite(worst) || (s.n < 4 && !(telling && s.n > 1)))
        return AR_OK;
    ask_others(w, factor, &same, &asked);
    name_factor(name, sizeof name, factor, &m);
    ari_text t = ari_find(f, telling ? ARI_IDENTITY + 5 : ARI_TRACE + 8);
    snprintf(f->value, sizeof f->value, "each %s times the reference", name);
    const double largest = worst / (w->max_ref * fabs(factor));
    ari_say(&t, "a factor of exactly %s in all %zu elements that differ (to within %.0e of the largest)", name, s.n,
            largest > 1e-9 ? largest : 1e-9);
    say_cause(&t, w, factor, &m, same, asked);
    return AR_OK;
}

/* --- a factor for each slice -------------------------------------------------------------------------------------- */

/* Along a dimension: each slice's factor; false unless each has one. */
static bool slice_factors(const ari_whole *w, int dim, sums *s)
{
    const ari_grid *g = &w->view.grid;
    size_t inner = 1, wrong = 0, apart = 0;
    double first = 0.0;
    for (int i = dim + 1; i < g->nd; i++)
        inner *= g->shape[i];
    memset(s, 0, g->shape[dim] * sizeof *s);
    for (size_t i = 0; i < w->count; i++) {
        sums *at = &s[i / inner % g->shape[dim]];
        const double v = (double)w->val[i], r = (double)w->ref[i];
        at->vr += v * r;
        at->rr += r * r;
        at->vv += v * v;
        at->n += ari_off(w, i);
    }
    for (size_t k = 0; k < g->shape[dim]; k++) {
        if (s[k].n == 0)
            continue;
        const double factor = factor_of(&s[k]);
        if (!(s[k].rr > 0.0) || !(fabs(factor) > 1e-9) || !(s[k].vv - s[k].vr * factor <= 1e-9 * s[k].vv))
            return false;
        first = wrong++ ? first : factor;
        apart += !is_near(factor, first);
    }
    return wrong > 1 && apart > 0 && w->count / g->shape[dim] >= 8;
}

static void say_scales(ari_clue *f, const ari_whole *w, int dim, const sums *s)
{
    const size_t n = w->view.grid.shape[dim];
    double low = INFINITY, high = -INFINITY;
    for (size_t k = 0; k < n; k++) {
        low = s[k].rr > 0.0 ? fmin(low, factor_of(&s[k])) : low;
        high = s[k].rr > 0.0 ? fmax(high, factor_of(&s[k])) : high;
    }
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
    sums s[MOST_RANKS];
} shards;

/* Whether every shard of n along a dimension has a factor, and not all the same. */
static bool shards_scale(shards *p, const ari_whole *w, int dim, size_t n)
{
    const ari_grid *g = &w->view.grid;
    bool apart = false;
    *p = (shards){.dim = dim, .n = n, .inner = g->shape[dim] / n};
    for (int i = dim + 1; i < g->nd; i++)
        p->inner *= g->shape[i];
    for (size_t i = 0; i < w->count; i++) {
        sums *s = &p->s[i / p->inner % n];
        s->vr += (double)w->val[i] * (double)w->ref[i];
        s->rr += (double)w->ref[i] * (double)w->ref[i];
    }
    for (size_t k = 0; k < n; k++) {
        const double factor = factor_of(&p->s[k]);
        if (!isfinite(factor) || fabs(factor) < 1e-9)
            return false;
        apart = apart || fabs(factor / factor_of(&p->s[0]) - 1.0) > 1e-3;
    }
    for (size_t i = 0; apart && i < w->count; i++) {
        if (!ari_holds(w, w->val[i], factor_of(&p->s[i / p->inner % n]) * (double)w->ref[i]))
            return false;
    }
    return apart;
}

static void say_shards(ari_clue *f, const ari_whole *w, const shards *p)
{
    ari_text t = ari_find(f, ARI_IDENTITY + 3);
    snprintf(f->value, sizeof f->value, "each shard a constant times the reference");
    ari_say(&t, "each of %zu shards of the %s has a factor of its own:", p->n, ari_axis_name(w, p->dim, true));
    for (size_t k = 0; k < p->n && k < 6; k++)
        ari_say(&t, " %.5g", factor_of(&p->s[k]));
    ari_say(&t, "%s; each rank divided, clipped or scaled by its own count, norm or size in place of the group's",
            p->n > 6 ? " ..." : "");
}

static bool seek_shards(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    shards p;
    for (int dim = 0; dim < g->nd; dim++) {
        for (size_t n = 2; n <= MOST_RANKS && n < g->shape[dim]; n++) {
            if (g->shape[dim] % n != 0 || w->count / n < 8 || !shards_scale(&p, w, dim, n))
                continue;
            say_shards(f, w, &p);
            return true;
        }
    }
    return false;
}

ar_status ari_seek_scales(ari_clue *f, const ari_whole *w)
{
    const ari_grid *g = &w->view.grid;
    sums *s = NULL;
    if (w->view.survey.total.nan > 0 || seek_shards(f, w))
        return AR_OK;
    for (int dim = 0; dim < g->nd && f->confidence == ARI_SILENT && g->nd > 1; dim++) {
        if (g->shape[dim] < 2)
            continue;
        AR_TRY(ari_alloc((void **)&s, g->shape[dim], sizeof *s, g->d->name));
        if (slice_factors(w, dim, s))
            say_scales(f, w, dim, s);
        free(s);
    }
    return AR_OK;
}

/* --- one value ---------------------------------------------------------------------------------------------------- */

ar_status ari_seek_loss(ari_clue *f, const ari_whole *w)
{
    const double r = (double)w->ref[0], v = (double)w->val[0], factor = v / r;
    char name[NAMED];
    if (w->count != 1 || !isfinite(v) || !isfinite(r) || r == 0.0)
        return AR_OK;
    for (int n = 2; n <= MOST_RANKS; n++) {
        if (fabs(v - r - log((double)n)) > 1e-5 * (1.0 + fabs(r)))
            continue;
        ari_text t = ari_find(f, ARI_IDENTITY);
        ari_say(&t,
                "the reference plus log(%d) = %.6f: softmax denominators added over %d ranks that each hold the "
                "whole vocabulary",
                n, log((double)n), n);
        return AR_OK;
    }
    const meaning m = meaning_of(factor);
    if (is_near(factor, 1.0) || !(m.n || m.power || is_near(factor, -1.0)))
        return AR_OK;
    name_factor(name, sizeof name, factor, &m);
    ari_text t = ari_find(f, ARI_IDENTITY);
    ari_say(&t, "a factor of %s", name);
    if (m.n && !m.root)
        ari_say(&t,
                m.inverse ? ": divided by %d too often: a mean over ranks or micro-batches of what was a mean already"
                          : ": a sum over %d ranks or micro-batches where the mean was wanted",
                m.n);
    return AR_OK;
}
