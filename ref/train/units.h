/* SPDX-License-Identifier: Apache-2.0 */
/* Units of a data-parallel object: built on its buckets, they are reduced and gathered together. */
#pragma once

#include "ref/train/ddp.h"

/** Assigns each parameter to its unit. Errors: AR_ERR_ARG (a module is NULL or already a unit), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_units_init(ar_ddp *d);
void ari_units_free(ar_ddp *d);
/** Resets the units at the start of a step: nothing is stored, and nothing is in flight. */
AR_NODISCARD ar_status ari_units_start(ar_ddp *d);
/** Reduces the remaining buckets and enqueues the completion of all shares. */
AR_NODISCARD ar_status ari_units_finish(ar_ddp *d);

/** ZeRO-3: replaces the parameters' values by their shards. */
AR_NODISCARD ar_status ari_weights_share(ar_ddp *d);

/* Work of a step around its backward passes, for the units of one of its stages. If d is NULL, and below ZeRO-2, there
 * is none. */

/** Called before a backward pass of a stage; weights: a pass that computes deferred weight gradients, in which no
 *  module runs. */
AR_NODISCARD ar_status ari_ddp_begin_backward(ar_ddp *d, int stage, bool weights);
/** Called after the pass, unless weight gradients come in another pass (ar_ctx.deferred): reduces the stage's completed
 *  gradients. */
AR_NODISCARD ar_status ari_ddp_end_backward(ar_ddp *d, int stage);
/** Make the same collective calls as a pass that the other ranks run through a micro-batch that this rank does not
 *  have. After a backward pass, ari_ddp_end_backward (or the one for weights) follows as on the other ranks. */
AR_NODISCARD ar_status ari_ddp_absent_forward(ar_ddp *d, int stage);
AR_NODISCARD ar_status ari_ddp_absent_backward(ar_ddp *d, int stage);

/* --- on both ------------------------------------------------------------------------------------------------------ */

/** Fills slots, bucketed, offsets and buckets from params and options, without storage. Errors: AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_buckets_plan(ar_ddp *d);

/** Checks that a step in ctx that trains these parameters may leave all their reductions to d; d NULL: to no object.
 *  Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_ddp_check_step(const ar_ddp *d, const ar_ctx *ctx, ar_param *const *params, size_t n);

/** After the queue has finished, sets has_grad and the scale of every parameter, and the list of unused parameters. */
void ari_ddp_complete(ar_ddp *d);
