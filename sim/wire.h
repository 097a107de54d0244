/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_WIRE_H
#define ARI_SIM_WIRE_H

#include "sim/sim_impl.h"

/* Every byte of another rank's memory that a rank's thread reads or writes passes here: the one place where bytes are
 * counted, where a transport's faults strike, and where transfers are verified. */

enum { ARI_WIRE_PLACES = 3 }; /* inputs that a kernel reads at once */

/* The moving of one thread in one collective. */
typedef struct ari_wire {
    ari_sim_comm *mover;
    ari_moved *moved;
    bool plain;         /* neither faults nor verification: memory is read where it lies */
    uint64_t transfers; /* so far in this collective */
} ari_wire;

/** After entering the collective. */
ari_wire ari_wire_open(ari_sim_comm *mover);
/** `bytes` that lie at `at` in the memory of group member `from`, as they arrive here: `at` itself, or a copy that
 * stays until the next read into the same place. NULL: they do not; the collective is broken off, and the member
 * leaves. */
const void *ari_wire_read(ari_wire *w, int from, const void *at, size_t bytes, int place);
/** Copies them. False: as above. */
bool ari_wire_take(ari_wire *w, void *to, int from, const void *at, size_t bytes);
/** Copies own bytes into the memory of member `to`; past_cache: with stores that leave the cache alone. False: as
 * above. */
bool ari_wire_put(ari_wire *w, int to, void *at, const void *from, size_t bytes, bool past_cache);

#endif
