/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_TRAIN_ZERO_H
#define ARI_TRAIN_ZERO_H

#include "anyrank/train.h"
#include "ref/numerics/optimizer.h"

/* ZeRO stage 1: the state of this rank's shares of the buckets, and the update of all of a bucket's weights by all
 * data-parallel ranks together. The optimizer that owns it has the options and the clock. */
typedef struct ari_zero ari_zero;

/** Borrows ddp. Gives; ari_zero_destroy. Errors: AR_ERR_ARG (a ddp without zero), AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_zero_create(ari_zero **gives, ar_ctx *ctx, ar_ddp *ddp, const ar_optimizer_options *o);
/** Accepts NULL. */
void ari_zero_destroy(ari_zero *z);
/** Begins a step of the clock, updates the shares, gets the others' from their ranks, and taps ':new',
 *  and ':m' and ':v' of the shares.
 *  Collective over the data-parallel group. */
AR_NODISCARD ar_status ari_zero_step(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o,
                                     ari_optimizer_clock *clock, float scale);
/** As ar_optimizer_save and ar_optimizer_load have it. */
AR_NODISCARD ar_status ari_zero_save(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o,
                                     ar_optimizer_state_fn emit, void *user);
AR_NODISCARD ar_status ari_zero_load(ari_zero *z, ar_ctx *ctx, const ar_optimizer_options *o,
                                     const float *(*find)(void *user, const char *param, const char *state,
                                                          size_t count),
                                     void *user);
/** Bytes of state. */
size_t ari_zero_bytes(const ari_zero *z);

#endif
