/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_TRAIN_SCALING_H
#define ARI_TRAIN_SCALING_H

#include "anyrank/train.h"

/* Loss scaling within a training step. */

/** Errors: AR_ERR_ARG (ar_loss_scaling_check; exact numerics). */
AR_NODISCARD ar_status ari_scaling_check(const ar_loss_scaling *s, const ar_ctx *ctx);
/** From here on ar_param_grad_value gives the gradients without the scale. */
void ari_scaling_unscale(const ar_loss_scaling *s, ar_param *const *params, size_t n);
/** Whether the norm of the gradients is finite on every rank of the context's groups; the same answer on each.
 *  Collective over the tensor-parallel and the data-parallel group. */
AR_NODISCARD ar_status ari_scaling_finite(bool *finite, ar_ctx *ctx, float norm);
/** The scale of the next step. Errors: AR_ERR_DATA (gradients that are not finite, and a scale that may not fall). */
AR_NODISCARD ar_status ari_scaling_next(ar_loss_scaling *s, const ar_ctx *ctx, bool finite);

#endif
