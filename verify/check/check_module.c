/* SPDX-License-Identifier: Apache-2.0 */
/* Checks a user's module under every layout against the module on one rank. */
#include "anyrank/check_module.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/context/context.h"
#include "ref/core/axis.h"
#include "ref/core/text.h"
#include "ref/layers/parts.h"
#include "ref/models/parallel_private.h"
#include "verify/check/check_module_private.h"
#include "verify/check/check_run.h"

/* --- options and input -------------------------------------------------------------------------------------------- */

ar_status ari_module_run_check(const ar_run *r, const char *name)
{
    if (r->numerics != AR_NUMERICS_EXACT || r->process)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: a module is checked in exact numerics, by ranks that are threads",
                            name);
    if (r->sim.trace || r->sim.cluster || r->sim.fault_count > 0 || r->sim.explore)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: the check of a module has no trace, virtual time, faults of the transport or schedule",
                            name);
    AR_TRY(ari_run_check_numerics(r));
    return ari_run_check_training(r, name);
}

ar_status ari_module_options_check(const ar_module_case *c, const ar_check_module_options *o)
{
    AR_TRY(ari_module_case_check(c));
    if (o->layouts == 0 || !o->parallel)
        return ar_error_set(AR_ERR_ARG, "%s: a check needs at least one layout", c->name);
    return ari_module_run_check(&o->run, c->name);
}

/* Work of a module's check. */
typedef struct module_run {
    const ar_module_case *c;
    const ar_check_module_options *o;
    ar_parallel parallel;
    const ar_batch *batch; /* [max(steps, 1)] batches */
} module_run;

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
    for (size_t k = 0; k < o->nbox; k++)
        count += ari_volume(o->box[k].extent, o->ndim);
    return count;
}

ar_status ari_reference_tap(void *user, const ar_tap_event *e)
{
    ari_reference *ref = user;
    const ar_layout *o = e->layout;
    ARI_OWNED double *full = NULL;
    size_t count = 1;
    for (int d = 0; d < o->ndim; d++)
        AR_TRY(ari_mul_size(&count, count, o->shape[d]));
    if (covered(o) != count || e->local->dtype != AR_F32)
        return ar_error_set(AR_ERR_ARG,
                            "%s%s: one rank reported %zu of %zu elements, expected all of them as fp32; the first "
                            "dimension of an activation is the samples",
                            e->name, ari_pass_suffix(e->pass), covered(o), count);
    AR_TRY(ARI_ALLOC_ZERO(&full, count, e->name));
    ari_for_each_run(e->local, o, copy_run, full);
    ari_reference_begin(ref, (int)e->step);
    return ari_reference_emit(ref, e->name, e->pass, o->ndim, o->shape, full);
}

static ari_cluster_options cluster_of(const module_run *run)
{
    const ar_check_module_options *o = run->o;
    ari_cluster_options cluster = {.run = o->run, .batch = run->batch, .module = run->c, .each_alone = !o->ddp};
    cluster.run.parallel = run->parallel;
    cluster.run.ddp = o->ddp ? *o->ddp : ar_ddp_defaults();
    return cluster;
}

static ar_status run_one_rank(ari_reference *ref, float *loss, const module_run *run)
{
    ARI_ENDED(ari_cluster_result_fini) ari_cluster_result result = {0};
    void *user[1] = {ref};
    ari_cluster_options options = cluster_of(run);
    options.run.fault = NULL;
    options.tap = ari_reference_tap;
    options.tap_user = user;
    AR_TRY(ari_cluster_run(&result, &options));
    memcpy(loss, result.loss, ari_run_steps(&run->o->run) * sizeof *loss);
    return ari_reference_finish(ref);
}

/* --- the layouts -------------------------------------------------------------------------------------------------- */

/* Replaces the explanation by a finding of lint, which says more about the layout than the numbers do. */
static ar_status explain_by_lint(ar_first_difference *f, const ar_module_case *c, const ari_cluster_options *o)
{
    ar_module_inspection *m = NULL;
    AR_TRY(ar_inspect_module(&m, c, &o->run));
    if (m->lint->count > 0)
        ari_lint_finding_text(f->hint, sizeof f->hint, &m->lint->finding[0]);
    ar_module_inspection_destroy(m);
    return AR_OK;
}

static ar_status run_layouts(ar_check_report *r, const ari_reference *ref, const module_run *base_run)
{
    const ar_check_module_options *o = base_run->o;
    AR_TRY(ARI_ALLOC_ZERO(&r->run, o->layouts, "results"));
    for (size_t i = 0; i < o->layouts; i++) {
        module_run run = *base_run;
        run.parallel = o->parallel[i];
        const ari_cluster_options options = cluster_of(&run);
        r->runs++; /* counted first, so that the report frees what a failed run has allocated */
        r->run[i].parallel = run.parallel;
        AR_TRY(ari_parallel_check_ranks(&run.parallel) == AR_OK ? ari_check_run(&r->run[i], ref, &options)
                                                                : ari_check_run_failed(&r->run[i]));
        if (r->run[i].has_difference)
            AR_TRY(explain_by_lint(&r->run[i].first, base_run->c, &options));
        if (o->explain)
            AR_TRY(ari_check_explain(&r->run[i], ref, &options));
        r->result = r->run[i].result > r->result ? r->run[i].result : r->result;
    }
    return AR_OK;
}

ar_status ar_check_module(ar_check_report **out, const ar_module_case *c, const ar_check_module_options *o)
{
    ARI_OWNED_BY(ar_check_report_destroy) ar_check_report *r = NULL;
    ARI_OWNED ar_batch *batch = NULL;
    ARI_ENDED(ari_reference_fini) ari_reference ref = {0};
    AR_TRY(ari_module_options_check(c, o));
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "a report"));
    snprintf(r->config.name, sizeof r->config.name, "%s", c->name);
    AR_TRY(ari_module_batches(&batch, c, ari_run_steps(&o->run)));
    AR_TRY(ARI_ALLOC_ZERO(&r->loss, ari_run_steps(&o->run), "losses"));
    r->fresh = true;
    r->batch = batch->batch;
    r->seq = 1;
    r->steps = (int)o->run.steps;
    r->max_error_vs_f64 = NAN;
    const module_run base_run = {.c = c, .o = o, .batch = batch};
    AR_TRY(run_one_rank(&ref, r->loss, &base_run));
    for (size_t i = 0; i < ref.count; i++)
        r->parameters += ref.tensor[i].pass == 'i' ? ref.tensor[i].count : 0;
    AR_TRY(ari_check_describe(r, &ref));
    AR_TRY(run_layouts(r, &ref, &base_run));
    ARI_GIVE(out, r);
    return AR_OK;
}

/* --- in words ----------------------------------------------------------------------------------------------------- */

static void say_difference(ari_text *w, const ar_first_difference *f)
{
    ari_say(w, "    first in step %d, %s: %s", f->step, f->pass, f->tensor);
    if (f->rank >= 0)
        ari_say(w, "%s, on rank %d %s: %.9g, on one rank %.9g; %zu of %zu elements differ",
                ARI_SHOW_INDEX(f->ndim, f->index), f->rank, ARI_SHOW_INDEX(f->local_ndim, f->local_index),
                (double)f->actual, (double)f->reference, f->elements_different, f->elements);
    ari_say(w, "\n");
    if (f->pattern[0])
        ari_say(w, "    where: %s\n", f->pattern);
    if (f->hint[0])
        ari_say(w, "    hint: %s\n", f->hint);
}

static void say_run(ari_text *w, const ar_check_run *run)
{
    char layout[96];
    ari_parallel_text(layout, sizeof layout, &run->parallel);
    if (run->result == AR_CHECK_SAME)
        ari_say(w, "  %-28s the same bits in all %zu tensors\n", layout, run->tensors);
    else if (run->result == AR_CHECK_MISPREDICTED)
        ari_say(w, "  %-28s MISPREDICTED: the same bits; %zu bytes moved, %zu in a dry run%s%s\n", layout,
                (size_t)run->bytes_counted, (size_t)run->bytes_predicted, run->memory_difference[0] ? "; " : "",
                run->memory_difference);
    else if (run->result == AR_CHECK_VACUOUS)
        ari_say(w, "  %-28s VACUOUS: the same bits, and they say nothing\n", layout);
    else if (run->result == AR_CHECK_DIFFERENT)
        ari_say(w, "  %-28s DIFFERENT: %zu of %zu tensors\n", layout, run->tensors_different, run->tensors);
    else
        ari_say(w, "  %-28s ERROR: %.*s\n", layout, (int)strcspn(run->error, "\n"), run->error);
    if (run->has_difference)
        say_difference(w, &run->first);
}

void ar_check_module_text(const ar_check_report *r, char *text, size_t cap)
{
    ari_text w = ari_plain_text_in(text, cap);
    ari_say(&w, "%s: %zu parameter%s, %zu sample%s, ", r->config.name, r->parameters, ARI_PLURAL(r->parameters),
            r->batch, ARI_PLURAL(r->batch));
    if (r->steps > 0)
        ari_say(&w, "%d training step%s (loss %.4f to %.4f)", r->steps, ARI_PLURAL(r->steps), (double)r->loss[0],
                (double)r->loss[r->steps - 1]);
    else
        ari_say(&w, "one forward and backward pass");
    ari_say(&w, "; compared bit for bit with one rank:\n");
    for (size_t i = 0; i < r->runs; i++)
        say_run(&w, &r->run[i]);
    if (r->vacuous.tensor[0])
        ari_say(&w,
                "  on one rank already, %s of step %d is %g in %zu of %zu elements: nothing after it says anything\n",
                r->vacuous.tensor, r->vacuous.step, (double)r->vacuous.value, r->vacuous.elements_empty,
                r->vacuous.elements);
    ari_say(&w, "  (One rank is this same code: whether its mathematics is right, a gradcheck tells.)\n");
}

void ari_gradcheck_module_text(const ar_gradcheck_module_report *r, char *text, size_t cap)
{
    ari_text w = ari_plain_text_in(text, cap);
    ari_say(&w, "%s: gradients against differences of the loss (%.6g), %zu sample%s, %zu direction%s: %s\n", r->name,
            (double)r->loss, r->batch, ARI_PLURAL(r->batch), r->probes, ARI_PLURAL(r->probes),
            r->ok          ? "they agree"
            : r->wrong > 0 ? "THEY DISAGREE"
                           : "TOO FEW COULD BE RESOLVED");
    for (size_t i = 0; i < r->tensors; i++) {
        const ar_gradcheck_tensor *t = &r->tensor[i];
        ari_say(&w, "  %-28s |g| up to %-9.3g error %.1e of it, %.1e allowed%s", t->name, t->largest, t->error,
                t->allowed, t->wrong > 0 ? "  WRONG" : "");
        if (t->unresolved > 0)
            ari_say(&w, "  (%zu of %zu unresolved)", t->unresolved, t->probes);
        ari_say(&w, "\n");
    }
    ari_say(&w,
            "  (Allowed is 4 times the error that the differences show to have by themselves, and fp32's rounding.)\n");
    if (!r->ok && r->wrong == 0)
        ari_say(&w,
                "  (What is unresolved moves the loss too little: larger first values, ar_param.init_range, move it "
                "more.)\n");
}

ar_status ar_prove_module(bool *right, char *text, size_t cap, const ar_module_case *c,
                          const ar_check_module_options *o)
{
    ARI_OWNED_BY(ar_check_report_destroy) ar_check_report *report = NULL;
    ARI_OWNED ar_gradcheck_module_report *gradients = NULL;
    AR_TRY(ar_check_module(&report, c, o));
    AR_TRY(ar_gradcheck_module(&gradients, c, o));
    ar_check_module_text(report, text, cap);
    const size_t used = strlen(text);
    ari_gradcheck_module_text(gradients, text + used, cap - used);
    *right = report->result == AR_CHECK_SAME && gradients->ok;
    return AR_OK;
}
