/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

/* Compares in the official library's order: by the dtype table from its end, then by name in byte order. */
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

/* Writes a JSON string as serde_json does: only required characters are escaped. */
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
static ar_status make_header(char **out, size_t *length, const ar_st_tensor *const *order, size_t n,
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
    ARI_GIVE(out, text);
    *length = bytes;
    return AR_OK;
}

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

ar_status ari_st_write_uncommitted(ari_atomic_file **result, const char *path, const ar_st_tensor *tensors, size_t n,
                                   const char *const *metadata, size_t n_meta)
{
    size_t length = 0;
    ARI_OWNED char *header = NULL;
    ARI_OWNED const ar_st_tensor **order = NULL;
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *out = NULL;
    AR_TRY(check_data(tensors, n));
    AR_TRY(ARI_ALLOC_ZERO(&order, n, "tensors to write"));
    AR_TRY(sort_tensors(order, tensors, n));
    AR_TRY(check_metadata(metadata, n_meta));
    AR_TRY(make_header(&header, &length, order, n, metadata, n_meta));
    AR_TRY(ari_atomic_file_create(&out, path));
    AR_TRY(ari_atomic_file_write(out, header, length));
    for (size_t k = 0; k < n; k++) { /* in file order, so that the output may be a pipe */
        size_t bytes = 0;
        AR_TRY(ari_st_tensor_bytes(&bytes, order[k]));
        AR_TRY(ari_atomic_file_write(out, order[k]->data, bytes));
    }
    ARI_GIVE(result, out);
    return AR_OK;
}

ar_status ari_st_write(const char *path, const ar_st_tensor *tensors, size_t n, const char *const *metadata,
                       size_t n_meta)
{
    ARI_OWNED_BY(ari_atomic_file_discard) ari_atomic_file *out = NULL;
    AR_TRY(ari_st_write_uncommitted(&out, path, tensors, n, metadata, n_meta));
    return ari_atomic_file_commit(out);
}
