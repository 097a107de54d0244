/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a data-parallel object: on its buckets, what is reduced and gathered together. */
#pragma once

#include "ref/train/ddp.h"

/** Which parameters are of which unit. Errors: AR_ERR_ARG (a module that is NULL or a unit already), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_units_init(ar_ddp *d);
void ari_units_free(ar_ddp *d);
/** At the start of a step: nothing is held, nothing under way. */
AR_NODISCARD ar_status ari_units_start(ar_ddp *d);
/** Reduces what is left, and enqueues the completion of all shares. */
AR_NODISCARD ar_status ari_units_finish(ar_ddp *d);

/** ZeRO-3: from here on the parameters have their shares. */
AR_NODISCARD ar_status ari_weights_share(ar_ddp *d);
/** Makes the values of a unit whole, and begins to gather those of the unit that comes next in this pass. */
AR_NODISCARD ar_status ari_weights_take(ari_unit *u, ar_pass pass);
void ari_weights_release(ari_unit *u);
AR_NODISCARD ar_status ari_weights_start(ar_ddp *d);
AR_NODISCARD ar_status ari_weights_finish(ar_ddp *d);
void ari_weights_free(ari_unit *u);

/* Work of a step around its backward passes, for the units of one of its stages. d NULL, and below ZeRO-2: none. */

/** Before a backward pass of the stage; weights: one of deferred gradients of weights, in which no module runs. */
AR_NODISCARD ar_status ari_ddp_begin_backward(ar_ddp *d, int stage, bool weights);
/** After it, unless the gradients of weights come in another pass (ar_ctx.deferred): the stage's that are due are
 *  reduced. */
AR_NODISCARD ar_status ari_ddp_end_backward(ar_ddp *d, int stage);
/** The same calls to the other ranks as a pass that they make through a micro-batch that this rank has not; after a
 *  backward pass ari_ddp_end_backward, or that of the weights, comes as after theirs. */
AR_NODISCARD ar_status ari_ddp_absent_forward(ar_ddp *d, int stage);
AR_NODISCARD ar_status ari_ddp_absent_backward(ar_ddp *d, int stage);

/* --- on both ------------------------------------------------------------------------------------------------------ */

/** Fills slots, bucketed, offsets and buckets from params and options, without storage. Errors: AR_ERR_MEMORY,
 *  AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_buckets_plan(ar_ddp *d);
/** Checks that the data-parallel ranks wrap the same parameters with the same options. Collective over them. Errors:
 *  AR_ERR_MISMATCH, with the same message on all. */
AR_NODISCARD ar_status ari_ddp_agree(ar_ddp *d);

/** Checks that every parameter of a bucket got a gradient here, or none did. Errors: AR_ERR_DATA, naming those
 *  without. */
AR_NODISCARD ar_status ari_ddp_check_all_used(const ar_ddp *d);
/** Marks what got a gradient here, and with find_unused and peers enqueues the agreement. */
AR_NODISCARD ar_status ari_ddp_agree_used(ar_ddp *d);
/** Checks that a step in ctx that trains these parameters can leave their reductions to d alone; d NULL: to no object.
 *  Errors: AR_ERR_ARG. */
AR_NODISCARD ar_status ari_ddp_check_step(const ar_ddp *d, const ar_ctx *ctx, ar_param *const *params, size_t n);

/** After the queue: has_grad and the scale of every parameter, and the list of the unused ones. */
void ari_ddp_complete(ar_ddp *d, bool mean);
