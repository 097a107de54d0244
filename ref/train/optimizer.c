/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/update.h"

#include <stdlib.h>

#include "anyrank/train.h"
#include "ref/core/context.h"
#include "ref/core/size.h"

/* One parameter and its moments, which lie as its value does. */
typedef struct slot {
    ar_param *param; /* borrowed */
    ar_buf m, v;     /* fp32; ptr NULL where the kind has none */
} slot;

struct ar_optimizer {
    ar_optimizer_options options;
    ari_optimizer_clock clock;
    ar_device *device; /* borrowed; owns the moments */
    slot *slots;       /* [n], of the parameters that require a gradient */
    size_t n;
    size_t bytes; /* of all moments */
};

static ar_status create_moment(ar_optimizer *o, ar_ctx *ctx, ar_buf *gives, size_t count)
{
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, count, sizeof(float)));
    AR_TRY(ari_add_size(&o->bytes, o->bytes, bytes));
    AR_TRY(o->device->ops->alloc(o->device, gives, bytes ? bytes : 1));
    return o->device->ops->zero(o->device, ctx->queue, *gives, bytes);
}

static ar_status add_param(ar_optimizer *o, ar_ctx *ctx, ar_param *p)
{
    const bool adam = o->options.kind != AR_OPTIMIZER_SGD;
    const size_t count = ar_tensor_count(&p->value);
    for (size_t i = 0; i < o->n; i++) {
        if (o->slots[i].param == p)
            return ar_error_set(AR_ERR_ARG, "an optimizer is given the parameter %s twice", p->name);
    }
    slot *s = &o->slots[o->n++]; /* counted first, so that destroy frees half of it too */
    *s = (slot){.param = p};
    if (adam || o->options.momentum != 0.0)
        AR_TRY(create_moment(o, ctx, &s->m, count));
    if (adam)
        AR_TRY(create_moment(o, ctx, &s->v, count));
    return AR_OK;
}

ar_status ar_optimizer_create(ar_optimizer **gives, ar_ctx *ctx, ar_param *const *params, size_t n,
                              const ar_optimizer_options *o)
{
    ar_optimizer *made = NULL;
    ar_status st = AR_OK;
    AR_TRY(ar_optimizer_check(o));
    AR_TRY(ari_alloc_zero((void **)&made, 1, sizeof *made, "an optimizer"));
    made->options = *o;
    made->device = ctx->device;
    AR_TRY_TO(failed, st, ari_alloc((void **)&made->slots, n, sizeof *made->slots, "an optimizer's parameters"));
    for (size_t i = 0; i < n; i++) {
        if (params[i]->requires_grad)
            AR_TRY_TO(failed, st, add_param(made, ctx, params[i]));
    }
    *gives = made;
    return AR_OK;
failed:
    ar_optimizer_destroy(made);
    return st;
}

void ar_optimizer_destroy(ar_optimizer *o)
{
    if (!o)
        return;
    for (size_t i = 0; i < o->n; i++) {
        o->device->ops->free(o->device, o->slots[i].m);
        o->device->ops->free(o->device, o->slots[i].v);
    }
    free(o->slots);
    free(o);
}

/* The gradient in the layout of the value, in the memory of `room`. */
static ar_status gradient_of(ar_tensor *g, ar_ctx *ctx, const ar_param *p, const ar_tensor *room, float scale)
{
    AR_TRY(ar_tensor_view(g, AR_F32, p->value.ndim, p->value.shape, room->data));
    AR_TRY(ar_param_grad_value(p, ctx, g));
    if (scale == 1.0f)
        return AR_OK;
    return ctx->device->ops->scale(ctx->device, ctx->queue, g->data, ar_const(g->data), scale, ar_tensor_count(g));
}

static ar_status step_all(ar_optimizer *o, ar_ctx *ctx, const ar_tensor *room, float scale)
{
    ari_update_begin(&o->clock, &o->options, ctx);
    for (size_t i = 0; i < o->n; i++) {
        const slot *s = &o->slots[i];
        ar_tensor g;
        if (!s->param->requires_grad || !s->param->has_grad)
            continue;
        AR_TRY(gradient_of(&g, ctx, s->param, room, scale));
        const ari_optimizer_constants k = ari_update_constants(&o->clock, &o->options, s->param, ctx);
        const ari_update_part all = {.weight = s->param->value.data, .m = s->m, .v = s->v};
        AR_TRY(ari_update_apply(ctx, &all, ar_const(g.data), &k, ar_tensor_count(&g)));
        s->param->version++;
    }
    return AR_OK;
}

static size_t largest(const ar_optimizer *o)
{
    size_t most = 0;
    for (size_t i = 0; i < o->n; i++) {
        const size_t count = ar_tensor_count(&o->slots[i].param->value);
        most = count > most ? count : most;
    }
    return most;
}

ar_status ar_optimizer_step(ar_optimizer *o, ar_ctx *ctx, float scale)
{
    const size_t most = largest(o);
    ar_tensor room; /* taken before the first weight changes: later there is nothing left to run out of */
    AR_TRY(ar_ctx_tensor(ctx, &room, AR_F32, 1, &most));
    const ar_status st = step_all(o, ctx, &room, scale);
    ar_ctx_release(ctx, &room);
    AR_TRY(st);
    for (size_t i = 0; i < o->n; i++)
        AR_TRY(ar_param_tap(o->slots[i].param, ctx, 'n', &o->slots[i].param->value));
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
