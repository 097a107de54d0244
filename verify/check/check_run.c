/* SPDX-License-Identifier: Apache-2.0 */
/* Compares one layout with the reference. Values are compared where the ranks report them, and the results are combined
 * afterwards. */
#include "verify/check/check_run.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/core/context_private.h"
#include "ref/core/os/os.h"
#include "ref/core/text.h"
#include "ref/models/parallel_private.h"
#include "verify/read/dump.h"
#include "verify/run/process_run.h"
#include "verify/writer/dump_ranks.h"

typedef struct comparison {
    const ari_reference *ref;
    int ranks;
    ari_comparator *rank;       /* [ranks] */
    ari_tap_pair *tap;          /* [ranks] each rank's comparator and a further listener */
    void **user;                /* [ranks] the same as user pointers of the taps */
    ari_run_tensors run_values; /* final weights and gradients */
    ar_rank_memory *memory;     /* [ranks] */
    ari_arena arena;            /* memory of these arrays */
} comparison;

static void comparison_fini(comparison *c)
{
    for (int r = 0; c->rank && r < c->ranks; r++)
        ari_comparator_fini(&c->rank[r]);
    ari_run_tensors_fini(&c->run_values);
    ari_arena_end(&c->arena, NULL);
}

static ar_status comparison_init(comparison *c, const ari_reference *ref, int ranks, const ari_cluster_options *o)
{
    *c = (comparison){.ref = ref, .ranks = ranks};
    AR_TRY(ARI_TAKE(&c->rank, &c->arena, (size_t)ranks, "comparators"));
    AR_TRY(ARI_TAKE(&c->tap, &c->arena, (size_t)ranks, "comparators"));
    AR_TRY(ARI_TAKE(&c->user, &c->arena, (size_t)ranks, "comparators"));
    AR_TRY(ari_run_tensors_init(&c->run_values, ref, &c->arena));
    AR_TRY(ARI_TAKE(&c->memory, &c->arena, (size_t)ranks, "memory of the ranks"));
    for (int r = 0; r < ranks; r++) {
        AR_TRY(ari_comparator_init(&c->rank[r], ref, &c->run_values));
        c->tap[r] = (ari_tap_pair){.tap = {ari_comparator_tap, o->tap},
                                   .user = {&c->rank[r], o->tap_user ? o->tap_user[r] : NULL}};
        c->user[r] = &c->tap[r];
    }
    return AR_OK;
}

/* "model.layers.3.mlp" -> 3: the first number between dots. */
static int layer_of(const char *name)
{
    for (const char *p = strchr(name, '.'); p; p = strchr(p + 1, '.')) {
        char *end = NULL;
        const long n = strtol(p + 1, &end, 10);
        if (end != p + 1 && (*end == '.' || *end == '\0'))
            return (int)n;
    }
    return -1;
}

/* --- reports that do not make a whole ----------------------------------------------------------------------------- */

/* True if two ranks hold the very same boxes of the same copy. */
static bool same_part(const ari_finding *a, const ari_finding *b)
{
    if (!a->is_reported || !b->is_reported || a->layout.nbox == 0 || a->layout.nbox != b->layout.nbox ||
        a->layout.replica != b->layout.replica)
        return false;
    for (size_t k = 0; k < a->layout.nbox; k++) {
        const ar_box *x = &a->layout.box[k], *y = &b->layout.box[k];
        for (int d = 0; d < a->layout.ndim; d++) {
            if (x->global[d] != y->global[d] || x->extent[d] != y->extent[d])
                return false;
        }
    }
    return true;
}

static bool explain_same_part(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor)
{
    for (int a = 0; a < n; a++) {
        for (int b = a + 1; b < n; b++) {
            if (!same_part(&ranks[a].finding[tensor], &ranks[b].finding[tensor]))
                continue;
            snprintf(f->pattern, sizeof f->pattern, "ranks %d and %d hold the same part of it, and others hold none", a,
                     b);
            snprintf(
                f->hint, sizeof f->hint,
                "two ranks have the same place in their groups: the tensor- and data-parallel groups do not form a "
                "mesh (wrong stride or order of the ranks, or the two swapped)");
            snprintf(f->cause, sizeof f->cause, "wrong_group");
            return true;
        }
    }
    return false;
}

/* States both shapes if ranks have another shape. */
static bool explain_shape(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor)
{
    const ari_ref_tensor *t = &ranks[0].reference->tensor[tensor];
    const ar_layout *rank_layout = NULL;
    int misshapen = 0;
    for (int r = n - 1; r >= 0; r--) {
        if (!ranks[r].finding[tensor].misshapen)
            continue;
        rank_layout = &ranks[r].finding[tensor].layout;
        misshapen++;
    }
    if (!rank_layout)
        return false;
    snprintf(f->pattern, sizeof f->pattern, "on %d of %d ranks its shape is %s, on one rank %s", misshapen, n,
             ARI_SHOW_SHAPE(rank_layout->ndim, rank_layout->shape), ARI_SHOW_SHAPE(t->ndim, t->shape));
    snprintf(f->hint, sizeof f->hint,
             "a size that depends on the number of ranks, or a rank's part that was reported as the whole");
    return true;
}

void ari_explain_coverage(ar_first_difference *f, const ari_comparator *ranks, int n, size_t tensor)
{
    size_t covered = 0, count = ranks[0].reference->tensor[tensor].count;
    int broken = -1, replicas = 1, silent = 0;
    for (int r = n - 1; r >= 0; r--) {
        const ari_finding *found = &ranks[r].finding[tensor];
        covered += found->covered;
        broken = found->broken ? r : broken;
        replicas = found->is_reported ? found->layout.replicas : replicas;
        silent += !found->is_reported;
    }
    if (explain_shape(f, ranks, n, tensor))
        return;
    if (silent == n) {
        snprintf(f->pattern, sizeof f->pattern, "the ranks did not report this tensor");
        snprintf(f->hint, sizeof f->hint, "a part of the step that the baseline has was not run");
    } else if (broken >= 0) {
        snprintf(f->pattern, sizeof f->pattern, "rank %d reported it more than once, in parts that do not join",
                 broken);
        snprintf(f->hint, sizeof f->hint,
                 "a micro-batch went through it twice, or not at all, or stands in the wrong place of the batch");
    } else if (!explain_same_part(f, ranks, n, tensor)) {
        snprintf(f->pattern, sizeof f->pattern, "the ranks did not report all of it: %zu of %zu elements, in %d cop%s",
                 covered, count * (size_t)replicas, replicas, replicas == 1 ? "y" : "ies");
        snprintf(f->hint, sizeof f->hint, "%s",
                 silent > 0 ? "some ranks did not run this part of the step"
                            : "a micro-batch, or a part of the tensor, belongs to no rank or to two");
    }
}

/* --- the first difference ----------------------------------------------------------------------------------------- */

static void describe_first(ar_check_run *run, const comparison *c, size_t tensor, const ari_verdict *v)
{
    const ari_ref_tensor *t = &c->ref->tensor[tensor];
    ar_first_difference *f = &run->first;
    run->has_difference = true;
    *f = (ar_first_difference){.step = t->step, .layer = layer_of(t->name), .rank = v->rank, .elements = t->count};
    snprintf(f->pass, sizeof f->pass, "%s", ari_pass_name(t->pass));
    snprintf(f->tensor, sizeof f->tensor, "%s%s", t->name, ari_pass_suffix(t->pass));
    if (!v->complete && run->result != AR_CHECK_ERROR) /* a run that ended early may not have reported the whole
                                                          tensor */
        ari_explain_coverage(f, c->rank, c->ranks, tensor);
    if (v->rank < 0)
        return;
    f->ndim = t->ndim;
    ari_coordinates(f->index, v->first_index, t->ndim, t->shape);
    const ari_finding *owner = &c->rank[v->rank].finding[tensor];
    f->local_ndim = owner->ndim;
    ari_coordinates(f->local_index, v->first_local, owner->ndim, owner->shape);
    f->reference = t->values[v->first_index];
    f->actual = v->actual;
    f->ulp = ari_ulp_distance(f->reference, f->actual);
    f->elements_different = v->different;
}

static ar_status expect_no_more(ar_check_run *run, const comparison *c)
{
    const size_t cap = sizeof c->rank->unexpected + 32;
    for (int r = 0; r < c->ranks; r++) {
        if (!c->rank[r].unexpected[0])
            continue;
        run->result = AR_CHECK_ERROR;
        AR_TRY(ARI_ALLOC_ZERO(&run->error, cap, "a message"));
        snprintf(run->error, cap, "rank %d reported %s", r, c->rank[r].unexpected);
        break;
    }
    return AR_OK;
}

static ar_status sum_up(ar_check_run *run, const comparison *c, const ari_cluster_options *o)
{
    const size_t outputs = o->run.numerics == AR_NUMERICS_NATIVE ? c->ref->count : ari_reference_outputs(c->ref);
    for (size_t i = 0; i < c->ref->count; i++) {
        const ari_ref_tensor *t = &c->ref->tensor[i];
        const ari_verdict v = ari_verdict_of(c->rank, c->ranks, i);
        run->tensors++;
        run->elements += t->count;
        run->elements_different += v.different;
        run->max_ulp = v.max_ulp > run->max_ulp ? v.max_ulp : run->max_ulp;
        /* A tensor with a bound instead of a measured allowance may come close to the bound in any correct run, which
         * means nothing. */
        if (v.max_ratio > run->max_ratio && (!t->allowed_each || v.max_ratio > 1.0)) {
            run->max_ratio = v.max_ratio;
            snprintf(run->ratio_tensor, sizeof run->ratio_tensor, "%s%s", t->name, ari_pass_suffix(t->pass));
        }
        if (v.complete && v.different == 0) {
            if (i == outputs) /* the baseline's bits, if the same bits are expected */
                AR_TRY(ari_reference_outputs_hash(run->outputs_hash, c->ref));
            continue;
        }
        if (run->tensors_different++ == 0)
            describe_first(run, c, i, &v);
    }
    return expect_no_more(run, c);
}

/* A fault often ends the run, for example because a NaN is refused as a gradient norm. The values that the ranks
 * reported before still show where the fault began. */
static void describe_before_error(ar_check_run *run, const comparison *c)
{
    for (size_t i = 0; i < c->ref->count; i++) {
        const ari_verdict v = ari_verdict_of(c->rank, c->ranks, i);
        if (v.different > 0) {
            describe_first(run, c, i, &v);
            return;
        }
    }
}

ar_status ari_check_run_failed(ar_check_run *run)
{
    const char *message = ar_error_message();
    run->result = AR_CHECK_ERROR;
    AR_TRY(ARI_ALLOC(&run->error, strlen(message) + 1, "a message"));
    memcpy(run->error, message, strlen(message) + 1);
    return AR_OK;
}

static ar_status keep_error(ar_check_run *run, ari_cluster_result *result)
{
    run->reports = result->reports;
    return ari_check_run_failed(run);
}

static void keep_counts(ar_check_run *run, const ari_cluster_result *result, const ari_cluster_options *o)
{
    const size_t row = o->config ? o->config->hidden * ar_dtype_bytes(ari_activations_of(o->run.precision)) : 0;
    run->bytes_counted = result->bytes;
    if (o->run.numerics == AR_NUMERICS_NATIVE) /* with this run's routes */
        run->bytes_predicted += result->routed.rows * row;
    run->bytes_per_rank_max = result->bytes_per_rank_max;
    memcpy(run->calls, result->calls, sizeof run->calls);
    run->has_predicted = result->has_predicted;
    run->predicted = result->predicted;
    run->loss = result->loss;
}

/* Shares the verdict, so that every process continues in the same way. */
static ar_status share_verdict(ar_check_run *run, ar_process *p, ar_status st)
{
    AR_TRY(ari_process_agree(p, st));
    return ari_process_broadcast(p, &run->result, sizeof run->result);
}

ar_status ari_check_run(ar_check_run *run, const ari_reference *ref, const ari_cluster_options *o)
{
    comparison c;
    ari_cluster_result result = {0};
    ari_cluster_options options = *o;
    const int world = ar_parallel_world(&o->run.parallel);
    run->parallel = o->run.parallel;
    ar_status st = AR_OK, ended = AR_OK;
    AR_TRY_TO(done, st, comparison_init(&c, ref, world, o));
    options.tap = ari_tap_both;
    options.tap_user = c.user;
    options.memory = c.memory;
    ended = ari_cluster_run(&result, &options);
    if (ended == AR_ERR_MEMORY ||
        ended == AR_ERR_DEVICE) { /* a failure of the machine, which says nothing about the layout */
        const char *message = ar_error_message();
        free(result.reports);
        char layout[96];
        ari_parallel_text(layout, sizeof layout, &o->run.parallel);
        st = ar_error_set(ended, "%s: %.*s", layout, (int)strcspn(message, "\n"), message);
        goto done;
    }
    run->seconds = result.seconds;
    if (ended != AR_OK) {
        AR_TRY_TO(done, st, keep_error(run, &result));
        describe_before_error(run, &c);
        goto done;
    }
    keep_counts(run, &result, o);
    if (o->run.process)
        AR_TRY_TO(done, st, ari_comparators_collect(o->run.process, c.rank, world, &c.run_values));
    if (o->run.process && ar_process_rank(o->run.process) > 0)
        goto done; /* the report is process 0's */
    AR_TRY_TO(done, st, sum_up(run, &c, o));
    AR_TRY_TO(done, st, ari_check_memory(run, c.rank, &options, c.memory));
    AR_TRY_TO(done, st, ari_run_tensors_finish(&c.run_values, c.rank, world));
    AR_TRY_TO(done, st, ari_reference_hashes(run->weights_hash, run->gradients_hash, ref, c.run_values.values));
    /* In a module with experts, the routes of the tokens determine what is communicated. */
    const bool unpredicted = o->body || (o->module && !run->has_memory_predicted);
    const bool predicted = unpredicted || (run->bytes_counted == run->bytes_predicted &&
                                           run->memory_difference[0] == '\0' && run->shape_difference[0] == '\0');
    /* Once activations are NaN, padding rows add NaN to sums that have none without padding: 0 * NaN. */
    const bool padded = ref->padding > 0 && ref->vacuous.tensor[0] && run->has_difference && isnan(run->first.actual);
    if (run->result == AR_CHECK_SAME && run->tensors_different > 0 && !padded)
        run->result = AR_CHECK_DIFFERENT;
    else if (run->result == AR_CHECK_SAME && ref->vacuous.tensor[0])
        run->result = AR_CHECK_VACUOUS;
    else if (run->result == AR_CHECK_SAME && !predicted)
        run->result = AR_CHECK_MISPREDICTED;
done:
    comparison_fini(&c);
    ari_memory_return();
    /* After a failure of the ranks, which all have learned, no other process is left to agree with. */
    return o->run.process && ended == AR_OK ? share_verdict(run, o->run.process, st) : st;
}

ar_status ari_check_describe(ar_check_report *r, const ari_reference *ref)
{
    r->tensors = ref->count;
    r->elements = ari_reference_elements(ref);
    r->kinks = ref->kinks;
    r->vacuous = ref->vacuous;
    AR_TRY(ari_reference_outputs_hash(r->outputs_hash, ref));
    return ari_reference_hashes(r->weights_hash, r->gradients_hash, ref, NULL);
}

void ari_check_run_fini(ar_check_run *run)
{
    free(run->error);
    free(run->reports);
    free(run->loss);
    *run = (ar_check_run){0};
}

void ari_check_runs_destroy(ar_check_run *run, size_t runs)
{
    for (size_t i = 0; i < runs; i++)
        ari_check_run_fini(&run[i]);
    free(run);
}
