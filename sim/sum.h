/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/core/reduce.h"
#include "sim/wire.h"

/* A reduction of the same elements of several members' inputs by one thread, in the ring's order. */
typedef struct ari_sum {
    ari_wire *wire;
    ari_reduce kernel;
    int first_member, last_member; /* members first_member, .., last_member (modulo N) */
} ari_sum;

/** Returns the sum for the agreed call over all members, in the order that ends with member `end`. With is_full false,
 *  the sum omits that member, which adds its input afterwards. */
ari_sum ari_sum_of(ari_wire *w, int end, bool is_full);
/** Returns the maximum number of elements of one piece. */
size_t ari_sum_piece_count(const ari_sum *s);
/** Reduces `count` elements at byte offset `offset` of the inputs and writes the result to `out`. `out` is memory of
 *  the mover that nobody reads, or the same elements of an input; it is written after all inputs were read. Returns
 *  false if the collective was aborted. */
AR_NODISCARD bool ari_sum_piece(const ari_sum *s, void *out, size_t offset, size_t count);

/* Sum of many inputs written to many outputs in one pass: a block of the sum stays in registers until it is in every
 * output. So every input is read once, every output is written once, and there is no other memory traffic. */

enum { ARI_MAX_FUSED = 64 }; /* inputs, and outputs */

/* A fused reduction. The outputs of a block are written after all of the block's inputs were read, so an output may be
 * one of the inputs. */
typedef struct ari_fused {
    const char *const *in; /* [inputs] in the order of the additions: ((in[0] + in[1]) + in[2]) + ... */
    char *const *out;      /* [outputs] */
    int inputs, outputs;
    bool past_cache; /* true: outputs bypass the cache until ari_stream_end; needs an `offset` from ari_fused_head */
} ari_fused;

/** Computes the bytes [offset, end) of the outputs from those of the inputs in full vectors. Returns where it
 *  stopped. */
typedef size_t (*ari_fused_fn)(const ari_fused *f, size_t offset, size_t end);

/** Returns the fused kernel with ari_reduce's bits for a dtype and operation; NULL: none. */
ari_fused_fn ari_fused_kernel(ar_dtype t, ar_op op);
/** Computes the number of bytes from `offset` to the first position at which a cache line of every output begins.
 *  Returns false if the outputs' alignments differ, or lines begin within an element. */
bool ari_fused_head(const ari_fused *f, size_t offset, size_t element, size_t *head);

/** Moves slice c of the agreed all_reduce from all inputs to all outputs, by any member. This takes N-1 reads and N-1
 *  writes of the slice, so all N slices take the ring's 2(N-1) D bytes. Returns false if the collective was aborted. */
bool ari_slice_move(ari_wire *w, int c);
