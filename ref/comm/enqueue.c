/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "ref/comm/comm_impl.h"
#include "ref/core/queue_impl.h"

/* A call on its way through a queue that is a thread: one allocation with its arrays behind it. */
typedef struct job {
    ar_comm *c;
    ari_call call;
} job;

static ar_status run_job(void *arg)
{
    job *j = arg;
    const ar_status st = j->c->ops->run(j->c, &j->call);
    free(j);
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

static ar_status check(const ar_comm *c, const ar_queue *q, const ari_call *call)
{
    if (!c || !q)
        return ar_error_set(AR_ERR_ARG, "%s '%s': the %s is missing", ari_kind_name(call->kind), call->tag,
                            c ? "queue" : "communicator");
    return ari_call_check(call, c->rank, c->size);
}

ar_status ari_comm_enqueue(ar_comm *c, ar_queue *q, const ari_call *asked)
{
    ari_call call = *asked;
    call.tag = asked->tag ? asked->tag : "";
    AR_TRY(check(c, q, &call));
    call.on = ari_queue_inner(q);
    const bool is_inline = ari_queue_is_inline(q);
    ar_status st = is_inline ? ari_queue_begin(q) : push_job(c, q, &call);
    if (st != AR_OK)
        ar_comm_abort(c, st, ar_error_message());
    else if (is_inline)
        st = ari_queue_end(q, c->ops->run(c, &call));
    if (st == AR_OK)
        atomic_fetch_add_explicit(&c->calls[call.kind], 1, memory_order_relaxed);
    return st;
}
