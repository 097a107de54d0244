/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <mpi.h>
#include <pthread.h>
#include <stdatomic.h>

#include "gpu/cluster/mpi/process.h"
#include "gpu/cluster/process/agree.h"
#include "gpu/cluster/process/flight.h"

/* Ranks as MPI processes. Shared only by the files of this folder: process.c (what the launcher started), wire.c (MPI
 * calls and waiting), link.c (the store's messages), rendezvous.c (comparison of the calls in a group), comm.c, parts.c
 * and direct.c (data movement). The store (process/store.h) ends all processes after a failure.
 *
 * - Every MPI call returns at once, and waiting is polling, so that a failure anywhere, a timeout or an abort ends
 *   every wait, and communicators do not wait for each other.
 * - All data use one MPI communicator, and the store's messages another. An ar_comm is a context: a number that its
 *   first member chooses once, with some tags. Creating and destroying an ar_comm therefore needs no collective MPI
 *   call, which might not return. */

typedef struct ari_mpi {
    ar_process base; /* first */
    MPI_Comm data, control;
    bool owns_mpi;             /* MPI was initialised here, and ends here */
    bool one_at_a_time;        /* true if the MPI library supports calls of only one thread at a time */
    pthread_mutex_t turn;      /* lock for these calls */
    int last_context;          /* largest context for which this MPI has tags */
    _Atomic uint64_t contexts; /* number of contexts chosen by this process */
    uint64_t comms;            /* number of communicators made by ar_process_comm */
    pthread_mutex_t lock;      /* guards the facts of this process that reports print */
    ari_flight flight;
    atomic_bool abandoned; /* true if requests are left that no peer will answer */
    /* Held for each call of MPI; held for writing to close. Requests left behind read and write memory that is about to
     * be freed, in whichever MPI call a late answer arrives, so no further calls are made after closing. */
    pthread_rwlock_t calls;
    bool closed;
} ari_mpi;

/* Uses of a context's tags. Messages of a pair keep their order within each. */
typedef enum ari_mpi_use {
    ARI_MPI_ALL,  /* collectives */
    ARI_MPI_UP,   /* from a rank to a higher one, with the calls of both */
    ARI_MPI_DOWN, /* to a lower rank, or to the rank itself */
    ARI_MPI_USES
} ari_mpi_use;

/** Returns AR_OK, or the error that ended the world as this rank gets it. */
ar_status ari_mpi_status(ari_mpi *p);
/** Ends the world: the ranks of `group` get `st` (NULL: this rank), all others AR_ERR_ABORTED. */
void ari_mpi_fail(ari_mpi *p, const ari_flight_group *group, ar_status st, const char *line);

/* --- rendezvous.c ------------------------------------------------------------------------------------------------- */

/* Pending requests of one call. Grows. */
typedef struct ari_mpi_requests {
    MPI_Request *request;
    int *member; /* members of the group that request i needs */
    int *index;  /* room for MPI */
    size_t n, room[3];
} ari_mpi_requests;

/* Members of a group that make equal calls, one collective after the other: those of a communicator, or sender and
 * receiver of a message. */
typedef struct ari_mpi_rendezvous {
    ari_mpi *p;
    ari_flight_group *group;
    int index, tag;     /* index: of this process */
    atomic_int is_busy; /* 1 during a call, to detect use by two threads */
    ari_flight_call open;
    const ari_call *call; /* call that the member is in; `where` is "in" or "in the middle of", for reports */
    const char *phase;
    ari_calls calls;                  /* calls of all members */
    char *first_messages;             /* the members' first messages, and */
    char *long_messages;              /* messages longer than the first ones, of the last call that had any */
    size_t *first_bytes, *long_bytes; /* [n] */
    ari_mpi_requests requests;
} ari_mpi_rendezvous;

/** Initialises a rendezvous. id is equal on all members. rank: [n], in the world. */
AR_NODISCARD ar_status ari_mpi_rendezvous_init(ari_mpi_rendezvous *m, ari_mpi *p, uint64_t id, const int *rank, int n,
                                               int index, int tag);
/** Accepts zeros. */
void ari_mpi_rendezvous_fini(ari_mpi_rendezvous *m);
/** Waits until all members have arrived with the same call. Errors: AR_ERR_MISMATCH, AR_ERR_TIMEOUT, AR_ERR_ABORTED;
 *  this member has then left. */
AR_NODISCARD ar_status ari_mpi_meet(ari_mpi_rendezvous *m, const ari_call *call);
/** Ends this member's part in a call, whether or not its data has moved. Returns st, or the error that ended the
 *  world. */
ar_status ari_mpi_part(ari_mpi_rendezvous *m, ar_status st);

/* --- wire.c ------------------------------------------------------------------------------------------------------- */

/** Longest message: MPI's counts are int, and each arriving message shows progress. */
enum { ARI_MPI_PIECE_BYTES = 1 << 26 };
/** Maximum size of the first message with which a member sends its call, so that it is short with every MPI. */
enum { ARI_MPI_FIRST_BYTES = 512 };

/** Enters a call of MPI. Returns false if no more calls may be made; if true, call ari_mpi_leave after the MPI call. */
bool ari_mpi_enter(ari_mpi *p);
void ari_mpi_leave(ari_mpi *p);
/* Wrappers of MPI's functions. They return AR_ERR_IO with MPI's message if MPI fails. `bytes` fits an int. */
AR_NODISCARD ar_status ari_mpi_send(ari_mpi *p, const void *src, size_t bytes, int rank, int tag, MPI_Request *request);
AR_NODISCARD ar_status ari_mpi_receive(ari_mpi *p, void *dst, size_t bytes, int rank, int tag, MPI_Request *request);
/** Drops the requests of a failed call: receives are cancelled, and sends in progress get a moment to complete. If they
 *  do not, MPI is not called again. */
void ari_mpi_drop(ari_mpi *p, MPI_Request *requests, int n);
/** After a failure, receives short messages that nobody waits for any more, so that MPI ends properly. A long message
 *  waits in its sender's memory and stays there. */
void ari_mpi_take_away(ari_mpi *p);
ar_status ari_mpi_error(int rc, const char *label);

/** Ends the world in the middle of a call, with the error that has just been set. */
void ari_mpi_broken(const ari_mpi_rendezvous *m, ar_status st);
/** Waits for all requests of m. After an error the world has ended, and the requests are dropped. */
AR_NODISCARD ar_status ari_mpi_await(ari_mpi_rendezvous *m);

/* --- link.c ------------------------------------------------------------------------------------------------------- */

/** Creates the link that carries the store's messages over p->control. Release it with its destroy. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_mpi_link_create(ari_link **result, ari_mpi *p);

/* --- comm.c ------------------------------------------------------------------------------------------------------- */

typedef struct ari_mpi_channel ari_mpi_channel;

typedef struct ari_mpi_comm {
    ar_comm base; /* first */
    ari_mpi *p;
    int context;
    ari_mpi_rendezvous rendezvous;
    void *scratch; /* grows */
    size_t scratch_bytes;
    ar_p2p *op; /* [ops] messages of an exchange, with space for 2 per pair of ranks */
    size_t ops;
    pthread_mutex_t lock; /* guards the channels, which several queues of a rank may request concurrently */
    ari_mpi_channel *channels;
} ari_mpi_comm;

/** Slot comm of the process. */
AR_NODISCARD ar_status ari_mpi_comm_create(ar_comm **result, ar_process *p, ar_device *d);

/* --- what moves, once the call is agreed upon --------------------------------------------------------------------- */

/** Returns the bytes of scratch memory that a call needs. */
size_t ari_mpi_parts_scratch(const ari_mpi_comm *c, const ari_call *call);
/** all_reduce, reduce_scatter and broadcast. */
AR_NODISCARD ar_status ari_mpi_parts(ari_mpi_comm *c, const ari_call *call);
/** Moves the data of `call`, which may differ from m's current call, directly from source to target. moved: counters,
 *  or NULL. After an error the world has ended. */
AR_NODISCARD ar_status ari_mpi_direct(ari_mpi_rendezvous *m, const ari_call *call, ari_moved *moved);
