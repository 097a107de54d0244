/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/param.h"

/* A share of a parameter: a run of the elements of the layer's matrix, row after row, which is how its gradient lies in
 * memory. In a tensor that is up to two boxes for each dimension but the last, and one: the end of a row, whole rows,
 * the beginning of a row. */
#define ARI_RUN_BOXES (2 * AR_MAX_DIMS - 1)
typedef struct ari_run_box {
    size_t origin[AR_MAX_DIMS], extent[AR_MAX_DIMS];
} ari_run_box;

/** Elements [start, start + count) of a row-major tensor as boxes, one after the other in that order. Returns how many,
 *  at most ARI_RUN_BOXES. The run lies within the tensor. */
size_t ari_run_boxes(ari_run_box *out, int ndim, const size_t *shape, size_t start, size_t count);
/** The elements [start, start + count) of a parameter's matrix as boxes between a tensor of its value's shape and the
 *  full tensor, with the parameter's replicas over the tensor-parallel group and over the two ends of a pipeline, and
 *  those of the share. Errors: AR_ERR_UNSUPPORTED (more than AR_MAX_BOXES). */
AR_NODISCARD ar_status ari_share_layout(ar_layout *o, const ar_param *p, const ar_ctx *ctx, size_t start, size_t count);
/** The whole parameter, as one of the copies that the tensor-parallel and the data-parallel ranks, and of a tied table
 *  the two ends of a pipeline, hold. */
ar_layout ari_whole_layout(const ar_param *p, const ar_ctx *ctx);
/** True if the data-parallel ranks share out the value: `value` has memory only while it is gathered. */
static inline bool ari_value_is_shared(const ar_param *p)
{
    return p->share && p->share->value.ptr;
}
/** The value as this rank holds it between its uses, and its place in the full tensor, with all copies of it: the value
 *  itself, or a fresh tensor of the step of its shape, in which the elements of this rank's share are at their places
 *  and the others undefined. ari_value_end. */
AR_NODISCARD ar_status ari_value_begin(ar_tensor *t, ar_layout *o, ar_ctx *ctx, const ar_param *p);
void ari_value_end(ar_tensor *t, ar_ctx *ctx, const ar_param *p);
/** Taps it. */
AR_NODISCARD ar_status ari_value_tap(const ar_param *p, ar_ctx *ctx, char pass);
/** Copies elements [start, start + count) of the matrix that is a tensor of the value's shape (`value`: any memory of
 *  the device) to `run`, where they lie one after the other, or back. Of value's dtype. */
AR_NODISCARD ar_status ari_share_get(ar_ctx *ctx, ar_buf run, const ar_param *p, const ar_tensor *value, size_t start,
                                     size_t count);
AR_NODISCARD ar_status ari_share_put(ar_ctx *ctx, ar_cbuf run, const ar_param *p, const ar_tensor *value, size_t start,
                                     size_t count);

/** Elements of the full tensor. */
size_t ari_layout_count(const ar_layout *o);
/** Copies a rank's boxes out of the full tensor into host memory for `local`, of which only the shape is looked at.
 * Both row-major. */
void ari_layout_take(float *host, const ar_tensor *local, const ar_layout *o, const float *full);
