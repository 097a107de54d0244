/* SPDX-License-Identifier: Apache-2.0 */
/* Beside the step before: gradients that were not zeroed or not written again, the update of weights alone, which the
 * weights' own size hides, its decay, and its shares. */
#include "verify/diagnose/hypothesis.h"

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* Fits over copies: v by the reference and by the value a step before (for weights v and the reference less that
 * value), and v - reference by the value a step before. */
typedef struct beside {
    ari_fit values, apart;
    double noise;          /* squares of what the weights' own rounding leaves in v - reference */
    bool still, as_before; /* all of the reference, all of v has the bits of the step before */
} beside;

static const float *step_before(const ari_case *c)
{
    return c->d->last ? c->d->last : c->d->before;
}

/* Over what rank holds, -1: all wrong ranks; over what differs alone, or all. */
static beside look_beside(const ari_case *c, int rank, bool different)
{
    const float *earlier = step_before(c);
    beside s = {.still = true, .as_before = true};
    for (ari_run run = rank < 0 ? ari_runs_of(&c->grid) : ari_runs_of_rank(&c->grid, rank); ari_runs_next(&run);) {
        for (size_t i = 0; i < run.count && c->survey.rank[run.rank].different > 0; i++) {
            if (different && !ari_run_differs(&c->grid, &run, i))
                continue;
            const double e = (double)earlier[run.index + i], base = c->d->last ? 0.0 : e;
            const double v = (double)run.value[i], r = (double)run.ref[i], round = 0x1p-23 * r;
            ari_fit_add(&s.values, v - base, r - base, e);
            ari_fit_add(&s.apart, v - r, e, 0.0);
            s.noise += round * round;
            s.still = s.still && ari_same_bits(run.ref[i], earlier[run.index + i]);
            s.as_before = s.as_before && ari_same_bits(run.value[i], earlier[run.index + i]);
        }
    }
    return s;
}

/* So many times the reference, so many times what was there a step before. */
static double mixed(const ari_hypothesis *h, const ari_run *run, size_t i)
{
    return h->factor * (double)run->ref[i] + *(const double *)h->of * (double)step_before(h->c)[run->index + i];
}

ar_status ari_measure_last(ari_trace *t, const ari_case *c)
{
    double now, last;
    ari_residual left;
    if (!c->d->last)
        return AR_OK;
    const beside s = look_beside(c, -1, true);
    (void)ari_fit_two(&now, &last, &s.values);
    const double sums = ARI_SUMS * c->survey.max_reference;
    const ari_hypothesis h = {mixed, .c = c, .of = &last, .factor = now, .beside = sums, .differs_only = true};
    if (!(fabs(last) > ARI_SEEN) || !ari_holds_all(&left, &h))
        return AR_OK;
    ari_trace_set(t, ARI_FOUND_LAST, fabs(now) <= ARI_SEEN ? ARI_IF(ALL) : 0);
    ari_explained(t, &left);
    ARI_FACTS(t, {"now", .number = now}, {"last", .number = last}, {"before", .count = (size_t)c->d->step - 1});
    ari_words(t, "times_now", fabs(now - 1.0) <= ARI_SEEN ? "" : "%.6g times ", now);
    ari_words(t, "times_last", fabs(last - 1.0) <= ARI_SEEN ? "" : "%.6g times ", last);
    ari_words(t, "times", fabs(last - 1.0) <= ARI_SEEN ? "" : " times %.6g", last);
    return AR_OK;
}

/* --- the update --------------------------------------------------------------------------------------------------- */

/* The factor of the rank's update to the reference's, and *left, the share of its squares that it leaves besides the
 * weights' own rounding, so that it may be off by the root of that; NAN: no single number. A decay that is part of the
 * update leaves a little; if it is most of the other's it is fitted too: at most a tenth of the weight. */
static double factor_of(double *left, const beside *s)
{
    double factor, now, last;
    const ari_fit *f = &s->values;
    const double rounding = 4.0 * s->noise / f->yy;
    if (!(f->aa > 100.0 * s->noise))
        return (double)NAN;
    *left = f->yy == 0.0 ? 0.0 : ari_fit_one(&factor, f) - rounding;
    if (*left <= ARI_UNFITTED)
        return f->ya / f->aa;
    *left = ari_fit_two(&now, &last, f) - rounding;
    return *left <= ARI_UNFITTED && last / (now - 1.0) > 0.0 && last / (now - 1.0) < 0.1 ? now : (double)NAN;
}

/* True if the reference has no gradient of the weight and leaves it as it was, and the other has one. */
static bool is_frozen(const ari_case *c)
{
    const ar_dump *ref = c->known->reference, *other = c->known->other;
    const ar_dump_tensor *own = other ? ari_tensor_of_step(other, c->d->name, c->own.stem, "grad", c->d->step) : NULL;
    size_t i = 0;
    if (!own || !ref || ari_tensor_of_step(ref, c->d->name, c->own.stem, "grad", c->d->step))
        return false;
    while (i < c->grid.count && ari_same_bits(c->d->reference[i], c->d->before[i]))
        i++;
    return i == c->grid.count;
}

/* True if enough differs that may be the shares of some ranks, which update a part of each weight. */
static bool has_shares(const ari_case *c)
{
    enum { ENOUGH = 64 };
    return c->d->zero && ari_along(c->d, ARI_CUTS_DATA) > 1 && c->survey.different >= ENOUGH;
}

/* True if each rank has its own share alone, and some are right. */
static bool is_of_some(const ari_case *c)
{
    const ari_survey *s = &c->survey;
    return has_shares(c) && s->disagree == 0 && s->wrong_ranks < s->holding_ranks;
}

ar_status ari_measure_update(ari_trace *t, const ari_case *c)
{
    if (is_frozen(c)) {
        ari_trace_set(t, ARI_FOUND_UPDATE, ARI_IF(FOREIGN));
        return AR_OK;
    }
    double low = INFINITY, high = -INFINITY, worst = 0.0, left = 0.0;
    bool shares = is_of_some(c);
    for (int r = 0; r < c->d->ranks; r++) {
        if (c->survey.rank[r].different == 0)
            continue;
        beside s = look_beside(c, r, false);
        double factor = factor_of(&left, &s);
        if (isnan(factor) && has_shares(c)) {
            shares = true;
            s = look_beside(c, r, true);
            factor = factor_of(&left, &s);
        }
        if (!(fabs(factor - 1.0) > ARI_KNOWN))
            return AR_OK;
        low = fmin(low, factor);
        high = fmax(high, factor);
        worst = fmax(worst, left);
    }
    const bool one = (low == 0.0 && high == 0.0) || high - low <= (ARI_KNOWN + 2.0 * sqrt(worst)) * fabs(high);
    ARI_FINDING(t, ARI_FOUND_UPDATE, one ? 0 : ARI_IF(SOME), {"factor", .number = low}, {"high", .number = high});
    if (one)
        AR_TRY(ari_name_update(t, c, low));
    t->flags |= shares ? ARI_IF(OF_SHARDS) : 0;
    return AR_OK;
}

/* --- weight decay ------------------------------------------------------------------------------------------------- */

/* Decoupled decay takes lr*decay*w away: if it is left out, that is the difference. */
static bool is_decay(double *part, const beside *s)
{
    const double left = ari_fit_one(part, &s->apart), noise = s->noise / s->apart.yy;
    return noise < 1.0 / 16.0 && !(left > ARI_KNOWN + 2.0 * noise) && fabs(*part) < 0.5;
}

ar_status ari_measure_decay(ari_trace *t, const ari_case *c)
{
    beside s = look_beside(c, -1, false);
    double part;
    const bool all = is_decay(&part, &s);
    if (!all && has_shares(c))
        s = look_beside(c, -1, true);
    if (!all && !(has_shares(c) && is_decay(&part, &s)))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_DECAY, (s.still ? ARI_IF(ZERO) : 0) | (all && !is_of_some(c) ? 0 : ARI_IF(OF_SHARDS)),
                {"what", .text = part > 0.0 ? "left out" : "counted more than once"}, {"part", .number = fabs(part)});
    return AR_OK;
}

/* --- shares of the data-parallel ranks ---------------------------------------------------------------------------- */

ar_status ari_measure_share_update(ari_trace *t, const ari_case *c)
{
    if (!c->d->zero || ari_along(c->d, ARI_CUTS_SAMPLES) * ari_along(c->d, ARI_CUTS_POSITIONS) < 2)
        return AR_OK;
    const bool few = c->survey.different < 8;
    const bool alike = c->d->ranks > 1 && c->survey.disagree == 0;
    const beside s = look_beside(c, -1, true);
    const ari_fit *f = &s.values;
    const double size = sqrt(f->yy / f->aa), cosine = f->ya / sqrt(f->aa * f->yy);
    /* Its own share of the update is on a rank that has not gathered the others': what no rank has was not updated, but
     * for a decay. Where the moments are known, they tell a gradient of zeros from an update that was lost. */
    double left;
    const bool none = alike && !few && !c->known->other && (s.as_before || fabs(factor_of(&left, &s)) <= ARI_SEEN);
    if (!s.as_before && !none && (few || !(size > 0.2 && size < 5.0 && fabs(cosine) < 0.5)))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_SHARE_UPDATE,
                none ? ARI_IF(ZERO) : (s.as_before ? ARI_IF(OF_BEFORE) : 0) | (few ? ARI_IF(SOME) : 0),
                {"wrong", .count = (size_t)c->survey.wrong_ranks}, {"size", .number = size},
                {"cosine", .number = cosine});
    return AR_OK;
}

/* --- one step ----------------------------------------------------------------------------------------------------- */

/* A step's decay is far smaller; more would be another fit. */
#define MOST_DECAY 0.1

/* Adam's first step moves each weight by the learning rate, up or down, and by its decay: tests whether initial values
 * differ by that. */
ar_status ari_measure_one_step(ari_trace *t, const ari_case *c)
{
    double size, decay;
    size_t up = 0;
    ari_fit f = {0};
    for (size_t i = 0; i < c->count; i++) {
        const double r = (double)c->ref[i], apart = (double)c->val[i] - r;
        if (!ari_off(c, i))
            continue;
        ari_fit_add(&f, apart, copysign(1.0, apart), r);
        up += apart > 0.0;
    }
    if (f.n * 4 < c->count || up * 4 < f.n || up * 4 > f.n * 3 || c->survey.total.zero > 0 ||
        !(ari_fit_two(&size, &decay, &f) <= ARI_UNFITTED) || !(fabs(decay) < MOST_DECAY))
        return AR_OK;
    ARI_FINDING(t, ARI_FOUND_UPDATE, ARI_IF(ONE), {"size", .number = size}, {"decay", .number = fabs(decay)});
    return AR_OK;
}
