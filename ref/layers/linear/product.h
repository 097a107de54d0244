/* SPDX-License-Identifier: Apache-2.0 */
/* GEMMs of a linear layer, Y = X W^T and dX = dY W, and the reductions that follow: at once, or by chunks of tokens
 * overlapped with their collectives. */
#pragma once

#include "ref/layers/linear/chunks.h"

typedef struct ari_product {
    const ar_operand *b;                              /* the weights */
    int n;                                            /* number of parts of A that are side by side: */
    size_t column[AR_MAX_PARTS], width[AR_MAX_PARTS]; /* first column and width of each part */
    ar_comm *group; /* the group over which the product is summed; NULL: the product is complete on this rank */
    bool scattered; /* true if each rank needs only its positions of the sum */
    bool unreduced; /* the fault column_dx_not_reduced */
    const char *tag;
} ari_product;

/* The rounded output of a GEMM: contiguous [.., features], of the wanted positions. */
typedef struct ari_output {
    ar_tensor y, z; /* z = act(y), if act is not AR_ACT_NONE */
    ar_cbuf bias;   /* ptr NULL: no bias */
    ar_activation act;
} ari_output;

/** Computes o = input B^T for input [.., s, f] contiguous, without chunks. */
AR_NODISCARD ar_status ari_multiply(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ar_tensor *input);
/** Writes the rows of chunk i, of which `rows` belong to A, to their positions; the product is complete here. */
AR_NODISCARD ar_status ari_multiply_chunk(ar_ctx *ctx, const ari_product *p, const ari_output *o, const ari_chunks *c,
                                          size_t i, const ar_tensor *rows);
/** Multiplies like ari_multiply with a scattered sum: a chunk's reduce-scatter overlaps with the product of the next
 *  chunk. A is prepared once, for all rows. */
AR_NODISCARD ar_status ari_multiply_scattered(ar_ctx *ctx, const ari_product *p, const ari_output *o,
                                              const ari_chunks *c, const ar_tensor *input);
