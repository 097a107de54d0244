/* SPDX-License-Identifier: Apache-2.0 */
/* Context parallelism inside the attention: queries attend to the keys and values of all positions. Each of the N inner
 * neighbours at a position of the ring has some of that position's tokens, with all heads of its tensor-parallel rank.
 * An all-to-all turns this into all of these tokens and some of the heads (Jacobs et al. 2023, arXiv:2309.14509). Keys
 * and values then travel around the ring with R positions (Liu et al. 2023, arXiv:2310.01889). Tensors are contiguous
 * fp32, [b, heads, positions, d]. */
#pragma once

#include "anyrank/parallel.h"
#include "ref/context/context.h"

/* --- heads against positions -------------------------------------------------------------------------------------- */

/* Heads [first_head, first_head + count) of a tensor-parallel rank, on which a neighbour works. */
typedef struct ari_head_share {
    size_t first_head, count;
    size_t copies; /* number of consecutive neighbours that compute the same heads */
} ari_head_share;

/** Returns the share of neighbour i of n: heads/n heads each, or if n is a multiple of heads, one head that n/heads
 *  neighbours share. One of the two divides the other. */
ari_head_share ari_head_share_of(size_t heads, size_t n, size_t i);

/** Checks that the inner neighbours can divide the heads of a tensor-parallel rank. name: of the attention. Errors:
 *  AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_head_shares_check(const char *name, const ar_ctx *ctx, size_t heads, size_t kv_heads);

/** Exchanges sequence shards for head shards: x[t] [b, heads[t], local positions, d] becomes [b, this neighbour's
 *  heads, the positions of all neighbours, d], for n tensors in one all-to-all. Without neighbours x is unchanged.
 *  Every replica of a head receives it. The old x is released. Collective over ctx->inner. Errors: AR_ERR_MEMORY, those
 *  of the communicator. */
AR_NODISCARD ar_status ari_heads_scatter(ar_ctx *ctx, ar_tensor *x, const size_t *heads, int n, const char *tag);
/** Reverses ari_heads_scatter: restores all heads[t] and the local positions. Replicas have equal values: of C
 *  replicas, neighbour i receives from the one with the same index (i mod C), which for its own head is itself. */
AR_NODISCARD ar_status ari_heads_together(ar_ctx *ctx, ar_tensor *x, const size_t *heads, int n, const char *tag);

/* --- the ring ----------------------------------------------------------------------------------------------------- */

/** Returns the positions of a sequence of seq that a ring rank holds. */
ar_positions ari_ring_positions(const ar_ctx *ctx, size_t seq, int place);

/* Names of this rank's R - 1 transfers in the ring, shown in a trace: what arrives in each. */
typedef struct ari_ring_transfers {
    char (*tag)[160];
} ari_ring_transfers;
/** Initialises the names of the transfers, also without a ring. base: the attention's name. The caller releases them
 *  with ari_ring_transfers_fini. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_ring_transfers_init(ari_ring_transfers *h, const ar_ctx *ctx, const char *base);
void ari_ring_transfers_fini(ari_ring_transfers *h);

/** Copies the chunk [b, kv heads, its positions, d] of a ring rank to its positions in `gathered` [b, kv heads, seq,
 *  d]. Errors: those of the device. */
AR_NODISCARD ar_status ari_ring_place(ar_ctx *ctx, const ar_tensor *gathered, const ar_tensor *chunk, int place);

/** Gathers keys and values of all ring ranks: gathered[0], gathered[1] [b, kv heads, seq, d], in the order of
 *  positions, from local[0], local[1] [b, kv heads, seq/R, d], in R - 1 transfers. In each one a rank sends what it
 *  received last, first its own, to the next rank, and receives from the previous one. The results are new tensors, or
 *  local itself without a ring: ari_ring_release. Collective over ctx->ring. Errors: AR_ERR_MEMORY, those of the
 *  communicator. */
AR_NODISCARD ar_status ari_ring_gather(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2], size_t seq,
                                       const ari_ring_transfers *h);
void ari_ring_release(ar_ctx *ctx, ar_tensor gathered[2], const ar_tensor local[2]);
