/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_FAULT_IMPL_H
#define ARI_SIM_FAULT_IMPL_H

#include "sim/wire.h"

/* A transfer that is kept, because it is to arrive a second time. */
typedef struct ari_kept_transfer {
    bool on;
    uint64_t number, checksum;
    void *bytes; /* [length]; capacity bytes of memory */
    size_t length, capacity;
} ari_kept_transfer;

/* What a communicator needs where faults may strike or transfers are verified. Used as its member is: by one thread at
 * a time. */
typedef struct ari_fault_watch {
    uint64_t number; /* of the collective that it is in or about to enter, over all of the rank's communicators */
    ari_kept_transfer kept;
    _Alignas(64) char place[ARI_WIRE_PLACES][ARI_WIRE_PIECE_BYTES]; /* where reads arrive */
} ari_fault_watch;

/** The communicator's watch, where the options ask for faults or verification; of a communicator that knows its
 * options. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_fault_watch_create(ari_sim_comm *c);
/** Accepts NULL. */
void ari_fault_watch_free(ari_fault_watch *w);
/** Errors: AR_ERR_ARG, a fault that makes no sense. */
AR_NODISCARD ar_status ari_fault_check(const ar_sim_fault *faults, size_t count, int ranks);

/** Before the communicator's member enters a collective: counts it, and does what strikes the rank before it. After a
 *  fault that ends the world, entering is an error. */
void ari_fault_before(ari_sim_comm *c, const ari_call *call);
/** The next fault of this kind that strikes the communicator's rank in this collective before (or in) this transfer,
 *  after `after` (NULL: the first); NULL: none. */
const ar_sim_fault *ari_fault_next(const ari_sim_comm *c, ar_sim_fault_kind kind, uint64_t transfer,
                                   const ar_sim_fault *after);
/** The rank dies, or stands still until the world has failed; `where`: "before", "in the middle of". Afterwards the
 *  world has failed. */
void ari_fault_kill(ari_sim_comm *c, const ari_call *call, const char *where);
void ari_fault_stall(ari_sim_comm *c, const ari_call *call, const char *where);

#endif
