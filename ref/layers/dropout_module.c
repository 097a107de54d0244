/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/core/size.h"
#include "ref/layers/dropout.h"
#include "ref/layers/parts.h"

typedef struct dropout_module {
    ar_module base;
    ari_dropout place;
} dropout_module;

/* The gradient is dropped as the value was: the mask is drawn again. */
static ar_status drop(ar_module *base, ar_ctx *ctx, ar_tensor *y, const ar_tensor *x)
{
    const dropout_module *m = (const dropout_module *)base;
    *y = *x;
    if (!ari_dropout_on(ctx))
        return AR_OK;
    AR_TRY(ar_like(ctx, y, x));
    return ari_drop_features(&m->place, ctx, y, x, base->tap == AR_HELD_SHARD);
}

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)saved, (void)batch;
    return drop(base, ctx, y, x);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)saved, (void)batch;
    return dx ? drop(base, ctx, dx, dy) : AR_OK;
}

static void destroy(ar_module *base)
{
    free(base);
}

ar_status ar_dropout_create(ar_module **gives, ar_ctx *ctx, const char *name, size_t positions, size_t width,
                            ar_held held)
{
    static const ar_module_ops ops = {.kind = "dropout", .forward = forward, .backward = backward, .destroy = destroy};
    (void)ctx;
    dropout_module *m = NULL;
    ar_status st = AR_OK;
    if (held == AR_HELD_UNTOLD)
        return ar_error_set(AR_ERR_ARG, "%s: dropout needs to know whether its features are whole or a shard", name);
    AR_TRY(ari_alloc_zero((void **)&m, 1, sizeof *m, name));
    AR_TRY_TO(failed, st, ar_module_init(&m->base, &ops, name, held));
    AR_TRY_TO(failed, st, ari_dropout_init(&m->place, name, NULL, width, positions));
    *gives = &m->base;
    return AR_OK;
failed:
    free(m);
    return st;
}
