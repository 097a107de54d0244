/* SPDX-License-Identifier: Apache-2.0 */
/* The way of a bucket: packed, summed over its groups, copied back, on the queue that carries it. */
#include <stdlib.h>

#include "anyrank/arith.h"
#include "ref/core/record.h"
#include "ref/core/size.h"
#include "ref/train/ddp.h"
#include "ref/train/faults.h"

/* --- memory ------------------------------------------------------------------------------------------------------- */

static ar_status alloc_one(ar_ddp *d, ari_bucket *b)
{
    ar_ctx *ctx = d->ctx;
    AR_TRY(ar_event_create(&b->produced));
    if (!b->moves)
        return AR_OK;
    for (size_t i = 0; i < b->info.params; i++)
        AR_TRY(ctx->arith->grad_ensure(ctx, b->slot[i].param));
    const size_t bytes = ctx->arith->bucket_bytes(b->info.elements, b->info.storage);
    AR_TRY(ctx->device->ops->alloc(ctx->device, &b->storage, bytes));
    b->info.storage_bytes = bytes;
    return ctx->arith->bucket_zero(ctx, ctx->queue, b->storage, b->info.elements, b->info.storage);
}

ar_status ari_buckets_alloc(ar_ddp *d)
{
    for (size_t i = 0; i < d->count; i++)
        AR_TRY(alloc_one(d, &d->buckets[i]));
    if (!d->options.find_unused || !ari_ddp_has_peers(d))
        return AR_OK;
    return d->ctx->device->ops->alloc(d->ctx->device, &d->used_device, d->trained);
}

void ari_buckets_free(ar_ddp *d)
{
    const ar_device_ops *dev = d->ctx->device->ops;
    for (size_t i = 0; d->buckets && i < d->count; i++) {
        ar_event_destroy(d->buckets[i].produced);
        dev->free(d->ctx->device, d->buckets[i].storage);
    }
    dev->free(d->ctx->device, d->used_device);
    free(d->buckets);
    free(d->all_counts);
    free(d->offsets);
    free(d->bucketed);
    free(d->slots);
}

/* --- the state of a step ------------------------------------------------------------------------------------------ */

/* The part of bucket elements [own, own + count) that lies in [at, at + elements): ZeRO's share of a parameter. */
static void own_part(const ar_ddp *d, ar_param *p, const ar_bucket_info *b, size_t at)
{
    size_t from = 0;
    const bool any = ari_overlap(&from, &p->own_count, at, ar_tensor_count(&p->value), b->own_start, b->own_count);
    p->own_start = any ? from - at : 0;
    p->sharded = ari_ddp_has_peers(d);
}

void ari_buckets_reset(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained; i++)
        d->slots[i].ready = d->slots[i].packed = false;
    for (size_t i = 0; i < d->count; i++) {
        d->buckets[i].info.state = AR_BUCKET_FILLING;
        d->buckets[i].info.ready = 0;
    }
    d->next = 0;
}

/* --- pack, reduce, copy back -------------------------------------------------------------------------------------- */

static ar_status pack_one(const ari_bucket *b, ar_queue *q, size_t i)
{
    ar_ctx *ctx = b->ddp->ctx;
    return ctx->arith->bucket_pack(ctx, q, b->storage, b->info.elements, b->info.offset[i], b->info.storage,
                                   b->info.param[i]);
}

ar_status ari_bucket_pack_early(ari_ddp_slot *s)
{
    const ari_bucket *b = &s->ddp->buckets[s->bucket];
    if (!b->moves)
        return AR_OK;
    s->packed = true;
    return pack_one(b, s->ddp->ctx->queue, (size_t)(s - b->slot));
}

static ar_status pack(const ari_bucket *b, ar_queue *q)
{
    bool skip;
    AR_TRY(ari_fault_before_pack(&skip, b, q));
    for (size_t i = 0; i < b->info.params && !skip; i++) {
        if (!b->slot[i].packed && !ari_fault_left_out(&b->slot[i]))
            AR_TRY(pack_one(b, q, i));
    }
    return ari_fault_after_pack(b, q);
}

/* Terms that are spread over tp are complete after its copy, then everything is summed over dp. */
static ar_status reduce(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    ar_ctx *ctx = d->ctx;
    if (b->info.spread)
        AR_TRY(ctx->arith->bucket_reduce(ctx, q, b->storage, b->info.elements, b->info.storage, ari_ddp_tp(d), NULL,
                                         b->tag));
    if (ar_faulty(ctx, AR_FAULT_dp_group_missing))
        return AR_OK;
    return ctx->arith->bucket_reduce(ctx, q, b->storage, b->info.elements, b->info.storage, ari_ddp_dp(d), b->counts,
                                     b->tag);
}

static ar_status copy_back(const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    if (ar_faulty(ctx, AR_FAULT_step_before_copy_back)) /* it comes after the update: for nobody */
        return AR_OK;
    for (size_t i = 0; i < b->info.params; i++) {
        if (!ari_fault_left_out(&b->slot[i]))
            AR_TRY(ctx->arith->bucket_unpack(ctx, q, b->info.param[i], ar_const(b->storage), b->info.elements,
                                             b->info.offset[i], b->info.storage));
    }
    return AR_OK;
}

static ar_status carry(const ari_bucket *b, ar_queue *q)
{
    const ar_ctx *ctx = b->ddp->ctx;
    if (ari_fault_skips(b))
        return AR_OK;
    AR_TRY(pack(b, q));
    AR_TRY(reduce(b, q));
    if (ar_faulty(ctx, AR_FAULT_bucket_reduced_twice))
        AR_TRY(reduce(b, q));
    return copy_back(b, q);
}

static ar_status run(void *arg, ar_queue *on)
{
    const ari_bucket *b = arg;
    if (!b->moves)
        return AR_OK;
    ari_span_begin("bucket %zu", b->info.index);
    return ari_ddp_fail_in_flight(b->ddp, ari_span_end(carry(b, on)));
}

ar_status ari_bucket_launch(ar_ddp *d)
{
    ar_ctx *ctx = d->ctx;
    ari_bucket *b = &d->buckets[ari_fault_turn(ctx, d->next, d->count)];
    b->info.state = AR_BUCKET_IN_FLIGHT;
    d->next++;
    for (size_t i = 0; d->options.zero && i < b->info.params; i++) /* now: zeroing a gradient makes it whole again */
        own_part(d, b->info.param[i], &b->info, b->info.offset[i]);
    if (!d->communication) {
        AR_TRY(run(b, ctx->queue));
        b->info.state = AR_BUCKET_REDUCED;
        return AR_OK;
    }
    AR_TRY(ar_event_record(b->produced, ctx->queue));
    AR_TRY(ar_queue_wait(d->communication->queue, b->produced));
    return ar_queue_chain(d->communication->queue, run, b);
}
