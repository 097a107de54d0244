/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/parts.h"

typedef struct activation_module {
    ar_module base;
    ar_activation act;
} activation_module;

static ar_status check(const char *name, const char *what, const ar_tensor *t)
{
    if (t->ndim >= 1 && ar_tensor_is_contiguous(t))
        return AR_OK;
    return ar_error_set(AR_ERR_SHAPE, "%s: %s of %d dimensions, expected at least one, contiguous", name, what,
                        t->ndim);
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)batch;
    AR_TRY(check(base->name, "input", x));
    AR_TRY(ar_like(ctx, y, x));
    const ar_tensor from = ar_tensor_rows(x), to = ar_tensor_rows(y);
    AR_TRY(ctx->device->ops->bias_act(ctx->device, ctx->queue, &from, (ar_cbuf){NULL}, ((activation_module *)base)->act,
                                      &to));
    return ar_saved_push(saved, base, 0, x);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)batch;
    ar_tensor x;
    AR_TRY(ar_saved_pop(saved, base, 0, &x));
    AR_TRY(check(base->name, "gradient", dy));
    if (!dx)
        return AR_OK;
    if (ar_tensor_count(dy) != ar_tensor_count(&x))
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient of %zu elements, expected %zu", base->name, ar_tensor_count(dy),
                            ar_tensor_count(&x));
    AR_TRY(ar_like(ctx, dx, &x));
    return ctx->device->ops->act_backward(ctx->device, ctx->queue, dx->data, ar_const(dy->data), ar_const(x.data),
                                          ((activation_module *)base)->act, ar_tensor_count(&x));
}

static void destroy(ar_module *base)
{
    free(base);
}

ar_status ar_activation_create(ar_module **gives, ar_ctx *ctx, const char *name, ar_activation act, ar_held held)
{
    static const ar_module_ops ops = {
        .kind = "activation", .forward = forward, .backward = backward, .destroy = destroy};
    (void)ctx;
    activation_module *m = NULL;
    if (act < AR_ACT_GELU_ERF || act >= AR_ACT_NONE)
        return ar_error_set(AR_ERR_ARG, "%s: %d is no activation", name, (int)act);
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, name));
    m->act = act;
    const ar_status st = ar_module_init(&m->base, &ops, name, held);
    if (st != AR_OK) {
        free(m);
        return st;
    }
    *gives = &m->base;
    return AR_OK;
}
