/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO-2: no rank keeps whole gradients. When a unit has gone backward its gradients are reduced into this rank's
 * shares, and their memory is given back; its next backward pass begins with the shares in their places. */

#include "ref/train/units.h"
#include "anyrank/arith.h"
#include "ref/core/record.h"
#include "ref/layers/parts.h"
#include "ref/train/faults.h"

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

/* Waits for the gradients that are under way, whose memory is then given back. */
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

/* One that is made begins with what this rank has of the sum of earlier passes. */
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
    if (!u->holds || p->own_count == 0 || ar_faulty(ctx, AR_FAULT_zero_last_micro_batch))
        return AR_OK;
    if (u->ddp->options.hook_terms) /* which sees the terms of this pass: the sum is added to what they become */
        return AR_OK;
    /* Position at which the bucket, of which the share is a slice, would begin; it may be before the share. */
    const size_t at = b->info.offset[i] - b->info.own_start;
    AR_TRY(ctx->arith->bucket_unpack(ctx, ctx->queue, p, ar_const(b->shard), b->info.own_count, at, b->info.storage));
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
    u->due = u->buckets > 0; /* a rank without an end of the pipeline has no root unit */
    return AR_OK;
}

static ar_status begin_backward(ari_unit *u)
{
    AR_TRY(ari_weights_take(u, AR_BACKWARD));
    return make_gradients(u);
}

/* --- reductions --------------------------------------------------------------------------------------------------- */

/* Room for the largest bucket of the unit, which all of them go through. */
static ar_status alloc_storage(ari_unit *u)
{
    ar_ddp *d = u->ddp;
    size_t most = 0;
    for (size_t i = 0; i < u->buckets; i++) {
        const ar_bucket_info *b = &u->bucket[i].info;
        const size_t bytes = d->ctx->arith->bucket_bytes(b->elements, b->storage);
        most = bytes > most ? bytes : most;
    }
    AR_TRY(ari_ctx_alloc(d->ctx, &d->room, most));
    d->room_bytes = most;
    ari_step_count_alloc(d->ctx, most);
    for (size_t i = 0; i < u->buckets; i++)
        u->bucket[i].storage = d->room;
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
        AR_TRY(ar_queue_chain(d->communication->queue, ari_bucket_run, &u->bucket[i]));
    return ar_event_record(u->reduced, d->communication->queue);
}

/* Enqueues the reduction of a unit's gradients, after that of the one before has ended: of two units at most whole
 * gradients are alive. */
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

/* A parameter of two units is the root unit's, as one that is of none. */
static ar_status assign(ar_ddp *d, int unit)
{
    ARI_OWNED ar_param **own = NULL;
    size_t n = 0;
    AR_TRY(ari_module_list(&own, &n, d->unit[unit].module));
    for (size_t i = 0; i < d->n; i++) {
        for (size_t k = 0; k < n; k++) {
            if (own[k] == d->params[i])
                d->unit_of[i] = d->unit_of[i] == NO_UNIT ? unit : d->units;
        }
    }
    return AR_OK;
}

static ar_status before(void *user, ar_pass pass)
{
    ari_unit *u = user;
    ar_ddp *d = u->ddp;
    return ari_ddp_fail(d, pass == AR_FORWARD ? ari_weights_take(u, pass) : begin_backward(u));
}

static ar_status after(void *user, ar_pass pass)
{
    ari_unit *u = user;
    ar_ddp *d = u->ddp;
    ari_weights_release(u);
    if (pass == AR_FORWARD || d->options.mode == AR_BUCKETS_EAGER || d->ctx->deferred)
        return AR_OK;
    return ari_ddp_fail(d, reduce_unit(u));
}

static ar_status init_unit(ar_ddp *d, ari_unit *u, const ar_unit *given)
{
    u->stage = d->options.root_stage;
    u->hook = (ar_module_hook){before, after, u};
    AR_TRY(ar_event_create(&u->produced));
    AR_TRY(ar_event_create(&u->reduced));
    AR_TRY(ar_event_create(&u->shared));
    AR_TRY(ar_event_create(&u->gathered));
    if (!given)
        return AR_OK;
    if (!given->module || given->module->hook)
        return ar_error_set(AR_ERR_ARG, "%s: a unit is %s", d->name,
                            given->module ? "given twice, or of another data-parallel object" : "NULL");
    u->module = given->module;
    u->stage = given->stage;
    u->module->hook = &u->hook;
    return AR_OK;
}

ar_status ari_units_init(ar_ddp *d)
{
    const int given = d->stage >= 2 ? (int)d->options.units : 0;
    AR_TRY(ARI_TAKE(&d->unit_of, &d->lists, d->n, "units of parameters"));
    AR_TRY(ARI_TAKE(&d->unit, &d->lists, (size_t)given + 1, "units"));
    d->units = given;
    for (size_t i = 0; i < d->n; i++)
        d->unit_of[i] = NO_UNIT;
    for (int i = 0; i <= given; i++) /* first: all of them are freed, whichever cannot be made */
        d->unit[i].ddp = d;
    for (int i = 0; i <= given; i++)
        AR_TRY(init_unit(d, &d->unit[i], i < given ? &d->options.unit[i] : NULL));
    for (int i = 0; i < given; i++)
        AR_TRY(assign(d, i));
    for (size_t i = 0; i < d->n; i++)
        d->unit_of[i] = d->unit_of[i] == NO_UNIT ? given : d->unit_of[i];
    return AR_OK;
}

void ari_units_free(ar_ddp *d)
{
    for (int i = 0; d->unit && i <= d->units; i++) {
        ari_unit *u = &d->unit[i];
        drop_gradients(u);
        ari_weights_free(u);
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
    return ari_weights_start(d);
}

/* Unit i of those in the order in which they go backward. */
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
    const bool later = d && d->ctx->deferred; /* then all gradients are made with those of weights */
    if (d)
        ari_fault_absent(d);
    if (!later)
        AR_TRY(ari_ddp_begin_backward(d, stage, false));
    for (int i = 0; d && d->stage >= 2 && i < d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->stage != stage)
            continue;
        AR_TRY(later ? ari_ddp_fail(d, ari_weights_take(u, AR_BACKWARD)) : before(u, AR_BACKWARD));
        AR_TRY(after(u, AR_BACKWARD));
    }
    return AR_OK;
}

/* Completes the results of earlier passes, each rank's share of the sum over the ranks that share it. */
static ar_status complete_results(void *user, ar_queue *on)
{
    const ar_ddp *d = user;
    ar_status st = AR_OK;
    ari_span_begin("shares of gradients");
    for (size_t i = 0; i < d->count && st == AR_OK; i++)
        st = ari_bucket_complete(&d->buckets[i], on);
    return ari_ddp_fail_in_flight(d, ari_span_end(st));
}

/* A unit that no pass has been through since the start has gradients that were made in another way, or none. */
ar_status ari_units_finish(ar_ddp *d)
{
    for (int i = 0; i <= d->units; i++) {
        ari_unit *u = backward_unit(d, i);
        if (u->due || !u->holds)
            AR_TRY(reduce_unit(u));
    }
    AR_TRY(finish_units(d));
    AR_TRY(ari_weights_finish(d));
    if (!d->communication)
        return complete_results(d, d->ctx->queue);
    return ar_queue_chain(d->communication->queue, complete_results, d);
}
