/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/check/check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/options/subcommand.h"
#include "ref/io/file.h"
#include "verify/faults/fault_case.h"

#define ARI_VALUES ari_check_values
static const ari_option options[] = {
    ARI_OPTION_GROUP(ari_plan_options, r),
    ARI_LAYOUT_OPTIONS("tensor-parallel ranks (no layout given: a set of those that the model allows)",
                       "exact: the same bits; native: fp32, within an allowance (default exact)"),
    ARI_PRECISION_OPTION,
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_LAYOUT_DDP_OPTIONS("capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default: an eighth of "
                           "the model's gradients, so that there are several, and at most 25MiB)"),
    ARI_OPTION_INT("sweep", sweep, 1, 4096, "W", "every legal layout of up to W ranks (W: 8 unless given)",
                   .otherwise = "8",
                   .more = "These are the layouts that leave no rank without a sequence, with and without sequence "
                           "parallelism, in one and in two micro-batches, and with and without ZeRO; of context "
                           "parallelism with every inner extent, and with and without zigzag. --recompute holds in "
                           "all of them, --overlap wherever there is sequence parallelism."),
    ARI_BATCH_OPTIONS(
        "tokens of each (default 64, or the next number that fits the layouts; fewer if the model holds fewer)"),
    ARI_OPTION_FILE("text", o.text, "FILE", "any file, one byte one token (default: the project's own text)"),
    ARI_OPTION_SIZE("documents", o.documents, 1, 1e6, "N",
                    "cut every sequence at random into up to N packed documents (default 1: none)",
                    .more = "Attention stays inside a document, positions restart in each, and its last token predicts "
                            "nothing."),
    ARI_OPTION_INT("steps", steps, 0, 1e6, "K", "training steps; 0: one forward and backward, no update (default 3)"),
    ARI_OPTION_GROUP(ari_optimizer_options, r),
    ARI_CLIP_OPTIONS,
    ARI_OPTION_GROUP(ari_loss_options, r),
    ARI_INJECT_OPTION,
    ARI_OPTION_FLAG("gradcheck", o.gradcheck,
                    "compare the binary64 baseline's gradients with central differences, on a small batch",
                    .more = "The batch has at most 2 sequences of 16 tokens, and several step sizes are tried."),
    ARI_OPTION_FLAG("skip-f64", o.skip_f64,
                    "do not run the binary64 baseline, which only measures the exact one's error"),
    ARI_OPTION_FLAG("strict-predictions", o.strict_predictions,
                    "fail where other bytes move, or are held, than model and layout predict, or in other shapes",
                    .more = "A wrong prediction of a run whose bits are right is reported in any case; without this "
                            "option it leaves the exit status at 0."),
    ARI_OPTION_FLAG(
        "memory", memory,
        "print the memory of a rank in every layout too, and whether the shapes of its parts are the layout's",
        .own = true),
    ARI_OPTION_FLAG("list-tensors", list_tensors,
                    "print the tensors that are compared, in the order of execution, and compare nothing",
                    .more = "Pass and shape are printed too."),
    ARI_OPTION_FOLDER("dump", o.dump, "DIR",
                      "write the baseline's tensors to DIR/reference.safetensors and each layout's ranks to a folder "
                      "of its own, for 'anyrank verify'",
                      .more = "A layout's folder is named as in DIR/tp4-sp or DIR/dp2-tp2-zero1; of two models each "
                              "has a folder in DIR. Names are those of --list-tensors, with @N behind them from step "
                              "2 on. An earlier dump is replaced, anything else in the way is an error, and a run "
                              "that ended in an error leaves no ranks."),
    ARI_OPTION_GROUP(ari_transport_options, transport),
    ARI_OPTION_GROUP(ari_watch_options, watch),
    ARI_OPTION_STRING("schedule", schedule, "SEED",
                      "let a seed decide which rank goes on wherever one could wait; FIRST..LAST: each of these "
                      "seeds, until one run is not the same",
                      .more = "The ranks run one at a time, also where one could be overtaken: the same seed, the "
                              "same order of events. The seed of a run that is not the same is told."),
    ARI_OPTION_STRING("net-fault", net_fault, "FAULT",
                      "let the transport do wrong once, as in 'corrupt rank 1 collective 14 transfer 0 bit 77' or "
                      "'kill rank 0 collective 3'; seed:N draws one; one run only",
                      .more = "A fault is delay, stall, kill, corrupt, duplicate, drop or slow, a rank, and one of "
                              "the collectives that it begins, counted from 1. seed:N draws one of the first 100 "
                              "collectives."),
    ARI_OPTION_FLAG("verify-transfers", r.run.sim.verify_transfers,
                    "compare number, length and checksum of every transfer: what the transport does wrong is an error "
                    "there",
                    .more = "The error names the ranks and the element."),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("MODEL", FOLDER, r.run.model,
                   "a folder with a Hugging Face config.json (and weights), or a bundled name; default: llama-demo and "
                   "gpt2-demo",
                   .choices = ari_model_names),
    {0},
};

static const ari_check_values defaults = {.r = ARI_RUN_NOT_GIVEN(), .steps = -1};

const ari_args_spec ari_check_spec = {
    .command = "check",
    .summary = "Runs training steps on N simulated ranks and compares every tensor of every step with one rank's, bit "
               "for bit.",
    .example = "anyrank check\nanyrank check gpt2-demo --tp 3 --sp --batch 4 --seq 48\nanyrank check llama-demo --dp 3 "
               "--tp 2 --steps 1\nanyrank check --inject column_dx_not_reduced\n"
               "anyrank check llama-demo --tp 4 --cluster h100 --timeline run.html",
    .options = options,
    .positionals = positionals,
    .size = sizeof(ari_check_values),
    .defaults = &defaults,
    .run = ari_command_check,
};

/* Which option is about one run; NULL: none. */
static const char *of_one_run(const ari_check_values *v)
{
    return v->watch.trace ? "trace" : v->watch.timeline ? "timeline" : v->net_fault ? "net-fault" : NULL;
}

ar_status ari_check_values_check(const ari_check_values *v)
{
    ari_run_values r = v->r;
    if (ari_split_given(&r) && v->sweep > 0)
        return ar_error_set(
            AR_ERR_ARG,
            "--sweep %d takes all layouts, --tp, --dp, --cp, --sp, --zero and --micro-batches name one: give one of "
            "both",
            v->sweep);
    if (v->sweep > 0) /* is for those of its layouts that have sequence parallelism */
        r.run.parallel.overlap = 0;
    AR_TRY(ari_layout_check(&r));
    return ari_transport_check(&v->transport, v->o.dump                       ? "dump"
                                              : v->watch.cluster              ? "cluster"
                                              : v->schedule                   ? "schedule"
                                              : v->r.run.sim.verify_transfers ? "verify-transfers"
                                              : v->list_tensors               ? "list-tensors"
                                                                              : of_one_run(v));
}

ar_status ari_check_values_inject(ari_check_values *v)
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
    v->o.documents = c.documents;
    v->steps = (int)c.run.steps;
    AR_TRY(ari_args_again(&ari_check_spec, v));
    r->ddp.mode = c.run.ddp.mode;
    if (c.order != AR_MLP_COLUMN_ROW) /* else the one given stands */
        v->r.run.plan.mlp_order = c.order;
    return AR_OK;
}

ar_status ari_check_values_check_module(const ari_check_values *v)
{
    ari_check_values complete = *v;
    complete.schedule = NULL;
    complete.steps = 1;
    AR_TRY(ari_check_values_complete(&complete)); /* they are to be right ones, though nothing uses them */
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
                        ar_fault_name(v->r.run.fault), option);
}

ar_status ari_check_values_check_runs(const ari_check_values *v, size_t models)
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

/* Digits up to *end, a number that JSON holds. */
static bool parse_seed(uint64_t *seed, const char *text, const char **end)
{
    return ari_natural(seed, text, end) && *seed <= INT64_MAX;
}

/* "17" or "0..999". */
static ar_status parse_schedule(uint64_t *first, uint64_t *count, const ari_check_values *v)
{
    uint64_t last = 0;
    const char *end = v->schedule;
    bool well = parse_seed(first, v->schedule, &end);
    last = *first;
    if (well && strncmp(end, "..", 2) == 0)
        well = parse_seed(&last, end + 2, &end);
    if (!well || *end != '\0' || last < *first)
        return ar_error_set(AR_ERR_ARG, "--schedule: got '%s', expected a seed, as 17, or a range of seeds, as 0..999",
                            ARI_SHOW(v->schedule));
    *count = last - *first + 1;
    const char *option = of_one_run(v);
    if (*count > 1 && option && !v->net_fault)
        return ar_error_set(AR_ERR_ARG, "--%s records one run, and --schedule %s makes %" PRIu64 ": give one seed",
                            option, v->schedule, *count);
    return AR_OK;
}

ar_status ari_check_values_complete(ari_check_values *v)
{
    const ar_mlp_order order = v->r.run.plan.mlp_order;
    ar_run base = v->r.run;
    base.batch = base.batch ? base.batch : 8;
    base.steps = v->steps < 0 ? 3 : (uint64_t)v->steps;
    base.clip = isnan(base.clip) ? 1.0 : base.clip;
    base.dropout = isnan(base.dropout) ? 0.0 : base.dropout;
    base.seed = v->common.seed;
    base.optimizer = ar_optimizer_defaults(AR_OPTIMIZER_ADAMW);
    if (v->schedule)
        AR_TRY(parse_schedule(&base.sim.schedule_seed, &v->o.schedules, v));
    AR_TRY(ari_run_again(&v->r, &base, &ari_check_spec, v));
    v->r.run.ddp.mode = base.ddp.mode; /* a fault's case may have replaced the two that were given */
    v->r.run.plan.mlp_order = order;
    if (v->r.run.steps == 0) /* gradients only: there is nothing to clip them for */
        v->r.run.clip = 0.0;
    return AR_OK;
}
