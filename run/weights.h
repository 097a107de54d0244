/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_RUN_WEIGHTS_H
#define ARI_RUN_WEIGHTS_H

#include "anyrank/config.h"

/* A model folder's weights as fp32, checked against its config. */
typedef struct ari_weights ari_weights;

/** Reads model.safetensors or its shards. *gives = NULL with AR_OK where the folder has no weights, or `folder` is a
 *  config file. Errors: those of the files; AR_ERR_NOT_FOUND (a parameter missing), AR_ERR_SHAPE, AR_ERR_DTYPE,
 *  AR_ERR_DATA (NaN or infinity, with its index, or a head of other bits than the embedding that it is tied to),
 *  AR_ERR_FORMAT (a tensor the model does not have); each names the tensor. AR_ERR_FORMAT too where the folder has
 *  weights in files that are not read: they are named. */
AR_NODISCARD ar_status ari_weights_load(ari_weights **gives, const ar_config *c, const char *folder);
void ari_weights_destroy(ari_weights *w);
/** By Hugging Face name; NULL if there is none of `count` elements. user: an ari_weights. */
const float *ari_weights_find(void *user, const char *name, size_t count);

#endif
