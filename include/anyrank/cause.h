/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_CAUSE_H
#define ANYRANK_CAUSE_H

#include <stddef.h>

/* Lengths of ar_evidence's arrays. */
enum { AR_EVIDENCE_NUMBERS = 8, AR_EVIDENCE_CONSIDERED = 4 };

/** A diagnosis of why a tensor differs from its reference: the best-fitting cause, and supporting numbers. */
typedef struct ar_evidence {
    const char *cause; /* identifier of the cause in causes.md, such as "missing_all_reduce"; "unknown": no known cause
                          fits; NULL: no diagnosis was made. Static storage */
    size_t numbers;    /* entries of number[] */
    struct {
        const char *name; /* "factor", "share", "n", ..; static storage */
        double value;
    } number[AR_EVIDENCE_NUMBERS]; /* figures that support the cause */
    size_t considered;             /* entries of consider[] */
    struct {
        const char *cause;              /* a cause that predicts the differing values */
        double explained;               /* share, at least 1/4, of the sum of squared differences that it predicts */
    } consider[AR_EVIDENCE_CONSIDERED]; /* candidate causes, rejected ones included, the largest share first */
} ar_evidence;

#endif
