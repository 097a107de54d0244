/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "ref/core/budget.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"
#include "run/positions.h"
#include "run/weights.h"
#include "sim/plan/bytes.h"
#include "verify/check_baseline.h"
#include "verify/check_run.h"
#include "verify/estimate.h"
#include "verify/gradcheck.h"
#include "verify/text_batch.h"

static void tell(const ar_check_options *o, double fraction, const char *what)
{
    if (o->progress)
        o->progress(o->progress_user, fraction, what);
}

ar_status ari_check_estimate(ari_estimate *e, const ar_check_options *o, const ar_config *c)
{
    const ari_estimate_case size = {.config = c,
                                    .plan = &o->plan,
                                    .batch = o->batch,
                                    .seq = o->seq,
                                    .parallel = o->parallel,
                                    .layouts = o->layouts,
                                    .steps = o->steps,
                                    .optimizer = o->optimizer,
                                    .numerics = o->numerics,
                                    .dropout = o->dropout > 0.0,
                                    .f64 = !o->skip_f64,
                                    .gradcheck = o->gradcheck};
    return ari_estimate_check(e, &size);
}

static ar_status check_sizes(const ar_check_options *o, const ar_config *c)
{
    if (o->batch == 0 || o->seq == 0)
        return ar_error_set(AR_ERR_ARG, "batch and seq are at least 1");
    if (o->steps < 0)
        return ar_error_set(AR_ERR_ARG, "%d steps: at least 0", o->steps);
    if (o->steps > 0)
        AR_TRY(ar_optimizer_check(&o->optimizer));
    if (!(o->clip >= 0.0) || isinf(o->clip))
        return ar_error_set(AR_ERR_ARG, "a largest gradient norm of %g: a finite number from 0 (no clipping)", o->clip);
    if (!(o->dropout >= 0.0 && o->dropout < 1.0))
        return ar_error_set(AR_ERR_ARG, "a dropout of %g: a probability from 0 to below 1", o->dropout);
    if ((c->learned_positions || c->rope) && o->seq > c->max_positions)
        return ar_error_set(AR_ERR_SHAPE, "--seq %zu is longer than the %zu positions of %s", o->seq, c->max_positions,
                            c->name);
    AR_TRY(ari_estimate_layers(c));
    AR_TRY(ari_check_angles(c, o->seq));
    ari_estimate e;
    AR_TRY(ari_check_estimate(&e, o, c));
    return ari_estimate_fits(&e);
}

static ar_status check_layouts(const ar_check_options *o, const ar_config *c)
{
    if (o->layouts == 0)
        return ar_error_set(AR_ERR_ARG, "a check needs at least one layout");
    for (size_t i = 0; i < o->layouts; i++)
        AR_TRY(ar_parallel_check(&o->parallel[i], c, &o->plan, o->batch, o->seq));
    return AR_OK;
}

/* How the ranks run. */
static ar_status check_cluster(const ar_check_options *o)
{
    if (o->algorithm == AR_SIM_LAST)
        return ar_error_set(AR_ERR_ARG, "collectives by the last rank to come: it would move the bytes of all, and "
                                        "those of each rank would be chance; direct or ring");
    if (o->trace && (o->layouts != 1 || o->schedules > 1))
        return ar_error_set(AR_ERR_ARG, "a trace records one run: one layout, and at most one schedule");
    if (o->fault_count > 0 && o->layouts != 1)
        return ar_error_set(AR_ERR_ARG, "faults of the transport strike one run: %zu layouts, expected one",
                            o->layouts);
    const int world = ar_parallel_world(&o->parallel[0]);
    for (size_t i = 0; i < o->fault_count; i++) {
        if (o->faults[i].rank < 0 || o->faults[i].rank >= world)
            return ar_error_set(AR_ERR_ARG, "a fault of the transport on rank %d of %d: 0 to %d", o->faults[i].rank,
                                world, world - 1);
    }
    return AR_OK;
}

static bool is_nan(float x)
{
    return x != x;
}

static bool is_not_finite(float x)
{
    return !isfinite(x);
}

/* The first tensor with such an element; NULL if there is none. */
static const ari_ref_tensor *first_with(const ari_reference *ref, bool (*is)(float))
{
    for (size_t i = 0; i < ref->count; i++) {
        for (size_t k = 0; k < ref->tensor[i].count; k++) {
            if (is(ref->tensor[i].values[k]))
                return &ref->tensor[i];
        }
    }
    return NULL;
}

static void find_nan(ar_check_report *r, const ari_reference *ref)
{
    const ari_ref_tensor *t = first_with(ref, is_nan);
    if (t)
        snprintf(r->nan_tensor, sizeof r->nan_tensor, "%s%s", t->name, ari_pass_suffix(t->pass));
}

/* A baseline that ends at its gradients' norm: says with which tensor of what it had computed that began. */
static ar_status name_not_finite(ar_status ended, const ari_reference *ref)
{
    const ari_ref_tensor *t = ended == AR_ERR_DATA ? first_with(ref, is_not_finite) : NULL;
    char message[512];
    if (!t)
        return ended;
    snprintf(message, sizeof message, "%s", ar_error_message());
    return ar_error_set(ended, "%s; the first tensor that is not finite is %s%s of step %d", message, t->name,
                        ari_pass_suffix(t->pass), t->step);
}

static ar_status describe_baseline(ar_check_report *r, const ari_reference *ref)
{
    r->tensors = ref->count;
    r->elements = ari_reference_elements(ref);
    find_nan(r, ref);
    AR_TRY(ari_reference_hash(r->weights_hash, ref, ari_reference_is_weight, NULL));
    return ari_reference_hash(r->gradients_hash, ref, ari_reference_is_gradient, NULL);
}

/* One layout, under as many schedules as are asked for: until one run is not the same. */
static ar_status run_schedules(ar_check_run *run, const ari_reference *ref, ari_cluster_options *o, uint64_t first,
                               uint64_t schedules)
{
    const uint64_t predicted = run->bytes_predicted;
    o->sim.explore = schedules > 0;
    for (uint64_t k = 0; k < (schedules > 0 ? schedules : 1); k++) {
        ari_check_run_fini(run);
        run->bytes_predicted = predicted;
        o->sim.schedule_seed = first + k;
        AR_TRY(ari_check_run(run, ref, o));
        run->schedules = schedules > 0 ? k + 1 : 0;
        run->schedule_seed = o->sim.schedule_seed;
        if (run->result != AR_CHECK_SAME)
            break;
    }
    return AR_OK;
}

static ar_status run_layouts(ar_check_report *r, const ar_check_options *o, const ari_reference *ref, ari_weights *w,
                             const ar_batch *batch)
{
    AR_TRY(ari_alloc_zero((void **)&r->run, o->layouts, sizeof *r->run, "results"));
    for (size_t i = 0; i < o->layouts; i++) {
        char what[96];
        ar_parallel_text(what, sizeof what, &o->parallel[i]);
        tell(o, (double)i / (double)o->layouts, what);
        ari_cluster_options run = {.config = &r->config,
                                   .plan = o->plan,
                                   .parallel = o->parallel[i],
                                   .batch = batch,
                                   .steps = o->steps,
                                   .optimizer = o->optimizer,
                                   .clip = o->clip,
                                   .dropout = o->dropout,
                                   .ddp = o->ddp,
                                   .seed = o->seed,
                                   .weights = w ? ari_weights_find : NULL,
                                   .weights_user = w,
                                   .numerics = o->numerics,
                                   .fault = o->fault,
                                   .threads = o->threads,
                                   .sim = {.algorithm = o->algorithm,
                                           .timeout_ns = o->timeout_ns,
                                           .verify_transfers = o->verify_transfers,
                                           .faults = o->faults,
                                           .fault_count = o->fault_count,
                                           .trace = o->trace,
                                           .cluster = o->cluster}};
        const ari_traffic_case traffic = {.config = &r->config,
                                          .plan = o->plan,
                                          .parallel = o->parallel[i],
                                          .batch = o->batch,
                                          .seq = o->seq,
                                          .steps = o->steps,
                                          .clip = o->clip > 0.0,
                                          .numerics = o->numerics,
                                          .find_unused = o->ddp.find_unused};
        r->runs++; /* first: what a failed run has allocated is the report's to free */
        AR_TRY(ari_traffic_bytes(&r->run[i].bytes_predicted, &traffic));
        AR_TRY(run_schedules(&r->run[i], ref, &run, o->schedule_seed, o->schedules));
        r->result = r->run[i].result > r->result ? r->run[i].result : r->result;
    }
    return AR_OK;
}

/* Consecutive pieces of the text, one global batch a step. Gives both; free(). */
static ar_status make_batches(int64_t **ids, ar_batch **batch, const ar_check_options *o, size_t vocab)
{
    const size_t steps = ari_check_steps(o);
    size_t rows = 0;
    AR_TRY(ari_mul_size(&rows, steps, o->batch));
    AR_TRY(ari_text_ids(ids, rows, o->seq, vocab, o->text, o->seed));
    AR_TRY(ari_alloc_zero((void **)batch, steps, sizeof **batch, "batches"));
    for (size_t i = 0; i < steps; i++)
        (*batch)[i] = (ar_batch){.batch = o->batch, .seq = o->seq, .input_ids = *ids + i * o->batch * o->seq};
    return AR_OK;
}

/* Reads the model into the report, and refuses what cannot be checked. */
static ar_status begin_report(ar_check_report *r, ari_weights **weights, const ar_check_options *o)
{
    r->batch = o->batch;
    r->seq = o->seq;
    r->steps = o->steps;
    r->numerics = o->numerics;
    AR_TRY(ar_model_path(r->folder, sizeof r->folder, o->model));
    AR_TRY(ar_config_load(&r->config, r->folder));
    AR_TRY(check_sizes(o, &r->config));
    AR_TRY(check_layouts(o, &r->config));
    AR_TRY(check_cluster(o));
    AR_TRY(ar_config_parameters(&r->config, &r->parameters));
    AR_TRY(ari_weights_load(weights, &r->config, r->folder));
    r->fresh = *weights == NULL;
    return ari_alloc_zero((void **)&r->loss, ari_check_steps(o), sizeof *r->loss, "losses");
}

static bool gradcheck_progress(void *user, double fraction)
{
    tell(user, fraction, "central differences");
    return true;
}

static ar_status run_gradcheck(ar_check_report *r, const ar_check_options *o, ari_weights *w, const ar_batch *batch)
{
    ar_check_options options = *o;
    const ari_gradcheck_case c = {.config = &r->config,
                                  .weights = w ? ari_weights_find : NULL,
                                  .weights_user = w,
                                  .batch = batch,
                                  .seed = o->seed,
                                  .threads = o->threads > 0 ? o->threads : ari_cores(),
                                  .progress = gradcheck_progress,
                                  .progress_user = &options};
    AR_TRY(ari_gradcheck(&r->gradcheck, &c));
    r->has_gradcheck = true;
    if (!r->gradcheck.ok && r->result == AR_CHECK_SAME)
        r->result = AR_CHECK_DIFFERENT;
    return AR_OK;
}

ar_status ar_check(ar_check_report **gives, const ar_check_options *o)
{
    ar_check_report *r = NULL;
    ari_reference ref = {0};
    ari_weights *weights = NULL;
    int64_t *ids = NULL;
    ar_batch *batch = NULL;
    ar_status st = AR_OK;
    AR_TRY(ari_alloc_zero((void **)&r, 1, sizeof *r, "a report"));
    AR_TRY_TO(done, st, begin_report(r, &weights, o));
    AR_TRY_TO(done, st, make_batches(&ids, &batch, o, r->config.vocab));
    const uint64_t start = ari_now_ns();
    const ari_baseline_case baseline = {.check = o, .config = &r->config, .weights = weights, .batch = batch};
    st = name_not_finite(ari_check_baseline(&ref, r->loss, &r->max_error_vs_f64, &baseline), &ref);
    if (st != AR_OK)
        goto done;
    r->baseline_seconds = (double)(ari_now_ns() - start) * 1e-9;
    AR_TRY_TO(done, st, describe_baseline(r, &ref));
    if (o->gradcheck)
        AR_TRY_TO(done, st, run_gradcheck(r, o, weights, batch));
    AR_TRY_TO(done, st, run_layouts(r, o, &ref, weights, batch));
    *gives = r;
    r = NULL;
done:
    ari_reference_fini(&ref);
    ari_weights_destroy(weights);
    free(batch);
    free(ids);
    ar_check_report_destroy(r);
    return st;
}

typedef struct listing {
    ar_check_tensor_fn emit;
    void *user;
} listing;

static ar_status list_tensor(void *user, const char *name, char pass, int ndim, const size_t *shape,
                             const double *values)
{
    const listing *l = user;
    char tensor[176];
    (void)values;
    snprintf(tensor, sizeof tensor, "%s%s", name, ari_pass_suffix(pass));
    return l->emit(l->user, tensor, ari_pass_name(pass), ndim, shape);
}

ar_status ar_check_tensors(const ar_check_options *o, ar_check_tensor_fn emit, void *user)
{
    char folder[512];
    ar_config c;
    int64_t *ids = NULL;
    double unused = 0.0;
    listing l = {emit, user};
    AR_TRY(ar_model_path(folder, sizeof folder, o->model));
    AR_TRY(ar_config_load(&c, folder));
    AR_TRY(check_sizes(o, &c));
    AR_TRY(ari_text_ids(&ids, o->batch, o->seq, c.vocab, o->text, o->seed));
    const ar_batch batch = {.batch = o->batch, .seq = o->seq, .input_ids = ids};
    /* Names and shapes are those of any weights and any arithmetic: fresh ones, and the fastest. */
    const ar_baseline_options b = {.mode = AR_MODE_F64,
                                   .seed = o->seed,
                                   .emit = list_tensor,
                                   .emit_user = &l,
                                   .dropout = o->dropout,
                                   .steps = o->steps > 0 ? 1 : 0,
                                   .optimizer = o->optimizer,
                                   .clip = o->clip};
    const ar_status st = ar_baseline_run(&c, &b, &batch, &unused);
    free(ids);
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
