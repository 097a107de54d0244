/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/module.h"

/* Functions of anyrank/module.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** Forgets everything (the tensors belong to the step). Accepts NULL. */
void ari_saved_clear(ar_saved *s);
/** Called for a child by its parent's `recompute`: calls the child's `recompute`, or forward; of a recomputed child
 *  only x is saved. Errors: as ar_module_forward. */
AR_NODISCARD ar_status ari_module_recompute_saved(ar_module *m, ar_ctx *ctx, ar_saved *saved, const ar_tensor *x,
                                                  const ar_batch *batch);
/** Every parameter's gradient becomes zero. Errors: AR_ERR_MEMORY, those of the device. */
AR_NODISCARD ar_status ari_module_zero_grad(ar_module *m, ar_ctx *ctx);
/** Rows of length n: y = (x - mean)*rstd*gain + offset, mean = sum(x)/n, rstd = 1/sqrt(sum((x - mean)^2)/n + eps)
 *  (LayerNorm: Ba, Kiros, Hinton 2016, arXiv:1607.06450), or y = x*rstd*gain, rstd = 1/sqrt(sum(x^2)/n + eps) (RMSNorm:
 *  Zhang, Sennrich 2019, arXiv:1910.07467; offset is NULL). gain, offset [n]. Errors: also AR_ERR_ARG (eps negative or
 *  NaN, an offset that the kind does not have, y is one of saved). offset NULL: none is added. */
AR_NODISCARD ar_status ari_norm_forward(ar_ctx *ctx, ar_norm_kind kind, ar_tensor *y, ar_norm_saved *saved,
                                        const ar_tensor *x, const ar_param *gain, const ar_param *offset, double eps);
/** Number of samples in a contiguous x [.., features], each of them a run of rows of equal length: its first extent.
 *  The rows of two dimensions are samples if ari_ctx_place_batch has set their position in a global batch, else tokens of one
 *  sample. */
size_t ari_ctx_samples(const ar_ctx *ctx, const ar_tensor *x);
/** *x, a tensor of the step: the batch's input, [b, the shape of a sample], or its ids, [b, s] of AR_I64. Where ranks
 *  share out the positions of a sample, the first of two dimensions or more, it has the rank's own. Errors: AR_ERR_ARG
 *  (it has none), AR_ERR_UNSUPPORTED (no positions to share out), AR_ERR_INDIVISIBLE. */
AR_NODISCARD ar_status ari_batch_input(ar_ctx *ctx, ar_tensor *x, const ar_batch *batch);

AR_END_DECLS
