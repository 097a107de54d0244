/* SPDX-License-Identifier: Apache-2.0 */
/* anyrank causes: lists the causes that explanations name, describes one in full, or prints them as JSON. They are
 * defined in the Python package. */
#include <string.h>

#include "cli/options/args.h"
#include "cli/shared/table.h"
#include "ref/core/text.h"
#include "ref/io/json.h"
#include "verify/explain/explain.h"

typedef struct causes_values {
    ari_common common;
    const char *name; /* NULL: all */
} causes_values;

#define ARI_VALUES causes_values
static const ari_positional positionals[] = {
    ARI_POSITIONAL("CAUSE", STRING, name, "the identifier of one, to print all that is known of it"),
    {0},
};
enum { INDENT = 2, LOOK_INDENT = 11 };

static const char *field(const json_t *row, const char *key)
{
    const char *text = json_string_value(json_object_get(row, key));
    return text ? text : "";
}

/* Prints each cause with its first sentence. */
static ar_status print_all(FILE *out, const json_t *rows)
{
    static const ari_column columns[] = {{"cause", ARI_LEFT}, {"what happened", ARI_LEFT}};
    ari_table t = ARI_TABLE(columns);
    const json_t *row;
    const char *last_cause = "";
    size_t i, causes = 0;
    json_array_foreach(rows, i, row)
    {
        if (strcmp(field(row, "cause"), last_cause) == 0)
            continue;
        last_cause = field(row, "cause");
        ari_table_row(&t, "%s\t%s", last_cause, field(row, "gist"));
        causes++;
    }
    const ar_status st = ari_table_end(&t, out, 0);
    fprintf(out, "\n%zu causes; anyrank causes CAUSE prints one in full\n", causes);
    return st;
}

static void print_one(FILE *out, const json_t *rows)
{
    const json_t *row;
    size_t i;
    json_array_foreach(rows, i, row)
    {
        fprintf(out, "%s%s\n- ", i == 0 ? field(row, "cause") : "", i == 0 ? "\n" : "");
        ari_print_wrapped(out, field(row, "says"), INDENT);
        if (!field(row, "look_at")[0])
            continue;
        fputs("  look at: ", out);
        ari_print_wrapped(out, field(row, "look_at"), LOOK_INDENT);
    }
}

static ar_status refuse(const char *name, const json_t *answer)
{
    const char *nearest = field(answer, "nearest");
    return nearest[0] ? ar_error_set(AR_ERR_ARG, "unknown cause '%s'; did you mean %s?", ARI_SHOW(name), nearest)
                      : ar_error_set(AR_ERR_ARG, "unknown cause '%s'; anyrank causes lists them", ARI_SHOW(name));
}

static ar_status run_causes(void *values, int *exit_code)
{
    const causes_values *v = values;
    char failure[400];
    json_auto_t *answer = NULL;
    json_auto_t *request = json_pack("{s:o}", "causes", v->name ? ari_json_text(v->name) : json_null());
    (void)exit_code;
    AR_TRY(ari_explain(&answer, failure, sizeof failure, request));
    if (!answer)
        return ar_error_set(AR_ERR_UNSUPPORTED, "%s", failure);
    const json_t *rows = json_object_get(answer, "causes");
    if (json_array_size(rows) == 0)
        return refuse(v->name, answer);
    if (ari_prints_text(&v->common) && v->name)
        print_one(stdout, rows);
    else if (ari_prints_text(&v->common))
        AR_TRY(print_all(stdout, rows));
    if (!v->common.json)
        return AR_OK;
    return ari_json_end(ari_json_merge(ari_json_begin("causes"), json_pack("{s:O}", "causes", rows)), &v->common);
}

const ari_args_spec ari_causes_spec = {
    .command = "causes",
    .summary = "Lists the causes that check, verify and bugs report, or prints one in full.",
    .example = "anyrank causes\nanyrank causes averaged_again\nanyrank causes --json -",
    .positionals = positionals,
    .size = sizeof(causes_values),
    .run = run_causes,
};
