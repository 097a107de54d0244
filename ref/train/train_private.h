/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/train.h"

/* Functions of anyrank/train.h for the library, the command and the tests alone. */

AR_BEGIN_DECLS

/** ZeRO: the same updates, each of the data-parallel ranks those of its shares of the buckets of `ddp` (made with a
 *  zero of 1 to 3), whose weights the others then get from it, below stage 3. Borrows ddp until ar_optimizer_destroy.
 *  Errors: as above, and AR_ERR_ARG (a ddp without zero). */
AR_NODISCARD ar_status ari_optimizer_create_sharded(ar_optimizer **gives, ar_ctx *ctx, ar_ddp *ddp,
                                                    const ar_optimizer_options *o);
/** The gradient norm over all parameters and ranks, each element of the full tensors once: sqrt(sum g^2) as
 *  numerics.md, section 4, sums it. Same bits on every rank. Gradients must have been reduced;
 *  parameters that require none do not count. NaN where one is not finite. Collective over the tensor-parallel group,
 *  and where gradients are shared out (ar_param.sharded) over the data-parallel one. */
AR_NODISCARD ar_status ari_gradient_norm(float *norm, ar_ctx *ctx, ar_param *const *params, size_t n);
/** Calls emit for all state that this rank keeps. Errors: emit's. */
AR_NODISCARD ar_status ari_optimizer_save(ar_optimizer *o, ar_ctx *ctx, ar_optimizer_state_fn emit, void *user);
/** Puts back what ari_optimizer_save gave after `steps` steps, under this or any other layout: find(user, name of the
 *  parameter, state, count) returns `count` fp32 values of the full tensor, row-major, borrowed, or NULL (then
 *  AR_ERR_NOT_FOUND). */
AR_NODISCARD ar_status ari_optimizer_load(ar_optimizer *o, ar_ctx *ctx, uint64_t steps,
                                          const float *(*find)(void *user, const char *param, const char *state,
                                                               size_t count),
                                          void *user);
/** Steps taken. */
uint64_t ari_optimizer_steps(const ar_optimizer *o);
/** Bytes of state. */
size_t ari_optimizer_bytes(const ar_optimizer *o);
/** Those of PyTorch's GradScaler: growth 2, backoff 0.5, interval 2000, S 65536. */
ar_loss_scaling ari_loss_scaling_defaults(bool dynamic);
/** Errors: AR_ERR_ARG, naming the option: 1 <= scale <= 2^126; dynamic: growth > 1, 0 < backoff < 1, interval >= 1. */
AR_NODISCARD ar_status ari_loss_scaling_check(const ar_loss_scaling *s);

AR_END_DECLS
