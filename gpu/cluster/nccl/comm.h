/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <pthread.h>
#include <stdatomic.h>

#include "gpu/cluster/nccl/nccl.h"
#include "gpu/cluster/nccl/process.h"
#include "gpu/cluster/process/flight.h"
#include "gpu/cluster/process/store.h"
#include "ref/comm/comm_impl.h"
#include "ref/core/queue_impl.h"

/* Declarations shared by the files of the NCCL communicator: world.c has calls in progress and their watcher, make.c
 * the creation of communicators, comm.c the calls, move.c the calls of NCCL. */

typedef struct ari_nccl_comm ari_nccl_comm;

/* A call whose data are, or may be, still moving. */
typedef struct ari_pending {
    ari_flight_call flight_call; /* must be the first field: an entry in the flight recorder's list of open calls */
    ari_nccl_comm *comm;
    ari_mark *mark; /* mark after which the call's stream has finished it; undefined before `enqueued` is set */
    bool enqueued;
} ari_pending;

/* All communicators of a process that are split from one; they fail together. */
typedef struct ari_nccl_world {
    atomic_int refs;
    int rank, size;
    uint64_t timeout_ns;
    bool checks_calls;
    ari_nccl nccl;
    ar_device *device;
    ari_store *store;
    ari_failure *failure;
    uint64_t errors_asked_ns; /* used only by the watcher */
    pthread_mutex_t lock;     /* taken after no lock of the store's but the watcher's */
    /* guarded by `lock` */
    ari_nccl_comm *comms;
    ari_flight flight;
    ari_pending *spare;
} ari_nccl_world;

struct ari_nccl_comm {
    ar_comm base;
    ari_nccl_world *world;
    struct ari_nccl_comm *next; /* next communicator of the world; guarded by the world's lock */
    pthread_mutex_t use;        /* held during every NCCL call that uses `comm`; the world's lock is taken before it */
    _Atomic(void *) comm; /* NCCL's communicator; NULL: a group of one, not created yet, or aborted. Set while `use`
                             is held */
    /* NCCL stores this communicator here, or one that is split from it. It may do so late, on a thread of its own,
     * which has ended once `comm` is destroyed or aborted. */
    void *created;
    bool let_go; /* set by the watcher; guarded by the world's lock */
    uint64_t id;
    uint64_t splits;
    ari_flight_group *group;
    ari_flight_group **message; /* [2n]: groups of sends and of receives; NULL: none yet */
    ar_buf word;                /* int32_t [size]; a barrier sums the first one */
    bool looked_at;             /* used by the watcher: true if this communicator's oldest call is not done */
};

/* --- world.c ------------------------------------------------------------------------------------------------------ */

AR_NODISCARD ar_status ari_nccl_world_create(ari_nccl_world **result, ar_process *p, ar_device *d);
void ari_nccl_world_release(ari_nccl_world *w);
/** Returns AR_OK, or the world's failure as this rank gets it. */
ar_status ari_nccl_world_status(ari_nccl_world *w);
/** Ends the world: this rank's next call returns `st`, and the other ranks get `why`. */
void ari_nccl_world_end(ari_nccl_world *w, ar_status st, const char *why);
/** Ends the world with `st` and the calling thread's message; returns the status for this rank. */
ar_status ari_nccl_world_fail(ari_nccl_world *w, ar_status st);
/** Begins a call, which the watcher observes from now on. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_nccl_world_enter(ari_nccl_world *w, ari_pending **result, ari_nccl_comm *c,
                                            ari_flight_group *g, const ari_call *call);
/** Marks the call as enqueued on s, or as complete if s is NULL. Errors: those of the stream. */
AR_NODISCARD ar_status ari_nccl_world_enqueued(ari_nccl_world *w, ari_pending *p, ari_stream *s);
/** Removes a call that ended with an error. */
void ari_nccl_world_drop(ari_nccl_world *w, ari_pending *p);
/** Removes all calls of a communicator. */
void ari_nccl_world_forget(ari_nccl_world *w, ari_nccl_comm *c);
/** Waits until a communicator's enqueued calls are done. Errors: the world's failure, the stream's error. */
AR_NODISCARD ar_status ari_nccl_world_drain(ari_nccl_world *w, const ari_nccl_comm *c);

/* --- comm.c ------------------------------------------------------------------------------------------------------- */

/** ari_comm_ops.run. */
AR_NODISCARD ar_status ari_nccl_run(ar_comm *c, const ari_call *call);
/** Checks the communicator; the caller holds `use`. Errors: the failure, after which NCCL's communicator has been
 *  aborted and removed. */
AR_NODISCARD ar_status ari_nccl_check_comm(ari_nccl_comm *c);
/** Passes the call to NCCL on the stream of call->on; returns when all of it has been enqueued. Errors: NCCL's, the
 *  world's failure. */
AR_NODISCARD ar_status ari_nccl_enqueue(ari_nccl_comm *c, const ari_call *call);
/** Waits until NCCL has finished on the host what was last requested of the communicator. The lock is not held
 *  meanwhile: if the world fails, the watcher aborts the communicator, which ends the wait. limit_ns 0: no limit.
 *  Errors: NCCL's, the failure, AR_ERR_TIMEOUT. */
AR_NODISCARD ar_status ari_nccl_settle(ari_nccl_comm *c, uint64_t limit_ns);
/** Ends a call with an error. Returns the error for this rank: the first failure, even if NCCL failed only because of
 *  the abort. */
ar_status ari_nccl_failed(ari_nccl_comm *c, ari_pending *p, ar_status st);

/* --- move.c ------------------------------------------------------------------------------------------------------- */

/** Enqueues what the call moves. `stream` is NCCL's, of call->on. */
AR_NODISCARD ar_status ari_nccl_move(ari_nccl_comm *c, void *comm, const ari_call *call, void *stream);
/** Returns the bytes that a ring would read from other ranks' memory for the call. */
size_t ari_nccl_moved(const ari_nccl_comm *c, const ari_call *call);
