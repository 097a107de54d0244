/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_PROCESS_PROCESS_H
#define ARI_PROCESS_PROCESS_H

#include "process/store.h"

/* How processes find and reach each other: by MPI, or by sockets. NCCL needs either to make its communicator. */
typedef struct ari_process_ops {
    const char *name; /* "mpi", "tcp" */
    ar_status (*broadcast)(ar_process *p, void *bytes, size_t n);
    ar_status (*gather)(ar_process *p, void **gives, size_t *sizes, const void *bytes, size_t n);
    void (*abort)(ar_process *p, ar_status st, const char *why);
    void (*destroy)(ar_process *p);
} ari_process_ops;

/* Every process begins with this. */
struct ar_process {
    const ari_process_ops *ops;
    int rank, size, local_rank;
    ar_process_options options; /* timeout_ns filled */
    ari_store *store;           /* NULL: sockets do not connect it, or there is no other process */
    /* The communicator of its transport. */
    ar_status (*comm)(ar_comm **gives, ar_process *p, ar_device *d);
};

/** Processes that are connected by sockets. */
AR_NODISCARD ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o);

#endif
