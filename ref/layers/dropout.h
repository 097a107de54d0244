/* SPDX-License-Identifier: Apache-2.0 */
/* Dropout (Srivastava et al. 2014): a place in the model where elements are dropped. A mask depends on the seed, the
 * place's name, the step and the element's place in the global batch, never on who computes it; so ranks that hold
 * the same value drop the same elements, and a backward pass draws the mask again. */
#ifndef ARI_LAYERS_DROPOUT_H
#define ARI_LAYERS_DROPOUT_H

#include "anyrank/layers.h"

/* Names of the places below a module's path. */
#define ARI_DROPPED_PROBS "attn_dropout"      /* below the attention: its probabilities */
#define ARI_DROPPED_ATTENTION "resid_dropout" /* below the attention: its output */
#define ARI_DROPPED_MLP "dropout"             /* below the MLP: its output */

typedef struct ari_dropout {
    char name[128];   /* of the value after it, and of its random stream */
    size_t width;     /* features, or heads */
    size_t positions; /* S_max: an element's number counts these, whatever the batch's sequences have */
} ari_dropout;

/** Errors: AR_ERR_ARG (name too long). */
AR_NODISCARD ar_status ari_dropout_init(ari_dropout *d, const char *base, const char *part, size_t width,
                                        size_t positions);
/** Whether anything is dropped in this context. */
bool ari_dropout_on(const ar_ctx *ctx);
/** y = drop(x) for a value between the regions, [samples, positions, width] (sp: the own positions), contiguous; y may
 *  be x. Forward x is the value, backward the gradient of what came out. Tapped under the name in this pass ('\0':
 * not). Errors: AR_ERR_SHAPE (more positions than S_max), AR_ERR_OVERFLOW (an element's number does not fit 64
 * bits). */
AR_NODISCARD ar_status ari_drop_tokens(const ari_dropout *d, ar_ctx *ctx, char pass, const ar_tensor *y,
                                       const ar_tensor *x);
/** The same for a value [samples, width] or [samples, positions, width], or (sharded) the tensor-parallel rank's block
 * of its features. With sequence parallelism a whole one has the own positions. Not tapped. */
AR_NODISCARD ar_status ari_drop_features(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x,
                                         bool sharded);
/** The same for a value [samples, heads of this rank, queries, keys], whose first head is `head_start` of `width`. Not
 *  tapped. */
AR_NODISCARD ar_status ari_drop_heads(const ari_dropout *d, ar_ctx *ctx, const ar_tensor *y, const ar_tensor *x,
                                      size_t head_start);

#endif
