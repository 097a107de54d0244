/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/faults.h"

#include "ref/context/context_private.h"
#include "ref/layers/parts.h"

/* Divides each micro-batch by its count, and their mean by the number of micro-batches. `micro_targets` are this rank's
 * counts, 0 for micro-batches without samples here. */
static ar_status divide_by_micro(ar_batch *micro, int64_t *micro_targets, ar_ctx *ctx, size_t n, size_t pieces)
{
    AR_TRY(ari_combine(ctx, ctx->dp, micro_targets, pieces, AR_I64, AR_SUM, "targets"));
    for (size_t i = 0; i < n; i++)
        micro[i].targets = (size_t)micro_targets[i] * pieces;
    return AR_OK;
}

static void divide_by(size_t *targets, ar_batch *micro, size_t n, size_t total)
{
    *targets = total;
    for (size_t i = 0; i < n; i++)
        micro[i].targets = total;
}

ar_status ari_fault_divisors(size_t *targets, ar_ctx *ctx, ar_batch *micro, int64_t *micro_targets, size_t n,
                             size_t pieces)
{
    const bool average = ari_faulty(ctx, "dp_mean_of_means");
    size_t mine = 0;
    for (size_t i = 0; i < n; i++)
        mine += (size_t)micro_targets[i];
    if (ar_comm_size(ctx->pipeline) > 1 && ari_faulty(ctx, "pp_sum_loss")) {
        for (size_t i = 0; i < n; i++)
            micro[i].targets = 1;
    }
    if (ari_faulty(ctx, "cp_targets_whole"))
        divide_by(targets, micro, n, *targets * (size_t)ar_comm_size(ctx->sequence));
    if (average || ari_faulty(ctx, "dp_sum_of_local_means"))
        divide_by(targets, micro, n, average ? mine * (size_t)ar_comm_size(ctx->dp) : mine);
    return ari_faulty(ctx, "accum_mean_of_means") ? divide_by_micro(micro, micro_targets, ctx, n, pieces) : AR_OK;
}

ar_status ari_fault_so_far(ar_param *p, ar_ctx *ctx, size_t pieces)
{
    if (ari_faulty(ctx, "accum_last_only"))
        return ctx->arith->grad_zero(ctx, p);
    return ari_faulty(ctx, "accum_divided_each_time") ? ari_fault_scale_gradient(ctx, p, 1.0f / (float)pieces) : AR_OK;
}

ar_status ari_fault_accumulated(ar_param *const *params, size_t n, ar_ctx *ctx, int pieces)
{
    for (size_t i = 0; i < n; i++) {
        if (!params[i]->share) /* otherwise the gradient is computed in the pass */
            AR_TRY(ari_fault_so_far(params[i], ctx, (size_t)pieces));
    }
    return AR_OK;
}

void ari_fault_update(ari_optimizer_clock *clock, ari_update_rule *rule, const ar_optimizer_options *o,
                      const ar_param *p, const ar_ctx *ctx)
{
    /* Index of this rank's copy among all copies of its elements, over both groups. */
    const int copy = p->layout.replica + p->layout.replicas * ar_comm_rank(ctx->dp);
    if (ari_faulty(ctx, "adam_step_not_synced") && copy % 2 == 1)
        ari_optimizer_tick(clock, o);
    if (ari_faulty(ctx, "weight_decay_on_shard_only") && copy > 0)
        rule->weight_decay = 0.0;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/* Packs one parameter's current gradient, so that launching its bucket does not pack it. */
static ar_status pack_early(ari_ddp_slot *s)
{
    const ari_bucket *b = &s->ddp->buckets[s->bucket];
    ar_ctx *ctx = s->ddp->ctx;
    if (!b->moves)
        return AR_OK;
    s->packed = true;
    return ctx->arith->bucket_pack(ctx, ctx->queue, b->storage, b->info.elements, b->info.offset[s - b->slot],
                                   b->info.storage, s->param);
}

/* Packs gradients as they are before the first kernel writes them: a reduction that does not wait for those kernels. */
ar_status ari_fault_pack_before_backward(ar_ddp *d)
{
    /* With ZeRO-2 and above, a bucket has no memory before its unit's backward pass. */
    if (!ari_faulty(d->ctx, "comm_before_producer") || d->options.mode != AR_BUCKETS_OVERLAP || d->stage > 1)
        return AR_OK;
    for (size_t i = 0; i < d->trained; i++)
        AR_TRY(pack_early(&d->slots[i]));
    return AR_OK;
}

ar_status ari_fault_pack_early(const ar_ddp *d, ari_ddp_slot *s)
{
    const ar_ctx *ctx = d->ctx;
    const ari_bucket *b = &d->buckets[s->bucket];
    if (d->options.mode != AR_BUCKETS_OVERLAP)
        return AR_OK;
    if (ari_faulty(ctx, "comm_before_producer") && b->info.ready < b->info.params)
        return pack_early(s); /* all but the last one, which was packed at the start of the step */
    for (size_t i = 0; ari_faulty(ctx, "bucket_first_ready") && b->info.ready == 1 && i < b->info.params; i++)
        AR_TRY(pack_early(&b->slot[i]));
    return AR_OK;
}

bool ari_fault_waits_for_the_end(const ar_ddp *d)
{
    return ari_faulty(d->ctx, "stale_activation_reuse") || ari_faulty(d->ctx, "collective_order_swapped") ||
           ari_faulty(d->ctx, "unused_in_last_micro_batch");
}

void ari_fault_absent(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained && ari_faulty(d->ctx, "unused_in_last_micro_batch"); i++)
        d->slots[i].ready = false;
}

bool ari_fault_left_out(const ari_ddp_slot *s)
{
    return ari_faulty(s->ddp->ctx, "unused_in_last_micro_batch") && !s->ready;
}

bool ari_fault_skips(const ari_bucket *b)
{
    bool any = false;
    for (size_t i = 0; i < b->info.params; i++)
        any = any || b->info.param[i]->has_grad;
    return !any && ari_faulty(b->ddp->ctx, "unused_skips_collective");
}

ar_status ari_fault_before_pack(bool *skip, const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    *skip = ari_faulty(ctx, "bucket_not_packed");
    /* With ZeRO-2 and above, the memory is new. */
    if (!ari_faulty(ctx, "unused_in_last_micro_batch") && !(*skip && b->ddp->stage > 1))
        return AR_OK;
    return ctx->arith->bucket_zero(ctx, q, b->storage, b->info.elements, b->info.storage);
}

/* With ZeRO-2 and above, other units' gradients do not exist yet or are being written. */
static bool is_reduced_with(const ari_bucket *b, size_t peer_index)
{
    const ar_ddp *d = b->ddp;
    bool together = d->stage < 2;
    for (int i = 0; i <= d->units && !together; i++) {
        const size_t begin = (size_t)(d->unit[i].bucket - d->buckets), end = begin + d->unit[i].buckets;
        together = b->info.index >= begin && b->info.index < end && peer_index < end;
    }
    return together;
}

/* One buffer for two buckets: packs as much as fits of the next bucket before this bucket is reduced. */
ar_status ari_fault_after_pack(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    const size_t after = b->info.index + 1;
    if (!ari_faulty(d->ctx, "stale_activation_reuse") || !is_reduced_with(b, after))
        return AR_OK;
    for (size_t i = 0; after < d->count && i < d->buckets[after].info.params; i++) {
        const ari_bucket *next_bucket = &d->buckets[after];
        const size_t offset = next_bucket->info.offset[i];
        if (next_bucket->info.storage != b->info.storage || offset > b->info.elements ||
            ar_tensor_count(&next_bucket->info.param[i]->value) > b->info.elements - offset)
            continue;
        AR_TRY(d->ctx->arith->bucket_pack(d->ctx, q, b->storage, b->info.elements, offset, b->info.storage,
                                          next_bucket->info.param[i]));
    }
    return AR_OK;
}
