/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients beside those of the step before: what was not zeroed, not written again, or copied too late. */
#include "verify/diagnose/pattern_impl.h"

/* Over what differs: v the ranks' values, r the reference, l the reference of the step before. */
typedef struct products {
    double vv, vr, vl, rr, rl, ll;
} products;

static products products_of(const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    products p = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
    ari_runs it = ari_runs_of(&c->grid);
    ari_run run;
    while (ari_runs_next(&it, &run)) {
        for (size_t i = 0; i < run.count; i++) {
            const double v = (double)run.value[i], r = (double)run.ref[i], l = (double)d->last[run.index + i];
            if (!ari_run_differs(&c->grid, &run, i))
                continue;
            p.vv += v * v;
            p.vr += v * r;
            p.vl += v * l;
            p.rr += r * r;
            p.rl += r * l;
            p.ll += l * l;
        }
    }
    return p;
}

/* v = now*r + last*l, to what rounding of the two leaves; false where it is no such sum. */
static bool split(double *now, double *last, const products *p)
{
    const double determinant = p->rr * p->ll - p->rl * p->rl;
    if (!(determinant > 1e-6 * p->rr * p->ll))
        return false;
    *now = (p->vr * p->ll - p->vl * p->rl) / determinant;
    *last = (p->vl * p->rr - p->vr * p->rl) / determinant;
    return p->vv - *now * p->vr - *last * p->vl <= 1e-10 * p->vv;
}

static bool is_near(double a, double b)
{
    return fabs(a - b) <= 1e-4;
}

ar_status ari_detect_last(ari_clue *f, const ari_case *c)
{
    const ari_difference *d = c->grid.d;
    double now = 0.0, last = 0.0;
    if (d->pass != 'g' || !d->last || c->survey.different < 8 || c->survey.total.nan > 0)
        return AR_OK;
    const products p = products_of(c);
    if (!split(&now, &last, &p) || is_near(last, 0.0))
        return AR_OK;
    ari_text t = ari_find(f, ARI_IDENTITY + 4);
    if (is_near(now, 0.0)) {
        ari_say(&t, "last step's value: every different element is the gradient of step %d", d->step - 1);
        if (!is_near(last, 1.0))
            ari_say(&t, " times %.6g", last);
        ari_say(&t, ", and nothing of this step's: a bucket that was not filled again, was believed to be reduced "
                    "already, or was copied back before its reduction had ended");
        return AR_OK;
    }
    ari_say(&t, "last step's value is still in it: the gradient is ");
    if (!is_near(now, 1.0))
        ari_say(&t, "%.6g times ", now);
    ari_say(&t, "the reference plus ");
    if (!is_near(last, 1.0))
        ari_say(&t, "%.6g times ", last);
    ari_say(&t,
            "that of step %d: gradients add up from step to step where they are not zeroed (zero_grad did not reach "
            "this parameter), or a bucket still held it",
            d->step - 1);
    return AR_OK;
}
