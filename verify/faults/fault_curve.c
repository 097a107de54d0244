/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/faults/fault_curve.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/boxes.h"
#include "ref/core/size.h"
#include "run/cluster_run.h"
#include "verify/check/text_batch.h"

/* --- the trace ---------------------------------------------------------------------------------------------------- */

typedef struct filling {
    ari_traced_gradient *gradient;
    size_t at;
} filling;

static void count_run(void *user, const ari_box_run *r)
{
    *(size_t *)user += r->count;
}

static void copy_run(void *user, const ari_box_run *r)
{
    filling *f = user;
    for (size_t i = 0; i < r->count; i++)
        f->gradient->values[f->at++] = r->local[(ptrdiff_t)i * r->stride];
}

/* Keeps the first step's gradients of this rank, in the order in which they come. */
static ar_status trace_tap(void *user, const ar_tap_event *e)
{
    ari_traced_rank *rank = user;
    if (e->pass != 'g' || e->step != 1)
        return AR_OK;
    AR_TRY(ari_grow(&rank->gradient, &rank->capacity, rank->count, sizeof *rank->gradient, "traced gradients"));
    ari_traced_gradient *g = &rank->gradient[rank->count];
    *g = (ari_traced_gradient){.count = 0};
    snprintf(g->name, sizeof g->name, "%s", e->name);
    ari_for_each_run(e->local, e->layout, count_run, &g->count);
    AR_TRY(ari_alloc((void **)&g->values, g->count, sizeof *g->values, "a traced gradient"));
    rank->count++;
    filling f = {.gradient = g};
    ari_for_each_run(e->local, e->layout, copy_run, &f);
    return AR_OK;
}

static ar_status trace_batches(ari_fault_trace *t, ari_cluster_options *o, const ari_fault_case *f, void **users)
{
    int64_t *ids = NULL;
    ar_batch batch[ARI_CURVE_STEPS];
    ari_cluster_result result = {0};
    AR_TRY(ari_text_ids(&ids, f->run.batch * ARI_CURVE_STEPS, f->run.seq, o->config->vocab, NULL, o->run.seed));
    for (size_t i = 0; i < ARI_CURVE_STEPS; i++)
        batch[i] =
            (ar_batch){.batch = f->run.batch, .seq = f->run.seq, .input_ids = ids + i * f->run.batch * f->run.seq};
    for (int r = 0; r < t->ranks; r++)
        users[r] = &t->rank[r];
    o->batch = batch;
    o->tap_user = users;
    const ar_status st = ari_cluster_run(&result, o);
    t->ended = st == AR_OK;
    if (t->ended)
        memcpy(t->loss, result.loss, sizeof t->loss);
    free(result.loss);
    free(result.reports);
    free(ids);
    return st == AR_ERR_MEMORY ? st : AR_OK; /* any other is what the fault did */
}

ar_status ari_fault_trace_run(ari_fault_trace *t, const ari_fault_case *f, ar_fault fault, int threads, uint64_t seed)
{
    ar_config c;
    void **users = NULL;
    *t = (ari_fault_trace){.ranks = ar_parallel_world(&f->run.parallel)};
    ari_cluster_options o = {.run = f->run, .config = &c, .tap = trace_tap};
    o.run.steps = ARI_CURVE_STEPS;
    o.run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    o.run.seed = seed;
    o.run.fault = fault;
    o.run.threads = threads;
    AR_TRY(ari_fault_case_load(&c, &o.run.plan, f));
    AR_TRY(ari_alloc_zero((void **)&t->rank, (size_t)t->ranks, sizeof *t->rank, "traces of the ranks"));
    AR_TRY(ari_alloc((void **)&users, (size_t)t->ranks, sizeof *users, "traces of the ranks"));
    const ar_status st = trace_batches(t, &o, f, users);
    free(users);
    return st;
}

void ari_fault_trace_fini(ari_fault_trace *t)
{
    for (int r = 0; t->rank && r < t->ranks; r++) {
        for (size_t i = 0; i < t->rank[r].count; i++)
            free(t->rank[r].gradient[i].values);
        free(t->rank[r].gradient);
    }
    free(t->rank);
    *t = (ari_fault_trace){0};
}

/* --- two of them -------------------------------------------------------------------------------------------------- */

/* |a - b| / scale; infinite where only one of them is a number, or where there is no scale. */
static double relative(float a, float b, double scale)
{
    if (memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)))
        return 0.0;
    const double difference = fabs((double)a - (double)b) / scale;
    return isfinite(difference) ? difference : (double)INFINITY;
}

/* The largest element of a clean gradient, over all ranks that hold a part of it. */
static double largest_of(const ari_fault_trace *clean, const char *name)
{
    double largest = 0.0;
    for (int r = 0; r < clean->ranks; r++) {
        for (size_t i = 0; i < clean->rank[r].count; i++) {
            const ari_traced_gradient *g = &clean->rank[r].gradient[i];
            for (size_t k = 0; strcmp(g->name, name) == 0 && k < g->count; k++)
                largest = fmax(largest, fabs((double)g->values[k]));
        }
    }
    return largest;
}

static void compare_gradient(ari_fault_curve *curve, const ari_fault_trace *clean, const ari_traced_gradient *a,
                             const ari_traced_gradient *b)
{
    double worst = a->count == b->count && strcmp(a->name, b->name) == 0 ? 0.0 : (double)INFINITY;
    const double scale = largest_of(clean, a->name);
    for (size_t k = 0; isfinite(worst) && k < a->count; k++)
        worst = fmax(worst, relative(a->values[k], b->values[k], scale));
    if (worst > curve->gradient) {
        curve->gradient = worst;
        snprintf(curve->gradient_tensor, sizeof curve->gradient_tensor, "%s", a->name);
    }
}

ari_fault_curve ari_fault_curve_of(const ari_fault_trace *clean, const ari_fault_trace *faulty)
{
    ari_fault_curve curve = {0};
    for (int i = 0; i < ARI_CURVE_STEPS; i++) {
        curve.loss = fmax(curve.loss, relative(faulty->loss[i], clean->loss[i], fabs((double)clean->loss[i])));
        curve.first_losses = i < ARI_CURVE_FIRST_STEPS ? curve.loss : curve.first_losses;
    }
    for (int r = 0; r < clean->ranks; r++) {
        const ari_traced_rank *a = &clean->rank[r], *b = &faulty->rank[r];
        if (a->count != b->count)
            curve.gradient = INFINITY;
        for (size_t i = 0; i < a->count && i < b->count; i++)
            compare_gradient(&curve, clean, &a->gradient[i], &b->gradient[i]);
    }
    return curve;
}
