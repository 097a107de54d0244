/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "ref/layers/faults.h"
#include "ref/layers/parts.h"

typedef struct norm_module {
    ar_module base;
    ar_norm_kind kind;
    size_t h;
    double eps;
    ar_hop hop;            /* from what arrives to what the norm works on, and leaves */
    ar_param weight, bias; /* bias: LayerNorm only */
} norm_module;

enum { SAVED_X, SAVED_MEAN, SAVED_RSTD };

static ar_status forward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *y, const ar_tensor *x,
                         const ar_batch *batch)
{
    (void)batch;
    norm_module *m = (norm_module *)base;
    if (x->ndim < 1 || x->shape[x->ndim - 1] != m->h || !ar_tensor_is_contiguous(x))
        return ar_error_set(AR_ERR_SHAPE, "%s: input's last dimension must be %zu, contiguous", base->name, m->h);
    const ari_features features = {1, {m->h}};
    ar_tensor in, mean, rstd;
    AR_TRY(ari_place(ctx, &in, x, &features, m->hop, base->name));
    const size_t rows = ar_tensor_rows(&in).shape[0];
    AR_TRY(ari_like(ctx, y, &in, m->h));
    AR_TRY(ar_ctx_tensor(ctx, &mean, AR_F64, 1, &rows));
    AR_TRY(ar_ctx_tensor(ctx, &rstd, AR_F32, 1, &rows));
    const ar_tensor x_rows = ar_tensor_rows(&in), y_rows = ar_tensor_rows(y);
    AR_TRY(ARI_KERNEL(ctx, norm_forward, m->kind, y, mean.data, rstd.data, &in, ar_const(m->weight.value.data),
                      ar_const(m->bias.value.data), m->eps));
    AR_TRY(ari_fault_norm_output(ctx, m->kind, m->eps, &m->weight, &m->bias, &y_rows, &mean, &rstd, &x_rows));
    AR_TRY(ar_saved_push(saved, m, SAVED_X, &in));
    AR_TRY(ar_saved_push(saved, m, SAVED_MEAN, &mean));
    AR_TRY(ar_saved_push(saved, m, SAVED_RSTD, &rstd));
    return ari_tap_placed(ctx, base->name, NULL, 'f', y, m->h, m->hop.to);
}

/* dx, where the norm works, and the parameters' gradients; with a residual *sum = residual + dx. One pass. */
static ar_status gradients(norm_module *m, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                           const ar_tensor *dy, const ar_tensor *residual)
{
    ar_tensor x, mean, rstd;
    ar_row_sum of_weight, of_bias = {.t = {NULL}};
    AR_TRY(ar_saved_pop(saved, m, SAVED_RSTD, &rstd));
    AR_TRY(ar_saved_pop(saved, m, SAVED_MEAN, &mean));
    AR_TRY(ar_saved_pop(saved, m, SAVED_X, &x));
    if (ar_tensor_count(dy) != ar_tensor_count(&x))
        return ar_error_set(AR_ERR_SHAPE, "%s: gradient of %zu elements, expected %zu", m->base.name,
                            ar_tensor_count(dy), ar_tensor_count(&x));
    AR_TRY(ari_like(ctx, dx, &x, m->h));
    if (residual)
        AR_TRY(ari_like(ctx, sum, &x, m->h));
    AR_TRY(ctx->arith->grad_sum(ctx, &m->weight, &of_weight));
    if (m->kind == AR_NORM_LAYER)
        AR_TRY(ctx->arith->grad_sum(ctx, &m->bias, &of_bias));
    AR_TRY(ARI_KERNEL(ctx, norm_backward, m->kind, dx, sum, dy, &x, ar_const(mean.data), ar_const(rstd.data),
                      ar_const(m->weight.value.data), residual, &of_weight, &of_bias));
    return ari_fault_norm_gradient(ctx, dx, sum, residual);
}

ar_status ari_norm_backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                            const ar_tensor *dy, const ar_tensor *residual)
{
    norm_module *m = (norm_module *)base;
    /* The residual is not there where the norm works elsewhere. */
    const bool moved = ar_comm_size(ctx->tp) > 1 && !ari_placed_alike(m->hop.from, m->hop.to);
    const ari_features features = {1, {m->h}};
    ar_tensor made;
    AR_TRY(gradients(m, ctx, saved, &made, sum, dy, moved ? NULL : residual));
    AR_TRY(ari_place_on(ctx, dx, &made, &features, ari_hop_back(m->hop), base->name));
    if (moved && residual)
        AR_TRY(ar_add(ctx, sum, residual, dx));
    return ari_tap_placed(ctx, base->name, NULL, 'b', dx, m->h, m->hop.from);
}

static ar_status backward(ar_module *base, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, const ar_tensor *dy,
                          const ar_batch *batch)
{
    (void)batch;
    ar_tensor unwanted;
    return ari_norm_backward(base, ctx, saved, dx ? dx : &unwanted, NULL, dy, NULL);
}

static size_t params(const ar_module *base, ar_param **out, size_t cap)
{
    norm_module *m = (norm_module *)(uintptr_t)base;
    const size_t n = m->kind == AR_NORM_LAYER ? 2 : 1;
    if (cap > 0)
        out[0] = &m->weight;
    if (cap > 1 && n > 1)
        out[1] = &m->bias;
    return n;
}

static void destroy(ar_module *base)
{
    norm_module *m = (norm_module *)base;
    ar_param_fini(&m->weight);
    ar_param_fini(&m->bias);
    free(m);
}

static ar_status init_param(ar_param *p, ar_ctx *ctx, const norm_module *m, const char *part, ar_init_scheme init)
{
    AR_TRY(ar_param_init_whole(p, ctx, m->base.name, part, 1, &m->h, init));
    p->spread =
        ar_comm_size(ctx->tp) > 1 && ari_placed_by_tokens(m->hop.to) && !ar_faulty(ctx, AR_FAULT_sp_norm_grad_local);
    return AR_OK;
}

ar_status ari_norm_create(ar_module **gives, ar_ctx *ctx, const char *name, ar_norm_kind kind, size_t h, double eps,
                          ar_hop hop)
{
    static const ar_module_ops ops = {
        .kind = "norm", .forward = forward, .backward = backward, .params = params, .destroy = destroy};
    norm_module *m = NULL;
    AR_TRY(ari_module_begin((void **)&m, sizeof *m, &ops, name, AR_HELD_UNTOLD));
    m->kind = kind;
    m->h = h;
    m->eps = eps;
    m->hop = hop;
    ar_status st = init_param(&m->weight, ctx, m, "weight", AR_INIT_ONES);
    if (st == AR_OK && kind == AR_NORM_LAYER)
        st = init_param(&m->bias, ctx, m, "bias", AR_INIT_UNIFORM_BIAS);
    return ari_module_end(gives, &m->base, st);
}

ar_status ar_norm_create(ar_module **gives, ar_ctx *ctx, const char *name, ar_norm_kind kind, size_t h, double eps)
{
    return ari_norm_create(gives, ctx, name, kind, h, eps, (ar_hop){ari_placed_stream(ctx), ari_placed_stream(ctx)});
}
