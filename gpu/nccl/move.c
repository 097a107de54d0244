/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/nccl/comm.h"

/* What NCCL is asked for. Collectives whose parts have unequal sizes are groups of what NCCL has: of broadcasts, one
 * from each rank (all_gather), of reductions, one to each (reduce_scatter), of sends and receives (the rest). What a
 * rank gives itself is copied on the same stream. */
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
    default: /* the boundary lets nothing else pass */
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
    case AR_PROD:
        return ARI_NCCL_PROD;
    case AR_AVG:
        return ARI_NCCL_AVG;
    case AR_SUM:
        break;
    }
    return ARI_NCCL_SUM;
}

static ar_status check(const mover *m, int result)
{
    return ari_nccl_check(m->nccl, result, m->comm, ari_kind_name(m->call->kind));
}

static const char *from_at(const mover *m, size_t elements)
{
    return m->call->in.ptr ? (const char *)m->call->in.ptr + elements * m->element : NULL;
}

static char *to_at(const mover *m, size_t elements)
{
    return m->call->out.ptr ? (char *)m->call->out.ptr + elements * m->element : NULL;
}

static ar_status copy(const mover *m, void *to, const void *from, size_t count)
{
    ar_device *d = m->c->world->device;
    if (count == 0 || to == from)
        return AR_OK;
    return d->ops->copy(d, m->call->on, (ar_buf){to}, (ar_cbuf){from}, count * m->element);
}

static ar_status send_to(const mover *m, int peer, const void *from, size_t count)
{
    return count == 0 ? AR_OK : check(m, m->nccl->Send(from, count, m->type, peer, m->comm, m->stream));
}

static ar_status recv_from(const mover *m, int peer, void *to, size_t count)
{
    return count == 0 ? AR_OK : check(m, m->nccl->Recv(to, count, m->type, peer, m->comm, m->stream));
}

/* A group that was begun ends, whatever went wrong in it. */
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

/* --- one at a time ------------------------------------------------------------------------------------------------ */

static ar_status all_reduce(const mover *m)
{
    const ari_call *k = m->call;
    return check(m, m->nccl->AllReduce(k->in.ptr, k->out.ptr, k->count, m->type, m->op, m->comm, m->stream));
}

static ar_status reduce(const mover *m)
{
    const ari_call *k = m->call;
    return check(m, m->nccl->Reduce(k->in.ptr, m->r == k->root ? k->out.ptr : NULL, k->count, m->type, m->op, k->root,
                                    m->comm, m->stream));
}

static ar_status broadcast(const mover *m)
{
    const ari_call *k = m->call;
    return check(m, m->nccl->Broadcast(k->in.ptr, k->out.ptr, k->count, m->type, k->root, m->comm, m->stream));
}

static ar_status reduce_scatter_equal(const mover *m)
{
    const ari_call *k = m->call;
    return check(m, m->nccl->ReduceScatter(k->in.ptr, k->out.ptr, k->counts[0], m->type, m->op, m->comm, m->stream));
}

static ar_status all_gather_equal(const mover *m)
{
    const ari_call *k = m->call;
    return check(m, m->nccl->AllGather(k->in.ptr, k->out.ptr, k->counts[0], m->type, m->comm, m->stream));
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

static ar_status reduce_scatter(const mover *m)
{
    size_t at = 0;
    for (int i = 0; i < m->n; i++) {
        const size_t count = m->call->counts[i];
        if (count > 0)
            AR_TRY(check(m, m->nccl->Reduce(from_at(m, at), i == m->r ? m->call->out.ptr : NULL, count, m->type, m->op,
                                            i, m->comm, m->stream)));
        at += count;
    }
    return AR_OK;
}

static ar_status all_gather(const mover *m)
{
    size_t at = 0;
    for (int i = 0; i < m->n; i++) {
        const size_t count = m->call->counts[i];
        const void *from = i == m->r ? m->call->in.ptr : to_at(m, at);
        if (count > 0)
            AR_TRY(check(m, m->nccl->Broadcast(from, to_at(m, at), count, m->type, i, m->comm, m->stream)));
        at += count;
    }
    return AR_OK;
}

static ar_status gather(const mover *m)
{
    size_t at = 0;
    if (m->r != m->call->root)
        return send_to(m, m->call->root, m->call->in.ptr, m->call->counts[m->r]);
    for (int i = 0; i < m->n; i++) {
        const size_t count = m->call->counts[i];
        AR_TRY(i == m->r ? copy(m, to_at(m, at), m->call->in.ptr, count) : recv_from(m, i, to_at(m, at), count));
        at += count;
    }
    return AR_OK;
}

static ar_status scatter(const mover *m)
{
    size_t at = 0;
    if (m->r != m->call->root)
        return recv_from(m, m->call->root, m->call->out.ptr, m->call->counts[m->r]);
    for (int i = 0; i < m->n; i++) {
        const size_t count = m->call->counts[i];
        AR_TRY(i == m->r ? copy(m, m->call->out.ptr, from_at(m, at), count) : send_to(m, i, from_at(m, at), count));
        at += count;
    }
    return AR_OK;
}

static ar_status all_to_all(const mover *m)
{
    size_t from = 0, to = 0;
    for (int i = 0; i < m->n; i++) {
        const size_t sent = m->call->counts[i], expected = m->call->recv_counts[i];
        if (i == m->r) {
            AR_TRY(copy(m, to_at(m, to), from_at(m, from), sent));
        } else {
            AR_TRY(send_to(m, i, from_at(m, from), sent));
            AR_TRY(recv_from(m, i, to_at(m, to), expected));
        }
        from += sent;
        to += expected;
    }
    return AR_OK;
}

/* The k-th operation of the batch at or after `at` that a rank does with itself. */
static size_t next_own(const mover *m, size_t at, bool send)
{
    while (at < m->call->count && !(m->call->p2p[at].peer == m->r && m->call->p2p[at].send == send))
        at++;
    return at;
}

static ar_status exchange(const mover *m)
{
    const ari_call *k = m->call;
    for (size_t i = 0; i < k->count; i++) {
        const ar_p2p *o = &k->p2p[i];
        if (o->peer != m->r)
            AR_TRY(o->send ? send_to(m, o->peer, o->buf.ptr, o->count) : recv_from(m, o->peer, o->buf.ptr, o->count));
    }
    for (size_t s = next_own(m, 0, true), r = next_own(m, 0, false); s < k->count; r = next_own(m, r + 1, false)) {
        AR_TRY(copy(m, k->p2p[r].buf.ptr, k->p2p[s].buf.ptr, k->p2p[s].count));
        s = next_own(m, s + 1, true);
    }
    return AR_OK;
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
    size_t s = next_own(m, 0, true), r = next_own(m, 0, false);
    while (s < k->count && r < k->count && k->p2p[s].count == k->p2p[r].count) {
        s = next_own(m, s + 1, true);
        r = next_own(m, r + 1, false);
    }
    return s == k->count && r == k->count
               ? AR_OK
               : ar_error_set(AR_ERR_MISMATCH,
                              "exchange '%s': what rank %d sends to itself is not what it receives from itself", k->tag,
                              m->r);
}

static ar_status move_counts(const mover *m)
{
    const bool equal = all_equal(m->call->counts, m->n);
    if (ari_counts_before(m->call->counts, m->n) == 0)
        return AR_OK;
    switch (m->call->kind) {
    case ARI_REDUCE_SCATTER:
        return equal ? reduce_scatter_equal(m) : grouped(m, reduce_scatter);
    case ARI_ALL_GATHER:
        return equal ? all_gather_equal(m) : grouped(m, all_gather);
    default:
        return grouped(m, m->call->kind == ARI_GATHER ? gather : scatter);
    }
}

/* A group of one: nothing leaves the rank. */
static ar_status move_alone(const mover *m)
{
    const ari_call *k = m->call;
    switch (k->kind) {
    case ARI_ALL_TO_ALL:
        return all_to_all(m);
    case ARI_EXCHANGE:
        return exchange(m);
    case ARI_BARRIER:
        return AR_OK;
    default:
        return copy(m, k->out.ptr, k->in.ptr, k->counts ? k->counts[0] : k->count);
    }
}

static ar_status move_among(const mover *m)
{
    const ari_call *k = m->call;
    switch (k->kind) {
    case ARI_ALL_REDUCE:
        return k->count == 0 ? AR_OK : all_reduce(m);
    case ARI_BROADCAST:
        return k->count == 0 ? AR_OK : broadcast(m);
    case ARI_REDUCE:
        return k->count == 0 ? AR_OK : reduce(m);
    case ARI_ALL_TO_ALL:
        return grouped(m, all_to_all);
    case ARI_EXCHANGE:
        return grouped(m, exchange);
    case ARI_SEND:
        return send_to(m, k->peer, k->in.ptr, k->count);
    case ARI_RECV:
        return recv_from(m, k->peer, k->out.ptr, k->count);
    case ARI_BARRIER: {
        void *word = m->c->word.ptr;
        return check(m, m->nccl->AllReduce(word, word, 1, ARI_NCCL_I32, ARI_NCCL_SUM, m->comm, m->stream));
    }
    case ARI_REDUCE_SCATTER:
    case ARI_ALL_GATHER:
    case ARI_GATHER:
    case ARI_SCATTER:
    case ARI_SPLIT: /* is not enqueued */
    case ARI_KIND_COUNT:
        break;
    }
    return move_counts(m);
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
    return m.n == 1 ? move_alone(&m) : move_among(&m);
}

/* --- bytes -------------------------------------------------------------------------------------------------------- */

static size_t received(const ari_nccl_comm *c, const ari_call *k)
{
    size_t sum = 0;
    for (int i = 0; k->kind == ARI_ALL_TO_ALL && i < c->base.size; i++)
        sum += i == c->base.rank ? 0 : k->recv_counts[i];
    for (size_t i = 0; k->kind == ARI_EXCHANGE && i < k->count; i++)
        sum += k->p2p[i].send || k->p2p[i].peer == c->base.rank ? 0 : k->p2p[i].count;
    return sum;
}

static size_t slice_size(const ari_nccl_comm *c, size_t count, int r)
{
    size_t start, size;
    ar_comm_slice(count, c->base.size, r, &start, &size);
    return size;
}

size_t ari_nccl_moved(const ari_nccl_comm *c, const ari_call *k)
{
    const int n = c->base.size, r = c->base.rank, left = (r + n - 1) % n;
    const size_t whole = k->counts && k->kind != ARI_ALL_TO_ALL ? ari_counts_before(k->counts, n) : 0;
    size_t elements = 0;
    switch (k->kind) {
    case ARI_ALL_REDUCE: /* all but one slice in each of two rounds */
        elements = 2 * k->count - slice_size(c, k->count, left) - slice_size(c, k->count, r);
        break;
    case ARI_REDUCE_SCATTER:
        elements = whole - k->counts[left];
        break;
    case ARI_ALL_GATHER:
        elements = whole - k->counts[r];
        break;
    case ARI_REDUCE:
        elements = left == k->root ? 0 : k->count;
        break;
    case ARI_BROADCAST:
        elements = r == k->root ? 0 : k->count;
        break;
    case ARI_GATHER:
        elements = r == k->root ? whole - k->counts[r] : 0;
        break;
    case ARI_SCATTER:
        elements = r == k->root ? 0 : k->counts[r];
        break;
    case ARI_RECV:
        elements = k->count;
        break;
    case ARI_ALL_TO_ALL:
    case ARI_EXCHANGE:
        elements = received(c, k);
        break;
    case ARI_SEND:
    case ARI_BARRIER:
    case ARI_SPLIT:
    case ARI_KIND_COUNT:
        break;
    }
    return n == 1 ? 0 : elements * ar_dtype_bytes(k->dtype);
}
