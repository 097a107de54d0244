/* SPDX-License-Identifier: Apache-2.0 */
/* Document, position and target of each place of a batch. */
#include "anyrank/batch.h"

#include <math.h>
#include <stdbool.h>

#include "ref/core/size.h"
#include "ref/layers/batch_private.h"

static ar_status check_documents(const int32_t *documents, size_t row, size_t seq)
{
    for (size_t pos = 0; pos < seq; pos++) {
        const int32_t previous = pos > 0 ? documents[pos - 1] : 0;
        if (pos == 0 && documents[0] != 0)
            return ar_error_set(AR_ERR_DATA, "documents[%zu, 0] is %d: the documents of a row are numbered from 0", row,
                                (int)documents[0]);
        if (documents[pos] != previous && (int64_t)documents[pos] != (int64_t)previous + 1)
            return ar_error_set(AR_ERR_DATA,
                                "documents[%zu, %zu] is %d after %d: the documents of a row are numbered 0, 1, 2, ..",
                                row, pos, (int)documents[pos], (int)previous);
    }
    return AR_OK;
}

static ar_status check_mask(const ar_batch *b)
{
    const size_t n = b->mask_batch, plane = b->seq * b->seq;
    if ((n != 1 && n != b->batch) || b->mask_heads == 0)
        return ar_error_set(AR_ERR_SHAPE, "additive_mask is [%zu, %zu, s, s], expected [1 or %zu, 1 or the heads]", n,
                            b->mask_heads, b->batch);
    for (size_t i = 0; i < n * b->mask_heads * plane; i++) {
        const float x = b->additive_mask[i];
        if (isnan(x) || x == INFINITY)
            return ar_error_set(AR_ERR_DATA, "additive_mask[%zu, %zu, %zu, %zu] is %g, expected a finite value or -inf",
                                i / plane / b->mask_heads, i / plane % b->mask_heads, i / b->seq % b->seq, i % b->seq,
                                (double)x);
    }
    return AR_OK;
}

ar_status ari_batch_check(const ar_batch *b, size_t positions)
{
    AR_TRY(b->additive_mask && b->batch > 0 ? check_mask(b) : AR_OK);
    for (size_t row = 0; b->documents && row < b->batch; row++)
        AR_TRY(check_documents(b->documents + row * b->seq, row, b->seq));
    for (size_t i = 0; b->position_ids && i < b->batch * b->seq; i++) {
        if (b->position_ids[i] < 0 || (uint64_t)b->position_ids[i] >= positions)
            return ar_error_set(AR_ERR_DATA, "position_ids[%zu, %zu] is %lld, the model has %zu positions", i / b->seq,
                                i % b->seq, (long long)b->position_ids[i], positions);
    }
    return AR_OK;
}

/* Returns the first position in [begin, end) whose document number is at least `number`, or `end`. */
static size_t first_of(const int32_t *documents, size_t begin, size_t end, int64_t number)
{
    ARI_BISECT(begin, end, i, documents[i] < number)
    return begin;
}

void ari_batch_document(const ar_batch *b, size_t row, size_t pos, size_t *begin, size_t *end)
{
    *begin = 0;
    *end = b->seq;
    if (!b->documents)
        return;
    const int32_t *documents = b->documents + row * b->seq;
    *begin = first_of(documents, 0, pos, documents[pos]);
    *end = first_of(documents, pos, b->seq, (int64_t)documents[pos] + 1);
}

size_t ari_batch_position(const ar_batch *b, size_t row, size_t pos)
{
    size_t begin, end;
    if (b->position_ids)
        return (size_t)b->position_ids[row * b->seq + pos];
    ari_batch_document(b, row, pos, &begin, &end);
    return pos - begin;
}

/* The length of the longest document of the rows. */
static size_t longest_document(const ar_batch *b)
{
    size_t longest = 0;
    for (size_t i = 0, length = 0; i < b->batch * b->seq; i++) {
        length = i % b->seq == 0 || b->documents[i] != b->documents[i - 1] ? 1 : length + 1;
        longest = length > longest ? length : longest;
    }
    return longest;
}

size_t ari_batch_tokens(const ar_batch *b)
{
    const size_t total = b->batch * b->seq;
    size_t count = 0;
    if (b->tokens > 0)
        return b->tokens;
    for (size_t i = 0; i < total && b->padding_mask; i++)
        count += b->padding_mask[i] != 0;
    return b->padding_mask ? count : total;
}

size_t ari_batch_longest(const ar_batch *b)
{
    size_t longest = b->longest;
    if (longest > 0)
        return longest;
    for (size_t i = 0; b->position_ids && i < b->batch * b->seq; i++)
        longest = (size_t)b->position_ids[i] >= longest ? (size_t)b->position_ids[i] + 1 : longest;
    if (b->position_ids)
        return longest;
    return b->documents ? longest_document(b) : b->seq;
}

int64_t ari_batch_target(const ar_batch *b, size_t row, size_t pos)
{
    const int64_t *labels = b->labels ? b->labels : b->input_ids;
    const size_t i = row * b->seq + pos;
    const bool is_bounded = b->documents && !b->targets_cross;
    const bool is_last = pos + 1 == b->seq || (is_bounded && b->documents[i + 1] != b->documents[i]);
    return is_last ? AR_IGNORE_INDEX : labels[i + 1];
}

size_t ari_batch_targets(const ar_batch *b)
{
    size_t count = 0;
    for (size_t i = 0; i < b->batch * b->seq; i++)
        count += ari_batch_target(b, i / b->seq, i % b->seq) != AR_IGNORE_INDEX;
    return count;
}

ar_status ari_batch_roll(ar_batch *out, int64_t **memory, const ar_batch *b, size_t depth)
{
    const size_t n = b->batch * b->seq;
    const int64_t *labels = b->labels ? b->labels : b->input_ids;
    int64_t *ids = NULL;
    AR_TRY(ARI_ALLOC(&ids, 2 * n, "rolled tokens"));
    for (size_t i = 0; i < n; i++) {
        const bool row = i % b->seq + depth < b->seq;
        const bool is_inside = row && (!b->documents || b->documents[i + depth] == b->documents[i]);
        ids[i] = is_inside ? b->input_ids[i + depth] : 0;
        ids[n + i] = is_inside || (row && b->targets_cross) ? labels[i + depth] : AR_IGNORE_INDEX;
    }
    *out = *b;
    out->input_ids = ids;
    out->labels = ids + n;
    out->targets = b->mtp_targets[depth - 1];
    *memory = ids;
    return AR_OK;
}
