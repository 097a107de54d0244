/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/status.h"

/* Tables whose columns are as wide as their widest cell, two spaces apart. Widths count UTF-8 characters. */
typedef enum ari_align { ARI_LEFT, ARI_RIGHT } ari_align;

typedef struct ari_column {
    const char *title; /* title of the column; NULL in all columns: no title row. Borrowed while the table exists */
    ari_align align;
} ari_column;

/* Table that is being filled. Initialise it with ARI_TABLE(columns), which it borrows. */
typedef struct ari_table {
    const ari_column *columns;
    size_t n;
    char **cells; /* row by row */
    size_t count, capacity;
    bool failed; /* a cell could not be stored */
} ari_table;
#define ARI_TABLE(list)                                       \
    {                                                         \
        .columns = (list), .n = sizeof(list) / sizeof *(list) \
    }

/** Adds the next cell, row by row. A failure is kept and reported by ari_table_end. */
void ari_table_cell(ari_table *t, const char *format, ...) AR_PRINTF(2, 3);
/** Adds several cells separated by tabs; a value that may contain a tab needs ARI_SHOW. */
void ari_table_row(ari_table *t, const char *format, ...) AR_PRINTF(2, 3);
/** Prints all rows with `indent` spaces before them and frees the table. An unfinished row is filled with empty cells.
 *  out NULL: only frees. Errors: AR_ERR_MEMORY (nothing is printed). */
AR_NODISCARD ar_status ari_table_end(ari_table *t, FILE *out, int indent);
/** Ends the table as Markdown. */
AR_NODISCARD ar_status ari_table_markdown(ari_table *t, FILE *out);

/* Number formats for people. Each function writes to text[0 .. ARI_NUMBER) and returns text. */
enum { ARI_NUMBER = 32 };
/** "1,234,567". */
const char *ari_count_text(char *text, uint64_t n);
/** "999 B", "1.2 kB", "1.2 MB": powers of 1000. */
const char *ari_bytes_text(char *text, uint64_t bytes);
/** Returns "12.3 us", "12.3 ms", "4.56 s", "3 min 07 s"; "?" if there is no time. */
const char *ari_seconds_text(char *text, double seconds);

/* The same as expressions, whose storage lives to the end of the enclosing block. */
#define ARI_COUNT(n) ari_count_text((char[ARI_NUMBER]){0}, (n))
#define ARI_BYTES(n) ari_bytes_text((char[ARI_NUMBER]){0}, (n))
#define ARI_SECONDS(s) ari_seconds_text((char[ARI_NUMBER]){0}, (s))
