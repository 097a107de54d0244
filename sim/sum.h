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

/** The sum of the agreed call: over all members, in the order that ends at `end`, or (not whole) over all except that
 *  one, which adds its own input afterwards. */
ari_sum ari_sum_of(ari_wire *w, int end, bool is_full);
/** Elements that one piece may have. */
size_t ari_sum_piece_count(const ari_sum *s);
/** out = the reduction of `count` elements that lie `offset` bytes into the inputs. out is memory of the mover that is
 *  not read, or the same elements of an input: it is written when all of them were read. False: broken off. */
AR_NODISCARD bool ari_sum_piece(const ari_sum *s, void *out, size_t offset, size_t count);

/* Sum of many inputs written to many outputs in one pass: a block of the sum stays in registers until it is in every
 * output. So every input is read once, every output is written once, and there is no other memory traffic. */

enum { ARI_MAX_FUSED = 64 }; /* inputs, and outputs */

/* The outputs of a block are written after all inputs of the block were read: an output may be one of the inputs. */
typedef struct ari_fused {
    const char *const *in; /* [inputs], in the order of additions: ((in[0] + in[1]) + in[2]) + ... */
    char *const *out;      /* [outputs] */
    int inputs, outputs;
    bool past_cache; /* outputs bypass the cache until ari_stream_end; needs `offset` as ari_fused_head gives it */
} ari_fused;

/** Computes the bytes [offset, end) of the outputs from those of the inputs in full vectors. Returns where it
 *  stopped. */
typedef size_t (*ari_fused_fn)(const ari_fused *f, size_t offset, size_t end);

/** Returns the fused kernel with ari_reduce's bits for a dtype and operation; NULL: none. */
ari_fused_fn ari_fused_kernel(ar_dtype t, ar_op op);
/** The number of bytes from `offset` on before a cache line of every output begins. False: the outputs have different
 *  alignments, or lines begin within an element. */
bool ari_fused_head(const ari_fused *f, size_t offset, size_t element, size_t *head);

/** Slice c of the all_reduce that is agreed upon, from all inputs to all outputs, by the wire's mover, whichever member
 *  that is: N-1 reads and N-1 writes of the slice, so the N slices come to the ring's 2(N-1) D. False: broken off. */
bool ari_slice_move(ari_wire *w, int c);
