/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CORE_SPAN_H
#define ARI_CORE_SPAN_H

#include "anyrank/trace.h"

/* Spans of the library's own code. Where nothing is recorded they cost one test of a pointer: no text is made. */

/** ar_trace_begin with a name as of printf. */
void ari_span_begin(const char *format, ...) AR_PRINTF(1, 2);
/** ar_trace_end around a call: `AR_TRY(ari_span_end(f(x)))` ends the span whatever f returns. Returns st. */
static inline ar_status ari_span_end(ar_status st)
{
    ar_trace_end();
    return st;
}

#endif
