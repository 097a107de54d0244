/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_PROCESS_H
#define ANYRANK_PROCESS_H

#include "anyrank/comm.h"
#include "anyrank/device.h"

AR_BEGIN_DECLS

/* Ranks as processes, one rank each, on one or many machines, started by a launcher (mpirun, srun, torchrun). Tensors
 * travel through the communicator of ar_process_comm; the ar_process itself exchanges small host data such as results
 * and reports. All processes must run the same build. Only one thread may use an ar_process. */
typedef struct ar_process ar_process;

/* How ranks communicate. */
typedef enum ar_transport {
    AR_TRANSPORT_SIM,  /* simulated: all ranks are threads of one process (anyrank/sim.h) */
    AR_TRANSPORT_MPI,  /* MPI between host memories */
    AR_TRANSPORT_NCCL, /* NCCL between GPUs, one GPU per process */
    AR_TRANSPORTS
} ar_transport;
/** Parses a transport's name: "sim", "mpi" or "nccl". Errors: AR_ERR_ARG (another name). */
AR_NODISCARD ar_status ar_transport_parse(ar_transport *t, const char *text);

/** Options of ar_process_create. */
typedef struct ar_process_options {
    ar_transport transport; /* MPI or NCCL */
    uint64_t timeout_ns;    /* longest wait for another process; 0: 60 s */
    bool share_gpus;        /* NCCL: allows several processes on one GPU, which is an error otherwise */
    bool check_calls;       /* NCCL: ranks compare the arguments of each collective before it runs, as with MPI always;
                               slower. Without it mismatched collectives end in AR_ERR_TIMEOUT */
} ar_process_options;

/** Connects this process to the other processes of the launcher; collective over all of them. The caller releases *out
 *  with ar_process_destroy. MPI: calls MPI_Init. NCCL: gets rank and size from MPI if mpirun or srun with PMI started
 *  the process and this build has MPI; else from the environment variables RANK, WORLD_SIZE, LOCAL_RANK (torchrun) or
 *  SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID (Slurm), and ANYRANK_NCCL_ID_FILE, the path of a shared file through which
 *  process 0 sends NCCL's id to the others (clusters.md). The NCCL library is loaded at run time, by the name in
 *  ANYRANK_NCCL if set. Errors: AR_ERR_UNSUPPORTED (the build lacks the transport), AR_ERR_ARG (an environment variable
 *  is missing or invalid; the message names it), AR_ERR_TIMEOUT, AR_ERR_IO (the shared file). */
AR_NODISCARD ar_status ar_process_create(ar_process **out, const ar_process_options *options);
/** Disconnects and frees; collective over all processes. After a failure it waits two seconds for the other processes
 *  to call it too, so that each can report its error; if one does not, MPI_Abort ends all of them with exit status 1,
 *  so report errors before the call. Accepts NULL. */
void ar_process_destroy(ar_process *process);

/** Returns this process's rank, from 0, among all processes. */
int ar_process_rank(const ar_process *process);

/** Creates the communicator over all processes for buffers of `device`; collective over all processes. MPI accepts any
 *  device (device memory that the host cannot access is copied through host memory), NCCL a CUDA device. Destroy *out
 *  before `process`. Errors: AR_ERR_ARG (a device that the transport does not support; two processes on one GPU without
 *  share_gpus), those of the transport. */
AR_NODISCARD ar_status ar_process_comm(ar_comm **out, ar_process *process, ar_device *device);

AR_END_DECLS
#endif
