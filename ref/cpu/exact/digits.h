/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "ref/cpu/exact/panels.h"

/* The integer sums of a contraction by ten products of int8 (ref/numerics/digits.h): all but the instructions that
 * multiply. A panel is eight planes, the four digits and the four sums of two; of narrow integers, |q| <= 32639, two
 * planes, whose four products are one for each pair of digits. In each, a group of terms of one row is
 * contiguous, then those of the next row, for all rows of the panel: [terms/group][rows][group] bytes. Groups are of 4
 * or 8 terms. amx.c has its own form of the same.
 *
 * Sixteen products of digits, which a GPU takes for short sums, need fewer planes and less folding, but never pay here:
 * over 64 terms SMMLA makes ten in 80 instructions for 4 results and sixteen in 128, against some 14 saved in folding
 * and less than one in packing. */
#define ARI_DIGIT_PLANES ((size_t)8)
#define ARI_DIGIT_PLANES_NARROW ((size_t)2)
#define ARI_DIGIT_PRODUCTS ((size_t)10)

/* The most terms of a slice: the sums of products of one weight are put together in int32 before they are widened
 * (digits.c). A multiple of every step. */
#define ARI_DIGIT_SLICE ((size_t)448)
/* Packing makes so many terms of a row at a time: a kernel's step is a multiple of it. */
#define ARI_DIGIT_CHUNK ((size_t)16)

/* A register tile has at most so many sums. */
#define ARI_DIGIT_TILE ((size_t)96)

/* Functions of a kernel of digits besides its product. */
ari_panel_pack ari_digits_pack_left, ari_digits_pack_right;
void ari_digits_multiply(const ari_panel_kernel *kernel, const ari_register_tile *r);

#define ARI_DIGIT_KERNEL(rows_, cols_, group_, planes_, product_)                                                  \
    .rows = (rows_), .cols = (cols_), .lanes = (cols_), .left_group = (group_), .right_group = (group_),           \
    .left_bytes = (planes_), .right_bytes = (planes_), .step = ARI_DIGIT_CHUNK, .pack_left = ari_digits_pack_left, \
    .pack_right = ari_digits_pack_right, .multiply = ari_digits_multiply, .product = (product_)
