/* SPDX-License-Identifier: Apache-2.0 */
/* When a parameter's gradient is ready: by counting the uses that a forward pass made of it. */
#include "anyrank/arith.h"
#include "ref/core/context.h"

void ar_param_use(ar_param *p)
{
    p->pending++;
}

ar_status ar_param_done(ar_param *p, ar_ctx *ctx)
{
    if (p->pending > 0)
        p->pending--;
    if (p->pending > 0 && !ar_faulty(ctx, AR_FAULT_tied_reduced_at_first_use))
        return AR_OK;
    for (int i = 0; i < p->hooks; i++)
        AR_TRY(p->hook[i].ready(p->hook[i].user, p));
    return AR_OK;
}

static int find(const ar_param *p, ar_param_hook hook)
{
    for (int i = 0; i < p->hooks; i++) {
        if (p->hook[i].ready == hook.ready && p->hook[i].user == hook.user)
            return i;
    }
    return -1;
}

ar_status ar_param_add_hook(ar_param *p, ar_param_hook hook)
{
    if (find(p, hook) >= 0)
        return ar_error_set(AR_ERR_ARG, "%s has this hook already", p->name);
    if (p->hooks == AR_PARAM_HOOKS)
        return ar_error_set(AR_ERR_ARG, "%s has %d hooks, which is the most", p->name, p->hooks);
    p->hook[p->hooks++] = hook;
    return AR_OK;
}

void ar_param_remove_hook(ar_param *p, ar_param_hook hook)
{
    const int at = find(p, hook);
    if (at < 0)
        return;
    p->hooks--;
    for (int i = at; i < p->hooks; i++)
        p->hook[i] = p->hook[i + 1];
}

ar_status ar_param_zero_grad(ar_param *p, ar_ctx *ctx)
{
    const bool touched = p->has_grad;
    p->pending = 0;
    p->has_grad = false;
    p->grad_scale = 1.0f;
    p->own_start = 0;
    p->own_count = ar_tensor_count(&p->value);
    p->sharded = false;
    return touched ? ctx->arith->grad_zero(ctx, p) : AR_OK;
}

ar_status ar_param_grad_value(const ar_param *p, ar_ctx *ctx, const ar_tensor *g)
{
    AR_TRY(ctx->arith->grad_value(ctx, g, p));
    if (p->grad_scale == 1.0f)
        return AR_OK;
    return ctx->device->ops->scale(ctx->device, ctx->queue, g->data, ar_const(g->data), p->grad_scale,
                                   ar_tensor_count(g));
}
