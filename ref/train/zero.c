/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO stage 1 over the buckets of a DDP object. A bucket's elements are those of its parameters' matrices one after
 * the other; of them every data-parallel rank has one slice: of the gradient (complete there alone), of the state and
 * of the update. Then the slices are gathered. What an element becomes does not depend on who makes it. */
#include "ref/train/zero.h"

#include <stdlib.h>

#include "ref/core/context.h"
#include "ref/core/size.h"
#include "ref/layers/share.h"
#include "ref/train/faults.h"
#include "ref/train/state.h"

/* This rank's part of one parameter. */
typedef struct piece {
    size_t bucket;
    size_t at; /* of its first element in the bucket */
    ari_state state;
} piece;

struct ari_zero {
    ar_ddp *ddp;       /* borrowed */
    ar_device *device; /* borrowed; owns the state */
    piece *pieces;     /* [n], bucket after bucket */
    size_t n;
    size_t *counts; /* [data-parallel ranks]: the slices of the bucket under way */
    size_t bytes;   /* of all state */
};

/* Memory of a step, large enough for each bucket. */
typedef struct room {
    ar_tensor weights;  /* of a bucket */
    ar_tensor narrow;   /* the same in bf16 */
    ar_tensor gradient; /* of a slice */
    ar_tensor value;    /* of a parameter's gradient */
} room;

/* --- making ------------------------------------------------------------------------------------------------------- */

/* The part of parameter i of a bucket that lies in this rank's slice, if any. */
static ar_status add_piece(ari_zero *z, ar_ctx *ctx, const ar_bucket_info *b, size_t i, const ar_optimizer_options *o)
{
    ar_param *p = b->param[i];
    size_t from = 0, count = 0;
    if (!ari_overlap(&from, &count, b->offset[i], ar_tensor_count(&p->value), b->own_start, b->own_count))
        return AR_OK;
    piece *s = &z->pieces[z->n++]; /* counted first, so that destroy frees half of it too */
    *s = (piece){b->index, from, {.param = p, .start = from - b->offset[i], .count = count}};
    return ari_state_create(&s->state, &z->bytes, ctx, o);
}

static ar_status add_buckets(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o)
{
    size_t params = 0;
    for (size_t i = 0; i < ar_ddp_buckets(z->ddp); i++)
        params += ar_ddp_bucket(z->ddp, i).params;
    AR_TRY(ari_alloc_zero((void **)&z->pieces, params, sizeof *z->pieces, "shares of parameters"));
    AR_TRY(ari_alloc_zero((void **)&z->counts, (size_t)ar_comm_size(ctx->dp), sizeof *z->counts, "slices"));
    for (size_t i = 0; i < ar_ddp_buckets(z->ddp); i++) {
        const ar_bucket_info b = ar_ddp_bucket(z->ddp, i);
        for (size_t k = 0; k < b.params; k++)
            AR_TRY(add_piece(z, ctx, &b, k, o));
    }
    return AR_OK;
}

ar_status ari_zero_create(ari_zero **gives, ar_ctx *ctx, ar_ddp *ddp, const ar_optimizer_options *o)
{
    ari_zero *z = NULL;
    if (ar_ddp_options_of(ddp).zero != 1)
        return ar_error_set(
            AR_ERR_ARG,
            "an optimizer of shares of %s, whose gradients are not shared out: its DDP options need zero = 1",
            ar_ddp_name(ddp));
    AR_TRY(ari_alloc_zero((void **)&z, 1, sizeof *z, "an optimizer of shares"));
    z->ddp = ddp;
    z->device = ctx->device;
    const ar_status st = add_buckets(z, ctx, o);
    if (st != AR_OK) {
        ari_zero_destroy(z);
        return st;
    }
    *gives = z;
    return AR_OK;
}

void ari_zero_destroy(ari_zero *z)
{
    if (!z)
        return;
    for (size_t i = 0; i < z->n; i++)
        ari_state_destroy(&z->pieces[i].state, z->device);
    free(z->pieces);
    free(z->counts);
    free(z);
}

size_t ari_zero_bytes(const ari_zero *z)
{
    return z->bytes;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

/* Everything is taken before the first weight changes: later there is nothing left to run out of. */
static ar_status take_room(room *r, ar_ctx *ctx, const ari_zero *z)
{
    size_t weights = 0, narrow = 0, gradient = 0, value = 0;
    for (size_t i = 0; i < ar_ddp_buckets(z->ddp); i++) {
        const ar_bucket_info b = ar_ddp_bucket(z->ddp, i);
        weights = b.elements > weights ? b.elements : weights;
        gradient = b.own_count > gradient ? b.own_count : gradient;
        narrow = b.storage == AR_BF16 && b.elements > narrow ? b.elements : narrow;
        for (size_t k = 0; k < b.params; k++) {
            const size_t count = ar_tensor_count(&b.param[k]->value);
            value = count > value ? count : value;
        }
    }
    AR_TRY(ar_ctx_tensor(ctx, &r->weights, AR_F32, 1, &weights));
    AR_TRY(ar_ctx_tensor(ctx, &r->narrow, AR_BF16, 1, &narrow));
    AR_TRY(ar_ctx_tensor(ctx, &r->gradient, AR_F32, 1, &gradient));
    return ar_ctx_tensor(ctx, &r->value, AR_F32, 1, &value);
}

static void give_room(room *r, ar_ctx *ctx)
{
    ar_ctx_release(ctx, &r->value);
    ar_ctx_release(ctx, &r->gradient);
    ar_ctx_release(ctx, &r->narrow);
    ar_ctx_release(ctx, &r->weights);
}

/* Elements [start, start + count) of a bucket's gradient, into `out`. */
static ar_status gradient_run(ar_buf out, ar_ctx *ctx, const ar_bucket_info *b, const room *r, size_t start,
                              size_t count)
{
    for (size_t i = 0; i < b->params; i++) {
        const ar_param *p = b->param[i];
        size_t from = 0, n = 0;
        ar_tensor g;
        if (!ari_overlap(&from, &n, b->offset[i], ar_tensor_count(&p->value), start, count))
            continue;
        AR_TRY(ar_tensor_view(&g, AR_F32, p->value.ndim, p->value.shape, r->value.data));
        AR_TRY(ar_param_grad_value(p, ctx, &g));
        AR_TRY(ari_share_get(ctx, ar_buf_at(out, (from - start) * sizeof(float)), p, &g, from - b->offset[i], n));
    }
    return AR_OK;
}

/* The gradient of this rank's slice. A fault may have it begin elsewhere, and then continue at the bucket's
 * beginning. */
static ar_status slice_gradient(ar_ctx *ctx, const ar_bucket_info *b, const room *r, float scale)
{
    const size_t start = ari_fault_slice_start(ctx, b);
    const size_t left = b->elements - start, first = left < b->own_count ? left : b->own_count;
    const ar_buf g = r->gradient.data;
    AR_TRY(gradient_run(g, ctx, b, r, start, first));
    AR_TRY(gradient_run(ar_buf_at(g, first * sizeof(float)), ctx, b, r, 0, b->own_count - first));
    if (scale == 1.0f)
        return AR_OK;
    return ctx->device->ops->scale(ctx->device, ctx->queue, g, ar_const(g), scale, b->own_count);
}

/* The weights of this rank's slice, updated, at their place in the bucket. */
static ar_status update_slice(const ari_zero *z, ar_ctx *ctx, const ar_bucket_info *b, const room *r,
                              const ar_optimizer_options *o, const ari_optimizer_clock *clock)
{
    for (size_t i = 0; i < z->n; i++) {
        const piece *s = &z->pieces[i];
        if (s->bucket != b->index)
            continue;
        const ari_state *state = &s->state;
        ari_update_part part = state->part;
        part.weight = ar_buf_at(r->weights.data, s->at * sizeof(float));
        AR_TRY(ari_share_get(ctx, part.weight, state->param, &state->param->value, state->start, state->count));
        if (!ari_is_updated(state->param))
            continue;
        const ari_optimizer_constants k = ari_update_constants(clock, o, state->param, ctx);
        const ar_buf g = ar_buf_at(r->gradient.data, (s->at - b->own_start) * sizeof(float));
        AR_TRY(ari_update_apply(ctx, &part, ar_const(g), &k, state->count));
    }
    return AR_OK;
}

/* Weights of bf16 storage are bf16 numbers in fp32 words: half of the bytes need to move. */
static ar_status gather_bf16(const ari_zero *z, ar_ctx *ctx, const ar_bucket_info *b, const room *r)
{
    const ar_device_ops *dev = ctx->device->ops;
    const size_t own = b->own_start;
    const ar_buf all = r->narrow.data, mine = ar_buf_at(all, own * 2), weights = r->weights.data;
    AR_TRY(dev->narrow_bf16(ctx->device, ctx->queue, mine, ar_cbuf_at(ar_const(weights), own * sizeof(float)),
                            b->own_count));
    AR_TRY(ar_comm_all_gather(ctx->dp, ctx->queue, all, ar_const(mine), z->counts, AR_BF16, ar_ddp_name(z->ddp)));
    return dev->widen_bf16(ctx->device, ctx->queue, weights, ar_const(all), b->elements);
}

/* Each slice from the rank that updated it. */
static ar_status gather(const ari_zero *z, ar_ctx *ctx, const ar_bucket_info *b, const room *r)
{
    const int ranks = ar_comm_size(ctx->dp);
    size_t start = 0;
    for (int i = 0; i < ranks; i++)
        ar_comm_slice(b->elements, ranks, i, &start, &z->counts[i]);
    if (b->storage == AR_BF16)
        return gather_bf16(z, ctx, b, r);
    const ar_buf all = r->weights.data, own = ar_buf_at(all, b->own_start * sizeof(float));
    return ar_comm_all_gather(ctx->dp, ctx->queue, all, ar_const(own), z->counts, AR_F32, ar_ddp_name(z->ddp));
}

/* The bucket's weights back into the parameters; own: only this rank's slice. */
static ar_status put_weights(ar_ctx *ctx, const ar_bucket_info *b, const room *r, bool own)
{
    const size_t start = own ? b->own_start : 0, count = own ? b->own_count : b->elements;
    for (size_t i = 0; i < b->params; i++) {
        ar_param *p = b->param[i];
        size_t from = 0, n = 0;
        if (!ari_is_updated(p))
            continue;
        p->version++;
        if (!ari_overlap(&from, &n, b->offset[i], ar_tensor_count(&p->value), start, count))
            continue;
        const ar_cbuf weights = ar_cbuf_at(ar_const(r->weights.data), from * sizeof(float));
        AR_TRY(ari_share_put(ctx, weights, p, &p->value, from - b->offset[i], n));
    }
    return AR_OK;
}

static ar_status step_bucket(const ari_zero *z, ar_ctx *ctx, const ar_bucket_info *b, const room *r,
                             const ar_optimizer_options *o, const ari_optimizer_clock *clock, float scale)
{
    const bool missing = ar_faulty(ctx, AR_FAULT_zero_gather_missing);
    AR_TRY(slice_gradient(ctx, b, r, scale));
    AR_TRY(update_slice(z, ctx, b, r, o, clock));
    if (!missing)
        AR_TRY(gather(z, ctx, b, r));
    return put_weights(ctx, b, r, missing);
}

/* The gradients may be those of another object, whose buckets cut them elsewhere. */
static ar_status check_shares(const ari_zero *z)
{
    for (size_t i = 0; i < z->n; i++) {
        const ari_state *s = &z->pieces[i].state;
        const ar_param *p = s->param;
        if (ari_is_updated(p) && p->sharded && (s->start != p->own_start || s->count != p->own_count))
            return ar_error_set(AR_ERR_ARG,
                                "%s: this rank has elements %zu to %zu of the gradient, the optimizer keeps state of "
                                "%zu to %zu: both need the buckets of one DDP object, %s",
                                p->name, p->own_start, p->own_start + p->own_count, s->start, s->start + s->count,
                                ar_ddp_name(z->ddp));
    }
    return AR_OK;
}

ar_status ari_zero_step(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o, ari_optimizer_clock *clock,
                        float scale)
{
    const size_t n = ar_ddp_buckets(z->ddp);
    room r;
    ar_status st = AR_OK;
    AR_TRY(check_shares(z));
    AR_TRY(take_room(&r, ctx, z));
    ari_update_begin(clock, o, ctx);
    for (size_t i = 0; i < n && st == AR_OK; i++) {
        const ar_bucket_info b = ar_ddp_bucket(z->ddp, i);
        st = step_bucket(z, ctx, &b, &r, o, clock, scale);
    }
    give_room(&r, ctx);
    AR_TRY(st);
    for (size_t i = 0; i < n; i++) {
        const ar_bucket_info b = ar_ddp_bucket(z->ddp, i);
        for (size_t k = 0; k < b.params; k++)
            AR_TRY(ar_param_tap(b.param[k], ctx, 'n', &b.param[k]->value));
    }
    for (size_t i = 0; i < z->n; i++)
        AR_TRY(ari_state_tap(&z->pieces[i].state, ctx, o));
    return AR_OK;
}

/* --- checkpoints -------------------------------------------------------------------------------------------------- */

ar_status ari_zero_save(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o, ar_optimizer_state_fn emit, void *user)
{
    for (size_t i = 0; i < z->n; i++)
        AR_TRY(ari_state_save(&z->pieces[i].state, ctx, o, emit, user));
    return AR_OK;
}

ar_status ari_zero_load(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o, ari_state_find find, void *user)
{
    for (size_t i = 0; i < z->n; i++)
        AR_TRY(ari_state_load(&z->pieces[i].state, ctx, o, find, user));
    return AR_OK;
}
