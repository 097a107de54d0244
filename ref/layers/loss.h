/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/layers.h"
#include "anyrank/loss.h"

/* The sum that becomes the loss: terms of several micro-batches and ranks, in the arithmetic's gradient accumulator, so
 * that it depends on none of that. It is a parameter [1] of which only the gradient is used. */

/** spread: the terms are spread over the tensor-parallel group too. ar_param_fini. */
AR_NODISCARD ar_status ari_loss_init(ar_param *sum, ar_ctx *ctx, bool spread);
/** Adds all elements of x (contiguous fp32). */
AR_NODISCARD ar_status ari_loss_add(ar_param *sum, ar_ctx *ctx, const ar_tensor *x);
/** *total: the sum over all ranks, rounded once. Collective over the groups that share the terms. */
AR_NODISCARD ar_status ari_loss_total(ar_param *sum, ar_ctx *ctx, float *total);
/** In a pipeline, where the last rank has it and has reported it, the others receive it, and report that. */
AR_NODISCARD ar_status ari_loss_share(ar_ctx *ctx, float *loss);
/** ar_loss_value, plus `extra_loss`, the losses of other parts, where there are any. */
AR_NODISCARD ar_status ari_loss_value(ar_loss *loss, ar_ctx *ctx, float *value, size_t t, double extra_loss);
/** Such a loss of another part, 0 for t = 0. Collective over dp. */
AR_NODISCARD ar_status ari_loss_part(ar_loss *loss, ar_ctx *ctx, double *part, size_t t);

/** Terms are subtracted from now on, or added again: the sum of one batch's minus another's is then rounded once. */
void ari_loss_subtract(ar_loss *loss, bool subtract);

/* --- cross-entropy ------------------------------------------------------------------------------------------------ */

/* Softmax cross-entropy over logits whose classes a group of ranks may share: the ranks exchange a maximum, an integer
 * sum and the target's logit per token, and no other logit. Label smoothing, which needs the mean of the logits, adds
 * another maximum and another sum. */

typedef struct ari_cross_entropy {
    size_t classes;      /* of all ranks */
    size_t rows;         /* logits of this rank, per token */
    size_t start, owned; /* its ids */
    ar_comm *group;      /* the group that shares the classes, borrowed; NULL: every rank has all of them */
    ar_loss_options options;
} ari_cross_entropy;

/* --- losses of models --------------------------------------------------------------------------------------------- */

typedef struct ari_head_options {
    const char *name; /* of the head that makes the logits; borrowed */
    double cap;       /* c > 0: the loss is that of c*tanh(logits/c), tapped as name.capped */
    double scale;     /* not 0: that of the logits times it, rounded to fp32, tapped as name.scaled; not with a cap */
    double weight;    /* of the gradient in that of the whole */
} ari_head_options;
/** Cross-entropy of logits, so placed, with the label of the next id (ari_batch_target). It ends the logits, whose
 *  memory their gradient gets. Errors: those of ar_loss_create. */
AR_NODISCARD ar_status ari_head_loss_create(ar_loss **out, ar_ctx *ctx, size_t classes, ar_placement logits,
                                            const ari_head_options *o);
/** The sum of a model's output [.., width]. Errors: the same. */
AR_NODISCARD ar_status ari_sum_loss_create(ar_loss **out, ar_ctx *ctx, size_t width);
