/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a JSON Lines file: one object per line, with a document's text or tokens. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/json.h"

typedef struct reader {
    ari_documents *d;
    const char *path;
    size_t line, token_capacity, end_capacity;
} reader;

static ar_status add_token(reader *r, int32_t token)
{
    AR_TRY(ari_grow(&r->d->token, &r->token_capacity, r->d->tokens, sizeof token, "tokens"));
    r->d->token[r->d->tokens++] = token;
    return AR_OK;
}

static ar_status add_text(reader *r, const json_t *text)
{
    const unsigned char *bytes = (const unsigned char *)json_string_value(text);
    for (size_t i = 0; i < json_string_length(text); i++)
        AR_TRY(add_token(r, bytes[i]));
    return AR_OK;
}

static ar_status add_ids(reader *r, const json_t *ids)
{
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *id = json_array_get(ids, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
            return ar_error_set(AR_ERR_DATA, "%s: line %zu: token %zu of 'input_ids' is no integer from 0 to 2^31 - 1",
                                ARI_SHOW(r->path), r->line, i);
        AR_TRY(add_token(r, (int32_t)json_integer_value(id)));
    }
    return AR_OK;
}

/* Refuses members with more information about the tokens, which a user would expect to count. */
static ar_status check_members(const reader *r, const json_t *object)
{
    static const char *const refused[] = {"labels", "attention_mask", "position_ids"};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (json_object_get(object, refused[i]) != NULL)
            return ar_error_set(AR_ERR_UNSUPPORTED,
                                "%s: line %zu: '%s' would not be looked at: training predicts each next token of its "
                                "data, from positions and masks of its own",
                                ARI_SHOW(r->path), r->line, refused[i]);
    }
    return AR_OK;
}

static ar_status add_object(reader *r, const json_t *object)
{
    const json_t *text = json_object_get(object, "text"), *ids = json_object_get(object, "input_ids");
    const size_t before = r->d->tokens;
    if ((text != NULL) == (ids != NULL) || (text != NULL ? !json_is_string(text) : !json_is_array(ids)))
        return ar_error_set(AR_ERR_FORMAT,
                            "%s: line %zu: expected an object with a string 'text' or a list 'input_ids'%s",
                            ARI_SHOW(r->path), r->line, text != NULL && ids != NULL ? ", and not both" : "");
    AR_TRY(check_members(r, object));
    AR_TRY(text != NULL ? add_text(r, text) : add_ids(r, ids));
    if (r->d->tokens == before)
        return AR_OK;
    AR_TRY(ARI_GROW(&r->d->end, &r->end_capacity, r->d->documents, "documents"));
    r->d->end[r->d->documents++] = r->d->tokens;
    return AR_OK;
}

static ar_status add_line(reader *r, const char *line, size_t length)
{
    char name[400];
    json_auto_t *object = NULL;
    r->line++;
    if (strspn(line, " \t\r\n") >= length)
        return AR_OK;
    snprintf(name, sizeof name, "%s: line %zu", ARI_SHOW(r->path), r->line);
    AR_TRY(ari_json_parse(&object, line, length, name));
    return add_object(r, object);
}

ar_status ari_jsonl_read(ari_documents *d, int fd, size_t bytes, const char *path)
{
    ARI_OWNED char *text = NULL;
    reader r = {.d = d, .path = path};
    *d = (ari_documents){.token = NULL};
    AR_TRY(ari_alloc_zero((void **)&text, bytes + 1, 1, "the lines of a file"));
    AR_TRY(ari_file_pread(fd, text, bytes, 0, path));
    for (size_t line_begin = 0, end = 0; line_begin < bytes; line_begin = end + 1) {
        const char *newline = memchr(text + line_begin, '\n', bytes - line_begin);
        end = newline != NULL ? (size_t)(newline - text) : bytes;
        AR_TRY(add_line(&r, text + line_begin, end - line_begin));
    }
    if (d->tokens == 0)
        return ar_error_set(AR_ERR_DATA, "%s: is empty, expected documents, one a line", ARI_SHOW(path));
    return AR_OK;
}

void ari_documents_fini(ari_documents *d)
{
    free(d->token);
    free(d->end);
    *d = (ari_documents){.token = NULL};
}

bool ari_documents_begins(const ari_documents *d, size_t token)
{
    size_t document = 0; /* index into the ends, which ascend */
    ARI_BISECT(document, d->documents, i, d->end[i] < token)
    return token == 0 || (document < d->documents && d->end[document] == token);
}
