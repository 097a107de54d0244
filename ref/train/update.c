/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/update.h"

#include <fnmatch.h>
#include <math.h>

#include "ref/core/context.h"
#include "ref/train/faults.h"

ari_update_rule ari_update_rule_of(const ar_optimizer_options *o, const char *name, int ndim)
{
    const bool decays = o->decay == AR_DECAY_ALL || ndim == 2;
    ari_update_rule rule = {.lr_scale = 1.0, .weight_decay = decays ? o->weight_decay : 0.0};
    for (size_t i = o->groups; i-- > 0;) {
        const ar_param_group *group = &o->group[i];
        if (fnmatch(group->glob, name, 0) != 0)
            continue;
        rule.lr_scale = group->lr_scale;
        rule.weight_decay = isnan(group->weight_decay) ? rule.weight_decay : group->weight_decay;
        break;
    }
    return rule;
}

void ari_update_begin(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx)
{
    ari_fault_clock(clock, o, ctx);
    ari_optimizer_tick(clock, o);
}

ar_status ari_update_clock(ari_optimizer_clock *clock, const ar_optimizer_options *o, uint64_t steps)
{
    if (steps > UINT32_MAX)
        return ar_error_set(AR_ERR_ARG, "an optimizer after %llu steps, expected at most %lu",
                            (unsigned long long)steps, (unsigned long)UINT32_MAX);
    *clock = (ari_optimizer_clock){0};
    for (uint64_t t = 0; t < steps; t++)
        ari_optimizer_tick(clock, o);
    return AR_OK;
}

ari_optimizer_constants ari_update_constants(const ari_optimizer_clock *clock, const ar_optimizer_options *o,
                                             const ar_param *p, const ar_ctx *ctx)
{
    ari_update_rule rule = ari_update_rule_of(o, p->name, p->layout.ndim);
    ari_optimizer_clock own = *clock;
    ari_fault_update(&own, &rule, o, p, ctx);
    return ari_optimizer_constants_of(&own, o, rule.lr_scale, rule.weight_decay);
}

ar_status ari_update_apply(ar_ctx *ctx, const ari_update_part *part, ar_cbuf g, const ari_optimizer_constants *k,
                           size_t n)
{
    const ar_device_ops *dev = ctx->device->ops;
    if (!part->master.ptr)
        return dev->optimizer_step(ctx->device, ctx->queue, part->weight, part->m, part->v, g, k, n);
    /* Weights that were set since the last step are not what the master copy rounds to. */
    AR_TRY(dev->take_bf16(ctx->device, ctx->queue, part->master, ar_const(part->weight), n));
    AR_TRY(dev->optimizer_step(ctx->device, ctx->queue, part->master, part->m, part->v, g, k, n));
    return dev->round_bf16(ctx->device, ctx->queue, part->weight, ar_const(part->master), n);
}
