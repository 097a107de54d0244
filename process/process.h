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

/* The ways there are; AR_ERR_UNSUPPORTED in a build without. */
AR_NODISCARD ar_status ari_process_mpi_create(ar_process **gives, const ar_process_options *o);
AR_NODISCARD ar_status ari_process_tcp_create(ar_process **gives, const ar_process_options *o);
/** Whether an MPI launcher started this process, and this build can answer it. */
bool ari_process_mpi_launched(void);
/** Their libraries: see ar_transport_describe. */
bool ari_mpi_describe(char *text, size_t size);
bool ari_nccl_describe(char *text, size_t size);
/** Slot comm of NCCL: over any way to reach each other. */
AR_NODISCARD ar_status ari_nccl_comm_create(ar_comm **gives, ar_process *p, ar_device *d);

#endif
