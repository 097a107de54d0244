/* SPDX-License-Identifier: Apache-2.0 */
/* Schedules in PyTorch's CSV (torch.distributed.pipelining.schedules, _Action and _load_csv): a line for each rank, a
 * cell for each operation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/pipeline/schedule.h"
#include "ref/pipeline/schedule_private.h"

#define MOST_BYTES ((size_t)256 << 20)
#define MOST_DIGITS 9 /* a number with this many digits fits an int */

/* Operations of FSDP, and waits, which --zero and the step determine; each with or without a micro-batch. */
static const char *const passed_over[] = {"UNSHARD",          "RESHARD",     "REDUCE_GRAD",
                                          "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B"};

typedef struct reader {
    const char *name;
    ari_pp_list lists[AR_MAX_STAGES];
    size_t line, cell; /* counted from 0 */
    int ranks;         /* lines up to the last with an operation */
    int stages, micro_batches;
} reader;

static ar_status wrong(const reader *r, ar_status st, const char *text, size_t n, const char *expected)
{
    char cell[ARI_PRINTABLE];
    snprintf(cell, sizeof cell, "%.*s", (int)(n < sizeof cell ? n : sizeof cell - 1), text);
    return ar_error_set(st, "%s:%zu: cell %zu, '%s': %s", ARI_SHOW(r->name), r->line + 1, r->cell + 1, ARI_SHOW(cell),
                        expected);
}

/* Parses the digits at the start of n bytes and returns their number. */
static size_t parse_number(int *out, const char *text, size_t n)
{
    size_t i = 0;
    for (*out = 0; i < n && text[i] >= '0' && text[i] <= '9'; i++)
        if (i < MOST_DIGITS)
            *out = *out * 10 + (text[i] - '0');
    return i;
}

static bool is_word(const char *text, size_t n, const char *word)
{
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

/* Reads the middle of a cell such as "12SEND_F3", whose first and last parts are numbers. */
static ar_status read_kind(const reader *r, ar_pp_operation *o, bool *skip, const char *cell, size_t n)
{
    const size_t stage_digits = parse_number(&o->stage, cell, n);
    size_t micro_digits = 0;
    while (micro_digits < n - stage_digits && cell[n - 1 - micro_digits] >= '0' && cell[n - 1 - micro_digits] <= '9')
        micro_digits++;
    parse_number(&o->micro, cell + n - micro_digits, micro_digits);
    const char *word = cell + stage_digits;
    const size_t length = n - stage_digits - micro_digits;
    for (size_t i = 0; i < sizeof passed_over / sizeof passed_over[0]; i++)
        if (stage_digits > 0 && is_word(word, length, passed_over[i])) {
            *skip = true;
            return AR_OK;
        }
    for (int k = 0; k < AR_PP_KINDS; k++)
        if (stage_digits > 0 && micro_digits > 0 && is_word(word, length, ari_pp_kind_name((ar_pp_kind)k))) {
            o->kind = (ar_pp_kind)k;
            return stage_digits <= MOST_DIGITS && micro_digits <= MOST_DIGITS
                       ? AR_OK
                       : wrong(r, AR_ERR_OVERFLOW, cell, n, "numbers have up to 9 digits");
        }
    return wrong(r, AR_ERR_FORMAT, cell, n,
                 "no operation; expected stage, kind and micro-batch, as 0F0, of the kinds F, B, I, W, SEND_F, RECV_F, "
                 "SEND_B, RECV_B");
}

static ar_status read_cell(reader *r, const char *cell, size_t n)
{
    ar_pp_operation o = {0};
    bool skip = false;
    while (n > 0 && (cell[0] == ' ' || cell[0] == '\t')) {
        cell++;
        n--;
    }
    while (n > 0 && (cell[n - 1] == ' ' || cell[n - 1] == '\t' || cell[n - 1] == '\r'))
        n--;
    if (n == 0)
        return AR_OK;
    if (cell[0] == '(')
        return wrong(r, AR_ERR_UNSUPPORTED, cell, n,
                     "two operations at a time (OVERLAP_F_B); expected one after the other, in cells of their own");
    AR_TRY(read_kind(r, &o, &skip, cell, n));
    if (skip)
        return AR_OK;
    if (r->line >= AR_MAX_STAGES || o.stage >= AR_MAX_STAGES)
        return wrong(r, AR_ERR_OVERFLOW, cell, n, "a pipeline has at most 256 ranks and stages");
    r->ranks = (int)r->line + 1;
    r->stages = o.stage + 1 > r->stages ? o.stage + 1 : r->stages;
    r->micro_batches = o.micro + 1 > r->micro_batches ? o.micro + 1 : r->micro_batches;
    return ari_pp_append(&r->lists[r->line], o.kind, o.stage, o.micro);
}

static ar_status read_lines(reader *r, const char *text, size_t length)
{
    static const char byte_order_mark[] = "\xef\xbb\xbf"; /* spreadsheets write this first */
    const size_t mark = sizeof byte_order_mark - 1;
    const char *end = text + length;
    if (length >= mark && memcmp(text, byte_order_mark, mark) == 0)
        text += mark;
    for (const char *cell = text; cell <= end; r->cell++) {
        const char *stop = cell;
        while (stop < end && *stop != ',' && *stop != '\n')
            stop++;
        AR_TRY(read_cell(r, cell, (size_t)(stop - cell)));
        if (stop < end && *stop == '\n') {
            r->line++;
            r->cell = (size_t)-1; /* the loop increments it to 0 */
        }
        cell = stop + 1;
    }
    if (r->ranks == 0)
        return ar_error_set(AR_ERR_FORMAT, "%s: no operations; expected a line for each rank, as 0F0,0F1,0B0,0B1",
                            ARI_SHOW(r->name));
    return AR_OK;
}

static ar_status assemble_schedule(ar_pipeline_schedule **out, reader *r)
{
    AR_TRY(ari_schedule_begin(out, (ar_pipeline_shape){r->ranks, r->stages, r->micro_batches}));
    for (int i = 0; i < r->ranks; i++) {
        (*out)->lists[i] = r->lists[i];
        r->lists[i] = (ari_pp_list){0};
    }
    return ari_schedule_finish(*out);
}

/* Adds the file's name to an error about the lists as a whole. */
static ar_status of_file(ar_status st, const char *name)
{
    if (st != AR_ERR_ARG && st != AR_ERR_FORMAT && st != AR_ERR_OVERFLOW)
        return st;
    return ar_error_set(st == AR_ERR_ARG ? AR_ERR_FORMAT : st, "%s: %s", ARI_SHOW(name), ar_error_message());
}

static void reader_destroy(reader *r)
{
    for (int i = 0; r && i < AR_MAX_STAGES; i++)
        free(r->lists[i].operations);
    free(r);
}
ARI_OWNER(reader, reader_destroy)

ar_status ari_pipeline_schedule_parse(ar_pipeline_schedule **out, const char *text, size_t length, const char *name)
{
    ARI_OWNED_BY(ari_pipeline_schedule_destroy) ar_pipeline_schedule *s = NULL;
    ARI_OWNED_BY(reader_destroy) reader *r = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&r, 1, "a schedule"));
    r->name = name;
    AR_TRY(read_lines(r, text, length));
    AR_TRY(of_file(assemble_schedule(&s, r), name));
    ARI_GIVE(out, s);
    return AR_OK;
}

ar_status ari_pipeline_schedule_read(ar_pipeline_schedule **out, const char *path)
{
    ARI_OWNED unsigned char *text = NULL;
    size_t length = 0;
    AR_TRY(ari_file_read_text(&text, &length, path, MOST_BYTES));
    return ari_pipeline_schedule_parse(out, (const char *)text, length, path);
}

ar_status ari_pipeline_schedule_write(const char *path, const ar_pipeline_schedule *s, bool transfers)
{
    size_t bytes = 1, used = 0;
    ARI_OWNED char *text = NULL;
    for (int r = 0; r < s->shape.ranks; r++)
        bytes += s->lists[r].count * sizeof "255RECV_F999999999" + 1;
    AR_TRY(ari_alloc((void **)&text, bytes, 1, "a schedule"));
    for (int r = 0; r < s->shape.ranks; r++) {
        bool is_first = true;
        for (size_t i = 0; i < s->lists[r].count; i++) {
            const ar_pp_operation *o = &s->lists[r].operations[i];
            if (!transfers && !ari_pp_computes(o->kind))
                continue;
            used += (size_t)snprintf(text + used, bytes - used, "%s%d%s%d", is_first ? "" : ",", o->stage,
                                     ari_pp_kind_name(o->kind), o->micro);
            is_first = false;
        }
        used += (size_t)snprintf(text + used, bytes - used, "\n");
    }
    return ari_file_write(path, text, used);
}
