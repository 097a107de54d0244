/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_LOSS_H
#define ANYRANK_LOSS_H

#include "anyrank/module.h"

AR_BEGIN_DECLS

/* A loss function of a module's output y. The loss is the sum of the terms of all rows, micro-batches and data-parallel
 * ranks, divided by T, the number of targets of the global batch. Terms are summed like gradients, so that in exact
 * numerics the loss has the same bits however rows are distributed over ranks and micro-batches. */
typedef struct ar_loss ar_loss;
/* The functions of a user-written loss; all are required. batch->labels and batch->target are those of the positions
 * that this rank holds; without labels the next ids are the labels, AR_IGNORE_INDEX at the end. */
typedef struct ar_loss_ops {
    const char *kind; /* name of the class, such as "cross_entropy"; static storage */
    /* Returns the number of targets in the rows of `batch`, their contribution to T. */
    size_t (*targets)(const void *self, const ar_batch *batch);
    /* Computes the terms from y and adds them to the loss with ar_loss_add; saves what backward needs with
     * ar_saved_push. saved NULL: no backward pass will follow. */
    ar_status (*forward)(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                         const ar_batch *batch);
    /* Computes *dy, a tensor in step memory: the gradient of (sum of all terms)/t with respect to y; zero if t is 0. t
     * is T, or T divided by the loss scale. */
    ar_status (*backward)(void *self, ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy, const ar_batch *batch,
                          double t);
    void (*destroy)(void *self); /* frees self */
} ar_loss_ops;

/** Creates a user-written loss. `self` is passed to the functions of ops; the loss owns it and destroys it even if the
 *  creation fails. The caller releases *out with ar_loss_destroy. Errors: AR_ERR_ARG, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_loss_create(ar_loss **out, ar_ctx *ctx, const char *name, const ar_loss_ops *ops, void *self);
/** For the forward function of a user-written loss: adds all elements of `terms`, which every tensor-parallel rank
 *  computes equally (with sequence parallelism: for its own positions). In exact numerics the order of calls changes no
 *  bit. Errors: AR_ERR_SHAPE (terms are not contiguous), AR_ERR_DTYPE (terms are not AR_F32), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_loss_add(ar_loss *loss, ar_ctx *ctx, const ar_tensor *terms);
/** Creates a softmax cross-entropy with the context's ar_loss_options, of logits [.., classes]. batch->labels has one
 *  label for each row of logits (batch->batch * batch->seq; seq is 1 for one label per sample), in [0, classes) or
 *  AR_IGNORE_INDEX, which does not count; a batch of token ids without labels has each position's next token as label.
 *  T is the number of labels that count. placement: AR_HELD_WHOLE if every rank has all logits; AR_HELD_SHARD if each
 *  has a block of the classes, as from ar_logits_create, in which case the logits are not gathered. Reports the
 *  gradient of the logits to the tap as name.logits:bwd. The caller releases *out with ar_loss_destroy. Errors of its
 *  forward pass: AR_ERR_SHAPE, AR_ERR_DATA (a label out of range). */
AR_NODISCARD ar_status ar_cross_entropy_create(ar_loss **out, ar_ctx *ctx, const char *name, size_t classes,
                                               ar_held placement);
/** Creates a mean squared error: the mean of (y - batch->target)^2 over all elements of y [b, ..], which every rank has
 *  whole; batch->target is [b, target_width], T the number of elements. Reports dy to the tap as name.output:bwd. The
 *  caller releases *out with ar_loss_destroy. Errors of its forward pass: AR_ERR_SHAPE. */
AR_NODISCARD ar_status ar_squared_error_create(ar_loss **out, ar_ctx *ctx, const char *name);
/** Frees a loss. Accepts NULL. */
void ar_loss_destroy(ar_loss *loss);

/* A training step by hand (ar_module_train_step does all of it): ar_loss_zero; for each micro-batch the module's forward
 * pass, ar_loss_forward, ar_loss_backward, the module's backward pass; then ar_loss_value. own_loop.c is an example. */
/** Removes all terms. */
AR_NODISCARD ar_status ar_loss_zero(ar_loss *loss, ar_ctx *ctx);
/** Adds the terms of y, the module's output for the rows `batch` of this rank. saved NULL: no backward pass will follow.
 *  Errors: those of ar_loss_ops.forward. */
AR_NODISCARD ar_status ar_loss_forward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, const ar_tensor *y,
                                       const ar_batch *batch);
/** Computes *dy, in step memory, from what the newest ar_loss_forward saved. The divisor T is batch->targets if the
 *  batch is part of a global one (batch->global_batch > 0), else the number of its own targets. */
AR_NODISCARD ar_status ar_loss_backward(ar_loss *loss, ar_ctx *ctx, ar_saved *saved, ar_tensor *dy,
                                        const ar_batch *batch);
/** Counts the targets in the rows `batch`, their contribution to T. Errors: AR_ERR_UNSUPPORTED and AR_ERR_INDIVISIBLE
 *  (the layout shards positions that these samples do not have, or not evenly), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ar_loss_targets(size_t *targets, const ar_loss *loss, const ar_ctx *ctx, const ar_batch *batch);
/** Computes *value = fl32(sum of the terms of all data-parallel ranks / t), the same on every rank; NaN if t is 0.
 *  Reports it to the tap as "loss". Collective; call it once, after the step's last ar_loss_forward. */
AR_NODISCARD ar_status ar_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t);

AR_END_DECLS
#endif
