/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "anyrank/status.h"

/* The ending of a noun. */
#define ARI_PLURAL(n) ((n) == 1 ? "" : "s")

/* Text that grows in a fixed buffer. Text beyond the buffer is cut off, and the result then ends in "..." unless it is
 * plain. */
typedef struct ari_text {
    char *buffer;
    size_t cap, used;
    bool cut, plain;
} ari_text;

static inline ari_text ari_text_in(char *buffer, size_t cap)
{
    if (cap > 0)
        buffer[0] = '\0';
    return (ari_text){.buffer = buffer, .cap = cap, .cut = cap == 0};
}
static inline ari_text ari_plain_text_in(char *buffer, size_t cap)
{
    ari_text t = ari_text_in(buffer, cap);
    t.plain = true;
    return t;
}
void ari_say(ari_text *t, const char *format, ...) AR_PRINTF(2, 3);

/** True if a name ends in `end`, ".safetensors" or the like. */
static inline bool ari_ends_in(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n >= m && strcmp(name + (n - m), end) == 0;
}

/** Comparison functions for qsort and bsearch: for elements that begin with a pointer to their name, that point to such
 *  elements, or that begin with the name itself. */
int ari_by_name(const void *a, const void *b);
int ari_by_name_of(const void *a, const void *b);
int ari_by_text(const void *a, const void *b);

/** Copies a text, or its first n bytes. Errors: AR_ERR_MEMORY, naming `label`. The caller releases the result with
 *  free(). */
AR_NODISCARD ar_status ari_text_copy(char **out, const char *text, size_t n, const char *label);
/** Closes a stream that open_memstream has opened for *text. Returns false if memory was too short for the whole text;
 *  *text may then be NULL. */
bool ari_text_closed(FILE *out, char *const *text);
/** Returns the index of a word among n words; n: none, or NULL. */
size_t ari_word_of(const char *word, const char *const *words, size_t n);
/* Returns true if `word` is one of an array of words. */
#define ARI_IS_AMONG(word, words) \
    (ari_word_of(word, words, sizeof(words) / sizeof *(words)) < sizeof(words) / sizeof *(words))

/* Formats the variable arguments after `format`, the function's last named parameter, into an array. */
#define ARI_FORMAT(text, format)                      \
    do {                                              \
        va_list args_;                                \
        va_start(args_, format);                      \
        vsnprintf(text, sizeof(text), format, args_); \
        va_end(args_);                                \
    } while (0)

/** Checks that an option's enumerator is one of 0 .. n - 1. Errors: AR_ERR_ARG, naming `label`, the value and the last
 *  valid one. */
AR_NODISCARD ar_status ari_check_choice(const char *label, int value, int n);

/** Reads a decimal number without a sign; *end: the text after it. Returns false if there is no number or it exceeds 64
 *  bits. */
bool ari_natural(uint64_t *out, const char *text, const char **end);

/** Returns the candidate with the smallest edit distance to `word`, or NULL if none is within a third of its length (at
 *  least 2); for "did you mean". Borrows. */
const char *ari_nearest(const char *word, const char *const *candidates, size_t n);

/** Writes ranks as "0-3, 8"; they need not be ascending. */
void ari_ranks_describe(const int *ranks, int n, char *text, size_t size);

/** Writes `text` for a message to `out`: at most cap - 1 bytes, with '?' for control characters and invalid UTF-8,
 *  and an ellipsis if it was cut. Returns `out`. Names in foreign files may contain anything, including terminal
 *  escapes. */
const char *ari_printable(char *out, size_t cap, const char *text);
#define ARI_PRINTABLE 160
/** Does the same for a whole message in place, but keeps line breaks and tabs. */
void ari_message_clean(char *text);
/** Does the same as an expression, whose storage lives to the end of the enclosing block. */
#define ARI_SHOW(text) ari_printable((char[ARI_PRINTABLE]){0}, ARI_PRINTABLE, (text))
/** "[64,256]". `cap` of 21 bytes a dimension, 22 with ", " between them, and 3 more is always enough. Returns `out`. */
const char *ari_shape_text(char *out, size_t cap, int ndim, const size_t *shape, const char *separator);
#define ARI_SHAPE_TEXT (8 * 22 + 3) /* for AR_ST_MAX_DIMS dimensions, the maximum */
/** Does the same as an expression, whose storage lives to the end of the enclosing block; also for an index such as
 *  "[64, 256]". */
#define ARI_SHOW_SHAPE(ndim, shape) ari_shape_text((char[ARI_SHAPE_TEXT]){0}, ARI_SHAPE_TEXT, (ndim), (shape), ",")
#define ARI_SHOW_INDEX(ndim, index) ari_shape_text((char[ARI_SHAPE_TEXT]){0}, ARI_SHAPE_TEXT, (ndim), (index), ", ")

/** Returns the length in bytes of the character at text, of which n > 0 bytes are left; 0: invalid UTF-8 (RFC 3629). */
size_t ari_utf8_length(const char *text, size_t n);
/** Returns true if a character of `bytes` bytes controls the terminal or the text's layout instead of being visible:
 *  control characters, U+0000 to U+001F and U+007F to U+009F; line ends, U+2028 and U+2029; and characters that change
 *  the direction of the following text (Unicode annex 9), U+061C, U+200E, U+200F, U+202A to U+202E and U+2066 to
 *  U+2069. */
bool ari_utf8_control(const char *text, size_t bytes);
/** Replaces bytes that are not valid UTF-8 by '?', in place. */
void ari_utf8_clean(char *text);
