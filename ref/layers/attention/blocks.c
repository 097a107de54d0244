/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/layers/attention/blocks.h"
#include "ref/placement/parallel_private.h"

#define KEY_STEP ((size_t)16) /* a block's keys begin and end at multiples of it, where a GPU reads a part in place */

ari_keys ari_order_keys(const ari_order *o, size_t position)
{
    const size_t first = o->window > 0 && position >= o->window ? position - o->window + 1 : 0;
    return (ari_keys){(int32_t)first, (int32_t)(o->causal ? position + 1 : o->seq)};
}

/* A matrix that is not so many times smaller than a block is cut all the same: what its queries do not see is not
 * computed. Measured at sequences of 512. */
#define LARGER ((size_t)4)

ari_score_blocks ari_score_blocks_of(const ari_order *order, const ari_keys *visible, size_t samples, size_t kv_heads,
                                     size_t group, size_t most, bool ring)
{
    const size_t rows = ari_positions_count(&order->rows);
    return (ari_score_blocks){.order = *order,
                              .visible = visible,
                              .samples = samples,
                              .kv_heads = kv_heads,
                              .group = group,
                              .rows = rows,
                              .most = most,
                              .whole = group * rows * order->seq <= most / LARGER && !ring,
                              .ring = ring};
}

static ari_keys both(ari_keys a, ari_keys b)
{
    return (ari_keys){a.first < b.first ? a.first : b.first, a.end > b.end ? a.end : b.end};
}

static ari_keys keys_of(const ari_score_blocks *b, size_t sample, size_t query)
{
    return b->visible ? b->visible[sample * b->rows + query]
                      : ari_order_keys(&b->order, ari_positions_at(&b->order.rows, query));
}

/* The keys that any of n > 0 queries of one run of positions sees. By order the first and the last say it. */
static ari_keys hull(const ari_score_blocks *b, size_t sample, size_t first, size_t n)
{
    ari_keys all = keys_of(b, sample, first);
    for (size_t i = b->visible ? 1 : n - 1; i < n; i++)
        all = both(all, keys_of(b, sample, first + i));
    return all;
}

/* Number of queries of a head from `first` on, in one run of positions, that fit a block with the keys that they see;
 * at most an eighth of all queries: a block also computes keys that its last query sees and its first one does not. */
static size_t height_at(const ari_score_blocks *b, size_t sample, size_t first, ari_keys *keys)
{
    const size_t run = b->order.rows.count[0], end = first < run ? run : b->rows;
    const size_t most = b->rows / 8 > ARI_BLOCK_ROWS ? b->rows / 8 : ARI_BLOCK_ROWS;
    size_t n = 0;
    *keys = keys_of(b, sample, first);
    while (first + n < end && n < most) {
        const size_t left = end - first - n, more = left < ARI_BLOCK_ROWS ? left : ARI_BLOCK_ROWS;
        const ari_keys all = both(*keys, hull(b, sample, first + n, more));
        if (n > 0 && (n + more) * (size_t)(all.end - all.first) > b->most)
            break;
        *keys = all;
        n += more;
    }
    return n;
}

static bool next(const ari_score_blocks *b, ar_part *at)
{
    const size_t height = b->group * b->rows, seq = b->order.seq, matrices = b->samples * b->kv_heads;
    const bool first = at->matrices == 0, goes_on = !first && at->row + at->rows < height;
    const size_t matrix = first ? 0 : at->matrix + (goes_on ? 0 : at->matrices);
    if (matrix >= matrices || height == 0)
        return false;
    if (b->whole) {
        const size_t fit = b->most / (height * seq), left = matrices - matrix;
        *at = (ar_part){matrix, left < fit ? left : fit, 0, height, 0, seq};
        return true;
    }
    ari_keys keys;
    const size_t row = goes_on ? at->row + at->rows : 0;
    const size_t rows = height_at(b, matrix / b->kv_heads, row % b->rows, &keys);
    const size_t from = (size_t)keys.first / KEY_STEP * KEY_STEP;
    const size_t end = ((size_t)keys.end + KEY_STEP - 1) / KEY_STEP * KEY_STEP;
    *at = (ar_part){matrix, 1, row, rows, from, (end < seq ? end : seq) - from};
    return true;
}

/* Keys of one place of a ring may be fewer in a block of as many. */
static bool covers(const ari_score_blocks *b, const ar_part *a, const ar_part *other)
{
    const bool keys =
        b->ring ? a->col <= other->col && a->col + a->cols >= other->col + other->cols : a->cols >= other->cols;
    return a->matrices >= other->matrices && a->rows >= other->rows && keys;
}

bool ari_next_block(const ari_score_blocks *b, ar_part *at)
{
    const bool first = at->matrices == 0;
    if (!next(b, at))
        return false;
    for (ar_part then = *at; b->thin && !first && next(b, &then) && covers(b, &then, at);)
        *at = then;
    return true;
}
