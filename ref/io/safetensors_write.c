/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/safetensors.h"

ar_status ari_st_tensor_bytes(size_t *bytes, const ar_st_tensor *t)
{
    const char *name = t->name == NULL ? "(no name)" : t->name;
    uint64_t count = 0, bits = 0;
    if (t->name == NULL)
        return ar_error_set(AR_ERR_ARG, "a tensor has no name");
    if (!ari_utf8_valid(name, strlen(name)) || strcmp(name, ARI_ST_METADATA) == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': a name must be UTF-8 and not " ARI_ST_METADATA, ARI_SHOW(name));
    if (t->ndim < 0 || t->ndim > AR_ST_MAX_DIMS)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has %d dimensions, expected 0 to %d", ARI_SHOW(name), t->ndim,
                            AR_ST_MAX_DIMS);
    const size_t width = ar_dtype_bits(t->dtype);
    if (width == 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s' has the unknown dtype %d", ARI_SHOW(name), (int)t->dtype);
    if (!ari_st_count(&count, t->ndim, t->shape) || __builtin_mul_overflow(count, (uint64_t)width, &bits))
        return ar_error_set(AR_ERR_OVERFLOW, "tensor '%s': its size overflows 64 bits", ARI_SHOW(name));
    if (bits % 8 != 0)
        return ar_error_set(AR_ERR_ARG, "tensor '%s': its elements do not fill whole bytes", ARI_SHOW(name));
    *bytes = (size_t)(bits / 8);
    return AR_OK;
}

/* The official library's order: the dtype table from its end, then names in byte order. */
static int compare(const void *a, const void *b)
{
    const ar_st_tensor *x = *(const ar_st_tensor *const *)a;
    const ar_st_tensor *y = *(const ar_st_tensor *const *)b;
    if (x->dtype != y->dtype)
        return x->dtype > y->dtype ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const ar_st_tensor *const *)a)->name, (*(const ar_st_tensor *const *)b)->name);
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
        order[i] = &tensors[i];
    }
    if (n > 1)
        qsort(order, n, sizeof(const ar_st_tensor *), compare_names);
    for (size_t i = 1; i < n; i++)
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return ar_error_set(AR_ERR_ARG, "tensor '%s' is there twice", ARI_SHOW(order[i]->name));
    if (n > 1)
        qsort(order, n, sizeof(const ar_st_tensor *), compare);
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
        char shape[AR_ST_MAX_DIMS * 21 + 3];
        size_t bytes = 0;
        ari_st_shape_text(shape, sizeof shape, order[i]->ndim, order[i]->shape);
        AR_TRY(ari_st_tensor_bytes(&bytes, order[i]));
        if (i > 0)
            fputc(',', f);
        put_string(f, order[i]->name);
        fprintf(f, ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%zu,%zu]}", ar_dtype_name(order[i]->dtype), shape,
                offset, offset + bytes);
        offset += bytes;
    }
    fputc('}', f);
    return AR_OK;
}

/* The 8 bytes of length and the padded header, as one block. */
static ar_status make_header(char **gives, size_t *length, const ar_st_tensor *const *order, size_t n,
                             const char *const *metadata, size_t n_meta)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *f = open_memstream(&text, &bytes);
    if (f == NULL)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a header of %zu tensors", n);
    fwrite("\0\0\0\0\0\0\0", 1, ARI_ST_PREFIX_BYTES, f);
    ar_status st = put_header(f, order, n, metadata, n_meta);
    while (fflush(f) == 0 && bytes % 8 != 0)
        fputc(' ', f);
    const bool failed = ferror(f) != 0;
    if ((fclose(f) != 0 || failed) && st == AR_OK)
        st = ar_error_set(AR_ERR_MEMORY, "no memory for a header of %zu tensors", n);
    if (st == AR_OK && bytes - ARI_ST_PREFIX_BYTES > ARI_ST_MAX_HEADER)
        st = ar_error_set(AR_ERR_ARG, "a header of %zu bytes, at most %zu are allowed", bytes - ARI_ST_PREFIX_BYTES,
                          ARI_ST_MAX_HEADER);
    if (st != AR_OK) {
        free(text);
        return st;
    }
    const uint64_t header = bytes - ARI_ST_PREFIX_BYTES;
    memcpy(text, &header, sizeof header);
    *gives = text;
    *length = bytes;
    return AR_OK;
}

ar_status ari_st_header_make(char **gives, size_t *length, const ar_st_tensor **order, const ar_st_tensor *tensors,
                             size_t n, const char *const *metadata, size_t n_meta)
{
    AR_TRY(sort_tensors(order, tensors, n));
    AR_TRY(check_metadata(metadata, n_meta));
    return make_header(gives, length, order, n, metadata, n_meta);
}
