/* SPDX-License-Identifier: Apache-2.0 */
#include "process/process.h"

#include <string.h>

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
