/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "mpi/mpi_impl.h"
#include "ref/core/size.h"

/* Collectives in which each byte goes from its source to its target at once: everything is asked for and sent at the
 * beginning, in pieces, and then waited for. Messages of a pair keep their order. */

typedef struct moves {
    ari_mpi_place at;
    int tag;
    const ari_call *call;
    size_t element;
    uint64_t received;
    MPI_Request *request;
    int *member; /* of the group, per request */
    size_t n, room;
} moves;

static ar_status grow(moves *v)
{
    if (v->n < v->room)
        return AR_OK;
    const size_t room = v->room ? 2 * v->room : 32;
    MPI_Request *request = realloc(v->request, room * sizeof *request);
    v->request = request ? request : v->request;
    int *member = realloc(v->member, room * sizeof *member);
    v->member = member ? member : v->member;
    if (!request || !member || room > INT32_MAX)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %zu requests of MPI", room);
    v->room = room;
    return AR_OK;
}

static ar_status move_bytes(moves *v, bool send, int member, const void *at, size_t bytes)
{
    const int rank = v->at.member->group->rank[member];
    for (size_t done = 0; done < bytes; done += ARI_MPI_PIECE_BYTES) {
        const size_t rest = bytes - done, now = rest < ARI_MPI_PIECE_BYTES ? rest : ARI_MPI_PIECE_BYTES;
        char *piece = (char *)(uintptr_t)at + done;
        AR_TRY(grow(v));
        AR_TRY(send ? ari_mpi_send(v->at.p, piece, now, rank, v->tag, &v->request[v->n])
                    : ari_mpi_receive(v->at.p, piece, now, rank, v->tag, &v->request[v->n]));
        v->member[v->n++] = member;
    }
    v->received += send ? 0 : bytes;
    return AR_OK;
}

static ar_status send_to(moves *v, int member, ar_cbuf from, size_t start, size_t count)
{
    return count > 0 ? move_bytes(v, true, member, (const char *)from.ptr + start * v->element, count * v->element)
                     : AR_OK;
}

static ar_status receive_from(moves *v, int member, ar_buf to, size_t start, size_t count)
{
    return count > 0 ? move_bytes(v, false, member, (char *)to.ptr + start * v->element, count * v->element) : AR_OK;
}

/* The own part, from input to output. */
static void keep(const moves *v, size_t to, size_t from, size_t count)
{
    if (count > 0)
        ari_copy_bytes((char *)v->call->out.ptr + to * v->element, (const char *)v->call->in.ptr + from * v->element,
                       count * v->element);
}

static ar_status gather(moves *v)
{
    const ari_call *call = v->call;
    const int n = v->at.member->group->n, own = v->at.member->index;
    if (own != call->root)
        return send_to(v, call->root, call->in, 0, call->counts[own]);
    size_t at = 0;
    for (int i = 0; i < n; at += call->counts[i++]) {
        if (i != own)
            AR_TRY(receive_from(v, i, call->out, at, call->counts[i]));
        else
            keep(v, at, 0, call->counts[i]);
    }
    return AR_OK;
}

static ar_status scatter(moves *v)
{
    const ari_call *call = v->call;
    const int n = v->at.member->group->n, own = v->at.member->index;
    if (own != call->root)
        return receive_from(v, call->root, call->out, 0, call->counts[own]);
    size_t at = 0;
    for (int i = 0; i < n; at += call->counts[i++]) {
        if (i != own)
            AR_TRY(send_to(v, i, call->in, at, call->counts[i]));
        else
            keep(v, 0, at, call->counts[i]);
    }
    return AR_OK;
}

static ar_status all_to_all(moves *v)
{
    const ari_call *call = v->call;
    const int n = v->at.member->group->n, own = v->at.member->index;
    size_t to = 0, from = 0;
    for (int i = 0; i < n; i++) {
        if (i == own) {
            keep(v, to, from, call->counts[i]);
        } else {
            AR_TRY(receive_from(v, i, call->out, to, call->recv_counts[i]));
            AR_TRY(send_to(v, i, call->in, from, call->counts[i]));
        }
        to += call->recv_counts[i];
        from += call->counts[i];
    }
    return AR_OK;
}

/* The k-th send to itself meets the k-th receive from itself. */
static void exchange_with_itself(const moves *v)
{
    const ari_call *call = v->call;
    const int own = v->at.member->index;
    size_t s = 0;
    for (size_t k = 0; k < call->count; k++) {
        const ar_p2p *to = &call->p2p[k];
        if (to->send || to->peer != own)
            continue;
        while (!call->p2p[s].send || call->p2p[s].peer != own)
            s++;
        ari_copy_bytes(to->buf.ptr, call->p2p[s++].buf.ptr, to->count * v->element);
    }
}

static ar_status exchange(moves *v)
{
    const ari_call *call = v->call;
    exchange_with_itself(v);
    for (size_t k = 0; k < call->count; k++) {
        const ar_p2p *op = &call->p2p[k];
        if (op->peer == v->at.member->index)
            continue;
        AR_TRY(op->send ? send_to(v, op->peer, ar_const(op->buf), 0, op->count)
                        : receive_from(v, op->peer, op->buf, 0, op->count));
    }
    return AR_OK;
}

static ar_status begin(moves *v)
{
    const ari_call *call = v->call;
    switch (call->kind) {
    case ARI_GATHER:
        return gather(v);
    case ARI_SCATTER:
        return scatter(v);
    case ARI_ALL_TO_ALL:
        return all_to_all(v);
    case ARI_EXCHANGE:
        return exchange(v);
    case ARI_SEND: /* of a channel: its member 0, to its member 1 */
        return send_to(v, 1, call->in, 0, call->count);
    case ARI_RECV:
        return receive_from(v, 0, call->out, 0, call->count);
    case ARI_ALL_REDUCE:
    case ARI_REDUCE_SCATTER:
    case ARI_ALL_GATHER:
    case ARI_BROADCAST:
    case ARI_REDUCE:
    case ARI_BARRIER:
    case ARI_SPLIT:
    case ARI_KIND_COUNT:
        break;
    }
    return AR_OK;
}

ar_status ari_mpi_direct(ari_mpi_comm *c, ari_member *m, int tag, const ari_call *call)
{
    moves v = {
        .at = {c->p, m, call, "in the middle of"}, .tag = tag, .call = call, .element = ar_dtype_bytes(call->dtype)};
    ar_status st = begin(&v);
    if (st != AR_OK) {
        ari_mpi_broken(&v.at, st);
        ari_mpi_drop(c->p, v.request, (int)v.n);
    } else {
        st = ari_mpi_await(&v.at, v.request, v.member, (int)v.n);
    }
    free(v.request);
    free(v.member);
    if (st == AR_OK)
        ari_moved_add(&c->base.moved, v.received, 0);
    return st;
}
