/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/param.h"

#include <stdio.h>

#include "ref/context/context_private.h"
#include "ref/core/tensor_private.h"
#include "ref/core/text.h"
#include "ref/layers/faults.h"
#include "ref/layers/param_private.h"
#include "ref/numerics/philox.h"

ar_status ar_param_init(ar_param *p, ar_ctx *ctx, const char *name, const ar_layout *layout, bool transposed)
{
    *p = (ar_param){.layout = *layout,
                    .transposed = transposed,
                    .requires_grad = true,
                    .version = 1,
                    .uses = 1,
                    .grad_scale = 1.0f};
    const int written = snprintf(p->name, sizeof p->name, "%s", name);
    if (written < 0 || (size_t)written >= sizeof p->name)
        return ar_error_set(AR_ERR_ARG, "a parameter's name has at most %zu bytes: '%s'", sizeof p->name - 1, name);
    for (int d = 0; d < layout->ndim; d++) {
        if (layout->shape[d] == 0)
            return ar_error_set(AR_ERR_SHAPE, "%s: shape %s has no elements", name,
                                ARI_SHOW_SHAPE(layout->ndim, layout->shape));
    }
    const ar_dtype dtype = layout->ndim == 2 ? ctx->matrices : AR_F32;
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < layout->ndim; d++)
        shape[d] = ari_layout_local(layout, d);
    AR_TRY(ar_tensor_view(&p->value, dtype, layout->ndim, shape, (ar_buf){NULL}));
    p->own_count = ar_tensor_count(&p->value);
    p->device = ctx->device;
    p->release = ctx->arith->param_release;
    return ari_ctx_alloc(ctx, &p->value.data, (ar_tensor_count(&p->value) + 1) * ar_dtype_bytes(dtype));
}

void ar_param_fini(ar_param *p)
{
    if (!p->device)
        return;
    p->release(p);
    p->device->ops->free(p->device, NULL, p->value.data);
    *p = (ar_param){0};
}

struct fresh {
    const ar_param *p;
    float *host;
    uint64_t key;
    const ari_draw *draw;
};

/* flatten: compiles all called functions for each instruction set too. */
ARI_SIMD __attribute__((flatten)) static void put_fresh(void *user, const ari_box_run *r)
{
    const struct fresh *f = user;
    ari_init_values(f->host + r->local_index, f->p->init, f->key, r->full, r->count, f->draw->fan_in, f->draw->fan_out,
                    f->p->init_range);
}

/* Uploads all of the value, or this rank's share if it is shared out. */
static ar_status upload(ar_param *p, ar_ctx *ctx, const float *host)
{
    ar_tensor full_value = p->value;
    p->version++;
    if (ctx->device->hollow) /* the device has no contents, and host is NULL */
        return AR_OK;
    if (!ari_value_is_shared(p))
        return ar_ctx_upload_floats(ctx, &full_value, host, ar_tensor_count(&full_value));
    AR_TRY(ar_ctx_tensor(ctx, &full_value, p->value.dtype, p->value.ndim, p->value.shape));
    AR_TRY(ar_ctx_upload_floats(ctx, &full_value, host, ar_tensor_count(&full_value)));
    AR_TRY(ari_share_get(ctx, p->share->value, p, &full_value, p->share->start, p->share->count));
    ar_ctx_release(ctx, &full_value);
    return AR_OK;
}

ar_status ari_param_fresh(ar_param *p, ar_ctx *ctx, uint64_t seed)
{
    ari_draw draw = {.seed = seed, .fan_in = p->fan_in, .fan_out = p->fan_out, .src_layout = p->layout};
    ARI_OWNED float *host = NULL;
    if (ctx->device->hollow)
        return upload(p, ctx, NULL);
    AR_TRY(ARI_ALLOC(&host, ar_tensor_count(&p->value) + 1, p->name));
    ari_fault_draw(&draw, p, ctx);
    char name_buffer[sizeof p->name];
    const char *name = ari_fault_layer_name(name_buffer, sizeof name_buffer, ctx, p->name);
    struct fresh f = {p, host, ari_stream_key(draw.seed, name), &draw};
    ari_for_each_run(&p->value, &draw.src_layout, put_fresh, &f);
    return upload(p, ctx, host);
}

ar_status ar_param_set(ar_param *p, ar_ctx *ctx, const float *full)
{
    ar_layout src_layout = p->layout;
    ARI_OWNED float *host = NULL;
    AR_TRY(ARI_ALLOC(&host, ar_tensor_count(&p->value) + 1, p->name));
    ari_fault_source(&src_layout, ctx);
    ari_layout_take(host, &p->value, &src_layout, full);
    return upload(p, ctx, host);
}

ar_status ari_param_tap(const ar_param *p, ar_ctx *ctx, char pass, const ar_tensor *t)
{
    const ar_layout layout = ari_full_layout(p, ctx);
    return ari_tap(ctx, p->name, pass, t, &layout);
}

static ar_status reduce_one(ar_param *p, ar_ctx *ctx)
{
    if (!p->requires_grad)
        return AR_OK;
    if (p->spread)
        AR_TRY(ctx->arith->grad_reduce(ctx, p, ctx->tp, p->name));
    if (p->ends && !ari_faulty(ctx, "pp_tied_not_summed"))
        AR_TRY(ctx->arith->grad_reduce(ctx, p, ctx->ends, p->name));
    if (!ari_faulty(ctx, "dp_group_missing"))
        AR_TRY(ctx->arith->grad_reduce(ctx, p, ari_ctx_data(ctx, p->expert), p->name));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_GRADIENT_SUM, .name = p->name, .param = &p, .params = 1);
}

/* Finds out which parameters have a gradient on any rank of a group. The optimizer skips a parameter without gradient,
 * as on one rank. spread: only parameters whose terms are spread over the group. */
static ar_status agree_used(ar_param *const *params, size_t n, ar_ctx *ctx, ar_comm *group, bool spread)
{
    ARI_OWNED uint8_t *used = NULL;
    if (ar_comm_size(group) == 1)
        return AR_OK;
    AR_TRY(ARI_ALLOC_ZERO(&used, n, "used parameters"));
    for (size_t i = 0; i < n; i++)
        used[i] = params[i]->has_grad;
    AR_TRY(ari_combine(ctx, group, used, n, AR_U8, AR_MAX, "used parameters"));
    AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_UNUSED, .name = ""));
    for (size_t i = 0; i < n && ctx->device->hollow; i++) /* no peer has answered */
        used[i] = params[i]->has_grad;
    for (size_t i = 0; i < n; i++)
        params[i]->has_grad =
            params[i]->requires_grad && used[i] && (params[i]->has_grad || params[i]->spread || !spread);
    return AR_OK;
}

static bool any_spread(ar_param *const *params, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (params[i]->spread)
            return true;
    }
    return false;
}

/* Taps the full gradient, which every data-parallel rank holds, or this rank's share of it. */
static ar_status tap_grad(const ar_param *p, ar_ctx *ctx)
{
    ar_tensor g;
    ar_layout share;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_param_grad_value(p, ctx, &g));
    if (p->sharded) {
        AR_TRY(ari_share_layout(&share, p, ctx, p->own_start, p->own_count));
        AR_TRY(ari_tap(ctx, p->name, 'g', &g, &share));
    } else {
        AR_TRY(ari_param_tap(p, ctx, 'g', &g));
    }
    ar_ctx_release(ctx, &g);
    return AR_OK;
}

ar_status ari_params_tap_grads(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    for (size_t i = n; i-- > 0 && ari_tapped(ctx);) {
        if (params[i]->requires_grad)
            AR_TRY(tap_grad(params[i], ctx));
    }
    return AR_OK;
}

ar_status ari_params_reduce(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    for (size_t i = n; i-- > 0;)
        AR_TRY(reduce_one(params[ari_fault_turn(ctx, i, n)], ctx));
    if (any_spread(params, n))
        AR_TRY(agree_used(params, n, ctx, ctx->tp, true));
    AR_TRY(agree_used(params, n, ctx, ctx->dp, false));
    return ari_params_tap_grads(params, n, ctx);
}

static ar_status broadcast_one(ar_param *p, ar_ctx *ctx)
{
    p->version++;
    if (ari_value_is_shared(p)) /* the ranks with the same shard */
        return ar_comm_broadcast(ari_ctx_replicate(ctx, p->expert), ctx->queue, p->share->value, p->share->count,
                                 p->value.dtype, 0, p->name);
    if (ari_faulty(ctx, "dp_broadcast_over_world"))
        return ari_fault_broadcast_over_world(p, ctx);
    return ar_comm_broadcast(ari_ctx_data(ctx, p->expert), ctx->queue, p->value.data, ar_tensor_count(&p->value),
                             ari_fault_broadcast_dtype(ctx, p->value.dtype), 0, p->name);
}

ar_status ari_params_broadcast(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    for (size_t i = 0; i < n; i++) {
        if (ar_comm_size(ari_ctx_data(ctx, params[i]->expert)) == 1)
            continue;
        AR_TRY(broadcast_one(params[i], ctx));
        AR_TRY(ARI_NOTE(ctx, .kind = ARI_LEDGER_BROADCAST, .name = params[i]->name, .param = &params[i], .params = 1));
    }
    return AR_OK;
}

/* --- uses --------------------------------------------------------------------------------------------------------- */

/* A gradient is ready when all uses of the parameter in the forward pass are done. */

void ari_param_use(ar_param *p)
{
    p->pending++;
}

/* job: the parameter's address. */
static ar_status finish_use(ar_ctx *ctx, const void *job)
{
    ar_param *const p = *(ar_param *const *)job;
    (void)ctx;
    if (p->pending > 0)
        p->pending--;
    if (p->pending > 0)
        return AR_OK;
    for (int i = 0; i < p->hooks; i++)
        AR_TRY(p->hook[i].ready(p->hook[i].user, p));
    return AR_OK;
}

ar_status ari_param_done(ar_param *p, ar_ctx *ctx)
{
    return ari_defer(ctx, finish_use, &p, sizeof p, NULL, NULL);
}

static int find_hook(const ar_param *p, ar_param_hook hook)
{
    for (int i = 0; i < p->hooks; i++) {
        if (p->hook[i].ready == hook.ready && p->hook[i].user == hook.user)
            return i;
    }
    return -1;
}

ar_status ar_param_add_hook(ar_param *p, ar_param_hook hook)
{
    if (find_hook(p, hook) >= 0)
        return ar_error_set(AR_ERR_ARG, "%s has this hook already", p->name);
    if (p->hooks == AR_PARAM_HOOKS)
        return ar_error_set(AR_ERR_ARG, "%s has %d hooks, which is the most", p->name, p->hooks);
    p->hook[p->hooks++] = hook;
    return AR_OK;
}

void ar_param_remove_hook(ar_param *p, ar_param_hook hook)
{
    const int index = find_hook(p, hook);
    if (index < 0)
        return;
    p->hooks--;
    for (int i = index; i < p->hooks; i++)
        p->hook[i] = p->hook[i + 1];
}

ar_status ari_param_zero_grad(ar_param *p, ar_ctx *ctx)
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

/* Gets the value of a complete, sharded gradient: this rank's elements, and zeros elsewhere. */
static ar_status shared_grad_value(const ar_param *p, ar_ctx *ctx, const ar_tensor *g)
{
    const ar_param_share *s = p->share;
    ar_tensor local_grad;
    AR_TRY(ARI_KERNEL(ctx, fill, g, 0.0f));
    if (s->count == 0)
        return AR_OK;
    AR_TRY(ar_ctx_tensor(ctx, &local_grad, AR_F32, 1, &s->count));
    AR_TRY(ctx->arith->bucket_take(ctx, ctx->queue, local_grad.data, ar_const(s->grad), s->elements, s->offset,
                                   s->count, p->value.dtype));
    AR_TRY(ari_share_put(ctx, ar_const(local_grad.data), p, g, s->start, s->count));
    ar_ctx_release(ctx, &local_grad);
    return AR_OK;
}

ar_status ar_param_grad_value(const ar_param *p, ar_ctx *ctx, const ar_tensor *g)
{
    if (g->dtype != AR_F32 || !ari_tensor_is_contiguous(g) || ar_tensor_count(g) != ar_tensor_count(&p->value))
        return ar_error_set(AR_ERR_SHAPE,
                            "%s: its gradient has %zu elements: expected a contiguous F32 tensor for them", p->name,
                            ar_tensor_count(&p->value));
    AR_TRY(p->share && !p->grad ? shared_grad_value(p, ctx, g) : ctx->arith->grad_value(ctx, g, p));
    if (p->grad_scale == 1.0f)
        return AR_OK;
    return ARI_KERNEL(ctx, scale, g, g, p->grad_scale);
}
