/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/nccl/comm.h"
#include "ref/comm/comm_private.h"
#include "ref/comm/moves.h"

/* Calls NCCL. Collectives with parts of unequal sizes become groups of NCCL operations: broadcasts, one from each rank
 * (all_gather), reductions, one to each rank (reduce_scatter), or sends and receives (the others). A rank's own part is
 * copied on the same stream. */
typedef struct mover {
    const ari_nccl *nccl;
    const ari_nccl_comm *c;
    void *comm, *stream; /* NCCL's */
    const ari_call *call;
    int n, r, type, op;
    size_t element;
} mover;

static int type_of(ar_dtype t)
{
    switch (t) {
    case AR_F32:
        return ARI_NCCL_F32;
    case AR_F64:
        return ARI_NCCL_F64;
    case AR_BF16:
        return ARI_NCCL_BF16;
    case AR_F16:
        return ARI_NCCL_F16;
    case AR_I64:
        return ARI_NCCL_I64;
    case AR_I32:
        return ARI_NCCL_I32;
    default: /* public functions accept no other type */
        return ARI_NCCL_U8;
    }
}

static int op_of(ar_op op)
{
    switch (op) {
    case AR_MAX:
        return ARI_NCCL_MAX;
    case AR_MIN:
        return ARI_NCCL_MIN;
    case AR_SUM:
        break;
    }
    return ARI_NCCL_SUM;
}

static ar_status check(const mover *m, int result)
{
    return ari_nccl_check(m->nccl, result, m->comm, ari_kind_name(m->call->kind));
}

static ar_status send_to(const mover *m, int peer, const void *src, size_t count)
{
    return count == 0 ? AR_OK : check(m, m->nccl->Send(src, count, m->type, peer, m->comm, m->stream));
}

static ar_status recv_from(const mover *m, int peer, void *dst, size_t count)
{
    return count == 0 ? AR_OK : check(m, m->nccl->Recv(dst, count, m->type, peer, m->comm, m->stream));
}

/* Copies the rank's own part on the same stream. */
static ar_status copy_own(const mover *m)
{
    ar_device *d = m->c->world->device;
    ari_moves local_moves = ari_moves_within(m->call, m->r);
    for (ari_move v; ari_next_move(&local_moves, &v);) {
        if (v.dst.ptr != v.src.ptr)
            AR_TRY(d->ops->copy(d, m->call->queue, v.dst, v.src, v.count * m->element));
    }
    return AR_OK;
}

/* Runs `body` inside an NCCL group, which is always ended, even after an error. */
static ar_status grouped(const mover *m, ar_status (*body)(const mover *m))
{
    AR_TRY(check(m, m->nccl->GroupStart()));
    const ar_status st = body(m);
    const int end = m->nccl->GroupEnd();
    return st != AR_OK ? st : check(m, end);
}

static bool all_equal(const size_t *counts, int n)
{
    for (int i = 1; i < n; i++) {
        if (counts[i] != counts[0])
            return false;
    }
    return true;
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

static ar_status reduce_scatter(const mover *m)
{
    ari_parts parts = ari_parts_of(m->call, m->r, m->n, true);
    for (ari_part p; ari_next_part(&parts, &p);)
        AR_TRY(check(m, m->nccl->Reduce(p.buf.ptr, p.peer == m->r ? m->call->out.ptr : NULL, p.count, m->type, m->op,
                                        p.peer, m->comm, m->stream)));
    return AR_OK;
}

static ar_status all_gather(const mover *m)
{
    ari_parts parts = ari_parts_of(m->call, m->r, m->n, false);
    for (ari_part p; ari_next_part(&parts, &p);)
        AR_TRY(check(m, m->nccl->Broadcast(p.peer == m->r ? m->call->input.ptr : p.buf.ptr, p.buf.ptr, p.count, m->type,
                                           p.peer, m->comm, m->stream)));
    return AR_OK;
}

/* Exchanges the parts of each pair of ranks. */
static ar_status pairs(const mover *m)
{
    ari_parts sent = ari_parts_of(m->call, m->r, m->n, true), received = ari_parts_of(m->call, m->r, m->n, false);
    ari_part p;
    while (ari_next_part(&sent, &p))
        AR_TRY(p.peer == m->r ? AR_OK : send_to(m, p.peer, p.buf.ptr, p.count));
    while (ari_next_part(&received, &p))
        AR_TRY(p.peer == m->r ? AR_OK : recv_from(m, p.peer, p.buf.ptr, p.count));
    return copy_own(m);
}

/* --- which, and whether a rank's dealings with itself fit --------------------------------------------------------- */

static ar_status check_own(const mover *m)
{
    const ari_call *k = m->call;
    if (k->kind == ARI_ALL_TO_ALL && k->counts[m->r] != k->recv_counts[m->r])
        return ar_error_set(AR_ERR_MISMATCH, "all_to_all '%s': rank %d sends %zu elements to itself and receives %zu",
                            k->tag, m->r, k->counts[m->r], k->recv_counts[m->r]);
    if (k->kind != ARI_EXCHANGE)
        return AR_OK;
    size_t s = ari_next_op(k, 0, true, m->r), r = ari_next_op(k, 0, false, m->r);
    while (s < k->count && r < k->count && k->p2p[s].count == k->p2p[r].count) {
        s = ari_next_op(k, s + 1, true, m->r);
        r = ari_next_op(k, r + 1, false, m->r);
    }
    return s == k->count && r == k->count
               ? AR_OK
               : ar_error_set(AR_ERR_MISMATCH,
                              "exchange '%s': what rank %d sends to itself is not what it receives from itself", k->tag,
                              m->r);
}

static ar_status move(const mover *m)
{
    const ari_call *k = m->call;
    const ari_nccl *nccl = m->nccl;
    const bool equal = k->counts && all_equal(k->counts, m->n);
    const size_t n = equal ? k->counts[0] : k->count;
    const void *input = k->input.ptr;
    void *out = k->out.ptr;
    if (m->n == 1)
        return copy_own(m);
    switch (k->kind) {
    case ARI_ALL_REDUCE:
        return n == 0 ? AR_OK : check(m, nccl->AllReduce(input, out, n, m->type, m->op, m->comm, m->stream));
    case ARI_BROADCAST:
        return n == 0 ? AR_OK : check(m, nccl->Broadcast(input, out, n, m->type, k->root, m->comm, m->stream));
    case ARI_REDUCE_SCATTER:
        if (!equal)
            return grouped(m, reduce_scatter);
        return n == 0 ? AR_OK : check(m, nccl->ReduceScatter(input, out, n, m->type, m->op, m->comm, m->stream));
    case ARI_ALL_GATHER:
        if (!equal)
            return grouped(m, all_gather);
        return n == 0 ? AR_OK : check(m, nccl->AllGather(input, out, n, m->type, m->comm, m->stream));
    case ARI_SEND:
        return send_to(m, k->peer, k->input.ptr, k->count);
    case ARI_RECV:
        return recv_from(m, k->peer, k->out.ptr, k->count);
    case ARI_BARRIER: {
        void *word = m->c->word.ptr;
        return check(m, nccl->AllReduce(word, word, 1, ARI_NCCL_I32, ARI_NCCL_SUM, m->comm, m->stream));
    }
    default:
        return grouped(m, pairs);
    }
}

ar_status ari_nccl_move(ari_nccl_comm *c, void *comm, const ari_call *call, void *stream)
{
    const mover m = {.nccl = &c->world->nccl,
                     .c = c,
                     .comm = comm,
                     .stream = stream,
                     .call = call,
                     .n = c->base.size,
                     .r = c->base.rank,
                     .type = type_of(call->dtype),
                     .op = op_of(call->op),
                     .element = ar_dtype_bytes(call->dtype)};
    AR_TRY(check_own(&m));
    return move(&m);
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

static size_t received(const ari_nccl_comm *c, const ari_call *k)
{
    ari_parts parts = ari_parts_of(k, c->base.rank, c->base.size, false);
    size_t sum = 0;
    for (ari_part p; ari_next_part(&parts, &p);)
        sum += p.peer == c->base.rank ? 0 : p.count;
    return sum;
}

static size_t slice_size(const ari_nccl_comm *c, size_t count, int r)
{
    size_t start, size;
    ari_comm_slice(count, c->base.size, r, &start, &size);
    return size;
}

size_t ari_nccl_moved(const ari_nccl_comm *c, const ari_call *k)
{
    const int n = c->base.size, r = c->base.rank, prev_rank = (r + n - 1) % n;
    size_t elements = 0;
    switch (k->kind) {
    case ARI_ALL_REDUCE: /* all slices but one in each of two rounds */
        elements = 2 * k->count - slice_size(c, k->count, prev_rank) - slice_size(c, k->count, r);
        break;
    case ARI_REDUCE_SCATTER:
        elements = ari_counts_before(k->counts, n) - k->counts[prev_rank];
        break;
    case ARI_RECV:
        elements = k->count;
        break;
    default:
        elements = received(c, k);
        break;
    }
    return n == 1 ? 0 : elements * ar_dtype_bytes(k->dtype);
}
