/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/train/faults.h"

#include <string.h>

#include "ref/layers/parts.h"

/* Each micro-batch is divided by its own count, its mean, which `divisor` then divides: the number of micro-batches, or
 * 1 where the means are added. `own` are this rank's counts, 0 for the micro-batches in which it has no sample. */
static ar_status divide_by_micro(ar_batch *micro, int64_t *own, ar_ctx *ctx, size_t n, size_t pieces, size_t divisor)
{
    AR_TRY(ari_combine(ctx, ctx->dp, own, pieces, AR_I64, AR_SUM, "targets"));
    for (size_t i = 0; i < n; i++)
        micro[i].targets = (size_t)own[i] * divisor;
    return AR_OK;
}

/* cp_targets_own: the ranks that have the same positions of their sequences add up theirs; each puts its count where
 * only they look. cp_targets_whole: every rank counts all positions. */
static ar_status count_over(size_t *count, ar_ctx *ctx, size_t mine)
{
    const size_t ranks = (size_t)ar_comm_size(ctx->sequence), at = (size_t)ar_comm_rank(ctx->sequence);
    ARI_OWNED int64_t *of = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&of, ranks, "counts of targets"));
    of[at] = (int64_t)mine;
    const ar_status st = ari_combine(ctx, ctx->dp, of, ranks, AR_I64, AR_SUM, "targets");
    *count = 0;
    for (size_t i = 0; i < ranks; i++)
        *count += ar_faulty(ctx, AR_FAULT_cp_targets_whole) ? ranks * (size_t)of[i] : i == at ? (size_t)of[i] : 0;
    return st;
}

static void divide_by(size_t *targets, ar_batch *micro, size_t n, size_t all)
{
    *targets = all;
    for (size_t i = 0; i < n; i++)
        micro[i].targets = all;
}

ar_status ari_fault_divisors(size_t *targets, ar_ctx *ctx, ar_batch *micro, int64_t *own, size_t n, size_t pieces)
{
    const bool average = ar_faulty(ctx, AR_FAULT_dp_mean_of_means), mean = ar_faulty(ctx, AR_FAULT_accum_mean_of_means);
    const bool local = ar_faulty(ctx, AR_FAULT_dp_sum_of_local_means),
               sum = ar_faulty(ctx, AR_FAULT_accum_sum_of_means);
    const bool of_context = ar_comm_size(ctx->sequence) > 1 &&
                            (ar_faulty(ctx, AR_FAULT_cp_targets_own) || ar_faulty(ctx, AR_FAULT_cp_targets_whole));
    size_t mine = 0, count = 0;
    if (ar_comm_size(ctx->pipeline) > 1 && ar_faulty(ctx, AR_FAULT_pp_sum_loss)) {
        for (size_t i = 0; i < n; i++)
            micro[i].targets = 1;
    }
    for (size_t i = 0; i < n; i++)
        mine += (size_t)own[i];
    if (of_context) {
        AR_TRY(count_over(&count, ctx, mine));
        divide_by(targets, micro, n, count);
    } else if (average || local)
        divide_by(targets, micro, n, average ? mine * (size_t)ar_comm_size(ctx->dp) : mine);
    else if (mean || sum)
        AR_TRY(divide_by_micro(micro, own, ctx, n, pieces, mean ? pieces : 1));
    return AR_OK;
}

ar_status ari_fault_so_far(ar_param *p, ar_ctx *ctx, size_t pieces)
{
    if (ar_faulty(ctx, AR_FAULT_accum_last_only))
        return ctx->arith->grad_zero(ctx, p);
    return ar_faulty(ctx, AR_FAULT_accum_divided_each_time) ? ari_fault_scale_gradient(ctx, p, 1.0f / (float)pieces)
                                                            : AR_OK;
}

ar_status ari_fault_accumulated(ar_param *const *params, size_t n, ar_ctx *ctx, int pieces)
{
    for (size_t i = 0; i < n; i++) {
        if (!params[i]->share) /* else its gradient is made in the pass */
            AR_TRY(ari_fault_so_far(params[i], ctx, (size_t)pieces));
    }
    return AR_OK;
}

/* An update before there were gradients has left nothing but its count. */
void ari_fault_clock(ari_optimizer_clock *clock, const ar_optimizer_options *o, const ar_ctx *ctx)
{
    if (ar_faulty(ctx, AR_FAULT_optimizer_counter_ahead) && clock->steps == 0)
        ari_optimizer_tick(clock, o);
}

void ari_fault_update(ari_optimizer_clock *clock, ari_update_rule *rule, const ar_optimizer_options *o,
                      const ar_param *p, const ar_ctx *ctx)
{
    /* Which of the copies of its elements this rank holds, over both groups. */
    const int copy = p->layout.replica + p->layout.replicas * ar_comm_rank(ctx->dp);
    if (ar_faulty(ctx, AR_FAULT_adam_step_not_synced) && copy % 2 == 1)
        ari_optimizer_tick(clock, o);
    if (ar_faulty(ctx, AR_FAULT_weight_decay_on_shard_only) && copy > 0)
        rule->weight_decay = 0.0;
}

static bool is_of_expert(const ar_param *p)
{
    return strstr(p->name, ".experts.") != NULL;
}

/* As where a parameter whose gradient is None is no part of the update. */
ar_status ari_fault_skips_update(bool *skip, ar_ctx *ctx, const ar_param *p, const ar_tensor *g)
{
    const size_t n = ar_tensor_count(g);
    ARI_OWNED float *host = NULL;
    *skip = is_of_expert(p) && ar_faulty(ctx, AR_FAULT_empty_expert_not_updated);
    if (!*skip)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&host, n, p->name));
    const ar_status st = ar_ctx_download(ctx, host, g);
    for (size_t i = 0; i < n; i++)
        *skip = *skip && host[i] == 0.0f;
    return st;
}

int ari_fault_norms(const ar_ctx *ctx)
{
    return ar_faulty(ctx, AR_FAULT_gradnorm_own_experts) ? ar_comm_size(ctx->ep) : 1;
}

bool ari_fault_norm_without(const ar_ctx *ctx, const ar_param *p, int of)
{
    return is_of_expert(p) && (ar_faulty(ctx, AR_FAULT_gradnorm_without_experts) ||
                               (ar_faulty(ctx, AR_FAULT_gradnorm_own_experts) && ar_comm_rank(ctx->ep) != of));
}

float ari_fault_gradient_times(const ar_ctx *ctx, const ar_param *p)
{
    return p->expert && ar_faulty(ctx, AR_FAULT_ep_grads_times_ep) ? (float)ar_comm_size(ctx->ep) : 1.0f;
}

ar_comm *ari_fault_expert_group(const ari_bucket *b, ar_comm *over)
{
    return b->expert && ar_faulty(b->ddp->ctx, AR_FAULT_experts_summed_over_dp) ? ari_ddp_group(b->ddp, ARI_OVER_DP)
                                                                                : over;
}

static bool is_of_latents(const ar_param *p)
{
    return strstr(p->name, "_a_proj") != NULL;
}

/* gradnorm_copy_as_shard: it is the first one that several ranks hold. */
bool ari_fault_counts_copy(const ar_ctx *ctx, ar_param *const *params, size_t n, size_t i)
{
    size_t first = 0;
    while (first < n && params[first]->layout.replicas == 1)
        first++;
    return ar_faulty(ctx, AR_FAULT_gradnorm_counts_replicas) || ar_faulty(ctx, AR_FAULT_gradnorm_mean_of_ranks) ||
           (ar_faulty(ctx, AR_FAULT_gradnorm_copy_as_shard) && i == first) ||
           (ar_faulty(ctx, AR_FAULT_gradnorm_latents_as_shards) && is_of_latents(params[i]));
}

ar_status ari_fault_mean_of_norms(float *norm, ar_ctx *ctx)
{
    if (!ar_faulty(ctx, AR_FAULT_gradnorm_mean_of_ranks))
        return AR_OK;
    AR_TRY(ari_combine(ctx, ctx->tp, norm, 1, AR_F32, AR_SUM, "grad_norm"));
    *norm /= (float)ar_comm_size(ctx->tp);
    return AR_OK;
}

/* As many elements from where the next rank's slice begins. */
size_t ari_fault_slice_start(const ar_ctx *ctx, const ar_bucket_info *b)
{
    const size_t next = b->own_start + b->own_count;
    if (!ar_faulty(ctx, AR_FAULT_zero_shards_misaligned) || b->own_count == b->elements)
        return b->own_start;
    return next < b->elements ? next : 0;
}

void ari_fault_hooks(ar_ddp *ddp, const ar_ctx *ctx, const ar_pp_operation *list, size_t n)
{
    bool parted = false;
    for (size_t i = 0; i < n; i++)
        parted = parted || list[i].kind == AR_PP_BACKWARD_WEIGHT;
    if (ddp)
        ddp->unhooked = parted && ar_faulty(ctx, AR_FAULT_zb_hooks_skipped);
}

void ari_fault_share_start(const ar_ctx *ctx, const ar_bucket_info *b, const ari_state *s, ari_update_part *part,
                           ar_tensor *g)
{
    ar_buf *const moments[] = {&part->master, &part->m, &part->v};
    if (!ar_faulty(ctx, AR_FAULT_zero_share_off_by_one) || b->own_start == 0 || s->at != b->own_start || s->count < 2)
        return;
    part->weight = ar_buf_at(part->weight, ar_dtype_bytes(b->storage));
    for (size_t i = 0; i < sizeof moments / sizeof *moments; i++) {
        if (moments[i]->ptr)
            *moments[i] = ar_buf_at(*moments[i], sizeof(float));
    }
    *g = ar_tensor_slice(g, 0, 1, s->count - 1);
}

/* The first rank's share comes last. */
static ar_status put_rotated(const ari_bucket *b, ar_cbuf gathered, ar_ctx *ctx, size_t i)
{
    ar_param *p = b->info.param[i];
    const size_t width = ar_dtype_bytes(b->info.storage), all = b->info.elements, count = ar_tensor_count(&p->value);
    const size_t from = (b->info.offset[i] + (b->counts ? b->counts[0] : 0)) % all;
    const size_t first = count < all - from ? count : all - from;
    AR_TRY(ari_share_put(ctx, ar_cbuf_at(gathered, from * width), p, &p->value, 0, first));
    return first == count ? AR_OK : ari_share_put(ctx, gathered, p, &p->value, first, count - first);
}

/* This rank's share alone, among zeros. */
static ar_status put_own_share(ar_param *p, ar_ctx *ctx)
{
    const size_t bytes = ar_tensor_count(&p->value) * ar_dtype_bytes(p->value.dtype);
    AR_TRY(ARI_KERNEL(ctx, zero, p->value.data, bytes));
    return ari_share_put(ctx, ar_const(p->share->value), p, &p->value, p->share->start, p->share->count);
}

ar_status ari_fault_weights(const ari_unit *u, ar_pass pass)
{
    ar_ctx *ctx = u->ddp->ctx;
    const bool rotated = ar_faulty(ctx, AR_FAULT_zero_gather_order);
    const bool own = pass == AR_BACKWARD && ar_faulty(ctx, AR_FAULT_zero_backward_not_gathered);
    size_t at = 0;
    for (size_t k = 0; k < u->buckets && (rotated || own); k++) {
        const ari_bucket *b = &u->bucket[k];
        for (size_t i = 0; i < b->info.params; i++)
            AR_TRY(rotated ? put_rotated(b, ar_cbuf_at(ar_const(u->room), at), ctx, i)
                           : put_own_share(b->info.param[i], ctx));
        at += b->info.elements * ar_dtype_bytes(b->info.storage);
    }
    return AR_OK;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */

/* Packs one parameter's gradient where it stands now, so that launching its bucket does not. */
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

/* A reduction that does not wait for the kernels which write the gradients: the memory as it is before the first. */
ar_status ari_fault_pack_before_backward(ar_ddp *d)
{
    /* From ZeRO-2 on a bucket has no memory before its unit goes backward. */
    if (!ar_faulty(d->ctx, AR_FAULT_comm_before_producer) || d->options.mode != AR_BUCKETS_OVERLAP || d->stage > 1)
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
    if (ar_faulty(ctx, AR_FAULT_comm_before_producer) && b->info.ready < b->info.params)
        return pack_early(s); /* all but the last one: that was packed when the step began */
    if (ar_faulty(ctx, AR_FAULT_tied_reduced_at_first_use))
        return pack_early(s);
    for (size_t i = 0; ar_faulty(ctx, AR_FAULT_bucket_first_ready) && b->info.ready == 1 && i < b->info.params; i++)
        AR_TRY(pack_early(&b->slot[i]));
    return AR_OK;
}

bool ari_fault_waits_for_the_end(const ar_ddp *d)
{
    return ar_faulty(d->ctx, AR_FAULT_stale_activation_reuse) || ar_faulty(d->ctx, AR_FAULT_collective_order_swapped) ||
           ar_faulty(d->ctx, AR_FAULT_unused_in_last_micro_batch);
}

void ari_fault_absent(ar_ddp *d)
{
    for (size_t i = 0; i < d->trained && ar_faulty(d->ctx, AR_FAULT_unused_in_last_micro_batch); i++)
        d->slots[i].ready = false;
}

bool ari_fault_left_out(const ari_ddp_slot *s)
{
    return ar_faulty(s->ddp->ctx, AR_FAULT_unused_in_last_micro_batch) && !s->ready;
}

bool ari_fault_skips(const ari_bucket *b)
{
    bool any = false;
    for (size_t i = 0; i < b->info.params; i++)
        any = any || b->info.param[i]->has_grad;
    return !any && ar_faulty(b->ddp->ctx, AR_FAULT_unused_skips_collective);
}

ar_status ari_fault_before_pack(bool *skip, const ari_bucket *b, ar_queue *q)
{
    ar_ctx *ctx = b->ddp->ctx;
    *skip = ar_faulty(ctx, AR_FAULT_bucket_not_packed);
    /* From ZeRO-2 on its memory is new. */
    if (!ar_faulty(ctx, AR_FAULT_unused_in_last_micro_batch) && !(*skip && b->ddp->stage > 1))
        return AR_OK;
    return ctx->arith->bucket_zero(ctx, q, b->storage, b->info.elements, b->info.storage);
}

/* From ZeRO-2 on other units' gradients are not there yet, or are being written. */
static bool is_reduced_with(const ari_bucket *b, size_t other)
{
    const ar_ddp *d = b->ddp;
    bool together = d->stage < 2;
    for (int i = 0; i <= d->units && !together; i++) {
        const size_t first = (size_t)(d->unit[i].bucket - d->buckets), end = first + d->unit[i].buckets;
        together = b->info.index >= first && b->info.index < end && other < end;
    }
    return together;
}

/* One buffer for two buckets: the next one is packed, as far as it fits, before this one is reduced. */
ar_status ari_fault_after_pack(const ari_bucket *b, ar_queue *q)
{
    const ar_ddp *d = b->ddp;
    const size_t after = b->info.index + 1;
    if (!ar_faulty(d->ctx, AR_FAULT_stale_activation_reuse) || !is_reduced_with(b, after))
        return AR_OK;
    for (size_t i = 0; after < d->count && i < d->buckets[after].info.params; i++) {
        const ari_bucket *next = &d->buckets[after];
        const size_t at = next->info.offset[i];
        if (next->info.storage != b->info.storage || at > b->info.elements ||
            ar_tensor_count(&next->info.param[i]->value) > b->info.elements - at)
            continue;
        AR_TRY(d->ctx->arith->bucket_pack(d->ctx, q, b->storage, b->info.elements, at, b->info.storage,
                                          next->info.param[i]));
    }
    return AR_OK;
}
