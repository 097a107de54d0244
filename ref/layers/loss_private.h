/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/loss.h"

/* Functions of anyrank/loss.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** The share of T of these rows of the batch, at this rank's positions. Errors: AR_ERR_UNSUPPORTED (no positions to share
 *  out), AR_ERR_INDIVISIBLE, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_loss_targets(size_t *targets, const ar_loss *loss, const ar_ctx *ctx, const ar_batch *batch);
/** Adds the terms of y to those since ari_loss_zero. */
AR_NODISCARD ar_status ari_loss_forward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                                        const ar_batch *batch);
/** *dy from what the newest forward saved; T is batch->targets where the batch stands in a global one, and its own
 *  else. */
AR_NODISCARD ar_status ari_loss_backward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                                         const ar_batch *batch);
/** *value = fl32(sum of the terms of all data-parallel ranks / t), NaN for t = 0; the same on every rank, tapped as
 * "loss". Once, after the last forward pass: it sums over the group. */
AR_NODISCARD ar_status ari_loss_read_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t);
/** *value = fl32(sum of the terms of all data-parallel ranks / t), NaN for t = 0; the same on every rank, tapped as
 * "loss". Once, after the last forward pass: it sums over the group. */
AR_NODISCARD ar_status ari_loss_zero(ar_loss *loss, ar_ctx *ctx);
/** Adds all elements of terms (contiguous fp32, equal on every tensor-parallel rank). */
AR_NODISCARD ar_status ari_loss_add_terms(ar_loss *loss, ar_ctx *ctx, const ar_tensor *terms);

AR_END_DECLS
