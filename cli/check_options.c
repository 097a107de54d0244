/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/check.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "cli/command.h"
#include "ref/io/file.h"
#include "verify/faults/fault_case.h"

#define ARI_VALUES ari_check_values
static const ari_option options[] = {
    ARI_LAYOUT_OPTIONS("tensor-parallel ranks (no layout given: a set of those that the model allows)",
                       "exact: the same bits; native: fp32, within an allowance (default exact)"),
    ARI_PRECISION_OPTION,
    ARI_OPTION_GROUP(ari_step_layout_options, layout),
    ARI_LAYOUT_DDP_OPTIONS("capacity of a bucket, as 4096 or 25MiB; 0: one for each parameter (default: an eighth of "
                           "the model's gradients, so that there are several, and at most 25MiB)"),
    ARI_OPTION_INT("sweep", sweep, 1, 4096, "W", "every legal layout of up to W ranks (W: 8 unless given)",
                   .otherwise = "8",
                   .more = "These are the layouts that leave no rank without a sequence, with and without sequence "
                           "parallelism, in one and in two micro-batches, and with and without ZeRO."),
    ARI_BATCH_OPTIONS(
        "tokens of each (default 64, or the next number that fits the layouts; fewer if the model holds fewer)"),
    ARI_OPTION_FILE("text", text, "FILE", "any file, one byte one token (default: the project's own text)"),
    ARI_OPTION_INT("steps", steps, 0, 1e6, "K", "training steps; 0: one forward and backward, no update (default 3)"),
    ARI_OPTION_GROUP(ari_optimizer_options, optimizer),
    ARI_CLIP_OPTIONS,
    ARI_INJECT_OPTION,
    ARI_OPTION_FLAG("gradcheck", gradcheck,
                    "compare the binary64 baseline's gradients with central differences, on a small batch",
                    .more = "The batch has at most 2 sequences of 16 tokens, and several step sizes are tried."),
    ARI_OPTION_FLAG("skip-f64", skip_f64,
                    "do not run the binary64 baseline, which only measures the exact one's error"),
    ARI_OPTION_FLAG("memory", memory, "print the memory of a rank in every layout too", .own = true),
    ARI_OPTION_FLAG("list-tensors", list_tensors,
                    "print the tensors that are compared, in the order of execution, and compare nothing",
                    .more = "Pass and shape are printed too."),
    ARI_OPTION_FOLDER("dump", dump, "DIR",
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
    ARI_OPTION_FLAG("verify-transfers", verify_transfers,
                    "compare number, length and checksum of every transfer: what the transport does wrong is an error "
                    "there",
                    .more = "The error names the ranks and the element."),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("MODEL", FOLDER, model,
                   "a folder with a Hugging Face config.json (and weights), or llama-demo, gpt2-demo, stack-demo; "
                   "default: llama-demo and gpt2-demo",
                   .choices = ari_model_names),
    {0},
};

static const ari_check_values defaults = {.layout = ARI_LAYOUT_DEFAULTS,
                                          .steps = -1,
                                          .optimizer = ARI_OPTIMIZER_NOT_GIVEN,
                                          .clip = (double)NAN,
                                          .dropout = (double)NAN};

const ari_args_spec ari_check_spec = {
    .command = "check",
    .summary = "Runs training steps on N simulated ranks and compares every tensor of every step with one rank's, bit "
               "for bit.",
    .example = "anyrank check\nanyrank check gpt2-demo --tp 3 --sp --batch 4 --seq 48\nanyrank check llama-demo --dp 3 "
               "--tp 2 --steps 1\nanyrank check --inject column_dx_not_reduced\n"
               "anyrank check llama-demo --tp 4 --cluster h100 --timeline run.html",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(ari_check_values, common),
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
    if (ari_layout_given(&v->layout) && v->sweep > 0)
        return ar_error_set(
            AR_ERR_ARG,
            "--sweep %d takes all layouts, --tp, --dp, --sp, --zero and --micro-batches name one: give one of both",
            v->sweep);
    AR_TRY(ari_dropout_check(v->dropout));
    AR_TRY(ari_layout_check(&v->layout));
    return ari_transport_check(&v->transport, v->dump               ? "dump"
                                              : v->watch.cluster    ? "cluster"
                                              : v->schedule         ? "schedule"
                                              : v->verify_transfers ? "verify-transfers"
                                              : v->list_tensors     ? "list-tensors"
                                                                    : of_one_run(v));
}

void ari_check_values_inject(ari_check_values *v, ar_fault fault)
{
    const ari_fault_case c = ari_fault_case_of(fault);
    v->model = c.run.model;
    v->layout.tp = c.run.parallel.tp;
    v->layout.dp = c.run.parallel.dp;
    v->layout.micro_batches = c.run.parallel.micro_batches;
    v->layout.sp = c.run.parallel.sp;
    v->layout.forward_first = c.run.parallel.forward_first;
    v->layout.zero = c.run.parallel.zero;
    v->layout.keep_gathered = c.run.parallel.keep_gathered;
    v->layout.bucket_mode = (int)c.run.ddp.mode;
    v->layout.find_unused = v->layout.find_unused || c.run.ddp.find_unused;
    if (v->layout.bucket_bytes == ARI_LAYOUT_NOT_GIVEN)
        v->layout.bucket_bytes = c.run.ddp.bucket_bytes;
    if (c.order != AR_MLP_COLUMN_ROW) /* else the one given stands */
        v->layout.mlp_order = (int)c.order;
    v->batch = v->batch ? v->batch : c.run.batch;
    v->seq = v->seq ? v->seq : c.run.seq;
    v->steps = v->steps < 0 ? (int)c.run.steps : v->steps;
    v->clip = isnan(v->clip) ? c.run.clip : v->clip;
    v->dropout = isnan(v->dropout) ? c.run.dropout : v->dropout;
}

ar_status ari_check_values_check_module(const ari_check_values *v, ar_fault fault)
{
    ar_optimizer_options unused;
    AR_TRY(ari_optimizer_values_options(&unused, &v->optimizer, 1));
    const char *option = v->list_tensors          ? "list-tensors"
                         : v->dump                ? "dump"
                         : v->watch.cluster       ? "cluster"
                         : v->schedule            ? "schedule"
                         : v->gradcheck           ? "gradcheck"
                         : v->layout.device       ? "device"
                         : v->transport.transport ? "transport"
                                                  : of_one_run(v);
    if (!option)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "--inject %s shows in a module, not in a model, and --%s is about a model's run",
                        ar_fault_name(fault), option);
}

ar_status ari_check_values_check_runs(const ari_check_values *v, size_t models)
{
    const char *option = of_one_run(v);
    if (v->list_tensors && v->dump)
        return ar_error_set(AR_ERR_ARG,
                            "--dump writes what a run computes, and --list-tensors runs none: give one of both");
    if (!option)
        return AR_OK;
    if (v->list_tensors)
        return ar_error_set(AR_ERR_ARG, "--%s is about a run, and --list-tensors runs none: give one of both", option);
    if (models > 1 && !ari_layout_given(&v->layout))
        return ar_error_set(
            AR_ERR_ARG,
            "--%s is about one run, and this check has several: name a MODEL and a layout, as in 'llama-demo --tp 4'",
            option);
    if (models > 1)
        return ar_error_set(AR_ERR_ARG, "--%s is about one run, and this check has one of each of two models: name one",
                            option);
    if (!ari_layout_given(&v->layout))
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

ar_status ari_check_values_options(ar_check_options *o, const ari_check_values *v, ar_fault fault)
{
    *o = (ar_check_options){.run.batch = v->batch ? v->batch : 8,
                            .run.steps = v->steps < 0 ? 3 : (uint64_t)v->steps,
                            .run.clip = ari_or_else(v->clip, 1.0),
                            .run.dropout = ari_or_else(v->dropout, 0.0),
                            .run.seed = v->common.seed,
                            .run.fault = fault,
                            .run.sim.verify_transfers = v->verify_transfers,
                            .gradcheck = v->gradcheck,
                            .text = v->text,
                            .skip_f64 = v->skip_f64};
    ari_layout_run(&o->run, &v->layout, &v->common);
    if (o->run.steps == 0) /* gradients only: there is nothing to clip them for */
        o->run.clip = 0.0;
    if (v->schedule)
        AR_TRY(parse_schedule(&o->run.sim.schedule_seed, &o->schedules, v));
    /* Nothing is updated in 0 steps; the options are still to be right ones. */
    return ari_optimizer_values_options(&o->run.optimizer, &v->optimizer, o->run.steps > 0 ? o->run.steps : 1);
}
