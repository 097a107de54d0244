/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_BOOTSTRAP_H
#define ARI_PROCESS_BOOTSTRAP_H

#include "process/control.h"

/* What a launcher says of a process by its environment: torchrun's variables, or Slurm's. */
typedef struct ari_launch {
    int rank, size, local_rank;
    char host[256]; /* of process 0 */
    int port;       /* where process 0 listens */
    uint64_t key;   /* of the job */
} ari_launch;

/** Errors: AR_ERR_ARG, naming the variable that is missing or makes no sense. */
AR_NODISCARD ar_status ari_launch_read(ari_launch *l);

/* How the processes of a job connect: process 0 listens; each of the others connects, and sends who it is. Process 0
 * answers when all have connected. Any other program that connects to the port is refused, with the reason if it uses
 * the same protocol, and keeps no process waiting. */
typedef struct ari_bootstrap {
    int rank, size;
    uint64_t key; /* of the job */
    uint64_t timeout_ns;
} ari_bootstrap;

/** Process 0. Gives its control; data [size], or NULL: a second connection to each of the others, -1 to itself. On
 *  failure all that connected are told, and nothing is open. Errors: AR_ERR_TIMEOUT, naming who is missing; AR_ERR_ARG,
 *  two processes with one rank, or another number of processes; AR_ERR_ABORTED, one that connected has gone;
 *  AR_ERR_IO. */
AR_NODISCARD ar_status ari_bootstrap_accept(const ari_bootstrap *b, int listener, int *data, ari_control **gives);
/** The others. Gives the control; data, or NULL: a second connection to process 0. Errors: AR_ERR_ARG (refused, and
 *  why), AR_ERR_TIMEOUT, AR_ERR_IO. */
AR_NODISCARD ar_status ari_bootstrap_connect(const ari_bootstrap *b, const char *host, int port, int *data,
                                             ari_control **gives);

#endif
