/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/core/comm_impl.h"
#include "ref/core/queue_impl.h"

/* A call on its way through a queue. Where the queue is the calling thread it lives on the stack and borrows its
 * arrays; otherwise it is one allocation with the arrays behind it. */
typedef struct job {
    ar_comm *c;
    ari_call call;
} job;

static ar_status run_in_place(void *arg)
{
    job *j = arg;
    return j->c->run(j->c, &j->call);
}

static ar_status run_and_free(void *arg)
{
    const ar_status st = run_in_place(arg);
    free(arg);
    return st;
}

static void drop_job(void *arg, ar_status st, const char *why)
{
    job *j = arg;
    ar_comm_abort(j->c, st, why);
    free(j);
}

static void *append(char **at, const void *from, size_t bytes)
{
    void *to = *at;
    ari_copy_bytes(to, from, bytes);
    *at += bytes;
    return to;
}

static job *copy_job(ar_comm *c, const ari_call *call)
{
    /* Alignment: job, ar_p2p and size_t are all aligned as pointers are, so they may follow each other. */
    _Static_assert(sizeof(job) % _Alignof(ar_p2p) == 0 && sizeof(ar_p2p) % _Alignof(size_t) == 0, "packed tail");
    const size_t counts = call->counts ? (size_t)c->size * sizeof *call->counts : 0;
    const size_t recv_counts = call->recv_counts ? (size_t)c->size * sizeof *call->recv_counts : 0;
    const size_t p2p = call->p2p ? call->count * sizeof *call->p2p : 0;
    job *j = malloc(sizeof *j + p2p + counts + recv_counts);
    if (!j)
        return NULL;
    *j = (job){.c = c, .call = *call};
    char *at = (char *)(j + 1);
    if (call->p2p)
        j->call.p2p = append(&at, call->p2p, p2p);
    if (call->counts)
        j->call.counts = append(&at, call->counts, counts);
    if (call->recv_counts)
        j->call.recv_counts = append(&at, call->recv_counts, recv_counts);
    return j;
}

ar_status ari_comm_enqueue(ar_comm *c, ar_queue *q, const ari_call *call)
{
    bool ran = false;
    ar_status st;
    if (ari_queue_is_inline(q)) {
        job j = {.c = c, .call = *call};
        j.call.on = q;
        st = ari_queue_push(q, run_in_place, NULL, &j, &ran);
    } else {
        job *j = copy_job(c, call);
        if (j)
            j->call.on = ari_queue_inner(q);
        st = j ? ari_queue_push(q, run_and_free, drop_job, j, &ran)
               : ar_error_set(AR_ERR_MEMORY, "%s '%s': no memory to enqueue it", ari_kind_name(call->kind), call->tag);
        if (st != AR_OK)
            free(j);
    }
    if (st != AR_OK && !ran)
        ar_comm_abort(c, st, ar_error_message());
    return st;
}

ar_status ari_queued_all_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op,
                                const char *tag)
{
    const ari_call call = {
        .kind = ARI_ALL_REDUCE, .dtype = t, .op = op, .count = count, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_reduce_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                                    ar_op op, const char *tag)
{
    const ari_call call = {
        .kind = ARI_REDUCE_SCATTER, .dtype = t, .op = op, .counts = counts, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_all_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                                const char *tag)
{
    const ari_call call = {.kind = ARI_ALL_GATHER, .dtype = t, .counts = counts, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_all_to_all(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *send_counts,
                                const size_t *recv_counts, ar_dtype t, const char *tag)
{
    const ari_call call = {.kind = ARI_ALL_TO_ALL,
                           .dtype = t,
                           .counts = send_counts,
                           .recv_counts = recv_counts,
                           .out = out,
                           .in = in,
                           .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_broadcast(ar_comm *c, ar_queue *q, ar_buf buf, size_t count, ar_dtype t, int root, const char *tag)
{
    const ari_call call = {
        .kind = ARI_BROADCAST, .dtype = t, .root = root, .count = count, .out = buf, .in = ar_const(buf), .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_reduce(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, size_t count, ar_dtype t, ar_op op,
                            int root, const char *tag)
{
    const ari_call call = {
        .kind = ARI_REDUCE, .dtype = t, .op = op, .root = root, .count = count, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_gather(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t, int root,
                            const char *tag)
{
    const ari_call call = {
        .kind = ARI_GATHER, .dtype = t, .root = root, .counts = counts, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_scatter(ar_comm *c, ar_queue *q, ar_buf out, ar_cbuf in, const size_t *counts, ar_dtype t,
                             int root, const char *tag)
{
    const ari_call call = {
        .kind = ARI_SCATTER, .dtype = t, .root = root, .counts = counts, .out = out, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_send(ar_comm *c, ar_queue *q, ar_cbuf in, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_call call = {.kind = ARI_SEND, .dtype = t, .peer = peer, .count = count, .in = in, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_recv(ar_comm *c, ar_queue *q, ar_buf out, size_t count, ar_dtype t, int peer, const char *tag)
{
    const ari_call call = {.kind = ARI_RECV, .dtype = t, .peer = peer, .count = count, .out = out, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_exchange(ar_comm *c, ar_queue *q, const ar_p2p *ops, size_t n, ar_dtype t, const char *tag)
{
    const ari_call call = {.kind = ARI_EXCHANGE, .dtype = t, .count = n, .p2p = ops, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}

ar_status ari_queued_barrier(ar_comm *c, ar_queue *q, const char *tag)
{
    const ari_call call = {.kind = ARI_BARRIER, .dtype = AR_U8, .tag = tag};
    return ari_comm_enqueue(c, q, &call);
}
