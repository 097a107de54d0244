/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_REF_IO_SCAN_H
#define ANYRANK_REF_IO_SCAN_H

#include <stdbool.h>
#include <stddef.h>

/* Splits a large JSON object into its members without building a tree, so that a 100 MB header of somebody else costs
 * memory for what it describes and not for what its JSON would blow up to. Each piece is then checked by the real
 * parser: the scanner need only find where a piece ends and never reads past `length`. */
typedef struct ari_scan {
    const char *text;
    size_t length, at;
    int max_depth;       /* brackets inside a value */
    const char *problem; /* NULL, or what was wrong at `at`. Static storage */
} ari_scan;

typedef struct ari_slice {
    size_t begin, end;  /* [begin, end) of the text */
    bool negative_zero; /* holds the integer -0, which the parser would read as 0 */
} ari_slice;

/** Skips white space and the opening brace. False (with a problem) if there is none. */
bool ari_scan_object_begin(ari_scan *s);
/** The next member's key (quotes included) and value. False at the closing brace, which is skipped, or with a problem.
 *  `first` is true for the first call. */
bool ari_scan_member(ari_scan *s, bool first, ari_slice *key, ari_slice *value);
/** True if only white space is left. */
bool ari_scan_at_end(ari_scan *s);

#endif
