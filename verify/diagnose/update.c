/* SPDX-License-Identifier: Apache-2.0 */
/* Beside the step before: gradients that were not zeroed or not written again; the update of weights alone, which the
 * weights' own size hides; the optimizer's state; and what differences of gradients explain of weights. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/diagnose/case.h"
#include "verify/diagnose/roles.h"

/* --- tensors of a step --------------------------------------------------------------------------------------------- */

const ar_dump_tensor *ari_tensor_of_step(const ar_dump *d, const char *stem, size_t n, const char *kind, int step)
{
    char name[512];
    const int length = step > 1 ? snprintf(name, sizeof name, "%.*s:%s@%d", (int)n, stem, kind, step)
                                : snprintf(name, sizeof name, "%.*s:%s", (int)n, stem, kind);
    return d && length > 0 && (size_t)length < sizeof name ? ar_dump_find(d, name) : NULL;
}

const ar_dump_tensor *ari_weight_before(const ar_dump *d, const char *stem, size_t n, int step)
{
    return step > 1 ? ari_tensor_of_step(d, stem, n, "new", step - 1) : ari_tensor_of_step(d, stem, n, "init", 1);
}

/* --- what gradients explain --------------------------------------------------------------------------------------- */

enum { CHUNK = 1024 };

ar_status ari_doubt_reach(double *reach, const ar_dump *reference, int step)
{
    double x[CHUNK], y[CHUNK];
    *reach = 0.0;
    for (size_t i = 0; i < ar_dump_count(reference); i++) {
        const ar_dump_tensor *t = ar_dump_at(reference, i);
        const ari_order_key key = ari_order_of(t->name, NULL);
        const ar_dump_tensor *before = ari_weight_before(reference, t->name, key.stem, step);
        if (key.pass != 'n' || key.step != step || !before || before->count != t->count)
            continue;
        for (size_t at = 0; at < t->count; at += CHUNK) {
            const size_t n = t->count - at < CHUNK ? t->count - at : CHUNK;
            AR_TRY(ar_dump_read_f64(before, at, n, x));
            AR_TRY(ar_dump_read_f64(t, at, n, y));
            for (size_t k = 0; k < n; k++)
                *reach = fabs(y[k] - x[k]) > *reach && isfinite(y[k] - x[k]) ? fabs(y[k] - x[k]) : *reach;
        }
    }
    return AR_OK;
}

/* The root of a second moment is a norm of the gradients so far, whatever their weights. Each is off by y of its size at
 * most, so that the root s is off by d <= y s, and the bound's d/(s - d) is y/(1 - y) at most. */
ar_status ari_doubt_read(double *beside, const ari_doubt *d, size_t start, size_t n)
{
    double reference[CHUNK], other[CHUNK], y[CHUNK];
    for (size_t at = 0; at < n; at += CHUNK) {
        const size_t here = n - at < CHUNK ? n - at : CHUNK;
        memset(y, 0, sizeof y);
        memset(beside + at, 0, here * sizeof *beside);
        for (int k = 0; k < d->steps; k++) {
            AR_TRY(ar_dump_read_f64(d->grad[k][0], start + at, here, reference));
            AR_TRY(ar_dump_read_f64(d->grad[k][1], start + at, here, other));
            for (size_t i = 0; i < here; i++) {
                const double apart = fabs(other[i] - reference[i]);
                if (apart > 0.0 && isfinite(apart))
                    y[i] = fmax(y[i], apart / fabs(reference[i]));
                beside[at + i] += 2.0 * d->reach[k] * (y[i] < 0.5 ? y[i] / (1.0 - y[i]) : 1.0);
            }
        }
    }
    return AR_OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Sums over copies: v the values, r the reference, e the reference of the step before; of weights v and r are updates,
 * that is less e. */
typedef struct beside {
    double vv, vr, rr, ve, re, ee;
    double xx, xe;         /* x: v - r */
    double noise;          /* squares of what the weights' own rounding leaves in x */
    bool still, as_before; /* all of r, all of v has the bits of e */
} beside;

/* Over what rank holds, -1: all wrong ranks; over what differs alone, or all. */
static beside look_beside(const ari_case *c, int rank, bool different)
{
    const float *earlier = c->grid.d->last ? c->grid.d->last : c->grid.d->before;
    beside s = {.still = true, .as_before = true};
    ari_runs it = rank < 0 ? ari_runs_of(&c->grid) : ari_runs_of_rank(&c->grid, rank);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count && c->survey.rank[run.rank].different > 0; i++) {
            if (different && !ari_run_differs(&c->grid, &run, i))
                continue;
            const double e = (double)earlier[run.index + i], base = c->grid.d->last ? 0.0 : e;
            const double v = (double)run.value[i] - base, r = (double)run.ref[i] - base;
            const double x = (double)run.value[i] - (double)run.ref[i], round = 0x1p-23 * (double)run.ref[i];
            s.vv += v * v, s.vr += v * r, s.rr += r * r, s.ve += v * e, s.re += r * e, s.ee += e * e;
            s.xx += x * x, s.xe += x * e, s.noise += round * round;
            s.still = s.still && ari_same_bits(run.ref[i], earlier[run.index + i]);
            s.as_before = s.as_before && ari_same_bits(run.value[i], earlier[run.index + i]);
        }
    }
    return s;
}

/* v = now*r + last*e, but for squares of `most`; false where it is no such sum. */
static bool split(double *now, double *last, const beside *s, double most)
{
    const double determinant = s->rr * s->ee - s->re * s->re;
    if (!(determinant > 1e-6 * s->rr * s->ee))
        return false;
    *now = (s->vr * s->ee - s->ve * s->re) / determinant;
    *last = (s->ve * s->rr - s->vr * s->re) / determinant;
    return s->vv - *now * s->vr - *last * s->ve <= most;
}

ar_status ari_measure_last(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double now = 0.0, last = 0.0;
    if (d->pass != 'g' || !d->last || c->survey.different < 8 || c->survey.total.nan > 0)
        return AR_OK;
    const beside s = look_beside(c, -1, true);
    if (!split(&now, &last, &s, 1e-10 * s.vv) || fabs(last) <= 1e-4)
        return AR_OK;
    ari_found(t, ARI_FOUND_LAST, fabs(now) <= 1e-4 ? ARI_IF(ALL) : 0);
    ari_number(t, "now", now);
    ari_number(t, "last", last);
    ari_count(t, "before", (size_t)d->step - 1);
    ari_words(t, "times_now", fabs(now - 1.0) <= 1e-4 ? "" : "%.6g times ", now);
    ari_words(t, "times_last", fabs(last - 1.0) <= 1e-4 ? "" : "%.6g times ", last);
    ari_words(t, "times", fabs(last - 1.0) <= 1e-4 ? "" : " times %.6g", last);
    return AR_OK;
}

/* --- the update --------------------------------------------------------------------------------------------------- */

/* The factor of the rank's update to the reference's; NAN where it is not one number. A decay that is part of the
 * update leaves a little; where it is most of the other's, it is told from the rest: at most a tenth of the weight. */
static double factor_of(const beside *s)
{
    const double factor = s->vr / s->rr, left = s->vv - s->vr * factor;
    double now = 0.0, last = 0.0;
    if (!(s->rr > 100.0 * s->noise))
        return (double)NAN;
    if (left <= 1e-4 * s->vv + 4.0 * s->noise)
        return factor;
    const bool two = split(&now, &last, s, 1e-4 * s->vv + 4.0 * s->noise);
    return two && last / (now - 1.0) > 0.0 && last / (now - 1.0) < 0.1 ? now : (double)NAN;
}

/* sqrt(1 - beta2^t)/(1 - beta1^t): what Adam corrects its moments by at step t. */
static double correction(const ari_difference *d, int t)
{
    return sqrt(1.0 - pow(d->beta2, t)) / (1.0 - pow(d->beta1, t));
}

/* Of which step Adam's correction would make the update `factor` times the expected; 0: of none. */
static int corrected_as(const ari_difference *d, double factor)
{
    enum { AHEAD = 4 };
    if (!(d->beta1 > 0.0 && d->beta2 > 0.0))
        return 0;
    for (int t = 1; t <= d->step + AHEAD; t++) {
        const double expected = correction(d, t) / correction(d, d->step);
        if (t != d->step && fabs(factor - expected) <= 2e-3 * expected)
            return t;
    }
    return 0;
}

/* What the factor of an update is, as a property. */
static void found_update(ari_trace *t, const ari_difference *d, double factor)
{
    const double first = 1.0 - pow(d->beta1, d->step), second = sqrt(1.0 - pow(d->beta2, d->step));
    const bool adam = d->beta2 > 0.0 && d->step > 0;
    const int as = corrected_as(d, factor);
    if (factor == 0.0)
        t->is |= ARI_IF(ZERO);
    else if (as > 0)
        t->is |= ARI_IF(OF_STEP);
    else if (ari_is_near(factor, -1.0, 1e-3))
        t->is |= ARI_IF(NEGATIVE);
    else if (adam && ari_is_near(factor, first / second, 1e-3))
        t->is |= ARI_IF(FIRST_MOMENT) | ARI_IF(SECOND_MOMENT);
    else if (adam && ari_is_near(factor, 1.0 / second, 1e-3))
        t->is |= ARI_IF(SECOND_MOMENT);
    else if (adam && ari_is_near(factor, first, 1e-3))
        t->is |= ARI_IF(FIRST_MOMENT);
    ari_count(t, "as", (size_t)as);
    ari_count(t, "step", (size_t)d->step);
}

ar_status ari_measure_update(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double low = INFINITY, high = -INFINITY;
    if (d->pass != 'n' || !d->before || c->survey.different < 4 || c->survey.total.nan > 0)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].different == 0)
            continue;
        const beside s = look_beside(c, r, false);
        const double factor = factor_of(&s);
        if (!(fabs(factor - 1.0) > 1e-3))
            return AR_OK;
        low = fmin(low, factor);
        high = fmax(high, factor);
    }
    const bool one = (low == 0.0 && high == 0.0) || high - low <= 1e-3 * fabs(high);
    ari_found(t, ARI_FOUND_UPDATE, one ? 0 : ARI_IF(SOME));
    ari_number(t, "factor", low);
    ari_number(t, "high", high);
    if (one)
        found_update(t, d, low);
    return AR_OK;
}

/* --- the optimizer's state ---------------------------------------------------------------------------------------- */

/* y = a*p + b*q, least squares. */
typedef struct plane {
    double yy, ya, yb, aa, ab, bb;
} plane;

static void add_point(plane *s, double y, double a, double b)
{
    s->yy += y * y, s->ya += y * a, s->yb += y * b, s->aa += a * a, s->ab += a * b, s->bb += b * b;
}

/* What is left of the squares, as a share; NaN where there is nothing to fit. Without b where that says as much. */
static double fit_plane(double *p, double *q, const plane *s)
{
    const double determinant = s->aa * s->bb - s->ab * s->ab;
    *p = s->ya / s->aa;
    *q = 0.0;
    double left = fmax(s->yy - *p * s->ya, 0.0) / s->yy;
    if (left > 1e-8 && determinant > 1e-6 * s->aa * s->bb) {
        *p = (s->ya * s->bb - s->yb * s->ab) / determinant;
        *q = (s->yb * s->aa - s->ya * s->ab) / determinant;
        left = fmax(s->yy - *p * s->ya - *q * s->yb, 0.0) / s->yy;
    }
    return left;
}

/* One parameter's tensors of a step in both dumps. */
enum { BEFORE, GRADIENT, FIRST, SECOND, NEW, KINDS };
typedef struct state {
    const ar_dump_tensor *tensor[KINDS][2];
    ari_sample sample[KINDS][2];
    double x[KINDS][2][CHUNK];
    double largest[2];      /* of the second moments */
    plane gradients, first; /* the other's by the reference's; of first moments beside the weight before */
    plane second;
    plane by_gradient[2]; /* the reference's first moment by its gradient, the second by its square */
    plane update[2];      /* what a weight lost by first/sqrt(second), and by the weight before */
    plane moved[2];       /* how much larger the other's moments are, by the gradient and by its square */
} state;

static ar_status open_state(bool *whole, state *s, const ari_case *c)
{
    static const char *const kinds[] = {"", "grad", "m", "v", "new"};
    const ar_dump *dump[] = {c->known->reference, c->known->other};
    const char *stem = c->grid.d->name;
    *whole = true;
    for (int i = 0; i < KINDS * 2; i++) {
        const int kind = i / 2, step = c->grid.d->step;
        const ar_dump_tensor *t = kind == BEFORE
                                      ? ari_weight_before(dump[i % 2], stem, strlen(stem), step)
                                      : ari_tensor_of_step(dump[i % 2], stem, strlen(stem), kinds[kind], step);
        *whole = *whole && t && t->count == c->full->count && (!c->step || t->parts > 0);
        if (!*whole)
            return AR_OK;
        s->tensor[kind][i % 2] = t;
        if (!c->step)
            continue;
        AR_TRY(ari_sample_init(&s->sample[kind][i % 2], t, c->step));
        s->tensor[kind][i % 2] = &s->sample[kind][i % 2].tensor;
    }
    return AR_OK;
}

static void close_state(state *s)
{
    for (int i = 0; i < KINDS * 2; i++)
        ari_sample_fini(&s->sample[i / 2][i % 2]);
}

static void add_moments(state *s, size_t i)
{
    const double g = s->x[GRADIENT][0][i];
    add_point(&s->gradients, s->x[GRADIENT][1][i], g, 0.0);
    add_point(&s->first, s->x[FIRST][1][i], s->x[FIRST][0][i], s->x[BEFORE][0][i]);
    add_point(&s->second, s->x[SECOND][1][i], s->x[SECOND][0][i], 0.0);
    add_point(&s->by_gradient[0], s->x[FIRST][0][i], g, 0.0);
    add_point(&s->moved[0], s->x[FIRST][1][i] - s->x[FIRST][0][i], g, s->x[BEFORE][0][i]);
    add_point(&s->moved[1], s->x[SECOND][1][i] - s->x[SECOND][0][i], g * g, s->x[SECOND][0][i]);
    add_point(&s->by_gradient[1], s->x[SECOND][0][i], g * g, 0.0);
    for (int k = 0; k < 2; k++)
        s->largest[k] = fmax(s->largest[k], s->x[SECOND][k][i]);
}

/* Small gradients, of which Adam's epsilon is a part, say nothing. */
static void add_update(state *s, size_t i)
{
    for (int k = 0; k < 2; k++) {
        const double second = s->x[SECOND][k][i], w = s->x[BEFORE][k][i];
        if (second > 1e-6 * s->largest[k])
            add_point(&s->update[k], w - s->x[NEW][k][i], s->x[FIRST][k][i] / sqrt(second), w);
    }
}

static ar_status walk_state(state *s, const ari_case *c, void (*add)(state *, size_t))
{
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        for (int i = 0; i < KINDS * 2; i++)
            AR_TRY(ar_dump_read_f64(s->tensor[i / 2][i % 2], c->start + at, n, s->x[i / 2][i % 2]));
        for (size_t i = 0; i < n; i++)
            add(s, i);
    }
    return AR_OK;
}

/* Adam's usual decay rates, of which after the first step m = (1 - beta1) x g and v = (1 - beta2) (x g)^2 for the clip
 * factor x; false where none fit. */
static bool find_betas(ari_difference *d, const state *s)
{
    static const double first[] = {0.9, 0.95, 0.8, 0.85, 0.5}, second[] = {0.999, 0.95, 0.99, 0.98, 0.9, 0.9999};
    double a, b, none;
    if (!(fit_plane(&a, &none, &s->by_gradient[0]) < 1e-6) || !(fit_plane(&b, &none, &s->by_gradient[1]) < 1e-6))
        return false;
    for (size_t i = 0; i < 30; i++) {
        const double b1 = first[i / 6], b2 = second[i % 6];
        if (!ari_is_near(b / (a * a), (1.0 - b2) / ((1.0 - b1) * (1.0 - b1)), 1e-3) || a / (1.0 - b1) > 1.001)
            continue;
        d->beta1 = b1;
        d->beta2 = b2;
        return true;
    }
    return false;
}

/* The moments' own factors. */
static void found_moments(ari_trace *t, const ari_case *c, const state *s, double first, double second)
{
    ari_difference d = {.step = 1};
    const bool known = c->grid.d->step == 1 && find_betas(&d, s);
    ari_found(t, ARI_FOUND_STATE, 0);
    if (ari_is_near(second, first * first, 2e-3)) {
        ari_name_number(t, first, 1e-4);
        t->is = ARI_IF(OF_GRADIENT) | (t->is & (ARI_IF(POWER) | ARI_IF(NEGATIVE)));
    } else if (known && ari_is_near(first, 1.0 + d.beta1, 1e-3) && ari_is_near(second, 1.0 + d.beta2, 1e-3)) {
        t->is = ARI_IF(TWICE);
    }
    ari_number(t, "first", first);
    ari_number(t, "second", second);
}

/* Moments that have a history: what each step adds to them is the gradient times a number, and its square times that
 * number's; where these alone differ, so does the number. */
static void found_moved(ari_trace *t, const state *s)
{
    double first, second, by_weight, by_moment;
    if (!(fit_plane(&first, &by_weight, &s->moved[0]) < 1e-6) ||
        !(fit_plane(&second, &by_moment, &s->moved[1]) < 1e-6) ||
        fabs(by_weight) * sqrt(s->moved[0].bb / s->moved[0].yy) > 1e-3 ||
        fabs(by_moment) * sqrt(s->moved[1].bb / s->moved[1].yy) > 1e-3 || !(first * second > 0.0))
        return;
    ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_GRADIENT) | ARI_IF(OF_STEP));
    ari_number(t, "first", first);
    ari_number(t, "second", second);
}

/* The state is the reference's, the update is not. */
static void found_step(ari_trace *t, const ari_case *c, const state *s)
{
    double rate[2], decay[2];
    ari_difference d = *c->grid.d;
    for (int k = 0; k < 2; k++) {
        if (!(fit_plane(&rate[k], &decay[k], &s->update[k]) < 1e-5))
            return;
    }
    const double factor = rate[1] / rate[0], least = 1e-3 * fmax(fabs(decay[0]), fabs(decay[1]));
    const bool same_decay = fabs(decay[1] - decay[0]) <= fmax(least, 1e-6), same_rate = ari_is_near(factor, 1.0, 1e-4);
    if (same_rate && !same_decay) {
        ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_BEFORE));
    } else if (!same_rate && fabs(decay[0]) > 1e-6 && ari_is_near(decay[1] / decay[0], factor, 1e-2)) {
        ari_found(t, ARI_FOUND_STATE, fabs(factor) < 1e-6 ? ARI_IF(ZERO) : ARI_IF(ALL));
    } else if (!same_rate && same_decay) {
        (void)find_betas(&d, s);
        ari_found(t, ARI_FOUND_UPDATE, 0);
        found_update(t, &d, factor);
    }
    ari_number(t, "factor", factor);
    ari_number(t, "decay", decay[0]);
    ari_number(t, "other_decay", decay[1]);
}

ar_status ari_measure_state(ari_trace *t, const ari_case *c)
{
    state *s = NULL;
    bool whole = false;
    double factor, first, decay, second, none;
    ar_status st = AR_OK;
    if (!strchr("nmv", c->grid.d->pass) || !c->known->reference || !c->known->other || c->count < 8 ||
        c->survey.total.nan > 0)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&s, 1, sizeof *s, c->grid.d->name));
    AR_TRY_TO(done, st, open_state(&whole, s, c));
    if (!whole)
        goto done;
    AR_TRY_TO(done, st, walk_state(s, c, add_moments));
    const double left = fit_plane(&factor, &none, &s->gradients), of_first = fit_plane(&first, &decay, &s->first);
    const double of_second = fit_plane(&second, &none, &s->second);
    if (!(left < 1e-6) || !ari_is_near(factor, 1.0, 1e-3)) /* the gradient itself is another */
        goto done;
    if (!(of_first < 1e-6)) {
        found_moved(t, s);
        goto done;
    }
    const double added = decay * sqrt(s->first.bb / s->first.yy); /* how much of the first moment is the weight */
    if (fabs(added) > 1e-3) {
        ari_found(t, ARI_FOUND_STATE, ARI_IF(OF_WEIGHT));
        ari_number(t, "first", first);
        ari_number(t, "decay", decay);
    } else if (of_second < 1e-6 && (!ari_is_near(first, 1.0, 2e-4) || !ari_is_near(second, 1.0, 4e-4))) {
        found_moments(t, c, s, first, second);
    } else if (of_second < 1e-6) {
        AR_TRY_TO(done, st, walk_state(s, c, add_update));
        found_step(t, c, s);
    }
done:
    close_state(s);
    free(s);
    return st;
}

/* --- Adam's epsilon ----------------------------------------------------------------------------------------------- */

/* The first step of Adam moves a weight by lr*g/(|g| + eps), and by a decay: of two epsilons of which one is small beside
 * the gradients, (the larger update - s)*|g| is E*s for the smaller update s, but for the decay in s. */
ar_status ari_measure_epsilon(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    const ar_dump_tensor *grad = ari_tensor_of_step(c->known->reference, d->name, strlen(d->name), "grad", d->step);
    double g[CHUNK], size[2] = {0.0, 0.0}, eps, none;
    plane by_gradient[2] = {{.yy = 0.0}, {.yy = 0.0}}, plain[2] = {{.yy = 0.0}, {.yy = 0.0}};
    if (d->pass != 'n' || d->step != 1 || !d->before || !c->val || !grad || c->step || grad->count != c->full->count ||
        c->survey.different < 64 || c->survey.total.nan > 0)
        return AR_OK;
    for (size_t at = 0; at < c->count; at += CHUNK) {
        const size_t n = c->count - at < CHUNK ? c->count - at : CHUNK;
        AR_TRY(ar_dump_read_f64(grad, c->start + at, n, g));
        for (size_t i = 0; i < n; i++) {
            const double w = (double)d->before[at + i], r = (double)c->ref[at + i], v = (double)c->val[at + i];
            if (!ari_off(c, at + i))
                continue;
            size[0] += (r - w) * (r - w), size[1] += (v - w) * (v - w);
            add_point(&by_gradient[0], (v - r) * fabs(g[i]), r - w, w);
            add_point(&by_gradient[1], (r - v) * fabs(g[i]), v - w, w);
            add_point(&plain[0], v - r, r - w, w);
            add_point(&plain[1], r - v, v - w, w);
        }
    }
    const int smaller = size[1] < size[0];
    const double left = fit_plane(&eps, &none, &by_gradient[smaller]),
                 of_factor = fit_plane(&none, &none, &plain[smaller]);
    if (!(left < 1e-3) || !(left < 0.01 * of_factor) || !(eps > 0.0))
        return AR_OK;
    ari_found(t, ARI_FOUND_EPSILON, 0);
    ari_number(t, "epsilon", eps);
    ari_words(t, "where", smaller ? "here" : "in the reference");
    return AR_OK;
}

/* --- weight decay ------------------------------------------------------------------------------------------------- */

/* Decoupled decay takes lr*decay*w away: where it is left out, that is the difference. */
ar_status ari_measure_decay(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass != 'n' || !d->before || c->survey.different < 8 || c->survey.total.nan > 0)
        return AR_OK;
    const beside s = look_beside(c, -1, false);
    const double part = s.xe / s.ee, left = s.xx - s.xe * part;
    if (!(s.xx > 16.0 * s.noise) || left > 1e-3 * s.xx + 2.0 * s.noise || !(fabs(part) < 0.5))
        return AR_OK;
    ari_found(t, ARI_FOUND_DECAY, s.still ? ARI_IF(ZERO) : 0);
    ari_words(t, "what", part > 0.0 ? "left out" : "counted more than once");
    ari_number(t, "part", fabs(part));
    return AR_OK;
}

/* --- shares of the data-parallel ranks ---------------------------------------------------------------------------- */

ar_status ari_measure_share_update(ari_trace *t, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    if (d->pass != 'n' || !d->before || !d->zero ||
        ari_along(d, ARI_CUTS_SAMPLES) * ari_along(d, ARI_CUTS_POSITIONS) < 2 || c->survey.total.nan > 0)
        return AR_OK;
    const bool few = c->survey.different < 8;
    const beside s = look_beside(c, -1, true);
    const double size = sqrt(s.vv / s.rr), cosine = s.vr / sqrt(s.rr * s.vv);
    if (!s.as_before && (few || !(size > 0.2 && size < 5.0 && fabs(cosine) < 0.5)))
        return AR_OK;
    ari_found(t, ARI_FOUND_SHARE_UPDATE, (s.as_before ? ARI_IF(OF_BEFORE) : 0) | (few ? ARI_IF(SOME) : 0));
    ari_count(t, "wrong", (size_t)c->survey.wrong_ranks);
    ari_number(t, "size", size);
    ari_number(t, "cosine", cosine);
    return AR_OK;
}
