/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/check.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/core/device_private.h"
#include "ref/core/text.h"
#include "ref/core/wait.h"
#include "ref/models/model_private.h"
#include "ref/models/parallel_private.h"
#include "verify/check/check_private.h"
#include "verify/check/check_run.h"
#include "verify/gradcheck/gradcheck.h"
#include "verify/reference/sensitivity.h"
#include "verify/reference/sensitivity_private.h"
#include "verify/writer/dump_ranks.h"

static void tell_progress(const ar_check_options *o, double fraction, const char *label)
{
    if (o->progress)
        o->progress(o->progress_user, fraction, label);
}

/* Checks first that a layout can be split, so that an impossible layout is refused for that reason and not for its
 * size. */
static ar_status check_layouts(const ar_check_options *o, const ar_config *c)
{
    for (size_t i = 0; i < o->layouts; i++)
        AR_TRY(ari_parallel_check(&o->parallel[i], c, &o->run.plan, o->run.batch + o->padding, o->run.seq));
    return AR_OK;
}

ar_status ari_check_estimate(ari_estimate *e, const ar_check_options *o, const ar_config *c)
{
    ar_run padded = o->run;
    AR_TRY(ari_run_check_positions(c, o->run.seq));
    AR_TRY(ari_add_size(&padded.batch, o->run.batch, o->padding));
    AR_TRY(check_layouts(o, c));
    const ari_estimate_case size = {.run = padded,
                                    .config = c,
                                    .parallel = o->parallel,
                                    .layouts = o->layouts,
                                    .f64 = !o->skip_f64,
                                    .gradcheck = o->gradcheck,
                                    .noise_runs = o->run.numerics == AR_NUMERICS_NATIVE ? ARI_NOISE_SEEDS : 0,
                                    .bytes_per_tensor = sizeof(ari_ref_tensor),
                                    .bytes_per_finding = sizeof(ari_finding),
                                    .bytes_on_disk = ARI_REFERENCE_LARGE,
                                    .dump = o->dump ? ARI_DUMPS_ALL : ARI_DUMPS_NOTHING};
    return ari_estimate_check(e, &size);
}

/* Checks the options, and that the machine has enough memory. */
static ar_status check_run(ari_estimate *e, const ar_check_options *o, const ar_config *c)
{
    AR_TRY(ari_estimate_layers(c));
    AR_TRY(ar_run_check(&o->run, c));
    if (o->run.steps > INT_MAX)
        return ar_error_set(AR_ERR_ARG, "%" PRIu64 " steps: a check takes at most %d", o->run.steps, INT_MAX);
    if (o->run.storage == AR_BF16 && o->run.precision != AR_PRECISION_BF16)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "storage in bf16 alone: a check has allowances for precision bf16, which "
                            "stores activations and matrices so: give that");
    if (c->experts.n > 0 && o->run.numerics == AR_NUMERICS_NATIVE && o->run.precision != AR_PRECISION_F32)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s in %s: rounding so coarse chooses other experts for some tokens, and no allowance "
                            "holds for those; a check of experts is exact, or native in fp32",
                            c->name, ari_precision_name(o->run.precision));
    AR_TRY(ari_check_estimate(e, o, c));
    return ari_estimate_fits(e);
}

/* Checks that padding rows contribute nothing: neither to a loss over all rows nor to a router's counts. */
static ar_status check_padding(const ar_check_options *o, const ar_config *c)
{
    const ar_router_losses *router = &o->run.loss.router;
    const bool experts = c->experts.n > 0;
    const char *why = c->arch == AR_ARCH_STACK                              ? "a loss that is the sum of all outputs"
                      : experts && ar_config_router_losses(c, &o->run.loss) ? "losses of routers"
                      : experts && router->bias_update > 0.0                ? "the update of routers' biases"
                      : o->dump                                             ? "a dump"
                                                                            : NULL;
    if (o->padding == 0 || !why)
        return AR_OK;
    return ar_error_set(AR_ERR_UNSUPPORTED, "rows of padding would count in %s: give no padding", why);
}

/* Checks options for ranks that are processes, all of which run every layout. */
static ar_status check_processes(const ar_check_options *o)
{
    const int processes = o->run.process ? ari_process_size(o->run.process) : 0;
    char layout[96];
    for (size_t i = 0; o->run.process && i < o->layouts; i++) {
        const int world = ar_parallel_world(&o->parallel[i]);
        ari_parallel_text(layout, sizeof layout, &o->parallel[i]);
        if (world != processes)
            return ar_error_set(AR_ERR_ARG,
                                "%s: a layout of %d rank%s on %d process%s: start one process for each rank", layout,
                                world, ARI_PLURAL(world), processes, processes == 1 ? "" : "es");
    }
    if (o->run.process && (o->dump || o->schedules > 0))
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s of ranks that are processes: take threads",
                            o->dump ? "a dump" : "schedules");
    return AR_OK;
}

/* Checks how the ranks run. */
static ar_status check_cluster(const ar_check_options *o)
{
    if (o->run.sim.algorithm == AR_SIM_LAST)
        return ar_error_set(AR_ERR_ARG, "collectives by the last rank to come: it would move the bytes of all, and "
                                        "those of each rank would be chance; direct or ring");
    if (o->run.sim.trace && (o->layouts != 1 || o->schedules > 1))
        return ar_error_set(AR_ERR_ARG, "a trace records one run: one layout, and at most one schedule");
    if (o->run.sim.fault_count > 0 && o->layouts != 1)
        return ar_error_set(AR_ERR_ARG, "faults of the transport strike one run: %zu layouts, expected one",
                            o->layouts);
    const int world = ar_parallel_world(&o->parallel[0]);
    for (size_t i = 0; i < o->run.sim.fault_count; i++) {
        if (o->run.sim.faults[i].rank < 0 || o->run.sim.faults[i].rank >= world)
            return ar_error_set(AR_ERR_ARG, "a fault of the transport on rank %d of %d: 0 to %d",
                                o->run.sim.faults[i].rank, world, world - 1);
    }
    return AR_OK;
}

static ar_status describe_baseline(ar_check_report *r, ari_check_base *b)
{
    r->fresh = b->weights == NULL;
    r->max_error_vs_f64 = b->max_error_vs_f64;
    r->baseline_seconds = b->seconds;
    r->loss = b->loss;
    b->loss = NULL;
    return ari_check_describe(r, &b->ref);
}

/* Writes the allowed differences of a native run. */
static ar_status dump_allowed(const ar_check_report *r, const ar_check_options *o, const ari_check_base *b)
{
    char path[sizeof r->dump];
    AR_TRY(ari_folder_path(path, sizeof path, o->dump, ARI_DUMP_ALLOWED));
    return ari_allowances_write(&b->ref, NULL, 0, path, ari_sensitivity_of_precision(o->run.precision),
                                r->gradients_hash);
}

/* Writes the reference's file to a folder after removing any earlier dump. */
static ar_status dump_reference(ar_check_report *r, const ar_check_options *o, const ari_check_base *b)
{
    ari_dump_facts facts;
    AR_TRY(ari_folder_path(r->dump, sizeof r->dump, o->dump, ARI_DUMP_REFERENCE));
    AR_TRY(ari_dump_check_folder_clear(o->dump));
    AR_TRY(ari_dump_facts_of(&facts, &r->config, NULL, b->batch));
    ari_dump_fact(&facts, "cu_seqlens", b->documents_text);
    AR_TRY(ari_dump_reference_write(&b->ref, r->dump, &facts));
    ar_run reference_run = o->run;
    reference_run.parallel = (ar_parallel){.tp = 1};
    reference_run.numerics = AR_NUMERICS_EXACT;
    AR_TRY(ari_dump_model_write(o->dump, &r->config, &reference_run));
    return o->run.numerics == AR_NUMERICS_NATIVE ? dump_allowed(r, o, b) : AR_OK;
}

static ar_status run_layouts(ar_check_report *r, const ar_check_options *o, const ari_check_base *b)
{
    AR_TRY(ARI_ALLOC_ZERO(&r->run, o->layouts, "results"));
    for (size_t i = 0; i < o->layouts; i++) {
        char layout[96];
        ari_parallel_text(layout, sizeof layout, &o->parallel[i]);
        tell_progress(o, (double)i / (double)o->layouts, layout);
        r->runs++; /* counted first, so that the report frees what a failed run has allocated */
        AR_TRY(ari_check_base_run(&r->run[i], b, o, &o->parallel[i]));
        r->result = r->run[i].result > r->result ? r->run[i].result : r->result;
    }
    return AR_OK;
}

/* Reads the model's config into the report, and refuses what cannot be checked. */
static ar_status begin_report(ar_check_report *r, const ar_check_options *o)
{
    ari_estimate e;
    r->batch = o->run.batch;
    r->seq = o->run.seq;
    r->documents = o->documents > 1 ? o->documents : 1;
    r->padding = o->padding;
    r->steps = (int)o->run.steps;
    r->strict_predictions = o->strict_predictions;
    r->numerics = o->run.numerics;
    r->precision = o->run.precision;
    AR_TRY(ari_run_config(&r->config, r->folder, sizeof r->folder, &o->run));
    if (o->layouts == 0 || !o->parallel)
        return ar_error_set(AR_ERR_ARG, "a check needs at least one layout");
    AR_TRY(check_run(&e, o, &r->config));
    AR_TRY(check_padding(o, &r->config));
    AR_TRY(check_processes(o));
    AR_TRY(check_cluster(o));
    if (o->dump)
        AR_TRY(ari_dump_check_folder_check(o->dump, e.written));
    return ari_config_parameters(&r->config, &r->parameters);
}

static bool gradcheck_progress(void *user, double fraction)
{
    tell_progress(user, fraction, "central differences");
    return true;
}

static ar_status run_gradcheck(ar_check_report *r, const ar_check_options *o, const ari_check_base *b)
{
    ar_check_options options = *o;
    const ari_gradcheck_case c = {.config = &r->config,
                                  .weights = b->weights ? ari_weights_find : NULL,
                                  .weights_user = b->weights,
                                  .batch = b->batch,
                                  .seed = o->run.seed,
                                  .loss = o->run.loss,
                                  .threads = ari_threads(o->run.threads),
                                  .progress = gradcheck_progress,
                                  .progress_user = &options};
    AR_TRY(ari_gradcheck(&r->gradcheck, &c));
    r->has_gradcheck = true;
    if (!r->gradcheck.ok && r->result < AR_CHECK_DIFFERENT)
        r->result = AR_CHECK_DIFFERENT;
    return AR_OK;
}

ar_status ar_check(ar_check_report **out, const ar_check_options *o)
{
    ARI_OWNED_BY(ar_check_report_destroy) ar_check_report *r = NULL;
    ARI_ENDED(ari_check_base_fini) ari_check_base base = {.weights = NULL};
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "a report"));
    AR_TRY(begin_report(r, o));
    AR_TRY(ari_check_base_init(&base, o, &r->config, r->folder));
    AR_TRY(describe_baseline(r, &base));
    if (o->dump)
        AR_TRY(dump_reference(r, o, &base));
    if (o->gradcheck)
        AR_TRY(run_gradcheck(r, o, &base));
    AR_TRY(run_layouts(r, o, &base));
    ARI_GIVE(out, r);
    return AR_OK;
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

ar_status ari_check_tensors(const ar_check_options *o, ar_check_tensor_fn emit, void *user)
{
    char folder[512];
    ar_config c;
    ARI_OWNED int64_t *ids = NULL;
    double unused = 0.0;
    ari_estimate e;
    listing l = {emit, user};
    AR_TRY(ari_run_config(&c, folder, sizeof folder, &o->run));
    AR_TRY(check_run(&e, o, &c));
    AR_TRY(ari_text_ids(&ids, o->run.batch, o->run.seq, c.vocab, o->text, o->run.seed));
    const ar_batch batch = {.batch = o->run.batch, .seq = o->run.seq, .input_ids = ids};
    /* Names and shapes are the same for any weights and arithmetic, so fresh weights and the fastest arithmetic are
     * used. */
    ar_baseline_options b = ari_reference_options(&o->run, NULL);
    b.mode = AR_MODE_F64;
    b.bf16 = false;
    b.emit = list_tensor;
    b.emit_user = &l;
    b.steps = o->run.steps > 0 ? 1 : 0;
    return ar_baseline_run(&c, &b, &batch, &unused);
}

void ar_check_report_destroy(ar_check_report *r)
{
    if (!r)
        return;
    ari_check_runs_destroy(r->run, r->runs);
    free(r->loss);
    free(r);
}
