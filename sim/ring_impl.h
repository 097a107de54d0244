/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_RING_IMPL_H
#define ARI_SIM_RING_IMPL_H

#include "ref/core/reduce.h"
#include "sim/wire.h"

/* Shared by the files of the ring alone: ring.c (rounds), chain.c (what goes from or to a root). */

enum { ARI_CHAIN_SEGMENT_BYTES = 1 << 18 }; /* of what travels along a chain */

typedef struct ari_ring {
    ari_sim_comm *c;
    ari_wire *wire;
    const ari_call *call, *left_call;
    int n, r, left, right;
    size_t element;
    ari_reduce kernel; /* of reductions */
    bool past_cache;   /* the outputs are too large for it */
} ari_ring;

/** to = `bytes` that lie at `from` in the left neighbour's memory, combined with own input; complete: nothing is left
 *  to add. False: broken off. */
AR_NODISCARD bool ari_ring_add(const ari_ring *g, void *to, const void *from, const void *own, size_t bytes,
                               bool complete);
/** One step is over, whose bytes moved since then: it is published and recorded. sent -1: nothing. */
void ari_ring_step(const ari_ring *g, ari_moment since, uint64_t steps_done, ar_ring_step step);

void ari_chain_broadcast(const ari_ring *g);
void ari_chain_reduce(const ari_ring *g);
/** Bytes of partial sums that a rank needs for this call. */
size_t ari_chain_scratch(const ari_sim_comm *c, const ari_call *call);

#endif
