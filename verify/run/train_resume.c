/* SPDX-License-Identifier: Apache-2.0 */
/* Resuming from a checkpoint: what a run takes from the checkpoint, and what may differ. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/train.h"
#include "ref/core/context_private.h"
#include "ref/core/optimizer_private.h"
#include "ref/core/text.h"
#include "ref/models/family.h"
#include "verify/run/checkpoint.h"
#include "verify/run/checkpoint_private.h"
#include "verify/run/train_rank.h"
#include "verify/run/training_private.h"

void ari_training_resume(ar_training_options *o, ar_checkpoint *c)
{
    const ar_checkpoint_state *s = ar_checkpoint_state_of(c);
    o->resume = c;
    o->run.steps = s->steps ? s->steps : o->run.steps;
    o->run.seed = s->seed;
    o->run.optimizer = s->optimizer;
    o->run.clip = s->clip;
    o->run.dropout = s->dropout;
    o->run.loss = s->loss_options;
    o->run.numerics = s->numerics;
    o->run.precision = s->precision;
    o->run.storage = s->precision == AR_PRECISION_BF16 ? 0 : s->storage;
    o->scale_loss = s->loss_scale > 0.0;
    if (o->scale_loss) {
        o->scaling = ar_loss_scaling_defaults(!s->loss_scale_static);
        o->scaling.scale = s->loss_scale;
        o->scaling.good = (uint32_t)s->loss_scale_steps;
    }
    if (s->batch > 0) {
        o->run.batch = s->batch;
        o->run.seq = s->seq;
        o->in_order = s->in_order;
        o->packing = s->packing;
    }
    if (s->data_hash) {
        o->data = s->data_path; /* NULL: the project's text */
        o->data_format = s->data_format;
    }
}

static void packing_text(char *out, size_t cap, const ar_packing *p)
{
    if (p->enabled && p->separator != AR_NO_SEPARATOR)
        snprintf(out, cap, "packed, with separator %zu", p->separator);
    else
        snprintf(out, cap, "%s", p->enabled ? "packed by its rows" : "not packed");
}

static ar_status check_packing(const ar_packing *current, const ar_packing *before)
{
    char current_text[64], saved_text[64];
    packing_text(current_text, sizeof current_text, current);
    packing_text(saved_text, sizeof saved_text, before);
    if (strcmp(current_text, saved_text) != 0)
        return ar_error_set(AR_ERR_ARG, "resumed with the data %s, the run has it %s: only that goes on", current_text,
                            saved_text);
    return AR_OK;
}

/* Checks the options that must not change in a resumed run: the order of the samples and the definition of a step. */
static ar_status check_same(const ar_training_options *o, const ar_checkpoint_state *s, const char *data_hash)
{
    if (s->batch > 0 && o->run.batch != s->batch)
        return ar_error_set(AR_ERR_ARG, "resumed with a batch of %zu, the run has one of %zu: only that goes on",
                            o->run.batch, s->batch);
    if (s->batch > 0 && o->run.seq != s->seq)
        return ar_error_set(AR_ERR_ARG, "resumed with sequences of %zu tokens, the run has %zu: only that goes on",
                            o->run.seq, s->seq);
    if (s->batch > 0 && o->in_order != s->in_order)
        return ar_error_set(AR_ERR_ARG, "resumed with the data %s, the run has it %s: only that goes on",
                            o->in_order ? "in order" : "shuffled", s->in_order ? "in order" : "shuffled");
    if (s->batch > 0)
        AR_TRY(check_packing(&o->packing, &s->packing));
    if (o->run.seed != s->seed)
        return ar_error_set(AR_ERR_ARG, "resumed with seed %" PRIu64 ", the run has %" PRIu64 ": only that goes on",
                            o->run.seed, s->seed);
    if (s->data_hash && strcmp(s->data_hash, data_hash) != 0)
        return ar_error_set(AR_ERR_ARG,
                            "resumed with other data than the run has: SHA-256 %.12s, expected %.12s (%s, %zu tokens)",
                            data_hash, s->data_hash, s->data_path ? s->data_path : "of another name", s->data_tokens);
    if (o->run.steps < s->step)
        return ar_error_set(AR_ERR_ARG, "%" PRIu64 " steps in all, but the checkpoint has %" PRIu64 " behind it",
                            o->run.steps, s->step);
    return AR_OK;
}

/* Checks that the checkpoint has the state that the run's optimizer keeps for each parameter. */
static ar_status check_state(const ar_training_options *o, const ar_checkpoint_state *s)
{
    static const char *const state_names[] = {"momentum_buffer", "exp_avg", "master"};
    const ar_dtype matrices = ari_matrix_dtype(o->run.precision, o->run.storage);
    for (size_t i = 0; i < sizeof state_names / sizeof *state_names; i++) {
        if (ari_checkpoint_keeps(&o->run.optimizer, matrices, state_names[i]) &&
            !ari_checkpoint_keeps(&s->optimizer, s->storage, state_names[i]))
            return ar_error_set(
                AR_ERR_ARG,
                "resumed with %s, which needs the state '%s' of each parameter: the checkpoint, of %s in %s, has none",
                strcmp(state_names[i], "master") == 0       ? "storage in bf16"
                : o->run.optimizer.kind == AR_OPTIMIZER_SGD ? "momentum"
                                                            : ari_optimizer_name(o->run.optimizer.kind),
                state_names[i], ari_optimizer_name(s->optimizer.kind), s->storage == AR_BF16 ? "bf16" : "fp32");
    }
    return AR_OK;
}

static void list(ari_text *t, bool differs, const char *name)
{
    if (differs)
        ari_say(t, "%s%s", t->used > 0 ? ", " : "", name);
}

/* Compares two numbers; NaN means "not given". */
static bool same_number(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

static bool same_groups(const ar_optimizer_options *a, const ar_optimizer_options *b)
{
    bool equal = a->groups == b->groups;
    for (size_t i = 0; equal && i < a->groups; i++)
        equal = strcmp(a->group[i].glob, b->group[i].glob) == 0 && a->group[i].lr_scale == b->group[i].lr_scale &&
                same_number(a->group[i].weight_decay, b->group[i].weight_decay);
    return equal;
}

/* Lists the names of further settings that determine the weights and differ from the run's. */
static void list_changes(char *text, size_t cap, const ar_training_options *o, const ar_checkpoint_state *s)
{
    const ar_optimizer_options *a = &o->run.optimizer, *b = &s->optimizer;
    const bool cosine = a->schedule == AR_SCHEDULE_COSINE;
    ari_text t = ari_plain_text_in(text, cap);
    list(&t, a->kind != b->kind, "optimizer");
    list(&t, a->lr != b->lr, "lr");
    list(&t, a->schedule != b->schedule, "lr-schedule");
    list(&t, a->warmup_steps != b->warmup_steps, "warmup");
    list(&t, cosine && a->total_steps != b->total_steps, "steps (of the cosine)");
    list(&t, cosine && a->min_lr != b->min_lr, "min-lr");
    list(&t, a->momentum != b->momentum || a->nesterov != b->nesterov, "momentum");
    list(&t, a->match_rms != b->match_rms, "match-rms");
    list(&t, a->qk_clip != b->qk_clip, "qk-clip");
    list(&t, a->beta1 != b->beta1 || a->beta2 != b->beta2 || a->eps != b->eps, "betas");
    list(&t, a->weight_decay != b->weight_decay || a->decay != b->decay, "weight decay");
    list(&t, !same_groups(a, b), "groups");
    list(&t, o->run.clip != s->clip, "clip");
    list(&t, o->run.dropout != s->dropout, "dropout");
    list(&t, o->run.loss.label_smoothing != s->loss_options.label_smoothing, "label-smoothing");
    list(&t, o->run.loss.z_loss != s->loss_options.z_loss, "z-loss");
    const ar_router_losses *x = &o->run.loss.router, *y = &s->loss_options.router;
    list(&t, x->balance != y->balance || x->balance_weight != y->balance_weight, "balance");
    list(&t, x->z_loss != y->z_loss, "router-z-loss");
    list(&t, x->bias_update != y->bias_update, "router-bias-update");
    list(&t, o->run.numerics != s->numerics, "numerics");
    list(&t, o->run.precision != s->precision, "precision");
    list(&t, ari_matrix_dtype(o->run.precision, o->run.storage) != s->storage, "storage");
    list(&t, (o->scale_loss ? o->scaling.scale : 0.0) != s->loss_scale, "loss-scale");
}

/* Checks before any rank runs that the checkpoint belongs to the model. */
static ar_status check_param(void *user, const char *name, int ndim, const size_t *shape)
{
    ar_checkpoint *c = user;
    const size_t count = ari_volume(shape, ndim);
    if (ari_checkpoint_find(c, name, count))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: is of another model, its weights hold no %s of %zu elements",
                        ari_checkpoint_path(c), name, count);
}

static ar_status check_model(const ari_training *j)
{
    AR_TRY(ari_param_list(&j->report->config, check_param, j->o->resume));
    return ari_checkpoint_check_names(j->o->resume, &j->report->config);
}

static ar_status check_params(void *user, ar_param *const *params, size_t n)
{
    return ari_checkpoint_check(user, params, n, true, true);
}

static ar_status check_module(const ari_training *j)
{
    return ari_module_look(j->o->module, &j->o->run, check_params, j->o->resume);
}

ar_status ari_train_check_resume(char *note, size_t cap, const ari_training *j)
{
    const ar_checkpoint_state *s = ar_checkpoint_state_of(j->o->resume);
    char changes[256];
    AR_TRY(j->o->module ? check_module(j) : check_model(j));
    AR_TRY(check_same(j->o, s, j->data_hash));
    AR_TRY(check_state(j->o, s));
    list_changes(changes, sizeof changes, j->o, s);
    note[0] = '\0';
    if (changes[0])
        snprintf(note, cap,
                 "resumed with another %s: from step %" PRIu64
                 " on the weights are not those of a run that was never interrupted",
                 changes, s->step + 1);
    return AR_OK;
}
