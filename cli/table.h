/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ARI_CLI_TABLE_H
#define ARI_CLI_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "anyrank/status.h"

/* A table whose columns are as wide as their widest cell, two spaces apart; widths count characters of UTF-8. */
typedef struct ari_table ari_table;

typedef enum ari_align { ARI_LEFT, ARI_RIGHT } ari_align;

typedef struct ari_column {
    const char *title; /* NULL in all columns: no title row. Borrowed while the table lives */
    ari_align align;
} ari_column;

/** Gives a table of n columns. Errors: AR_ERR_MEMORY. Destroy with ari_table_destroy. */
AR_NODISCARD ar_status ari_table_create(ari_table **gives, const ari_column *columns, size_t n);
/** Adds the next cell, row by row. A failure is kept and reported by ari_table_print. */
void ari_table_cell(ari_table *t, const char *format, ...) AR_PRINTF(2, 3);
/** Prints all rows with `indent` spaces before them; a row begun and not ended is filled with empty cells.
 *  Errors: AR_ERR_MEMORY (a cell could not be stored; nothing is printed). */
AR_NODISCARD ar_status ari_table_print(ari_table *t, FILE *to, int indent);
void ari_table_destroy(ari_table *t); /* accepts NULL */

/* Numbers for people. Each writes into text[0 .. ARI_NUMBER) and gives it back. */
enum { ARI_NUMBER = 32 };
/** "1,234,567". */
const char *ari_count_text(char *text, uint64_t n);
/** "999 B", "1.2 kB", "1.2 MB": powers of 1000. */
const char *ari_bytes_text(char *text, uint64_t bytes);
/** "12.3 ms", "4.56 s", "3 min 07 s". */
const char *ari_seconds_text(char *text, double seconds);

/* The same as expressions, in storage that lives to the end of the enclosing block. */
#define ARI_COUNT(n) ari_count_text((char[ARI_NUMBER]){0}, (n))
#define ARI_BYTES(n) ari_bytes_text((char[ARI_NUMBER]){0}, (n))
#define ARI_SECONDS(s) ari_seconds_text((char[ARI_NUMBER]){0}, (s))

#endif
