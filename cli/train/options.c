/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/train/train.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* In the order of ar_data_format. */

static const char *const loss_scale_names[] = {"none", "dynamic", NULL};

static const char *const storage_names[] = {"f32", "bf16", NULL};

#define ARI_VALUES ari_train_values
static const ari_option options[] = {
    ARI_OPTION_SECTION("data"),
    ARI_OPTION_FILE("data", o.data, "FILE",
                    "what to train on: any file, one byte one token, or a token file (default: the project's own text)",
                    .details = "Bytes need a vocabulary of 256, or of the largest byte in the file and one."),
    ARI_OPTION_ENUM("data-format", o.data_format, ari_data_format_names,
                    "of --data; auto: by its name (.u16, .u32, .safetensors, .jsonl; else bytes)",
                    .details = "Files of u16 and u32 are little-endian, without a header; a safetensors file has a "
                               "tensor input_ids or tokens, a line of jsonl a text or input_ids."),
    ARI_OPTION_FLAG("in-order", o.in_order,
                    "take the data's windows as they come, in place of shuffling them anew in every epoch"),
    ARI_OPTION_FLAG("pack", o.packing.enabled,
                    "the data is documents, one after another: attention, positions and predictions keep to each",
                    .details =
                        "Samples run on over the ends of documents. A document that does not end in its sample goes "
                        "on in the next one as a document of its own. Documents are the lines of a jsonl file, the "
                        "rows of a safetensors file, and what --separator ends."),
    ARI_OPTION_SIZE("separator", o.packing.separator, 0, 9e18, "ID",
                    "with --pack: the token that ends a document, its last one; of text 10 is the end of a line, 0 "
                    "the byte 0"),
    ARI_OPTION_SECTION("training"),
    ARI_OPTION_INT("steps", steps, 1, 1e9, "K",
                   "training steps since the start of the run, also with --resume (default 100)"),
    ARI_BATCH_OPTIONS("8", "tokens of each (default 64)"),
    ARI_OPTION_GROUP(ari_optimizer_options, r),
    ARI_CLIP_OPTIONS,
    ARI_OPTION_GROUP(ari_loss_options, r),
    ARI_OPTION_GROUP(ari_plan_options, r),
    ARI_LAYOUT_OPTIONS("tensor-parallel ranks (default 1)",
                       "exact: the same bits under every layout; native: fp32 (default exact)"),
    ARI_PRECISION_OPTION,
    ARI_OPTION_ENUM("storage", storage, storage_names,
                    "with --numerics native: of the matrices and their gradients alone; bf16: the optimizer keeps fp32 "
                    "ones (default: bf16 with --precision bf16, else f32)"),
    ARI_OPTION_STRING("loss-scale", loss_scale, "S",
                      "with --numerics native: gradients are taken of S times the loss; dynamic: S begins at 65536 "
                      "and falls where they overflow; none: of the loss (default none)",
                      .choices = loss_scale_names,
                      .details = "Gradients are divided by S before they are used. A step whose gradients overflow "
                                 "changes no weight."),
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_LAYOUT_DDP_OPTIONS("gradients are summed over --dp in buckets of so many bytes of fp32, as "
                           "4096, 25MiB (default 25MiB)"),
    ARI_OPTION_SECTION("checkpoints"),
    ARI_OPTION_FOLDER("save", o.save, "DIR", "write a checkpoint there at the end, and where the run is interrupted",
                      .details =
                          "It is DIR/step-NNNNNNNN, with weights in Hugging Face's layout, the optimizer's "
                          "state, and all that going on needs; the link DIR/latest names the newest. Each "
                          "appears whole or not at all. A folder that holds another run's checkpoints is refused."),
    ARI_OPTION_INT("save-every", save_every, 1, 1e9, "K", "with --save: one every K steps, too"),
    ARI_OPTION_SIZE("keep", o.max_checkpoints, 1, 1e9, "N",
                    "with --save: only the newest N checkpoints stay (default: all)"),
    ARI_OPTION_FOLDER("resume", resume, "DIR",
                      "go on with a checkpoint, under any layout: data, steps, optimizer and the like are the "
                      "checkpoint's where they are not given",
                      .details =
                          "Of a folder of checkpoints the newest is taken. Other data, another --batch, --seq or "
                          "--seed are refused; another learning rate, schedule, clip, dropout, loss or optimizer "
                          "is taken, with a note that from here on the weights are not those of a run that was "
                          "never interrupted. Layout, buckets and --save are free."),
    ARI_OPTION_INT("stop-after", stop_after, 1, 1e9, "N",
                   "end after step N, as an interruption would, but with exit status 0",
                   .details = "That is for jobs whose time is limited."),
    ARI_OPTION_SECTION("checks"),
    ARI_OPTION_INT("verify-every", verify_every, 1, 1e9, "K",
                   "verify in every K-th step, before the update, that all gradients are there and finite, and that "
                   "ranks which hold copies of weights, gradients and optimizer state hold the same (default: never)",
                   .details = "What is wrong ends the run, by parameter and ranks, before a weight has changed."),
    ARI_OPTION_SECTION("output"),
    ARI_OPTION_INT("log-every", log_every, 1, 1e9, "K", "print every K-th step (default: at most 40 lines in all)",
                   .is_local = true),
    ARI_INJECT_OPTION,
    ARI_OPTION_GROUP(ari_transport_options, transport),
    ARI_OPTION_GROUP(ari_watch_options, watch),
    /* Replaces the common --seed option, which stays in the list, because --resume needs to know whether a seed was
     * given. */
    ARI_OPTION_SIZE("seed", r.run.seed, 0, 9e18, NULL, NULL),
    {0},
};

ARI_MODEL_POSITIONAL(ARI_MODEL_FOLDER "; with --resume the checkpoint's own unless given", false);

static const ari_train_values defaults = {
    .o.data_format = (ar_data_format)-1,
    .o.packing.separator = AR_NO_SEPARATOR,
    .r = ARI_RUN_NOT_GIVEN(.run.numerics = (ar_numerics)-1, .run.seed = ARI_NOT_GIVEN),
    .storage = -1};

const ari_args_spec ari_train_spec = {
    .command = "train",
    .summary = "Trains a model on text, with the same bits under every layout.",
    .example = "anyrank train llama-demo --data book.txt --dp 2 --zero 1 --save run --save-every 50\n"
               "anyrank train --resume run --tp 4 --save run",
    .options = options,
    .positionals = positionals,
    .size = sizeof(ari_train_values),
    .defaults = &defaults,
    .run = ari_command_train,
    .mismatch_differs = true,
};
