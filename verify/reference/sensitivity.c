/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/reference/sensitivity.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/sensitivity_private.h"
#include "ref/io/safetensors_private.h"
#include "ref/numerics/philox.h"
#include "verify/reference/sensitivity_private.h"
#include "verify/reference/tasks.h"

/* --- formats ------------------------------------------------------------------------------------------------------ */

#define F32 0x1p-24
#define SHORT 0x1p-11 /* TF32 and fp16: 11 bits of significand */
#define BF16 0x1p-8

typedef struct format {
    ar_noise_units noise;
    double stored; /* unit roundoff of the format in which tensors are stored */
} format;

#define MIXED(u)                                                                   \
    {                                                                              \
        .operand = (u), .product = (u), .branch = (u), .stream = F32, .inner = F32 \
    }
#define PURE(u)                                                                   \
    {                                                                             \
        .weight = (u), .product = (u), .branch = (u), .stream = (u), .inner = F32 \
    }

static const format formats[AR_SENSITIVITY_COUNT] = {
    [AR_SENSITIVITY_F32] = {{.product = F32, .branch = F32, .stream = F32, .inner = F32}, F32},
    [AR_SENSITIVITY_TF32] = {{.operand = SHORT, .product = F32, .branch = F32, .stream = F32, .inner = F32}, F32},
    [AR_SENSITIVITY_BF16] = {MIXED(BF16), F32},
    [AR_SENSITIVITY_BF16_PURE] = {PURE(BF16), BF16},
    [AR_SENSITIVITY_F16] = {MIXED(SHORT), F32},
    [AR_SENSITIVITY_F16_PURE] = {PURE(SHORT), SHORT}};

ar_noise_units ari_sensitivity_noise(ar_sensitivity s)
{
    return formats[s].noise;
}

ar_sensitivity ari_sensitivity_of_precision(ar_precision p)
{
    return p == AR_PRECISION_BF16   ? AR_SENSITIVITY_BF16_PURE
           : p == AR_PRECISION_TF32 ? AR_SENSITIVITY_TF32
                                    : AR_SENSITIVITY_F32;
}

/* --- what runs beside the reference say --------------------------------------------------------------------------- */

enum { KINK_RUNS = 6 };
/* At least half of the randomly drawn slopes have at least half of the largest root mean square effect. */
static const double KINK_SAFETY = 2.0;

typedef struct measuring {
    const ari_sensitivity_case *c;
    ari_reference *ref;
    bool fills;       /* the run without noise fills the reference */
    float **beyond;   /* [ref->count] for each element: binary64 value minus reference, in the run without noise */
    uint8_t **rounds; /* [ref->count] for gradients: marks elements that are nonzero in some run */
    size_t *argument; /* [ref->count] for the gradient of a kink's argument: the index of the argument, otherwise
                         ref->count */
    double *kinked;   /* [ref->count] largest difference caused by uncertain slopes */
    float **doubt;    /* [ref->count] for weights after Adam: the further part of `beside` in a step; NULL: none yet */
    size_t capacity;  /* capacity of beyond and rounds */
    ari_arena arena;  /* memory for everything except these two lists */
} measuring;

/* One measured run. */
typedef struct measured_run {
    measuring *m;
    uint64_t seed; /* seed of the noise; 0: no noise */
    int step;
    bool kinked;    /* true for a run without noise in which arguments near a kink are moved to one of its sides: */
    uint32_t sides; /* runs 2n and 2n + 1 choose opposite sides; in runs 0 and 1 all arguments are on one side
                       (is_whole) */
    size_t bent;    /* the tensor for which slopes are currently computed */
    double *spread; /* [ref->count] largest |noisy - quiet| */
    bool tells;     /* true for the calling thread's run, which reports progress for all concurrent runs */
} measured_run;

static void begin_step(void *user, int step)
{
    measured_run *r = user;
    r->step = step;
    if (r->m->fills && r->seed == 0 && !r->kinked)
        ari_reference_begin(r->m->ref, step);
}

/* Marks nonzero elements. A gradient that is zero in all runs (for example of a token id that does not occur) is zero
 * under any rounding. Concurrent runs write the same byte. */
static void note_zeros(const measuring *m, size_t i, const double *values)
{
    const ari_ref_tensor *t = &m->ref->tensor[i];
    for (size_t k = 0; m->rounds[i] && k < t->count; k++)
        if (values[k] != 0.0 || t->values[k] != 0.0f)
            __atomic_store_n(&m->rounds[i][k], 1, __ATOMIC_RELAXED);
}

static ar_status keep_quiet(measuring *m, size_t i, const double *values)
{
    const ari_ref_tensor *t = &m->ref->tensor[i];
    AR_TRY(ARI_TAKE(&m->beyond[i], &m->arena, t->count, t->name));
    if (t->pass == 'g')
        AR_TRY(ARI_TAKE(&m->rounds[i], &m->arena, t->count, t->name));
    for (size_t k = 0; k < t->count; k++)
        m->beyond[i][k] = (float)(values[k] - (double)t->values[k]);
    note_zeros(m, i, values);
    return AR_OK;
}

/* Measures the deviation from the run without noise. Values that are not finite are left out, as they show nothing
 * about rounding. */
static double measure_deviation(const measuring *m, size_t i, const double *values, size_t k)
{
    const double deviation = fabs(values[k] - (double)m->ref->tensor[i].values[k] - (double)m->beyond[i][k]);
    return isfinite(deviation) ? deviation : 0.0;
}

/* Finds the reference's tensor *i that a run emits, if the run without noise has emitted the tensor too. */
static ar_status find(size_t *i, const measured_run *r, const char *name, char pass)
{
    *i = ari_reference_find_in(r->m->ref, name, pass, r->step);
    if (*i < r->m->ref->count && ((r->seed == 0 && !r->kinked) || r->m->beyond[*i]))
        return AR_OK;
    return ar_error_set(AR_ERR_INTERNAL, "the binary64 baseline emitted %s%s alone", name, ari_pass_suffix(pass));
}

/* Room for the tensors of the reference, which may be growing. */
static ar_status make_room(measuring *m)
{
    while (m->capacity < m->ref->count) {
        size_t capacity = m->capacity, rounds_capacity = m->capacity;
        AR_TRY(ARI_GROW(&m->beyond, &capacity, capacity, "binary64 tensors"));
        AR_TRY(ARI_GROW(&m->rounds, &rounds_capacity, rounds_capacity, "flags"));
        for (size_t i = m->capacity; i < capacity; i++) {
            m->beyond[i] = NULL;
            m->rounds[i] = NULL;
        }
        m->capacity = capacity;
    }
    return AR_OK;
}

static ar_status hear_quiet(void *user, const char *name, char pass, int ndim, const size_t *shape,
                            const double *values)
{
    measured_run *r = user;
    measuring *m = r->m;
    size_t i = m->ref->count;
    if (m->fills)
        AR_TRY(ari_reference_emit(m->ref, name, pass, ndim, shape, values));
    else
        AR_TRY(find(&i, r, name, pass));
    AR_TRY(make_room(m));
    AR_TRY(keep_quiet(m, i, values));
    return m->c->heard ? m->c->heard(m->c->heard_user, name, pass, ndim, shape, values) : AR_OK;
}

static ar_status hear_noisy(void *user, const char *name, char pass, int ndim, const size_t *shape,
                            const double *values)
{
    measured_run *r = user;
    const measuring *m = r->m;
    size_t i;
    (void)ndim, (void)shape;
    AR_TRY(find(&i, r, name, pass));
    r->spread[i] = 0.0;
    for (size_t k = 0; k < m->ref->tensor[i].count; k++)
        r->spread[i] = fmax(r->spread[i], measure_deviation(m, i, values, k));
    note_zeros(m, i, values);
    return AR_OK;
}

/* --- updates in doubt --------------------------------------------------------------------------------------------- */

/* If the sign of a gradient is uncertain, Adam's step moves later tensors too, and three random runs may not move such
 * a weight at all. Therefore one more set of runs moves every weight by a fraction of its allowance. */
static const float *doubt_of(void *user, const char *name, int step, size_t count)
{
    const measured_run *r = user;
    const size_t i = ari_reference_find_in(r->m->ref, name, 'n', step);
    return i < r->m->ref->count && r->m->ref->tensor[i].count == count ? r->m->doubt[i] : NULL;
}

/* `beside` adds up over the steps, and a run's weights do too. */
static ar_status set_doubts(measuring *m)
{
    const ari_reference *ref = m->ref;
    AR_TRY(ARI_TAKE(&m->doubt, &m->arena, ref->count, "doubts"));
    for (size_t i = 0; i < ref->count; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        const size_t before = t->step > 1 ? ari_reference_find_in(ref, t->name, 'n', t->step - 1) : ref->count;
        const float *old = before < ref->count ? ref->tensor[before].allowed_each : NULL;
        if (t->pass != 'n' || !t->allowed_each)
            continue;
        AR_TRY(ARI_TAKE(&m->doubt[i], &m->arena, t->count, t->name));
        for (size_t k = 0; k < t->count; k++)
            m->doubt[i][k] = fmaxf(0.0f, t->allowed_each[k] - (old ? old[k] : 0.0f));
    }
    return AR_OK;
}

/* --- kinks -------------------------------------------------------------------------------------------------------- */

/* Returns true for the first pair of runs. In a pair, each uncertain slope takes one value in one run and the other
 * value in the other. In the first pair all uncertain slopes change together, which no correct run does: it shows,
 * element by element, how far the gradient of each argument may be off. The randomly drawn pairs show the effect on
 * other tensors for arguments that rounding was seen to move across their kinks. */
static bool is_whole(const measured_run *r)
{
    return r->sides < 2;
}

/* The factor of the spread for a tensor of so many elements. */
static double safety_of(size_t elements)
{
    return fmax(ARI_NOISE_SAFETY, pow(1e6, 1.0 / ((double)elements * ARI_NOISE_SEEDS)));
}

/* Chooses the slope at a kink. If an argument may be on either side of a kink, the slope may be either too. The first
 * noisy run records the arguments of kinks. */
static double kink_of(void *user, const char *argument, const char *gradient, int step)
{
    measured_run *r = user;
    const ari_reference *ref = r->m->ref;
    const size_t argument_index = r->m->argument ? ari_reference_find_in(ref, argument, 'f', step) : ref->count;
    const size_t gradient_index =
        argument_index < ref->count ? ari_reference_find_in(ref, gradient, 'b', step) : ref->count;
    if (gradient_index == ref->count || ref->tensor[gradient_index].count != ref->tensor[argument_index].count)
        return -1.0;
    if (r->seed == 1)
        r->m->argument[gradient_index] = argument_index;
    r->bent = gradient_index;
    const ari_ref_tensor *t = &ref->tensor[argument_index];
    return !r->kinked ? -1.0 : is_whole(r) ? t->allowed : t->allowed / safety_of(t->count);
}

static double slope_of(void *user, size_t element)
{
    const measured_run *r = user;
    const uint32_t drawn = is_whole(r) ? 0 : ari_random_u32(r->sides / 2, element, (uint32_t)r->bent, 0);
    return (double)((drawn ^ r->sides) & 1);
}

/* Returns true if rounding may move an argument across its kink at 0; in later steps also because of earlier kinks. */
static bool in_doubt(const measuring *m, size_t argument, size_t k)
{
    const ari_ref_tensor *t = &m->ref->tensor[argument];
    return fabs((double)t->values[k] + (double)m->beyond[argument][k]) <= t->allowed + m->kinked[argument];
}

/* Allows the gradient of an uncertain argument to be off by its whole size, but no other element of the tensor. */
static ar_status hear_kinked(void *user, const char *name, char pass, int ndim, const size_t *shape,
                             const double *values)
{
    const measured_run *r = user;
    measuring *m = r->m;
    size_t i;
    (void)ndim, (void)shape;
    AR_TRY(find(&i, r, name, pass));
    ari_ref_tensor *t = &m->ref->tensor[i];
    const size_t argument = m->argument[i];
    if (argument < m->ref->count && !t->allowed_each)
        AR_TRY(ARI_ALLOC_ZERO(&t->allowed_each, t->count, t->name));
    note_zeros(m, i, values);
    for (size_t k = 0; k < t->count; k++) {
        const double deviation = measure_deviation(m, i, values, k);
        if (argument < m->ref->count && in_doubt(m, argument, k))
            t->allowed_each[k] = fmaxf(t->allowed_each[k], (float)deviation);
        else if (!is_whole(r))
            m->kinked[i] = fmax(m->kinked[i], deviation);
    }
    return AR_OK;
}

static size_t count_in_doubt(const measuring *m)
{
    size_t n = 0;
    for (size_t i = 0; i < m->ref->count; i++) {
        for (size_t k = 0; m->argument[i] < m->ref->count && k < m->ref->tensor[i].count; k++)
            n += in_doubt(m, m->argument[i], k);
    }
    return n;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

static bool report_progress(void *user, double fraction)
{
    const measured_run *r = user;
    const ari_sensitivity_case *c = r->m->c;
    if (c->progress)
        c->progress(c->progress_user, fraction,
                    r->seed || r->kinked ? "baseline, rounding errors" : "baseline, binary64");
    return true;
}

static ar_status run_model(const ari_sensitivity_case *c, const ar_baseline_options *o)
{
    ARI_OWNED double *losses = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&losses, o->steps > 1 ? (size_t)o->steps : 1, "losses"));
    return ar_baseline_run(c->config, o, c->batch, losses);
}

static ar_status run_once(measured_run *r)
{
    const ari_sensitivity_case *c = r->m->c;
    ar_baseline_options o = c->options;
    r->step = 1;
    o.mode = AR_MODE_F64;
    o.noise_seed = r->seed;
    o.noise = formats[c->sensitivity].noise;
    o.emit = r->kinked ? hear_kinked : r->seed ? hear_noisy : hear_quiet;
    o.emit_user = r;
    o.begin_step = begin_step;
    o.doubt = r->seed && r->m->doubt ? doubt_of : NULL;
    o.kink = kink_of;
    o.kink_slope = slope_of;
    o.progress = r->tells ? report_progress : NULL;
    o.progress_user = r;
    return c->run ? c->run(c->user, &o) : run_model(c, &o);
}

static ar_status run_seed(void *user, size_t task, int worker)
{
    measured_run *r = &((measured_run *)user)[task];
    r->tells = worker == 0;
    return run_once(r);
}

static ar_status run_seeds(measuring *m, measured_run *runs)
{
    for (size_t i = 0; i < m->ref->count; i++)
        m->argument[i] = m->ref->count;
    for (int i = 0; i < ARI_NOISE_SEEDS; i++) {
        double *spread = runs[i].spread; /* buffer of the earlier runs without uncertain slopes; overwritten */
        if (!spread)
            AR_TRY(ARI_TAKE(&spread, &m->arena, m->ref->count, "spreads"));
        runs[i] = (measured_run){.m = m, .seed = (uint64_t)i + 1, .spread = spread};
    }
    const ari_tasks t = {ARI_NOISE_SEEDS, m->c->threads < 1 ? 1 : m->c->threads, run_seed, runs, NULL};
    return ari_tasks_run(&t);
}

/* --- what is allowed ---------------------------------------------------------------------------------------------- */

/* Sets the allowances from the draws. No stored result can be asked to be nearer than the next number of its format.
 * The effect of kinks is not sampled from a correct run but from a run with half of all doubtful slopes on the other
 * side, so it has its own safety factor, as do tensors so small that the draws may miss more. */
static void allow_draws(const measuring *m, const measured_run *runs)
{
    const ari_reference *ref = m->ref;
    const double steps = formats[m->c->sensitivity].stored / F32;
    for (size_t i = 0; i < ref->count; i++) {
        ari_ref_tensor *t = &ref->tensor[i];
        double spread = 0.0;
        for (int k = 0; k < ARI_NOISE_SEEDS; k++)
            spread = fmax(spread, runs[k].spread[i]);
        t->allowed = safety_of(t->count) * (spread + KINK_SAFETY / ARI_NOISE_SAFETY * m->kinked[i]) +
                     ari_step_of_largest(t) * steps;
    }
}

static ar_status allow_all(measuring *m, const measured_run *runs)
{
    const ar_baseline_options *o = &m->c->options;
    allow_draws(m, runs);
    return ari_adam_allow(m->ref, &(ari_adam_case){.optimizer = &o->optimizer,
                                                   .steps = o->steps,
                                                   .clip = o->clip,
                                                   .stored = formats[m->c->sensitivity].stored,
                                                   .rounds = m->rounds});
}

static ar_status allow_once(measuring *m, measured_run *runs)
{
    AR_TRY(run_seeds(m, runs));
    return allow_all(m, runs);
}

static ar_status allow_kinks(measuring *m, const measured_run *runs)
{
    m->ref->kinks = count_in_doubt(m);
    for (uint32_t k = 0; k < KINK_RUNS && m->ref->kinks > 0; k++) {
        measured_run r = {.m = m, .kinked = true, .sides = k, .tells = true};
        AR_TRY(run_once(&r));
    }
    return m->ref->kinks > 0 ? allow_all(m, runs) : AR_OK;
}

static ar_status measure(measuring *m)
{
    measured_run quiet = {.m = m, .tells = true}, runs[ARI_NOISE_SEEDS] = {{0}};
    const ar_baseline_options *o = &m->c->options;
    AR_TRY(run_once(&quiet));
    if (m->fills)
        AR_TRY(ari_reference_finish(m->ref));
    AR_TRY(ARI_TAKE(&m->argument, &m->arena, m->ref->count, "kinks"));
    AR_TRY(ARI_TAKE(&m->kinked, &m->arena, m->ref->count, "kinks"));
    AR_TRY(allow_once(m, runs));
    /* In fp32 so few gradients are uncertain that correct runs do not need this (numerics.md, section 7). */
    if (o->steps > 1 && o->optimizer.kind != AR_OPTIMIZER_SGD && m->c->sensitivity != AR_SENSITIVITY_F32) {
        AR_TRY(set_doubts(m));
        AR_TRY(allow_once(m, runs));
    }
    return allow_kinks(m, runs);
}

ar_status ari_sensitivity_allow(ari_reference *ref, const ari_sensitivity_case *c)
{
    measuring m = {.c = c, .ref = ref, .fills = ref->count == 0};
    const ar_status st = measure(&m);
    ari_arena_end(&m.arena, NULL);
    free(m.beyond);
    free(m.rounds);
    return st;
}

/* --- allowances of a dump ----------------------------------------------------------------------------------------- */

static ari_allowance allowance_of(const ari_ref_tensor *t)
{
    ari_allowance a;
    float extra = 0.0f; /* float, not double: gcc 12 for aarch64 has an internal error with double */
    for (size_t k = 0; t->allowed_each && k < t->count; k++)
        extra = fmaxf(extra, t->allowed_each[k]);
    (void)ari_dump_name(a.name, t->name, t->pass, (uint32_t)t->step); /* a reference's names fit */
    a.value = t->allowed + (double)extra;
    return a;
}

ar_status ari_allowances_write(const ari_reference *ref, const ari_allowance *extra, size_t n, const char *path,
                               ar_sensitivity sensitivity, const char *hash)
{
    char seeds[16], safety[32];
    const size_t count = n + ref->count;
    ari_allowance *list = NULL;
    ar_st_tensor *tensor = NULL;
    ARI_ENDED(ari_arena_free) ari_arena arena = {NULL};
    AR_TRY(ARI_TAKE(&list, &arena, count, "allowances"));
    AR_TRY(ARI_TAKE(&tensor, &arena, count, "tensors of a file"));
    for (size_t i = 0; i < count; i++) {
        list[i] = i < n ? extra[i] : allowance_of(&ref->tensor[i - n]);
        tensor[i] = (ar_st_tensor){.name = list[i].name, .dtype = AR_F64, .data = &list[i].value};
    }
    snprintf(seeds, sizeof seeds, "%d", ARI_NOISE_SEEDS);
    snprintf(safety, sizeof safety, "%g", ARI_NOISE_SAFETY);
    const char *const metadata[] = {"format",
                                    "pt",
                                    "anyrank.allows",
                                    ari_sensitivity_name(sensitivity),
                                    "anyrank.seeds",
                                    seeds,
                                    "anyrank.safety",
                                    safety,
                                    "anyrank.reference",
                                    hash};
    return ari_st_write(path, tensor, count, metadata, sizeof metadata / sizeof *metadata / 2);
}
