/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "process/launch.h"
#include "process/net.h"
#include "process/process.h"
#include "ref/core/size.h"

/* Processes without MPI: the launcher's variables say where process 0 listens. */

static void tcp_abort(ar_process *p, ar_status st, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", p->rank, why);
    ari_store_fail(p->store, st, text);
}

static void tcp_destroy(ar_process *p)
{
    ari_store_destroy(p->store);
    free(p);
}

static const ari_process_ops tcp_ops = {.abort = tcp_abort, .destroy = tcp_destroy};

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
    if (l->size == 1)
        return ari_store_create(&p->store, &o);
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
    ar_process *p = NULL;
    AR_TRY(ari_launch_read(&l));
    AR_TRY(ari_alloc_zero((void **)&p, 1, sizeof *p, "a process"));
    *p = (ar_process){.ops = &tcp_ops, .rank = l.rank, .size = l.size, .local_rank = l.local_rank, .options = *o};
    const ar_status st = join(p, &l);
    if (st == AR_OK)
        *gives = p;
    else
        tcp_destroy(p);
    return st;
}
