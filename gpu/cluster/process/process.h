/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "gpu/cluster/process/store.h"

/* Ways for processes to find each other: by MPI, or by a launcher's variables and a file. Then all of them have a store. */
typedef struct ari_process_ops {
    void (*abort)(ar_process *p, ar_status st, const char *why);
    void (*destroy)(ar_process *p);
} ari_process_ops;

/* Every process begins with this. */
struct ar_process {
    const ari_process_ops *ops;
    int rank, size, local_rank;
    ar_process_options options; /* timeout_ns filled */
    ari_store *store;
    uint64_t calls; /* broadcasts and gathers: their values' names */
    /* The communicator of its transport. */
    ar_status (*comm)(ar_comm **gives, ar_process *p, ar_device *d);
};

/* Of a process whose store is all that it has. */
extern const ari_process_ops ari_process_store_ops;

/** Processes that a launcher's variables number and the file ANYRANK_NCCL_ID_FILE connects. */
AR_NODISCARD ar_status ari_process_file_create(ar_process **gives, const ar_process_options *o);

/* Ranks that are threads of this process, each with an ar_process of its own. */
typedef struct ari_thread_ranks ari_thread_ranks;
/** The caller releases *out with ari_thread_ranks_destroy. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_thread_ranks_create(ari_thread_ranks **out, int size);
/** After all of its processes. */
void ari_thread_ranks_destroy(ari_thread_ranks *t);
/** Tells the other ranks that this one will never come, or come back, and why. */
void ari_thread_rank_ended(ari_thread_ranks *t, int rank, const char *why);
/** ari_process_thread_create, without `comm`. */
AR_NODISCARD ar_status ari_process_thread_begin(ar_process **out, ari_thread_ranks *t, int rank,
                                                const ar_process_options *o);
