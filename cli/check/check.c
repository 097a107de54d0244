/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank check: reads options and prints rows. The library (verify/) does the comparison. */
#include "anyrank/check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

#include "cli/check/check.h"
#include "cli/shared/progress.h"
#include "cli/shared/table.h"
#include "gpu/cluster/process/process_private.h"
#include "ref/core/fault_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "sim/sim_private.h"
#include "verify/check/check_private.h"
#include "verify/faults/fault_case.h"
#include "verify/run/run.h"

enum { MOST_LAYOUTS = 4096, MOST_MODELS = 2 };

/* --- what was asked for ------------------------------------------------------------------------------------------- */

/* Returns the first given option that applies to a single run; NULL: none is given. */
static const char *of_one_run(const ari_check_values *v)
{
    return v->watch.trace ? "trace" : v->net_fault ? "net-fault" : NULL;
}

/* Refuses options that contradict each other, and with ranks as processes the options of the simulated cluster. */
static ar_status check_values(const ari_check_values *v)
{
    ari_run_values r = v->r;
    if (ari_split_given(&r) && v->sweep > 0)
        return ar_error_set(
            AR_ERR_ARG,
            "--sweep %d takes all layouts, --tp, --dp, --cp, --sp, --zero and --micro-batches name one: give one of "
            "both",
            v->sweep);
    if (v->sweep > 0) /* sp applies to those of its layouts that support it */
        r.run.parallel.overlap = 0;
    AR_TRY(ari_layout_check(&r));
    return ari_transport_check(&v->transport, v->o.dump                       ? "dump"
                                              : v->watch.cluster              ? "cluster"
                                              : v->schedule                   ? "schedule"
                                              : v->r.run.sim.verify_transfers ? "verify-transfers"
                                              : v->list_tensors               ? "list-tensors"
                                                                              : of_one_run(v));
}

/* Takes values that were not given from the case in which the injected fault has an effect. */
static ar_status take_case(ari_check_values *v)
{
    const ari_fault_case c = ari_fault_case_of(v->r.run.fault);
    ar_run *r = &v->r.run;
    r->model = c.run.model;
    r->parallel = c.run.parallel;
    r->ddp = c.run.ddp;
    r->batch = c.run.batch;
    r->seq = c.run.seq;
    r->clip = c.run.clip;
    r->dropout = c.run.dropout;
    r->loss = c.run.loss;
    v->o.documents = c.documents;
    v->steps = (int)c.run.steps;
    AR_TRY(ari_args_reparse(&ari_check_spec, v));
    r->ddp.mode = c.run.ddp.mode;
    if (c.order != AR_MLP_COLUMN_ROW) /* otherwise the given order is kept */
        v->r.run.plan.mlp_order = c.order;
    return AR_OK;
}

/* Parses the digits up to *end as a number that JSON can represent. */
static bool parse_seed(uint64_t *seed, const char *text, const char **end)
{
    return ari_natural(seed, text, end) && *seed <= INT64_MAX;
}

/* "17" or "0..999". */
static ar_status parse_schedule(uint64_t *first_seed, uint64_t *count, const ari_check_values *v)
{
    uint64_t last_seed = 0;
    const char *end = v->schedule;
    bool well = parse_seed(first_seed, v->schedule, &end);
    last_seed = *first_seed;
    if (well && strncmp(end, "..", 2) == 0)
        well = parse_seed(&last_seed, end + 2, &end);
    if (!well || *end != '\0' || last_seed < *first_seed)
        return ar_error_set(AR_ERR_ARG, "--schedule: got '%s', expected a seed, as 17, or a range of seeds, as 0..999",
                            ARI_SHOW(v->schedule));
    *count = last_seed - *first_seed + 1;
    const char *option = of_one_run(v);
    if (*count > 1 && option && !v->net_fault)
        return ar_error_set(AR_ERR_ARG, "--%s records one run, and --schedule %s makes %" PRIu64 ": give one seed",
                            option, v->schedule, *count);
    return AR_OK;
}

/* Completes values that do not depend on the model: defaults and values given as words. Errors: AR_ERR_ARG. */
static ar_status complete_values(ari_check_values *v)
{
    const ar_mlp_order order = v->r.run.plan.mlp_order;
    ar_run base = v->r.run;
    base.batch = base.batch ? base.batch : 8;
    base.steps = v->steps < 0 ? 3 : (uint64_t)v->steps;
    base.clip = isnan(base.clip) ? 1.0 : base.clip;
    base.dropout = isnan(base.dropout) ? 0.0 : base.dropout;
    base.seed = v->common.seed;
    base.optimizer =
        ar_optimizer_defaults(base.fault ? ari_fault_case_of(base.fault).run.optimizer.kind : AR_OPTIMIZER_ADAMW);
    if (v->schedule)
        AR_TRY(parse_schedule(&base.sim.schedule_seed, &v->o.schedules, v));
    AR_TRY(ari_run_reparse(&v->r, &base, &ari_check_spec, v));
    v->r.run.ddp.mode = base.ddp.mode; /* a fault's case may have replaced both given values */
    v->r.run.plan.mlp_order = order;
    if (v->r.run.steps == 0) /* only gradients: nothing to clip them for */
        v->r.run.clip = 0.0;
    return AR_OK;
}

/* Refuses options that a run of a module, which shows this fault, does not have. */
static ar_status check_for_module(const ari_check_values *v)
{
    ari_check_values complete = *v;
    complete.schedule = NULL;
    complete.steps = 1;
    AR_TRY(complete_values(&complete)); /* they must be valid, although nothing uses them */
    const char *option = v->list_tensors          ? "list-tensors"
                         : v->o.dump              ? "dump"
                         : v->watch.cluster       ? "cluster"
                         : v->schedule            ? "schedule"
                         : v->o.gradcheck         ? "gradcheck"
                         : v->r.device            ? "device"
                         : v->transport.transport ? "transport"
                                                  : of_one_run(v);
    if (!option)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "--inject %s shows in a module, not in a model, and --%s is about a model's run",
                        v->r.run.fault, option);
}

/* Refuses options for a single run if `models` and layouts make several. Call it after take_case. */
static ar_status check_for_runs(const ari_check_values *v, size_t models)
{
    const char *option = of_one_run(v);
    if (v->list_tensors && v->o.dump)
        return ar_error_set(AR_ERR_ARG,
                            "--dump writes what a run computes, and --list-tensors runs none: give one of both");
    if (!option)
        return AR_OK;
    if (v->list_tensors)
        return ar_error_set(AR_ERR_ARG, "--%s is about a run, and --list-tensors runs none: give one of both", option);
    if (models > 1 && !ari_layout_given(&v->r))
        return ar_error_set(
            AR_ERR_ARG,
            "--%s is about one run, and this check has several: name a MODEL and a layout, as in 'llama-demo --tp 4'",
            option);
    if (models > 1)
        return ar_error_set(AR_ERR_ARG, "--%s is about one run, and this check has one of each of two models: name one",
                            option);
    if (!ari_layout_given(&v->r))
        return ar_error_set(AR_ERR_ARG,
                            "--%s is about one run, and this check has one of each of several layouts: name one, as in "
                            "'--tp 4' or '--dp 2 --tp 2'",
                            option);
    return AR_OK;
}

/* --- runs --------------------------------------------------------------------------------------------------------- */

/* Keeps the default layouts that have as many ranks as there are processes. */
static ar_status keep_fitting(ar_check_options *o, ar_parallel *p)
{
    const int processes = ari_process_size(o->run.process);
    size_t layout_count = 0;
    for (size_t i = 0; i < o->layouts; i++) {
        if (ar_parallel_world(&p[i]) == processes)
            p[layout_count++] = p[i];
    }
    o->layouts = layout_count;
    if (layout_count > 0)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "%s has no default layout of %d ranks, as many as there are processes: give --tp and --dp, or "
                        "start another number of processes",
                        o->run.model, processes);
}

/* Applies requested options to every layout of a sweep: recomputation everywhere, chunks wherever there is sp. */
static void complete_sweep(ar_parallel *p, size_t n, const ar_parallel *requested)
{
    for (size_t i = 0; i < n; i++) {
        p[i].recompute = requested->recompute;
        p[i].overlap = p[i].sp ? requested->overlap : 1;
    }
}

/* Refuses a fault that matters in none of the layouts. */
static ar_status check_fault(const ar_check_options *o, const ar_config *c, const char *folder)
{
    bool read = false;
    ar_run run = o->run;
    if (!run.fault)
        return AR_OK;
    AR_TRY(ari_weights_exist(&read, folder));
    run.batch = o->padding ? 0 : run.batch; /* then the numbers of targets per rank are unknown */
    ar_status st = AR_ERR_ARG;
    for (size_t i = 0; i < o->layouts && st != AR_OK; i++) {
        run.parallel = o->parallel[i];
        st = ari_fault_case_check(&run, run.plan.mlp_order, c, !read, o->documents > 1);
    }
    return st;
}

/* Gets a model's config and all options, with the layouts in p: the given one, those of --sweep, or the default set. */
static ar_status options_of(const ari_check_values *v, const char *model, ar_config *c, ar_check_options *o,
                            ar_parallel *p)
{
    char folder[512];
    *o = v->o;
    o->explain = true;
    o->run = ari_run_of(&v->r, &v->common);
    o->run.model = model;
    const ar_status found = ari_run_config(c, folder, sizeof folder, &o->run);
    if (found == AR_ERR_NOT_FOUND && v->sweep > 0)
        return ar_error_set(found, "%s; --sweep takes a number of ranks, as --sweep 8", ar_error_message());
    AR_TRY(found);
    AR_TRY(ari_layout_load(&v->r, &o->run));
    AR_TRY(ari_estimate_layers(c));
    const bool has_layout = v->sweep == 0 && ari_layout_given(&v->r);
    p[0] = o->run.parallel;
    o->run.seq = o->run.seq ? o->run.seq : ari_check_default_seq(c, has_layout ? p : NULL);
    AR_TRY(ari_run_check_targets(&o->run, c));
    if (v->r.run.ddp.bucket_bytes == ARI_NOT_GIVEN)
        o->run.ddp.bucket_bytes = ari_check_default_bucket_bytes(c);
    if (has_layout) {
        o->layouts = 1;
    } else if (v->sweep > 0) {
        o->layouts = ari_check_sweep(c, &o->run.plan, o->run.batch, o->run.seq, v->sweep, p, MOST_LAYOUTS);
    } else {
        o->layouts = ari_check_default_layouts(c, &o->run.plan, o->run.batch, o->run.seq, p, MOST_LAYOUTS);
    }
    if (o->layouts > MOST_LAYOUTS)
        return ar_error_set(AR_ERR_ARG, "--sweep %d has %zu layouts, more than the %d of one check; use fewer ranks",
                            v->sweep, o->layouts, MOST_LAYOUTS);
    if (v->sweep > 0)
        complete_sweep(p, o->layouts, &o->run.parallel);
    o->parallel = p;
    if (o->run.process && !has_layout)
        AR_TRY(keep_fitting(o, p));
    for (size_t i = 0; i < o->layouts; i++)
        AR_TRY(ari_transport_fits(&v->common, &o->run, ar_parallel_world(&p[i])));
    return check_fault(o, c, folder);
}

/* Announces, before long work, roughly how long it will take, since the machine's speed is unknown. Unreadable input is
 * an error at this point. */
static ar_status announce(const ari_check_values *v, const ar_check_options *o, const ar_config *c)
{
    ari_estimate e;
    AR_TRY(ar_run_check(&o->run, c));
    AR_TRY(ari_check_estimate(&e, o, c));
    const bool minutes = e.seconds > 100.0;
    if (e.seconds > 30.0 && e.bytes <= e.available && !v->common.quiet && (!o->text || access(o->text, R_OK) == 0))
        fprintf(stderr, "%s: this may take up to %.0f %s, and %s of memory\n", c->name,
                minutes ? ceil(e.seconds / 60.0) : 10.0 * ceil(e.seconds / 10.0), minutes ? "minutes" : "s",
                ARI_BYTES(e.bytes));
    return AR_OK;
}

/* Returns the dump folder of a model: each of two models has its own folder within the given one. */
static ar_status dump_folder(char *path, size_t cap, const ari_check_values *v, const char *model)
{
    if (v->r.run.model) {
        snprintf(path, cap, "%s", v->o.dump);
        return strlen(v->o.dump) < cap ? AR_OK : ar_error_set(AR_ERR_ARG, "--dump: the path is too long");
    }
    AR_TRY(ari_folder_make(v->o.dump));
    const int n = snprintf(path, cap, "%s/%s", v->o.dump, model);
    return n > 0 && (size_t)n < cap ? AR_OK : ar_error_set(AR_ERR_ARG, "--dump: the path is too long");
}

/* Collectives of a step of the bundled models on two ranks are more than this, and a check waits longer. */
enum { COLLECTIVES = 100 };
#define LONGEST_NS UINT64_C(100000000)

/* Parses the transport's fault in the form of ari_sim_fault_describe, or "seed:N", which draws one for `ranks`
 * ranks. */
static ar_status parse_net_fault(ar_sim_fault *f, const char *text, int ranks)
{
    static const char drawn[] = "seed:";
    if (strncmp(text, drawn, sizeof drawn - 1) != 0) {
        AR_TRY(ari_sim_fault_parse(f, text));
    } else {
        const char *number = text + sizeof drawn - 1;
        const char *end = NULL;
        uint64_t seed = 0;
        if (!ari_natural(&seed, number, &end) || *end != '\0')
            return ar_error_set(AR_ERR_ARG, "--net-fault: got '%s', expected a seed, as in seed:7", ARI_SHOW(text));
        *f = ari_sim_fault_draw(seed, ranks, COLLECTIVES, LONGEST_NS);
    }
    if (f->rank >= ranks)
        return ar_error_set(AR_ERR_ARG, "--net-fault '%s': the layout's ranks are 0 to %d", ARI_SHOW(text), ranks - 1);
    return AR_OK;
}

/* parallel: [MOST_LAYOUTS] scratch. */
static ar_status check_with(ari_checked *result, const ari_check_values *v, const char *model, ar_check_options *o,
                            ar_parallel *parallel)
{
    ar_config c;
    char dump[560];
    AR_TRY(options_of(v, model, &c, o, parallel));
    if (v->o.dump) {
        AR_TRY(dump_folder(dump, sizeof dump, v, model));
        o->dump = dump;
    }
    if (!v->common.quiet)
        json_decref(ari_config_notes(stderr, &c));
    ari_watch_run(&o->run, result->watch);
    if (v->net_fault) {
        AR_TRY(parse_net_fault(&result->net_fault, v->net_fault, ar_parallel_world(&parallel[0])));
        result->has_net_fault = true;
        o->run.sim.faults = &result->net_fault;
        o->run.sim.fault_count = 1;
    }
    ARI_ENDED(ari_progress_end) ari_progress progress;
    char about[64];
    snprintf(about, sizeof about, "%s: ", model);
    ari_progress_begin(&progress, &v->common);
    progress.about = about;
    o->progress = ari_progress_show;
    o->progress_user = &progress;
    result->run = o->run;
    AR_TRY(announce(v, o, &c));
    return ar_check(&result->report, o);
}

static ar_status check_model(ari_checked *result, const ari_check_values *v, const char *model)
{
    ar_check_options o = v->o;
    ARI_OWNED ar_parallel *parallel = NULL;
    AR_TRY(ari_alloc((void **)&parallel, MOST_LAYOUTS, sizeof *parallel, "layouts"));
    const ar_status st = check_with(result, v, model, &o, parallel);
    result->run.plan = o.run.plan;
    return st;
}

/* Writes the record also for a run that ended with an error, because it is needed most then. */
static ar_status write_record(const ari_watch *watch, const ari_checked *c, bool text)
{
    const ar_check_report *r = c->report;
    AR_TRY(ari_watch_write(watch, r->config.name, &r->run[0].parallel, r->batch + r->padding));
    if (text)
        ari_watch_print(stdout, watch);
    return AR_OK;
}

/* Refuses a fault that changed nothing, because it proves nothing: the requirements of a fault are weaker than the
 * run's numbers. */
static ar_status check_changed(const ari_check_values *v, const ari_checked *checked, size_t n)
{
    const char *fault = v->r.run.fault;
    if (!fault || !ari_transport_reports(v->common.process) || ari_check_worst(checked, n) != AR_CHECK_SAME)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "fault %s changed nothing here%s: without MODEL and layout those are taken in which it matters",
                        fault, checked[0].report->numerics == AR_NUMERICS_NATIVE ? " by more than is allowed" : "");
}

static ar_status run_models(const ari_check_values *v, const char *const *models, size_t n, const ari_watch *watch,
                            ari_checked *checked, int *exit_code)
{
    const bool text = ari_prints_text(&v->common);
    for (size_t i = 0; i < n; i++) {
        checked[i].watch = watch;
        AR_TRY(check_model(&checked[i], v, models[i]));
        if (text)
            AR_TRY(ari_check_print(stdout, &checked[i], v->memory));
    }
    const ar_status written = watch->trace ? write_record(watch, &checked[0], text) : AR_OK;
    AR_TRY(check_changed(v, checked, n));
    if (text)
        ari_check_print_verdict(stdout, checked, n, v->r.run.fault);
    *exit_code = ar_check_passes(checked[0].report, ari_check_worst(checked, n)) ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
    if (ari_transport_reports(v->common.process))
        AR_TRY(ari_json_end(ari_check_json(checked, n), &v->common));
    return written; /* last, so that a full disk does not hide the result */
}

typedef struct listing {
    ari_table table;
    json_t *tensors;
} listing;

static ar_status add_tensor(void *user, const char *tensor, const char *pass, int ndim, const size_t *shape)
{
    listing *l = user;
    char text[96];
    size_t offset = 0;
    text[0] = '\0';
    for (int d = 0; d < ndim; d++)
        offset += (size_t)snprintf(text + offset, sizeof text - offset, "%s%zu", d ? ", " : "", shape[d]);
    ari_table_row(&l->table, "%s\t%s\t[%s]", tensor, pass, text);
    json_array_append_new(l->tensors, json_pack("{s:s, s:s, s:o}", "name", tensor, "pass", pass, "shape",
                                                ari_json_sizes(shape, (size_t)ndim)));
    return AR_OK;
}

/* Runs `--list-tensors` for a model: prints the tensors that a check with these options compares at each step, in
 * execution order; out NULL: prints nothing. Returns the same as JSON. */
static ar_status list_tensors(json_t **result, FILE *out, const ar_check_options *o)
{
    static const ari_column columns[] = {{"name", ARI_LEFT}, {"pass", ARI_LEFT}, {"shape", ARI_LEFT}};
    listing l = {.table = ARI_TABLE(columns), .tensors = json_array()};
    const ar_status listed = ari_check_tensors(o, add_tensor, &l);
    if (out && listed == AR_OK)
        fprintf(out, "\n%s, one step of %zu sequence%s of %zu token%s:\n", o->run.model, o->run.batch,
                ARI_PLURAL(o->run.batch), o->run.seq, ARI_PLURAL(o->run.seq));
    ar_status st = ari_table_end(&l.table, listed == AR_OK ? out : NULL, 2);
    st = listed == AR_OK ? st : listed;
    if (out && st == AR_OK)
        fprintf(out, "%zu tensor%s\n", json_array_size(l.tensors), ARI_PLURAL(json_array_size(l.tensors)));
    *result = json_pack("{s:o, s:I, s:I, s:o}", "name", ari_json_text(o->run.model), "batch", (json_int_t)o->run.batch,
                        "seq", (json_int_t)o->run.seq, "tensors", l.tensors);
    if (*result == NULL && st == AR_OK)
        st = ar_error_set(AR_ERR_MEMORY, "no memory for the list of tensors");
    return st;
}

static ar_status list_models(ari_check_values *v, const char *const *models, size_t n)
{
    v->r.run.fault = NULL;
    AR_TRY(complete_values(v));
    ARI_OWNED ar_parallel *parallel = NULL;
    AR_TRY(ari_alloc((void **)&parallel, MOST_LAYOUTS, sizeof *parallel, "layouts"));
    json_auto_t *models_json = json_array();
    for (size_t i = 0; i < n; i++) {
        ar_check_options o;
        ar_config c;
        json_t *model_json = NULL;
        ar_status st = options_of(v, models[i], &c, &o, parallel);
        if (st == AR_OK)
            st = list_tensors(&model_json, ari_prints_text(&v->common) ? stdout : NULL, &o);
        ari_layout_unload(&o.run);
        AR_TRY(st);
        json_array_append_new(models_json, model_json);
    }
    return ari_json_end(ari_json_merge(ari_json_begin("check"), json_pack("{s:O}", "models", models_json)), &v->common);
}

/* Runs a fault that no model shows in the module that does. */
static ar_status run_module(const ari_check_values *v, int *exit_code)
{
    const char *fault = v->r.run.fault;
    const ari_fault_case f = ari_fault_case_of(fault);
    ari_watch watch = {0};
    ar_check_report *r = NULL;
    char text[4096];
    AR_TRY(check_for_module(v));
    const ari_fault_bases options = {.threads = v->common.threads, .seed = v->common.seed, .explain = true};
    AR_TRY(ari_fault_module_check(&r, &f, fault, &options));
    const ari_checked checked = {.report = r,
                                 .run.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW),
                                 .run.clip = f.run.clip,
                                 .run.ddp = f.run.ddp,
                                 .module = true,
                                 .watch = &watch};
    if (ari_prints_text(&v->common)) {
        ar_check_module_text(r, text, sizeof text);
        printf("%s", text);
        ari_check_print_verdict(stdout, &checked, 1, fault);
    }
    *exit_code = ari_check_worst(&checked, 1) == AR_CHECK_SAME ? ARI_EXIT_SAME : ARI_EXIT_DIFFERENT;
    const ar_status st = ari_json_end(ari_check_json(&checked, 1), &v->common);
    ar_check_report_destroy(r);
    return st;
}

ar_status ari_command_check(void *values, int *exit_code)
{
    ari_check_values *v = values;
    ar_run *run = &v->r.run;
    AR_TRY(check_values(v));
    run->fault = v->r.inject;
    AR_TRY(ari_fault_known(run->fault));
    v->o.strict_predictions = v->o.strict_predictions || v->r.inject; /* some faults show only in the bytes */
    if (v->r.inject && !run->model && !ari_layout_given(&v->r) && v->sweep == 0) {
        if (ari_fault_case_of(run->fault).module)
            return run_module(v, exit_code);
        AR_TRY(take_case(v));
    }
    const char *models[MOST_MODELS] = {run->model ? run->model : "llama-demo", "gpt2-demo"};
    const size_t n = run->model ? 1 : MOST_MODELS;
    AR_TRY(check_for_runs(v, n));
    if (v->list_tensors)
        return list_models(v, models, n);
    ari_checked checked[MOST_MODELS] = {0};
    ari_watch watch = {0};
    AR_TRY(ari_transport_begin(&v->common, &v->transport, &ari_check_spec, v->r.timeout, true));
    ar_status st = ari_watch_begin(&watch, &v->watch);
    if (st == AR_OK)
        st = complete_values(v);
    if (st == AR_OK)
        st = run_models(v, models, n, &watch, checked, exit_code);
    for (size_t i = 0; i < n; i++) {
        ar_check_report_destroy(checked[i].report);
        ari_layout_unload(&checked[i].run);
    }
    ari_watch_fini(&watch);
    return st;
}
