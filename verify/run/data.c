/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "anyrank/safetensors.h"
#include "ref/core/data_private.h"
#include "ref/core/size.h"
#include "ref/core/text.h"
#include "ref/io/config_private.h"
#include "ref/io/file.h"
#include "ref/io/hash.h"
#include "ref/io/json.h"
#include "ref/io/safetensors_private.h"
#include "verify/run/data_private.h"

ARI_OWNER(ar_data, ari_data_close)
ARI_OWNER(ar_st_file, ari_st_close)

typedef enum token_kind { TOKEN_U8, TOKEN_U16, TOKEN_U32, TOKEN_I32, TOKEN_I64, TOKEN_HELD } token_kind;
static const size_t token_bytes[] = {1, 2, 4, 4, 8, 4};
enum { MOST_TOKEN_BYTES = 8, TOKENS_AT_ONCE = 4096 };

struct ar_data {
    char *path;
    ar_data_format format;
    token_kind kind;
    size_t rows, tokens;
    int fd;               /* The file is read and not mapped: if it shrinks during the run, a read returns an error,
                             while a mapping would raise a signal. */
    size_t bytes, offset; /* size of the file; offset of the first token */
    ari_documents corpus; /* TOKEN_HELD: the tokens of a file that does not store them as plain integers */
};

/* Every file can be read as bytes, so a name that indicates another format must not be read as bytes. */
static ar_status format_of_name(ar_data_format *format, const char *path)
{
    static const char *const unclear[] = {".bin", ".npy", ".gz", ".zst"};
    for (size_t i = 0; i < sizeof unclear / sizeof unclear[0]; i++) {
        if (ari_ends_in(path, unclear[i]))
            return ar_error_set(AR_ERR_ARG,
                                "%s: a name in %s does not tell what is a token: say which format it has, bytes, u16, "
                                "u32, safetensors or jsonl",
                                ARI_SHOW(path), unclear[i]);
    }
    *format = ari_ends_in(path, ".safetensors") ? AR_DATA_SAFETENSORS
              : ari_ends_in(path, ".jsonl")     ? AR_DATA_JSONL
              : ari_ends_in(path, ".u16")       ? AR_DATA_U16
              : ari_ends_in(path, ".u32")       ? AR_DATA_U32
                                                : AR_DATA_BYTES;
    return AR_OK;
}

static ar_status open_raw(ar_data *d)
{
    d->kind = d->format == AR_DATA_U16 ? TOKEN_U16 : d->format == AR_DATA_U32 ? TOKEN_U32 : TOKEN_U8;
    const size_t token_size = token_bytes[d->kind];
    if (d->bytes == 0)
        return ar_error_set(AR_ERR_DATA, "%s: is empty, expected tokens", ARI_SHOW(d->path));
    if (d->bytes % token_size != 0)
        return ar_error_set(AR_ERR_DATA, "%s: has %zu bytes, expected a multiple of the %zu of a %s token",
                            ARI_SHOW(d->path), d->bytes, token_size, ari_data_format_name(d->format));
    d->rows = 1;
    d->tokens = d->bytes / token_size;
    return AR_OK;
}

static ar_status take_tensor(ar_data *d, const ar_st_file *f)
{
    const ar_st_entry *ids = ari_st_find(f, "input_ids"), *tokens = ari_st_find(f, "tokens");
    const ar_st_entry *e = ids != NULL ? ids : tokens;
    size_t data_bytes = 0;
    if (e == NULL || (ids != NULL && tokens != NULL))
        return ar_error_set(AR_ERR_FORMAT, "%s: has %s, expected one tensor 'input_ids' or 'tokens'", ARI_SHOW(d->path),
                            e == NULL ? "neither of them" : "both tensors 'input_ids' and 'tokens'");
    if ((e->dtype != AR_I32 && e->dtype != AR_I64) || e->ndim < 1 || e->ndim > 2)
        return ar_error_set(AR_ERR_FORMAT, "%s: tensor '%s' is %s of %d dimensions, expected I32 or I64 of 1 or 2",
                            ARI_SHOW(d->path), e->name, ar_dtype_name(e->dtype), e->ndim);
    if (e->count == 0)
        return ar_error_set(AR_ERR_DATA, "%s: tensor '%s' is empty, expected tokens", ARI_SHOW(d->path), e->name);
    d->kind = e->dtype == AR_I32 ? TOKEN_I32 : TOKEN_I64;
    d->tokens = e->count;
    d->rows = e->ndim == 2 ? e->shape[0] : 1;
    /* Tensors fill the file from the end of the header on, so the bytes after this tensor's first byte are left. */
    for (size_t i = 0; i < ari_st_tensor_count(f); i++) {
        const ar_st_entry *entry = ari_st_at(f, i);
        if ((const char *)entry->data >= (const char *)e->data)
            data_bytes += entry->bytes;
    }
    d->offset = d->bytes - data_bytes;
    return AR_OK;
}

static ar_status open_safetensors(ar_data *d)
{
    ARI_OWNED_BY(ari_st_close) ar_st_file *f = NULL;
    AR_TRY(ari_st_open(&f, d->path));
    return take_tensor(d, f);
}

static ar_status open_jsonl(ar_data *d)
{
    AR_TRY(ari_jsonl_read(&d->corpus, d->fd, d->bytes, d->path));
    d->kind = TOKEN_HELD;
    d->rows = 1;
    d->tokens = d->corpus.tokens;
    return AR_OK;
}

ar_status ari_data_open(ar_data **out, const char *path, ar_data_format format)
{
    ARI_OWNED_BY(ari_data_close) ar_data *d = NULL;
    if (out == NULL || (unsigned)format > AR_DATA_JSONL)
        return ar_error_set(AR_ERR_ARG, "data_open: no %s", out == NULL ? "place for the data" : "such format");
    if (path == NULL)
        AR_TRY(ari_data_dir_check());
    AR_TRY(ARI_ALLOC_ZERO(&d, 1, "data"));
    d->format = format;
    d->fd = -1;
    if (asprintf(&d->path, path == NULL ? "%s/text.txt" : "%s", path == NULL ? ari_data_dir() : path) < 0) {
        d->path = NULL; /* asprintf leaves the pointer undefined on failure */
        return ar_error_set(AR_ERR_MEMORY, "no memory for the data's path");
    }
    AR_TRY(ari_file_open(&d->fd, &d->bytes, d->path));
    if (format != AR_DATA_SAFETENSORS && !(format == AR_DATA_AUTO && ari_ends_in(d->path, ".safetensors")))
        AR_TRY(ari_unsupported_format_check_file(d->fd, d->bytes, d->path, ARI_WANT_TOKENS));
    if (format == AR_DATA_AUTO)
        AR_TRY(format_of_name(&d->format, d->path));
    AR_TRY(d->format == AR_DATA_SAFETENSORS ? open_safetensors(d)
           : d->format == AR_DATA_JSONL     ? open_jsonl(d)
                                            : open_raw(d));
    ARI_GIVE(out, d);
    return AR_OK;
}

void ari_data_close(ar_data *d)
{
    if (d == NULL)
        return;
    if (d->fd >= 0)
        close(d->fd);
    ari_documents_fini(&d->corpus);
    free(d->path);
    free(d);
}

const char *ari_data_path(const ar_data *d)
{
    return d->path;
}

ar_data_format ari_data_format_of(const ar_data *d)
{
    return d->format;
}

size_t ari_data_tokens(const ar_data *d)
{
    return d->tokens;
}

size_t ari_data_rows(const ar_data *d)
{
    return d->rows;
}

size_t ari_data_documents(const ar_data *d)
{
    return d->kind == TOKEN_HELD ? d->corpus.documents : d->rows;
}

bool ari_data_document_begins(const ar_data *d, size_t token)
{
    return d->kind == TOKEN_HELD ? ari_documents_begins(&d->corpus, token) : token % (d->tokens / d->rows) == 0;
}

static ar_status hash_file(ari_sha256 *s, int fd, size_t bytes, const char *path)
{
    static const size_t piece = (size_t)1 << 20;
    ARI_OWNED unsigned char *scratch = NULL;
    AR_TRY(ari_alloc((void **)&scratch, piece, 1, "a piece of a file"));
    for (size_t offset = 0; offset < bytes; offset += piece) {
        const size_t n = bytes - offset < piece ? bytes - offset : piece;
        AR_TRY(ari_file_pread(fd, scratch, n, offset, path));
        ari_sha256_update(s, scratch, n);
    }
    return AR_OK;
}

ar_status ari_data_hash(const ar_data *d, char hex[65])
{
    ari_sha256 s;
    ari_sha256_init(&s);
    AR_TRY(hash_file(&s, d->fd, d->bytes, d->path));
    ari_sha256_final(&s, hex);
    return AR_OK;
}

static int64_t token_of(token_kind kind, const unsigned char *src)
{
    uint16_t u16;
    uint32_t u32;
    int32_t i32;
    int64_t i64;
    switch (kind) {
    case TOKEN_U8:
        return *src;
    case TOKEN_U16:
        memcpy(&u16, src, sizeof u16);
        return u16;
    case TOKEN_U32:
        memcpy(&u32, src, sizeof u32);
        return u32;
    case TOKEN_HELD:
    case TOKEN_I32:
        memcpy(&i32, src, sizeof i32);
        return i32;
    case TOKEN_I64:
    default:
        memcpy(&i64, src, sizeof i64);
        return i64;
    }
}

ar_status ari_data_read(const ar_data *d, int64_t *out, size_t start, size_t count)
{
    const size_t token_size = token_bytes[d->kind];
    if (start > d->tokens || count > d->tokens - start)
        return ar_error_set(AR_ERR_ARG, "%s: %zu tokens from %zu on are asked for, it has %zu", ARI_SHOW(d->path),
                            count, start, d->tokens);
    for (size_t i = 0; d->kind == TOKEN_HELD && i < count; i++)
        out[i] = d->corpus.token[start + i];
    for (size_t read_count = 0; d->kind != TOKEN_HELD && read_count < count; read_count += TOKENS_AT_ONCE) {
        unsigned char scratch[TOKENS_AT_ONCE * MOST_TOKEN_BYTES];
        const size_t n = count - read_count < TOKENS_AT_ONCE ? count - read_count : TOKENS_AT_ONCE;
        AR_TRY(ari_file_pread(d->fd, scratch, n * token_size, d->offset + (start + read_count) * token_size, d->path));
        for (size_t i = 0; i < n; i++)
            out[read_count + i] = token_of(d->kind, scratch + i * token_size);
    }
    return AR_OK;
}

/* "123", or with rows "123 (row 4, place 3)". */
static void position_text(char *out, size_t cap, const ar_data *d, size_t i)
{
    const size_t length = d->tokens / d->rows;
    if (d->rows > 1)
        snprintf(out, cap, "%zu (row %zu, place %zu)", i, i / length, i % length);
    else
        snprintf(out, cap, "%zu", i);
}

/* Result of a look at all tokens. */
typedef struct vocab_look {
    int64_t largest;
    size_t first_index; /* beyond the vocabulary */
    int64_t first_token;
} vocab_look;

static ar_status look_at(vocab_look *l, const ar_data *d, size_t vocab, size_t start, size_t count)
{
    int64_t token[TOKENS_AT_ONCE];
    char location[80];
    AR_TRY(ari_data_read(d, token, start, count));
    for (size_t i = 0; i < count; i++) {
        if (token[i] < 0) {
            position_text(location, sizeof location, d, start + i);
            return ar_error_set(AR_ERR_DATA, "%s: token %s is %lld, expected an id from 0 to %zu", ARI_SHOW(d->path),
                                location, (long long)token[i], vocab == 0 ? 0 : vocab - 1);
        }
        if ((uint64_t)token[i] >= vocab && l->first_index == d->tokens) {
            l->first_index = start + i;
            l->first_token = token[i];
        }
        l->largest = token[i] > l->largest ? token[i] : l->largest;
    }
    return AR_OK;
}

ar_status ari_data_check_vocab(const ar_data *d, size_t vocab)
{
    char location[80];
    vocab_look l = {.largest = -1, .first_index = d->tokens};
    if (d->kind == TOKEN_U8 && vocab > UINT8_MAX)
        return AR_OK;
    for (size_t i = 0; i < d->tokens; i += TOKENS_AT_ONCE)
        AR_TRY(look_at(&l, d, vocab, i, d->tokens - i < TOKENS_AT_ONCE ? d->tokens - i : TOKENS_AT_ONCE));
    if (l.first_index == d->tokens)
        return AR_OK;
    position_text(location, sizeof location, d, l.first_index);
    return ar_error_set(AR_ERR_DATA,
                        "%s: token %s is %lld, but the model's vocabulary has %zu entries, ids 0 to %zu; the largest "
                        "id of the data is %lld, so it needs a vocabulary of %llu",
                        ARI_SHOW(d->path), location, (long long)l.first_token, vocab, vocab == 0 ? 0 : vocab - 1,
                        (long long)l.largest, (unsigned long long)l.largest + 1);
}
