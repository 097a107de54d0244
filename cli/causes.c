/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank causes: the table by which differences are explained, in short, a cause in full, and as JSON. */
#include <string.h>

#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "ref/core/text.h"
#include "verify/diagnose/case.h"

typedef struct causes_values {
    ari_common common;
    const char *id; /* NULL: all */
} causes_values;

#define ARI_VALUES causes_values
static const ari_positional positionals[] = {
    ARI_POSITIONAL("CAUSE", STRING, id, "the identifier of one, to print all that is known of it"),
    {0},
};
enum { SENTENCE = 1024, CAUSES_MOST = 1024, GIST_LEAST = 25, INDENT = 2, LOOK_INDENT = 11 };

static bool begins(const char *text, const char *with, size_t n)
{
    return strncmp(text, with, n) == 0;
}

/* The row's identifier appears in an earlier one. */
static bool named_before(const ari_cause *row, size_t i)
{
    for (const ari_cause *earlier; i-- > 0 && (earlier = ari_cause_at(i)) != NULL;)
        if (earlier->id && strcmp(earlier->id, row->id) == 0)
            return true;
    return false;
}

/* --- sentences ---------------------------------------------------------------------------------------------------- */

/* `n` characters of a row's sentence, in which {ratio:.4g} is {ratio}. Returns `out`. */
static const char *sentence(char out[SENTENCE], const char *text, size_t n)
{
    size_t length = 0;
    bool in_braces = false, in_format = false;
    for (size_t i = 0; i < n && length + 1 < SENTENCE; i++) {
        in_braces = text[i] == '{' || (in_braces && text[i] != '}');
        in_format = in_braces && (in_format || text[i] == ':');
        if (!in_format)
            out[length++] = text[i];
    }
    out[length] = '\0';
    return out;
}
#define SENTENCE_OF(text, n) sentence((char[SENTENCE]){0}, text, n)

/* The sentence alone; after the newline is what to look at, "" where nothing is. */
static size_t sentence_length(const ari_cause *row)
{
    return strcspn(row->text, "\n");
}

static const char *look_at(const ari_cause *row)
{
    const char *after = row->text + sentence_length(row);
    return *after ? after + 1 : after;
}

static bool others_begin_so(const ari_cause *row, size_t n)
{
    const ari_cause *other;
    for (size_t i = 0; (other = ari_cause_at(i)) != NULL; i++)
        if (other->id && strcmp(other->id, row->id) != 0 && begins(other->text, row->text, n))
            return true;
    return false;
}

/* The end of the clause that begins there; `end` if the text has none. */
static const char *clause_end(const char *from, const char *end)
{
    static const char *const marks[] = {": ", "squares) with "};
    const char *nearest = end;
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *at = strstr(from, marks[i]);
        if (at && at + strlen(marks[i]) < nearest)
            nearest = at + strlen(marks[i]);
    }
    return nearest;
}

/* The sentence without the clauses that sentences of other causes begin with too ("every different element is the
 * reference times 2: "), up to where it goes into detail. Returns `out`. */
static const char *gist(char out[SENTENCE], const ari_cause *row)
{
    const char *from = row->text, *end = row->text + sentence_length(row), *next;
    while ((next = clause_end(from, end)) < end && others_begin_so(row, (size_t)(next - row->text)))
        from = next;
    sentence(out, from, (size_t)(end - from));
    for (char *at = out; *at; at++)
        if (at - out >= GIST_LEAST && (*at == ';' || begins(at, ": ", 2) || begins(at, " (", 2)))
            *at-- = '\0';
    return out;
}

/* --- for people --------------------------------------------------------------------------------------------------- */

static ar_status print_all(FILE *to)
{
    static const ari_column columns[] = {{"cause", ARI_LEFT}, {"what the values show", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    const ari_cause *row;
    size_t causes = 0;
    for (size_t i = 0; (row = ari_cause_at(i)) != NULL; i++) {
        if (!row->id || named_before(row, i))
            continue;
        ari_table_row(&t, "%s\t%s", row->id, gist((char[SENTENCE]){0}, row));
        causes++;
    }
    const ar_status st = ari_table_end(&t, to, 0);
    fprintf(to, "\n%zu causes; anyrank causes CAUSE prints one in full\n", causes);
    return st;
}

/* The next row of a cause, from *i on; NULL: it has no more. */
static const ari_cause *next_of(const char *id, size_t *i)
{
    const ari_cause *row;
    while ((row = ari_cause_at(*i)) != NULL && !(row->id && strcmp(row->id, id) == 0))
        ++*i;
    *i += row != NULL;
    return row;
}

static void print_one(FILE *to, const char *id)
{
    const ari_cause *row;
    bool over_ranks = true;
    fprintf(to, "%s\n", id);
    for (size_t i = 0; (row = next_of(id, &i)) != NULL;) {
        over_ranks = over_ranks && (row->without & ARI_IF(LONE)) != 0;
        fputs("\n- ", to);
        ari_print_wrapped(to, SENTENCE_OF(row->text, sentence_length(row)), INDENT);
        if (look_at(row)[0]) {
            fputs("  look at: ", to);
            ari_print_wrapped(to, look_at(row), LOOK_INDENT);
        }
    }
    if (over_ranks)
        fprintf(to, "\nOnly a run of several ranks can have it.\n");
}

/* --- for machines ------------------------------------------------------------------------------------------------- */

/* Rows for cause `id`; NULL: for all. Gives; NULL without memory. */
static json_t *json_causes(const char *id)
{
    json_t *rows = json_array();
    const char *section = "";
    const ari_cause *row;
    for (size_t i = 0; (row = ari_cause_at(i)) != NULL; i++) {
        section = !row->id && row->looks[0] ? row->looks : section;
        if (!row->id || (id && strcmp(row->id, id) != 0))
            continue;
        json_array_append_new(rows, json_pack("{s:s, s:s, s:b, s:s?, s:s, s:s, s:s}", "cause", row->id, "section",
                                              section, "over_ranks", (row->without & ARI_IF(LONE)) != 0, "passes",
                                              row->passes, "gist", gist((char[SENTENCE]){0}, row), "says",
                                              SENTENCE_OF(row->text, sentence_length(row)), "look_at", look_at(row)));
    }
    return rows;
}

/* --- the subcommand ----------------------------------------------------------------------------------------------- */

static ar_status check_known(const char *id)
{
    const char *names[CAUSES_MOST];
    const ari_cause *row;
    size_t n = 0;
    for (size_t i = 0; (row = ari_cause_at(i)) != NULL && n < CAUSES_MOST; i++) {
        if (row->id && strcmp(row->id, id) == 0)
            return AR_OK;
        if (row->id)
            names[n++] = row->id;
    }
    const char *near = ari_nearest(id, names, n);
    return near ? ar_error_set(AR_ERR_ARG, "unknown cause '%s'; did you mean %s?", ARI_SHOW(id), near)
                : ar_error_set(AR_ERR_ARG, "unknown cause '%s'; anyrank causes lists them", ARI_SHOW(id));
}

static ar_status run_causes(void *values, int *exit_code)
{
    const causes_values *v = values;
    (void)exit_code;
    if (v->id)
        AR_TRY(check_known(v->id));
    if (ari_wants_text(&v->common) && v->id)
        print_one(stdout, v->id);
    else if (ari_wants_text(&v->common))
        AR_TRY(print_all(stdout));
    if (!v->common.json)
        return AR_OK;
    json_t *o = ari_json_begin("causes");
    return ari_json_end(ari_json_whole(o, json_pack("{s:o}", "causes", json_causes(v->id))), &v->common);
}

const ari_args_spec ari_causes_spec = {
    .command = "causes",
    .summary = "Lists the causes that check, verify and bugs report, or prints one in full.",
    .example = "anyrank causes\nanyrank causes averaged_again\nanyrank causes --json -",
    .positionals = positionals,
    .size = sizeof(causes_values),
    .run = run_causes,
};
