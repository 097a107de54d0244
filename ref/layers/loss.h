/* SPDX-License-Identifier: Apache-2.0 */
/* The sum that becomes the loss: terms of several micro-batches and ranks, in the arithmetic's gradient accumulator, so
 * that it depends on none of that. */
#ifndef ARI_LAYERS_LOSS_H
#define ARI_LAYERS_LOSS_H

#include "anyrank/layers.h"

typedef struct ari_loss {
    ar_param sum; /* [1]: only its gradient is used */
} ari_loss;

/** spread: the terms are spread over the tensor-parallel group too. On failure nothing is left to release. */
AR_NODISCARD ar_status ari_loss_init(ari_loss *l, ar_ctx *ctx, bool spread);
void ari_loss_fini(ari_loss *l);
AR_NODISCARD ar_status ari_loss_zero(ari_loss *l, ar_ctx *ctx);
/** Adds all elements of x (contiguous fp32). */
AR_NODISCARD ar_status ari_loss_add(ari_loss *l, ar_ctx *ctx, const ar_tensor *x);
/** *loss = fl32(sum / divisor), NaN for a divisor of 0, the mean of nothing; tapped as "loss". Collective over the
 * groups that share the terms. */
AR_NODISCARD ar_status ari_loss_value(ari_loss *l, ar_ctx *ctx, float *loss, double divisor);

#endif
