/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/optimizer.h"

#include <stdlib.h>

#include "ref/layers/parts.h"
#include "ref/train/faults.h"

ARI_OWNER(ar_optimizer, ar_optimizer_destroy)

static ar_status add_param(ar_optimizer *o, ar_ctx *ctx, ar_param *p)
{
    for (size_t i = 0; i < o->n; i++) {
        if (o->states[i].param == p)
            return ar_error_set(AR_ERR_ARG, "an optimizer is given the parameter %s twice", p->name);
    }
    ari_state *s = &o->states[o->n++]; /* counted first, so that destroy frees half of it too */
    *s = (ari_state){.param = p, .whole = true, .count = ar_tensor_count(&p->value)};
    return ari_state_create(s, &o->bytes, ctx, &o->options);
}

static ar_status create_optimizer(ar_optimizer **gives, ar_ctx *ctx, const ar_optimizer_options *o)
{
    AR_TRY(ar_optimizer_check(o));
    AR_TRY(ARI_ALLOC_ZERO(gives, 1, "an optimizer"));
    (*gives)->options = *o;
    (*gives)->device = ctx->device;
    return AR_OK;
}

ar_status ar_optimizer_create(ar_optimizer **gives, ar_ctx *ctx, ar_param *const *params, size_t n,
                              const ar_optimizer_options *o)
{
    ARI_OWNED_BY(ar_optimizer_destroy) ar_optimizer *made = NULL;
    AR_TRY(create_optimizer(&made, ctx, o));
    AR_TRY(ARI_ALLOC(&made->states, n, "an optimizer's parameters"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->requires_grad)
            AR_TRY(add_param(made, ctx, params[i]));
    }
    ARI_GIVE(gives, made);
    return AR_OK;
}

ar_status ar_optimizer_create_sharded(ar_optimizer **gives, ar_ctx *ctx, ar_ddp *ddp, const ar_optimizer_options *o)
{
    ARI_OWNED_BY(ar_optimizer_destroy) ar_optimizer *made = NULL;
    AR_TRY(create_optimizer(&made, ctx, o));
    made->ddp = ddp;
    AR_TRY(ari_zero_init(made, ctx));
    ARI_GIVE(gives, made);
    return AR_OK;
}

void ar_optimizer_destroy(ar_optimizer *o)
{
    if (!o)
        return;
    for (size_t i = 0; i < o->n; i++)
        ari_state_destroy(&o->states[i], o->device);
    free(o->states);
    free(o);
}

/* The gradient in the layout of the value, in the memory of `room`. */
static ar_status gradient_of(ar_tensor *g, ar_ctx *ctx, const ar_param *p, const ar_tensor *room, float scale)
{
    AR_TRY(ar_tensor_view(g, AR_F32, p->value.ndim, p->value.shape, room->data));
    AR_TRY(ar_param_grad_value(p, ctx, g));
    if (scale == 1.0f)
        return AR_OK;
    return ARI_KERNEL(ctx, scale, g, g, scale);
}

static ar_status step_all(ar_optimizer *o, ar_ctx *ctx, const ar_tensor *room, float scale)
{
    ari_update_begin(&o->clock, &o->options, ctx);
    for (size_t i = 0; i < o->n; i++) {
        const ari_state *s = &o->states[i];
        ar_tensor g;
        if (!ari_is_updated(s->param))
            continue;
        bool skipped = false;
        AR_TRY(gradient_of(&g, ctx, s->param, room, scale));
        AR_TRY(ari_fault_skips_update(&skipped, ctx, s->param, &g));
        if (skipped)
            continue;
        s->param->version++;
        const ari_optimizer_constants k = ari_update_constants(&o->clock, &o->options, s->param, ctx);
        ari_update_part all = s->part;
        all.weight = s->param->value.data;
        AR_TRY(ari_update_kind(&o->options, s->param) == AR_OPTIMIZER_MUON ? ari_muon_step(o, ctx, s->param, s, &g)
                                                                           : ari_update_apply(ctx, &all, &g, &k));
        AR_TRY(ari_update_clip(ctx, s, &all));
    }
    return AR_OK;
}

static size_t largest(const ar_optimizer *o)
{
    size_t most = 0;
    for (size_t i = 0; i < o->n; i++) {
        const size_t count = ar_tensor_count(&o->states[i].param->value);
        most = count > most ? count : most;
    }
    return most;
}

/* A gradient of which this rank has a share alone would make other weights on every rank. */
static ar_status check_whole(const ar_optimizer *o)
{
    for (size_t i = 0; i < o->n; i++) {
        const ar_param *p = o->states[i].param;
        if (ari_is_updated(p) && p->sharded)
            return ar_error_set(AR_ERR_ARG,
                                "%s: the data-parallel ranks share out its gradient (ZeRO), but not this optimizer: "
                                "make it with ar_optimizer_create_sharded",
                                p->name);
    }
    return AR_OK;
}

ar_status ar_optimizer_step(ar_optimizer *o, ar_ctx *ctx, float scale)
{
    if (o->ddp)
        return ari_zero_step(o, ctx, scale);
    AR_TRY(check_whole(o));
    const size_t most = largest(o);
    ar_tensor room; /* taken before the first weight changes: later there is nothing left to run out of */
    AR_TRY(ar_ctx_tensor(ctx, &room, AR_F32, 1, &most));
    const ar_status st = step_all(o, ctx, &room, scale);
    ar_ctx_release(ctx, &room);
    AR_TRY(st);
    for (size_t i = 0; i < o->n; i++) {
        AR_TRY(ar_param_tap(o->states[i].param, ctx, 'n', &o->states[i].param->value));
        AR_TRY(ari_state_tap(&o->states[i], ctx));
    }
    return AR_OK;
}

ar_status ar_optimizer_save(ar_optimizer *o, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user)
{
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(ari_state_save(&o->states[i], ctx, emit, user));
    return AR_OK;
}

/* The clock after `steps` steps, by as many multiplications: at most UINT32_MAX, as a training step counts. */
static ar_status clock_after(ari_optimizer_clock *clock, const ar_optimizer_options *o, uint64_t steps)
{
    if (steps > UINT32_MAX)
        return ar_error_set(AR_ERR_ARG, "an optimizer after %llu steps, expected at most %lu",
                            (unsigned long long)steps, (unsigned long)UINT32_MAX);
    *clock = (ari_optimizer_clock){0};
    for (uint64_t t = 0; t < steps; t++)
        ari_optimizer_tick(clock, o);
    return AR_OK;
}

ar_status ar_optimizer_load(ar_optimizer *o, ar_ctx *ctx, uint64_t steps,
                            const float *(*find)(void *user, const char *param, const char *state, size_t count),
                            void *user)
{
    AR_TRY(clock_after(&o->clock, &o->options, steps));
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(ari_state_load(&o->states[i], ctx, find, user));
    return AR_OK;
}

uint64_t ar_optimizer_steps(const ar_optimizer *o)
{
    return o->clock.steps;
}

size_t ar_optimizer_bytes(const ar_optimizer *o)
{
    return o->bytes;
}
