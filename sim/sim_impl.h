/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_SIM_IMPL_H
#define ARI_SIM_SIM_IMPL_H

#include "anyrank/sim.h"
#include "ref/core/rendezvous.h"

/* One rank's place in one group of the simulated cluster. */
typedef struct ari_sim_comm {
    ar_comm base; /* first: an ar_comm * is one of these */
    ari_member member;
    const ar_sim_options *options; /* of the world; borrowed */
    bool of_world;                 /* made by ar_sim_run, which also ends it */
    void *scratch;                 /* partial sums of a ring; grows */
    size_t scratch_bytes;
    /* Filled for each member by the one that does the split. NULL: no group for this one. */
    ari_group *split_group;
    int split_index;
} ari_sim_comm;

/** The communicator of member `index` of g. Gives. Errors: AR_ERR_MEMORY; then the member counts as dropped. */
AR_NODISCARD ar_status ari_sim_comm_create(ari_sim_comm **gives, ari_group *g, int index,
                                           const ar_sim_options *options);
void ari_sim_comm_free(ari_sim_comm *c);

/* Data movement. Calls are agreed upon; member r does its part and returns without waiting for others to finish. */

/** direct: r reads what it needs from every member, and for all_reduce writes its slice to every member. Waits for
 *  nobody. */
void ari_direct_part(ari_sim_comm *c, const ari_call *call);
/** Bytes of partial sums that a ring needs for this call. */
size_t ari_ring_scratch(const ari_sim_comm *c, const ari_call *call);
/** ring: r reads its left neighbour (r - 1 mod N), step by step. */
void ari_ring_part(ari_sim_comm *c, const ari_call *call);

/** Virtual time: what a collective takes on the cluster (`user`: an ar_sim_cluster), for ari_instruments. */
void ari_virtual_cost(void *user, ari_group *g);
/** Errors: AR_ERR_ARG, a latency, a rate or a number of ranks that makes no sense. */
AR_NODISCARD ar_status ari_virtual_check(const ar_sim_cluster *c);

#endif
