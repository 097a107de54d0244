/* SPDX-License-Identifier: Apache-2.0 */
#include "ref/io/scan.h"

static bool fail(ari_scan *s, const char *problem)
{
    s->problem = problem;
    return false;
}

/* The byte under the cursor; 0 at the end. A literal 0 byte is never part of JSON, so the two need no distinction. */
static char peek(const ari_scan *s)
{
    return s->at < s->length ? s->text[s->at] : '\0';
}

static void skip_space(ari_scan *s)
{
    while (peek(s) == ' ' || peek(s) == '\t' || peek(s) == '\n' || peek(s) == '\r')
        s->at++;
}

static bool skip_string(ari_scan *s)
{
    for (s->at++; s->at < s->length; s->at++) {
        if (s->text[s->at] == '\\') {
            s->at++;
        } else if (s->text[s->at] == '"') {
            s->at++;
            return true;
        }
    }
    s->at = s->length;
    return fail(s, "a string has no end");
}

/* True under a minus sign that starts the integer -0. -0.5 and -0e0 are reals, which have a negative zero. */
static bool at_negative_zero(const ari_scan *s)
{
    if (peek(s) != '-' || s->at + 1 >= s->length || s->text[s->at + 1] != '0')
        return false;
    const char next = s->at + 2 < s->length ? s->text[s->at + 2] : '\0';
    return next != '.' && next != 'e' && next != 'E';
}

/* A token that is neither string nor bracket: a number or a word. `previous` keeps 1e-0 from looking like -0. */
static void skip_plain(ari_scan *s, bool *negative_zero)
{
    if (at_negative_zero(s))
        *negative_zero = true;
    for (char c = peek(s); s->at < s->length; s->at++, c = peek(s)) {
        if (c == ',' || c == ':' || c == '"' || c == '[' || c == ']' || c == '{' || c == '}' || c == ' ' || c == '\t' ||
            c == '\n' || c == '\r')
            return;
    }
}

static bool skip_value(ari_scan *s, ari_slice *value)
{
    int depth = 0;
    value->begin = s->at;
    value->negative_zero = false;
    do {
        const char c = peek(s);
        if (c == '"') {
            if (!skip_string(s))
                return false;
        } else if (c == '{' || c == '[') {
            if (++depth > s->max_depth)
                return fail(s, "nested too deeply");
            s->at++;
        } else if (c == '}' || c == ']') {
            if (--depth < 0)
                return fail(s, "expected a value");
            s->at++;
        } else if (c == ',' || c == ':') {
            if (depth == 0)
                return fail(s, "expected a value");
            s->at++;
        } else {
            skip_plain(s, &value->negative_zero);
        }
        value->end = s->at;
        skip_space(s);
    } while (depth > 0 && s->at < s->length);
    if (depth > 0)
        return fail(s, "ends inside a value");
    return value->end > value->begin || fail(s, "expected a value");
}

bool ari_scan_object_begin(ari_scan *s)
{
    skip_space(s);
    if (s->at >= s->length)
        return fail(s, "there is no JSON");
    if (peek(s) != '{')
        return fail(s, "expected '{'");
    s->at++;
    return true;
}

bool ari_scan_member(ari_scan *s, bool first, ari_slice *key, ari_slice *value)
{
    skip_space(s);
    if (peek(s) == '}') {
        s->at++;
        return false;
    }
    if (!first) {
        if (peek(s) != ',')
            return fail(s, s->at >= s->length ? "ends inside an object" : "expected ',' or '}'");
        s->at++;
        skip_space(s);
    }
    if (peek(s) != '"')
        return fail(s, s->at >= s->length ? "ends inside an object" : "expected a key in quotes");
    key->begin = s->at;
    key->negative_zero = false;
    if (!skip_string(s))
        return false;
    key->end = s->at;
    skip_space(s);
    if (peek(s) != ':')
        return fail(s, "expected ':'");
    s->at++;
    skip_space(s);
    if (s->at >= s->length)
        return fail(s, "ends inside an object");
    return skip_value(s, value);
}

bool ari_scan_at_end(ari_scan *s)
{
    skip_space(s);
    return s->at >= s->length;
}
