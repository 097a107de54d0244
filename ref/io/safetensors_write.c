/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

ARI_OWNER(ar_st_writer, ari_st_writer_discard)

/* The official library's order: the dtype table from its end, then names in byte order. */
static int compare_tensors(const void *a, const void *b)
{
    const ar_st_tensor *x = *(const ar_st_tensor *const *)a;
    const ar_st_tensor *y = *(const ar_st_tensor *const *)b;
    ARI_ASCENDING(y->dtype, x->dtype);
    return strcmp(x->name, y->name);
}

/* Fills order[0..n) and refuses repeated names. */
static ar_status sort_tensors(const ar_st_tensor **order, const ar_st_tensor *tensors, size_t n)
{
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, &tensors[i]));
        if (__builtin_add_overflow(total, bytes, &total))
            return ar_error_set(AR_ERR_OVERFLOW, "the tensors' sizes overflow at '%s'", ARI_SHOW(tensors[i].name));
    }
    AR_TRY(ari_st_sort(order, tensors, n, ""));
    ARI_SORT(order, n, compare_tensors);
    return AR_OK;
}

/* A JSON string as serde_json spells it: only what must be escaped is. */
static void put_string(FILE *f, const char *text)
{
    fputc('"', f);
    for (const char *c = text; *c != '\0'; c++) {
        static const char shorts[] = "\"\"\\\\\bb\ff\nn\rr\tt"; /* byte, letter after the backslash */
        const char *found = NULL;
        for (const char *s = shorts; *s != '\0'; s += 2)
            found = *s == *c ? s + 1 : found;
        if (found != NULL)
            fprintf(f, "\\%c", *found);
        else if ((unsigned char)*c < 0x20)
            fprintf(f, "\\u%04x", (unsigned)*c);
        else
            fputc(*c, f);
    }
    fputc('"', f);
}

static ar_status check_metadata(const char *const *metadata, size_t n)
{
    for (size_t i = 0; i < 2 * n; i++)
        if (metadata[i] == NULL || !ari_utf8_valid(metadata[i], strlen(metadata[i])))
            return ar_error_set(AR_ERR_ARG, "metadata pair %zu is not UTF-8 text", i / 2);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            if (strcmp(metadata[2 * i], metadata[2 * j]) == 0)
                return ar_error_set(AR_ERR_ARG, "metadata key '%s' is there twice", ARI_SHOW(metadata[2 * i]));
    return AR_OK;
}

static ar_status put_header(FILE *f, const ar_st_tensor *const *order, size_t n, const char *const *metadata,
                            size_t n_meta)
{
    size_t offset = 0;
    fputc('{', f);
    if (n_meta > 0)
        fputs("\"" ARI_ST_METADATA "\":{", f);
    for (size_t i = 0; i < n_meta; i++) {
        if (i > 0)
            fputc(',', f);
        put_string(f, metadata[2 * i]);
        fputc(':', f);
        put_string(f, metadata[2 * i + 1]);
    }
    if (n_meta > 0)
        fputs(n > 0 ? "}," : "}", f);
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, order[i]));
        if (i > 0)
            fputc(',', f);
        put_string(f, order[i]->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", ar_dtype_name(order[i]->dtype),
                ARI_SHOW_SHAPE(order[i]->ndim, order[i]->shape), offset, offset + bytes);
        offset += bytes;
    }
    fputc('}', f);
    return AR_OK;
}

/* The 8 bytes of length and the padded header, as one block. */
static ar_status make_header(char **gives, size_t *length, const ar_st_tensor *const *order, size_t n,
                             const char *const *metadata, size_t n_meta)
{
    ARI_OWNED char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a header of %zu tensors", n);
    fwrite("\0\0\0\0\0\0\0", 1, ARI_ST_PREFIX_BYTES, f);
    ar_status st = put_header(f, order, n, metadata, n_meta);
    while (fflush(f) == 0 && bytes % 8 != 0)
        fputc(' ', f);
    if (!ari_text_closed(f, &text) && st == AR_OK)
        st = ar_error_set(AR_ERR_MEMORY, "no memory for a header of %zu tensors", n);
    AR_TRY(st);
    if (bytes - ARI_ST_PREFIX_BYTES > ARI_ST_MAX_HEADER)
        return ar_error_set(AR_ERR_ARG, "a header of %zu bytes, at most %zu are allowed", bytes - ARI_ST_PREFIX_BYTES,
                            ARI_ST_MAX_HEADER);
    const uint64_t header = bytes - ARI_ST_PREFIX_BYTES;
    memcpy(text, &header, sizeof header);
    ARI_GIVE(gives, text);
    *length = bytes;
    return AR_OK;
}

/* --- tensor by tensor --------------------------------------------------------------------------------------------- */

typedef struct slot {
    char *name;
    size_t at, bytes, done; /* in the file; of the tensor */
} slot;

struct ar_st_writer {
    ari_atomic_file *out;
    slot *slot; /* in the caller's order */
    size_t n;
};

static ar_status place_tensors(ar_st_writer *w, const ar_st_tensor *const *order, const ar_st_tensor *tensors,
                               size_t at)
{
    for (size_t k = 0; k < w->n; k++) {
        slot *s = &w->slot[order[k] - tensors];
        AR_TRY(ari_st_tensor_bytes(&s->bytes, order[k]));
        s->at = at;
        AR_TRY(ari_add_size(&at, at, s->bytes));
        AR_TRY(ari_text_copy(&s->name, order[k]->name, SIZE_MAX, "tensors to write"));
    }
    return AR_OK;
}

/* A file with its header, which the data of order[0..n) follow. Gives both; free(order). */
static ar_status open_writer(ar_st_writer **gives, const ar_st_tensor ***order, const char *path,
                             const ar_st_tensor *tensors, size_t n, const char *const *metadata, size_t n_meta)
{
    size_t length = 0;
    ARI_OWNED char *header = NULL;
    ARI_OWNED_BY(ari_st_writer_discard) ar_st_writer *w = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&w, 1, "tensors to write"));
    AR_TRY(ARI_ALLOC_ZERO(&w->slot, n, "tensors to write"));
    AR_TRY(ARI_ALLOC_ZERO(order, n, "tensors to write"));
    w->n = n;
    AR_TRY(sort_tensors(*order, tensors, n));
    AR_TRY(check_metadata(metadata, n_meta));
    AR_TRY(make_header(&header, &length, *order, n, metadata, n_meta));
    AR_TRY(ari_atomic_file_create(&w->out, path));
    AR_TRY(ari_atomic_file_write(w->out, header, length));
    AR_TRY(place_tensors(w, *order, tensors, length));
    ARI_GIVE(gives, w);
    return AR_OK;
}

ar_status ari_st_writer_open(ar_st_writer **gives, const char *path, const ar_st_tensor *tensors, size_t n,
                             const char *const *metadata, size_t n_meta)
{
    ARI_OWNED const ar_st_tensor **order = NULL;
    return open_writer(gives, &order, path, tensors, n, metadata, n_meta);
}

ar_status ari_st_writer_put(ar_st_writer *w, size_t i, const void *data, size_t bytes)
{
    if (i >= w->n)
        return ar_error_set(AR_ERR_ARG, "a file of %zu tensors has no tensor %zu to write", w->n, i);
    slot *s = &w->slot[i];
    if (bytes > s->bytes - s->done)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has %zu bytes: %zu more than the %zu written are too many",
                            ARI_SHOW(s->name), s->bytes, bytes, s->done);
    AR_TRY(ari_atomic_file_write_at(w->out, s->at + s->done, data, bytes));
    s->done += bytes;
    return AR_OK;
}

ar_status ari_st_writer_commit(ar_st_writer *w)
{
    ARI_OWNED_BY(ari_st_writer_discard) ar_st_writer *own = w;
    for (size_t i = 0; i < own->n; i++)
        if (own->slot[i].done != own->slot[i].bytes)
            return ar_error_set(AR_ERR_ARG, "tensor '%s': %zu of its %zu bytes were written",
                                ARI_SHOW(own->slot[i].name), own->slot[i].done, own->slot[i].bytes);
    return ari_atomic_file_commit(own->out);
}

void ari_st_writer_discard(ar_st_writer *w)
{
    if (w == NULL)
        return;
    ari_atomic_file_discard(w->out);
    for (size_t i = 0; i < w->n; i++)
        free(w->slot[i].name);
    free(w->slot);
    free(w);
}

/* --- all at once -------------------------------------------------------------------------------------------------- */

static ar_status check_data(const ar_st_tensor *tensors, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, &tensors[i]));
        if (bytes > 0 && tensors[i].data == NULL)
            return ar_error_set(AR_ERR_ARG, "tensor '%s' has no data", ARI_SHOW(tensors[i].name));
    }
    return AR_OK;
}

ar_status ari_st_write_uncommitted(ari_atomic_file **gives, const char *path, const ar_st_tensor *tensors, size_t n,
                                   const char *const *metadata, size_t n_meta)
{
    ARI_OWNED_BY(ari_st_writer_discard) ar_st_writer *w = NULL;
    ARI_OWNED const ar_st_tensor **order = NULL;
    AR_TRY(check_data(tensors, n));
    AR_TRY(open_writer(&w, &order, path, tensors, n, metadata, n_meta));
    for (size_t k = 0; k < n; k++) { /* in the file's order, so that a pipe takes it */
        const size_t i = (size_t)(order[k] - tensors);
        AR_TRY(ari_st_writer_put(w, i, tensors[i].data, w->slot[i].bytes));
    }
    ARI_GIVE(gives, w->out);
    return AR_OK;
}

ar_status ari_st_write(const char *path, const ar_st_tensor *tensors, size_t n, const char *const *metadata,
                       size_t n_meta)
{
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *out = NULL;
    AR_TRY(ari_st_write_uncommitted(&out, path, tensors, n, metadata, n_meta));
    return ari_atomic_file_commit(out);
}
