/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"
#include "verify/grads/grads.h"
#include "verify/logprobs/logprobs.h"

void ari_sequences_fini(ari_sequences *s)
{
    ari_arena_end(&s->arena, NULL);
    free(s->list);
    *s = (ari_sequences){.list = NULL};
}

ar_status ari_sequences_add(ari_sequence **borrows, ari_sequences *s, size_t n, bool given)
{
    AR_TRY(ARI_GROW(&s->list, &s->capacity, s->count, "sequences"));
    ari_sequence *q = &s->list[s->count++];
    *q = (ari_sequence){.n = n};
    AR_TRY(ARI_TAKE(&q->tokens, &s->arena, n, "a sequence's tokens"));
    if (given)
        AR_TRY(ARI_TAKE(&q->given, &s->arena, n, "a sequence's log-probabilities"));
    for (size_t t = 0; given && t < n; t++)
        q->given[t] = (double)NAN;
    *borrows = q;
    return AR_OK;
}

/* --- safetensors -------------------------------------------------------------------------------------------------- */

static bool is_padding(const ar_batch *b, size_t at)
{
    return b->padding_mask && b->padding_mask[at] == 0;
}

/* The documents of a row, without what is masked. */
static ar_status add_row(ari_sequences *s, const ar_batch *b, size_t row, const char *path)
{
    for (size_t first = 0, end; first < b->seq; first = end) {
        size_t unused, n = 0;
        ari_sequence *q;
        ar_batch_document(b, row, first, &unused, &end);
        for (size_t t = first; t < end; t++)
            n += !is_padding(b, row * b->seq + t);
        if (n == 0)
            continue;
        AR_TRY(ari_sequences_add(&q, s, n, false));
        n = 0;
        for (size_t t = first; t < end; t++) {
            const size_t at = row * b->seq + t;
            if (is_padding(b, at))
                continue;
            if (b->position_ids && b->position_ids[at] != (int64_t)n)
                return ar_error_set(
                    AR_ERR_UNSUPPORTED,
                    "%s: position_ids[%zu, %zu] is %lld, expected %zu: each sequence is computed alone, "
                    "from position 0",
                    ARI_SHOW(path), row, t, (long long)b->position_ids[at], n);
            q->tokens[n++] = b->input_ids[at];
        }
    }
    return AR_OK;
}

static ar_status read_batch(ari_sequences *s, const ar_config *c, const char *path)
{
    ARI_ENDED(ari_input_batch_fini) ari_input_batch in = {0};
    AR_TRY(ari_input_batch_load(&in, c, path));
    if (in.batch.additive_mask)
        return ar_error_set(AR_ERR_UNSUPPORTED,
                            "%s: attention_mask has 4 dimensions; expected [b, s] of 0 and 1, which says what is "
                            "padding",
                            ARI_SHOW(path));
    if (in.batch.labels)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s: labels would not be looked at: each token is predicted",
                            ARI_SHOW(path));
    for (size_t row = 0; row < in.batch.batch; row++)
        AR_TRY(add_row(s, &in.batch, row, path));
    return AR_OK;
}

/* --- JSON --------------------------------------------------------------------------------------------------------- */

static ar_status add_text(ari_sequences *s, const char *text, size_t length, const char *where, bool given)
{
    json_auto_t *value = NULL;
    AR_TRY(ari_json_parse(&value, text, length, where));
    return ari_records_add(s, value, where, given);
}

static bool is_blank(const char *text, size_t n)
{
    return strspn(text, " \t\r\n") >= n;
}

/* JSON Lines if the first line that is not blank is a whole value, and another follows. */
static bool has_lines(const char *text, size_t length)
{
    for (size_t at = 0, end = 0; at < length; at = end + 1) {
        const char *newline = memchr(text + at, '\n', length - at);
        end = newline ? (size_t)(newline - text) : length;
        if (is_blank(text + at, end - at))
            continue;
        json_t *value = NULL;
        const bool whole = ari_json_parse(&value, text + at, end - at, "a line") == AR_OK;
        json_decref(value);
        return whole && end < length && !is_blank(text + end, length - end);
    }
    return false;
}

static ar_status read_lines(ari_sequences *s, const char *text, size_t length, const char *path, bool given)
{
    for (size_t at = 0, end = 0, number = 1; at < length; at = end + 1, number++) {
        char where[400];
        const char *newline = memchr(text + at, '\n', length - at);
        end = newline ? (size_t)(newline - text) : length;
        snprintf(where, sizeof where, "%s: line %zu", ARI_SHOW(path), number);
        if (!is_blank(text + at, end - at))
            AR_TRY(add_text(s, text + at, end - at, where, given));
    }
    return AR_OK;
}

static ar_status read_json(ari_sequences *s, const char *path, bool given)
{
    ARI_OWNED unsigned char *bytes = NULL;
    size_t length = 0;
    AR_TRY(ari_file_read_text(&bytes, &length, path, ARI_JSON_MAX_BYTES));
    const char *text = (const char *)bytes;
    return has_lines(text, length) ? read_lines(s, text, length, path, given) : add_text(s, text, length, path, given);
}

/* --- both --------------------------------------------------------------------------------------------------------- */

static ar_status check(const ari_sequences *s, const ar_config *c, const char *path)
{
    if (s->count == 0)
        return ar_error_set(AR_ERR_DATA, "%s: holds no sequence", ARI_SHOW(path));
    for (size_t i = 0; i < s->count; i++) {
        const ari_sequence *q = &s->list[i];
        for (size_t t = 0; t < q->n; t++) {
            if (q->tokens[t] < 0 || (size_t)q->tokens[t] >= c->vocab)
                return ar_error_set(AR_ERR_DATA, "%s: token %zu of sequence %zu is %lld, the vocabulary has %zu ids",
                                    ARI_SHOW(path), t, i, (long long)q->tokens[t], c->vocab);
        }
    }
    return AR_OK;
}

ar_status ari_sequences_read(ari_sequences *s, const ar_config *c, const char *path, bool given)
{
    static const char suffix[] = ".safetensors";
    const size_t n = strlen(path), m = sizeof suffix - 1;
    const bool tensors = n > m && strcmp(path + n - m, suffix) == 0;
    *s = (ari_sequences){.list = NULL};
    if (tensors && given)
        return ar_error_set(AR_ERR_FORMAT, "%s: log-probabilities are read from JSON or JSON Lines", ARI_SHOW(path));
    ar_status st = tensors ? read_batch(s, c, path) : read_json(s, path, given);
    if (st == AR_OK)
        st = check(s, c, path);
    if (st != AR_OK)
        ari_sequences_fini(s);
    return st;
}
