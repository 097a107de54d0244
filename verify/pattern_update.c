/* SPDX-License-Identifier: Apache-2.0 */
/* New weights beside those before the step: the update alone, which the weights' own size hides. */
#include "verify/pattern_impl.h"

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
    else if (high - low <= 1e-3 * fabs(high))
        ari_say(
            &t,
            "the update is %.4g times the expected, and otherwise unchanged: the clip factor, the learning rate, or "
            "a gradient that was scaled on its way to the optimizer",
            low);
    else
        ari_say(&t,
                "each rank's update is the expected one times a factor of its own, from %.4g to %.4g: each clipped by "
                "the norm of its own shards, or has a learning rate of its own",
                low, high);
    return AR_OK;
}
