/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check/check_baseline.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/budget.h"
#include "ref/core/size.h"
#include "verify/reference/sensitivity.h"

typedef struct phase {
    const ar_check_options *o;
    const char *what;
} phase;

static bool progress(void *user, double fraction)
{
    const phase *p = user;
    if (p->o->progress)
        p->o->progress(p->o->progress_user, fraction, p->what);
    return true;
}

/* --- the error against binary64 ----------------------------------------------------------------------------------- */

/* Worst error while no tensor has given one; every error is larger. */
enum { NOTHING_MEASURED = -1 };
/* A gradient that is zero in exact arithmetic (a key bias) has no scale of its own: what binary64 leaves of it is
 * rounding, far below this. */
static const double NO_SCALE = 1e-12;

/* Adds a gradient's error, relative to the tensor's largest element, to the worst so far. Infinite where one of the two
 * alone is not finite; NaN where both hold NaN, since then nothing is known of the rest. */
static void add_error(double *error, const ari_ref_tensor *t, const double *values)
{
    double largest = 0.0, worst = 0.0, relative = 0.0;
    bool blind = false;
    for (size_t k = 0; k < t->count; k++) {
        const double wide = values[k], exact = (double)t->values[k];
        if (isnan(wide) && isnan(exact)) {
            blind = true;
            continue;
        }
        largest = fmax(largest, fabs(wide));
        if (wide != exact) /* fmax does not see a NaN, and infinity minus infinity is one */
            worst = fmax(worst, isfinite(wide) && isfinite(exact) ? fabs(wide - exact) : (double)INFINITY);
    }
    if (worst > 0.0)
        relative = largest > NO_SCALE ? worst / largest : NOTHING_MEASURED;
    if (isinf(worst))
        *error = INFINITY;
    else if (blind && !isinf(*error))
        *error = NAN;
    else if (relative > *error) /* never over a NaN */
        *error = relative;
}

/* Hears the binary64 run beside the reference. */
typedef struct measuring {
    const ari_reference *ref;
    size_t heard; /* gradients of step 1 come first among those of their name */
    double error; /* as above, of step 1 */
} measuring;

static ar_status measure(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    measuring *m = user;
    (void)ndim, (void)shape;
    /* In execution order, as the reference's; those of later steps come after. */
    const size_t i = m->heard++;
    if (i >= m->ref->count || m->ref->tensor[i].pass != pass || strcmp(m->ref->tensor[i].name, name) != 0)
        return ar_error_set(AR_ERR_INTERNAL, "the binary64 baseline emitted %s%s alone", name, ari_pass_suffix(pass));
    if (pass == 'g' && m->ref->tensor[i].step == 1)
        add_error(&m->error, &m->ref->tensor[i], values);
    return AR_OK;
}

/* --- the runs ----------------------------------------------------------------------------------------------------- */

/* What all runs of the baseline share. */
static ar_baseline_options options_of(const ari_baseline_case *c)
{
    const ar_check_options *o = c->check;
    return (ar_baseline_options){.mode = AR_MODE_EXACT,
                                 .seed = o->run.seed,
                                 .weights = c->weights ? ari_weights_find : NULL,
                                 .weights_user = c->weights,
                                 .dropout = o->run.dropout,
                                 .steps = (int)o->run.steps,
                                 .optimizer = o->run.optimizer,
                                 .clip = o->run.clip};
}

static ar_status run_exact(ari_reference *ref, double *losses, const ari_baseline_case *c)
{
    phase p = {c->check, "baseline, exact"};
    ar_baseline_options b = options_of(c);
    b.emit = ari_reference_emit;
    b.emit_user = ref;
    b.begin_step = ari_reference_begin;
    b.progress = progress;
    b.progress_user = &p;
    AR_TRY(ar_baseline_run(c->config, &b, c->batch, losses));
    return ari_reference_finish(ref);
}

/* Its gradients of step 1 measure the exact one's. */
static ar_status run_binary64(measuring *m, const ari_baseline_case *c, double *unused)
{
    phase p = {c->check, "baseline, binary64"};
    ar_baseline_options b = options_of(c);
    b.mode = AR_MODE_F64;
    b.emit = measure;
    b.emit_user = m;
    b.steps = 0;
    b.progress = progress;
    b.progress_user = &p;
    return ar_baseline_run(c->config, &b, c->batch, unused);
}

static ar_status run_any(void *user, const ar_baseline_options *o)
{
    const ari_baseline_case *c = user;
    const size_t steps = ari_run_steps(&c->check->run);
    double *losses = NULL;
    AR_TRY(ari_alloc_zero((void **)&losses, steps, sizeof *losses, "losses"));
    const ar_status st = ar_baseline_run(c->config, o, c->batch, losses);
    free(losses);
    return st;
}

static ar_status allow(ari_reference *ref, measuring *m, const ari_baseline_case *c)
{
    ari_baseline_case copy = *c;
    const ari_sensitivity_case sensitivity = {.of = ar_sensitivity_of_precision(c->check->run.precision),
                                              .run = run_any,
                                              .user = &copy,
                                              .options = options_of(c),
                                              .heard = measure,
                                              .heard_user = m,
                                              .threads =
                                                  c->check->run.threads > 0 ? c->check->run.threads : ari_cores(),
                                              .progress = c->check->progress,
                                              .progress_user = c->check->progress_user};
    return ari_sensitivity_allow(ref, &sensitivity);
}

ar_status ari_check_baseline(ari_reference *ref, float *loss, double *max_error, const ari_baseline_case *c)
{
    const size_t steps = ari_run_steps(&c->check->run);
    measuring m = {.ref = ref, .error = NOTHING_MEASURED};
    double *losses = NULL;
    ar_status st = AR_OK;
    *max_error = NAN;
    AR_TRY(ari_alloc_zero((void **)&losses, steps, sizeof *losses, "losses"));
    AR_TRY_TO(done, st, run_exact(ref, losses, c));
    for (size_t i = 0; i < steps; i++)
        loss[i] = (float)losses[i];
    if (c->check->run.numerics == AR_NUMERICS_NATIVE)
        AR_TRY_TO(done, st, allow(ref, &m, c));
    else if (!c->check->skip_f64)
        AR_TRY_TO(done, st, run_binary64(&m, c, losses));
    if (!c->check->skip_f64 && !(m.error < 0.0))
        *max_error = m.error;
done:
    free(losses);
    return st;
}
