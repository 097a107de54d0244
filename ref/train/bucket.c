/* SPDX-License-Identifier: Apache-2.0 */
/* Moves a bucket through its steps on its queue: pack, reduce over its groups, copy back. */

#include "anyrank/arith.h"
#include "ref/context/context_private.h"
#include "ref/core/record.h"
#include "ref/core/tensor_private.h"
#include "ref/placement/parallel_private.h"
#include "ref/record/ledger.h"
#include "ref/train/faults.h"

/* --- groups, on the queue that carries buckets -------------------------------------------------------------------- */

/* Returns the group of all ranks that have a parameter. */
static ar_comm *data_of(const ari_bucket *b)
{
    return ari_ddp_group(b->ddp, b->expert ? ARI_OVER_EDP : ARI_OVER_DP);
}

static ar_comm *replicate_of(const ari_bucket *b)
{
    if (ar_comm_size(b->ddp->ctx->replicate) == 1)
        return ari_ctx_replicate(b->ddp->ctx, b->expert);
    return ari_ddp_group(b->ddp, b->expert ? ARI_OVER_EXPERT_REPLICATE : ARI_OVER_REPLICATE);
}

/* Returns the group of ranks that shard buckets: all data-parallel ranks if there are no replicas. */
static ar_comm *shard_of(const ari_bucket *b)
{
    if (ar_comm_size(b->ddp->ctx->replicate) == 1)
        return data_of(b);
    return ari_ddp_group(b->ddp, b->expert ? ARI_OVER_EXPERT_SHARD : ARI_OVER_SHARD);
}

/* Returns the group over which a bucket is reduced first: each of its ranks gets the sum or its share of it. */
static ar_comm *reduced_over(const ari_bucket *b)
{
    return b->ddp->stage > 0 ? shard_of(b) : data_of(b);
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

/* Allocates memory for this rank's slice in the form of a bucket of that many elements, which is reduced separately. */
static ar_status alloc_shard(ari_bucket *b)
{
    ar_ctx *ctx = b->ddp->ctx;
    return ari_ctx_alloc(ctx, &b->shard, ctx->arith->bucket_bytes(b->info.own_count, b->info.storage));
}

/* ZeRO-2: makes the gradients of a bucket this rank's slice. */
static ar_status share_gradients(ari_bucket *b)
{
    AR_TRY(alloc_shard(b)); /* this memory counts as the gradients' */
    ari_bucket_share(b);
    for (size_t i = 0; i < b->info.params; i++) {
        ar_param *p = b->info.param[i];
        b->slot[i].share =
            (ar_param_share){.start = p->own_start,
                             .count = p->own_count,
                             .grad = b->shard,
                             .offset = p->own_count ? b->info.offset[i] + p->own_start - b->info.own_start : 0,
                             .elements = b->info.own_count};
        p->share = &b->slot[i].share;
    }
    return AR_OK;
}

static ar_status alloc_one(ar_ddp *d, ari_bucket *b)
{
    ar_ctx *ctx = d->ctx;
    AR_TRY(ar_event_create(&b->produced));
    AR_TRY(ar_event_create(&b->info.reduced));
    if (!b->moves)
        return AR_OK;
    if (d->stage >= 2)
        return share_gradients(b);
    for (size_t i = 0; i < b->info.params; i++) {
        AR_TRY(ctx->arith->grad_ensure(ctx, b->slot[i].param));
        if (ctx->arith->grad_complete) /* sums allocate memory when their first term arrives */
            AR_TRY(ctx->arith->grad_complete(ctx, ctx->queue, b->slot[i].param));
    }
    b->info.storage_bytes = ctx->arith->bucket_bytes(b->info.elements, b->info.storage);
    if (!d->options.zero || ar_comm_size(ctx->replicate) == 1)
        return AR_OK;
    d->shard_bytes += ctx->arith->bucket_bytes(b->info.own_count, b->info.storage);
    return alloc_shard(b);
}

/* With ZeRO-1, other gradients contain values that are not sums. */
bool ari_bucket_is_in_place(const ari_bucket *b)
{
    const ar_ddp *d = b->ddp;
    return b->info.params == 1 && d->ctx->arith->grad_bucket && (!d->options.zero || d->stage >= 2);
}

/* Allocates storage. Buckets are packed, reduced and copied back in the same memory one after the other, on one queue.
 * Faults that pack gradients too early have memory for each bucket, which the memory account ignores. */
static ar_status alloc_storage(ar_ddp *d)
{
    enum { ALIGNED = 64 };
    const ar_arith_ops *arith = d->ctx->arith;
    const bool is_separate = d->ctx->fault;
    size_t total_bytes = 0, offset = 0;
    for (size_t i = 0; i < d->count && d->stage < 2; i++) {
        const size_t bytes = d->buckets[i].info.storage_bytes;
        d->storage_bytes = ari_larger(d->storage_bytes, ari_bucket_is_in_place(&d->buckets[i]) ? 0 : bytes);
        total_bytes += ari_round_up(bytes, ALIGNED);
    }
    AR_TRY(ari_ctx_alloc(d->ctx, &d->storage, is_separate ? total_bytes : d->storage_bytes));
    for (size_t i = 0; i < d->count && d->stage < 2; i++) {
        ari_bucket *b = &d->buckets[i];
        if (!b->moves || (!is_separate && ari_bucket_is_in_place(b)))
            continue;
        b->storage = ar_buf_at(d->storage, offset);
        AR_TRY(arith->bucket_zero(d->ctx, d->ctx->queue, b->storage, b->info.elements, b->info.storage));
        offset += is_separate ? ari_round_up(b->info.storage_bytes, ALIGNED) : 0;
    }
    return AR_OK;
}

/* Returns the scratch size sufficient for every group over which the bucket may be reduced. */
static size_t room_of(const ari_bucket *b)
{
    const ar_ddp *d = b->ddp;
    const ar_arith_ops *arith = d->ctx->arith;
    const size_t n = b->info.elements;
    const ar_dtype storage = b->info.storage;
    size_t max_room = arith->bucket_room(n, storage, reduced_over(b), NULL);
    if (b->info.spread)
        max_room = ari_larger(max_room, arith->bucket_room(n, storage, ari_ddp_group(d, ARI_OVER_TP), NULL));
    if (b->info.ends)
        max_room = ari_larger(max_room, arith->bucket_room(n, storage, ari_ddp_group(d, ARI_OVER_ENDS), NULL));
    return d->stage == 0 ? max_room
                         : ari_larger(max_room, arith->bucket_room(b->info.own_count, storage, replicate_of(b), NULL));
}

ar_status ari_buckets_alloc(ar_ddp *d)
{
    for (size_t i = 0; i < d->count; i++) {
        AR_TRY(alloc_one(d, &d->buckets[i]));
        d->exchange_bytes = ari_larger(d->exchange_bytes, room_of(&d->buckets[i]));
    }
    AR_TRY(alloc_storage(d));
    AR_TRY(ari_ctx_alloc(d->ctx, &d->exchange, d->exchange_bytes));
    if (!d->options.find_unused || !ari_ddp_has_peers(d))
        return AR_OK;
    return ari_ctx_alloc(d->ctx, &d->used_device, d->trained);
}

void ari_buckets_free(ar_ddp *d)
{
    const ar_device_ops *dev = d->ctx->device->ops;
    for (size_t i = 0; d->buckets && i < d->count; i++) {
        ar_event_destroy(d->buckets[i].produced);
        ar_event_destroy(d->buckets[i].info.reduced);
        dev->free(d->ctx->device, d->ctx->queue, d->buckets[i].shard);
    }
    dev->free(d->ctx->device, d->ctx->queue, d->storage);
    dev->free(d->ctx->device, d->ctx->queue, d->exchange);
    dev->free(d->ctx->device, d->ctx->queue, d->used_device);
}

/* --- the state of a step ------------------------------------------------------------------------------------------ */

/* Sets the part of bucket elements [own_start, own_start + own_count) that lies in [offset, offset + elements): this
 * rank's ZeRO shard of a parameter. */
static void own_part(const ari_bucket *bucket, ar_param *p, const ar_bucket_info *b, size_t offset)
{
    size_t begin = 0;
    const bool any = ari_overlap(&begin, &p->own_count, offset, ar_tensor_count(&p->value), b->own_start, b->own_count);
    p->own_start = any ? begin - offset : 0;
    p->sharded = ar_comm_size(ari_ctx_shard(bucket->ddp->ctx, bucket->expert)) > 1;
}

void ari_bucket_share(const ari_bucket *b)
{
    for (size_t i = 0; i < b->info.params; i++)
        own_part(b, b->info.param[i], &b->info, b->info.offset[i]);
}

/* --- pack, reduce, copy back -------------------------------------------------------------------------------------- */

static ar_status pack_one(const ari_bucket *b, ar_queue *q, size_t i)
{
    ar_ctx *ctx = b->ddp->ctx;
    return ctx->arith->bucket_pack(ctx, q, b->storage, b->info.elements, b->info.offset[i], b->info.storage,
                                   b->info.param[i]);
}

static ar_status pack_bucket(const ari_bucket *b, ar_queue *q)
{
    bool skip;
    AR_TRY(ari_fault_before_pack(&skip, b, q));
    for (size_t i = 0; i < b->info.params && !skip; i++) {
        if (!b->slot[i].packed && !ari_fault_left_out(&b->slot[i]))
            AR_TRY(pack_one(b, q, i));
    }
    return ari_fault_after_pack(b, q);
}

static bool is_alone(ar_comm *group)
{
    return !group || ar_comm_size(group) == 1;
}

static size_t size_of(ar_comm *group)
{
    return is_alone(group) ? 1 : (size_t)ar_comm_size(group);
}

static bool adds_by_token(const ar_ddp *d, const ar_param *p)
{
    return p->adds >= AR_ADDS_BY_TOKEN || (p->adds == AR_ADDS_BY_POSITION && d->step.repeats);
}

/* Returns the maximal number of values in the sum of a bucket's element, on a rank that sums over a group of ranks with
 * data, or on all such groups together: the terms of the rank's own samples, plus those of ranks whose terms or whose
 * samples it has already. */
static size_t most_values(const ari_bucket *b, ar_comm *group, size_t samples)
{
    const ar_ddp *d = b->ddp;
    const size_t group_count = size_of(ari_ddp_group(d, ARI_OVER_DP)) / size_of(group);
    size_t of_sample = 0;
    ari_gradient_moves(&d->ctx->layout, d->step.tokens, &of_sample);
    for (size_t i = 0; i < b->info.params; i++) {
        if (b->info.param[i]->adds == AR_ADDS_ANY)
            return SIZE_MAX;
        if (adds_by_token(d, b->info.param[i]))
            of_sample = 2 * d->step.tokens;
    }
    const size_t per_sample = d->step.depths * (group_count > 0 ? group_count : 1) * of_sample;
    return samples > 0 && samples <= SIZE_MAX / per_sample ? samples * per_sample : SIZE_MAX;
}

static size_t times(size_t terms, size_t ranks)
{
    return terms <= SIZE_MAX / ranks ? terms * ranks : SIZE_MAX;
}

/* Reduces the bucket, or this rank's slice of it, over a data-parallel group. */
static ar_status sum_data(const ari_bucket *b, ar_queue *q, ar_buf storage, size_t n, ar_comm *group,
                          const size_t *counts, size_t samples)
{
    ar_ctx *ctx = b->ddp->ctx;
    const ar_most_terms limits = {.before = most_values(b, group, samples)};
    return ctx->arith->bucket_reduce(ctx, q, storage, b->ddp->exchange, n, b->info.storage, group, counts, &limits,
                                     b->tag);
}

/* Reduces the terms that are spread over tp or over both ends of the pipeline, after which they are complete. The other
 * end numbers its buckets differently, so the tag is the parameter's name. data: the group of the next reduction. */
static ar_status sum_spread(const ari_bucket *b, ar_queue *q, ar_buf storage, size_t n, ar_comm *data)
{
    ar_ctx *ctx = b->ddp->ctx;
    const ar_arith_ops *arith = ctx->arith;
    const ar_buf scratch = b->ddp->exchange;
    const bool is_tied = b->info.ends && !ari_faulty(ctx, "pp_tied_not_summed");
    ar_comm *tp = ari_ddp_group(b->ddp, ARI_OVER_TP), *ends_group = ari_ddp_group(b->ddp, ARI_OVER_ENDS);
    ar_most_terms limits = {.before = most_values(b, data, b->ddp->step.samples)};
    if (b->info.spread) {
        limits.after = is_alone(data) && !b->info.ends ? 0 : times(limits.before, size_of(tp));
        AR_TRY(arith->bucket_reduce(ctx, q, storage, scratch, n, b->info.storage, tp, NULL, &limits, b->tag));
        limits.before = limits.after;
    }
    limits.after = is_alone(data) ? 0 : times(limits.before, size_of(ends_group));
    return is_tied ? arith->bucket_reduce(ctx, q, storage, scratch, n, b->info.storage, ends_group, NULL, &limits,
                                          b->info.param[0]->name)
                   : AR_OK;
}

/* Copies this rank's slice between the bucket and its separate memory. */
static ar_status move_slice(const ari_bucket *b, ar_queue *q, bool out)
{
    const ar_arith_ops *arith = b->ddp->ctx->arith;
    ar_device *dev = b->ddp->ctx->device;
    const ar_bucket_array number = {0, b->info.storage};
    const int arrays = arith->bucket_arrays > 0 ? arith->bucket_arrays : 1;
    const size_t count = b->info.own_count;
    for (int i = 0; i < arrays; i++) {
        const ar_bucket_array *a = arith->bucket_arrays > 0 ? &arith->bucket_array[i] : &number;
        const size_t width = ar_dtype_bytes(a->dtype);
        const ar_buf bucket_slice = ar_buf_at(b->storage, a->offset * b->info.elements + b->info.own_start * width);
        const ar_buf shard_slice = ar_buf_at(b->shard, a->offset * count);
        AR_TRY(dev->ops->copy(dev, q, out ? shard_slice : bucket_slice, ar_const(out ? bucket_slice : shard_slice),
                              count * width));
    }
    return AR_OK;
}

/* Completes a rank's slice, which is a sum over the ranks of its sharding group, by a sum over the ranks with the same
 * slice. */
static ar_status reduce_replicas(const ari_bucket *b, ar_queue *q)
{
    if (!b->shard.ptr || b->info.own_count == 0)
        return AR_OK;
    AR_TRY(move_slice(b, q, true));
    AR_TRY(sum_data(b, q, b->shard, b->info.own_count, replicate_of(b), NULL, b->ddp->step.samples));
    return move_slice(b, q, false);
}

/* ZeRO-2: adds the slice that was just reduced to the slice of earlier passes, unless these were among its terms. */
static ar_status keep_slice(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    const ar_tensor sum = ari_tensor_flat(
        b->info.storage, ar_buf_at(b->storage, b->info.own_start * ar_dtype_bytes(b->info.storage)), b->info.own_count);
    const ar_tensor before = ari_tensor_flat(b->info.storage, b->shard, b->info.own_count);
    if (d->options.hook_terms && b->info.own_count > 0)
        AR_TRY(d->ctx->device->ops->add(d->ctx->device, q, &sum, &sum, &before));
    return move_slice(b, q, true);
}

ar_status ari_bucket_complete(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    if (b->info.own_count == 0)
        return AR_OK;
    AR_TRY(sum_spread(b, q, b->shard, b->info.own_count, replicate_of(b)));
    return sum_data(b, q, b->shard, b->info.own_count, replicate_of(b), NULL, d->step.samples);
}

/* Reduces a bucket: spread terms first, then everything over dp. With ZeRO-2 each pass is reduced over the sharding
 * group, and replicas complete the shards once per step. */
static ar_status reduce_bucket(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    ar_comm *group = reduced_over(b);
    if (d->stage >= 2)
        return sum_data(b, q, b->storage, b->info.elements, group, b->counts, d->step.pass_samples);
    AR_TRY(sum_spread(b, q, b->storage, b->info.elements, data_of(b)));
    if (ari_faulty(d->ctx, "dp_group_missing"))
        return AR_OK;
    AR_TRY(sum_data(b, q, b->storage, b->info.elements, group, b->counts, d->step.samples));
    return reduce_replicas(b, q);
}

static ar_status copy_back(const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    if (ari_faulty(ctx, "step_before_copy_back")) /* comes after the update, so nobody reads it */
        return AR_OK;
    for (size_t i = 0; i < b->info.params; i++) {
        if (!ari_fault_left_out(&b->slot[i]))
            AR_TRY(ctx->arith->bucket_unpack(ctx, q, b->info.param[i], ar_const(b->storage), b->info.elements,
                                             b->info.offset[i], b->info.storage));
    }
    return AR_OK;
}

/* Completes a bucket's gradients, which keep only their values, unless the bucket's shards are what is kept. */
static ar_status complete_gradients(const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    for (size_t i = 0; i < b->info.params && ctx->arith->grad_complete && b->ddp->stage < 2; i++)
        AR_TRY(ctx->arith->grad_complete(ctx, q, b->info.param[i]));
    return AR_OK;
}

static ar_status sum_gradients(const ari_bucket *b, ar_queue *q)
{
    const ar_ctx *ctx = b->ddp->ctx;
    AR_TRY(reduce_bucket(b, q));
    if (ari_faulty(ctx, "bucket_reduced_twice"))
        AR_TRY(reduce_bucket(b, q));
    return ARI_NOTE(ctx, .kind = ARI_LEDGER_GRADIENT_SUM, .name = b->info.param[0]->name, .param = b->info.param,
                    .params = b->info.params, .pass = 's');
}

static ar_status carry(const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    if (ari_fault_skips(b))
        return AR_OK;
    if (!b->storage.ptr) {
        ari_bucket in_place = *b;
        AR_TRY(ctx->arith->grad_bucket(ctx, q, &in_place.storage, b->info.param[0]));
        AR_TRY(sum_gradients(&in_place, q));
        return b->ddp->stage >= 2 ? keep_slice(&in_place, q) : complete_gradients(b, q);
    }
    AR_TRY(pack_bucket(b, q));
    AR_TRY(sum_gradients(b, q));
    AR_TRY(b->ddp->stage >= 2 ? keep_slice(b, q) : copy_back(b, q));
    return complete_gradients(b, q);
}

ar_status ari_bucket_run(void *arg, ar_queue *queue)
{
    const ari_bucket *b = arg;
    if (!b->moves)
        return complete_gradients(b, queue);
    ari_span_begin("bucket %zu", b->info.index);
    return ari_ddp_fail_in_flight(b->ddp, ari_span_end(carry(b, queue)));
}
