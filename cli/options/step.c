/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/config.h"
#include "cli/options/run.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/batch_private.h"
#include "ref/core/context_private.h"
#include "ref/core/device_private.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "ref/train/optimizer_private.h"

#define ARI_VALUES ari_run_values
const ari_option ari_optimizer_options[] = {
    ARI_OPTION_SECTION("training"),
    ARI_OPTION_ENUM("optimizer", run.optimizer.kind, ari_optimizer_names, "what updates the weights (default adamw)",
                    .details =
                        "muon updates matrices as a whole, q, k, v, gate, up and each expert apart, and by adamw "
                        "embeddings, head, routers, norms and biases."),
    ARI_OPTION_DOUBLE("lr", run.optimizer.lr, 0, 1e6, "X", "learning rate (default 0.001)"),
    ARI_OPTION_ENUM("lr-schedule", run.optimizer.schedule, ari_lr_schedule_names,
                    "how the learning rate goes on after the warm-up; cosine: down to --min-lr in the last step "
                    "(default constant)",
                    .details = "The cosine is half a wave."),
    ARI_OPTION_SIZE("warmup", run.optimizer.warmup_steps, 0, 1e9, "STEPS",
                    "steps in which the learning rate rises linearly to --lr (default 0)"),
    ARI_OPTION_DOUBLE("min-lr", run.optimizer.min_lr, 0, 1e6, "X", "learning rate at the end of a cosine (default 0)"),
    ARI_OPTION_DOUBLE("momentum", run.optimizer.momentum, 0, 1, "X", "of sgd and muon, below 1 (default 0; muon 0.95)"),
    ARI_OPTION_FLAG("nesterov", run.optimizer.nesterov, "of sgd with --momentum: Nesterov's variant"),
    ARI_OPTION_FLAG("match-rms", run.optimizer.match_rms,
                    "of muon: --lr times 0.2*sqrt(max(rows, columns)) instead of sqrt(max(1, rows/columns))",
                    .details = "It is torch.optim.Muon's match_rms_adamw."),
    ARI_MUON_SHARDS_OPTION(run.optimizer.shards),
    ARI_OPTION_DOUBLE("qk-clip", run.optimizer.qk_clip, 0, 1e30, "X",
                      "of muon: scale a head's rows of q and k after a step in which one of its logits was above X",
                      .details = "It is MuonClip's: of the heads that share keys, sqrt(X / their largest logit)."),
    ARI_OPTION_STRING("betas", betas, "B1,B2", "of adam and adamw (default 0.9,0.999)"),
    ARI_OPTION_DOUBLE(
        "weight-decay", run.optimizer.weight_decay, 0, 1e6, "X",
        "added to the gradient by sgd and adam, decoupled in adamw and muon (default 0; adamw 0.01, muon 0.1)"),
    ARI_OPTION_ENUM("decay", run.optimizer.decay, ari_decay_names,
                    "which parameters decay: all, or matrices only, not norms and biases (default all)",
                    .details = "Matrices are the parameters of two dimensions."),
    ARI_OPTION_STRINGS("group", groups, "GLOB:lr=X,decay=Y",
                       "parameters whose names match the glob learn at X times the rate and decay by Y; the last "
                       "group that matches counts (up to 8 of them)",
                       .details =
                           "The names are Hugging Face's, and globs are as of fnmatch(3), where '*' also matches "
                           "dots. A group's decay counts whatever --decay says; lr or decay may be left out."),
    {0},
};
const ari_option ari_loss_options[] = {
    ARI_OPTION_SECTION("training"),
    ARI_OPTION_DOUBLE("label-smoothing", run.loss.label_smoothing, 0, 1, "E",
                      "share of each label that goes to all tokens of the vocabulary alike, below 1 (default 0)",
                      .details = "It is that of PyTorch's cross_entropy."),
    ARI_OPTION_DOUBLE("z-loss", run.loss.z_loss, 0, 1e30, "C",
                      "add C times the squared logarithm of the softmax's denominator to the loss of each token "
                      "(default 0)",
                      .details = "PaLM has 0.0001."),
    ARI_OPTION_ENUM("balance", run.loss.router.balance, ari_balance_names,
                    "of experts: loss that spreads tokens evenly over them, of each sequence, of the step's batch, or "
                    "of that over all layers (default none, or layers with output_router_logits in config.json)",
                    .details =
                        "sequence: as DeepSeek-V3 has it. batch: Switch's form over the whole batch of the step. "
                        "layers: that of transformers. For the last two a step goes forward twice, first to count."),
    ARI_OPTION_DOUBLE("balance-weight", run.loss.router.balance_weight, 1e-30, 1e30, "A",
                      "of --balance (default 0.01)"),
    ARI_OPTION_DOUBLE("router-z-loss", run.loss.router.z_loss, 0, 1e30, "C",
                      "of experts: add C times the squared logarithm of the router's denominator, the mean over tokens "
                      "(default 0)",
                      .details = "ST-MoE has 0.001."),
    ARI_OPTION_DOUBLE("router-bias-update", run.loss.router.bias_update, 0, 1e30, "U",
                      "of routers of sigmoids: after each step, add U to the bias of each expert that got fewer tokens "
                      "than the mean, and take U from that of one that got more (default 0)",
                      .details = "DeepSeek-V3 has 0.001."),
    {0},
};
#undef ARI_VALUES

_Static_assert(ARI_OPT_MANY == AR_PARAM_GROUPS, "--group may be given as often as there may be groups");

/* Refuses given options that belong to another optimizer or another schedule. */
static ar_status check_given(const ari_run_values *v, ar_optimizer_kind kind, ar_schedule schedule)
{
    const ar_optimizer_options *options = &v->run.optimizer;
    const bool sgd = kind == AR_OPTIMIZER_SGD;
    const bool muon = kind == AR_OPTIMIZER_MUON;
    if (!sgd && ((!muon && !isnan(options->momentum)) || options->nesterov))
        return ar_error_set(AR_ERR_ARG, "--%s goes with --optimizer sgd%s; %s has %s",
                            options->nesterov ? "nesterov" : "momentum", options->nesterov ? "" : " or muon",
                            ari_optimizer_names[kind], muon ? "Nesterov's variant always" : "--betas");
    if (!muon && (options->match_rms || options->shards || options->qk_clip > 0.0))
        return ar_error_set(AR_ERR_ARG, "--%s goes with --optimizer muon",
                            options->match_rms ? "match-rms"
                            : options->shards  ? "muon-shards"
                                               : "qk-clip");
    if (sgd && v->betas)
        return ar_error_set(AR_ERR_ARG, "--betas go with --optimizer adam or adamw; sgd has --momentum");
    if (schedule != AR_SCHEDULE_COSINE && !isnan(options->min_lr))
        return ar_error_set(AR_ERR_ARG, "--min-lr %g is where --lr-schedule cosine ends: give both", options->min_lr);
    return AR_OK;
}

/* "0.9,0.999" */
static ar_status parse_betas(double *beta1, double *beta2, const char *text)
{
    char *end = NULL;
    *beta1 = strtod(text, &end);
    const bool has_comma = end != text && *end == ',';
    const char *second = has_comma ? end + 1 : text;
    *beta2 = strtod(second, &end);
    if (!has_comma || end == second || *end != '\0' || !(*beta1 >= 0 && *beta1 < 1) || !(*beta2 >= 0 && *beta2 < 1))
        return ar_error_set(AR_ERR_ARG,
                            "--betas: got '%s', expected two numbers from 0 to below 1 with a comma between",
                            ARI_SHOW(text));
    return AR_OK;
}

/* Parses "lr=X" or "decay=Y" up to a comma or the end; *end: the text after it, NULL if it is neither. */
static void parse_item(ar_param_group *group, const char *item, const char **end)
{
    static const char lr[] = "lr=", decay[] = "decay=";
    const bool is_lr = strncmp(item, lr, sizeof lr - 1) == 0;
    const bool is_decay = strncmp(item, decay, sizeof decay - 1) == 0;
    const char *number = item + (is_lr ? sizeof lr : sizeof decay) - 1;
    char *behind = NULL;
    *end = NULL;
    if (!is_lr && !is_decay)
        return;
    const double value = strtod(number, &behind);
    if (behind == number || !(value >= 0.0 && isfinite(value)))
        return;
    double *const target = is_lr ? &group->lr_scale : &group->weight_decay;
    *end = isnan(*target) ? behind : NULL; /* otherwise it is given twice */
    *target = value;
}

/* "*.bias:decay=0" or "model.embed*:lr=0.1,decay=0.01" */
static ar_status parse_group(ar_param_group *group, const char *text)
{
    const char *cursor = strrchr(text, ':');
    const size_t length = cursor ? (size_t)(cursor - text) : 0;
    *group = (ar_param_group){.lr_scale = (double)NAN, .weight_decay = (double)NAN};
    if (length >= sizeof group->glob)
        return ar_error_set(AR_ERR_ARG, "--group: the glob of '%s' has %zu bytes, expected at most %zu", ARI_SHOW(text),
                            length, sizeof group->glob - 1);
    memcpy(group->glob, text, length);
    while (cursor && length > 0 && *cursor != '\0' && (*cursor == ':' || *cursor == ','))
        parse_item(group, cursor + 1, &cursor);
    if (length == 0 || !cursor || *cursor != '\0')
        return ar_error_set(AR_ERR_ARG,
                            "--group: got '%s', expected GLOB:lr=X,decay=Y, one of the two or both, each a number from "
                            "0 on, as in '*.bias:decay=0'",
                            ARI_SHOW(text));
    group->lr_scale = isnan(group->lr_scale) ? 1.0 : group->lr_scale;
    return AR_OK;
}

ar_status ari_run_reparse(ari_run_values *v, const ar_run *base, const ari_args_spec *spec, void *values)
{
    const ari_run_values original = *v;
    const ar_optimizer_kind kind = original.run.optimizer.kind;
    ar_optimizer_options *o = &v->run.optimizer;
    v->run = *base;
    if ((int)kind >= 0 && kind != base->optimizer.kind)
        *o = ar_optimizer_defaults(kind);
    AR_TRY(ari_args_reparse(spec, values));
    AR_TRY(check_given(&original, o->kind, o->schedule));
    o->total_steps = v->run.steps > 0 ? v->run.steps : 1; /* no step is made, but the options must still be valid */
    o->min_lr = o->schedule == AR_SCHEDULE_COSINE ? o->min_lr : 0.0;
    if (v->betas)
        AR_TRY(parse_betas(&o->beta1, &o->beta2, v->betas));
    for (size_t i = 0; i < v->groups.n; i++)
        AR_TRY(parse_group(&o->group[i], v->groups.text[i]));
    o->groups = v->groups.n > 0 ? v->groups.n : o->groups;
    return ari_optimizer_check(o);
}

/* ", cosine to 0.0001 after 2 steps of warm-up" */
static void print_schedule(FILE *out, const ar_optimizer_options *o)
{
    const bool cosine = o->schedule == AR_SCHEDULE_COSINE;
    if (cosine)
        fprintf(out, ", cosine to %g", o->min_lr);
    if (o->warmup_steps > 0)
        fprintf(out, "%s %" PRIu64 " step%s of warm-up", cosine ? " after" : ",", o->warmup_steps,
                ARI_PLURAL(o->warmup_steps));
}

static void print_optimizer(FILE *out, const ar_optimizer_options *o)
{
    static const char *const titles[] = {"SGD", "Adam", "AdamW", "Muon"}; /* in the order of ar_optimizer_kind */
    fprintf(out, "%s (lr %g", titles[o->kind], o->lr);
    print_schedule(out, o);
    if (o->momentum > 0.0)
        fprintf(out, ", momentum %g%s", o->momentum, o->nesterov ? " (Nesterov)" : "");
    if (o->shards)
        fprintf(out, ", matrices left cut over tp");
    if (o->qk_clip > 0.0)
        fprintf(out, ", logits clipped at %g", o->qk_clip);
    if (o->weight_decay > 0.0)
        fprintf(out, ", weight decay %g%s", o->weight_decay, o->decay == AR_DECAY_MATRICES ? " of matrices" : "");
    if (o->groups > 0)
        fprintf(out, ", %zu group%s", o->groups, ARI_PLURAL(o->groups));
    fprintf(out, ")");
}

void ari_step_print(FILE *out, const ar_run *run)
{
    if (run->steps == 0)
        fprintf(out, "forward + loss + backward");
    else
        print_optimizer(out, &run->optimizer);
    if (run->clip > 0.0)
        fprintf(out, ", clip %g", run->clip);
    if (run->dropout > 0.0)
        fprintf(out, ", dropout %g", run->dropout);
    ari_loss_print(out, &run->loss);
}

void ari_storage_print(FILE *out, ar_precision precision, ar_dtype storage)
{
    const bool activations = ari_activations_of(precision) == AR_BF16;
    if (precision == AR_PRECISION_TF32)
        fprintf(out, ", products in %s", ari_precision_name(precision));
    if (ari_matrix_dtype(precision, storage) == AR_BF16)
        fprintf(out, ", %smatrices in bf16", activations ? "activations and " : "");
}

void ari_loss_print(FILE *out, const ar_loss_options *o)
{
    if (o->label_smoothing > 0.0)
        fprintf(out, ", label smoothing %g", o->label_smoothing);
    if (o->z_loss > 0.0)
        fprintf(out, ", z-loss %g", o->z_loss);
    if (o->router.balance != AR_BALANCE_NONE)
        fprintf(out, ", experts balanced by %s %g", ari_balance_name(o->router.balance), o->router.balance_weight);
    if (o->router.z_loss > 0.0)
        fprintf(out, ", router z-loss %g", o->router.z_loss);
    if (o->router.bias_update > 0.0)
        fprintf(out, ", routers' bias by %g", o->router.bias_update);
}

void ari_loss_json(json_t *result, const ar_loss_options *o)
{
    json_object_set_new(result, "label_smoothing", json_real(o->label_smoothing));
    json_object_set_new(result, "z_loss", json_real(o->z_loss));
    json_object_set_new(result, "balance", json_string(ari_balance_name(o->router.balance)));
    json_object_set_new(result, "balance_weight", json_real(o->router.balance_weight));
    json_object_set_new(result, "router_z_loss", json_real(o->router.z_loss));
    json_object_set_new(result, "router_bias_update", json_real(o->router.bias_update));
}

void ari_dropout_note(FILE *out, const ar_config *c, const ar_run *run)
{
    if (c->config_dropout > 0.0 && run->dropout == 0.0)
        fprintf(out, "note: the config's dropout of %g is ignored; --dropout %g switches it on\n", c->config_dropout,
                c->config_dropout);
}

static json_t *json_group(const ar_param_group *group)
{
    return json_pack("{s:o, s:f, s:o}", "glob", ari_json_text(group->glob), "lr_scale", group->lr_scale, "weight_decay",
                     isnan(group->weight_decay) ? json_null() : json_real(group->weight_decay));
}

json_t *ari_optimizer_json(const ar_optimizer_options *o)
{
    json_t *groups = json_array();
    for (size_t i = 0; i < o->groups; i++)
        json_array_append_new(groups, json_group(&o->group[i]));
    json_t *result = json_pack("{s:s, s:f, s:f, s:b, s:f, s:f, s:f, s:f, s:s, s:I, s:I, s:f, s:s, s:o}", "name",
                               ari_optimizer_name(o->kind), "lr", o->lr, "momentum", o->momentum, "nesterov",
                               o->nesterov, "beta1", o->beta1, "beta2", o->beta2, "eps", o->eps, "weight_decay",
                               o->weight_decay, "schedule", ari_schedule_name(o->schedule), "warmup_steps",
                               (json_int_t)o->warmup_steps, "total_steps", (json_int_t)o->total_steps, "min_lr",
                               o->min_lr, "decay", ari_decay_names[o->decay], "groups", groups);
    if (o->kind == AR_OPTIMIZER_MUON)
        json_object_set_new(result, "match_rms", json_boolean(o->match_rms));
    if (o->shards)
        json_object_set_new(result, "muon_shards", json_true());
    if (o->qk_clip > 0.0)
        json_object_set_new(result, "qk_clip", json_real(o->qk_clip));
    return result;
}
