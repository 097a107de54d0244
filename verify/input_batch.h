/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_INPUT_BATCH_H
#define ARI_VERIFY_INPUT_BATCH_H

#include "anyrank/batch.h"
#include "anyrank/config.h"

/* A batch read from a file, with the arrays it owns. */
typedef struct ari_input_batch {
    ar_batch batch;
    int64_t *ids, *labels;
    uint8_t *padding;
    float *additive;
} ari_input_batch;

/** input_ids [b, s]; optionally labels [b, s] and attention_mask: [b, s] of 0 and 1, or additive [b|1, heads|1, s, s].
 *  Errors: those of the file; AR_ERR_NOT_FOUND, AR_ERR_SHAPE, AR_ERR_DTYPE, AR_ERR_DATA by tensor and index. */
AR_NODISCARD ar_status ari_input_batch_load(ari_input_batch *b, const ar_config *c, const char *path);
void ari_input_batch_fini(ari_input_batch *b);

#endif
