/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "process/process.h"

#define LONGEST_WAIT_NS UINT64_C(60000000000)

static const char *const names[AR_TRANSPORTS] = {"sim", "mpi", "nccl"};

const char *ar_transport_name(ar_transport t)
{
    return (unsigned)t < AR_TRANSPORTS ? names[t] : "?";
}

ar_status ar_transport_parse(ar_transport *t, const char *text)
{
    for (int i = 0; i < AR_TRANSPORTS; i++) {
        if (strcmp(text, names[i]) == 0) {
            *t = (ar_transport)i;
            return AR_OK;
        }
    }
    return ar_error_set(AR_ERR_ARG, "transport '%.40s': sim, mpi or nccl", text);
}

bool ar_transport_describe(ar_transport t, char *text, size_t size)
{
    switch (t) {
    case AR_TRANSPORT_MPI:
        return ari_mpi_describe(text, size);
    case AR_TRANSPORT_NCCL:
        return ari_nccl_describe(text, size);
    case AR_TRANSPORT_SIM:
    case AR_TRANSPORTS:
        break;
    }
    snprintf(text, size, "needs no library");
    return true;
}

ar_status ar_process_create(ar_process **gives, const ar_process_options *o)
{
    if (!gives || !o || (o->transport != AR_TRANSPORT_MPI && o->transport != AR_TRANSPORT_NCCL))
        return ar_error_set(AR_ERR_ARG, "ar_process_create: processes need the transport mpi or nccl");
    *gives = NULL;
    ar_process_options options = *o;
    options.timeout_ns = o->timeout_ns ? o->timeout_ns : LONGEST_WAIT_NS;
    const bool by_mpi = o->transport == AR_TRANSPORT_MPI || ari_process_mpi_launched();
    AR_TRY(by_mpi ? ari_process_mpi_create(gives, &options) : ari_process_tcp_create(gives, &options));
    if (o->transport == AR_TRANSPORT_NCCL)
        (*gives)->comm = ari_nccl_comm_create;
    return AR_OK;
}

void ar_process_destroy(ar_process *p)
{
    if (p)
        p->ops->destroy(p);
}

ar_transport ar_process_transport(const ar_process *p)
{
    return p ? p->options.transport : AR_TRANSPORT_SIM;
}

int ar_process_rank(const ar_process *p)
{
    return p->rank;
}

int ar_process_size(const ar_process *p)
{
    return p->size;
}

int ar_process_local_rank(const ar_process *p)
{
    return p->local_rank;
}

ar_status ar_process_comm(ar_comm **gives, ar_process *p, ar_device *d)
{
    *gives = NULL;
    return p->comm(gives, p, d);
}

ar_status ar_process_broadcast(ar_process *p, void *bytes, size_t n)
{
    return p->ops->broadcast(p, bytes, n);
}

ar_status ar_process_gather(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n)
{
    *gives = NULL;
    return p->ops->gather(p, gives, sizes, bytes, n);
}

void ar_process_abort(ar_process *p, ar_status st, const char *why)
{
    p->ops->abort(p, st, why);
}
