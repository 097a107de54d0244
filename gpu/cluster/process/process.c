/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cluster/process/process.h"

#include <stdio.h>
#include <stdlib.h>

#include "gpu/cluster/process/process_private.h"
#include "ref/comm/comm_impl.h"
#include "ref/core/clock.h"
#include "ref/core/names.h"
#include "ref/core/size.h"
#include "ref/core/text.h"

/* All others wait for process 0 alone, which waits for them: it is to find out first who keeps it waiting. */
#define PATIENCE_NS UINT64_C(250000000)

ar_status ar_transport_parse(ar_transport *t, const char *text)
{
    const size_t found = ari_word_of(text, ari_transport_names, AR_TRANSPORTS);
    if (found == AR_TRANSPORTS)
        return ar_error_set(AR_ERR_ARG, "transport '%.40s': sim, mpi or nccl", text);
    *t = (ar_transport)found;
    return AR_OK;
}

void ar_process_destroy(ar_process *p)
{
    if (p)
        p->ops->destroy(p);
}

ar_transport ari_process_transport(const ar_process *p)
{
    return p ? p->options.transport : AR_TRANSPORT_SIM;
}

int ar_process_rank(const ar_process *p)
{
    return p->rank;
}

int ari_process_size(const ar_process *p)
{
    return p->size;
}

int ari_process_local_rank(const ar_process *p)
{
    return p->local_rank;
}

ar_status ar_process_comm(ar_comm **gives, ar_process *p, ar_device *d)
{
    *gives = NULL;
    return p->comm(gives, p, d);
}

void ari_process_abort(ar_process *p, ar_status st, const char *why)
{
    p->ops->abort(p, st, why);
}

static void abort_by_store(ar_process *p, ar_status st, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "rank %d aborted: %s", p->rank, why);
    ari_store_fail(p->store, st, text);
}

static void destroy_with_store(ar_process *p)
{
    ari_store_destroy(p->store);
    free(p);
}

const ari_process_ops ari_process_store_ops = {.abort = abort_by_store, .destroy = destroy_with_store};

/* --- what is moved for the host: values of the store -------------------------------------------------------------- */

static ar_status get(ar_process *p, uint64_t group, const int *rank, int n, const void *bytes, size_t size,
                     ari_gather_result *gives)
{
    char who[128];
    const uint64_t ns = ari_deadline_ns(p->options.timeout_ns, p->rank == 0 ? 0 : PATIENCE_NS);
    snprintf(who, sizeof who, "rank %d waited %.3f s in a %s of the processes", p->rank, (double)ns * 1e-9,
             n == 1 ? "broadcast" : "gather");
    return ari_store_get(p->store, group, p->calls, rank, n, bytes, size, ns, who, gives);
}

/* Gives the ranks from `first` on. */
static ar_status ranks_from(int **gives, const ar_process *p, int first)
{
    AR_TRY(ARI_ALLOC(gives, (size_t)p->size, "ranks"));
    for (int i = 0; i < p->size - first; i++)
        (*gives)[i] = first + i;
    return AR_OK;
}

ar_status ari_process_broadcast(ar_process *p, void *bytes, size_t n)
{
    ARI_OWNED int *rank = NULL;
    ari_gather_result all;
    p->calls++;
    if (p->size == 1)
        return AR_OK;
    AR_TRY(ranks_from(&rank, p, 1));
    if (p->rank == 0)
        return ari_store_set(p->store, ARI_STORE_BROADCAST, p->calls, rank, p->size - 1, bytes, n);
    AR_TRY(get(p, ARI_STORE_BROADCAST, &(int){0}, 1, NULL, 0, &all));
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

ar_status ari_process_gather(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    ARI_OWNED int *rank = NULL;
    ari_gather_result all;
    *gives = NULL;
    p->calls++;
    if (p->rank != 0)
        return ari_store_set(p->store, ARI_STORE_GATHER, p->calls, &(int){0}, 1, bytes, n);
    AR_TRY(ranks_from(&rank, p, 0));
    AR_TRY(get(p, ARI_STORE_GATHER, rank, p->size, bytes, n, &all));
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
