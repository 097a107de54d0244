/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/trace_view.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LONGEST = 1000 };

ar_status ari_text_create(ari_trace_text **gives, const char *path)
{
    *gives = NULL;
    ari_trace_text *t = malloc(sizeof *t);
    if (!t)
        return ar_error_set(AR_ERR_MEMORY, "no memory to write a trace");
    t->st = AR_OK;
    t->used = 0;
    const ar_status st = ari_out_create(&t->out, path);
    if (st != AR_OK) {
        free(t);
        return st;
    }
    *gives = t;
    return AR_OK;
}

static void flush(ari_trace_text *t)
{
    if (t->st == AR_OK)
        t->st = ari_out_write(t->out, t->buffer, t->used);
    t->used = 0;
}

void ari_text_put(ari_trace_text *t, const char *format, ...)
{
    if (sizeof t->buffer - t->used <= LONGEST)
        flush(t);
    va_list list;
    va_start(list, format);
    const int n = vsnprintf(t->buffer + t->used, LONGEST + 1, format, list);
    va_end(list);
    t->used += n < 0 ? 0 : n > LONGEST ? (size_t)LONGEST : (size_t)n;
}

void ari_text_bytes(ari_trace_text *t, const char *bytes, size_t n)
{
    while (n > 0) {
        if (t->used == sizeof t->buffer)
            flush(t);
        const size_t room = sizeof t->buffer - t->used, step = n < room ? n : room;
        memcpy(t->buffer + t->used, bytes, step);
        t->used += step;
        bytes += step;
        n -= step;
    }
}

void ari_text_string(ari_trace_text *t, const char *s)
{
    ari_text_bytes(t, "\"", 1);
    for (size_t n; *s; s += n ? n : 1) {
        n = ari_utf8_length(s, strnlen(s, 4));
        if (n == 0)
            ari_text_bytes(t, "\xef\xbf\xbd", 3);
        else if (*s == '"' || *s == '\\')
            ari_text_put(t, "\\%c", *s);
        else if ((unsigned char)*s < 0x20 || *s == 0x7f || *s == '<')
            ari_text_put(t, "\\u%04x", (unsigned)*s);
        else
            ari_text_bytes(t, s, n);
    }
    ari_text_bytes(t, "\"", 1);
}

void ari_text_us(ari_trace_text *t, uint64_t ns)
{
    /* Perfetto's reader has (int64_t)(us * 1000.0), which for some decimals is the nanosecond before. */
    const bool falls_short = (uint64_t)((double)ns / 1000.0 * 1000.0) < ns;
    ari_text_put(t, "%llu.%03u%s", (unsigned long long)(ns / 1000), (unsigned)(ns % 1000), falls_short ? "1" : "");
}

ar_status ari_text_end(ari_trace_text *t, ar_status st)
{
    flush(t);
    if (st == AR_OK)
        st = t->st;
    if (st == AR_OK)
        st = ari_out_commit(t->out);
    else
        ari_out_discard(t->out);
    free(t);
    return st;
}
