/* SPDX-License-Identifier: Apache-2.0 */
/* A module of somebody else's under every layout, against itself on one rank. */
#include "anyrank/check_module.h"

#include <stdio.h>
#include <stdlib.h>

#include "ref/core/boxes.h"
#include "ref/core/size.h"
#include "run/run.h"
#include "verify/check/check_run.h"
#include "verify/check/module_run.h"

static ar_status check_options(const ar_module_case *c, const ar_check_module_options *o)
{
    if (!c->name || !c->build || !c->batch)
        return ar_error_set(AR_ERR_ARG, "the check of a module needs its name, build and batch");
    if (o->layouts == 0)
        return ar_error_set(AR_ERR_ARG, "%s: a check needs at least one layout", c->name);
    AR_TRY(ari_module_run_check(&o->run, c->name));
    for (size_t i = 0; i < o->layouts; i++) {
        const ar_parallel *p = &o->parallel[i];
        if (p->tp < 0 || p->dp < 0 || p->micro_batches < 0 || p->zero < 0 || p->zero > 1)
            return ar_error_set(AR_ERR_ARG,
                                "%s: tp=%d, dp=%d, micro-batches=%d, zero=%d: extents are at least 1, zero is 0 or 1",
                                c->name, p->tp, p->dp, p->micro_batches, p->zero);
    }
    return AR_OK;
}

/* The batches of all steps. Gives; free(). */
static ar_status take_batches(ar_batch **gives, const ar_module_case *c, size_t n)
{
    AR_TRY(ari_alloc_zero((void **)gives, n, sizeof **gives, "batches"));
    for (size_t i = 0; i < n; i++) {
        ar_batch *b = &(*gives)[i];
        AR_TRY(c->batch(c->user, (int)i + 1, b));
        if (b->batch == 0 || !b->input)
            return ar_error_set(AR_ERR_ARG, "%s: the batch of step %zu has no samples, or no input", c->name, i + 1);
        if (b->batch != (*gives)[0].batch)
            return ar_error_set(AR_ERR_ARG,
                                "%s: %zu samples in step %zu, %zu in step 1, expected as many in every step", c->name,
                                b->batch, i + 1, (*gives)[0].batch);
    }
    return AR_OK;
}

/* --- the one rank ------------------------------------------------------------------------------------------------- */

static void copy_run(void *user, const ari_box_run *r)
{
    double *full = user;
    for (size_t i = 0; i < r->count; i++)
        full[r->full + i] = (double)r->local[(ptrdiff_t)i * r->stride];
}

static size_t covered(const ar_layout *o)
{
    size_t count = 0;
    for (size_t k = 0; k < o->nbox; k++) {
        size_t box = 1;
        for (int d = 0; d < o->ndim; d++)
            box *= o->box[k].extent[d];
        count += box;
    }
    return count;
}

/* An ar_tap_fn that keeps every tensor; user: the ari_reference. */
static ar_status keep(void *user, const ar_tap_event *e)
{
    ari_reference *ref = user;
    const ar_layout *o = e->layout;
    double *full = NULL;
    size_t count = 1;
    for (int d = 0; d < o->ndim; d++)
        AR_TRY(ari_mul_size(&count, count, o->shape[d]));
    if (covered(o) != count || e->local->dtype != AR_F32)
        return ar_error_set(AR_ERR_ARG,
                            "%s%s: one rank reported %zu of %zu elements, expected all of them as fp32; the first "
                            "dimension of an activation is the samples",
                            e->name, ari_pass_suffix(e->pass), covered(o), count);
    AR_TRY(ari_alloc_zero((void **)&full, count, sizeof *full, e->name));
    ari_for_each_run(e->local, o, copy_run, full);
    ari_reference_begin(ref, (int)e->step);
    const ar_status st = ari_reference_emit(ref, e->name, e->pass, o->ndim, o->shape, full);
    free(full);
    return st;
}

static ari_cluster_options cluster_of(ari_module_run *run)
{
    const ar_check_module_options *o = run->o;
    ari_cluster_options cluster = {.run = o->run, .batch = run->batch, .body = ari_module_run_rank, .body_user = run};
    cluster.run.parallel = run->parallel;
    return cluster;
}

static ar_status run_one_rank(ari_reference *ref, ari_module_run *run)
{
    ari_cluster_result result = {0};
    void *user[1] = {ref};
    ari_cluster_options options = cluster_of(run);
    options.run.fault = AR_FAULT_NONE;
    options.tap = keep;
    options.tap_user = user;
    const ar_status st = ari_cluster_run(&result, &options);
    free(result.loss);
    free(result.reports);
    AR_TRY(st);
    return ari_reference_finish(ref);
}

static ar_status describe(ar_check_module_report *r, const ari_reference *ref, const ari_module_run *one)
{
    r->parameters = one->parameters;
    r->parameter_tensors = one->parameter_tensors;
    r->tensors = ref->count;
    r->elements = ari_reference_elements(ref);
    r->vacuous = ref->vacuous;
    return ari_reference_hashes(r->weights_hash, r->gradients_hash, ref, NULL);
}

/* --- the layouts -------------------------------------------------------------------------------------------------- */

static ar_status run_layouts(ar_check_module_report *r, const ari_reference *ref, const ari_module_run *given)
{
    const ar_check_module_options *o = given->o;
    const size_t steps = ari_run_steps(&o->run);
    AR_TRY(ari_alloc_zero((void **)&r->run, o->layouts, sizeof *r->run, "results"));
    for (size_t i = 0; i < o->layouts; i++) {
        ari_module_run run = *given;
        float *loss = NULL;
        AR_TRY(ari_alloc_zero((void **)&loss, steps, sizeof *loss, "losses"));
        run.parallel = o->parallel[i];
        run.loss = loss;
        const ari_cluster_options options = cluster_of(&run);
        r->runs++; /* first: what a failed run has allocated is the report's to free */
        const ar_status st = ari_check_run(&r->run[i], ref, &options);
        free(r->run[i].loss);
        r->run[i].loss = loss;
        AR_TRY(st);
        r->result = r->run[i].result > r->result ? r->run[i].result : r->result;
    }
    return AR_OK;
}

ar_status ar_check_module(ar_check_module_report **gives, const ar_module_case *c, const ar_check_module_options *o)
{
    ar_check_module_report *r = NULL;
    ar_batch *batch = NULL;
    ari_reference ref = {0};
    ar_status st = AR_OK;
    AR_TRY(check_options(c, o));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&r, 1, sizeof *r, "a report"));
    snprintf(r->name, sizeof r->name, "%s", c->name);
    AR_TRY_TO(done, st, take_batches(&batch, c, ari_run_steps(&o->run)));
    AR_TRY_TO(done, st, ari_alloc_zero((void **)&r->loss, ari_run_steps(&o->run), sizeof *r->loss, "losses"));
    r->batch = batch->batch;
    r->steps = (int)o->run.steps;
    ari_module_run one = {.c = c, .o = o, .batch = batch, .loss = r->loss};
    AR_TRY_TO(done, st, run_one_rank(&ref, &one));
    AR_TRY_TO(done, st, describe(r, &ref, &one));
    AR_TRY_TO(done, st, run_layouts(r, &ref, &one));
    *gives = r;
    r = NULL;
done:
    ari_reference_fini(&ref);
    free(batch);
    ar_check_module_report_destroy(r);
    return st;
}

void ar_check_module_report_destroy(ar_check_module_report *r)
{
    if (!r)
        return;
    ari_check_runs_destroy(r->run, r->runs);
    free(r->loss);
    free(r);
}
