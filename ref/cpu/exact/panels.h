/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/exact/sums.h"

/* Exact paths whose sums are int64 and whose operands are packed into panels, a slice of K at a time: their common
 * part. A panel holds as many rows as a register tile has rows or columns, in the order that its instructions want.
 * Those of a slice, or of a part of it, stay in the second cache level while the sums of the tile, or of a part of it,
 * are made, one register tile after the other. */

/* Up to a panel's rows of integers with a common row length. */
typedef struct ari_panel_rows {
    const char *q;
    size_t width; /* bytes of an integer */
    size_t ld, rows;
} ari_panel_rows;

/** Term k of row `row`. */
static inline const void *ari_panel_rows_at(const ari_panel_rows *s, size_t row, size_t k)
{
    return s->q + (row * s->ld + k) * s->width;
}

/* A register tile: its operands, its sums, and whether it adds to them. */
typedef struct ari_register_tile {
    const void *left_panel, *right_panel; /* panels */
    size_t cols;                          /* of the right one */
    size_t terms, used;                   /* a multiple of the kernel's step; those before its zeros */
    size_t blocks;                        /* over which its sums are made in all */
    int64_t *sums;
    size_t ld;
    bool add;
    ari_tile_result result; /* from the first row and column on; y NULL: the sums are kept */
    const double *scale;    /* of its columns */
    size_t rows, inside;    /* rows from the first one on, and columns, that are the result's */
} ari_register_tile;

typedef struct ari_panel_kernel ari_panel_kernel;
/** A panel of `terms` terms; rows that are missing are zero. A right one has whole vectors of `lanes` columns. */
typedef void ari_panel_pack(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms);
/* sums[i*cols + j] = the products of row i of one plane of a left panel and row j of one of a right panel, added up
 * (digits.h). */
typedef void ari_panel_product(int32_t *sums, const int8_t *left, const int8_t *right, size_t terms);

struct ari_panel_kernel {
    size_t rows, cols;              /* of a register tile */
    size_t lanes;                   /* the tile's last columns form a panel of full vectors of this many lanes */
    size_t left_bytes, right_bytes; /* bytes of a term of a row of a panel */
    size_t head;                    /* terms for which a panel has room before the first */
    size_t step;                    /* panels have whole steps of terms; those past the last are zero */
    size_t slice;                   /* terms of a slice at most: whole steps */
    size_t block;                   /* of a panel at most: whole steps */
    size_t near_rows, near_cols;    /* of the part of a tile that takes a block after the other */
    ari_panel_pack *pack_left, *pack_right;
    void (*multiply)(const ari_panel_kernel *kernel, const ari_register_tile *r);
    /* Instead of it: `tiles` register tiles with the same right panel, from r downwards. */
    void (*multiply_column)(const ari_panel_kernel *kernel, const ari_register_tile *r, size_t tiles);
    size_t left_group, right_group; /* of a kernel of digits: terms of one row side by side */
    ari_panel_product *product;     /* of a kernel of digits */
    bool rounds;                    /* multiply_column writes results */
};

/* The common part of paths with a kernel; their plan calls ari_panels_plan. */
void ari_panels_plan(const ari_panel_kernel *kernel, ari_tile_plan *p, size_t k);
void ari_panels_sum(const ari_tile *t, size_t begin, size_t end);

/* Block of a kernel whose slices are blocks and use the full tile. */
#define ARI_PANEL_BLOCK(slice_, rows_, cols_) \
    .slice = (slice_), .block = (slice_), .near_rows = (rows_), .near_cols = (cols_)

#define ARI_PANEL_PATH ARI_SUMS_PATH, .sum = ari_panels_sum
