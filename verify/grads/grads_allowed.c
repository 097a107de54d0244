/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/grads_allowed.h"

#include "ref/core/budget.h"

static ari_sensitivity_case case_of(const ar_grads_options *o)
{
    return (ari_sensitivity_case){.of = o->sensitivity_of,
                                  .threads = o->run.threads > 0 ? o->run.threads : ari_cores()};
}

static ar_status run_model(void *user, const ar_baseline_options *o)
{
    const ari_cluster_options *run = user;
    double loss = 0.0;
    return ar_baseline_run(run->config, o, run->batch, &loss);
}

ar_status ari_grads_allow_model(ari_reference *ref, const ari_cluster_options *run, const ar_grads_options *o)
{
    ari_cluster_options copy = *run;
    ari_sensitivity_case c = case_of(o);
    c.run = run_model;
    c.user = &copy;
    c.options.seed = o->run.seed;
    c.options.weights = run->weights;
    c.options.weights_user = run->weights_user;
    return ari_sensitivity_allow(ref, &c);
}

static ar_status run_block(void *user, const ar_baseline_options *o)
{
    return ari_block_case_baseline(user, o);
}

ar_status ari_grads_allow_block(ari_reference *ref, const ari_block_case *b, const ar_grads_options *o)
{
    ari_block_case copy = *b;
    ari_sensitivity_case c = case_of(o);
    c.run = run_block;
    c.user = &copy;
    return ari_sensitivity_allow(ref, &c);
}

static ar_status add_wanted(ari_allowances *all, const ari_reference *ref, const ari_gatherer *wanted)
{
    for (size_t i = 0; i < wanted->count; i++) {
        const ari_gathered *w = &wanted->list[i];
        if (!w->tap[0]) /* under its own name, which the reference has */
            continue;
        const size_t at = ari_reference_find(ref, w->tap, w->pass);
        if (at == ref->count)
            return ar_error_set(AR_ERR_INTERNAL, "the baseline did not emit %s%s", w->tap, ari_pass_suffix(w->pass));
        AR_TRY(ari_allowances_add(all, w->full.name, ref->tensor[at].allowed));
    }
    return AR_OK;
}

ar_status ari_grads_allowed_write(const ari_reference *ref, const ari_gatherer *wanted, const char *path,
                                  ar_sensitivity of, const char *hash)
{
    ari_allowances all = {.list = NULL};
    ar_status st = add_wanted(&all, ref, wanted);
    if (st == AR_OK)
        st = ari_allowances_add_all(&all, ref);
    if (st == AR_OK)
        st = ari_allowances_write(&all, path, of, hash);
    ari_allowances_fini(&all);
    return st;
}
