/* SPDX-License-Identifier: Apache-2.0 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ref/core/optimizer_private.h"
#include "ref/numerics/optimizer.h"
#include "ref/train/optimizer_private.h"

ar_optimizer_options ar_optimizer_defaults(ar_optimizer_kind kind)
{
    const bool muon = kind == AR_OPTIMIZER_MUON;
    return (ar_optimizer_options){.kind = kind,
                                  .lr = 1e-3,
                                  .momentum = muon ? 0.95 : 0.0,
                                  .nesterov = muon,
                                  .beta1 = 0.9,
                                  .beta2 = 0.999,
                                  .eps = 1e-8,
                                  .weight_decay = muon                         ? 0.1
                                                  : kind == AR_OPTIMIZER_ADAMW ? 0.01
                                                                               : 0.0};
}

static ar_status refuse_option(const ar_optimizer_options *o, const char *option, double value, const char *range)
{
    return ar_error_set(AR_ERR_ARG, "optimizer %s: %s is %g, expected %s", ari_optimizer_name(o->kind), option, value,
                        range);
}

/* A NaN is in no range. */
static ar_status check_fraction(const ar_optimizer_options *o, const char *option, double value)
{
    return value >= 0.0 && value < 1.0 ? AR_OK : refuse_option(o, option, value, "at least 0 and below 1");
}

static ar_status check_amount(const ar_optimizer_options *o, const char *option, double value)
{
    return value >= 0.0 && isfinite(value) ? AR_OK : refuse_option(o, option, value, "a finite number, at least 0");
}

static ar_status check_schedule(const ar_optimizer_options *o)
{
    if (o->schedule == AR_SCHEDULE_CONSTANT)
        return o->min_lr == 0.0 ? AR_OK : refuse_option(o, "min_lr", o->min_lr, "0 with a constant schedule");
    if (o->schedule != AR_SCHEDULE_COSINE)
        return ar_error_set(AR_ERR_ARG, "learning-rate schedule %d, expected constant or cosine", (int)o->schedule);
    if (o->total_steps == 0)
        return refuse_option(o, "total_steps", 0.0, "at least 1 with a cosine schedule");
    if (o->warmup_steps > o->total_steps)
        return ar_error_set(AR_ERR_ARG,
                            "optimizer %s: warmup_steps is %" PRIu64 ", expected at most total_steps, %" PRIu64,
                            ari_optimizer_name(o->kind), o->warmup_steps, o->total_steps);
    return o->min_lr >= 0.0 && o->min_lr <= o->lr ? AR_OK
                                                  : refuse_option(o, "min_lr", o->min_lr, "at least 0 and at most lr");
}

static ar_status check_group(const ar_optimizer_options *o, size_t i)
{
    const ar_param_group *group = &o->group[i];
    char option[sizeof group->glob + 32];
    if (group->glob[0] == '\0' || !memchr(group->glob, 0, sizeof group->glob))
        return ar_error_set(AR_ERR_ARG, "optimizer %s: the glob of parameter group %zu is %s, expected 1 to %zu bytes",
                            ari_optimizer_name(o->kind), i, group->glob[0] ? "not ended by a 0" : "empty",
                            sizeof group->glob - 1);
    snprintf(option, sizeof option, "lr_scale of group '%s'", group->glob);
    AR_TRY(check_amount(o, option, group->lr_scale));
    snprintf(option, sizeof option, "weight_decay of group '%s'", group->glob);
    return isnan(group->weight_decay) ? AR_OK : check_amount(o, option, group->weight_decay);
}

static ar_status check_groups(const ar_optimizer_options *o)
{
    if (o->decay != AR_DECAY_ALL && o->decay != AR_DECAY_MATRICES)
        return ar_error_set(AR_ERR_ARG, "decay rule %d, expected all or matrices", (int)o->decay);
    if (o->groups > AR_PARAM_GROUPS)
        return ar_error_set(AR_ERR_ARG, "optimizer %s: %zu parameter groups, expected at most %d",
                            ari_optimizer_name(o->kind), o->groups, AR_PARAM_GROUPS);
    for (size_t i = 0; i < o->groups; i++)
        AR_TRY(check_group(o, i));
    return AR_OK;
}

ar_status ari_optimizer_check(const ar_optimizer_options *o)
{
    if (o->kind < AR_OPTIMIZER_SGD || o->kind > AR_OPTIMIZER_MUON)
        return ar_error_set(AR_ERR_ARG, "optimizer kind %d, expected sgd, adam, adamw or muon", (int)o->kind);
    AR_TRY(check_amount(o, "lr", o->lr));
    AR_TRY(check_amount(o, "weight_decay", o->weight_decay));
    AR_TRY(check_schedule(o));
    AR_TRY(check_groups(o));
    if (o->kind == AR_OPTIMIZER_SGD || o->kind == AR_OPTIMIZER_MUON)
        AR_TRY(check_fraction(o, "momentum", o->momentum));
    AR_TRY(check_amount(o, "qk_clip", o->qk_clip));
    if (o->qk_clip > 0.0 && o->kind != AR_OPTIMIZER_MUON)
        return refuse_option(o, "qk_clip", o->qk_clip, "0: it is an option of muon");
    if (o->kind == AR_OPTIMIZER_SGD) {
        if (o->nesterov && o->momentum == 0.0)
            return refuse_option(o, "momentum", o->momentum, "above 0 with nesterov");
        return AR_OK;
    }
    AR_TRY(check_fraction(o, "beta1", o->beta1));
    AR_TRY(check_fraction(o, "beta2", o->beta2));
    /* In fp32, an eps of 0 would divide the moments of a weight without gradients by 0. */
    const float eps = (float)o->eps;
    return eps > 0.0f && isfinite(eps) ? AR_OK : refuse_option(o, "eps", o->eps, "a finite number above 0 in fp32");
}

double ari_optimizer_lr(const ar_optimizer_options *o, uint64_t step)
{
    return ari_schedule_lr(o, step);
}
