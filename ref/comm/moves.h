/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/comm/rendezvous.h"

/* Moves of a call, by its kind's row, in both directions: all communicators learn here which elements go from which
 * rank to which. Empty parts are left out. Counts and offsets are in elements. A rank's result of a reduction
 * (ari_kind_row.combines) is combined from one part of each rank's input, at the same position in all of them; an
 * all_reduce sends every rank's full input to every rank. */

/* Data that one rank's call sends to or receives from `peer`. */
typedef struct ari_part {
    int peer;
    ar_buf buf;          /* start of the data; only read if it is sent */
    size_t start, count; /* in the input or output; for an exchange, start is 0 */
} ari_part;

typedef struct ari_parts {
    const ari_call *call;
    int rank;
    bool sends;
    int peer, end; /* the remaining peers */
    size_t start;  /* offset of the first one's part */
    size_t op;     /* the next operation of an exchange */
} ari_parts;

/** Returns an iterator over the parts that the call of `rank` sends to (or receives from) each of n ranks, including
 *  itself, in rank order. Parts for the same peer are in the order of the batch. */
ari_parts ari_parts_of(const ari_call *call, int rank, int n, bool sends);
/** Returns false if there are no more parts. */
bool ari_next_part(ari_parts *s, ari_part *part);
/** Returns the number of elements that the call of `rank` sends to `peer`. */
size_t ari_sent_count(const ari_call *call, int rank, int peer);

/* A transfer to one rank, with both of its ends. */
typedef struct ari_move {
    int peer;
    ar_buf dst;
    ar_cbuf src;  /* address in the memory of `peer` */
    size_t start; /* start of `src` in the input of `peer` */
    size_t count;
} ari_move;

typedef struct ari_moves {
    const ari_group *group;
    ari_parts dst, src;
} ari_moves;

/** Returns everything that member `index` receives in the agreed collective, including its own part. */
ari_moves ari_moves_to(const ari_group *g, int index);
/** Returns a rank's moves to itself; for a reduction, from its input to the result. */
ari_moves ari_moves_within(const ari_call *call, int rank);
bool ari_next_move(ari_moves *s, ari_move *move);

/** Return the elements of the rank's input and output; 0 if only the root has them. */
size_t ari_output_count(const ari_call *call, int rank, int n);
/** Returns the bytes of two buffers for the largest part, each a whole number of cache lines. */
size_t ari_two_parts(const ari_call *call, int n);
/** Grows scratch memory to `bytes`; its contents are lost. label: names the purpose in a message. Errors:
 *  AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_scratch_reserve(void **scratch, size_t *capacity, size_t bytes, const char *label);

/** Returns the index of the next operation of a batch, at or after `index`, that sends to (or receives from) `peer`;
 *  call->count if there is none. */
size_t ari_next_op(const ari_call *call, size_t index, bool sends, int peer);
