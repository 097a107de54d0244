/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/sim.h"
#include "ref/comm/rendezvous.h"

typedef struct ari_channels ari_channels; /* the channels of one group, shared by its members */
struct ari_channel_end;

/* One rank's communicator for one group of the simulated cluster. */
typedef struct ari_sim_comm {
    ar_comm base; /* the base must be the first field, since an ar_comm * points to it */
    ari_member member;
    const ar_sim_options *options; /* the world's options; borrowed */
    bool of_world;                 /* true if ar_sim_run created the communicator and will end it */
    struct ari_fault_watch *watch; /* NULL: neither faults nor verification */
    bool swaps;                    /* AR_SIM_AUTO: short collectives of two ranks go by ari_member_swap */
    void *scratch;                 /* scratch memory for partial sums, which grows */
    size_t scratch_bytes;
    ari_channels *channels;               /* channels for sends and recvs within the group */
    struct ari_channel_end *channel_ends; /* this rank's ends of the channels; guarded by the channels' lock */
    struct ari_sim_comm *counted_by;      /* for a channel's end: the communicator that counts its bytes */
    /* communicators of the new groups, filled for each member by the member that performs the split. NULL: the member
     * is in no group */
    ari_group *split_group;
    ari_channels *split_channels;
    int split_index;
} ari_sim_comm;

/** Creates the communicator of member `index` of g, which takes that member's place in the group's channels. The caller
 *  owns it. Errors: AR_ERR_MEMORY; then the member counts as removed, but still has to leave the channels. */
AR_NODISCARD ar_status ari_sim_comm_create(ari_sim_comm **out, ari_group *g, ari_channels *channels, int index,
                                           const ar_sim_options *options);
void ari_sim_comm_free(ari_sim_comm *c);
/** Initialises a communicator without channels, such as an end of a channel, in the caller's zeroed storage. Errors:
 *  AR_ERR_MEMORY; then the member has not been used. */
AR_NODISCARD ar_status ari_sim_comm_init(ari_sim_comm *c, const ari_comm_ops *ops, ari_group *g, int index,
                                         const ar_sim_options *options);
void ari_sim_comm_fini(ari_sim_comm *c);
/** Marks that member `index` will never arrive. */
void ari_sim_member_drop(ari_group *g, int index);
/** Reserves memory before a collective, because no member may fail once it is agreed upon. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_sim_reserve(ari_sim_comm *c, size_t bytes);

/* Algorithms. Each runs a whole call, from entering to leaving. */

/** The `direct` algorithm: each rank reads what it needs from every member, and for all_reduce writes its slice to
 *  every member. */
AR_NODISCARD ar_status ari_direct_run(ar_comm *c, const ari_call *call);
/** The `ring` algorithm: each rank r reads from its left neighbour (r - 1 mod N), step by step. Kinds that do not use a
 *  ring run `direct`. */
AR_NODISCARD ar_status ari_ring_run(ar_comm *c, const ari_call *call);
/** The `last` algorithm: the last rank to enter does the work of all. The kinds that do not use a ring run `direct`. */
AR_NODISCARD ar_status ari_last_run(ar_comm *c, const ari_call *call);
/** Runs an all_reduce over a plain wire with more ranks than cores: as `direct`, but each slice is done by whichever
 *  rank is running. */
AR_NODISCARD ar_status ari_share_run(ari_sim_comm *c, const ari_call *call);

/* The channels of a group: one for each pair (a, b) of ranks in which a sends to b. */

/** Creates the group's set of channels, initially empty. It ends when every member has left. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_channels_create(ari_channels **out, const ari_group *g);
/** Removes member `index`. Accepts NULL. */
void ari_channels_leave(ari_channels *s, int index);
/** A send or recv. */
AR_NODISCARD ar_status ari_channel_run(ar_comm *c, const ari_call *call);
/** Drops this rank's places in channels. */
void ari_channel_ends_free(ari_sim_comm *c);

/** Copies the next word of *text to word[0 .. room) ("" at the end), advances *text, and returns the word's length. A
 *  word of `room` or more bytes is not copied. */
size_t ari_next_word(char *word, size_t capacity, const char **text);

/** Adds the virtual time of a collective on the cluster (`user`: an ar_sim_cluster), for ari_instruments. */
void ari_virtual_cost(void *user, ari_group *g);
/** Checks a simulated cluster. Errors: AR_ERR_ARG (a meaningless latency, rate or number of ranks). */
AR_NODISCARD ar_status ari_virtual_check(const ar_sim_cluster *c);
