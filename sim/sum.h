/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_SUM_H
#define ARI_SIM_SUM_H

#include "ref/core/reduce.h"
#include "sim/wire.h"

/* A reduction of the same elements of several members' inputs by one thread, in the ring's order. */
typedef struct ari_sum {
    ari_wire *wire;
    const ari_group *group;
    ari_reduce kernel;
    size_t element;  /* bytes */
    int first, last; /* members first, first+1, ..., last (modulo N) */
    bool finishes;   /* these are all, so the result is the whole one */
} ari_sum;

/** Of all members, the order ending at `last`; of the call that is agreed upon. */
ari_sum ari_sum_of(ari_wire *w, int last);
/** The same without the last one, which adds its own input afterwards. */
ari_sum ari_sum_before(ari_wire *w, int last);
/** Elements that one piece may have. */
size_t ari_sum_piece_count(const ari_sum *s);
/** out = the reduction of `count` elements that lie `at` bytes into the inputs. out is memory of the mover that is not
 *  read, or the same elements of an input: it is written when all of them were read. False: broken off. */
AR_NODISCARD bool ari_sum_piece(const ari_sum *s, void *out, size_t at, size_t count);

#endif
