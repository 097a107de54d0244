/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"

/* An upper bound: commas and brackets inside strings count too. */
static size_t value_bound(const char *text, size_t length)
{
    size_t n = 1;
    for (size_t i = 0; i < length; i++)
        n += text[i] == ',' || text[i] == '[' || text[i] == '{';
    return n;
}

bool ari_json_no_memory(const json_error_t *error)
{
    return error->text[0] == '\0' || json_error_code(error) == json_error_out_of_memory;
}

ar_status ari_json_parse(json_t **out, const char *text, size_t length, const char *name)
{
    if (length > ARI_JSON_MAX_BYTES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: %zu bytes of JSON, at most %zu are read", ARI_SHOW(name), length,
                            ARI_JSON_MAX_BYTES);
    if (length >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: not JSON: begins with a byte order mark; save it as UTF-8 without one",
                            ARI_SHOW(name));
    const char *nul = memchr(text, '\0', length); /* jansson would treat a NUL as the end of the file */
    if (nul != NULL)
        return ar_error_set(AR_ERR_FORMAT, "%s: not JSON: byte %zu of %zu is NUL", ARI_SHOW(name), (size_t)(nul - text),
                            length);
    if (value_bound(text, length) > ARI_JSON_MAX_VALUES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: more than %zu JSON values", ARI_SHOW(name), ARI_JSON_MAX_VALUES);
    json_error_t error = {.line = -1}; /* jansson leaves the code unset if it has no message */
    json_t *value = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (value == NULL && ari_json_no_memory(&error))
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(name));
    const bool python = strstr(error.text, "near 'NaN'") || strstr(error.text, "near 'Infinity'") ||
                        strstr(error.text, "token near '-'");
    char line[24] = ""; /* for JSON Lines the name includes the line number */
    if (value == NULL && memchr(text, '\n', length))
        snprintf(line, sizeof line, "line %d, ", error.line);
    if (value == NULL)
        return ar_error_set(AR_ERR_FORMAT, "%s: not JSON: %scolumn %d: %s%s", ARI_SHOW(name), line, error.column,
                            ARI_SHOW(error.text), python ? "; JSON has no NaN and no Infinity: write null" : "");
    *out = value;
    return AR_OK;
}

ar_status ari_json_load(json_t **out, const char *path)
{
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    AR_TRY(ari_file_read_text(&text, &length, path, ARI_JSON_MAX_BYTES));
    return ari_json_parse(out, (const char *)text, length, path);
}

ar_status ari_json_save(const json_t *value, const char *path)
{
    ARI_OWNED char *line = NULL;
    ARI_OWNED char *text = json_dumps(value, JSON_INDENT(2));
    const int length = text == NULL ? -1 : asprintf(&line, "%s\n", text);
    if (length < 0)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(path));
    return ari_file_write(path, line, (size_t)length);
}

/* --- text --------------------------------------------------------------------------------------------------------- */

bool ari_utf8_valid(const char *text, size_t length)
{
    size_t n = 1;
    for (size_t i = 0; i < length && n > 0; i += n)
        n = ari_utf8_length(text + i, length - i);
    return n > 0;
}

json_t *ari_json_text(const char *text)
{
    ARI_OWNED char *clean = strdup(text);
    if (clean == NULL)
        return NULL;
    ari_utf8_clean(clean);
    return json_string(clean);
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

json_t *ari_json_number(double x)
{
    if (isnan(x))
        return json_string("NaN");
    if (isinf(x))
        return json_string(x > 0 ? "Infinity" : "-Infinity");
    return json_real(x);
}

/* Appends x to *list, or destroys *list if that fails. */
static void append_value(json_t **list, json_t *x)
{
    if (*list && json_array_append_new(*list, x) == 0)
        return;
    json_decref(*list);
    *list = NULL;
}

json_t *ari_json_sizes(const size_t *x, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n && list; i++)
        append_value(&list, json_integer(x[i] > INT64_MAX ? INT64_MAX : (json_int_t)x[i]));
    return list;
}

const char *ari_json_unknown_key(const json_t *object, const char *const *known_keys, size_t n)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)object, key, value)
    {
        if (ari_word_of(key, known_keys, n) == n)
            return key;
    }
    return NULL;
}

json_t *ari_json_floats(const float *x, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n && list; i++)
        append_value(&list, ari_json_number((double)x[i]));
    return list;
}

/* --- members ------------------------------------------------------------------------------------------------------ */
static const char *type_name(const json_t *value)
{
    static const char *const names[] = {[JSON_OBJECT] = "an object",
                                        [JSON_ARRAY] = "an array",
                                        [JSON_STRING] = "a string",
                                        [JSON_INTEGER] = "an integer",
                                        [JSON_REAL] = "a number with a fraction or an exponent",
                                        [JSON_TRUE] = "true or false",
                                        [JSON_FALSE] = "true or false",
                                        [JSON_NULL] = "null"};
    return names[json_typeof(value)];
}

const json_t *ari_json_get(const ari_json_at *path, const char *key)
{
    const json_t *value = json_object_get(path->object, key);
    return json_is_null(value) ? NULL : value;
}

ar_status ari_json_wrong(const ari_json_at *path, const char *key, const char *format, ...)
{
    char message[2048];
    ARI_FORMAT(message, format);
    return ar_error_set(path->code, "%s: key '%s'%s", ARI_SHOW(path->name), key, message);
}

/* Checks that a value is present and has the expected type; otherwise sets an error that says what it is. */
static ar_status expect(const ari_json_at *path, const char *key, const json_t *value, bool fits, const char *expected)
{
    if (value == NULL)
        return ari_json_wrong(path, key, " is missing, expected %s", expected);
    if (!fits && json_is_real(value))
        return ari_json_wrong(path, key, " is %g, %s, expected %s", json_real_value(value), type_name(value), expected);
    if (!fits)
        return ari_json_wrong(path, key, " is %s, expected %s", type_name(value), expected);
    return AR_OK;
}

ar_status ari_json_size(const ari_json_at *path, const char *key, size_t min, size_t max, size_t *out)
{
    const json_t *value = ari_json_get(path, key);
    AR_TRY(expect(path, key, value, json_is_integer(value), "an integer"));
    const json_int_t x = json_integer_value(value);
    if (x < 0 || (uintmax_t)x < min || (uintmax_t)x > max)
        return ari_json_wrong(path, key, " is %" JSON_INTEGER_FORMAT ", expected an integer from %zu to %zu", x, min,
                              max);
    *out = (size_t)x;
    return AR_OK;
}

#define GETTER(kind, type, is_one, wanted, value_of)                             \
    ar_status ari_json_##kind(const ari_json_at *at, const char *key, type *out) \
    {                                                                            \
        const json_t *value = ari_json_get(at, key);                             \
        AR_TRY(expect(at, key, value, is_one(value), wanted));                   \
        *out = value_of(value);                                                  \
        return AR_OK;                                                            \
    }
GETTER(real, double, json_is_number, "a number", json_number_value)
GETTER(bool, bool, json_is_boolean, "true or false", json_is_true)
GETTER(string, const char *, json_is_string, "a string", json_string_value)
GETTER(object, const json_t *, json_is_object, "an object", )
GETTER(array, const json_t *, json_is_array, "an array", )

#define OPTIONAL(kind, type)                                                          \
    ar_status ari_json_##kind##_or(const ari_json_at *at, const char *key, type *out) \
    {                                                                                 \
        return ari_json_get(at, key) == NULL ? AR_OK : ari_json_##kind(at, key, out); \
    }
OPTIONAL(real, double)
OPTIONAL(bool, bool)
OPTIONAL(string, const char *)

ar_status ari_json_size_or(const ari_json_at *path, const char *key, size_t min, size_t max, size_t *out)
{
    return ari_json_get(path, key) == NULL ? AR_OK : ari_json_size(path, key, min, max, out);
}
