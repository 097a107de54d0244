/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/check/check.h"

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
    ARI_OPTION_SECTION("layout"),
    ARI_OPTION_INT("sweep", sweep, 1, 4096, "W", "every legal layout of up to W ranks (W: 8 unless given)",
                   .otherwise = "8",
                   .details = "These are the layouts that leave no rank without a sequence, with and without sequence "
                              "parallelism, in one and in two micro-batches, and with and without ZeRO; of context "
                              "parallelism with every inner extent, and with and without zigzag. --recompute holds in "
                              "all of them, --overlap wherever there is sequence parallelism."),
    ARI_BATCH_OPTIONS(
        "8", "tokens of each (default 64, or the next number that fits the layouts; fewer if the model holds fewer)"),
    ARI_OPTION_FILE("text", o.text, "FILE", "any file, one byte one token (default: the project's own text)"),
    ARI_OPTION_SIZE("documents", o.documents, 1, 1e6, "N",
                    "cut every sequence at random into up to N packed documents (default 1: none)",
                    .details =
                        "Attention stays inside a document, positions restart in each, and its last token predicts "
                        "nothing."),
    ARI_OPTION_SIZE("padding", o.padding, 0, 1e6, "N",
                    "rows more that predict nothing, in the layouts' batch and not in the one rank's (default 0)",
                    .details = "A row's outputs, and the gradients of all, do not depend on the rows beside it."),
    ARI_OPTION_SECTION("training"),
    ARI_OPTION_INT("steps", steps, 0, 1e6, "K", "training steps; 0: one forward and backward, no update (default 3)"),
    ARI_OPTION_GROUP(ari_optimizer_options, r),
    ARI_CLIP_OPTIONS,
    ARI_OPTION_GROUP(ari_loss_options, r),
    ARI_INJECT_OPTION,
    ARI_OPTION_FLAG("gradcheck", o.gradcheck,
                    "compare the binary64 baseline's gradients with central differences, on a small batch",
                    .details = "The batch has at most 2 sequences of 16 tokens, and several step sizes are tried."),
    ARI_OPTION_FLAG("skip-f64", o.skip_f64,
                    "do not run the binary64 baseline, which only measures the exact one's error"),
    ARI_OPTION_FLAG("strict-predictions", o.strict_predictions,
                    "fail where other bytes move, or are held, than model and layout predict, or in other shapes",
                    .details = "A wrong prediction of a run whose bits are right is reported in any case; without this "
                               "option, which --inject implies, it leaves the exit status at 0."),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_FLAG(
        "memory", memory,
        "print the memory of a rank in every layout too, and whether the shapes of its parts are the layout's",
        .is_local = true),
    ARI_OPTION_FLAG("list-tensors", list_tensors,
                    "print the tensors that are compared, in the order of execution, and compare nothing",
                    .details = "Pass and shape are printed too."),
    ARI_OPTION_FOLDER("dump", o.dump, "DIR",
                      "write the baseline's tensors to DIR/reference.safetensors and each layout's ranks to a folder "
                      "of its own, for 'anyrank verify'",
                      .details =
                          "A layout's folder is named as in DIR/tp4-sp or DIR/dp2-tp2-zero1; of two models each "
                          "has a folder in DIR. Names are those of --list-tensors, with @N behind them from step "
                          "2 on. Beside them model.json says what the run was. An earlier dump is replaced, "
                          "anything else in the way is an error, and a run that ended in an error leaves no "
                          "ranks."),
    ARI_OPTION_GROUP(ari_transport_options, transport),
    ARI_OPTION_GROUP(ari_watch_options, watch),
    ARI_OPTION_STRING("schedule", schedule, "SEED",
                      "let a seed decide which rank goes on wherever one could wait; FIRST..LAST: each of these "
                      "seeds, until one run is not the same",
                      .details = "The ranks run one at a time, also where one could be overtaken: the same seed, the "
                                 "same order of events. The seed of a run that is not the same is told."),
    ARI_OPTION_STRING("net-fault", net_fault, "FAULT",
                      "let the transport do wrong once, as in 'corrupt rank 1 collective 14 transfer 0 bit 77' or "
                      "'kill rank 0 collective 3'; seed:N draws one; one run only",
                      .details = "A fault is delay, stall, kill, corrupt, duplicate, drop or slow, a rank, and one of "
                                 "the collectives that it begins, counted from 1. seed:N draws one of the first 100 "
                                 "collectives."),
    ARI_OPTION_FLAG("verify-transfers", r.run.sim.verify_transfers,
                    "compare number, length and checksum of every transfer: what the transport does wrong is an error "
                    "there",
                    .details = "The error names the ranks and the element."),
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_FOLDER "; default: llama-demo and gpt2-demo", false);

static const ari_check_values defaults = {.r = ARI_RUN_NOT_GIVEN(), .steps = -1};

const ari_args_spec ari_check_spec = {
    .command = "check",
    .summary = "Runs training steps on N simulated ranks and compares every tensor of every step with one rank's, bit "
               "for bit.",
    .example = "anyrank check gpt2-demo --tp 3 --sp --batch 4 --seq 48\n"
               "anyrank check --inject column_dx_not_reduced\n"
               "anyrank check llama-demo --tp 4 --cluster h100 --trace run.json",
    .options = options,
    .positionals = positionals,
    .size = sizeof(ari_check_values),
    .defaults = &defaults,
    .run = ari_command_check,
};
