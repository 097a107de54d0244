/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/json.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ref/io/file.h"
#include "ref/io/foreign.h"

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

ar_status ari_json_parse(json_t **gives, const char *text, size_t length, const char *name)
{
    if (length > ARI_JSON_MAX_BYTES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: %zu bytes of JSON, at most %zu are read", ARI_SHOW(name), length,
                            ARI_JSON_MAX_BYTES);
    if (value_bound(text, length) > ARI_JSON_MAX_VALUES)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: more than %zu JSON values", ARI_SHOW(name), ARI_JSON_MAX_VALUES);
    json_error_t error = {.line = -1}; /* jansson leaves the code unset where it has nothing to say */
    json_t *value = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (value == NULL && ari_json_no_memory(&error))
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(name));
    if (value == NULL)
        return ar_error_set(AR_ERR_FORMAT, "%s: not JSON: line %d, column %d: %s", ARI_SHOW(name), error.line,
                            error.column, ARI_SHOW(error.text));
    *gives = value;
    return AR_OK;
}

ar_status ari_json_load(json_t **gives, const char *path)
{
    unsigned char *text = NULL;
    size_t length = 0;
    AR_TRY(ari_foreign_read_text(&text, &length, path, ARI_JSON_MAX_BYTES));
    const ar_status st = ari_json_parse(gives, (const char *)text, length, path);
    free(text);
    return st;
}

ar_status ari_json_save(const json_t *value, const char *path)
{
    char *text = json_dumps(value, JSON_INDENT(2));
    const size_t length = text == NULL ? 0 : strlen(text);
    char *line = realloc(text, length + 2);
    if (text == NULL || line == NULL) {
        free(line == NULL ? text : line);
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for its JSON", ARI_SHOW(path));
    }
    memcpy(line + length, "\n", 2);
    const ar_status st = ari_file_write(path, line, length + 1);
    free(line);
    return st;
}

json_t *ari_json_number(double x)
{
    if (isnan(x))
        return json_string("NaN");
    if (isinf(x))
        return json_string(x > 0 ? "Infinity" : "-Infinity");
    return json_real(x);
}

/* Appends to *list, or destroys it where that fails. */
static void append(json_t **list, json_t *x)
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
        append(&list, json_integer(x[i] > INT64_MAX ? INT64_MAX : (json_int_t)x[i]));
    return list;
}

json_t *ari_json_floats(const float *x, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n && list; i++)
        append(&list, ari_json_number((double)x[i]));
    return list;
}

/* --- members ------------------------------------------------------------------------------------------------------ */
static const char *type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or an exponent";
    case JSON_TRUE:
    case JSON_FALSE:
        return "true or false";
    case JSON_NULL:
    default:
        return "null";
    }
}

const json_t *ari_json_get(const ari_json_at *at, const char *key)
{
    const json_t *value = json_object_get(at->object, key);
    return json_is_null(value) ? NULL : value;
}

/* Present and of the wanted type, or the error that says what it is instead. */
static ar_status expect(const ari_json_at *at, const char *key, const json_t *value, bool fits, const char *wanted)
{
    if (value == NULL)
        return ar_error_set(at->code, "%s: key '%s' is missing, expected %s", ARI_SHOW(at->name), key, wanted);
    if (!fits)
        return ar_error_set(at->code, "%s: key '%s' is %s, expected %s", ARI_SHOW(at->name), key, type_name(value),
                            wanted);
    return AR_OK;
}

ar_status ari_json_size(const ari_json_at *at, const char *key, size_t min, size_t max, size_t *out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_integer(value), "an integer"));
    const json_int_t x = json_integer_value(value);
    if (x < 0 || (uintmax_t)x < min || (uintmax_t)x > max)
        return ar_error_set(at->code, "%s: key '%s' is %" JSON_INTEGER_FORMAT ", expected an integer from %zu to %zu",
                            ARI_SHOW(at->name), key, x, min, max);
    *out = (size_t)x;
    return AR_OK;
}

ar_status ari_json_real(const ari_json_at *at, const char *key, double *out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_number(value), "a number"));
    *out = json_number_value(value);
    return AR_OK;
}

ar_status ari_json_bool(const ari_json_at *at, const char *key, bool *out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_boolean(value), "true or false"));
    *out = json_is_true(value);
    return AR_OK;
}

ar_status ari_json_string(const ari_json_at *at, const char *key, const char **out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_string(value), "a string"));
    *out = json_string_value(value);
    return AR_OK;
}

ar_status ari_json_object(const ari_json_at *at, const char *key, const json_t **out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_object(value), "an object"));
    *out = value;
    return AR_OK;
}

ar_status ari_json_array(const ari_json_at *at, const char *key, const json_t **out)
{
    const json_t *value = ari_json_get(at, key);
    AR_TRY(expect(at, key, value, json_is_array(value), "an array"));
    *out = value;
    return AR_OK;
}

ar_status ari_json_size_or(const ari_json_at *at, const char *key, size_t min, size_t max, size_t *out)
{
    return ari_json_get(at, key) == NULL ? AR_OK : ari_json_size(at, key, min, max, out);
}

ar_status ari_json_real_or(const ari_json_at *at, const char *key, double *out)
{
    return ari_json_get(at, key) == NULL ? AR_OK : ari_json_real(at, key, out);
}

ar_status ari_json_bool_or(const ari_json_at *at, const char *key, bool *out)
{
    return ari_json_get(at, key) == NULL ? AR_OK : ari_json_bool(at, key, out);
}

ar_status ari_json_string_or(const ari_json_at *at, const char *key, const char **out)
{
    return ari_json_get(at, key) == NULL ? AR_OK : ari_json_string(at, key, out);
}
