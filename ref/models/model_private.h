/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/model.h"

/* Private functions of anyrank/model.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Checks a layout of `ranks` tensor-parallel ranks without building anything. Errors: AR_ERR_INDIVISIBLE (names the
 *  dimension, its size and the number of ranks), AR_ERR_UNSUPPORTED (the plan), AR_ERR_ARG (ranks < 1). */
AR_NODISCARD ar_status ari_config_check_ranks(const ar_config *c, int ranks, const ar_plan *plan);
/** Checks that `inner` neighbouring context-parallel ranks can divide the heads of each tensor-parallel rank, KV heads
 *  possibly with copies. Errors: AR_ERR_INDIVISIBLE (names the heads and a valid number), AR_ERR_ARG (inner < 1). */
AR_NODISCARD ar_status ari_config_check_inner(const ar_config *c, int ranks, int inner, const ar_plan *plan);
/** Computes the number of parameter elements in the whole model. Errors: AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_config_parameters(const ar_config *c, size_t *out);
/** Given weights: find(user, name, count) returns `count` fp32 values of the full tensor, borrowed, or NULL (then
 *  AR_ERR_NOT_FOUND). Then a tap ':init' of each. */
AR_NODISCARD ar_status ari_model_set(ar_model *m, ar_ctx *ctx, const float *(*find)(void *, const char *, size_t),
                                     void *user);
/** Runs the forward pass of the full model up to the loss's terms, which are added to those of earlier micro-batches.
 *  saved NULL: no backward pass follows. Errors: also AR_ERR_ARG (a pipeline stage). */
AR_NODISCARD ar_status ari_model_forward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
/** Computes the loss of all micro-batches and data-parallel ranks since ari_model_zero_grad, and taps it as "loss". It
 *  is the sum of the terms divided by `targets`, the number of target tokens in the global batch (0: the loss is NaN),
 *  or the plain sum if the model has no LM head. The routers' losses are added layer by layer, and the losses of
 *  further tokens divided by their own targets (ar_batch.mtp_targets). All ranks get the same value. Collective over
 *  the context's groups, the pipeline included. */
AR_NODISCARD ar_status ari_model_loss(ar_model *m, ar_ctx *ctx, float *loss, size_t targets);
/** Backward from the loss; gradients are added to the parameters. */
AR_NODISCARD ar_status ari_model_backward(ar_model *m, ar_ctx *ctx, ar_saved *saved, const ar_batch *batch);
/** Gradients and the loss's terms become zero. */
AR_NODISCARD ar_status ari_model_zero_grad(ar_model *m, ar_ctx *ctx);
/** Returns the options of block `layer` in a config, and the names of its parts. The caller sets the split
 *  (ari_plan_block). `name` (cap bytes) receives the block's path. */
AR_NODISCARD ar_status ari_config_block(const ar_config *c, size_t layer, ar_block_options *o, char *name, size_t cap);

AR_END_DECLS
