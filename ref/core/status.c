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
    /* The arguments may quote the message that is being replaced, so it is built beside it. */
    char next[MESSAGE_SIZE];
    ARI_FORMAT(next, format);
    ari_message_clean(next);
    memcpy(message, next, strlen(next) + 1);
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

static ar_status allocate_array(void **gives, size_t n, size_t size, const char *what, int zeroed)
{
    size_t bytes = 0;
    AR_TRY(ari_mul_size(&bytes, n, size));
    void *p = zeroed ? calloc(bytes ? bytes : 1, 1) : malloc(bytes ? bytes : 1);
    if (!p)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %s: %zu bytes", what, bytes);
    *gives = p;
    return AR_OK;
}

ar_status ari_alloc(void **gives, size_t n, size_t size, const char *what)
{
    return allocate_array(gives, n, size, what, 0);
}

ar_status ari_alloc_zero(void **gives, size_t n, size_t size, const char *what)
{
    return allocate_array(gives, n, size, what, 1);
}

void ari_free_owned(void *pointer)
{
    void *owned = NULL;
    memcpy(&owned, pointer, sizeof owned); /* a T ** of any T */
    free(owned);
}

/* Before the elements, whose alignment it keeps. */
typedef union block {
    void *before;
    max_align_t align;
} block;

ar_status ari_arena_take(ari_arena *a, void **gives, size_t n, size_t size, const char *what)
{
    size_t bytes = 0;
    void *taken = NULL;
    AR_TRY(ari_mul_size(&bytes, n, size));
    AR_TRY(ari_add_size(&bytes, bytes, sizeof(block)));
    AR_TRY(ari_alloc_zero(&taken, bytes, 1, what));
    block *b = taken;
    b->before = a->last;
    a->last = b;
    *gives = b + 1;
    return AR_OK;
}

ar_status ari_arena_text(ari_arena *a, char **gives, const char *text, const char *what)
{
    const size_t n = strlen(text) + 1;
    AR_TRY(ARI_TAKE(gives, a, n, what));
    memcpy(*gives, text, n);
    return AR_OK;
}

ar_status ari_arena_grow(ari_arena *a, void *list, size_t *capacity, size_t count, size_t size, const char *what)
{
    void *old = NULL, *grown = NULL;
    if (count < *capacity)
        return AR_OK;
    const size_t more = *capacity ? 2 * *capacity : 8;
    AR_TRY(ari_arena_take(a, &grown, more, size, what));
    memcpy(&old, list, sizeof old); /* a T ** of any T */
    if (count > 0)
        memcpy(grown, old, count * size);
    memcpy(list, &grown, sizeof grown);
    *capacity = more;
    return AR_OK;
}

void ari_arena_end(ari_arena *a, void *last)
{
    while (a->last != last) {
        block *b = a->last;
        a->last = b->before;
        free(b);
    }
}

ar_status ari_grow(void *list, size_t *capacity, size_t count, size_t size, const char *what)
{
    if (count < *capacity)
        return AR_OK;
    size_t more = 0, bytes = 0;
    void *old = NULL;
    AR_TRY(ari_mul_size(&more, *capacity ? *capacity : 32, 2));
    AR_TRY(ari_mul_size(&bytes, more, size));
    memcpy(&old, list, sizeof old); /* a T ** of any T */
    void *grown = realloc(old, bytes);
    if (!grown)
        return ar_error_set(AR_ERR_MEMORY, "no memory for %s: %zu bytes", what, bytes);
    memcpy(list, &grown, sizeof grown);
    *capacity = more;
    return AR_OK;
}
