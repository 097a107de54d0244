/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>

#include "tests/support/test.h"

/* JSON in C without backslashes: ' stands for ". Of the caller, who frees it. */
static inline char *quoted(const char *text)
{
    char *out = strdup(text);
    cr_assert_not_null(out);
    for (char *at = out; (at = strchr(at, '\''));)
        *at = '"';
    return out;
}

/* Of the caller: json_decref. */
static inline json_t *quoted_json(const char *text)
{
    OWNED(free) char *json = quoted(text);
    json_error_t error;
    json_t *value = json_loads(json, JSON_DECODE_ANY, &error);
    cr_assert_not_null(value, "%s: %s", text, error.text);
    return value;
}
