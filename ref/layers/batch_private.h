/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "anyrank/batch.h"

/* Private functions of anyrank/batch.h, used by the library, the command and the tests. */

AR_BEGIN_DECLS

/** Checks that `documents` numbers the documents of every row 0, 1, .. in order, that all `position_ids` are in [0,
 *  positions), and that `additive_mask` has these rows and contains neither NaN nor +inf. Errors: AR_ERR_DATA (names
 *  the row, the position and the values), AR_ERR_SHAPE (the mask). */
AR_NODISCARD ar_status ari_batch_check(const ar_batch *b, size_t positions);
/** Finds the document of a row that contains position `pos`: positions [*begin, *end), the full row without documents.
 *  It is a binary search: `b` is one that ari_batch_check accepts. 0 <= row < batch, 0 <= pos < seq. */
void ari_batch_document(const ar_batch *b, size_t row, size_t pos, size_t *begin, size_t *end);
/** Returns the position of the token at index `pos` of a row for rotary and learned positions: position_ids, or its
 *  index in its document. */
size_t ari_batch_position(const ar_batch *b, size_t row, size_t pos);
/** Returns the largest position of the global batch plus 1: the length that rotary frequencies depend on if they depend
 *  on the length. `longest` if it is set. */
size_t ari_batch_longest(const ar_batch *b);
/** Returns the number of tokens of the global batch that are not masked (padding_mask), over which routers' losses are
 *  averaged. `tokens` if it is set. */
size_t ari_batch_tokens(const ar_batch *b);
/** Target of position `pos` of a row: the label of the next position, AR_IGNORE_INDEX at the end of a document. */
int64_t ari_batch_target(const ar_batch *b, size_t row, size_t pos);
/** Returns the number of positions that predict a token: the T of one batch. */
size_t ari_batch_targets(const ar_batch *b);
/** Shifts a batch by `depth` positions: ids and labels are those `depth` positions later in the same document, in all
 *  rows and before ranks shard it; at the end id 0 and no label. *out borrows from `b` and from *memory, which the
 *  caller releases with free(). 1 <= depth <= AR_MAX_MTP. Errors: AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_batch_roll(ar_batch *out, int64_t **memory, const ar_batch *b, size_t depth);

AR_END_DECLS
