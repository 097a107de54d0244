/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/status.h"

#include "ref/core/size.h"
#include "ref/core/status_private.h"
#include "ref/core/text.h"

/* Long enough for a report that lists every rank of a small world. */
enum { MESSAGE_SIZE = 8192 };

static _Thread_local char message[MESSAGE_SIZE];

const char *ar_status_name(ar_status st)
{
    switch (st) {
#define NAME_CASE(code, name, text) \
    case AR_##name:                 \
        return "AR_" #name;
        AR_STATUS_TABLE(NAME_CASE)
#undef NAME_CASE
    }
    return "AR_?";
}

const char *ari_status_text(ar_status st)
{
    switch (st) {
#define TEXT_CASE(code, name, text) \
    case AR_##name:                 \
        return text;
        AR_STATUS_TABLE(TEXT_CASE)
#undef TEXT_CASE
    }
    return "unknown status";
}

const char *ar_error_message(void)
{
    return message;
}

void ar_error_clear(void)
{
    message[0] = '\0';
}

ar_status ar_error_set(ar_status st, const char *format, ...)
{
    /* The arguments may quote the previous message, so the new one is built separately. */
    char new_message[MESSAGE_SIZE];
    ARI_FORMAT(new_message, format);
    ari_message_clean(new_message);
    memcpy(message, new_message, strlen(new_message) + 1);
    return st;
}

/* --- checked sizes ------------------------------------------------------------------------------------------------ */

ar_status ari_mul_size(size_t *out, size_t a, size_t b)
{
    size_t product = 0;
    if (__builtin_mul_overflow(a, b, &product))
        return ar_error_set(AR_ERR_OVERFLOW, "%zu times %zu does not fit a size", a, b);
    *out = product;
    return AR_OK;
}

ar_status ari_add_size(size_t *out, size_t a, size_t b)
{
    size_t sum = 0;
    if (__builtin_add_overflow(a, b, &sum))
        return ar_error_set(AR_ERR_OVERFLOW, "%zu plus %zu does not fit a size", a, b);
    *out = sum;
    return AR_OK;
}

static ar_status allocate_array(void **out, size_t n, size_t size, const char *label, int zeroed)
{
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, n, size));
    void *p = zeroed ? calloc(bytes ? bytes : 1, 1) : malloc(bytes ? bytes : 1);
    if (!p)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %s: %zu bytes", label, bytes);
    *out = p;
    return AR_OK;
}

ar_status ari_alloc(void **out, size_t n, size_t size, const char *label)
{
    return allocate_array(out, n, size, label, 0);
}

ar_status ari_alloc_zero(void **out, size_t n, size_t size, const char *label)
{
    return allocate_array(out, n, size, label, 1);
}

void ari_free_owned(void *pointer)
{
    void *owned = NULL;
    memcpy(&owned, pointer, sizeof owned); /* a T ** of any T */
    free(owned);
}

/* Header in front of the elements, which preserves their alignment. */
typedef union block {
    void *before;
    max_align_t align;
} block;

ar_status ari_arena_take(ari_arena *a, void **out, size_t n, size_t size, const char *label)
{
    size_t bytes = 0;
    void *memory = NULL;
    AR_TRY(ari_mul_size(&bytes, n, size));
    AR_TRY(ari_add_size(&bytes, bytes, sizeof(block)));
    AR_TRY(ari_alloc_zero(&memory, bytes, 1, label));
    block *b = memory;
    b->before = a->last;
    a->last = b;
    *out = b + 1;
    return AR_OK;
}

ar_status ari_arena_text(ari_arena *a, char **out, const char *text, const char *label)
{
    const size_t n = strlen(text) + 1;
    AR_TRY(ARI_TAKE(out, a, n, label));
    memcpy(*out, text, n);
    return AR_OK;
}

ar_status ari_arena_grow(ari_arena *a, void *list, size_t *capacity, size_t count, size_t size, const char *label)
{
    void *old = NULL, *grown = NULL;
    if (count < *capacity)
        return AR_OK;
    const size_t new_capacity = *capacity ? 2 * *capacity : 8;
    AR_TRY(ari_arena_take(a, &grown, new_capacity, size, label));
    memcpy(&old, list, sizeof old); /* a T ** of any T */
    if (count > 0)
        memcpy(grown, old, count * size);
    memcpy(list, &grown, sizeof grown);
    *capacity = new_capacity;
    return AR_OK;
}

void ari_arena_end(ari_arena *a, void *mark)
{
    while (a->last != mark) {
        block *b = a->last;
        a->last = b->before;
        free(b);
    }
}

ar_status ari_grow(void *list, size_t *capacity, size_t count, size_t size, const char *label)
{
    if (count < *capacity)
        return AR_OK;
    size_t new_capacity = 0, bytes = 0;
    void *old = NULL;
    AR_TRY(ari_mul_size(&new_capacity, *capacity ? *capacity : 32, 2));
    AR_TRY(ari_mul_size(&bytes, new_capacity, size));
    memcpy(&old, list, sizeof old); /* a T ** of any T */
    void *grown = realloc(old, bytes);
    if (!grown)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %s: %zu bytes", label, bytes);
    memcpy(list, &grown, sizeof grown);
    *capacity = new_capacity;
    return AR_OK;
}
