/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/exact/panels.h"

/* Computes the integer sums of a contraction by ten int8 products (ref/numerics/digits.h), except the multiplying
 * instructions. A panel has eight planes: the four digits and the four sums of two digits. For narrow integers, |q| <=
 * 32639, it has two planes, with one product for each of the four pairs of digits. A plane stores a group of terms of
 * one row contiguously, then the same group of the next row, for all rows of the panel: [terms/group][rows][group]
 * bytes. Groups have 4 or 8 terms. amx.c uses a different layout.
 *
 * Sixteen products of digits, which a GPU uses for short sums, need fewer planes and less folding but are never faster
 * here: over 64 terms SMMLA takes 80 instructions for ten products of 4 results and 128 for sixteen, while folding
 * saves about 14 and packing less than one. */
#define ARI_DIGIT_PLANES ((size_t)8)
#define ARI_DIGIT_PLANES_NARROW ((size_t)2)
#define ARI_DIGIT_PRODUCTS ((size_t)10)

/* Maximum number of terms in a slice: sums of products with equal weight are combined in int32 before they are widened
 * (digits.c). A multiple of every step. */
#define ARI_DIGIT_SLICE ((size_t)448)
/* Number of terms of a row that packing processes at a time; a kernel's step is a multiple. */
#define ARI_DIGIT_CHUNK ((size_t)16)

/* Maximum number of sums in a register tile. */
#define ARI_DIGIT_TILE ((size_t)96)

/* Functions of a kernel with digits, except its product. */
ari_panel_pack ari_digits_pack_left, ari_digits_pack_right;
void ari_digits_multiply(const ari_panel_kernel *kernel, const ari_register_tile *r);

#define ARI_DIGIT_KERNEL(rows_, cols_, group_, planes_, product_)                                                  \
    .rows = (rows_), .cols = (cols_), .lanes = (cols_), .left_group = (group_), .right_group = (group_),           \
    .left_bytes = (planes_), .right_bytes = (planes_), .step = ARI_DIGIT_CHUNK, .pack_left = ari_digits_pack_left, \
    .pack_right = ari_digits_pack_right, .multiply = ari_digits_multiply, .product = (product_)
