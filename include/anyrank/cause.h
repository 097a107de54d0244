/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CAUSE_H
#define ANYRANK_CAUSE_H

#include <stddef.h>

enum { AR_EVIDENCE_NUMBERS = 8, AR_EVIDENCE_CONSIDERED = 4 };

/** Evidence about a difference: the cause that fits best and the numbers that support it. */
typedef struct ar_evidence {
    const char *cause; /* identifier (causes.md), "missing_all_reduce"; "unknown": what was found fits no known
                          cause; NULL: not explained. Static storage */
    size_t numbers;
    struct {
        const char *name; /* static storage: "factor", "share", "n" */
        double value;
    } number[AR_EVIDENCE_NUMBERS];
    size_t considered; /* causes that expect values of their own, found or not, and explain at least a quarter */
    struct {
        const char *cause;
        double explained; /* share of the squares of what differs; the largest first */
    } consider[AR_EVIDENCE_CONSIDERED];
} ar_evidence;

#endif
