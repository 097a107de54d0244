/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_COMM_MOVES_H
#define ARI_COMM_MOVES_H

#include "ref/comm/rendezvous.h"

/* What a call moves, as its kind's row says, whichever way it goes: every communicator asks here which elements go from
 * which rank to which. Parts without elements are left out. Counts and places are elements.
 *
 * Of a reduction (ari_kind_row.combines), what a rank receives is combined from one part of each rank's input, which
 * lies at the same place in all of them; an all_reduce is everybody's whole input to everybody. */

/* What one rank exchanges with `peer`, by its own call alone. */
typedef struct ari_part {
    int peer;
    ar_buf buf;          /* where it begins; of what is sent it is only read */
    size_t start, count; /* in the input or output; an exchange's start at 0 */
} ari_part;

typedef struct ari_parts {
    const ari_call *call;
    int rank;
    bool sends;
    int peer, end; /* the peers to come */
    size_t start;  /* where the part of the first of them is */
    size_t op;     /* the next operation of an exchange */
} ari_parts;

/** What the call of `rank` sends to (or receives from) each of n ranks, itself among them, in their order; what it
 *  exchanges with one of them, in the order of the batch. */
ari_parts ari_parts_of(const ari_call *call, int rank, int n, bool sends);
/** False: there are no more. */
bool ari_next_part(ari_parts *s, ari_part *part);
/** Elements that the call of `rank` sends to `peer`. */
size_t ari_sent_count(const ari_call *call, int rank, int peer);

/* What one rank receives: both of its ends. */
typedef struct ari_move {
    int peer;
    ar_buf to;
    ar_cbuf from; /* in the memory of `peer` */
    size_t start; /* of `from`, in the input of `peer` */
    size_t count;
} ari_move;

typedef struct ari_moves {
    const ari_group *group;
    ari_parts to, from;
} ari_moves;

/** Everything that member `index` receives in the collective that is agreed upon, its own part among it. */
ari_moves ari_moves_to(const ari_group *g, int index);
/** What a rank has for itself; of a reduction, its own input and where the result belongs. */
ari_moves ari_moves_within(const ari_call *call, int rank);
bool ari_next_move(ari_moves *s, ari_move *move);

/** Elements of the input and of the output that the rank has: none where they are the root's alone. */
size_t ari_input_count(const ari_call *call, int rank, int n);
size_t ari_output_count(const ari_call *call, int rank, int n);

/** The next operation of a batch, at or after `at`, that sends to (or receives from) `peer`; call->count if none. */
size_t ari_next_op(const ari_call *call, size_t at, bool sends, int peer);

#endif
