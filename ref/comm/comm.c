/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/comm.h"

#include <stdlib.h>
#include <string.h>

#include "ref/comm/comm_impl.h"
#include "ref/comm/comm_private.h"
#include "ref/core/queue_impl.h"
#include "ref/core/size.h"
#include "ref/core/wait.h"

void ari_comm_init(ar_comm *c, const ari_comm_ops *ops, int rank, int size)
{
    c->ops = ops;
    c->rank = rank;
    c->size = size;
    c->group_kind = -1;
    atomic_init(&c->moved.read, 0);
    atomic_init(&c->moved.written, 0);
    for (int k = 0; k < ARI_KIND_COUNT; k++)
        atomic_init(&c->calls[k], 0);
}

/* --- the way through a queue -------------------------------------------------------------------------------------- */

/* Call on its way through a threaded queue: one allocation, followed by its arrays. */
typedef struct job {
    ar_comm *c;
    ari_call call;
} job;

static ar_status run_job(void *arg)
{
    ARI_OWNED job *j = arg;
    return j->c->ops->run(j->c, &j->call);
}

static void drop_job(void *arg, ar_status st, const char *why)
{
    ARI_OWNED job *j = arg;
    ari_comm_abort(j->c, st, why);
}

static void *append_bytes(char **cursor, const void *src, size_t bytes)
{
    void *dst = *cursor;
    ari_copy_bytes(dst, src, bytes);
    *cursor += bytes;
    return dst;
}

static job *copy_job(ar_comm *c, const ari_call *call)
{
    /* job, ar_p2p and size_t all have pointer alignment, so they may follow each other in memory */
    _Static_assert(sizeof(job) % _Alignof(ar_p2p) == 0 && sizeof(ar_p2p) % _Alignof(size_t) == 0, "packed tail");
    const size_t counts = call->counts ? (size_t)c->size * sizeof *call->counts : 0;
    const size_t recv_counts = call->recv_counts ? (size_t)c->size * sizeof *call->recv_counts : 0;
    const size_t p2p = call->p2p ? call->count * sizeof *call->p2p : 0;
    job *j = malloc(sizeof *j + p2p + counts + recv_counts);
    if (!j)
        return NULL;
    *j = (job){.c = c, .call = *call};
    char *cursor = (char *)(j + 1);
    if (call->p2p)
        j->call.p2p = append_bytes(&cursor, call->p2p, p2p);
    if (call->counts)
        j->call.counts = append_bytes(&cursor, call->counts, counts);
    if (call->recv_counts)
        j->call.recv_counts = append_bytes(&cursor, call->recv_counts, recv_counts);
    return j;
}

static ar_status push_job(ar_comm *c, ar_queue *q, const ari_call *call)
{
    job *j = copy_job(c, call);
    bool ran;
    if (!j)
        return ar_error_set(AR_ERR_MEMORY, "%s '%s': no memory to enqueue it", ari_kind_name(call->kind), call->tag);
    const ar_status st = ari_queue_push(q, run_job, drop_job, j, &ran);
    if (st != AR_OK)
        free(j);
    return st;
}

static ar_status check_call(const ar_comm *c, const ar_queue *q, const ari_call *call)
{
    if (!c || !q)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the %s is missing", ari_kind_name(call->kind), call->tag,
                            c ? "queue" : "communicator");
    return ari_call_check(call, c->rank, c->size);
}

/* Checks the call and enqueues ops->run(c, call). A queue that works later gets a copy of the call with its counts and
 * operations, but not of buffers and tag. If the queue fails before the call runs, the communicator is aborted, so that
 * the peers waiting for this rank are told at once. */
static ar_status enqueue_call(ar_comm *c, ar_queue *q, const ari_call *request)
{
    ari_call call = *request;
    call.tag = request->tag ? request->tag : "";
    AR_TRY(check_call(c, q, &call));
    call.queue = ari_queue_inner(q);
    const bool is_inline = ari_queue_is_inline(q);
    ar_status st = is_inline ? ari_queue_begin(q) : push_job(c, q, &call);
    if (st != AR_OK)
        ari_comm_abort(c, st, ar_error_message());
    else if (is_inline)
        st = ari_queue_end(q, c->ops->run(c, &call));
    if (st == AR_OK)
        atomic_fetch_add_explicit(&c->calls[call.kind], 1, memory_order_relaxed);
    return st;
}

/* --- collectives: each is a call ---------------------------------------------------------------------------------- */

ar_status ar_comm_all_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, size_t count, ar_dtype t, ar_op op,
                             const char *tag)
{
    const ari_call call = {
        .kind = ARI_ALL_REDUCE, .dtype = t, .op = op, .count = count, .out = out, .input = input, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *counts, ar_dtype t,
                                 ar_op op, const char *tag)
{
    const ari_call call = {
        .kind = ARI_REDUCE_SCATTER, .dtype = t, .op = op, .counts = counts, .out = out, .input = input, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_all_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *counts, ar_dtype t,
                             const char *tag)
{
    const ari_call call = {
        .kind = ARI_ALL_GATHER, .dtype = t, .counts = counts, .out = out, .input = input, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_all_to_all(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf input, const size_t *send_counts,
                             const size_t *recv_counts, ar_dtype t, const char *tag)
{
    ari_call call = {.kind = ARI_ALL_TO_ALL, .dtype = t, .counts = send_counts, .out = out, .input = input, .tag = tag};
    call.recv_counts = recv_counts;
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root, const char *tag)
{
    const ari_call call = {.kind = ARI_BROADCAST,
                           .dtype = t,
                           .root = root,
                           .count = count,
                           .out = buf,
                           .input = ar_const(buf),
                           .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_send(ar_comm *c, ar_queue *q, ar_cbuf input, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_call call = {.kind = ARI_SEND, .dtype = t, .peer = peer, .count = count, .input = input, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_recv(ar_comm *c, ar_queue *q, ar_buf out, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_call call = {.kind = ARI_RECV, .dtype = t, .peer = peer, .count = count, .out = out, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t, const char *tag)
{
    const ari_call call = {.kind = ARI_EXCHANGE, .dtype = t, .count = n, .p2p = ops, .tag = tag};
    return enqueue_call(c, q, &call);
}

ar_status ar_comm_barrier(ar_comm *c, ar_queue *q, const char *tag)
{
    const ari_call call = {.kind = ARI_BARRIER, .dtype = AR_U8, .tag = tag};
    return enqueue_call(c, q, &call);
}

/* --- the rest ----------------------------------------------------------------------------------------------------- */

ar_status ar_comm_split(ar_comm **out, ar_comm *c, int color, int key)
{
    if (!out || !c)
        return ar_error_set(AR_ERR_ARG, "split: the %s is missing", c ? "new communicator's place" : "communicator");
    *out = NULL;
    AR_TRY(c->ops->split(out, c, color, key));
    atomic_fetch_add_explicit(&c->calls[ARI_SPLIT], 1, memory_order_relaxed);
    return AR_OK;
}

void ari_comm_name_group(ar_comm *c, int group_kind)
{
    if (c)
        c->group_kind = group_kind;
}

ar_status ari_comm_join(ar_comm **out, ar_comm *c, int color, int rank, int size)
{
    if (out && c && c->ops->join) {
        *out = NULL;
        AR_TRY(color < 0 ? AR_OK : c->ops->join(out, c, rank, size));
        if (*out)
            (*out)->group_kind = c->group_kind;
        return AR_OK;
    }
    AR_TRY(ar_comm_split(out, c, color, rank));
    if (!*out || ((*out)->rank == rank && (*out)->size == size))
        return AR_OK;
    const ar_status st =
        ar_error_set(AR_ERR_MISMATCH, "join: rank %d is number %d of %d with its color, expected %d of %d", c->rank,
                     (*out)->rank, (*out)->size, rank, size);
    ar_comm_destroy(*out);
    *out = NULL;
    return st;
}

void ari_comm_abort(ar_comm *c, ar_status st, const char *why)
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

const char *ari_comm_error(const ar_comm *c)
{
    ari_wait_poll();
    const char *message = "";
    (void)c->ops->error(c, &message);
    return message;
}

void ar_comm_counted(const ar_comm *c, uint64_t *bytes_read, uint64_t *bytes_written)
{
    if (bytes_read)
        *bytes_read = atomic_load_explicit(&c->moved.read, memory_order_relaxed);
    if (bytes_written)
        *bytes_written = atomic_load_explicit(&c->moved.written, memory_order_relaxed);
}

uint64_t ari_comm_calls(const ar_comm *c, const char *kind)
{
    for (int k = 0; kind && k < ARI_KIND_COUNT; k++) {
        if (strcmp(kind, ari_kind_name((ari_kind)k)) == 0)
            return atomic_load_explicit(&c->calls[k], memory_order_relaxed);
    }
    return 0;
}

void ari_comm_slice(size_t count, int n, int c, size_t *start, size_t *size)
{
    const size_t parts = (size_t)n, part = (size_t)c;
    const size_t small = count / parts, larger = count % parts;
    *start = part * small + (part < larger ? part : larger);
    *size = small + (part < larger ? 1 : 0);
}

void ari_copy_bytes(void *dst, const void *src, size_t bytes)
{
    if (bytes > 0 && dst != src)
        memcpy(dst, src, bytes);
}
