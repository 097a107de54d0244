/* SPDX-License-Identifier: Apache-2.0 */
/* The choice among transports: what this build and the launcher have. */
#include <stdio.h>

#include "gpu/cluster/mpi/process.h"
#include "gpu/cluster/nccl/process.h"
#include "gpu/cluster/process/process.h"
#include "gpu/cluster/process/transport/process_private.h"

#define LONGEST_WAIT_NS UINT64_C(60000000000)

bool ari_transport_describe(ar_transport t, char *text, size_t size)
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

ar_status ari_process_thread_create(ar_process **out, ari_thread_ranks *t, int rank, const ar_process_options *o)
{
    AR_TRY(ari_process_thread_begin(out, t, rank, o));
    (*out)->comm = ari_nccl_comm_create;
    return AR_OK;
}

ar_status ar_process_create(ar_process **gives, const ar_process_options *o)
{
    if (!gives || !o || (o->transport != AR_TRANSPORT_MPI && o->transport != AR_TRANSPORT_NCCL))
        return ar_error_set(AR_ERR_ARG, "ar_process_create: processes need the transport mpi or nccl");
    *gives = NULL;
    ar_process_options options = *o;
    options.timeout_ns = o->timeout_ns ? o->timeout_ns : LONGEST_WAIT_NS;
    const bool by_mpi = o->transport == AR_TRANSPORT_MPI || ari_process_mpi_launched();
    AR_TRY(by_mpi ? ari_process_mpi_create(gives, &options) : ari_process_file_create(gives, &options));
    if (o->transport == AR_TRANSPORT_NCCL)
        (*gives)->comm = ari_nccl_comm_create;
    return AR_OK;
}
