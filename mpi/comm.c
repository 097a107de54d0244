/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "mpi/mpi_impl.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"

/* The communicator over processes. A send and the recv that it meets are a meeting of two, as in the simulator: what
 * rank a sends to rank b is a channel, with a group of its own for reports. */

struct ari_mpi_channel {
    ari_mpi_channel *next;
    int from, to; /* of the communicator */
    ari_member member;
    ari_mpi_meeting *meeting;
};

static const ari_comm_ops mpi_comm_ops;

static ari_mpi_comm *comm_of(ar_comm *c)
{
    return (ari_mpi_comm *)c;
}

static ar_status mpi_error(const ar_comm *c, const char **message)
{
    const ari_world *w = ((const ari_mpi_comm *)c)->p->world;
    *message = ari_world_error(w);
    return ari_world_status(w);
}

static void mpi_abort(ar_comm *c, ar_status st, const char *why)
{
    char line[768];
    snprintf(line, sizeof line, "rank %d aborted: %s", comm_of(c)->member.rank, why);
    ari_mpi_control_fail(comm_of(c)->p, NULL, st, line);
}

/* The mirrored group ends with its last member, and has only one here. */
static void drop_group(ari_group *g)
{
    const int n = g->n;
    for (int i = 0; i < n; i++) {
        ari_member m;
        ari_member_init(&m, g, i);
        ari_member_fini(&m);
    }
}

/* --- channels ----------------------------------------------------------------------------------------------------- */

static ar_status make_channel(ari_mpi_channel **gives, ari_mpi_comm *c, int from, int to)
{
    const ari_group *g = c->member.group;
    const int ranks[2] = {g->rank[from], g->rank[to]};
    const bool sends = from == c->base.rank;
    const int sender = ari_mpi_tag(c->context, ARI_MPI_SENDER), receiver = ari_mpi_tag(c->context, ARI_MPI_RECEIVER);
    ari_group *made = NULL;
    ari_mpi_channel *h = calloc(1, sizeof *h);
    if (!h)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a channel between two ranks");
    ar_status st = ari_group_create(&made, c->p->world, ranks, 2);
    if (st == AR_OK) {
        ari_member_init(&h->member, made, sends ? 0 : 1);
        st =
            ari_mpi_meeting_create(&h->meeting, c->p, &h->member, sends ? sender : receiver, sends ? receiver : sender);
    }
    if (st != AR_OK) {
        if (made)
            drop_group(made);
        free(h);
        return st;
    }
    h->from = from;
    h->to = to;
    h->next = c->channels;
    c->channels = h;
    *gives = h;
    return AR_OK;
}

static ar_status channel_of(ari_mpi_channel **gives, ari_mpi_comm *c, const ari_call *call)
{
    const bool sends = call->kind == ARI_SEND;
    const int from = sends ? c->base.rank : call->peer, to = sends ? call->peer : c->base.rank;
    ar_status st = AR_OK;
    pthread_mutex_lock(&c->lock);
    ari_mpi_channel *h = c->channels;
    while (h && !(h->from == from && h->to == to))
        h = h->next;
    if (!h)
        st = make_channel(&h, c, from, to);
    pthread_mutex_unlock(&c->lock);
    *gives = h;
    return st;
}

static ar_status run_message(ari_mpi_comm *c, const ari_call *call)
{
    ari_mpi_channel *h = NULL;
    AR_TRY(channel_of(&h, c, call));
    AR_TRY(ari_mpi_meet(h->meeting, call));
    const ari_mpi_place at = {c->p, &h->member, call, "in the middle of"};
    const ar_status st = ari_mpi_direct(&at, ari_mpi_tag(c->context, ARI_MPI_MESSAGE), call, &c->base.moved);
    ari_mpi_part(h->meeting, st == AR_OK);
    return st == AR_OK ? AR_OK : ari_world_echo(c->p->world, c->member.rank, NULL);
}

/* --- collectives -------------------------------------------------------------------------------------------------- */

ar_status ari_mpi_reserve(ari_mpi_comm *c, size_t bytes)
{
    if (bytes <= c->scratch_bytes)
        return AR_OK;
    void *larger = malloc(bytes);
    if (!larger)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes that arrive from other ranks", bytes);
    free(c->scratch);
    c->scratch = larger;
    c->scratch_bytes = bytes;
    return AR_OK;
}

static ar_status run_on_host(ar_comm *base, const ari_call *call)
{
    ari_mpi_comm *c = comm_of(base);
    const ari_mpi_place at = {c->p, &c->member, call, "in the middle of"};
    if (call->kind == ARI_SEND || call->kind == ARI_RECV)
        return run_message(c, call);
    const bool ring = ari_kind_of(call->kind)->ring;
    if (ring)
        AR_TRY(ari_mpi_reserve(c, ari_mpi_ring_scratch(c, call)));
    AR_TRY(ari_mpi_meet(c->meeting, call));
    ar_status st = AR_OK;
    if (ring)
        st = ari_mpi_ring(c, call);
    else if (call->kind != ARI_BARRIER)
        st = ari_mpi_direct(&at, ari_mpi_tag(c->context, ARI_MPI_DATA), call, &c->base.moved);
    ari_mpi_part(c->meeting, st == AR_OK);
    return st == AR_OK ? AR_OK : ari_world_echo(c->p->world, c->member.rank, NULL);
}

static ar_status mpi_run(ar_comm *c, const ari_call *call)
{
    const ari_stream *stream = ari_queue_stream(call->on);
    const bool reached = !stream || stream->device->ops->host_reaches;
    return reached ? run_on_host(c, call) : ari_staged_run(c, call, false, run_on_host);
}

/* --- making and splitting ----------------------------------------------------------------------------------------- */

static void mpi_comm_destroy(ar_comm *base)
{
    ari_mpi_comm *c = comm_of(base);
    for (ari_mpi_channel *h = c->channels, *next; h; h = next) {
        next = h->next;
        ari_mpi_meeting_destroy(h->meeting);
        drop_group(h->member.group);
        free(h);
    }
    ari_mpi_meeting_destroy(c->meeting);
    if (c->member.group != ari_world_group(c->p->world))
        drop_group(c->member.group);
    pthread_mutex_destroy(&c->lock);
    free(c->scratch);
    free(c);
}

/* The group is the communicator's, also on failure. */
static ar_status make_comm(ar_comm **gives, ari_mpi *p, ari_group *g, int index, int context)
{
    ari_mpi_comm *c = calloc(1, sizeof *c);
    if (!c || pthread_mutex_init(&c->lock, NULL) != 0) {
        free(c);
        if (g != ari_world_group(p->world))
            drop_group(g);
        return ar_error_set(AR_ERR_MEMORY, "no memory for a communicator");
    }
    ari_comm_init(&c->base, &mpi_comm_ops, index, g->n);
    c->p = p;
    c->context = context;
    ari_member_init(&c->member, g, index);
    const ar_status st = ari_mpi_meeting_create(&c->meeting, p, &c->member, ari_mpi_tag(context, ARI_MPI_CALL),
                                                ari_mpi_tag(context, ARI_MPI_CALL));
    if (st != AR_OK)
        mpi_comm_destroy(&c->base);
    else
        *gives = &c->base;
    return st;
}

ar_status ari_mpi_comm_create(ar_comm **gives, ar_process *process, ar_device *d)
{
    (void)d; /* of whichever device: the queue knows where a call's data are */
    ari_mpi *p = (ari_mpi *)process;
    const int context = atomic_fetch_add(&p->next_context, 1);
    if (context > p->last_context)
        return ar_error_set(AR_ERR_UNSUPPORTED, "this MPI has tags for %d communicators of a process", p->last_context);
    return make_comm(gives, p, ari_world_group(p->world), process->rank, context);
}

/* Takes the context, unless another thread of this process was there first. */
static bool claim(ari_mpi *p, int context)
{
    int next = atomic_load(&p->next_context);
    while (next <= context) {
        if (atomic_compare_exchange_weak(&p->next_context, &next, context + 1))
            return true;
    }
    return false;
}

/* A number that no member has used. Each member's first free one may be too small for others, and the largest may have
 * been taken meanwhile by another split of one of them: then they try again. */
static ar_status agree_context(int *context, ari_mpi_comm *c, const ari_call *call)
{
    const int n = c->base.size, own = c->base.rank, tag = ari_mpi_tag(c->context, ARI_MPI_SPLIT);
    const ari_mpi_place at = {c->p, &c->member, call, "in the middle of"};
    size_t *words = NULL;
    AR_TRY(ari_alloc((void **)&words, 2 * (size_t)n, sizeof *words, "contexts of a split"));
    size_t *const ones = words + n;
    for (int i = 0; i < n; i++)
        ones[i] = 1;
    const ari_call all_gather = {
        .kind = ARI_ALL_GATHER, .dtype = AR_I64, .counts = ones, .in = {&words[own]}, .out = {words}};
    *context = ari_mpi_meeting_context(c->meeting);
    ar_status st = AR_OK;
    for (bool all = false; st == AR_OK && !all;) {
        const bool claimed = claim(c->p, *context);
        const size_t next = (size_t)atomic_load(&c->p->next_context);
        words[own] = next << 1 | claimed;
        st = ari_mpi_direct(&at, tag, &all_gather, NULL);
        all = true;
        size_t most = 0;
        for (int i = 0; i < n; i++) {
            all = all && (words[i] & 1);
            most = words[i] >> 1 > most ? words[i] >> 1 : most;
        }
        if (!all)
            *context = (int)most;
    }
    free(words);
    return st;
}

static ar_status make_split(ar_comm **gives, ari_mpi_comm *c, int color, int context)
{
    const ari_group *g = c->member.group;
    ari_group *made = NULL;
    if (context > c->p->last_context)
        return ar_error_set(AR_ERR_UNSUPPORTED, "split: this MPI has tags for %d communicators of a process",
                            c->p->last_context);
    int *members = NULL, index = 0;
    AR_TRY(ari_alloc((void **)&members, (size_t)g->n, sizeof *members, "the ranks of a split"));
    const int n = ari_group_members_of(g, color, members);
    for (int i = 0; i < n; i++) {
        index = members[i] == c->base.rank ? i : index;
        members[i] = g->rank[members[i]];
    }
    const ar_status st = ari_group_create(&made, c->p->world, members, n);
    free(members);
    return st == AR_OK ? make_comm(gives, c->p, made, index, context) : st;
}

static ar_status mpi_split(ar_comm **gives, ar_comm *base, int color, int key)
{
    ari_mpi_comm *c = comm_of(base);
    const ari_call call = {.kind = ARI_SPLIT, .dtype = AR_U8, .color = color, .key = key, .tag = ""};
    int context = 0;
    AR_TRY(ari_mpi_meet(c->meeting, &call));
    ar_status st = agree_context(&context, c, &call);
    const bool failed = st != AR_OK && ari_mpi_control_has_failed(c->p);
    if (st == AR_OK && color >= 0)
        st = make_split(gives, c, color, context);
    ari_mpi_part(c->meeting, st == AR_OK);
    return failed ? ari_world_echo(c->p->world, c->member.rank, NULL) : st;
}

static const ari_comm_ops mpi_comm_ops = {
    .run = mpi_run, .split = mpi_split, .error = mpi_error, .abort = mpi_abort, .destroy = mpi_comm_destroy};
