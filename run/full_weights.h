/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_FULL_WEIGHTS_H
#define ARI_RUN_FULL_WEIGHTS_H

#include "anyrank/model.h"

/* A model's full tensors, put together from what the ranks hold. The ranks share one; each writes its own boxes. */
typedef struct ari_full_weights ari_full_weights;

/** Room for every parameter of a config. Gives. Errors: AR_ERR_MEMORY, AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_full_weights_create(ari_full_weights **gives, const ar_config *c);
/** Accepts NULL. */
void ari_full_weights_destroy(ari_full_weights *w);
/** Takes this rank's part of every parameter; then every copy is compared with what was taken. Collective over the
 *  world of the context. Errors: AR_ERR_DATA (a copy has other bits: names parameter and rank), AR_ERR_INTERNAL. */
AR_NODISCARD ar_status ari_full_weights_take(ari_full_weights *w, ar_ctx *ctx, ar_param *const *params, size_t n);
/** The hash of all of them, ari_tensors_hash. After all ranks have taken. */
AR_NODISCARD ar_status ari_full_weights_hash(const ari_full_weights *w, char hex[65]);

#endif
