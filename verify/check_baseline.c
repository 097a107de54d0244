/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/check_baseline.h"

#include <math.h>
#include <stdlib.h>

#include "ref/core/size.h"
#include "verify/adam_allowance.h"

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

/* --- what rounding may do ----------------------------------------------------------------------------------------- */

/* Listens to binary64 runs beside the reference. */
typedef struct measuring {
    const ari_reference *ref;
    int step;
    double error;     /* as above, of step 1 */
    float **beyond;   /* [ref->count] binary64 - exact, element by element, of the run without noise; NULL: not kept */
    double *spread;   /* [ref->count] largest |noisy - quiet|; NULL: this run is the quiet one */
    uint8_t **rounds; /* [ref->count], of gradients: elements that are not zero in every run; NULL with beyond */
} measuring;

static void begin_step(void *user, int step)
{
    measuring *m = user;
    m->step = step;
}

static ar_status keep_quiet(measuring *m, size_t i, const double *values)
{
    const ari_ref_tensor *t = &m->ref->tensor[i];
    AR_TRY(ari_alloc((void **)&m->beyond[i], t->count, sizeof(float), t->name));
    if (t->pass == 'g')
        AR_TRY(ari_alloc_zero((void **)&m->rounds[i], t->count, 1, t->name));
    for (size_t k = 0; k < t->count; k++)
        m->beyond[i][k] = (float)(values[k] - (double)t->values[k]);
    return AR_OK;
}

/* Values that are not finite say nothing of rounding: they are left out. */
static void add_spread(measuring *m, size_t i, const double *values)
{
    const ari_ref_tensor *t = &m->ref->tensor[i];
    for (size_t k = 0; k < t->count; k++) {
        const double apart = fabs(values[k] - (double)t->values[k] - (double)m->beyond[i][k]);
        if (isfinite(apart) && apart > m->spread[i])
            m->spread[i] = apart;
    }
}

/* A gradient that no run has other than zero (an id that does not occur) is zero whatever rounding does. */
static void note_zeros(measuring *m, size_t i, const double *values)
{
    const ari_ref_tensor *t = &m->ref->tensor[i];
    for (size_t k = 0; m->rounds[i] && k < t->count; k++)
        m->rounds[i][k] |= values[k] != 0.0 || t->values[k] != 0.0f;
}

static ar_status measure(void *user, const char *name, char pass, int ndim, const size_t *shape, const double *values)
{
    measuring *m = user;
    (void)ndim, (void)shape;
    const bool wanted = m->beyond != NULL;
    if (pass != 'g' && !wanted)
        return AR_OK;
    const size_t i = ari_reference_find_in(m->ref, name, pass, m->step);
    if (i == m->ref->count || (m->spread && !m->beyond[i]))
        return ar_error_set(AR_ERR_INTERNAL, "the binary64 baseline emitted %s%s alone", name, ari_pass_suffix(pass));
    if (m->spread) {
        add_spread(m, i, values);
        note_zeros(m, i, values);
        return AR_OK;
    }
    if (pass == 'g' && m->step == 1)
        add_error(&m->error, &m->ref->tensor[i], values);
    if (!wanted)
        return AR_OK;
    AR_TRY(keep_quiet(m, i, values));
    note_zeros(m, i, values);
    return AR_OK;
}

/* The distance of the largest element to the next fp32 number: no result in fp32 can be asked to be nearer. */
static double step_of_largest(const ari_ref_tensor *t)
{
    float largest = 0.0f;
    for (size_t k = 0; k < t->count; k++) {
        const float x = fabsf(t->values[k]);
        if (isfinite(x) && x > largest)
            largest = x;
    }
    return (double)(nextafterf(largest, INFINITY) - largest);
}

static double safety_of(size_t elements)
{
    return fmax(ARI_NOISE_SAFETY, pow(1e6, 1.0 / ((double)elements * ARI_NOISE_SEEDS)));
}

static ar_baseline_options options_of(const ari_baseline_case *c, phase *p)
{
    const ar_check_options *o = c->check;
    return (ar_baseline_options){.mode = AR_MODE_EXACT,
                                 .seed = o->seed,
                                 .weights = c->weights ? ari_weights_find : NULL,
                                 .weights_user = c->weights,
                                 .dropout = o->dropout,
                                 .steps = o->steps,
                                 .optimizer = o->optimizer,
                                 .clip = o->clip,
                                 .progress = progress,
                                 .progress_user = p};
}

/* The binary64 baseline once more for each seed, with a random error wherever fp32 arithmetic would round. */
static ar_status measure_spread(measuring *m, ari_reference *ref, const ari_baseline_case *c, double *unused)
{
    phase p = {c->check, "baseline, rounding errors"};
    ar_baseline_options b = options_of(c, &p);
    AR_TRY(ari_alloc_zero((void **)&m->spread, ref->count, sizeof *m->spread, "spreads"));
    b.mode = AR_MODE_F64;
    b.emit = measure;
    b.emit_user = m;
    b.begin_step = begin_step;
    for (uint64_t seed = 1; seed <= ARI_NOISE_SEEDS; seed++) {
        b.noise_seed = seed;
        m->step = 1;
        AR_TRY(ar_baseline_run(c->config, &b, c->batch, unused));
    }
    for (size_t i = 0; i < ref->count; i++) {
        ari_ref_tensor *t = &ref->tensor[i];
        t->allowed = safety_of(t->count) * m->spread[i] + step_of_largest(t);
    }
    const ari_adam_case adam = {
        .optimizer = &c->check->optimizer, .steps = c->check->steps, .clip = c->check->clip, .rounds = m->rounds};
    return ari_adam_allow(ref, &adam);
}

/* --- the runs ----------------------------------------------------------------------------------------------------- */

static ar_status run_exact(ari_reference *ref, double *losses, const ari_baseline_case *c)
{
    phase p = {c->check, "baseline, exact"};
    ar_baseline_options b = options_of(c, &p);
    b.emit = ari_reference_emit;
    b.emit_user = ref;
    b.begin_step = ari_reference_begin;
    AR_TRY(ar_baseline_run(c->config, &b, c->batch, losses));
    return ari_reference_finish(ref);
}

/* Its gradients of step 1 measure the exact one's; where rounding is to be measured too, all of its steps run. */
static ar_status run_binary64(measuring *m, const ari_baseline_case *c, double *unused)
{
    phase p = {c->check, "baseline, binary64"};
    ar_baseline_options b = options_of(c, &p);
    b.mode = AR_MODE_F64;
    b.emit = measure;
    b.emit_user = m;
    b.begin_step = begin_step;
    if (!m->beyond)
        b.steps = 0;
    m->error = NOTHING_MEASURED;
    return ar_baseline_run(c->config, &b, c->batch, unused);
}

static void measuring_fini(measuring *m)
{
    for (size_t i = 0; m->beyond && i < m->ref->count; i++)
        free(m->beyond[i]);
    for (size_t i = 0; m->rounds && i < m->ref->count; i++)
        free(m->rounds[i]);
    free(m->beyond);
    free(m->rounds);
    free(m->spread);
}

ar_status ari_check_baseline(ari_reference *ref, float *loss, double *max_error, const ari_baseline_case *c)
{
    const size_t steps = ari_check_steps(c->check);
    const bool native = c->check->numerics == AR_NUMERICS_NATIVE;
    measuring m = {.ref = ref, .step = 1};
    double *losses = NULL;
    ar_status st = AR_OK;
    *max_error = NAN;
    AR_TRY(ari_alloc_zero((void **)&losses, steps, sizeof *losses, "losses"));
    AR_TRY_TO(done, st, run_exact(ref, losses, c));
    for (size_t i = 0; i < steps; i++)
        loss[i] = (float)losses[i];
    if (native) {
        AR_TRY_TO(done, st, ari_alloc_zero((void **)&m.beyond, ref->count, sizeof *m.beyond, "binary64 tensors"));
        AR_TRY_TO(done, st, ari_alloc_zero((void **)&m.rounds, ref->count, sizeof *m.rounds, "flags"));
    }
    if (native || !c->check->skip_f64)
        AR_TRY_TO(done, st, run_binary64(&m, c, losses));
    if (!c->check->skip_f64 && !(m.error < 0.0))
        *max_error = m.error;
    if (native)
        st = measure_spread(&m, ref, c, losses);
done:
    measuring_fini(&m);
    free(losses);
    return st;
}
