/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/device.h"

AR_BEGIN_DECLS

/* Tiling of an exact contraction's result. A tile's int8 products are written as planes of int32, which one pass then
 * reads and combines (gpu/packed.h). A library computes a product in parts of a fixed size, one processor per part, in
 * waves of as many parts as there are processors. Tiles whose parts do not fill their last wave leave processors idle,
 * and tiles whose planes do not fit in the cache are read from memory. */

/* The machine that computes the products. */
typedef struct ari_tile_machine {
    size_t processors;
    size_t part_rows, part_cols; /* rows and columns of c that one processor computes at a time, or the same part
                                    transposed */
    size_t cache_bytes;          /* planes of up to this many bytes are still in the cache when the pass reads them */
    size_t plane_bytes;          /* maximum bytes of a tile's planes; a single part may have more */
} ari_tile_machine;

/* The product: [batch, m, n] over `blocks` blocks of terms, whose operands are runs of `terms` digits. */
typedef struct ari_tile_work {
    size_t batch, m, n, terms, blocks;
    size_t planes, runs; /* for a block: number of products, and of the runs that they read together */
    bool is_uniform;     /* true if every product reads one run of each operand, the run after that of the preceding
                            product */
    bool one_result;     /* the matrices of the batch are added up, in memory of [m, n] */
} ari_tile_work;

/* Rows of all matrices, and the nonzero part of their products: columns of the result, terms of every run. */
typedef struct ari_tile_part {
    size_t row, rows, col, cols, term, terms;
} ari_tile_part;

/* Tiles of whole matrices, or of rows and columns of one matrix, or, for a single result, of all matrices. */
typedef struct ari_tiling {
    size_t matrices, rows, cols; /* of the largest tile */
    bool together; /* true: one call computes all products of one matrix; false: one product of all matrices in the
                      tile */
} ari_tiling;

/** Sets *p to the part after *p, or to the first one if it is zero, of a product with this band (NULL: the product is
 *  one part). Returns false if there is none. Terms are split into bands if runs are multiplied one after the other.
 *  Columns and terms begin at multiples of 16, columns end at multiples of 4, terms of 16. No side effects. */
bool ari_band_next(ari_tile_part *p, const ari_tile_work *w, const ari_tile_machine *m, const ar_band *band);

/** Returns the tiling with the smallest expected time. No extent may be 0. Pure function. */
ari_tiling ari_plan_tiles(const ari_tile_work *w, const ari_tile_machine *m);
/** Returns the fraction of the processors' time that the products of this tiling use, 0 to 1: all runs of all parts
 *  relative to what the waves of all calls could hold. */
double ari_tiling_share(const ari_tile_work *w, const ari_tile_machine *m, const ari_tiling *t);

AR_END_DECLS
