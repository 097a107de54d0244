/* SPDX-License-Identifier: Apache-2.0 */
#include <sched.h>
#include <string.h>
#include <unistd.h>

#include "gpu/cluster/nccl/comm.h"
#include "gpu/cluster/process/agree.h"
#include "gpu/native.h"
#include "ref/core/clock.h"

/* Passes a call from its queue to NCCL. The call ends when everything is enqueued on the stream; the watcher does the
 * rest. NCCL's communicators are nonblocking: each NCCL call returns at once, so that an abort never takes long. */
enum { SHORT_TURNS = 100, PAUSE_US = 50 };

/* Returns the group of a send and its matching recv, which are one collective of two; the sender is member 0. */
static ar_status message_group(ari_flight_group **result, ari_nccl_comm *c, const ari_call *call)
{
    const bool sends = call->kind == ARI_SEND;
    ari_flight_group **g = &c->message[call->peer + (sends ? 0 : c->base.size)];
    if (!*g) {
        const int src_rank = sends ? c->base.rank : call->peer, dst_rank = sends ? call->peer : c->base.rank;
        const int pair[2] = {c->group->rank[src_rank], c->group->rank[dst_rank]};
        const uint64_t id = ari_flight_id(c->id, (uint64_t)src_rank + 1, ~(uint64_t)dst_rank);
        pthread_mutex_lock(&c->world->lock);
        const ar_status st = ari_flight_add(&c->world->flight, g, id, pair, 2);
        pthread_mutex_unlock(&c->world->lock);
        AR_TRY(st);
    }
    *result = *g;
    return AR_OK;
}

ar_status ari_nccl_check_comm(ari_nccl_comm *c)
{
    if (atomic_load(&c->comm))
        return AR_OK;
    AR_TRY(ari_nccl_world_status(c->world));
    return ar_error_set(AR_ERR_INTERNAL, "a communicator without NCCL's");
}

/* `use` held. */
static ar_status ask_progress(ari_nccl_comm *c, bool *goes_on)
{
    const ari_nccl *n = &c->world->nccl;
    int result = ARI_NCCL_SUCCESS;
    AR_TRY(ari_nccl_check_comm(c));
    AR_TRY(ari_nccl_check(n, n->CommGetAsyncError(c->comm, &result), c->comm, "NCCL"));
    *goes_on = result == ARI_NCCL_IN_PROGRESS;
    return ari_nccl_check(n, result, c->comm, "NCCL");
}

ar_status ari_nccl_settle(ari_nccl_comm *c, uint64_t limit_ns)
{
    const uint64_t deadline = limit_ns > 0 ? ari_deadline_ns(ari_now_ns(), limit_ns) : UINT64_MAX;
    bool goes_on = true;
    for (unsigned turn = 0;; turn++) {
        pthread_mutex_lock(&c->use);
        const ar_status st = ask_progress(c, &goes_on);
        pthread_mutex_unlock(&c->use);
        if (st != AR_OK || !goes_on)
            return st;
        if (ari_now_ns() > deadline)
            return ar_error_set(AR_ERR_TIMEOUT, "NCCL is not done after %.3f s", (double)limit_ns * 1e-9);
        if (turn < SHORT_TURNS)
            sched_yield();
        else
            usleep(PAUSE_US);
    }
}

/* Returns the stream of an inline queue in the form that NCCL needs, and makes its GPU the calling thread's. *emulated
 * is used for an emulated device. */
static ar_status stream_of(ari_nccl_world *w, ar_queue *q, ari_nccl_emulated_stream *emulated, void **borrows)
{
    *emulated = (ari_nccl_emulated_stream){.device = w->device, .queue = q};
    *borrows = emulated;
    return w->nccl.emulated_gpu ? AR_OK : ari_gpu_native_stream(w->device, q, borrows);
}

ar_status ari_nccl_enqueue(ari_nccl_comm *c, const ari_call *call)
{
    ari_nccl_emulated_stream emulated;
    void *stream = NULL;
    AR_TRY(stream_of(c->world, call->queue, &emulated, &stream));
    if (c->base.size == 1)
        return ari_nccl_move(c, NULL, call, stream);
    pthread_mutex_lock(&c->use);
    ar_status st = ari_nccl_check_comm(c);
    if (st == AR_OK)
        st = ari_nccl_move(c, c->comm, call, stream);
    pthread_mutex_unlock(&c->use);
    return st == AR_OK ? ari_nccl_settle(c, 0) : st;
}

ar_status ari_nccl_failed(ari_nccl_comm *c, ari_pending *p, ar_status st)
{
    ari_nccl_world *w = c->world;
    const ari_outcome outcome = ari_outcome_of(st);
    ari_nccl_world_drop(w, p);
    if (st == AR_ERR_MISMATCH && w->checks_calls)
        return ari_outcome_status(&outcome); /* all members found this error */
    AR_TRY(ari_nccl_world_status(w));
    (void)ari_outcome_status(&outcome);
    return w->size > 1 ? ari_nccl_world_fail(w, st) : st;
}

/* Compares the call with the calls of the other members of the group. */
static ar_status agree(ari_nccl_comm *c, const ari_flight_group *g, const ari_call *call)
{
    ari_store *store = c->world->store;
    ari_calls calls;
    char why[768];
    AR_TRY(ari_calls_exchange(&calls, store, g->id, g->entered, g->rank, g->n, call));
    ar_status st = ari_calls_compare(&calls.group, why, sizeof why);
    ari_calls_fini(&calls);
    if (st != AR_OK) { /* every member finds the same error and keeps it */
        st = ar_error_set(st, "%s", why);
        ari_store_agree_failed(store, st, g->rank, g->n);
    }
    return st;
}

static ar_status check_queue(const ari_nccl_comm *c, const ari_call *call)
{
    const ari_stream *s = ari_queue_stream(call->queue);
    return s && strcmp(s->device->ops->name, c->world->device->ops->name) == 0
               ? AR_OK
               : ar_error_set(AR_ERR_ARG,
                              "%s '%s': NCCL moves data of the device %s, on queues that stand on its streams",
                              ari_kind_name(call->kind), call->tag, c->world->device->ops->name);
}

ar_status ari_nccl_run(ar_comm *base, const ari_call *call)
{
    ari_nccl_comm *c = (ari_nccl_comm *)base;
    ari_nccl_world *w = c->world;
    ari_flight_group *g = c->group;
    ari_pending *p = NULL;
    AR_TRY(ari_nccl_world_status(w));
    AR_TRY(check_queue(c, call));
    if (call->kind == ARI_SEND || call->kind == ARI_RECV)
        AR_TRY(message_group(&g, c, call));
    ari_queue_heed(call->queue, w->failure);
    AR_TRY(ari_nccl_world_enter(w, &p, c, g, call));
    ar_status st = w->checks_calls && base->size > 1 ? agree(c, g, call) : AR_OK;
    if (st == AR_OK)
        st = ari_nccl_enqueue(c, call);
    ari_stream *s = ari_queue_stream(call->queue);
    if (st == AR_OK && call->kind == ARI_BARRIER) /* a barrier also waits for the hosts */
        st = ari_stream_sync(s, 0);
    if (st == AR_OK)
        st = ari_nccl_world_status(w); /* the stream no longer waits after NCCL was aborted */
    if (st == AR_OK)
        st = ari_nccl_world_enqueued(w, p, s);
    if (st != AR_OK)
        return ari_nccl_failed(c, p, st);
    ari_moved_add(&base->moved, ari_nccl_moved(c, call), 0);
    return AR_OK;
}
