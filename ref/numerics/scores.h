/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/* Position of a row in a block of attention scores, and the keys that it may see; equal on all devices. */
#include "anyrank/device.h"
#include "ref/numerics/divisor.h"

typedef struct ari_score_row {
    size_t row_index;       /* among all rows of all matrices */
    size_t head;            /* number of the query head on this rank */
    size_t first_key, keys; /* columns [first_key, first_key + keys) of the block may be visible */
    const uint8_t *padding; /* for these keys, 0 = masked; NULL: none */
    const float *additive;  /* for these keys, -inf = masked; NULL: none */
} ari_score_row;

/* Rows of a block with the memory of its mask; NULL members without one. */
typedef struct ari_score_rows {
    ar_scores scores;
    ar_mask mask; /* only its numbers */
    const int32_t *visible;
    const uint8_t *padding;
    const float *additive;
    ari_divisor part_rows, kv_heads, rows;
} ari_score_rows;

static inline ari_score_rows ari_score_rows_of(const ar_scores *b, const ar_mask *mask, const int32_t *visible,
                                               const uint8_t *padding, const float *additive)
{
    const ari_divisor part_rows = ari_divisor_of(b->part.rows), kv_heads = ari_divisor_of(b->kv_heads);
    const ari_score_rows score_rows = {*b,       *mask,     visible,  padding,
                                       additive, part_rows, kv_heads, ari_divisor_of(b->rows)};
    return score_rows;
}

/** Row i of all rows of a block. */
ARI_FN ari_score_row ari_score_row_of(const ari_score_rows *score_rows, size_t i)
{
    const ar_scores *b = &score_rows->scores;
    const ar_mask *mask = &score_rows->mask;
    const ar_part *p = &b->part;
    const float *additive = score_rows->additive;
    const uint8_t *padding = score_rows->padding;
    const size_t matrix = p->matrix + ari_divide(&score_rows->part_rows, &i), row = p->row + i;
    size_t kv_head = matrix, query = row;
    const size_t sample = ari_divide(&score_rows->kv_heads, &kv_head);
    const size_t local_head = kv_head * b->group + ari_divide(&score_rows->rows, &query),
                 head = mask->head_start + local_head;
    const size_t plane = (mask->mask_batch > 1 ? sample : 0) * mask->mask_heads + (mask->mask_heads > 1 ? head : 0);
    const int32_t *keys = score_rows->visible + 2 * (sample * b->rows + query);
    const size_t begin = (size_t)keys[0] > p->col ? (size_t)keys[0] : p->col;
    const size_t end = (size_t)keys[1] < p->col + p->cols ? (size_t)keys[1] : p->col + p->cols;
    ari_score_row r;
    r.row_index = matrix * b->group * b->rows + row;
    r.head = local_head;
    r.first_key = begin < end ? begin - p->col : 0;
    r.keys = begin < end ? end - begin : 0;
    r.padding = padding ? padding + sample * b->seq + p->col + r.first_key : padding;
    r.additive = additive ? additive + (plane * b->rows + query) * b->seq + p->col + r.first_key : additive;
    return r;
}
