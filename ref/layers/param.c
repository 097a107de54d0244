/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/param.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "anyrank/arith.h"
#include "ref/core/boxes.h"
#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/layers/share.h"
#include "ref/numerics/philox.h"

ar_status ar_param_init(ar_param *p, ar_ctx *ctx, const char *name, const ar_layout *layout, bool transposed)
{
    *p = (ar_param){.layout = *layout,
                    .transposed = transposed,
                    .requires_grad = true,
                    .version = 1,
                    .uses = 1,
                    .storage = layout->ndim == 2 ? ctx->storage : AR_F32,
                    .grad_scale = 1.0f};
    const int written = snprintf(p->name, sizeof p->name, "%s", name);
    if (written < 0 || (size_t)written >= sizeof p->name)
        return ar_error_set(AR_ERR_ARG, "a parameter's name has at most %zu bytes: '%s'", sizeof p->name - 1, name);
    size_t shape[AR_MAX_DIMS] = {0};
    for (int d = 0; d < layout->ndim; d++)
        shape[d] = ar_layout_local(layout, d);
    AR_TRY(ar_tensor_view(&p->value, AR_F32, layout->ndim, shape, (ar_buf){NULL}));
    p->own_count = ar_tensor_count(&p->value);
    p->device = ctx->device;
    p->release = ctx->arith->param_release;
    return ctx->device->ops->alloc(ctx->device, &p->value.data, (ar_tensor_count(&p->value) + 1) * sizeof(float));
}

void ar_param_fini(ar_param *p)
{
    if (!p->device)
        return;
    p->release(p);
    p->device->ops->free(p->device, p->value.data);
    *p = (ar_param){0};
}

ar_tensor ar_param_matrix(const ar_param *p)
{
    return p->transposed ? ar_tensor_transposed(&p->value) : p->value;
}

struct fresh {
    const ar_param *p;
    float *host;
    uint64_t key;
    size_t fan_in, fan_out;
};

static void put_fresh(void *user, const ari_box_run *r)
{
    const struct fresh *f = user;
    for (size_t i = 0; i < r->count; i++)
        f->host[r->local_index + i] =
            ari_init_value(f->p->init, f->key, r->full + i, f->fan_in, f->fan_out, f->p->init_range);
}

/* The mistake of seeding every shard alike: the indices of the group's first rank. A single box begins at 0 there, also
 * where the ranks' parts are of different sizes; one of several (q | k | v) at the beginning of its own part. */
static ar_layout first_shard(const ar_layout *o, int rank)
{
    ar_layout first = *o;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            ar_box *b = &first.box[k];
            const size_t back = o->nbox == 1 ? b->global[d] : b->extent[d] * (size_t)rank;
            if (b->extent[d] < o->shape[d] && back <= b->global[d])
                b->global[d] -= back;
        }
    }
    return first;
}

/* Which boxes of the full tensor the values come from: the own ones. Two mistakes: of parts that neighbouring ranks
 * hold copies of (KV heads), rank r takes part r mod P of the P there are; of packed blocks (q | k | v), it takes its
 * N-th of all rows as if they were one block. */
static ar_layout source_of(const ar_layout *o, ar_ctx *ctx)
{
    const size_t n = (size_t)ar_comm_size(ctx->tp), r = (size_t)ar_comm_rank(ctx->tp);
    ar_layout at = *o;
    for (size_t k = 0; k < o->nbox; k++) {
        for (int d = 0; d < o->ndim; d++) {
            const ar_box *b = &o->box[k];
            if (b->extent[d] == o->shape[d])
                continue;
            if (o->replicas > 1 && ar_faulty(ctx, AR_FAULT_kv_replica_wrong_head))
                at.box[k].global[d] = r % (n / (size_t)o->replicas) * b->extent[d];
            if (o->nbox > 1 && ar_faulty(ctx, AR_FAULT_gate_up_interleaved_wrong))
                at.box[k].global[d] = r * (o->shape[d] / n) + b->local[d];
        }
    }
    return at;
}

static ar_status upload(ar_param *p, ar_ctx *ctx, const float *host)
{
    const ar_buf value = p->value.data;
    AR_TRY(ar_ctx_upload(ctx, &p->value, host));
    if (p->storage == AR_BF16)
        AR_TRY(
            ctx->device->ops->round_bf16(ctx->device, ctx->queue, value, ar_const(value), ar_tensor_count(&p->value)));
    p->version++;
    return AR_OK;
}

ar_status ar_param_fresh(ar_param *p, ar_ctx *ctx, uint64_t seed)
{
    const int n = ar_comm_size(ctx->tp);
    float *host = NULL;
    AR_TRY(ari_alloc((void **)&host, ar_tensor_count(&p->value) + 1, sizeof *host, p->name));
    if (ar_faulty(ctx, AR_FAULT_init_replica_differs) && p->layout.replicas > 1)
        seed += (uint64_t)ar_comm_rank(ctx->tp);
    if (ar_faulty(ctx, AR_FAULT_dp_init_differs))
        seed += (uint64_t)ar_comm_rank(ctx->dp);
    struct fresh f = {p, host, ari_stream_key(seed, p->name), p->fan_in, p->fan_out};
    ar_layout at = source_of(&p->layout, ctx);
    if (ar_faulty(ctx, AR_FAULT_init_per_shard_seed))
        at = first_shard(&p->layout, ar_comm_rank(ctx->tp));
    if (ar_faulty(ctx, AR_FAULT_init_local_fan) && p->layout.replicas == 1 && n > 1) {
        const ar_tensor local = ar_param_matrix(p);
        f.fan_out = local.ndim > 1 ? local.shape[0] : p->fan_out;
        f.fan_in = local.ndim > 1 ? local.shape[1] : p->fan_in;
    }
    ari_for_each_run(&p->value, &at, put_fresh, &f);
    const ar_status st = upload(p, ctx, host);
    free(host);
    return st;
}

ar_status ar_param_set(ar_param *p, ar_ctx *ctx, const float *full)
{
    float *host = NULL;
    AR_TRY(ari_alloc((void **)&host, ar_tensor_count(&p->value) + 1, sizeof *host, p->name));
    const ar_layout at = source_of(&p->layout, ctx);
    ari_layout_take(host, &p->value, &at, full);
    const ar_status st = upload(p, ctx, host);
    free(host);
    return st;
}

ar_status ar_param_tap(const ar_param *p, ar_ctx *ctx, char pass, const ar_tensor *t)
{
    const ar_layout layout = ari_whole_layout(p, ctx);
    return ar_tap(ctx, p->name, pass, t, &layout);
}

static ar_status reduce_one(ar_param *p, ar_ctx *ctx)
{
    if (!p->requires_grad)
        return AR_OK;
    if (p->spread)
        AR_TRY(ctx->arith->grads_reduce(ctx, &p, 1, ctx->tp, p->name));
    if (!ar_faulty(ctx, AR_FAULT_dp_group_missing))
        AR_TRY(ctx->arith->grads_reduce(ctx, &p, 1, ctx->dp, p->name));
    return AR_OK;
}

/* Which parameters got a gradient on any rank of a group: one that got none is left alone by an optimizer, as it is on
 * one rank. spread: of those alone whose terms are spread over the group. */
static ar_status agree_used(ar_param *const *params, size_t n, ar_ctx *ctx, ar_comm *over, bool spread)
{
    uint8_t *used = NULL;
    ar_tensor t;
    ar_status st = AR_OK;
    if (ar_comm_size(over) == 1)
        return AR_OK;
    AR_TRY(ari_alloc_zero((void **)&used, n, sizeof *used, "used parameters"));
    for (size_t i = 0; i < n; i++)
        used[i] = params[i]->has_grad;
    AR_TRY_TO(done, st, ar_ctx_tensor(ctx, &t, AR_U8, 1, &n));
    AR_TRY_TO(done, st, ar_ctx_upload(ctx, &t, used));
    AR_TRY_TO(done, st,
              ar_comm_all_reduce(over, ctx->queue, t.data, ar_const(t.data), n, AR_U8, AR_MAX, "used parameters"));
    AR_TRY_TO(done, st, ar_ctx_download(ctx, used, &t));
    ar_ctx_release(ctx, &t);
    for (size_t i = 0; i < n; i++)
        params[i]->has_grad =
            params[i]->requires_grad && used[i] && (params[i]->has_grad || params[i]->spread || !spread);
done:
    free(used);
    return st;
}

static bool any_spread(ar_param *const *params, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (params[i]->spread)
            return true;
    }
    return false;
}

/* The whole gradient, of which each data-parallel rank holds a copy, or this rank's share of it. */
static ar_status tap_grad(const ar_param *p, ar_ctx *ctx)
{
    ar_tensor g;
    ar_layout share;
    AR_TRY(ar_ctx_tensor(ctx, &g, AR_F32, p->value.ndim, p->value.shape));
    AR_TRY(ar_param_grad_value(p, ctx, &g));
    if (p->sharded) {
        AR_TRY(ari_share_layout(&share, p, p->own_start, p->own_count));
        AR_TRY(ar_tap(ctx, p->name, 'g', &g, &share));
    } else {
        AR_TRY(ar_param_tap(p, ctx, 'g', &g));
    }
    ar_ctx_release(ctx, &g);
    return AR_OK;
}

/* The mistake of one rank's own order, as where gradients are reduced as they become ready: each two neighbours change
 * places. */
static size_t swapped(size_t i, size_t n)
{
    return (i ^ 1) < n ? i ^ 1 : i;
}

ar_status ar_params_tap_grads(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    for (size_t i = n; i-- > 0 && ar_tapped(ctx);)
        AR_TRY(tap_grad(params[i], ctx));
    return AR_OK;
}

ar_status ar_params_reduce(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    const bool own_order = ar_faulty(ctx, AR_FAULT_collective_order_swapped) && ar_comm_rank(ctx->world) == 1;
    for (size_t i = n; i-- > 0;)
        AR_TRY(reduce_one(params[own_order ? swapped(i, n) : i], ctx));
    if (any_spread(params, n))
        AR_TRY(agree_used(params, n, ctx, ctx->tp, true));
    AR_TRY(agree_used(params, n, ctx, ctx->dp, false));
    return ar_params_tap_grads(params, n, ctx);
}

/* The mistake of taking the world for the group: every rank gets the first one's shard, as far as it fits into each. */
static ar_status broadcast_over_world(ar_param *p, ar_ctx *ctx)
{
    const size_t one = 1;
    int64_t count = (int64_t)ar_tensor_count(&p->value);
    ar_tensor t;
    AR_TRY(ar_ctx_tensor(ctx, &t, AR_I64, 1, &one));
    AR_TRY(ar_ctx_upload(ctx, &t, &count));
    AR_TRY(ar_comm_all_reduce(ctx->world, ctx->queue, t.data, ar_const(t.data), 1, AR_I64, AR_MIN, p->name));
    AR_TRY(ar_ctx_download(ctx, &count, &t));
    ar_ctx_release(ctx, &t);
    return ar_comm_broadcast(ctx->world, ctx->queue, p->value.data, (size_t)count, AR_F32, 0, p->name);
}

/* bf16 numbers in fp32 words: half of the bytes need to move. */
static ar_status broadcast_bf16(ar_param *p, ar_ctx *ctx)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t n = ar_tensor_count(&p->value);
    ar_tensor narrow;
    AR_TRY(ar_ctx_tensor(ctx, &narrow, AR_BF16, 1, &n));
    AR_TRY(dev->narrow_bf16(ctx->device, ctx->queue, narrow.data, ar_const(p->value.data), n));
    AR_TRY(ar_comm_broadcast(ctx->dp, ctx->queue, narrow.data, n, AR_BF16, 0, p->name));
    AR_TRY(dev->widen_bf16(ctx->device, ctx->queue, p->value.data, ar_const(narrow.data), n));
    ar_ctx_release(ctx, &narrow);
    return AR_OK;
}

static ar_status broadcast_one(ar_param *p, ar_ctx *ctx)
{
    p->version++;
    if (ar_faulty(ctx, AR_FAULT_dp_broadcast_over_world))
        return broadcast_over_world(p, ctx);
    if (p->storage == AR_BF16)
        return broadcast_bf16(p, ctx);
    const bool half = ar_faulty(ctx, AR_FAULT_collective_dtype_mismatch) && ar_comm_rank(ctx->dp) == 1;
    return ar_comm_broadcast(ctx->dp, ctx->queue, p->value.data, ar_tensor_count(&p->value), half ? AR_BF16 : AR_F32, 0,
                             p->name);
}

ar_status ar_params_broadcast(ar_param *const *params, size_t n, ar_ctx *ctx)
{
    if (ar_faulty(ctx, AR_FAULT_dp_init_differs))
        return AR_OK;
    for (size_t i = 0; i < n && ar_comm_size(ctx->dp) > 1; i++)
        AR_TRY(broadcast_one(params[i], ctx));
    return AR_OK;
}
