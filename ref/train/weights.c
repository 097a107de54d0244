/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO-3: between its uses a weight is shared out. A unit's weights are gathered before each of its passes, the next
 * unit's while it computes, and given back after it; those of the root unit stay for a step. */

#include "anyrank/arith.h"
#include "ref/core/record.h"
#include "ref/layers/parts.h"
#include "ref/train/faults.h"
#include "ref/train/units.h"

/* --- shares ------------------------------------------------------------------------------------------------------- */

static ar_status share_bucket(ari_bucket *b)
{
    ar_ctx *ctx = b->ddp->ctx;
    const ar_bucket_info *o = &b->info;
    const size_t width = ar_dtype_bytes(o->storage), bytes = o->own_count * width;
    AR_TRY(ari_ctx_alloc(ctx, &b->weights, bytes));
    for (size_t i = 0; i < o->params; i++) {
        ar_param *p = o->param[i];
        ar_param_share *s = &b->slot[i].share;
        s->value = ar_buf_at(b->weights, s->at * width);
        AR_TRY(ari_share_get(ctx, s->value, p, &p->value, s->start, s->count));
    }
    return AR_OK;
}

static void drop_values(const ar_ddp *d, const ari_bucket *b)
{
    for (size_t i = 0; i < b->info.params; i++) {
        ar_param *p = b->info.param[i];
        ari_ctx_free(d->ctx, p->value.data);
        p->value.data = (ar_buf){NULL};
    }
}

ar_status ari_weights_share(ar_ddp *d)
{
    if (d->stage < 3)
        return AR_OK;
    for (size_t i = 0; i < d->count; i++)
        AR_TRY(share_bucket(&d->buckets[i]));
    if (d->options.mode == AR_BUCKETS_OVERLAP)
        AR_TRY(ari_ctx_gathers(d->ctx, &d->gathers));
    for (size_t i = 0; i < d->count; i++) {
        drop_values(d, &d->buckets[i]);
        for (size_t k = 0; k < d->buckets[i].info.params; k++)
            d->ctx->arith->operand_release(d->buckets[i].info.param[k], d->ctx->queue);
    }
    return AR_OK;
}

/* --- gathering ---------------------------------------------------------------------------------------------------- */

/* The weights of the unit's buckets, one bucket after the other. */
static ar_status gather_weights(void *user, ar_queue *on)
{
    const ari_unit *u = user;
    const ar_ddp *d = u->ddp;
    size_t at = 0;
    ar_status st = AR_OK;
    ari_span_begin("weights of %s", u->module ? u->module->name : d->name);
    for (size_t i = 0; i < u->buckets && st == AR_OK; i++) {
        const ari_bucket *b = &u->bucket[i];
        ar_comm *const *groups = d->gathers ? d->gathers->over : d->ctx->over;
        ar_comm *over = groups[b->expert ? ARI_OVER_EXPERT_SHARD : ARI_OVER_SHARD];
        st = ar_comm_all_gather(over, on, ar_buf_at(u->room, at), ar_const(b->weights), b->shares, b->info.storage,
                                b->tag);
        at += b->info.elements * ar_dtype_bytes(b->info.storage);
    }
    return ari_ddp_fail_in_flight(d, ari_span_end(st));
}

static ar_status launch_gather(ari_unit *u)
{
    const ar_ddp *d = u->ddp;
    ar_ctx *ctx = d->ctx;
    size_t bytes = 0;
    for (size_t i = 0; i < u->buckets; i++)
        bytes += u->bucket[i].info.elements * ar_dtype_bytes(u->bucket[i].info.storage);
    AR_TRY(ari_ctx_alloc(ctx, &u->room, bytes));
    u->room_bytes = bytes;
    ari_step_count_alloc(ctx, bytes);
    u->weights = ARI_WEIGHTS_UNDER_WAY;
    if (!d->gathers)
        return gather_weights(u, ctx->queue);
    AR_TRY(ar_event_record(u->shared, ctx->queue));
    AR_TRY(ar_queue_wait(d->gathers->queue, u->shared));
    AR_TRY(ar_queue_chain(d->gathers->queue, gather_weights, u));
    return ar_event_record(u->gathered, d->gathers->queue);
}

static void free_gathered(ari_unit *u)
{
    ar_ctx *ctx = u->ddp->ctx;
    ari_ctx_free(ctx, u->room);
    ari_step_count_free(ctx, u->room_bytes);
    u->room = (ar_buf){NULL};
    u->room_bytes = 0;
}

/* From the gathered buckets into values of their own. */
static ar_status put_values(ari_unit *u)
{
    ar_ctx *ctx = u->ddp->ctx;
    size_t at = 0;
    for (size_t k = 0; k < u->buckets; k++) {
        const ar_bucket_info *b = &u->bucket[k].info;
        const size_t width = ar_dtype_bytes(b->storage);
        for (size_t i = 0; i < b->params; i++) {
            ar_param *p = b->param[i];
            const size_t count = ar_tensor_count(&p->value);
            AR_TRY(ari_ctx_alloc(ctx, &p->value.data, (count + 1) * width));
            ari_step_count_alloc(ctx, count * width);
            u->value_bytes += count * width;
            AR_TRY(
                ari_share_put(ctx, ar_cbuf_at(ar_const(u->room), at + b->offset[i] * width), p, &p->value, 0, count));
        }
        at += b->elements * width;
    }
    return AR_OK;
}

static ar_status wait_for(ari_unit *u)
{
    ar_ctx *ctx = u->ddp->ctx;
    if (!u->ddp->gathers)
        return AR_OK;
    ari_span_begin("wait for weights");
    return ari_span_end(ar_queue_wait(ctx->queue, u->gathered));
}

/* In a pass through its stage the next one of a unit is known. */
static ari_unit *next_of(const ari_unit *u, ar_pass pass)
{
    const ar_ddp *d = u->ddp;
    const long at = u - d->unit, next = pass == AR_FORWARD ? at + 1 : at - 1;
    const bool any = at < d->units && next >= 0 && next < d->units;
    return any && d->unit[next].stage == u->stage ? &d->unit[next] : NULL;
}

ar_status ari_weights_take(ari_unit *u, ar_pass pass)
{
    ari_unit *next = next_of(u, pass);
    if (u->ddp->stage < 3)
        return AR_OK;
    if (u->weights == ARI_WEIGHTS_SHARED)
        AR_TRY(launch_gather(u));
    if (u->weights == ARI_WEIGHTS_UNDER_WAY) {
        AR_TRY(wait_for(u));
        u->weights = ARI_WEIGHTS_WHOLE;
        AR_TRY(put_values(u));
        AR_TRY(ari_fault_weights(u, pass));
        free_gathered(u);
    }
    if (next && u->ddp->gathers && next->weights == ARI_WEIGHTS_SHARED)
        AR_TRY(launch_gather(next));
    return AR_OK;
}

void ari_weights_release(ari_unit *u)
{
    const ar_ddp *d = u->ddp;
    ar_ctx *ctx = d->ctx;
    if (ar_faulty(ctx, AR_FAULT_zero_stale_weights))
        return;
    for (size_t i = 0; i < u->slots && d->stage >= 3; i++) {
        ar_param *p = u->bucket->slot[i].param;
        ari_step_count_free(ctx, ctx->arith->operand_bytes(p));
        ctx->arith->operand_release(p, ctx->queue);
    }
    for (size_t i = 0; i < u->buckets && u->weights == ARI_WEIGHTS_WHOLE; i++)
        drop_values(d, &u->bucket[i]);
    ari_step_count_free(ctx, u->value_bytes);
    u->value_bytes = 0;
    u->weights = u->weights == ARI_WEIGHTS_WHOLE ? ARI_WEIGHTS_SHARED : u->weights;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

ar_status ari_weights_finish(ar_ddp *d)
{
    for (int i = 0; i <= d->units; i++) {
        ari_unit *u = &d->unit[i];
        if (u->weights == ARI_WEIGHTS_UNDER_WAY) { /* of a step that has failed */
            AR_TRY(wait_for(u));
            u->weights = ARI_WEIGHTS_SHARED;
            free_gathered(u);
        }
        ari_weights_release(u);
    }
    return AR_OK;
}

ar_status ari_weights_start(ar_ddp *d)
{
    if (d->stage < 3)
        return AR_OK;
    AR_TRY(ari_weights_finish(d));
    return ari_weights_take(&d->unit[d->units], AR_FORWARD);
}

/* Values that are whole become the parameters' own again. */
void ari_weights_free(ari_unit *u)
{
    if (u->room.ptr)
        free_gathered(u);
    ari_step_count_free(u->ddp->ctx, u->value_bytes);
    for (size_t i = 0; i < u->buckets; i++)
        ari_ctx_free(u->ddp->ctx, u->bucket[i].weights);
}

ar_status ar_ddp_gather_parameters(ar_ddp *d)
{
    ari_span_begin("%s: weights", d->name);
    ar_status st = AR_OK;
    for (int i = 0; i <= d->units && st == AR_OK; i++)
        st = ari_weights_take(&d->unit[i], AR_FORWARD);
    return ari_span_end(ari_ddp_fail(d, st));
}
