/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PROCESS_H
#define ANYRANK_PROCESS_H

#include "anyrank/comm.h"
#include "anyrank/device.h"

AR_BEGIN_DECLS

/* Ranks as processes, one each, on one machine or many: what a launcher (mpirun, srun, torchrun) has started. The
 * communicator over all of them moves tensors; the calls here move small things of the host, which are no part of what
 * is computed: results, reports. All processes run the same build. A process is used by one thread. */
typedef struct ar_process ar_process;

typedef enum ar_transport {
    AR_TRANSPORT_SIM,  /* no processes: ranks are threads of this one (anyrank/sim.h) */
    AR_TRANSPORT_MPI,  /* MPI, between the memories of the hosts */
    AR_TRANSPORT_NCCL, /* NCCL, between GPUs, one for each process */
    AR_TRANSPORTS
} ar_transport;
/** Errors: AR_ERR_ARG, naming what would be right. */
AR_NODISCARD ar_status ar_transport_parse(ar_transport *t, const char *text);

typedef struct ar_process_options {
    ar_transport transport; /* not AR_TRANSPORT_SIM */
    uint64_t timeout_ns;    /* longest wait for another process; 0: 60 s */
    bool share_gpus;        /* NCCL: several processes on one GPU are meant, not a mistake */
    bool check_calls;       /* NCCL: processes compare each collective before its data move, as MPI always does; slower.
                               Without it a mismatch shows when the timeout is over */
} ar_process_options;

/** This process's place among those that the launcher started. MPI: by MPI_Init. NCCL: by MPI if mpirun or srun with PMI
 *  started it and this build has MPI, else from the environment: of torchrun RANK, WORLD_SIZE, LOCAL_RANK, of Slurm
 *  SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, and ANYRANK_NCCL_ID_FILE, the path of a file that all processes see, by
 *  which process 0 gives NCCL's id to the others (clusters.md). NCCL itself is loaded, or what ANYRANK_NCCL names.
 *  Collective over all processes. Gives; ar_process_destroy. Errors: AR_ERR_UNSUPPORTED (a build without it, and how to
 *  get it), AR_ERR_ARG (the environment says nothing, or what makes no sense: which variable), AR_ERR_TIMEOUT, AR_ERR_IO
 *  (the file). */
AR_NODISCARD ar_status ar_process_create(ar_process **out, const ar_process_options *o);
/** Collective. After a failure it waits two seconds for the others to have come here too, so that each can tell its
 *  user; where one has not, MPI_Abort ends them all with exit status 1. So print first. Accepts NULL. */
void ar_process_destroy(ar_process *p);

/** NULL: AR_TRANSPORT_SIM. */
int ar_process_rank(const ar_process *p);

/** The communicator over all processes, for buffers of `d`: MPI takes any device, and goes through copies on the host
 *  where the host does not reach its memory; NCCL takes the CUDA device; it is to exist before. Collective. Gives;
 * ari_comm_destroy, before the process. Errors: AR_ERR_ARG (a device that the transport does not serve; two processes on
 * one GPU, unless share_gpus), what the transport gives. */
AR_NODISCARD ar_status ar_process_comm(ar_comm **out, ar_process *p, ar_device *d);

/* Collectives of the host, in order, on all processes; not while a collective of the communicator is enqueued. Errors:
 * AR_ERR_TIMEOUT, AR_ERR_ABORTED with what another process said, AR_ERR_IO. */

AR_END_DECLS
#endif
