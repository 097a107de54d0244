/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/comm/moves.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

/* Communicator over processes. A send and its recv are a rendezvous of two, as in the simulator: data from rank a to
 * rank b uses a channel with its own group for reports. */

#define NO_PARENT UINT64_MAX /* marks communicators of the process, which have no parent group */

struct ari_mpi_channel {
    ari_mpi_channel *next;
    int src_rank, dst_rank; /* ranks in the communicator */
    ari_mpi_rendezvous rendezvous;
};

static const ari_comm_ops mpi_comm_ops;

static ari_mpi_comm *comm_of(ar_comm *c)
{
    return (ari_mpi_comm *)c;
}

static ar_status mpi_error(const ar_comm *c, const char **message)
{
    bool is_local;
    return ari_store_failure(((const ari_mpi_comm *)c)->p->base.store, &is_local, message);
}

static void mpi_abort(ar_comm *c, ar_status st, const char *why)
{
    ari_mpi *p = comm_of(c)->p;
    char line[768];
    snprintf(line, sizeof line, "rank %d aborted: %s", p->base.rank, why);
    ari_mpi_fail(p, NULL, st, line);
}

/* --- channels ----------------------------------------------------------------------------------------------------- */

static int tag_of(int context, ari_mpi_use use)
{
    return context * ARI_MPI_USES + (int)use;
}

static ar_status make_channel(ari_mpi_channel **result, ari_mpi_comm *c, int src_rank, int dst_rank)
{
    const int *rank = c->rendezvous.group->rank, pair[2] = {rank[src_rank], rank[dst_rank]};
    const int tag = tag_of(c->context, src_rank < dst_rank ? ARI_MPI_UP : ARI_MPI_DOWN);
    const uint64_t id = ari_flight_id(c->rendezvous.group->id, (uint64_t)src_rank + 1, ~(uint64_t)dst_rank);
    ARI_OWNED ari_mpi_channel *h = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&h, 1, "a channel between two ranks"));
    AR_TRY(ari_mpi_rendezvous_init(&h->rendezvous, c->p, id, pair, 2, src_rank == c->base.rank ? 0 : 1, tag));
    h->src_rank = src_rank;
    h->dst_rank = dst_rank;
    h->next = c->channels;
    c->channels = h;
    *result = h;
    h = NULL;
    return AR_OK;
}

static ar_status channel_of(ari_mpi_channel **result, ari_mpi_comm *c, const ari_call *call)
{
    const bool sends = call->kind == ARI_SEND;
    const int src_rank = sends ? c->base.rank : call->peer, dst_rank = sends ? call->peer : c->base.rank;
    ar_status st = AR_OK;
    pthread_mutex_lock(&c->lock);
    ari_mpi_channel *h = c->channels;
    while (h && !(h->src_rank == src_rank && h->dst_rank == dst_rank))
        h = h->next;
    if (!h)
        st = make_channel(&h, c, src_rank, dst_rank);
    pthread_mutex_unlock(&c->lock);
    *result = h;
    return st;
}

static ar_status run_message(ari_mpi_comm *c, const ari_call *call)
{
    ari_mpi_channel *h = NULL;
    AR_TRY(channel_of(&h, c, call));
    AR_TRY(ari_mpi_meet(&h->rendezvous, call));
    return ari_mpi_part(&h->rendezvous, ari_mpi_direct(&h->rendezvous, call, &c->base.moved));
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

static ar_status run_on_host(ar_comm *base, const ari_call *call)
{
    ari_mpi_comm *c = comm_of(base);
    if (call->kind == ARI_SEND || call->kind == ARI_RECV)
        return run_message(c, call);
    const bool in_parts = ari_kind_of(call->kind)->combines || call->kind == ARI_BROADCAST;
    AR_TRY(ari_scratch_reserve(&c->scratch, &c->scratch_bytes, ari_mpi_parts_scratch(c, call),
                               "that arrive from other ranks"));
    AR_TRY(ari_mpi_meet(&c->rendezvous, call));
    ar_status st = AR_OK;
    if (in_parts)
        st = ari_mpi_parts(c, call);
    else if (call->kind != ARI_BARRIER)
        st = ari_mpi_direct(&c->rendezvous, call, &c->base.moved);
    return ari_mpi_part(&c->rendezvous, st);
}

static ar_status mpi_run(ar_comm *c, const ari_call *call)
{
    const ari_stream *stream = ari_queue_stream(call->queue);
    const bool reached = !stream || stream->device->ops->host_reaches;
    return reached ? run_on_host(c, call) : ari_staged_run(c, call, false, run_on_host);
}

/* --- making and splitting ----------------------------------------------------------------------------------------- */

static void mpi_comm_destroy(ar_comm *base)
{
    ari_mpi_comm *c = comm_of(base);
    for (ari_mpi_channel *h = c->channels, *next_channel; h; h = next_channel) {
        next_channel = h->next;
        ari_mpi_rendezvous_fini(&h->rendezvous);
        free(h);
    }
    ari_mpi_rendezvous_fini(&c->rendezvous);
    pthread_mutex_destroy(&c->lock);
    free(c->scratch);
    free(c->op);
    free(c);
}

/* Agrees on a number that no other communicator has: the members meet at the store as `seq` of `group`, and the first
 * member chooses one. */
static ar_status agree_context(int *context, ari_mpi *p, uint64_t group, uint64_t seq, const int *rank, int n)
{
    ari_gather_result gathered;
    const bool is_root = rank[0] == p->base.rank;
    uint64_t number = is_root ? atomic_fetch_add(&p->contexts, 1) : 0;
    AR_TRY(ari_store_exchange(p->base.store, group, seq, rank, n, &number, sizeof number, &gathered));
    memcpy(&number, gathered.at, sizeof number);
    free(gathered.memory);
    number = number * (uint64_t)p->base.size + (uint64_t)rank[0];
    if (number > (uint64_t)p->last_context)
        return ar_error_set(AR_ERR_UNSUPPORTED, "this MPI has tags for %d communicators", p->last_context);
    *context = (int)number;
    return AR_OK;
}

/* Creates a communicator. All groups of one split have the same context and id, because no two of them share a rank. */
static ar_status make_comm(ar_comm **result, ari_mpi *p, const int *rank, int n, int index, int context)
{
    const uint64_t id = ari_flight_id((uint64_t)context, 0, 0);
    ari_mpi_comm *c = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&c, 1, "a communicator"));
    pthread_mutex_init(&c->lock, NULL); /* on Linux this cannot fail */
    ari_comm_init(&c->base, &mpi_comm_ops, index, n);
    c->p = p;
    c->context = context;
    ar_status st = ARI_ALLOC(&c->op, 2 * (size_t)n, "messages of an exchange");
    if (st == AR_OK)
        st = ari_mpi_rendezvous_init(&c->rendezvous, p, id, rank, n, index, tag_of(context, ARI_MPI_ALL));
    if (st == AR_OK)
        *result = &c->base;
    else
        mpi_comm_destroy(&c->base);
    return st;
}

ar_status ari_mpi_comm_create(ar_comm **result, ar_process *process, ar_device *d)
{
    (void)d; /* any device: the queue knows where a call's data is */
    ari_mpi *p = (ari_mpi *)process;
    const int n = process->size;
    ARI_OWNED int *rank = NULL;
    int context = 0;
    AR_TRY(ARI_ALLOC(&rank, (size_t)n, "ranks"));
    for (int i = 0; i < n; i++)
        rank[i] = i;
    AR_TRY(agree_context(&context, p, NO_PARENT, ++p->comms, rank, n));
    return make_comm(result, p, rank, n, process->rank, context);
}

static ar_status make_split(ar_comm **result, ari_mpi_comm *c, int color)
{
    const ari_mpi_rendezvous *m = &c->rendezvous;
    ARI_OWNED int *members = NULL;
    int index = 0, context = 0;
    AR_TRY(agree_context(&context, c->p, m->group->id, m->open.seq, m->group->rank, m->group->n));
    if (color < 0)
        return AR_OK;
    AR_TRY(ARI_ALLOC(&members, (size_t)m->group->n, "the ranks of a split"));
    const int n = ari_group_members_of(&m->calls.group, color, members);
    for (int i = 0; i < n; i++) {
        index = members[i] == m->index ? i : index;
        members[i] = m->group->rank[members[i]];
    }
    return make_comm(result, c->p, members, n, index, context);
}

static ar_status mpi_split(ar_comm **result, ar_comm *base, int color, int key)
{
    ari_mpi_comm *c = comm_of(base);
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .color = color, .key = key, .tag = ""};
    AR_TRY(ari_mpi_meet(&c->rendezvous, &call));
    return ari_mpi_part(&c->rendezvous, make_split(result, c, color));
}

static const ari_comm_ops mpi_comm_ops = {
    .run = mpi_run, .split = mpi_split, .error = mpi_error, .abort = mpi_abort, .destroy = mpi_comm_destroy};
