/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"

#include <string.h>

#include "ref/core/comm_impl.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"

/* The public boundary: each wrapper checks its arguments once; tables repeat no check. */

const char *ari_kind_name(ari_kind kind)
{
    static const char *const names[] = {
#define KIND_NAME(kind, name) name,
        ARI_KIND_TABLE(KIND_NAME)
#undef KIND_NAME
    };
    return (unsigned)kind < ARI_KIND_COUNT ? names[kind] : "?";
}

const char *ari_op_name(ar_op op)
{
    static const char *const names[] = {
        [AR_SUM] = "sum", [AR_MAX] = "max", [AR_MIN] = "min", [AR_PROD] = "prod", [AR_AVG] = "avg"};
    return (unsigned)op < sizeof names / sizeof *names ? names[op] : "?";
}

void ari_comm_init(ar_comm *c, const ar_comm_ops *ops, int rank, int size)
{
    c->ops = ops;
    c->rank = rank;
    c->size = size;
    atomic_init(&c->moved.read, 0);
    atomic_init(&c->moved.written, 0);
    for (int k = 0; k < ARI_KIND_COUNT; k++)
        atomic_init(&c->calls[k], 0);
}

static const char *tag_or_empty(const char *tag)
{
    return tag ? tag : "";
}

static ar_status check_common(const ar_comm *c, const ar_queue *q, ari_kind kind, ar_dtype t, const char *tag)
{
    if (!c || !q)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the %s is missing", ari_kind_name(kind), tag,
                            c ? "queue" : "communicator");
    if (t != AR_F32 && t != AR_F64 && t != AR_BF16 && t != AR_F16 && t != AR_I64 && t != AR_I32 && t != AR_U8)
        return ar_error_set(AR_ERR_DTYPE, "%s '%s': dtype %s; F32, F64, BF16, F16, I64, I32 or U8 expected",
                            ari_kind_name(kind), tag, ar_dtype_name(t));
    return AR_OK;
}

static ar_status check_root(const ar_comm *c, ari_kind kind, int root, const char *tag)
{
    if (root < 0 || root >= c->size)
        return ar_error_set(AR_ERR_ARG, "%s '%s': root %d; 0 to %d expected", ari_kind_name(kind), tag, root,
                            c->size - 1);
    return AR_OK;
}

static ar_status check_peer(const ar_comm *c, ari_kind kind, int peer, const char *tag)
{
    if (peer < 0 || peer >= c->size)
        return ar_error_set(AR_ERR_ARG, "%s '%s': peer %d; 0 to %d expected", ari_kind_name(kind), tag, peer,
                            c->size - 1);
    if (peer == c->rank)
        return ar_error_set(AR_ERR_ARG, "%s '%s': peer %d is the rank itself; another one is expected",
                            ari_kind_name(kind), tag, peer);
    return AR_OK;
}

static ar_status check_op(ari_kind kind, ar_op op, const char *tag)
{
    if (op != AR_SUM && op != AR_MAX && op != AR_MIN && op != AR_PROD && op != AR_AVG)
        return ar_error_set(AR_ERR_ARG, "%s '%s': unknown operation %d", ari_kind_name(kind), tag, (int)op);
    return AR_OK;
}

/* A NULL buffer is fine where nothing is in it. */
static ar_status check_buf(ari_kind kind, const void *ptr, size_t bytes, const char *what, const char *tag)
{
    if (!ptr && bytes > 0)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the %s buffer is NULL, %zu bytes expected", ari_kind_name(kind), tag,
                            what, bytes);
    return AR_OK;
}

static ar_status sum_bytes(size_t *bytes, ari_kind kind, const size_t *counts, int n, ar_dtype t, const char *tag)
{
    if (!counts)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the counts are missing, %d expected", ari_kind_name(kind), tag, n);
    size_t sum = 0;
    for (int i = 0; i < n; i++)
        AR_TRY(ari_add_size(&sum, sum, counts[i]));
    return ari_mul_size(bytes, sum, ar_dtype_bytes(t));
}

/* Of a call with counts: bytes of all parts, of the rank's own, and of those before it. */
typedef struct call_parts {
    size_t whole, own, before;
} call_parts;

static ar_status parts_of(call_parts *p, const ar_comm *c, ari_kind kind, const size_t *counts, ar_dtype t,
                          const char *tag)
{
    AR_TRY(sum_bytes(&p->whole, kind, counts, c->size, t, tag));
    p->own = counts[c->rank] * ar_dtype_bytes(t);
    p->before = ari_counts_before(counts, c->rank) * ar_dtype_bytes(t);
    return AR_OK;
}

/* Input and output are the same bytes, or have none in common: anything between would read what it has overwritten. */
static ar_status check_overlap(ari_kind kind, const void *out, size_t out_bytes, const void *in, size_t in_bytes,
                               bool in_place, const char *tag)
{
    const uintptr_t o = (uintptr_t)out, i = (uintptr_t)in;
    if (in_place || out_bytes == 0 || in_bytes == 0 || o + out_bytes <= i || i + in_bytes <= o)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG, "%s '%s': input and output overlap, but are not in place as documented",
                        ari_kind_name(kind), tag);
}

/* In place: the part is where it lies in the whole. */
static ar_status check_part_overlap(ari_kind kind, const void *whole, const void *part, const call_parts *p,
                                    const char *tag)
{
    const bool in_place = (uintptr_t)part == (uintptr_t)whole + p->before;
    return check_overlap(kind, whole, p->whole, part, p->own, in_place, tag);
}

static ar_status counted(ar_comm *c, ari_kind kind, ar_status st)
{
    if (st == AR_OK)
        atomic_fetch_add_explicit(&c->calls[kind], 1, memory_order_relaxed);
    return st;
}

ar_status ar_comm_all_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op,
                             const char *tag)
{
    const ari_kind kind = ARI_ALL_REDUCE;
    tag = tag_or_empty(tag);
    size_t bytes = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_op(kind, op, tag));
    AR_TRY(ari_mul_size(&bytes, count, ar_dtype_bytes(t)));
    AR_TRY(check_buf(kind, out.ptr, bytes, "output", tag));
    AR_TRY(check_buf(kind, in.ptr, bytes, "input", tag));
    AR_TRY(check_overlap(kind, out.ptr, bytes, in.ptr, bytes, out.ptr == in.ptr, tag));
    return counted(c, kind, c->ops->all_reduce(c, q, out, in, count, t, op, tag));
}

ar_status ar_comm_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                                 ar_op op, const char *tag)
{
    const ari_kind kind = ARI_REDUCE_SCATTER;
    tag = tag_or_empty(tag);
    call_parts p;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_op(kind, op, tag));
    AR_TRY(parts_of(&p, c, kind, counts, t, tag));
    AR_TRY(check_buf(kind, out.ptr, p.own, "output", tag));
    AR_TRY(check_buf(kind, in.ptr, p.whole, "input", tag));
    AR_TRY(check_part_overlap(kind, in.ptr, out.ptr, &p, tag));
    return counted(c, kind, c->ops->reduce_scatter(c, q, out, in, counts, t, op, tag));
}

ar_status ar_comm_all_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                             const char *tag)
{
    const ari_kind kind = ARI_ALL_GATHER;
    tag = tag_or_empty(tag);
    call_parts p;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(parts_of(&p, c, kind, counts, t, tag));
    AR_TRY(check_buf(kind, out.ptr, p.whole, "output", tag));
    AR_TRY(check_buf(kind, in.ptr, p.own, "input", tag));
    AR_TRY(check_part_overlap(kind, out.ptr, in.ptr, &p, tag));
    return counted(c, kind, c->ops->all_gather(c, q, out, in, counts, t, tag));
}

ar_status ar_comm_all_to_all(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *send_counts,
                             const size_t *recv_counts, ar_dtype t, const char *tag)
{
    const ari_kind kind = ARI_ALL_TO_ALL;
    tag = tag_or_empty(tag);
    size_t sent = 0, received = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(sum_bytes(&sent, kind, send_counts, c->size, t, tag));
    AR_TRY(sum_bytes(&received, kind, recv_counts, c->size, t, tag));
    AR_TRY(check_buf(kind, out.ptr, received, "output", tag));
    AR_TRY(check_buf(kind, in.ptr, sent, "input", tag));
    AR_TRY(check_overlap(kind, out.ptr, received, in.ptr, sent, false, tag));
    return counted(c, kind, c->ops->all_to_all(c, q, out, in, send_counts, recv_counts, t, tag));
}

ar_status ar_comm_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root, const char *tag)
{
    const ari_kind kind = ARI_BROADCAST;
    tag = tag_or_empty(tag);
    size_t bytes = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_root(c, kind, root, tag));
    AR_TRY(ari_mul_size(&bytes, count, ar_dtype_bytes(t)));
    AR_TRY(check_buf(kind, buf.ptr, bytes, "only", tag));
    return counted(c, kind, c->ops->broadcast(c, q, buf, count, t, root, tag));
}

ar_status ar_comm_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op, int root,
                         const char *tag)
{
    const ari_kind kind = ARI_REDUCE;
    tag = tag_or_empty(tag);
    size_t bytes = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_op(kind, op, tag));
    AR_TRY(check_root(c, kind, root, tag));
    AR_TRY(ari_mul_size(&bytes, count, ar_dtype_bytes(t)));
    AR_TRY(check_buf(kind, in.ptr, bytes, "input", tag));
    if (root == c->rank) {
        AR_TRY(check_buf(kind, out.ptr, bytes, "output", tag));
        AR_TRY(check_overlap(kind, out.ptr, bytes, in.ptr, bytes, out.ptr == in.ptr, tag));
    }
    return counted(c, kind, c->ops->reduce(c, q, out, in, count, t, op, root, tag));
}

ar_status ar_comm_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t, int root,
                         const char *tag)
{
    const ari_kind kind = ARI_GATHER;
    tag = tag_or_empty(tag);
    call_parts p;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_root(c, kind, root, tag));
    AR_TRY(parts_of(&p, c, kind, counts, t, tag));
    AR_TRY(check_buf(kind, in.ptr, p.own, "input", tag));
    if (root == c->rank) {
        AR_TRY(check_buf(kind, out.ptr, p.whole, "output", tag));
        AR_TRY(check_part_overlap(kind, out.ptr, in.ptr, &p, tag));
    }
    return counted(c, kind, c->ops->gather(c, q, out, in, counts, t, root, tag));
}

ar_status ar_comm_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t, int root,
                          const char *tag)
{
    const ari_kind kind = ARI_SCATTER;
    tag = tag_or_empty(tag);
    call_parts p;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_root(c, kind, root, tag));
    AR_TRY(parts_of(&p, c, kind, counts, t, tag));
    AR_TRY(check_buf(kind, out.ptr, p.own, "output", tag));
    if (root == c->rank) {
        AR_TRY(check_buf(kind, in.ptr, p.whole, "input", tag));
        AR_TRY(check_part_overlap(kind, in.ptr, out.ptr, &p, tag));
    }
    return counted(c, kind, c->ops->scatter(c, q, out, in, counts, t, root, tag));
}

ar_status ar_comm_send(ar_comm *c, ar_queue *q, ar_cbuf in, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_kind kind = ARI_SEND;
    tag = tag_or_empty(tag);
    size_t bytes = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_peer(c, kind, peer, tag));
    AR_TRY(ari_mul_size(&bytes, count, ar_dtype_bytes(t)));
    AR_TRY(check_buf(kind, in.ptr, bytes, "input", tag));
    return counted(c, kind, c->ops->send(c, q, in, count, t, peer, tag));
}

ar_status ar_comm_recv(ar_comm *c, ar_queue *q, ar_buf out, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_kind kind = ARI_RECV;
    tag = tag_or_empty(tag);
    size_t bytes = 0;
    AR_TRY(check_common(c, q, kind, t, tag));
    AR_TRY(check_peer(c, kind, peer, tag));
    AR_TRY(ari_mul_size(&bytes, count, ar_dtype_bytes(t)));
    AR_TRY(check_buf(kind, out.ptr, bytes, "output", tag));
    return counted(c, kind, c->ops->recv(c, q, out, count, t, peer, tag));
}

/* What is received may not overlap anything else of the batch: the order inside a batch is not defined. */
static ar_status check_batch(const ar_p2p *ops, size_t n, size_t element, const char *tag)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < n; k++) {
            if (k == i || ops[i].send)
                continue;
            AR_TRY(check_overlap(ARI_EXCHANGE, ops[i].buf.ptr, ops[i].count * element, ops[k].buf.ptr,
                                 ops[k].count * element, false, tag));
        }
    }
    return AR_OK;
}

ar_status ar_comm_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t, const char *tag)
{
    const ari_kind kind = ARI_EXCHANGE;
    tag = tag_or_empty(tag);
    AR_TRY(check_common(c, q, kind, t, tag));
    if (n > 0 && !ops)
        return ar_error_set(AR_ERR_ARG, "exchange '%s': the %zu operations are missing", tag, n);
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        if (ops[i].peer < 0 || ops[i].peer >= c->size)
            return ar_error_set(AR_ERR_ARG, "exchange '%s': operation %zu has peer %d; 0 to %d expected", tag, i,
                                ops[i].peer, c->size - 1);
        AR_TRY(ari_mul_size(&bytes, ops[i].count, ar_dtype_bytes(t)));
        AR_TRY(check_buf(kind, ops[i].buf.ptr, bytes, ops[i].send ? "sent" : "received", tag));
    }
    AR_TRY(check_batch(ops, n, ar_dtype_bytes(t), tag));
    return counted(c, kind, c->ops->exchange(c, q, ops, n, t, tag));
}

ar_status ar_comm_barrier(ar_comm *c, ar_queue *q, const char *tag)
{
    tag = tag_or_empty(tag);
    AR_TRY(check_common(c, q, ARI_BARRIER, AR_U8, tag));
    return counted(c, ARI_BARRIER, c->ops->barrier(c, q, tag));
}

ar_status ar_comm_split(ar_comm **gives, ar_comm *c, int color, int key)
{
    if (!gives || !c)
        return ar_error_set(AR_ERR_ARG, "split: the %s is missing", c ? "new communicator's place" : "communicator");
    *gives = NULL;
    return counted(c, ARI_SPLIT, c->ops->split(gives, c, color, key));
}

void ar_comm_abort(ar_comm *c, ar_status st, const char *why)
{
    if (c)
        c->ops->abort(c, st == AR_OK ? AR_ERR_ABORTED : st, why ? why : "no reason given");
}

void ar_comm_destroy(ar_comm *c)
{
    if (c)
        c->ops->destroy(c);
}

int ar_comm_rank(const ar_comm *c)
{
    return c->rank;
}

int ar_comm_size(const ar_comm *c)
{
    return c->size;
}

const char *ar_comm_error(const ar_comm *c)
{
    ari_wait_poll();
    const char *message = "";
    (void)c->error(c, &message);
    return message;
}

void ar_comm_counted(const ar_comm *c, uint64_t *bytes_read, uint64_t *bytes_written)
{
    if (bytes_read)
        *bytes_read = atomic_load_explicit(&c->moved.read, memory_order_relaxed);
    if (bytes_written)
        *bytes_written = atomic_load_explicit(&c->moved.written, memory_order_relaxed);
}

uint64_t ar_comm_calls(const ar_comm *c, const char *kind)
{
    for (int k = 0; kind && k < ARI_KIND_COUNT; k++) {
        if (strcmp(kind, ari_kind_name((ari_kind)k)) == 0)
            return atomic_load_explicit(&c->calls[k], memory_order_relaxed);
    }
    return 0;
}

void ar_comm_slice(size_t count, int n, int c, size_t *start, size_t *size)
{
    const size_t parts = (size_t)n, part = (size_t)c;
    const size_t small = count / parts, larger = count % parts;
    *start = part * small + (part < larger ? part : larger);
    *size = small + (part < larger ? 1 : 0);
}

void ari_copy_bytes(void *to, const void *from, size_t bytes)
{
    if (bytes > 0 && to != from)
        memcpy(to, from, bytes);
}
