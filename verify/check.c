/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "sim/plan/bytes.h"
#include "verify/check_run.h"
#include "verify/estimate.h"
#include "verify/positions.h"
#include "verify/text_batch.h"
#include "verify/weights.h"

static void tell(const ar_check_options *o, double fraction, const char *what)
{
    if (o->progress)
        o->progress(o->progress_user, fraction, what);
}

typedef struct phase {
    const ar_check_options *o;
    const char *what;
} phase;

static bool baseline_progress(void *user, double fraction)
{
    const phase *p = user;
    tell(p->o, fraction, p->what);
    return true;
}

ar_status ari_check_estimate(ari_estimate *e, const ar_check_options *o, const ar_config *c)
{
    ari_estimate_case size = {.config = c,
                              .plan = &o->plan,
                              .batch = o->batch,
                              .seq = o->seq,
                              .tp = 1,
                              .layouts = o->layouts,
                              .f64 = !o->skip_f64};
    for (size_t i = 0; i < o->layouts; i++)
        size.tp = o->parallel[i].tp > size.tp ? o->parallel[i].tp : size.tp;
    return ari_estimate_check(e, &size);
}

static ar_status check_sizes(const ar_check_options *o, const ar_config *c)
{
    if (o->batch == 0 || o->seq == 0)
        return ar_error_set(AR_ERR_ARG, "batch and seq are at least 1");
    if (o->layouts == 0)
        return ar_error_set(AR_ERR_ARG, "a check needs at least one layout");
    if ((c->learned_positions || c->rope) && o->seq > c->max_positions)
        return ar_error_set(AR_ERR_SHAPE, "--seq %zu is longer than the %zu positions of %s", o->seq, c->max_positions,
                            c->name);
    AR_TRY(ari_estimate_layers(c));
    AR_TRY(ari_check_angles(c, o->seq));
    for (size_t i = 0; i < o->layouts; i++)
        AR_TRY(ar_parallel_check(&o->parallel[i], c, &o->plan, o->batch, o->seq));
    ari_estimate e;
    AR_TRY(ari_check_estimate(&e, o, c));
    return ari_estimate_fits(&e);
}

/* In ari_reference.max_error_vs_f64 while no tensor has given an error; every error is larger. */
enum { NOTHING_MEASURED = -1 };
/* A gradient that is zero in exact arithmetic (a key bias) has no scale of its own: what binary64 leaves of it is
 * rounding, far below this. */
static const double NO_SCALE = 1e-12;

/* The binary64 baseline beside the exact one: worst gradient error, relative to each tensor's largest element. Infinite
 * where one of the two alone is not finite; NaN where both hold NaN, since then nothing is known of the rest. */
static ar_status measure_error(void *user, const char *name, char pass, int ndim, const size_t *shape,
                               const double *values)
{
    ari_reference *r = user;
    (void)ndim, (void)shape;
    if (pass != 'g')
        return AR_OK;
    const size_t i = ari_reference_find(r, name, pass);
    if (i == r->count)
        return ar_error_set(AR_ERR_INTERNAL, "the binary64 baseline emitted %s alone", name);
    double largest = 0.0, worst = 0.0;
    bool blind = false;
    for (size_t k = 0; k < r->tensor[i].count; k++) {
        const double wide = values[k], exact = (double)r->tensor[i].values[k];
        if (isnan(wide) && isnan(exact)) {
            blind = true;
            continue;
        }
        largest = fmax(largest, fabs(wide));
        if (wide != exact) /* fmax does not see a NaN, and infinity minus infinity is one */
            worst = fmax(worst, isfinite(wide) && isfinite(exact) ? fabs(wide - exact) : (double)INFINITY);
    }
    double relative = 0.0;
    if (worst > 0.0)
        relative = largest > NO_SCALE ? worst / largest : NOTHING_MEASURED;
    if (isinf(worst))
        r->max_error_vs_f64 = INFINITY;
    else if (blind && !isinf(r->max_error_vs_f64))
        r->max_error_vs_f64 = NAN;
    else if (relative > r->max_error_vs_f64) /* never over a NaN */
        r->max_error_vs_f64 = relative;
    return AR_OK;
}

static ar_status run_baseline(ari_reference *ref, const ar_check_options *o, const ar_config *c, ari_weights *w,
                              const ar_batch *batch)
{
    phase p = {o, "baseline, exact"};
    ar_baseline_options b = {.mode = AR_MODE_EXACT,
                             .seed = o->seed,
                             .weights = w ? ari_weights_find : NULL,
                             .weights_user = w,
                             .emit = ari_reference_emit,
                             .emit_user = ref,
                             .progress = baseline_progress,
                             .progress_user = &p};
    double loss = 0.0;
    AR_TRY(ar_baseline_run(c, &b, batch, &loss));
    ref->loss = loss;
    AR_TRY(ari_reference_finish(ref));
    ref->max_error_vs_f64 = NAN;
    if (o->skip_f64)
        return AR_OK;
    double unused = 0.0;
    p.what = "baseline, binary64";
    ref->max_error_vs_f64 = NOTHING_MEASURED;
    b.mode = AR_MODE_F64;
    b.emit = measure_error;
    AR_TRY(ar_baseline_run(c, &b, batch, &unused));
    if (ref->max_error_vs_f64 < 0.0)
        ref->max_error_vs_f64 = NAN;
    return AR_OK;
}

static void find_nan(ar_check_report *r, const ari_reference *ref)
{
    for (size_t i = 0; i < ref->count && !r->nan_tensor[0]; i++) {
        const ari_ref_tensor *t = &ref->tensor[i];
        for (size_t k = 0; k < t->count; k++) {
            if (t->values[k] == t->values[k])
                continue;
            snprintf(r->nan_tensor, sizeof r->nan_tensor, "%s%s", t->name, ari_pass_suffix(t->pass));
            break;
        }
    }
}

static ar_status describe_baseline(ar_check_report *r, const ari_reference *ref)
{
    AR_TRY(ari_alloc((void **)&r->loss, 1, sizeof *r->loss, "losses"));
    r->loss[0] = (float)ref->loss;
    r->max_error_vs_f64 = ref->max_error_vs_f64;
    r->tensors = ref->count;
    r->elements = ari_reference_elements(ref);
    find_nan(r, ref);
    AR_TRY(ari_reference_hash(r->weights_hash, ref, 'i', NULL));
    return ari_reference_hash(r->gradients_hash, ref, 'g', NULL);
}

static ar_status run_layouts(ar_check_report *r, const ar_check_options *o, const ari_reference *ref, ari_weights *w,
                             const ar_batch *batch)
{
    AR_TRY(ari_alloc_zero((void **)&r->run, o->layouts, sizeof *r->run, "results"));
    for (size_t i = 0; i < o->layouts; i++) {
        char what[64];
        ar_parallel_text(what, sizeof what, &o->parallel[i]);
        tell(o, (double)i / (double)o->layouts, what);
        const ari_cluster_options run = {.config = &r->config,
                                         .plan = o->plan,
                                         .parallel = o->parallel[i],
                                         .batch = batch,
                                         .seed = o->seed,
                                         .weights = w ? ari_weights_find : NULL,
                                         .weights_user = w,
                                         .fault = o->fault,
                                         .threads = o->threads,
                                         .sim = {.algorithm = o->algorithm, .timeout_ns = o->timeout_ns}};
        const ari_traffic_case traffic = {
            .config = &r->config, .plan = o->plan, .parallel = o->parallel[i], .batch = o->batch, .seq = o->seq};
        r->runs++; /* first: what a failed run has allocated is the report's to free */
        AR_TRY(ari_traffic_bytes(&r->run[i].bytes_predicted, &traffic));
        AR_TRY(ari_check_run(&r->run[i], ref, &run));
        r->result = r->run[i].result > r->result ? r->run[i].result : r->result;
    }
    return AR_OK;
}

ar_status ar_check(ar_check_report **gives, const ar_check_options *o)
{
    ar_check_report *r = NULL;
    ari_reference ref = {0};
    ari_weights *weights = NULL;
    int64_t *ids = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&r, 1, sizeof *r, "a report"));
    r->batch = o->batch;
    r->seq = o->seq;
    AR_TRY_TO(done, st, ar_model_path(r->folder, sizeof r->folder, o->model));
    AR_TRY_TO(done, st, ar_config_load(&r->config, r->folder));
    AR_TRY_TO(done, st, check_sizes(o, &r->config));
    AR_TRY_TO(done, st, ar_config_parameters(&r->config, &r->parameters));
    AR_TRY_TO(done, st, ari_weights_load(&weights, &r->config, r->folder));
    r->fresh = weights == NULL;
    AR_TRY_TO(done, st, ari_text_ids(&ids, o->batch, o->seq, r->config.vocab, o->text, o->seed));
    const ar_batch batch = {.batch = o->batch, .seq = o->seq, .input_ids = ids};
    const uint64_t start = ari_now_ns();
    AR_TRY_TO(done, st, run_baseline(&ref, o, &r->config, weights, &batch));
    r->baseline_seconds = (double)(ari_now_ns() - start) * 1e-9;
    AR_TRY_TO(done, st, describe_baseline(r, &ref));
    AR_TRY_TO(done, st, run_layouts(r, o, &ref, weights, &batch));
    *gives = r;
    r = NULL;
done:
    ari_reference_fini(&ref);
    ari_weights_destroy(weights);
    free(ids);
    ar_check_report_destroy(r);
    return st;
}

void ar_check_report_destroy(ar_check_report *r)
{
    if (!r)
        return;
    for (size_t i = 0; i < r->runs; i++)
        ari_check_run_fini(&r->run[i]);
    free(r->run);
    free(r->loss);
    free(r);
}

size_t ar_check_default_layouts(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, ar_parallel *p,
                                size_t cap)
{
    static const int candidates[] = {2, 3, 4, 6, 8, 12};
    size_t n = 0;
    for (size_t i = 0; i < sizeof candidates / sizeof *candidates; i++) {
        const ar_parallel one = {.tp = candidates[i]};
        if (n < cap && ar_parallel_check(&one, c, plan, batch, seq) == AR_OK)
            p[n++] = one;
    }
    ar_error_clear();
    if (n == 0 && cap > 0)
        p[n++] = (ar_parallel){.tp = 1};
    return n;
}

size_t ar_check_sweep(const ar_config *c, const ar_plan *plan, size_t batch, size_t seq, int world, ar_parallel *p,
                      size_t cap)
{
    size_t n = 0;
    for (int ranks = 1; ranks <= world; ranks++) {
        const ar_parallel one = {.tp = ranks};
        if (ar_parallel_check(&one, c, plan, batch, seq) != AR_OK)
            continue;
        if (n < cap)
            p[n] = one;
        n++;
    }
    ar_error_clear();
    return n;
}
