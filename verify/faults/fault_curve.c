/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "verify/faults/fault_case.h"
#include "verify/writer/dump_listener_private.h"

/* --- the trace ---------------------------------------------------------------------------------------------------- */

static bool is_first_gradient(void *user, const ar_tap_event *e)
{
    (void)user;
    return e->pass == 'g' && e->step == 1;
}

static ar_status run_steps(ari_fault_trace *t, ari_cluster_options *o, size_t documents)
{
    ARI_OWNED int64_t *ids = NULL;
    ARI_OWNED int32_t *packed = NULL;
    ARI_OWNED ar_batch *batch = NULL;
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    AR_TRY(ari_text_batches(&ids, &batch, &o->run, o->config->vocab, NULL));
    if (documents > 1)
        AR_TRY(ari_random_documents(&packed, batch, ari_run_steps(&o->run), documents, o->run.seed));
    o->batch = batch;
    const ar_status st = ari_cluster_run(&result, o);
    t->ended = st == AR_OK;
    if (t->ended)
        memcpy(t->loss, result.loss, sizeof t->loss);
    return st == AR_ERR_MEMORY ? st : AR_OK; /* any other error is the fault's effect */
}

ar_status ari_fault_trace_run(ari_fault_trace *t, const ari_fault_case *f, const char *fault, int threads,
                              uint64_t seed)
{
    const ar_dump_listener_options gradients = {.wants = is_first_gradient};
    ar_config c;
    *t = (ari_fault_trace){.ended = false};
    ari_cluster_options o = {
        .run = ari_fault_run_of(f, fault, threads, seed), .config = &c, .tap = ar_dump_listener_tap};
    o.run.steps = ARI_CURVE_STEPS;
    AR_TRY(ari_fault_case_load(&c, &o.run.plan, f));
    AR_TRY(ari_dump_ranks_create(&t->gradients, &f->run.parallel, &gradients));
    o.tap_user = t->gradients.user;
    return run_steps(t, &o, f->documents);
}

void ari_fault_trace_fini(ari_fault_trace *t)
{
    ari_dump_ranks_fini(&t->gradients);
    *t = (ari_fault_trace){.ended = false};
}

/* --- two of them -------------------------------------------------------------------------------------------------- */

/* Returns |a - b| / scale; infinity if only one of them is a number, or if scale is zero. */
static double relative(float a, float b, double scale)
{
    if (memcmp(&a, &b, sizeof a) == 0 || (isnan(a) && isnan(b)))
        return 0.0;
    const double difference = fabs((double)a - (double)b) / scale;
    return isfinite(difference) ? difference : (double)INFINITY;
}

static float value_at(const ar_dump_value *v, size_t i)
{
    return ((const float *)v->local->data.ptr)[i];
}

/* Returns the largest element of a clean gradient over all ranks that hold parts of it. */
static double largest_of(const ari_dump_ranks *clean, const char *name)
{
    ar_dump_value v;
    double largest = 0.0;
    for (int r = 0; r < clean->ranks; r++) {
        for (size_t i = 0; ari_dump_listener_at(clean->rank[r], i, &v); i++) {
            for (size_t k = 0; strcmp(v.name, name) == 0 && k < ar_tensor_count(v.local); k++)
                largest = fmax(largest, fabs((double)value_at(&v, k)));
        }
    }
    return largest;
}

static void compare_gradient(ari_fault_curve *curve, double scale, const ar_dump_value *a, const ar_dump_value *b)
{
    const size_t count = ar_tensor_count(a->local);
    double worst = count == ar_tensor_count(b->local) && strcmp(a->name, b->name) == 0 ? 0.0 : (double)INFINITY;
    for (size_t k = 0; isfinite(worst) && k < count; k++)
        worst = fmax(worst, relative(value_at(a, k), value_at(b, k), scale));
    if (worst > curve->gradient) {
        curve->gradient = worst;
        snprintf(curve->gradient_tensor, sizeof curve->gradient_tensor, "%.*s",
                 (int)(strlen(a->name) - strlen(ari_pass_suffix('g'))), a->name);
    }
}

ari_fault_curve ari_fault_curve_of(const ari_fault_trace *clean, const ari_fault_trace *faulty)
{
    ari_fault_curve curve = {0};
    for (int i = 0; i < ARI_CURVE_STEPS; i++) {
        curve.loss = fmax(curve.loss, relative(faulty->loss[i], clean->loss[i], fabs((double)clean->loss[i])));
        curve.first_losses = i < ARI_CURVE_FIRST_STEPS ? curve.loss : curve.first_losses;
    }
    for (int r = 0; r < clean->gradients.ranks; r++) {
        const ar_dump_listener *clean_rank = clean->gradients.rank[r], *rank = faulty->gradients.rank[r];
        ar_dump_value a, b;
        if (ari_dump_listener_count(clean_rank) != ari_dump_listener_count(rank))
            curve.gradient = INFINITY;
        for (size_t i = 0; ari_dump_listener_at(clean_rank, i, &a) && ari_dump_listener_at(rank, i, &b); i++)
            compare_gradient(&curve, largest_of(&clean->gradients, a.name), &a, &b);
    }
    return curve;
}
