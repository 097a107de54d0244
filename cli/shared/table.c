/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/shared/table.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/size.h"

enum { COLUMN_GAP = 2 };

static void add_cell(ari_table *t, const char *text)
{
    char *copy = strdup(text);
    if (!copy || ari_grow(&t->cells, &t->capacity, t->count, sizeof *t->cells, "a table") != AR_OK) {
        t->failed = true;
        free(copy);
        return;
    }
    t->cells[t->count++] = copy;
}

static void add_cells(ari_table *t, const char *separator, const char *format, va_list args)
{
    ARI_OWNED char *text = NULL;
    if (vasprintf(&text, format, args) < 0) {
        t->failed = true;
        return;
    }
    for (char *rest = text; rest != NULL;)
        add_cell(t, strsep(&rest, separator));
}

void ari_table_cell(ari_table *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add_cells(t, "", format, args);
    va_end(args);
}

void ari_table_row(ari_table *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    add_cells(t, "\t", format, args);
    va_end(args);
}

/* Returns the number of UTF-8 characters: bytes that do not continue a character. */
static int width_of(const char *text)
{
    int width = 0;
    for (; *text != '\0'; text++)
        width += ((unsigned char)*text & 0xc0) != 0x80;
    return width;
}

/* Prints the cells of a row; the last column is not padded, so that no line ends in spaces. */
static void print_row(const ari_table *t, const char *const *cells, const int *widths, FILE *out, int indent)
{
    size_t cell_count = t->n;
    while (cell_count > 0 && cells[cell_count - 1][0] == '\0')
        cell_count--;
    fprintf(out, "%*s", cell_count == 0 ? 0 : indent, "");
    for (size_t c = 0; c < cell_count; c++) {
        const int padding = widths[c] - width_of(cells[c]);
        const int before = t->columns[c].align == ARI_RIGHT ? padding : 0;
        const int after = c + 1 == cell_count ? 0 : padding - before + COLUMN_GAP;
        fprintf(out, "%*s%s%*s", before, "", cells[c], after, "");
    }
    fputc('\n', out);
}

static void print_all(const ari_table *t, const char **titles, int *widths, FILE *out, int indent)
{
    int titled = 0;
    for (size_t c = 0; c < t->n; c++) {
        titled += t->columns[c].title != NULL;
        titles[c] = t->columns[c].title != NULL ? t->columns[c].title : "";
        widths[c] = width_of(titles[c]);
    }
    for (size_t i = 0; i < t->count; i++) {
        const int width = width_of(t->cells[i]);
        widths[i % t->n] = width > widths[i % t->n] ? width : widths[i % t->n];
    }
    if (titled > 0)
        print_row(t, titles, widths, out, indent);
    for (size_t i = 0; i < t->count; i += t->n)
        print_row(t, (const char *const *)(t->cells + i), widths, out, indent);
}

/* Prints a row of Markdown. A cell must not contain a bar, which would end it. */
static void print_markdown_row(const char *const *cells, size_t n, FILE *out)
{
    for (size_t c = 0; c < n; c++) {
        fputs(c == 0 ? "| " : " | ", out);
        for (const char *p = cells[c]; *p != '\0'; p++)
            fprintf(out, *p == '|' ? "\\%c" : "%c", *p);
    }
    fputs(" |\n", out);
}

static void print_markdown(const ari_table *t, const char **titles, FILE *out)
{
    for (size_t c = 0; c < t->n; c++)
        titles[c] = t->columns[c].title != NULL ? t->columns[c].title : "";
    print_markdown_row(titles, t->n, out);
    for (size_t c = 0; c < t->n; c++)
        fputs(t->columns[c].align == ARI_RIGHT ? "|---:" : "|---", out);
    fputs("|\n", out);
    for (size_t i = 0; i < t->count; i += t->n)
        print_markdown_row((const char *const *)(t->cells + i), t->n, out);
}

/* indent < 0: Markdown. */
static ar_status end(ari_table *t, FILE *out, int indent)
{
    while (t->count % t->n != 0 && !t->failed)
        add_cell(t, "");
    ARI_OWNED int *widths = calloc(t->n, sizeof *widths);
    ARI_OWNED const char **titles = calloc(t->n, sizeof *titles);
    const bool failed = widths == NULL || titles == NULL || t->failed;
    if (out != NULL && !failed && indent >= 0)
        print_all(t, titles, widths, out, indent);
    else if (out != NULL && !failed)
        print_markdown(t, titles, out);
    for (size_t i = 0; i < t->count; i++)
        free(t->cells[i]);
    free(t->cells);
    *t = (ari_table){.columns = t->columns, .n = t->n};
    if (failed)
        return ar_error_set(AR_ERR_MEMORY, "no memory for a table of %zu columns", t->n);
    return AR_OK;
}

ar_status ari_table_end(ari_table *t, FILE *out, int indent)
{
    return end(t, out, indent);
}

ar_status ari_table_markdown(ari_table *t, FILE *out)
{
    return end(t, out, -1);
}

/* --- numbers for people ------------------------------------------------------------------------------------------- */

const char *ari_count_text(char *text, uint64_t n)
{
    char digits[ARI_NUMBER];
    const int length = snprintf(digits, sizeof digits, "%llu", (unsigned long long)n);
    int pos = 0;
    for (int i = 0; i < length; i++) {
        if (i > 0 && (length - i) % 3 == 0)
            text[pos++] = ',';
        text[pos++] = digits[i];
    }
    text[pos] = '\0';
    return text;
}

const char *ari_bytes_text(char *text, uint64_t bytes)
{
    static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double value = (double)bytes;
    size_t unit = 0;
    /* prevents 999.95 kB from being printed as 1000.0 kB */
    while (value >= (unit == 0 ? 1000.0 : 999.95) && unit + 1 < sizeof units / sizeof units[0]) {
        value /= 1000.0;
        unit++;
    }
    snprintf(text, ARI_NUMBER, unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}

const char *ari_seconds_text(char *text, double seconds)
{
    if (!(seconds >= 0.0) || seconds > 1e9)
        snprintf(text, ARI_NUMBER, "?");
    else if (seconds < 0.99995e-3)
        snprintf(text, ARI_NUMBER, "%.1f us", seconds * 1e6);
    else if (seconds < 0.9995)
        snprintf(text, ARI_NUMBER, "%.1f ms", seconds * 1e3);
    else if (seconds < 99.995)
        snprintf(text, ARI_NUMBER, "%.2f s", seconds);
    else
        snprintf(text, ARI_NUMBER, "%.0f min %02.0f s", floor(round(seconds) / 60.0), fmod(round(seconds), 60.0));
    return text;
}
