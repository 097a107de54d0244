/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/core/text.h"

#include <errno.h>
#include <stdlib.h>

void ari_say(ari_text *t, const char *format, ...)
{
    if (t->cut)
        return;
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(t->buffer + t->used, t->cap - t->used, format, args);
    va_end(args);
    if (n >= 0 && (size_t)n < t->cap - t->used) {
        t->used += (size_t)n;
        return;
    }
    t->cut = true;
    t->used = t->cap - 1;
    if (!t->plain)
        memcpy(t->buffer + t->cap - 4, "...", 4);
}

ar_status ari_check_choice(const char *label, int value, int n)
{
    return value >= 0 && value < n ? AR_OK : ar_error_set(AR_ERR_ARG, "%s %d, expected 0 to %d", label, value, n - 1);
}

bool ari_natural(uint64_t *out, const char *text, const char **end)
{
    char *cursor = NULL;
    errno = 0;
    *out = strtoull(text, &cursor, 10);
    *end = cursor;
    return text[0] >= '0' && text[0] <= '9' && errno == 0;
}

void ari_ranks_describe(const int *ranks, int n, char *text, size_t size)
{
    ari_text l = ari_plain_text_in(text, size);
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && ranks[end] == ranks[end - 1] + 1; end++) {
        }
        ari_say(&l, end - i > 1 ? "%s%d-%d" : "%s%d", i > 0 ? ", " : "", ranks[i], ranks[end - 1]);
    }
}

bool ari_utf8_control(const char *text, size_t bytes)
{
    const unsigned char *s = (const unsigned char *)text;
    if (bytes == 1)
        return s[0] < 0x20 || s[0] == 0x7f;
    if (bytes == 2)
        return (s[0] == 0xC2 && s[1] < 0xA0) || (s[0] == 0xD8 && s[1] == 0x9C);
    if (bytes != 3 || s[0] != 0xE2)
        return false;
    return s[1] == 0x80 ? s[2] == 0x8E || s[2] == 0x8F || (s[2] >= 0xA8 && s[2] <= 0xAE)
                        : s[1] == 0x81 && s[2] >= 0xA6 && s[2] <= 0xA9;
}

void ari_message_clean(char *text)
{
    const size_t length = strlen(text);
    for (size_t i = 0, bytes = 0; i<length; i += bytes> 0 ? bytes : 1) {
        bytes = ari_utf8_length(text + i, length - i);
        if (bytes == 0 || (ari_utf8_control(text + i, bytes) && text[i] != '\n' && text[i] != '\t'))
            memset(text + i, '?', bytes > 0 ? bytes : 1);
    }
}

const char *ari_printable(char *out, size_t cap, const char *text)
{
    const size_t length = strlen(text);
    size_t n = 0, prefix = 0, used = 0, bytes = 0; /* prefix: length that stays if an ellipsis follows */
    for (size_t i = 0; i < length; i += used) {
        bytes = ari_utf8_length(text + i, length - i);
        used = bytes > 0 ? bytes : 1;
        const bool shown = bytes > 0 && !ari_utf8_control(text + i, bytes);
        if (n + (shown ? bytes : 1) >= cap) {
            if (cap > 3)
                memcpy(out + prefix, "...", 3);
            n = cap > 3 ? prefix + 3 : n;
            break;
        }
        if (shown)
            memcpy(out + n, text + i, bytes);
        else
            out[n] = '?';
        n += shown ? bytes : 1;
        prefix = n + 3 < cap ? n : prefix;
    }
    out[n] = '\0';
    return out;
}

size_t ari_utf8_length(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text, c = s[0];
    if (c < 0x80)
        return 1;
    const size_t bytes = c >= 0xC2 && c <= 0xDF ? 2 : c >= 0xE0 && c <= 0xEF ? 3 : c >= 0xF0 && c <= 0xF4 ? 4 : 0;
    /* RFC 3629, section 4: the range of the second byte depends on the first; the others are 80..BF. */
    unsigned char low = c == 0xE0 ? 0xA0 : c == 0xF0 ? 0x90 : 0x80, high = c == 0xED ? 0x9F : c == 0xF4 ? 0x8F : 0xBF;
    if (bytes > n)
        return 0;
    for (size_t i = 1; i < bytes; i++, low = 0x80, high = 0xBF) {
        if (s[i] < low || s[i] > high)
            return 0;
    }
    return bytes;
}

void ari_utf8_clean(char *text)
{
    for (size_t i = 0, length = strlen(text); i < length;) {
        const size_t n = ari_utf8_length(text + i, length - i);
        if (n == 0)
            text[i] = '?';
        i += n == 0 ? 1 : n;
    }
}

/* --- the nearest word --------------------------------------------------------------------------------------------- */

enum { LONGEST = 64 };

static size_t min_of_three(size_t a, size_t b, size_t c)
{
    const size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Returns Levenshtein's distance, computed row by row; words longer than LONGEST are similar to nothing. */
static size_t distance(const char *a, const char *b)
{
    const size_t n = strlen(a), m = strlen(b);
    if (n > LONGEST || m > LONGEST)
        return SIZE_MAX;
    size_t row[LONGEST + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = j;
    for (size_t i = 1; i <= n; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= m; j++) {
            const size_t replaced = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_of_three(row[j] + 1, row[j - 1] + 1, replaced);
        }
    }
    return row[m];
}

int ari_by_name(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

int ari_by_name_of(const void *a, const void *b)
{
    return ari_by_name(*(const void *const *)a, *(const void *const *)b);
}

ar_status ari_text_copy(char **out, const char *text, size_t n, const char *label)
{
    *out = n == SIZE_MAX ? strdup(text) : strndup(text, n);
    return *out ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for %s", label);
}

bool ari_text_closed(FILE *out, char *const *text)
{
    const bool is_complete = ferror(out) == 0;
    return fclose(out) == 0 && is_complete && *text != NULL;
}

size_t ari_word_of(const char *word, const char *const *words, size_t n)
{
    size_t i = 0;
    while (i < n && (!word || strcmp(word, words[i]) != 0))
        i++;
    return word ? i : n;
}

int ari_by_text(const void *a, const void *b)
{
    return strcmp(a, b);
}

const char *ari_nearest(const char *word, const char *const *candidates, size_t n)
{
    const size_t length = strlen(word), third = length / 3;
    size_t min_distance = (third > 2 ? third : 2) + 1;
    const char *found = NULL;
    for (size_t i = 0; i < n; i++) {
        const size_t d = distance(word, candidates[i]);
        /* every short word is similar to every other */
        const bool is_similar = d < 2 || length > 3 || strspn(word, candidates[i]) == length;
        if (d < min_distance && is_similar) {
            min_distance = d;
            found = candidates[i];
        }
    }
    for (size_t i = 0; i < n && !found && length >= 4; i++)
        found = strstr(candidates[i], word) ? candidates[i] : NULL;
    return found;
}

const char *ari_shape_text(char *out, size_t cap, int ndim, const size_t *shape, const char *separator)
{
    size_t pos = 0;
    out[pos++] = '[';
    for (int i = 0; i < ndim && pos < cap; i++)
        pos += (size_t)snprintf(out + pos, cap - pos, "%s%zu", i == 0 ? "" : separator, shape[i]);
    if (pos < cap)
        snprintf(out + pos, cap - pos, "]");
    return out;
}
