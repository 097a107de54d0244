/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Runs ranks as processes. Data that threads would share in memory is sent to process 0. */

/** Runs fn(world, d, arg) as this process's rank. d: a device as `which` says; with NCCL on the GPU of this process's
 *  local number. An error of fn reaches every other process. threads: as in ar_device_create. Errors: those of fn;
 *  AR_ERR_UNSUPPORTED (NCCL without CUDA ranks, MPI with them), AR_ERR_ARG (no GPU for this process), those of device
 *  and communicator. */
AR_NODISCARD ar_status ari_process_run(ar_process *p, const ar_device_choice *which, int threads,
                                       ar_status (*fn)(ar_comm *world, ar_device *d, void *arg), void *arg);

/** Runs fn on all ranks, each a thread of this process, connected by NCCL on GPU r for rank r (or each on the emulated
 *  device). threads: of each rank. Errors: those of the first rank with an error of its own. */
AR_NODISCARD ar_status ari_process_run_threads(int ranks, const ar_process_options *o, const ar_device_choice *which,
                                               int threads, ar_status (*fn)(ar_comm *world, ar_device *d, void *arg),
                                               void *arg);

/** Ends the run of all processes with this rank's error. Call it before destroying communicators, which would wait for
 *  other ranks. Returns the first error of any rank, in equal words on all processes, with the table of ranks. */
ar_status ari_process_fail(ar_comm *world, ar_status local_status);
/** Ends all processes when one cannot continue in the middle of a host collective. Returns st with its message. */
ar_status ari_process_give_up(ar_process *p, ar_status st);
/** Agrees on a status among processes: AR_OK if all passed it, otherwise status and message of the lowest process that
 *  did not. */
AR_NODISCARD ar_status ari_process_agree(ar_process *p, ar_status local_status);

/* A growing byte buffer for gathering, with a read position. */
typedef struct ari_bytes {
    unsigned char *data;
    size_t count, capacity;
} ari_bytes;
AR_NODISCARD ar_status ari_bytes_put(ari_bytes *b, const void *src, size_t n);
void ari_bytes_fini(ari_bytes *b);
/** Removes n bytes from the front. Errors: AR_ERR_INTERNAL (too few bytes: the processes run different programs). */
AR_NODISCARD ar_status ari_bytes_take(ari_bytes *b, void *dst, size_t n);

/** Sends every process's bytes to process 0, which calls consumer(user, rank, bytes) once per process in order of
 *  ranks; the consumer may take the bytes. Then all processes agree on the status of those calls. */
AR_NODISCARD ar_status ari_process_collect(ar_process *p, const ari_bytes *local_bytes,
                                           ar_status (*consumer)(void *user, int rank, ari_bytes *b), void *user);
