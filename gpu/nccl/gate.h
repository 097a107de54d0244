/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_NCCL_GATE_H
#define ARI_NCCL_GATE_H

#include <stdint.h>

#include "anyrank/status.h"

/* How the processes of a job come together: process 0 listens, the others connect, each once for every channel, and
 * say who they are. Process 0 answers when all have come. Whoever else connects to the port is turned away, in words if
 * it speaks the same language, and keeps nobody waiting. */
enum { ARI_CHANNELS_MOST = 2, ARI_NAME_BYTES = 96 };

typedef struct ari_gate {
    int rank, size;
    int channels; /* connections of each process to process 0 */
    uint64_t key; /* of the job */
    uint64_t timeout_ns;
} ari_gate;

/** Process 0: fds[rank * channels + channel], and names[rank] ("process 123 on host a") of all others. On failure all
 *  that came are told, and nothing is open. Errors: AR_ERR_TIMEOUT, naming who has not come; AR_ERR_ARG, two processes
 *  with one rank, or another number of processes; AR_ERR_ABORTED, one that came has gone; AR_ERR_IO. */
AR_NODISCARD ar_status ari_gate_admit(const ari_gate *g, int listener, int *fds, char (*names)[ARI_NAME_BYTES]);
/** The others: fds[channel]. Errors: AR_ERR_ARG (refused, and why), AR_ERR_TIMEOUT, AR_ERR_IO. */
AR_NODISCARD ar_status ari_gate_visit(const ari_gate *g, const char *host, int port, int *fds);
/** "process 123 on host a", of this one. */
void ari_gate_name(char name[ARI_NAME_BYTES]);

#endif
