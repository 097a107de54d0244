/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "anyrank/status.h"

/* Limits for JSON from other programs. A tree takes up to about 250 bytes for the three bytes of "{},", so memory is
 * bounded by the number of values in addition to the number of bytes. The largest sharded indexes have about 10^5
 * values. */
#define ARI_JSON_MAX_BYTES ((size_t)64 << 20)
#define ARI_JSON_MAX_VALUES ((size_t)1 << 21)

/** Parses JSON text (RFC 8259). Duplicate keys, invalid UTF-8, NUL and text after the value are refused. `name` is for
 *  messages. Release *out with json_decref. Errors: AR_ERR_FORMAT with line and column, AR_ERR_OVERFLOW (beyond the
 *  limits above), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_json_parse(json_t **out, const char *text, size_t length, const char *name);
/** Does the same for a file. Errors: as above, and AR_ERR_IO. */
AR_NODISCARD ar_status ari_json_load(json_t **out, const char *path);
/** Returns true if a load failed because memory was short. jansson usually reports nothing then, and always reports an
 *  error in the text. (A string that it has no memory for is "invalid token", like an invalid string.) */
bool ari_json_no_memory(const json_error_t *error);
/** Writes `value` and a newline to `path` through a temporary file, or to stdout for "-". Borrows value. Errors:
 *  AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_json_save(const json_t *value, const char *path);
/** Returns a JSON number, or one of the strings "NaN", "Infinity", "-Infinity", which JSON has no numbers for. A new
 *  reference; NULL if memory is short, which json_object_set_new and json_array_append_new report. */
json_t *ari_json_number(double x);
/** Returns a JSON string of a text with arbitrary bytes, such as a folder's name: each byte that is not UTF-8 becomes
 *  '?'. (jansson refuses such a string, and an object with it would silently not be created.) A new reference; NULL if
 *  memory is short. */
json_t *ari_json_text(const char *text);
/** True if the bytes are well-formed UTF-8 (RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF). */
bool ari_utf8_valid(const char *text, size_t length);
/** Create lists of numbers: of sizes (a shape, an index), and of fp32 numbers. Return new references; NULL if memory is
 *  short. */
json_t *ari_json_sizes(const size_t *x, size_t n);
json_t *ari_json_floats(const float *x, size_t n);
/** Returns the first key of an object that is not among the n known ones; NULL: all are known. Borrowed from the
 *  object. */
const char *ari_json_unknown_key(const json_t *object, const char *const *known_keys, size_t n);

/** Reads members of one object with messages that name the file and the key: "config.json: key 'hidden_size': ...". */
typedef struct ari_json_at {
    const json_t *object;
    const char *name; /* the file's name for messages; may end in the path of a nested object */
    ar_status code;   /* status for a missing or ill-typed key: AR_ERR_FORMAT, AR_ERR_CONFIG */
} ari_json_at;

/** Sets the error path->code for a key: "FILE: key 'KEY'" followed by the formatted text, such as " is 3, expected
 *  ..". */
ar_status ari_json_wrong(const ari_json_at *path, const char *key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/** Returns the member, or NULL if it is absent or null: Hugging Face writes null for "not set". */
const json_t *ari_json_get(const ari_json_at *path, const char *key);
/** An integer in [min, max]. Errors: path->code (absent, another type, out of range). */
AR_NODISCARD ar_status ari_json_size(const ari_json_at *path, const char *key, size_t min, size_t max, size_t *out);
/** A finite number, integer or real. Errors: at->code. */
AR_NODISCARD ar_status ari_json_real(const ari_json_at *at, const char *key, double *out);
/** Reads true or false. Errors: at->code. */
AR_NODISCARD ar_status ari_json_bool(const ari_json_at *at, const char *key, bool *out);
/** A string, borrowed from the object. Errors: at->code. */
AR_NODISCARD ar_status ari_json_string(const ari_json_at *at, const char *key, const char **out);
/** A nested object, borrowed. Errors: at->code. */
AR_NODISCARD ar_status ari_json_object(const ari_json_at *at, const char *key, const json_t **out);
/** An array, borrowed. Errors: at->code. */
AR_NODISCARD ar_status ari_json_array(const ari_json_at *at, const char *key, const json_t **out);

/* Reads a size, but leaves *out unchanged if the key is absent or null: set the default first. */
AR_NODISCARD ar_status ari_json_size_or(const ari_json_at *path, const char *key, size_t min, size_t max, size_t *out);
AR_NODISCARD ar_status ari_json_real_or(const ari_json_at *at, const char *key, double *out);
AR_NODISCARD ar_status ari_json_bool_or(const ari_json_at *at, const char *key, bool *out);
AR_NODISCARD ar_status ari_json_string_or(const ari_json_at *at, const char *key, const char **out);

/* --- JSON Lines (jsonl.c) ----------------------------------------------------------------------------------------- */

/* Consecutive documents. */
typedef struct ari_documents {
    int32_t *token; /* [tokens] */
    size_t *end;    /* [documents] end of each document's tokens; ascending, and the last is `tokens` */
    size_t tokens, documents;
} ari_documents;

/** Reads a file of `bytes` bytes with one object per line: the bytes of a string "text" (UTF-8) as tokens, or the
 *  numbers of a list "input_ids". Other members, empty lines and documents without a token are skipped. Call
 *  ari_documents_fini, also after an error. Errors, with the line: AR_ERR_FORMAT (no such object, or both members),
 *  AR_ERR_DATA (a token below 0 or above 2^31 - 1; no document at all), AR_ERR_UNSUPPORTED (labels, masks, positions),
 *  AR_ERR_OVERFLOW (a line beyond ARI_JSON_MAX_BYTES); AR_ERR_IO, AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_jsonl_read(ari_documents *d, int fd, size_t bytes, const char *path);
void ari_documents_fini(ari_documents *d);
/** True if a document begins at this token. */
bool ari_documents_begins(const ari_documents *d, size_t token);
