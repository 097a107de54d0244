/* SPDX-License-Identifier: Apache-2.0 */
#include "anyrank/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

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

const char *ar_status_text(ar_status st)
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
    va_list args;
    va_start(args, format);
    vsnprintf(next, sizeof next, format, args);
    va_end(args);
    memcpy(message, next, strlen(next) + 1);
    return st;
}
