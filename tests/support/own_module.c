/* SPDX-License-Identifier: Apache-2.0 */
#include "support/own_module.h"
#include "anyrank/context.h"

#include <stdlib.h>

typedef struct own_layer {
    ar_module base;
    ar_param weight, scale;
    own_mistake mistake;
    ar_tensor kept;
} own_layer;

enum { SAVED_X, SAVED_F };

static ar_status times(ar_ctx *ctx, ar_tensor *t, float factor)
{
    return ar_ctx_device(ctx)->ops->scale(ar_ctx_device(ctx), ar_ctx_queue(ctx), t, t, factor);
}

/* x with zeros in place of the features that belong to other ranks. */
static ar_status own_features_only(ar_ctx *ctx, ar_tensor *x)
{
    const size_t n = (size_t)ar_comm_size(ar_ctx_tp(ctx)), r = (size_t)ar_comm_rank(ar_ctx_tp(ctx));
    const size_t width = x->shape[1] / n;
    const ar_tensor *given = x;
    ar_tensor part;
    AR_TRY(ar_like(ctx, &part, given));
    AR_TRY(ar_ctx_device(ctx)->ops->fill(ar_ctx_device(ctx), ar_ctx_queue(ctx), &part, 0.0f));
    const ar_tensor from = ar_tensor_slice(given, 1, r * width, width),
                    to = ar_tensor_slice(&part, 1, r * width, width);
    AR_TRY(ar_ctx_device(ctx)->ops->copy_strided(ar_ctx_device(ctx), ar_ctx_queue(ctx), &to, &from));
    *x = part;
    return AR_OK;
}

static ar_status forward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    own_layer *l = (own_layer *)m;
    ar_tensor in = *x, f, s, sf;
    (void)batch;
    if (l->mistake == OWN_PARTIAL_SUM)
        AR_TRY(own_features_only(ctx, &in));
    AR_TRY(ar_contract(ctx, &f, &in, &l->weight));
    AR_TRY(ar_spread_rows(ctx, &s, &l->scale.value, &f));
    AR_TRY(ar_mul(ctx, &sf, &s, &f));
    AR_TRY(ar_saved_push(saved, l, SAVED_X, x));
    l->kept = *x;
    AR_TRY(ar_saved_push(saved, l, SAVED_F, &f));
    AR_TRY(ar_add(ctx, y, x, &sf));
    return l->mistake == OWN_SEES_THE_BATCH ? times(ctx, y, 1.0f / (float)x->shape[0]) : AR_OK;
}

/* The terms of s's gradient. */
static ar_status add_scale_gradient(own_layer *l, ar_ctx *ctx, const ar_tensor *dy, const ar_tensor *f)
{
    ar_tensor ds;
    AR_TRY(ar_mul(ctx, &ds, dy, f));
    if (l->mistake == OWN_HALF_GRADIENT)
        AR_TRY(times(ctx, &ds, 0.5f));
    if (l->mistake == OWN_ONE_ELEMENT) {
        for (size_t i = 0; i < ds.shape[0]; i++)
            ((float *)ds.data.ptr)[(ptrdiff_t)i * ds.stride[0]] *= 0.5f;
    }
    return l->mistake == OWN_FORGETS_GRADIENT ? AR_OK : ar_grad_add_rows(ctx, &l->scale, &ds);
}

static ar_status backward(ar_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    own_layer *l = (own_layer *)m;
    ar_tensor x, f, s, df, through;
    (void)batch;
    AR_TRY(ar_saved_pop(saved, l, SAVED_F, &f));
    AR_TRY(ar_saved_pop(saved, l, SAVED_X, &x));
    if (l->mistake == OWN_KEEPS_IN_ITSELF)
        x = l->kept;
    AR_TRY(add_scale_gradient(l, ctx, dy, &f));
    AR_TRY(ar_spread_rows(ctx, &s, &l->scale.value, dy));
    AR_TRY(ar_mul(ctx, &df, dy, &s));
    AR_TRY(ar_contract_backward(ctx, &through, l->mistake == OWN_FORGETS_FACTOR ? dy : &df, &x, &l->weight));
    if (!dx)
        return AR_OK;
    if (l->mistake != OWN_WRONG_DX)
        return ar_add(ctx, dx, dy, &through);
    *dx = through;
    return AR_OK;
}

static size_t params(const ar_module *m, ar_param **out, size_t cap)
{
    own_layer *l = (own_layer *)(uintptr_t)m;
    if (cap > 0)
        out[0] = &l->weight;
    if (cap > 1)
        out[1] = &l->scale;
    return 2;
}

static void destroy(ar_module *m)
{
    own_layer *l = (own_layer *)m;
    ar_param_fini(&l->weight);
    ar_param_fini(&l->scale);
    free(l);
}

static ar_status init(own_layer *l, ar_ctx *ctx, const char *name, size_t width)
{
    const size_t square[2] = {width, width};
    AR_TRY(ar_param_init_whole(&l->weight, ctx, name, "weight", 2, square, AR_INIT_XAVIER_NORMAL));
    return ar_param_init_whole(&l->scale, ctx, name, "scale", 1, &width, AR_INIT_UNIFORM_BIAS);
}

ar_status own_layer_create(ar_module **gives, ar_ctx *ctx, const char *name, size_t width, own_mistake mistake)
{
    static const ar_module_ops ops = {
        .kind = "own_layer", .forward = forward, .backward = backward, .params = params, .destroy = destroy};
    own_layer *l = calloc(1, sizeof *l);
    if (!l)
        return ar_error_set(AR_ERR_MEMORY, "%s", name);
    l->mistake = mistake;
    ar_status st = ar_module_init(&l->base, &ops, name, AR_HELD_WHOLE);
    if (st == AR_OK)
        st = init(l, ctx, name, width);
    if (st != AR_OK) {
        destroy(&l->base);
        return st;
    }
    *gives = &l->base;
    return AR_OK;
}
