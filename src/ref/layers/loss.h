/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_LAYERS_LOSS_H
#define ARI_LAYERS_LOSS_H

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
/** *loss = fl32(sum / divisor), NaN for a divisor of 0, the mean of nothing; plus `more`, the losses of other parts, where
 *  there are any, rounded again; tapped as "loss". Collective over the groups that share the terms. */
AR_NODISCARD ar_status ari_loss_value(ar_param *sum, ar_ctx *ctx, float *loss, double divisor, double more);
/** In a pipeline, where the last rank has it and has reported it, the others receive it, and report that. */
AR_NODISCARD ar_status ari_loss_share(ar_ctx *ctx, float *loss);
/** ar_loss_value, and the losses of the routers of m. */
AR_NODISCARD ar_status ari_loss_value_with(ar_loss *loss, ar_ctx *ctx, float *value, size_t t, ar_module *m);

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
    ar_comm *over;       /* the group that shares the classes, borrowed; NULL: every rank has all of them */
    ar_loss_options options;
} ari_cross_entropy;

/** Over the tensor-parallel group, where rank r has ids as ari_own_ids says; or (shared false) each rank by itself.
 *  `rows` are `owned` until the caller says otherwise. Nothing is to be released. */
void ari_cross_entropy_init(ari_cross_entropy *c, ar_ctx *ctx, size_t classes, bool shared);
/** *terms [n], a tensor of the step, of n tokens: logits [.., rows] contiguous, ids (host, [n]) below `classes` or
 * AR_IGNORE_INDEX. */
AR_NODISCARD ar_status ari_cross_entropy_forward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *terms,
                                                 const ar_tensor *logits, const int64_t *ids, size_t n);
/** *dlogits, of the logits' shape, of the sum of all terms over `targets`; in_place: in the memory of the logits, which
 *  are the caller's own. Releases what else the forward pass kept. */
AR_NODISCARD ar_status ari_cross_entropy_backward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved,
                                                  ar_tensor *dlogits, double targets, bool in_place);

/** The weight of a head's loss in that of the model, 1 at first; and that part, 0 without targets. Collective over dp. */
void ari_lm_head_weigh(ar_lm_head *l, double weight);
AR_NODISCARD ar_status ari_lm_head_share(ar_lm_head *l, ar_ctx *ctx, double *share, size_t targets);

#endif
