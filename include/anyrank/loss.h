/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LOSS_H
#define ANYRANK_LOSS_H

#include "anyrank/module.h"

AR_BEGIN_DECLS

/* The loss of a module's output: the terms of all rows, micro-batches and data-parallel ranks, summed and divided by T,
 * the targets of the whole global batch. The sum is the arithmetic's gradient accumulator, so that in the exact
 * numerics it has the same bits however the rows are shared out. */
typedef struct ar_loss ar_loss;
typedef struct ar_loss_ops {
    const char *kind; /* static storage: "cross_entropy" */
    /* required: what these rows of the batch add to T. Of all three, batch->labels and ->target are those of the positions
     * that the rank has, and without labels the labels are the next ids: AR_IGNORE_INDEX for the last position */
    size_t (*targets)(const void *self, const ar_batch *batch);
    /* required: gives the terms of y to ari_loss_add_terms, and keeps with ar_saved_push what backward needs. saved NULL: none
     * will follow */
    ar_status (*forward)(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                         const ar_batch *batch);
    /* required: *dy, a tensor of the step, is the gradient of the sum of all terms over t (of 0: zero), which is T, or
     * with loss scaling T over the scale */
    ar_status (*backward)(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch,
                          double t);
    void (*destroy)(void *self); /* required; frees self */
} ar_loss_ops;

/** A loss of one's own; `self` is passed to its functions. It belongs to the loss even where this fails. Gives;
 *  ar_loss_destroy. Errors: AR_ERR_ARG, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_loss_create(ar_loss **out, ar_ctx *ctx, const char *name, const ar_loss_ops *ops, void *self);
/** Softmax cross-entropy, as the context's ar_loss_options have it, of logits [.., classes] with batch->labels, one for
 *  each row of logits: batch->batch * batch->seq of them (seq 1: one for each sample), from 0 to classes - 1 or
 *  AR_IGNORE_INDEX, which does not count; of a batch of ids without labels, with the next id (ari_batch_target). T counts
 *  the others. held: AR_HELD_WHOLE, every rank has all logits;
 *  AR_HELD_SHARD, its block of the classes, as ar_logits_create leaves them: no logit then crosses ranks. Taps:
 *  name.logits:bwd. Errors: of forward AR_ERR_SHAPE, AR_ERR_DATA (a label that is no class). */
AR_NODISCARD ar_status ar_cross_entropy_create(ar_loss **out, ar_ctx *ctx, const char *name, size_t classes,
                                               ar_held placement);
/** (y - t)^2 of every element of y [b, ..] with batch->target [b, target_width]; T counts elements, so that this is
 *  their mean. y is whole on every rank. Taps: name.output:bwd. Errors: of forward AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_squared_error_create(ar_loss **out, ar_ctx *ctx, const char *name);
/** Accepts NULL. */
void ar_loss_destroy(ar_loss *loss);

AR_END_DECLS
#endif
