/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_LAUNCH_H
#define ARI_PROCESS_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

#include "anyrank/status.h"

/* What a launcher says of a process by its environment: torchrun's variables, or Slurm's. */
typedef struct ari_launch {
    int rank, size, local_rank;
    bool one_machine; /* all are on this one */
    char host[256];   /* of process 0 */
    int port;         /* where process 0 listens */
    uint64_t job;     /* a hash of its names */
} ari_launch;

/** Errors: AR_ERR_ARG, naming the variable that is missing or makes no sense. */
AR_NODISCARD ar_status ari_launch_read(ari_launch *l);

#endif
