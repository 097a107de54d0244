/* SPDX-License-Identifier: Apache-2.0 */
/* New weights beside those before the step: the update alone, which the weights' own size hides. */
#include "verify/diagnose/pattern_impl.h"

/* Over what one rank holds: u the reference's update, v the rank's. */
typedef struct update {
    double vu, uu, vv;
    double noise; /* squares of what the weights' own rounding leaves in v - u */
} update;

static update update_of(const ari_case *c, int rank)
{
    const ari_difference *d = c->grid.d;
    update s = {0.0, 0.0, 0.0, 0.0};
    ari_runs it = ari_runs_of_rank(&c->grid, rank);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const double before = (double)d->before[run.index + i], round = 0x1p-23 * (double)run.ref[i];
            const double v = (double)run.value[i] - before, u = (double)run.ref[i] - before;
            s.vu += v * u;
            s.uu += u * u;
            s.vv += v * v;
            s.noise += round * round;
        }
    }
    return s;
}

/* The factor of the rank's update to the reference's; NAN where it is not one number. A decay that is part of the
 * update leaves a little. */
static double factor_of(const update *s)
{
    const double factor = s->vu / s->uu, left = s->vv - s->vu * factor;
    return s->uu > 100.0 * s->noise && left <= 1e-4 * s->vv + 4.0 * s->noise ? factor : (double)NAN;
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

static bool is_wrong(const void *user, int rank)
{
    const ari_survey *s = user;
    return s->rank[rank].different > 0;
}

static void say_corrected(ari_text *t, const ari_case *c, double factor, int as)
{
    const ari_difference *d = c->grid.d;
    ari_say(t,
            "Adam's correction of another step: the update is %.4g times the expected, as that of step %d would be in "
            "step %d (sqrt(1 - beta2^t)/(1 - beta1^t))",
            factor, as, d->step);
    if (c->survey.disagree > 0) {
        ari_say(t, ", on ");
        ari_say_ranks(t, d->ranks, is_wrong, &c->survey);
        ari_say(t, " and not on the others that hold it: they count their steps differently");
    } else
        ari_say(t, ": the counter was advanced without an update, or an update was not counted");
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-3 * fabs(b);
}

static void say_factor(ari_text *t, const ari_difference *d, double factor)
{
    const double first = 1.0 - pow(d->beta1, d->step), second = sqrt(1.0 - pow(d->beta2, d->step));
    const bool adam = d->beta2 > 0.0 && d->step > 0;
    ari_say(t, "the update is %.4g times the expected, and otherwise unchanged: ", factor);
    if (is_near(factor, -1.0))
        ari_say(t, "its sign is wrong: the step goes up the gradient");
    else if (adam && is_near(factor, first / second))
        ari_say(t, "Adam's moments were not corrected, (1 - beta1^t)/sqrt(1 - beta2^t) with t = %d", d->step);
    else if (adam && is_near(factor, 1.0 / second))
        ari_say(t, "Adam's second moment was not corrected, 1/sqrt(1 - beta2^t) with t = %d", d->step);
    else if (adam && is_near(factor, first))
        ari_say(t, "Adam's first moment was not corrected, 1 - beta1^t with t = %d", d->step);
    else
        ari_say(t, "the clip factor, the learning rate, or a gradient that was scaled on its way to the optimizer");
}

ar_status ari_detect_update(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double low = INFINITY, high = -INFINITY;
    if (d->pass != 'n' || !d->before || c->survey.different < 4 || c->survey.total.nan > 0)
        return AR_OK;
    for (int r = 0; r < d->ranks; r++) {
        if (c->survey.rank[r].different == 0)
            continue;
        const update s = update_of(c, r);
        const double factor = factor_of(&s);
        if (!(fabs(factor - 1.0) > 1e-3))
            return AR_OK;
        low = fmin(low, factor);
        high = fmax(high, factor);
    }
    ari_text t = ari_find(f, ARI_TRACE - 1);
    if (low == 0.0 && high == 0.0)
        ari_say(&t, "no update: these are the weights before the step, which was left out or whose result was lost");
    else if (high - low <= 1e-3 * fabs(high) && corrected_as(d, low) > 0)
        say_corrected(&t, c, low, corrected_as(d, low));
    else if (high - low <= 1e-3 * fabs(high))
        say_factor(&t, d, low);
    else
        ari_say(&t,
                "each rank's update is the expected one times a factor of its own, from %.4g to %.4g: each clipped by "
                "the norm of its own shards, or has a learning rate of its own",
                low, high);
    return AR_OK;
}

/* --- weight decay ------------------------------------------------------------------------------------------------- */

/* Over the wrong ranks: x the difference, w the weight before the step. */
typedef struct decayed {
    double xw, ww, xx;
    double noise; /* squares of what rounding of the weights leaves in x */
    bool still;   /* the reference leaves the weights as they are */
} decayed;

static void add_decay(decayed *s, const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        if (c->survey.rank[run.rank].different == 0)
            continue;
        for (size_t i = 0; i < run.count; i++) {
            const double w = (double)c->grid.d->before[run.index + i], x = (double)run.value[i] - (double)run.ref[i];
            const double round = 0x1p-23 * (double)run.ref[i];
            s->xw += x * w;
            s->ww += w * w;
            s->xx += x * x;
            s->noise += round * round;
            s->still = s->still && ari_same_bits(run.ref[i], c->grid.d->before[run.index + i]);
        }
    }
}

/* Decoupled decay takes lr*decay*w away: where it is left out, that is the difference. */
ar_status ari_detect_decay(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    decayed s = {0.0, 0.0, 0.0, 0.0, true};
    if (d->pass != 'n' || !d->before || c->survey.different < 8 || c->survey.total.nan > 0)
        return AR_OK;
    add_decay(&s, c);
    const double part = s.xw / s.ww, left = s.xx - s.xw * part;
    if (!(s.xx > 16.0 * s.noise) || left > 1e-3 * s.xx + 2.0 * s.noise || !(fabs(part) < 0.5))
        return AR_OK;
    ari_text t = ari_find(f, ARI_TRACE + 3);
    ari_say(&t, "weight decay %s: the difference is %.4g times the weight before the step, on ",
            part > 0.0 ? "left out" : "counted more than once", fabs(part));
    ari_say_ranks(&t, d->ranks, is_wrong, &c->survey);
    if (s.still)
        ari_say(&t, "; the reference leaves it as it was: a parameter without gradient on any rank was taken for one "
                    "whose gradient is zero");
    else if (c->survey.disagree > 0)
        ari_say(&t, " and not on the others that hold it: replicas drift apart unless each decays alike");
    else
        ari_say(&t, "; a parameter in another group of the optimizer, or decay that was added to the gradient");
    return AR_OK;
}

/* --- shares of the data-parallel ranks ---------------------------------------------------------------------------- */

/* Whether all that differs is, bit for bit, what it was before the step. */
static bool is_as_before(const ari_case *c)
{
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            if (ari_run_differs(&c->grid, &run, i) && !ari_same_bits(run.value[i], c->grid.d->before[run.index + i]))
                return false;
        }
    }
    return true;
}

/* The update's size and direction where it differs, beside the reference's. */
static void compare_updates(const ari_case *c, double *size, double *cosine)
{
    double vu = 0.0, uu = 0.0, vv = 0.0;
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const double before = (double)c->grid.d->before[run.index + i];
            const double v = (double)run.value[i] - before, u = (double)run.ref[i] - before;
            if (!ari_run_differs(&c->grid, &run, i))
                continue;
            vu += v * u;
            uu += u * u;
            vv += v * v;
        }
    }
    *size = sqrt(vv / uu);
    *cosine = vu / sqrt(uu * vv);
}

ar_status ari_detect_share(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double size = 0.0, cosine = 1.0;
    if (d->pass != 'n' || !d->before || !d->zero || ari_dp_of(d) < 2 || c->survey.different < 8 ||
        c->survey.total.nan > 0)
        return AR_OK;
    if (is_as_before(c)) {
        ari_text t = ari_find(f, ARI_IDENTITY + 4);
        ari_say(
            &t,
            "shares that were not gathered: what differs is the weight before the step, bit for bit, on %d of %d "
            "ranks; each data-parallel rank has updated its own share (ZeRO), and the others' must be gathered over dp",
            c->survey.wrong_ranks, d->ranks);
        return AR_OK;
    }
    compare_updates(c, &size, &cosine);
    if (size > 0.2 && size < 5.0 && fabs(cosine) < 0.5) {
        ari_text t = ari_find(f, ARI_STATISTIC + 5);
        ari_say(&t,
                "shares that do not line up: the update is as large as the expected (%.3g times) and has another "
                "direction (cosine %.2f), as when a rank updates its share of the weights with another share of the "
                "gradient (ZeRO)",
                size, cosine);
    }
    return AR_OK;
}
