/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks in which attention computes its scores. Their edges follow from the order of positions, the numbers of heads,
 * and the memory that a device uses at once. Predictions of memory use the same function. */
#pragma once

#include "anyrank/parallel.h"
#include "anyrank/tensor.h"

/* Keys [begin, end). */
typedef struct ari_keys {
    int32_t begin, end;
} ari_keys;

/* Queries at some positions of a sequence, and the keys that the causal order lets them see. */
typedef struct ari_order {
    ar_positions rows;
    size_t seq; /* keys */
    bool causal;
    size_t window; /* 0: no window */
} ari_order;

/** Returns the keys that the query at a position may see. */
ari_keys ari_order_keys(const ari_order *o, size_t position);

/* Blocks of scores. The query heads of a KV head's group are consecutive rows of one matrix [group * rows, seq], and
 * there are samples * kv_heads matrices. A block has rows of one head with the keys that any of these rows sees, or
 * several full matrices if they are small. */
typedef struct ari_score_blocks {
    ari_order order;
    const ari_keys *visible; /* borrowed [samples, rows]; NULL: the keys that the order allows */
    size_t samples, kv_heads, group;
    size_t rows;        /* number of rows of the order */
    size_t max_scores;  /* scores of a block */
    bool full_matrices; /* true if blocks are whole matrices */
    bool ring;
    bool thin; /* some are left out */
} ari_score_blocks;

enum { ARI_BLOCK_ROWS = 32 }; /* least number of rows of a block that is not a full matrix, if there are as many */

/** Divides scores into blocks. ring: keys and values come from several ranks. */
ari_score_blocks ari_score_blocks_of(const ari_order *order, const ari_keys *visible, size_t samples, size_t kv_heads,
                                     size_t group, size_t max_scores, bool ring);
/** Sets *block_part to the block that follows it, or to the first one if it is zero. Returns false if there is none. */
bool ari_next_block(const ari_score_blocks *b, ar_part *block_part);
