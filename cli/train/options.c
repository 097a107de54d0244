/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/train/train.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/options/subcommand.h"
#include "ref/core/out.h"
#include "run/train_rank.h"

/* In the order of ar_data_format. */
static const char *const data_format_names[] = {"auto", "bytes", "u16", "u32", "safetensors", "jsonl", NULL};

static const char *const loss_scale_names[] = {"none", "dynamic", NULL};

static const char *const storage_names[] = {"f32", "bf16", NULL};

#define ARI_VALUES ari_train_values
static const ari_option options[] = {
    ARI_OPTION_FILE("data", o.data, "FILE",
                    "what to train on: any file, one byte one token, or a token file (default: the project's own text)",
                    .more = "Bytes need a vocabulary of 256, or of the largest byte in the file and one."),
    ARI_OPTION_ENUM("data-format", o.data_format, data_format_names,
                    "of --data; auto: by its name (.u16, .u32, .safetensors, .jsonl; else bytes)",
                    .more = "Files of u16 and u32 are little-endian, without a header; a safetensors file has a "
                            "tensor input_ids or tokens, a line of jsonl a text or input_ids."),
    ARI_OPTION_FLAG("in-order", o.in_order,
                    "take the data's windows as they come, in place of shuffling them anew in every epoch"),
    ARI_OPTION_FLAG("pack", o.packing.on,
                    "the data is documents, one after another: attention, positions and predictions keep to each",
                    .more =
                        "Samples run on over the ends of documents. A document that does not end in its sample goes "
                        "on in the next one as a document of its own. Documents are the lines of a jsonl file, the "
                        "rows of a safetensors file, and what --separator ends."),
    ARI_OPTION_SIZE("separator", o.packing.separator, 0, 9e18, "ID",
                    "with --pack: the token that ends a document, its last one; of text 10 is the end of a line, 0 "
                    "the byte 0"),
    ARI_OPTION_INT("steps", steps, 1, 1e9, "K",
                   "training steps since the start of the run, also with --resume (default 100)"),
    ARI_BATCH_OPTIONS("tokens of each (default 64)"),
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
                      .more = "Gradients are divided by S before they are used. A step whose gradients overflow "
                              "changes no weight."),
    ARI_OPTION_GROUP(ari_step_layout_options, r),
    ARI_OPTION_GROUP(ari_pipeline_options, r),
    ARI_LAYOUT_DDP_OPTIONS("gradients are summed over --dp in buckets of so many bytes of fp32, as "
                           "4096, 25MiB (default 25MiB)"),
    ARI_OPTION_FOLDER("save", o.save, "DIR", "write a checkpoint there at the end, and where the run is interrupted",
                      .more = "It is DIR/step-NNNNNNNN, with weights in Hugging Face's layout, the optimizer's "
                              "state, and all that going on needs; the link DIR/latest names the newest. Each "
                              "appears whole or not at all. A folder that holds another run's checkpoints is refused."),
    ARI_OPTION_INT("save-every", save_every, 1, 1e9, "K", "with --save: one every K steps, too"),
    ARI_OPTION_SIZE("keep", o.keep, 1, 1e9, "N", "with --save: only the newest N checkpoints stay (default: all)"),
    ARI_OPTION_FOLDER("resume", resume, "DIR",
                      "go on with a checkpoint, under any layout: data, steps, optimizer and the like are the "
                      "checkpoint's where they are not given",
                      .more = "Of a folder of checkpoints the newest is taken. Other data, another --batch, --seq or "
                              "--seed are refused; another learning rate, schedule, clip, dropout, loss or optimizer "
                              "is taken, with a note that from here on the weights are not those of a run that was "
                              "never interrupted. Layout, buckets, --save and --plot are free."),
    ARI_OPTION_INT("stop-after", stop_after, 1, 1e9, "N",
                   "end after step N, as an interruption would, but with exit status 0",
                   .more = "That is for jobs whose time is limited."),
    ARI_OPTION_INT("verify-every", verify_every, 1, 1e9, "K",
                   "verify in every K-th step, before the update, that all gradients are there and finite, and that "
                   "ranks which hold copies of weights, gradients and optimizer state hold the same (default: never)",
                   .more = "What is wrong ends the run, by parameter and ranks, before a weight has changed."),
    ARI_OPTION_FILE("plot", plot, "FILE.svg", "draw the loss against the step", .own = true, .written = true,
                    .more = "The picture has a smoothed line and the learning rate too, and is readable in light and "
                            "dark."),
    ARI_OPTION_INT("log-every", log_every, 1, 1e9, "K", "print every K-th step (default: at most 40 lines in all)",
                   .own = true),
    ARI_INJECT_OPTION,
    ARI_OPTION_GROUP(ari_transport_options, transport),
    ARI_OPTION_GROUP(ari_watch_options, watch),
    /* In place of the one that every subcommand has, which stays in the list: --resume needs to know whether it was
     * given. */
    ARI_OPTION_SIZE("seed", r.run.seed, 0, 9e18, NULL, NULL),
    {0},
};

static const ari_positional positionals[] = {
    ARI_POSITIONAL("MODEL", FOLDER, r.run.model,
                   "a folder with a Hugging Face config.json (and weights, with which training starts), or a bundled "
                   "name; with --resume the checkpoint's own unless given",
                   .choices = ari_model_names),
    {0},
};

static const ari_train_values defaults = {
    .o.data_format = (ar_data_format)-1,
    .o.packing.separator = AR_NO_SEPARATOR,
    .r = ARI_RUN_NOT_GIVEN(.run.numerics = (ar_numerics)-1, .run.seed = ARI_NOT_GIVEN),
    .storage = -1};

const ari_args_spec ari_train_spec = {
    .command = "train",
    .summary = "Trains a model on text under any layout; the weights have the same bits under every one.",
    .example =
        "anyrank train llama-demo\n"
        "anyrank train gpt2-demo --dp 2 --tp 2 --sp --steps 200 --warmup 20 --lr-schedule cosine --plot loss.svg\n"
        "anyrank train llama-demo --data book.txt --dp 2 --zero 1 --save run --save-every 50\n"
        "anyrank train --resume run --tp 4 --save run",
    .options = options,
    .positionals = positionals,
    .size = sizeof(ari_train_values),
    .defaults = &defaults,
    .run = ari_command_train,
    .mismatch_differs = true,
};

/* --- what makes no sense ------------------------------------------------------------------------------------------ */

ar_status ari_train_values_check(const ari_train_values *v)
{
    if (!v->r.run.model && !v->resume)
        return ar_error_set(AR_ERR_ARG, "give a MODEL, or --resume DIR; anyrank train --help tells what each is");
    if (!v->o.save && (v->save_every > 0 || v->o.keep > 0))
        return ar_error_set(AR_ERR_ARG, "--%s is about the checkpoints of --save: give --save DIR too",
                            v->save_every > 0 ? "save-every" : "keep");
    if ((int)v->o.data_format >= 0 && !v->o.data)
        return ar_error_set(AR_ERR_ARG, "--data-format is that of --data: give --data FILE too");
    AR_TRY(ari_transport_check(&v->transport, v->watch.cluster    ? "cluster"
                                              : v->watch.trace    ? "trace"
                                              : v->watch.timeline ? "timeline"
                                                                  : NULL));
    return ari_layout_check(&v->r);
}

/* --- the options of a run ----------------------------------------------------------------------------------------- */

static ar_status fits(ari_estimate *e, const ar_training_options *o, const ar_config *c)
{
    const uint64_t behind = o->resume ? ar_checkpoint_state_of(o->resume)->step : 0;
    const uint64_t ahead = o->run.steps > behind ? o->run.steps - behind : 1;
    ari_estimate_case size = {.run = o->run,
                              .config = c,
                              .parallel = &o->run.parallel,
                              .layouts = 1,
                              .alone = true,
                              .saves = o->save != NULL};
    size.run.steps = ahead;
    AR_TRY(ari_estimate_check(e, &size));
    return ari_estimate_fits(e);
}

/* What needs the model's config. */
static ar_status set_plan(ari_train_values *v, ari_estimate *e)
{
    ar_training_options *o = &v->o;
    char folder[512];
    ar_config c;
    AR_TRY(ari_train_config(&c, folder, sizeof folder, o));
    AR_TRY(ari_estimate_layers(&c));
    AR_TRY(ari_layout_load(&v->r, &o->run));
    AR_TRY(ar_parallel_check(&o->run.parallel, &c, &o->run.plan, o->run.batch, o->run.seq));
    return fits(e, o, &c);
}

/* "none", "dynamic", or S. */
static ar_status set_scaling(ar_training_options *o, const char *text)
{
    char *end = NULL;
    const bool dynamic = strcmp(text, "dynamic") == 0;
    o->scale_loss = strcmp(text, "none") != 0;
    if (!o->scale_loss)
        return AR_OK;
    o->scaling = ar_loss_scaling_defaults(dynamic);
    if (dynamic)
        return AR_OK;
    o->scaling.scale = strtod(text, &end);
    if (end == text || *end != '\0' || !(o->scaling.scale >= 1.0 && o->scaling.scale <= 0x1p126))
        return ar_error_set(AR_ERR_ARG, "--loss-scale: got '%s', expected none, dynamic, or a number from 1 to 2^126",
                            ARI_SHOW(text));
    return AR_OK;
}

static ar_status set_numerics(ari_train_values *v)
{
    ar_training_options *o = &v->o;
    if (v->storage >= 0)
        o->run.storage = v->storage == 1 ? AR_BF16 : AR_F32;
    AR_TRY(ari_precision_check(o->run.precision, o->run.numerics));
    if (v->loss_scale)
        AR_TRY(set_scaling(o, v->loss_scale));
    if (o->run.numerics == AR_NUMERICS_EXACT && (o->run.storage == AR_BF16 || o->scale_loss))
        return ar_error_set(AR_ERR_ARG, "--%s: exact numerics have none, give --numerics native too, or --%s",
                            o->scale_loss ? "loss-scale" : "storage bf16",
                            o->scale_loss ? "loss-scale none" : "storage f32");
    return AR_OK;
}

ar_status ari_train_values_complete(ari_train_values *v, ari_estimate *e, ar_checkpoint *c)
{
    ar_training_options *o = &v->o;
    const bool has_data = o->data != NULL;
    *o = ar_training_defaults();
    if (c)
        ar_training_resume(o, c);
    if (has_data) /* the checkpoint's format is that of its own data */
        o->data_format = AR_DATA_AUTO;
    if (v->steps > 0)
        o->run.steps = (uint64_t)v->steps;
    AR_TRY(ari_run_again(&v->r, &o->run, &ari_train_spec, v));
    if (o->packing.separator != AR_NO_SEPARATOR && !o->packing.on)
        return ar_error_set(AR_ERR_ARG, "--separator ends the documents of --pack: give --pack too");
    o->run = ari_run_of(&v->r, &v->common);
    o->save_every = (uint64_t)v->save_every;
    o->stop_after = (uint64_t)v->stop_after;
    o->verify_every = (uint64_t)v->verify_every;
    AR_TRY(set_numerics(v));
    if (v->r.inject)
        AR_TRY(ar_fault_parse(&o->run.fault, v->r.inject));
    return set_plan(v, e);
}
