/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/module.h"

/* Private functions of anyrank/module.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Forgets all entries; the tensors belong to the step. Accepts NULL. */
void ari_saved_clear(ar_saved *s);
/** Recomputes a child from its parent's `recompute`: calls the child's `recompute`, or forward; for a recomputed child
 *  only x is saved. Errors: as ar_module_forward. */
AR_NODISCARD ar_status ari_module_recompute_saved(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                                  const ar_batch *batch);
/** Returns the number of samples in a contiguous x [.., features], each of which is a run of rows of equal length: the
 *  first extent. Rows of a two-dimensional x are samples if ari_ctx_place_batch has set their position in a global
 *  batch, otherwise tokens of one sample. */
size_t ari_ctx_samples(const ar_ctx *ctx, const ar_tensor *x);
/** Sets *x to a step tensor with the batch's input, [b, the shape of a sample], or its ids, [b, s] of AR_I64. If ranks
 *  shard the positions of a sample, the first of two or more dimensions, it has the rank's own. Errors: AR_ERR_ARG (the
 *  batch has no input), AR_ERR_UNSUPPORTED (no positions to shard), AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_batch_input(ar_ctx *ctx, ar_tensor *x, const ar_batch *batch);

AR_END_DECLS
