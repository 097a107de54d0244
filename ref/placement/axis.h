/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/arith.h"
#include "anyrank/context.h"
#include "anyrank/redistribute.h"

/* A row-major value seen along one dimension, [before, extent, after], which ari_split_uneven divides into `parts`.
 * Collectives need the packed order: the ranks' parts one after the other, each row-major. A part is then a block
 * [before, its extent, after]; with before = 1 the packed order equals the value's order. */
typedef struct ari_axis {
    size_t before, extent, after;
    int parts;
} ari_axis;

/** Dimension `dim` of a value of this shape. */
ari_axis ari_axis_of(int ndim, const size_t *shape, int dim, int parts);

/* Copy on the context's main queue between memory areas that do not overlap, for a dtype of whole bytes. Errors: those
 * of the device. */
/** Copies all parts of `full` to packed order; unpack: the inverse. */
AR_NODISCARD ar_status ari_axis_pack(ar_ctx *ctx, ar_buf packed, ar_cbuf full, const ari_axis *a, ar_dtype t);
/** Copies part `part` of `full` to block; put: the inverse, which leaves other parts unchanged. */
AR_NODISCARD ar_status ari_axis_take(ar_ctx *ctx, ar_buf block, ar_cbuf full, const ari_axis *a, int part, ar_dtype t);
AR_NODISCARD ar_status ari_axis_put(ar_ctx *ctx, ar_buf full, ar_cbuf block, const ari_axis *a, int part, ar_dtype t);

/** Returns the dtype by which a collective moves elements of dtype t without reducing them: a supported one of the same
 *  width. */
ar_dtype ari_moved_as(ar_dtype t);
/** All-gathers `full` from the ranks' parts, `block` is this rank's. parts: the ranks of the group. Errors: also
 *  AR_ERR_MEMORY, those of the communicator. */
AR_NODISCARD ar_status ari_axis_gather(ar_ctx *ctx, ar_comm *group, ar_buf full, ar_cbuf block, const ari_axis *a,
                                       ar_dtype t, const char *tag);

/** ar_redistribute with the sums of F32 terms of another arithmetic than the context's. */
AR_NODISCARD ar_status ari_redistribute(ar_ctx *ctx, const ar_mesh_groups *g, ar_tensor *y, const ar_tensor *x,
                                        const ar_redistribution *r, const ar_arith_ops *sums, const char *tag);
