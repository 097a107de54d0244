/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

AR_BEGIN_DECLS

/* Tiles of the result of an exact contraction. A tile's int8 products are written as planes of int32, which one pass
 * then reads and combines (gpu/packed.h). A library computes a product in parts of a fixed size, one processor a part,
 * in waves of as many parts as there are processors: tiles whose parts do not fill their last wave leave processors
 * idle, and tiles whose planes do not fit the cache read them from memory. */

/* The machine that computes the products. */
typedef struct ari_tile_machine {
    size_t processors;
    size_t part_rows, part_cols; /* of c, that one processor computes at a time, or the same part turned */
    size_t cache_bytes;          /* planes of so many bytes are still in the cache when the pass reads them */
    size_t plane_bytes;          /* of a tile, at most; a single part may have more */
} ari_tile_machine;

/* The product: [batch, m, n] over `blocks` blocks of terms, whose operands are runs of `terms` digits. */
typedef struct ari_tile_work {
    size_t batch, m, n, terms, blocks;
    size_t planes, runs; /* of a block: products, and the runs that they take together */
    bool is_uniform; /* every product takes one run, the one after that of the product before it, in both operands */
    bool one_result; /* the matrices of the batch are added up, in memory of [m, n] */
} ari_tile_work;

/* Rows of all matrices, and what of their products has something: columns of the result, terms of every run. */
typedef struct ari_tile_part {
    size_t row, rows, col, cols, term, terms;
} ari_tile_part;

/* Tiles of whole matrices, or of rows and columns of one, or, of one result, of all matrices. */
typedef struct ari_tiling {
    size_t matrices, rows, cols; /* of the largest tile */
    bool together; /* a call computes all products of one matrix; else one product of all matrices of the tile */
} ari_tiling;

/** Sets *p to the part after *p, or to the first one if it is zero, of a product with this band (NULL: the product is
 *  one part). Returns false if there is none. Terms are split into bands if runs are multiplied one after the other.
 *  Columns and terms begin at multiples of 16, columns end at multiples of 4, terms of 16. No side effects. */
bool ari_band_next(ari_tile_part *p, const ari_tile_work *w, const ari_tile_machine *m, const ar_band *band);

/** The tiling that is expected to take the least time. No extent is 0; pure. */
ari_tiling ari_plan_tiles(const ari_tile_work *w, const ari_tile_machine *m);
/** Returns the fraction of the processors' time that the products of this tiling use, 0 to 1: all runs of all parts
 *  relative to what the waves of all calls could hold. */
double ari_tiling_share(const ari_tile_work *w, const ari_tile_machine *m, const ari_tiling *t);

AR_END_DECLS
