/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_SIM_TRACE_TEXT_H
#define ARI_SIM_TRACE_TEXT_H

#include <stdint.h>

#include "ref/core/out.h"

/* Text on its way into a file: a trace may be larger than what one wants to hold in memory. The first error stays, and
 * is told at the end. */
typedef struct ari_trace_text {
    ari_out *out;
    ar_status st;
    size_t used;
    char buffer[1 << 16];
} ari_trace_text;

/** Gives. Errors: AR_ERR_IO, AR_ERR_ARG (no path), AR_ERR_MEMORY. */
AR_NODISCARD ar_status ari_text_create(ari_trace_text **gives, const char *path);
/** At most 1000 bytes a call. */
void ari_text_put(ari_trace_text *t, const char *format, ...) AR_PRINTF(2, 3);
void ari_text_bytes(ari_trace_text *t, const char *bytes, size_t n);
/** A JSON string, quoted. What is not UTF-8 becomes U+FFFD. '<' is escaped, so that no text can end or open an element
 *  of a page that the JSON stands in. */
void ari_text_string(ari_trace_text *t, const char *s);
/** Microseconds with three decimals. Readers that multiply by 1000 and cut off get `ns` back. */
void ari_text_us(ari_trace_text *t, uint64_t ns);
/** Ends the text: the file gets its name if `st` and everything put were AR_OK, else nothing is left of it. Returns the
 *  first error of both. */
AR_NODISCARD ar_status ari_text_end(ari_trace_text *t, ar_status st);

#endif
