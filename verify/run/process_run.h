/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/process.h"

/* Ranks as processes: what threads of one process would find in each other's memory goes to process 0. */

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
/** For a process that cannot continue in the middle of a collective of the host: ends all of them. Returns st, with its
 *  message. */
ar_status ari_process_give_up(ar_process *p, ar_status st);
/** Agrees on a status among processes: AR_OK if all passed it, otherwise status and message of the lowest process that
 *  did not. */
AR_NODISCARD ar_status ari_process_agree(ar_process *p, ar_status local_status);

/* Bytes that grow, to be gathered, and a reader of them. */
typedef struct ari_bytes {
    unsigned char *data;
    size_t count, capacity;
} ari_bytes;
AR_NODISCARD ar_status ari_bytes_put(ari_bytes *b, const void *src, size_t n);
void ari_bytes_fini(ari_bytes *b);
/** Takes n bytes from the front. Errors: AR_ERR_INTERNAL (there are fewer: processes run different programs). */
AR_NODISCARD ar_status ari_bytes_take(ari_bytes *b, void *dst, size_t n);

/** Hands process 0 every process's bytes, one call of take(user, rank, bytes) for each in order of ranks, which may
 *  use them up; then all processes agree on what those calls gave. */
AR_NODISCARD ar_status ari_process_collect(ar_process *p, const ari_bytes *local_bytes,
                                           ar_status (*consumer)(void *user, int rank, ari_bytes *b), void *user);
