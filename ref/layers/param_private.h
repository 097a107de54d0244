/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/param.h"

/* Private functions of anyrank/param.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Draws initial values: element i of the FULL tensor depends only on (seed, name, i), never on the layout. */
AR_NODISCARD ar_status ari_param_fresh(ar_param *p, ar_ctx *ctx, uint64_t seed);
/** Counts one more use in a forward pass that a backward pass will follow; ar_module_forward counts those of a module's
 *  own parameters. */
void ari_param_use(ar_param *p);
/** Records that one use's gradient has been added. When no use is left it calls the hooks in the order in which they
 *  were added: the gradient so far is then complete on this rank. ar_module_backward calls it for a module's own
 *  parameters. Errors: those of the first failing hook. */
AR_NODISCARD ar_status ari_param_done(ar_param *p, ar_ctx *ctx);
/** Completes the gradients after the last backward pass of a step. Each one is summed over the data-parallel group, and
 *  over the tensor-parallel group if its terms are spread, the last parameter first. Then has_grad tells whether any
 *  rank got a gradient, by an all-reduce(max) of a bitmap, and each gradient is tapped as ':grad'.
 *  Collective over the groups of the context. */
AR_NODISCARD ar_status ari_params_reduce(ar_param *const *params, size_t n, ar_ctx *ctx);
/** A tap ':grad' of each complete gradient, the last parameter first. */
AR_NODISCARD ar_status ari_params_tap_grads(ar_param *const *params, size_t n, ar_ctx *ctx);
/** Broadcasts values from each group's data-parallel rank 0 to all its ranks, so that every rank starts from the same
 *  weights. Increments the version. */
AR_NODISCARD ar_status ari_params_broadcast(ar_param *const *params, size_t n, ar_ctx *ctx);
/** Taps a value of the parameter's shape (its value or gradient) with the layout of all copies on the ranks. */
AR_NODISCARD ar_status ari_param_tap(const ar_param *p, ar_ctx *ctx, char pass, const ar_tensor *t);
/** The gradient becomes zero, no use is pending. */
AR_NODISCARD ar_status ari_param_zero_grad(ar_param *p, ar_ctx *ctx);

AR_END_DECLS
