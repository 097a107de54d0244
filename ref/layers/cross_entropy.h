/* SPDX-License-Identifier: Apache-2.0 */
/* Softmax cross-entropy over logits whose classes a group of ranks may share: what crosses ranks is a maximum, an
 * integer sum and the target's logit per token, never a logit besides. */
#ifndef ARI_LAYERS_CROSS_ENTROPY_H
#define ARI_LAYERS_CROSS_ENTROPY_H

#include "anyrank/layers.h"

typedef struct ari_cross_entropy {
    size_t classes;      /* of all ranks */
    size_t rows;         /* logits of this rank, per token */
    size_t start, owned; /* its ids */
    ar_comm *over;       /* the group that shares the classes, borrowed; NULL: every rank has all of them */
} ari_cross_entropy;

/** Over the tensor-parallel group, where rank r has ids as ari_own_ids says; or (shared false) each rank by itself.
 *  `rows` are `owned` until the caller says otherwise. Nothing is to be released. */
void ari_cross_entropy_init(ari_cross_entropy *c, ar_ctx *ctx, size_t classes, bool shared);
/** *terms [n], a tensor of the step, of n tokens: logits [.., rows] contiguous, ids (host, [n]) below `classes` or
 * AR_IGNORE_INDEX. */
AR_NODISCARD ar_status ari_cross_entropy_forward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved, ar_tensor *terms,
                                                 const ar_tensor *logits, const int64_t *ids, size_t n);
/** *dlogits, of the logits' shape, of the sum of all terms over `targets`. */
AR_NODISCARD ar_status ari_cross_entropy_backward(ari_cross_entropy *c, ar_ctx *ctx, ar_saved *saved,
                                                  ar_tensor *dlogits, double targets);

#endif
