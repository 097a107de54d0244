/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_GRADS_INPUT_BATCH_H
#define ARI_VERIFY_GRADS_INPUT_BATCH_H

#include "anyrank/batch.h"
#include "anyrank/config.h"

/* A batch read from a file, with the arrays it owns. */
typedef struct ari_input_batch {
    ar_batch batch;
    int64_t *ids, *labels, *positions;
    uint8_t *padding;
    float *additive;
    char note[3][320]; /* what somebody may not expect of it; "" */
} ari_input_batch;

/** input_ids [b, s]; optionally labels [b, s], position_ids [b|1, s], and attention_mask: [b, s] of 0 and 1, or
 * additive [b|1, heads|1, s, s]. Errors: those of the file; AR_ERR_NOT_FOUND, AR_ERR_SHAPE, AR_ERR_DTYPE, AR_ERR_DATA
 * by tensor and index; AR_ERR_UNSUPPORTED (any other tensor, which would go unread; positions of a model without). */
AR_NODISCARD ar_status ari_input_batch_load(ari_input_batch *b, const ar_config *c, const char *path);
void ari_input_batch_fini(ari_input_batch *b);

#endif
