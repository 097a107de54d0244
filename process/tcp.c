/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "process/launch.h"
#include "process/net.h"
#include "process/process.h"
#include "ref/comm/comm_impl.h"
#include "ref/core/clock.h"
#include "ref/core/size.h"

/* Processes without MPI: what they broadcast and gather are values of the store. */

/* All others wait for process 0 alone, which waits for them: it is to find out first who keeps it waiting. */
#define PATIENCE_NS UINT64_C(250000000)

typedef struct tcp_process {
    ar_process base;
    uint64_t calls;
} tcp_process;

static tcp_process *tcp_of(ar_process *p)
{
    return (tcp_process *)p;
}

static ar_status get(ar_process *p, const ari_store_value *v, ari_gather_result *gives)
{
    char who[128];
    const uint64_t ns = ari_deadline_ns(p->options.timeout_ns, p->rank == 0 ? 0 : PATIENCE_NS);
    snprintf(who, sizeof who, "rank %d waited %.3f s in a %s of the processes", p->rank, (double)ns * 1e-9,
             v->n == 1 ? "broadcast" : "gather");
    return ari_store_get(p->store, v, ns, who, gives);
}

static ar_status tcp_broadcast(ar_process *p, void *bytes, size_t n)
{
    const ari_store_value v = {.seq = ++tcp_of(p)->calls, .n = 1, .readers = p->size - 1};
    ari_gather_result all;
    if (p->size == 1)
        return AR_OK;
    if (p->rank == 0)
        return ari_store_set(p->store, &v, bytes, n);
    AR_TRY(get(p, &v, &all));
    const size_t comes = all.start[1];
    if (comes == n)
        ari_copy_bytes(bytes, all.at, n);
    free(all.memory);
    if (comes == n)
        return AR_OK;
    char why[160];
    snprintf(why, sizeof why, "processes disagree: rank 0 broadcasts %zu bytes, rank %d expects %zu", comes, p->rank,
             n);
    ari_store_fail(p->store, AR_ERR_MISMATCH, why);
    AR_TRY(ari_store_status(p->store));
    return ar_error_set(AR_ERR_MISMATCH, "%s", why);
}

static ar_status tcp_gather(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    const ari_store_value v = {.seq = ++tcp_of(p)->calls, .index = p->rank, .n = p->size, .readers = 1};
    const size_t alone[] = {0, n};
    ari_gather_result all = {.at = bytes, .start = alone};
    *gives = NULL;
    if (p->size > 1)
        AR_TRY(ari_store_set(p->store, &v, bytes, n));
    if (p->rank != 0)
        return AR_OK;
    if (p->size > 1)
        AR_TRY(get(p, &v, &all));
    const size_t total = all.start[p->size];
    char *copy = malloc(total > 0 ? total : 1);
    if (copy)
        ari_copy_bytes(copy, all.at, total);
    for (int r = 0; sizes && r < p->size; r++)
        sizes[r] = all.start[r + 1] - all.start[r];
    free(all.memory);
    *gives = copy;
    return copy ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for %zu bytes from all processes", total);
}

static void tcp_abort(ar_process *p, ar_status st, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", p->rank, why);
    if (p->store)
        ari_store_fail(p->store, st, text);
}

static void tcp_destroy(ar_process *p)
{
    ari_store_destroy(p->store);
    free(p);
}

static const ari_process_ops tcp_ops = {
    .name = "tcp", .broadcast = tcp_broadcast, .gather = tcp_gather, .abort = tcp_abort, .destroy = tcp_destroy};

/* Without a key the machine's own processes alone may come, unless all who reach the port are meant to. */
static ar_status choose_reach(ari_launch *l, bool *loopback, const ari_key *key, bool open_store)
{
    *loopback = ari_net_is_loopback(l->host);
    if (!*loopback && l->one_machine) {
        snprintf(l->host, sizeof l->host, "127.0.0.1");
        *loopback = true;
    }
    if (*loopback || key->is_set || open_store)
        return AR_OK;
    return ar_error_set(AR_ERR_ARG,
                        "MASTER_ADDR '%.128s' is no loopback address, and whoever reaches port %d could join the "
                        "job: give all processes the same ANYRANK_JOB_KEY, or the same ANYRANK_JOB_KEY_FILE, or allow "
                        "it by --open-store",
                        l->host, l->port);
}

static ar_status join(ar_process *p, ari_launch *l)
{
    ari_store_options o = {.rank = l->rank,
                           .size = l->size,
                           .job = l->job,
                           .timeout_ns = p->options.timeout_ns,
                           .host = l->host,
                           .listener = -1};
    bool loopback = false;
    AR_TRY(ari_key_read(&o.key));
    AR_TRY(choose_reach(l, &loopback, &o.key, p->options.open_store));
    o.port = l->port;
    if (l->rank == 0)
        AR_TRY(ari_net_listen(&o.listener, &o.port, loopback ? l->host : NULL, l->port));
    return ari_store_create(&p->store, &o);
}

ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o)
{
    ari_launch l;
    tcp_process *t = NULL;
    AR_TRY(ari_launch_read(&l));
    AR_TRY(ari_alloc_zero((void **)&t, 1, sizeof *t, "a process"));
    t->base = (ar_process){.ops = &tcp_ops, .rank = l.rank, .size = l.size, .local_rank = l.local_rank, .options = *o};
    const ar_status st = l.size == 1 ? AR_OK : join(&t->base, &l);
    if (st != AR_OK) {
        tcp_destroy(&t->base);
        return st;
    }
    *gives = &t->base;
    return AR_OK;
}
