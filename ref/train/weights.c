/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO-3: weights are sharded between their uses. A unit's weights are gathered before each of its passes, overlapping
 * with the preceding unit's computation, and released after it. The root unit's weights stay for a whole step. */
#include "anyrank/arith.h"
#include "anyrank/ddp.h"
#include "ref/context/context_private.h"
#include "ref/core/queue_private.h"
#include "ref/core/record.h"
#include "ref/layers/parts.h"
#include "ref/record/ledger.h"
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
        s->value = ar_buf_at(b->weights, s->offset * width);
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

/* Gathers the weights of the unit's buckets, one bucket after the other. */
static ar_status gather_weights(void *user, ar_queue *queue)
{
    const ari_unit *u = user;
    const ar_ddp *d = u->ddp;
    size_t bucket_offset = 0;
    ar_status st = AR_OK;
    ari_span_begin("weights of %s", u->module ? u->module->name : d->name);
    for (size_t i = 0; i < u->buckets && st == AR_OK; i++) {
        const ari_bucket *b = &u->bucket[i];
        ar_comm *const *groups = d->gathers ? d->gathers->groups : d->ctx->groups;
        ar_comm *group = groups[b->expert ? ARI_OVER_EXPERT_SHARD : ARI_OVER_SHARD];
        st = ar_comm_all_gather(group, queue, ar_buf_at(u->room, bucket_offset), ar_const(b->weights), b->shares,
                                b->info.storage, b->tag);
        if (st == AR_OK)
            st = ARI_NOTE(d->ctx, .kind = ARI_LEDGER_WEIGHT_GATHER, .name = b->info.param[0]->name,
                          .param = b->info.param, .params = b->info.params);
        bucket_offset += b->info.elements * ar_dtype_bytes(b->info.storage);
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
    u->weights = ARI_WEIGHTS_GATHERING;
    if (!d->gathers)
        return gather_weights(u, ctx->queue);
    AR_TRY(ar_event_record(u->shared, ctx->queue));
    AR_TRY(ar_queue_wait(d->gathers->queue, u->shared));
    AR_TRY(ari_queue_chain(d->gathers->queue, gather_weights, u));
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

/* Copies weights from the gathered buckets to the parameters' values. */
static ar_status put_values(ari_unit *u)
{
    ar_ctx *ctx = u->ddp->ctx;
    size_t bucket_offset = 0;
    for (size_t k = 0; k < u->buckets; k++) {
        const ar_bucket_info *b = &u->bucket[k].info;
        const size_t width = ar_dtype_bytes(b->storage);
        for (size_t i = 0; i < b->params; i++) {
            ar_param *p = b->param[i];
            const size_t count = ar_tensor_count(&p->value);
            AR_TRY(ari_ctx_alloc(ctx, &p->value.data, (count + 1) * width));
            ari_step_count_alloc(ctx, count * width);
            u->value_bytes += count * width;
            AR_TRY(ari_share_put(ctx, ar_cbuf_at(ar_const(u->room), bucket_offset + b->offset[i] * width), p, &p->value,
                                 0, count));
        }
        bucket_offset += b->elements * width;
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

/* Returns the next unit in a pass through the stage, which is known in advance. */
static ari_unit *next_of(const ari_unit *u, ar_pass pass)
{
    const ar_ddp *d = u->ddp;
    const long index = u - d->unit, next_index = pass == AR_FORWARD ? index + 1 : index - 1;
    const bool any = index < d->units && next_index >= 0 && next_index < d->units;
    return any && d->unit[next_index].stage == u->stage ? &d->unit[next_index] : NULL;
}

/* Makes the full values of a unit available, and starts to gather those of the next unit in this pass. */
static ar_status weights_take(ari_unit *u, ar_pass pass)
{
    ari_unit *next_unit = next_of(u, pass);
    if (u->ddp->stage < 3)
        return AR_OK;
    if (u->weights == ARI_WEIGHTS_SHARED)
        AR_TRY(launch_gather(u));
    if (u->weights == ARI_WEIGHTS_GATHERING) {
        AR_TRY(wait_for(u));
        u->weights = ARI_WEIGHTS_FULL;
        AR_TRY(put_values(u));
        free_gathered(u);
    }
    if (next_unit && u->ddp->gathers && next_unit->weights == ARI_WEIGHTS_SHARED)
        AR_TRY(launch_gather(next_unit));
    return AR_OK;
}

/* Releases the full values of a unit after a pass. */
static void weights_release(ari_unit *u)
{
    const ar_ddp *d = u->ddp;
    ar_ctx *ctx = d->ctx;
    if (ari_faulty(ctx, "zero_stale_weights"))
        return;
    for (size_t i = 0; i < u->slots && d->stage >= 3; i++) {
        ar_param *p = u->bucket->slot[i].param;
        ari_step_count_free(ctx, ctx->arith->operand_bytes(p));
        ctx->arith->operand_release(p, ctx->queue);
    }
    for (size_t i = 0; i < u->buckets && u->weights == ARI_WEIGHTS_FULL; i++)
        drop_values(d, &u->bucket[i]);
    ari_step_count_free(ctx, u->value_bytes);
    u->value_bytes = 0;
    u->weights = u->weights == ARI_WEIGHTS_FULL ? ARI_WEIGHTS_SHARED : u->weights;
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

static ar_status weights_finish(ar_ddp *d)
{
    for (int i = 0; i <= d->units; i++) {
        ari_unit *u = &d->unit[i];
        if (u->weights == ARI_WEIGHTS_GATHERING) { /* of a step that has failed */
            AR_TRY(wait_for(u));
            u->weights = ARI_WEIGHTS_SHARED;
            free_gathered(u);
        }
        weights_release(u);
    }
    return AR_OK;
}

/* Starts to gather the weights of a step's first units. */
static ar_status weights_start(ar_ddp *d)
{
    if (d->stage < 3)
        return AR_OK;
    AR_TRY(weights_finish(d));
    return weights_take(&d->unit[d->units], AR_FORWARD);
}

/* Frees the gathered values and gives the parameters their sharded values again. */
static void weights_free(ari_unit *u)
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
        st = weights_take(&d->unit[i], AR_FORWARD);
    return ari_span_end(ari_ddp_fail(d, st));
}

/* --- units -------------------------------------------------------------------------------------------------------- */

/* ZeRO-2: no rank keeps full gradients. After a unit's backward pass its gradients are reduced into this rank's shards
 * and their memory is freed. The unit's next backward pass starts with the shards in their places. */

/* --- whole gradients ---------------------------------------------------------------------------------------------- */

static void drop_gradients(ari_unit *u)
{
    ar_ctx *ctx = u->ddp->ctx;
    for (size_t i = 0; i < u->slots && u->ddp->stage >= 2; i++)
        ctx->arith->grad_release(u->bucket->slot[i].param, ctx->queue);
    ari_step_count_free(ctx, u->grad_bytes);
    u->grad_bytes = 0;
    u->due = false;
}

static void free_storage(ari_unit *u)
{
    ar_ddp *d = u->ddp;
    ari_ctx_free(d->ctx, d->room);
    d->room = (ar_buf){NULL};
    ari_step_count_free(d->ctx, d->room_bytes);
    d->room_bytes = 0;
    for (size_t i = 0; i < u->buckets; i++)
        u->bucket[i].storage = d->room;
}

/* Waits for gradient reductions in flight and frees the gradients' memory. */
static ar_status finish_units(ar_ddp *d)
{
    ari_unit *u = d->in_flight;
    if (!u)
        return AR_OK;
    const ar_status st = d->communication ? ar_queue_wait(d->ctx->queue, u->reduced) : AR_OK;
    d->in_flight = NULL;
    free_storage(u);
    drop_gradients(u);
    return st;
}

/* Initialises a new gradient with this rank's part of the sum of earlier passes. */
static ar_status make_gradient(ari_unit *u, const ari_bucket *b, size_t i)
{
    ar_ctx *ctx = u->ddp->ctx;
    ar_param *p = b->info.param[i];
    if (p->grad || !p->requires_grad)
        return AR_OK;
    AR_TRY(ctx->arith->grad_ensure(ctx, p));
    const size_t bytes = ctx->arith->grad_bytes(p);
    ari_step_count_alloc(ctx, bytes);
    u->grad_bytes += bytes;
    if (!u->holds || p->own_count == 0)
        return AR_OK;
    if (u->ddp->options.hook_terms) /* the hook sees this pass's terms: the earlier sum is added to the hook's result */
        return AR_OK;
    /* position at which the shard's bucket would begin, possibly before the shard */
    const size_t offset = b->info.offset[i] - b->info.own_start;
    AR_TRY(
        ctx->arith->bucket_unpack(ctx, ctx->queue, p, ar_const(b->shard), b->info.own_count, offset, b->info.storage));
    return ari_fault_so_far(p, ctx, u->ddp->step.passes);
}

static ar_status make_gradients(ari_unit *u)
{
    ar_ddp *d = u->ddp;
    if (d->in_flight == u)
        AR_TRY(finish_units(d));
    for (size_t k = 0; k < u->buckets; k++) {
        for (size_t i = 0; i < u->bucket[k].info.params; i++)
            AR_TRY(make_gradient(u, &u->bucket[k], i));
    }
    u->due = u->buckets > 0; /* a rank without the first or last pipeline stage has no root unit */
    return AR_OK;
}

static ar_status begin_backward(ari_unit *u)
{
    AR_TRY(weights_take(u, AR_BACKWARD));
    return make_gradients(u);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* Returns true if a gradient is reduced in place. A frozen parameter has no gradient, and its bucket is packed as
 * zeros. */
static bool is_in_place(const ari_bucket *b)
{
    return ari_bucket_is_in_place(b) && b->info.param[0]->grad;
}

/* Allocates memory for the largest bucket of the unit; all buckets that are not reduced in place use it in turn. Faults
 * that pack gradients always allocate it, which the memory account ignores. */
static ar_status alloc_storage(ari_unit *u)
{
    ar_ddp *d = u->ddp;
    const bool is_separate = d->ctx->fault;
    size_t room_bytes = 0, max_bytes = 0;
    for (size_t i = 0; i < u->buckets; i++) {
        const ar_bucket_info *b = &u->bucket[i].info;
        const size_t bytes = d->ctx->arith->bucket_bytes(b->elements, b->storage);
        room_bytes = ari_larger(room_bytes, is_in_place(&u->bucket[i]) ? 0 : bytes);
        max_bytes = ari_larger(max_bytes, bytes);
    }
    AR_TRY(ari_ctx_alloc(d->ctx, &d->room, is_separate ? max_bytes : room_bytes));
    d->room_bytes = room_bytes;
    ari_step_count_alloc(d->ctx, room_bytes);
    for (size_t i = 0; i < u->buckets; i++)
        u->bucket[i].storage = !is_separate && is_in_place(&u->bucket[i]) ? (ar_buf){NULL} : d->room;
    return AR_OK;
}

static ar_status launch_reduction(ari_unit *u)
{
    const ar_ddp *d = u->ddp;
    if (!d->communication) {
        for (size_t i = 0; i < u->buckets; i++)
            AR_TRY(ari_bucket_run(&u->bucket[i], d->ctx->queue));
        return AR_OK;
    }
    AR_TRY(ar_event_record(u->produced, d->ctx->queue));
    AR_TRY(ar_queue_wait(d->communication->queue, u->produced));
    for (size_t i = 0; i < u->buckets; i++)
        AR_TRY(ari_queue_chain(d->communication->queue, ari_bucket_run, &u->bucket[i]));
    return ar_event_record(u->reduced, d->communication->queue);
}

/* Enqueues the reduction of a unit's gradients after the preceding reduction has ended, so that full gradients of at
 * most two units exist. */
static ar_status reduce_unit(ari_unit *u)
{
    ar_ddp *d = u->ddp;
    AR_TRY(finish_units(d));
    u->due = false;
    if (u->buckets == 0)
        return AR_OK;
    for (size_t i = 0; i < u->buckets; i++)
        AR_TRY(ari_ddp_hook(d, &u->bucket[i], true));
    AR_TRY(alloc_storage(u));
    d->in_flight = u;
    u->holds = true;
    AR_TRY(launch_reduction(u));
    return d->communication ? AR_OK : finish_units(d);
}

/* --- what belongs together ---------------------------------------------------------------------------------------- */

enum { NO_UNIT = -1 };

/* A parameter that two units share, or that has no unit, belongs to the root unit. */
static ar_status assign(ar_ddp *d, int unit)
{
    ARI_OWNED ar_param **unit_params = NULL;
    size_t n = 0;
    AR_TRY(ari_module_list(&unit_params, &n, d->unit[unit].module));
    for (size_t i = 0; i < d->n; i++) {
        for (size_t k = 0; k < n; k++) {
            if (unit_params[k] == d->params[i])
                d->unit_of[i] = d->unit_of[i] == NO_UNIT ? unit : d->units;
        }
    }
    return AR_OK;
}

static ar_status before(void *user, ar_pass pass)
{
    ari_unit *u = user;
    ar_ddp *d = u->ddp;
    return ari_ddp_fail(d, pass == AR_FORWARD ? weights_take(u, pass) : begin_backward(u));
}

static ar_status after(void *user, ar_pass pass)
{
    ari_unit *u = user;
    ar_ddp *d = u->ddp;
    weights_release(u);
    if (pass == AR_FORWARD || d->options.mode == AR_BUCKETS_EAGER || d->ctx->deferred)
        return AR_OK;
    return ari_ddp_fail(d, reduce_unit(u));
}

static ar_status init_unit(ar_ddp *d, ari_unit *u, const ar_unit *spec)
{
    u->stage = d->options.root_stage;
    u->hook = (ar_module_hook){before, after, u};
    AR_TRY(ar_event_create(&u->produced));
    AR_TRY(ar_event_create(&u->reduced));
    AR_TRY(ar_event_create(&u->shared));
    AR_TRY(ar_event_create(&u->gathered));
    if (!spec)
        return AR_OK;
    if (!spec->module || spec->module->hook)
        return ar_error_set(AR_ERR_ARG, "%s: a unit is %s", d->name,
                            spec->module ? "given twice, or of another data-parallel object" : "NULL");
    u->module = spec->module;
    u->stage = spec->stage;
    u->module->hook = &u->hook;
    return AR_OK;
}

ar_status ari_units_init(ar_ddp *d)
{
    const int unit_count = d->stage >= 2 ? (int)d->options.units : 0;
    AR_TRY(ARI_TAKE(&d->unit_of, &d->lists, d->n, "units of parameters"));
    AR_TRY(ARI_TAKE(&d->unit, &d->lists, (size_t)unit_count + 1, "units"));
    d->units = unit_count;
    for (size_t i = 0; i < d->n; i++)
        d->unit_of[i] = NO_UNIT;
    for (int i = 0; i <= unit_count; i++) /* all units are counted first, so that they are freed whichever allocation
                                             fails */
        d->unit[i].ddp = d;
    for (int i = 0; i <= unit_count; i++)
        AR_TRY(init_unit(d, &d->unit[i], i < unit_count ? &d->options.unit[i] : NULL));
    for (int i = 0; i < unit_count; i++)
        AR_TRY(assign(d, i));
    for (size_t i = 0; i < d->n; i++)
        d->unit_of[i] = d->unit_of[i] == NO_UNIT ? unit_count : d->unit_of[i];
    return AR_OK;
}

void ari_units_free(ar_ddp *d)
{
    for (int i = 0; d->unit && i <= d->units; i++) {
        ari_unit *u = &d->unit[i];
        drop_gradients(u);
        weights_free(u);
        if (u->module && u->module->hook == &u->hook)
            u->module->hook = NULL;
        ar_event_destroy(u->gathered);
        ar_event_destroy(u->shared);
        ar_event_destroy(u->reduced);
        ar_event_destroy(u->produced);
    }
    ari_ctx_free(d->ctx, d->room);
    ari_step_count_free(d->ctx, d->room_bytes);
}

/* --- a step ------------------------------------------------------------------------------------------------------- */

ar_status ari_units_start(ar_ddp *d)
{
    const ar_arith_ops *arith = d->ctx->arith;
    if (d->stage < 2)
        return AR_OK;
    AR_TRY(finish_units(d));
    for (int i = 0; i <= d->units; i++) {
        drop_gradients(&d->unit[i]);
        d->unit[i].holds = false;
    }
    for (size_t i = 0; i < d->count; i++) {
        ari_bucket *b = &d->buckets[i];
        ari_bucket_share(b);
        AR_TRY(arith->bucket_zero(d->ctx, d->ctx->queue, b->shard, b->info.own_count, b->info.storage));
    }
    return weights_start(d);
}

/* Returns unit i in backward order. */
static ari_unit *backward_unit(const ar_ddp *d, int i)
{
    return &d->unit[i < d->units ? d->units - 1 - i : d->units];
}

ar_status ari_ddp_begin_backward(ar_ddp *d, int stage, bool weights)
{
    if (!d || d->stage < 2)
        return AR_OK;
    for (int i = 0; i <= d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->stage == stage && (weights || !u->module))
            AR_TRY(ari_ddp_fail(d, make_gradients(u)));
    }
    return AR_OK;
}

ar_status ari_ddp_end_backward(ar_ddp *d, int stage)
{
    for (int i = 0; d && d->stage >= 2 && i <= d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->due && u->stage == stage)
            AR_TRY(ari_ddp_fail(d, reduce_unit(u)));
    }
    return AR_OK;
}

ar_status ari_ddp_absent_forward(ar_ddp *d, int stage)
{
    for (int i = 0; d && d->stage >= 3 && i < d->units; i++) {
        if (d->unit[i].stage != stage)
            continue;
        AR_TRY(before(&d->unit[i], AR_FORWARD));
        AR_TRY(after(&d->unit[i], AR_FORWARD));
    }
    return AR_OK;
}

ar_status ari_ddp_absent_backward(ar_ddp *d, int stage)
{
    const bool later = d && d->ctx->deferred; /* then all gradients are computed together with deferred weight
                                                 gradients */
    if (d)
        ari_fault_absent(d);
    if (!later)
        AR_TRY(ari_ddp_begin_backward(d, stage, false));
    for (int i = 0; d && d->stage >= 2 && i < d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->stage != stage)
            continue;
        AR_TRY(later ? ari_ddp_fail(d, weights_take(u, AR_BACKWARD)) : before(u, AR_BACKWARD));
        AR_TRY(after(u, AR_BACKWARD));
    }
    return AR_OK;
}

/* Completes the results of earlier passes: each rank's shard of the sum over the ranks that replicate it. */
static ar_status complete_results(void *user, ar_queue *queue)
{
    const ar_ddp *d = user;
    ar_status st = AR_OK;
    ari_span_begin("shares of gradients");
    for (size_t i = 0; i < d->count && st == AR_OK; i++)
        st = ari_bucket_complete(&d->buckets[i], queue);
    return ari_ddp_fail_in_flight(d, ari_span_end(st));
}

/* A unit without a pass since the start has gradients from elsewhere, or none. */
ar_status ari_units_finish(ar_ddp *d)
{
    for (int i = 0; i <= d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->due || !u->holds)
            AR_TRY(reduce_unit(u));
    }
    AR_TRY(finish_units(d));
    AR_TRY(weights_finish(d));
    if (!d->communication)
        return complete_results(d, d->ctx->queue);
    return ari_queue_chain(d->communication->queue, complete_results, d);
}
