/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/trace_view.h"

#include <stdlib.h>
#include <string.h>

ar_status ari_text_create(ari_trace_text **gives, const char *path)
{
    *gives = NULL;
    ari_trace_text *t = malloc(sizeof *t);
    if (!t)
        return ar_error_set(AR_ERR_MEMORY, "no memory to write a trace");
    t->out = NULL;
    ar_status st = ari_atomic_file_create(&t->out, path);
    if (st == AR_OK)
        st = ari_atomic_file_stream(&t->to, t->out);
    if (st != AR_OK) {
        ari_atomic_file_discard(t->out);
        free(t);
        return st;
    }
    setvbuf(t->to, t->buffer, _IOFBF, sizeof t->buffer);
    *gives = t;
    return AR_OK;
}

void ari_text_string(FILE *to, const char *s)
{
    fputc('"', to);
    for (size_t n; *s; s += n ? n : 1) {
        n = ari_utf8_length(s, strnlen(s, 4));
        if (n == 0)
            fputs("\xef\xbf\xbd", to);
        else if (*s == '"' || *s == '\\')
            fprintf(to, "\\%c", *s);
        else if ((unsigned char)*s < 0x20 || *s == 0x7f || *s == '<')
            fprintf(to, "\\u%04x", (unsigned)*s);
        else
            fwrite(s, 1, n, to);
    }
    fputc('"', to);
}

ar_status ari_text_end(ari_trace_text *t, ar_status st)
{
    const ar_status written = ari_atomic_file_stream_end(t->to, t->out);
    if (st == AR_OK)
        st = written;
    if (st == AR_OK)
        st = ari_atomic_file_commit(t->out);
    ari_atomic_file_discard(t->out);
    free(t);
    return st;
}
