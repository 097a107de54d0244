/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_VERIFY_CHECK_TEXT_BATCH_H
#define ARI_VERIFY_CHECK_TEXT_BATCH_H

#include "anyrank/batch.h"
#include "anyrank/status.h"

/** input_ids [batch, seq] cut from a text, one byte one token (modulo the vocabulary), row after row from a place that
 * the seed decides (0: the start), around the end. Gives; free(). Errors: those of reading the text,
 * AR_ERR_OVERFLOW. */
AR_NODISCARD ar_status ari_text_ids(int64_t **gives, size_t batch, size_t seq, size_t vocab, const char *text,
                                    uint64_t seed);

#endif
