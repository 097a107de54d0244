/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/layers.h"
#include "anyrank/loss.h"

/* Sum that becomes the loss: terms of several micro-batches and ranks in the arithmetic's gradient accumulator, so that
 * it depends on neither. It is a parameter [1] of which only the gradient is used. */

/** Initialises a loss's sum. spread: the terms are also distributed over the tensor-parallel group. The caller ends it
 *  with ar_param_fini. */
AR_NODISCARD ar_status ari_loss_init(ar_param *sum, ar_ctx *ctx, bool spread);
/** Adds all elements of x (contiguous fp32). */
AR_NODISCARD ar_status ari_loss_add(ar_param *sum, ar_ctx *ctx, const ar_tensor *x);
/** Computes *total, the sum over all ranks, rounded once. Collective over the groups that share the terms. */
AR_NODISCARD ar_status ari_loss_total(ar_param *sum, ar_ctx *ctx, float *total);
/** Sends the loss from the last rank of a pipeline, which has reported it, to the other ranks, which report it then. */
AR_NODISCARD ar_status ari_loss_share(ar_ctx *ctx, float *loss);
/** Computes ar_loss_value plus `extra_loss`, the losses of other parts, if there are any. */
AR_NODISCARD ar_status ari_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t, double extra_loss);
/** Such a loss of another part, 0 for t = 0. Collective over dp. */
AR_NODISCARD ar_status ari_loss_part(ar_loss *loss, ar_ctx *ctx, double *part, size_t t);

/** Subtracts terms from now on, or adds them again, so that the difference of two batches' sums is rounded only
 *  once. */
void ari_loss_subtract(ar_loss *loss, bool subtract);

/* --- cross-entropy ------------------------------------------------------------------------------------------------ */

/* Softmax cross-entropy over logits whose classes a group of ranks may share. Per token, the ranks exchange a maximum,
 * an integer sum and the target's logit, and no other logit. Label smoothing needs the mean of the logits, which takes
 * another maximum and another sum. */

typedef struct ari_cross_entropy {
    size_t classes;      /* number of classes over all ranks */
    size_t rows;         /* logits of this rank, per token */
    size_t start, owned; /* first id and number of ids on this rank */
    ar_comm *group;      /* group that shares the classes; borrowed; NULL: every rank has all classes */
    ar_loss_options options;
} ari_cross_entropy;

/* --- losses of models --------------------------------------------------------------------------------------------- */

typedef struct ari_head_options {
    const char *name; /* name of the head that computes the logits; borrowed */
    double cap;       /* c > 0: the loss is that of c*tanh(logits/c), tapped as name.capped */
    double scale;     /* factor of the logits unless 0, rounded to fp32, tapped as name.scaled; not together with a
                         cap */
    double weight;    /* weight of this loss's gradient in the total */
} ari_head_options;
/** Creates the cross-entropy of logits, placed as given, with the next id as label (ari_batch_target). It releases the
 *  logits, and their gradient reuses the memory. Errors: those of ar_loss_create. */
AR_NODISCARD ar_status ari_head_loss_create(ar_loss **out, ar_ctx *ctx, size_t classes, ar_placement logits,
                                            const ari_head_options *o);
/** The sum of a model's output [.., width]. Errors: the same. */
AR_NODISCARD ar_status ari_sum_loss_create(ar_loss **out, ar_ctx *ctx, size_t width);
