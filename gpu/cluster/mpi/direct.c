/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/mpi/mpi_impl.h"
#include "ref/comm/moves.h"
#include "ref/core/size.h"

/* Collectives in which each byte goes directly from its source to its target: all receives and sends are posted at the
 * beginning, in pieces, and then awaited. Messages between two ranks keep their order. */

static ar_status grow(ari_mpi_requests *r)
{
    static const char label[] = "requests of MPI";
    AR_TRY(ARI_GROW(&r->request, &r->room[0], r->n, label));
    AR_TRY(ARI_GROW(&r->member, &r->room[1], r->n, label));
    return ARI_GROW(&r->index, &r->room[2], r->n, label);
}

static ar_status begin_part(ari_mpi_rendezvous *m, bool send, int member, char *buffer, size_t bytes)
{
    ari_mpi_requests *r = &m->requests;
    const int rank = m->group->rank[member];
    for (size_t offset = 0; offset < bytes; offset += ARI_MPI_PIECE_BYTES) {
        const size_t rest = bytes - offset, piece_bytes = rest < ARI_MPI_PIECE_BYTES ? rest : ARI_MPI_PIECE_BYTES;
        char *piece = buffer + offset;
        AR_TRY(grow(r));
        AR_TRY(send ? ari_mpi_send(m->p, piece, piece_bytes, rank, m->tag, &r->request[r->n])
                    : ari_mpi_receive(m->p, piece, piece_bytes, rank, m->tag, &r->request[r->n]));
        r->member[r->n++] = member;
    }
    return AR_OK;
}

static ar_status begin_parts(ari_mpi_rendezvous *m, const ari_call *call, bool send, uint64_t *moves)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    ari_parts parts = ari_parts_of(call, m->index, m->group->n, send);
    for (ari_part p; ari_next_part(&parts, &p);) {
        if (p.peer == m->index)
            continue;
        AR_TRY(begin_part(m, send, p.peer, p.buf.ptr, p.count * element));
        *moves += p.count * element;
    }
    return AR_OK;
}

/* The rank's own part is copied from input to output. */
static ar_status begin(ari_mpi_rendezvous *m, const ari_call *call, uint64_t *received)
{
    const size_t element = ar_dtype_bytes(call->dtype);
    uint64_t sent = 0;
    ari_moves local_moves = ari_moves_within(call, m->index);
    for (ari_move v; ari_next_move(&local_moves, &v);)
        ari_copy_bytes(v.dst.ptr, v.src.ptr, v.count * element);
    AR_TRY(begin_parts(m, call, false, received));
    return begin_parts(m, call, true, &sent);
}

ar_status ari_mpi_direct(ari_mpi_rendezvous *m, const ari_call *call, ari_moved *moved)
{
    uint64_t received = 0;
    m->requests.n = 0;
    ar_status st = begin(m, call, &received);
    if (st != AR_OK) {
        ari_mpi_broken(m, st);
        ari_mpi_drop(m->p, m->requests.request, (int)m->requests.n);
        return AR_ERR_ABORTED;
    }
    AR_TRY(ari_mpi_await(m));
    if (moved)
        ari_moved_add(moved, received, 0);
    return AR_OK;
}
