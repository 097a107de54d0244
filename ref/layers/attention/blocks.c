/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/attention/blocks.h"
#include "ref/placement/parallel_private.h"

#define KEY_STEP \
    ((size_t)16) /* a block's keys begin and end at multiples of this, so that a GPU can read a part in place */

ari_keys ari_order_keys(const ari_order *o, size_t position)
{
    const size_t begin = o->window > 0 && position >= o->window ? position - o->window + 1 : 0;
    return (ari_keys){(int32_t)begin, (int32_t)(o->causal ? position + 1 : o->seq)};
}

/* A matrix is split unless it is this many times smaller than a block: scores that its queries do not see are then not
 * computed. Measured at sequences of 512. */
#define LARGER ((size_t)4)

ari_score_blocks ari_score_blocks_of(const ari_order *order, const ari_keys *visible, size_t samples, size_t kv_heads,
                                     size_t group, size_t max_scores, bool ring)
{
    const size_t rows = ari_positions_count(&order->rows);
    return (ari_score_blocks){.order = *order,
                              .visible = visible,
                              .samples = samples,
                              .kv_heads = kv_heads,
                              .group = group,
                              .rows = rows,
                              .max_scores = max_scores,
                              .full_matrices = group * rows * order->seq <= max_scores / LARGER && !ring,
                              .ring = ring};
}

static ari_keys merge_keys(ari_keys a, ari_keys b)
{
    return (ari_keys){a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

static ari_keys keys_of(const ari_score_blocks *b, size_t sample, size_t query)
{
    return b->visible ? b->visible[sample * b->rows + query]
                      : ari_order_keys(&b->order, ari_positions_at(&b->order.rows, query));
}

/* Returns the keys that any of n > 0 queries of a run of positions sees. With order, the first and the last query
 * determine them. */
static ari_keys hull(const ari_score_blocks *b, size_t sample, size_t first_query, size_t n)
{
    ari_keys merged = keys_of(b, sample, first_query);
    for (size_t i = b->visible ? 1 : n - 1; i < n; i++)
        merged = merge_keys(merged, keys_of(b, sample, first_query + i));
    return merged;
}

/* Returns how many of a head's consecutive queries from `first_query` on fit in a block with the keys that they see.
 * The number is at most an eighth of all queries, because a block also computes keys that its last query sees and its
 * first one does not. */
static size_t height_at(const ari_score_blocks *b, size_t sample, size_t first_query, ari_keys *keys)
{
    const size_t run = b->order.rows.count[0], end = first_query < run ? run : b->rows;
    const size_t max_height = b->rows / 8 > ARI_BLOCK_ROWS ? b->rows / 8 : ARI_BLOCK_ROWS;
    size_t n = 0;
    *keys = keys_of(b, sample, first_query);
    while (first_query + n < end && n < max_height) {
        const size_t remaining = end - first_query - n,
                     added_rows = remaining < ARI_BLOCK_ROWS ? remaining : ARI_BLOCK_ROWS;
        const ari_keys merged = merge_keys(*keys, hull(b, sample, first_query + n, added_rows));
        if (n > 0 && (n + added_rows) * (size_t)(merged.end - merged.begin) > b->max_scores)
            break;
        *keys = merged;
        n += added_rows;
    }
    return n;
}

static bool advance_block(const ari_score_blocks *b, ar_part *block_part)
{
    const size_t height = b->group * b->rows, seq = b->order.seq, matrices = b->samples * b->kv_heads;
    const bool is_first = block_part->matrices == 0, goes_on = !is_first && block_part->row + block_part->rows < height;
    const size_t matrix = is_first ? 0 : block_part->matrix + (goes_on ? 0 : block_part->matrices);
    if (matrix >= matrices || height == 0)
        return false;
    if (b->full_matrices) {
        const size_t fit = b->max_scores / (height * seq), remaining = matrices - matrix;
        *block_part = (ar_part){matrix, remaining < fit ? remaining : fit, 0, height, 0, seq};
        return true;
    }
    ari_keys keys;
    const size_t row = goes_on ? block_part->row + block_part->rows : 0;
    const size_t rows = height_at(b, matrix / b->kv_heads, row % b->rows, &keys);
    const size_t col_begin = (size_t)keys.begin / KEY_STEP * KEY_STEP;
    const size_t end = ((size_t)keys.end + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
    *block_part = (ar_part){matrix, 1, row, rows, col_begin, (end < seq ? end : seq) - col_begin};
    return true;
}

/* Returns true if block a covers `covered`: with keys of one ring position a block may have fewer keys. */
static bool covers(const ari_score_blocks *b, const ar_part *a, const ar_part *covered)
{
    const bool keys =
        b->ring ? a->col <= covered->col && a->col + a->cols >= covered->col + covered->cols : a->cols >= covered->cols;
    return a->matrices >= covered->matrices && a->rows >= covered->rows && keys;
}

bool ari_next_block(const ari_score_blocks *b, ar_part *block_part)
{
    const bool is_first = block_part->matrices == 0;
    if (!advance_block(b, block_part))
        return false;
    for (ar_part next_part = *block_part;
         b->thin && !is_first && advance_block(b, &next_part) && covers(b, &next_part, block_part);)
        *block_part = next_part;
    return true;
}
