/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>

#include "mpi/mpi_impl.h"
#include "ref/comm/moves.h"
#include "ref/core/size.h"

/* Collectives in which each byte goes from its source to its target at once: everything is asked for and sent at the
 * beginning, in pieces, and then waited for. Messages of a pair keep their order. */

typedef struct moves {
    const ari_mpi_place *at;
    const ari_call *call;
    int tag;
    size_t element;
    uint64_t received;
    MPI_Request *request;
    int *member; /* of the group, per request */
    size_t n, request_room, member_room;
} moves;

static ar_status begin_part(moves *v, bool send, int member, char *at, size_t bytes)
{
    const int rank = v->at->member->group->rank[member];
    for (size_t done = 0; done < bytes; done += ARI_MPI_PIECE_BYTES) {
        const size_t rest = bytes - done, now = rest < ARI_MPI_PIECE_BYTES ? rest : ARI_MPI_PIECE_BYTES;
        char *piece = at + done;
        AR_TRY(ari_grow(&v->request, &v->request_room, v->n, sizeof *v->request, "requests of MPI"));
        AR_TRY(ari_grow(&v->member, &v->member_room, v->n, sizeof *v->member, "requests of MPI"));
        AR_TRY(send ? ari_mpi_send(v->at->p, piece, now, rank, v->tag, &v->request[v->n])
                    : ari_mpi_receive(v->at->p, piece, now, rank, v->tag, &v->request[v->n]));
        v->member[v->n++] = member;
    }
    v->received += send ? 0 : bytes;
    return AR_OK;
}

static ar_status begin_parts(moves *v, bool send)
{
    const ari_member *m = v->at->member;
    ari_parts parts = ari_parts_of(v->call, m->index, m->group->n, send);
    for (ari_part p; ari_next_part(&parts, &p);) {
        if (p.peer != m->index)
            AR_TRY(begin_part(v, send, p.peer, p.buf.ptr, p.count * v->element));
    }
    return AR_OK;
}

/* The own part goes from input to output. */
static ar_status begin(moves *v)
{
    ari_moves own = ari_moves_within(v->call, v->at->member->index);
    for (ari_move m; ari_next_move(&own, &m);)
        ari_copy_bytes(m.to.ptr, m.from.ptr, m.count * v->element);
    AR_TRY(begin_parts(v, false));
    return begin_parts(v, true);
}

ar_status ari_mpi_direct(const ari_mpi_place *at, int tag, const ari_call *call, ari_moved *moved)
{
    moves v = {.at = at, .call = call, .tag = tag, .element = ar_dtype_bytes(call->dtype)};
    ar_status st = begin(&v);
    if (st != AR_OK) {
        ari_mpi_broken(at, st);
        ari_mpi_drop(at->p, v.request, (int)v.n);
    } else {
        st = ari_mpi_await(at, v.request, v.member, (int)v.n);
    }
    free(v.request);
    free(v.member);
    if (st == AR_OK && moved)
        ari_moved_add(moved, v.received, 0);
    return st;
}
