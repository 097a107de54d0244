/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/train_options.h"

#include <math.h>

#include "verify/estimate.h"

/* In the order of ar_optimizer_kind. */
static const char *const optimizer_names[] = {"sgd", "adam", "adamw", NULL};

static const ari_option options[] = {
    {.name = "data",
     .kind = ARI_OPT_STRING,
     .at = offsetof(ari_train_values, data),
     .value = "FILE",
     .help = "what to train on: any file, one byte one token (default: the project's own text)"},
    {.name = "steps",
     .kind = ARI_OPT_INT,
     .at = offsetof(ari_train_values, steps),
     .min = 1,
     .max = 1e9,
     .value = "K",
     .help = "training steps in all, those before a checkpoint included (default 100)"},
    {.name = "batch",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(ari_train_values, batch),
     .min = 1,
     .max = 1e9,
     .value = "B",
     .help = "sequences of a step, all ranks together (default 8)"},
    {.name = "seq",
     .kind = ARI_OPT_SIZE,
     .at = offsetof(ari_train_values, seq),
     .min = 1,
     .max = 1e9,
     .value = "S",
     .help = "tokens of each (default 64)"},
    {.name = "optimizer",
     .kind = ARI_OPT_ENUM,
     .at = offsetof(ari_train_values, optimizer),
     .choices = optimizer_names,
     .help = "what updates the weights (default adamw)"},
    {.name = "lr",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(ari_train_values, lr),
     .min = 0,
     .max = 1e6,
     .value = "X",
     .help = "learning rate (default 0.001)"},
    {.name = "clip",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(ari_train_values, clip),
     .min = 0,
     .max = 1e30,
     .value = "X",
     .help = "largest norm of all gradients together; 0: no clipping (default 1)"},
    {.name = "dropout",
     .kind = ARI_OPT_DOUBLE,
     .at = offsetof(ari_train_values, dropout),
     .min = 0,
     .max = 1,
     .value = "P",
     .help = "probability, below 1; of the config's own nothing is used (default 0)"},
    ARI_LAYOUT_OPTIONS(ari_train_values, "tensor-parallel ranks (default 1)",
                       "exact: the same bits under every layout; native: fp32 (default exact)"),
    ARI_LAYOUT_STEP_OPTIONS(ari_train_values),
    ARI_LAYOUT_DDP_OPTIONS(ari_train_values, "gradients are summed over --dp in buckets of so many bytes of fp32, as "
                                             "4096, 25MiB (default 25MiB)"),
    {.name = "stop-after",
     .kind = ARI_OPT_INT,
     .at = offsetof(ari_train_values, stop_after),
     .min = 1,
     .max = 1e9,
     .value = "N",
     .help = "end after step N, as an interruption would"},
    {.name = "plot",
     .kind = ARI_OPT_STRING,
     .at = offsetof(ari_train_values, plot),
     .value = "FILE.svg",
     .help = "draw the loss against the step"},
    {.name = "log-every",
     .kind = ARI_OPT_INT,
     .at = offsetof(ari_train_values, log_every),
     .min = 1,
     .max = 1e9,
     .value = "K",
     .help = "print every K-th step (default: each of at most 20, else 20 to 40 of them)"},
    {.name = "inject",
     .kind = ARI_OPT_STRING,
     .at = offsetof(ari_train_values, inject),
     .value = "BUG",
     .help = "switch a known mistake on ('anyrank bugs' lists them)"},
    ARI_WATCH_OPTIONS(ari_train_values),
    {0},
};

static const ari_positional positionals[] = {
    {.name = "MODEL",
     .at = offsetof(ari_train_values, model),
     .required = true,
     .help = "a folder with a Hugging Face config.json (and weights, from which training starts), or llama-demo, "
             "gpt2-demo, stack-demo"},
    {0},
};

const ari_args_spec ari_train_spec = {
    .command = "train",
    .summary = "Trains a model on text under any layout; the weights have the same bits under every one.",
    .example = "anyrank train llama-demo\nanyrank train gpt2-demo --dp 2 --tp 2 --sp --steps 200 --plot loss.svg",
    .options = options,
    .positionals = positionals,
    .common_at = offsetof(ari_train_values, common),
};

ari_train_values ari_train_values_defaults(void)
{
    const double none = (double)NAN;
    return (ari_train_values){
        .layout = ARI_LAYOUT_DEFAULTS, .optimizer = -1, .lr = none, .clip = none, .dropout = none};
}

static void set(double *value, double given)
{
    if (!isnan(given))
        *value = given;
}

static ar_status check_values(const ari_train_values *v)
{
    if (v->dropout >= 1.0)
        return ar_error_set(AR_ERR_ARG, "--dropout %g drops everything: give a probability from 0 to below 1",
                            v->dropout);
    return ari_layout_check(&v->layout);
}

ar_status ari_train_values_options(ar_training_options *o, const ari_train_values *v)
{
    char folder[512];
    ar_config c;
    *o = ar_training_defaults();
    AR_TRY(check_values(v));
    o->model = v->model;
    o->data = v->data;
    if (v->steps > 0)
        o->steps = (uint64_t)v->steps;
    o->stop_after = (uint64_t)v->stop_after;
    o->batch = v->batch ? v->batch : o->batch;
    o->seq = v->seq ? v->seq : o->seq;
    if (v->optimizer >= 0)
        o->optimizer = ar_optimizer_defaults((ar_optimizer_kind)v->optimizer);
    set(&o->optimizer.lr, v->lr);
    set(&o->clip, v->clip);
    set(&o->dropout, v->dropout);
    o->parallel = ari_layout_parallel(&v->layout);
    o->ddp = ari_layout_ddp(&v->layout, AR_BUCKET_BYTES);
    o->numerics = (ar_numerics)v->layout.numerics;
    o->seed = v->common.seed;
    if (v->inject)
        AR_TRY(ar_fault_parse(&o->fault, v->inject));
    o->algorithm = ari_layout_algorithm(&v->layout);
    o->threads = v->common.threads;
    o->timeout_ns = ari_layout_timeout_ns(&v->layout);
    AR_TRY(ar_model_path(folder, sizeof folder, o->model));
    AR_TRY(ar_config_load(&c, folder));
    AR_TRY(ari_estimate_layers(&c));
    return ari_layout_plan(&v->layout, c.arch, &o->plan);
}
