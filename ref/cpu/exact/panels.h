/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/exact/sums.h"

/* The common part of exact kernels with int64 sums, which pack their operands into panels, one slice of K at a time. A
 * panel holds as many rows as a register tile has rows or columns, in the order that the kernel's instructions need.
 * Panels of a slice, or of part of it, stay in the L2 cache while the sums of the tile, or of part of it, are computed
 * one register tile after the other. */

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
    size_t cols;                          /* columns of the right panel */
    size_t terms, used;                   /* a multiple of the kernel's step; number of terms before the zero padding */
    size_t blocks;                        /* number of blocks over which its sums are computed */
    int64_t *sums;
    size_t ld;
    bool add;
    ari_tile_result result; /* result from the tile's first row and column on; y NULL: the sums are kept */
    const double *scale;    /* factors of its columns */
    size_t rows, inside;    /* rows from the first one on, and columns, that belong to the result */
} ari_register_tile;

typedef struct ari_panel_kernel ari_panel_kernel;
/** Packs a panel of `terms` terms; missing rows become zero. A right panel has whole vectors of `lanes` columns. */
typedef void ari_panel_pack(const ari_panel_kernel *kernel, void *panel, const ari_panel_rows *s, size_t terms);
/* Computes sums[i*cols + j], the sum of products of row i in one plane of a left panel and row j in one plane of a
 * right panel (digits.h). */
typedef void ari_panel_product(int32_t *sums, const int8_t *left, const int8_t *right, size_t terms);

struct ari_panel_kernel {
    size_t rows, cols;              /* size of a register tile */
    size_t lanes;                   /* the tile's last columns form a panel of full vectors of this many lanes */
    size_t left_bytes, right_bytes; /* bytes of a term of a row of a panel */
    size_t head;                    /* terms for which a panel has space before the first */
    size_t step;                    /* panels have whole steps of terms, padded with zeros */
    size_t slice;                   /* maximum number of terms in a slice, a multiple of `step` */
    size_t block;                   /* maximum number of terms in a panel, a multiple of `step` */
    size_t near_rows, near_cols;    /* size of the part of a tile that is processed block after block */
    ari_panel_pack *pack_left, *pack_right;
    void (*multiply)(const ari_panel_kernel *kernel, const ari_register_tile *r);
    /* used instead of the above: multiplies `tiles` register tiles with the same right panel, from r downwards */
    void (*multiply_column)(const ari_panel_kernel *kernel, const ari_register_tile *r, size_t tiles);
    size_t left_group, right_group; /* for kernels with digits: number of contiguous terms of one row */
    ari_panel_product *product;     /* for a kernel with digits */
    bool rounds;                    /* multiply_column writes results */
};

/* The common part of exact kernels with panels; their plan calls ari_panels_plan. */
void ari_panels_plan(const ari_panel_kernel *kernel, ari_tile_plan *p, size_t k);
void ari_panels_sum(const ari_tile *t, size_t begin, size_t end);

/* Block of a kernel whose slices are blocks and use the full tile. */
#define ARI_PANEL_BLOCK(slice_, rows_, cols_) \
    .slice = (slice_), .block = (slice_), .near_rows = (rows_), .near_cols = (cols_)

#define ARI_PANEL_PATH ARI_SUMS_PATH, .sum = ari_panels_sum
