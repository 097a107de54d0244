/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_NORM_H
#define ARI_LAYERS_NORM_H

#include "anyrank/layers.h"

/** Backward with the residual in the same pass: dx = the norm's own gradient (tapped), *sum = residual + dx.
 *  residual NULL: sum is not written. */
AR_NODISCARD ar_status ari_norm_backward(ar_module *norm, ar_ctx *ctx, ar_saved *saved, ar_tensor *dx, ar_tensor *sum,
                                         const ar_tensor *dy, const ar_tensor *residual);

#endif
