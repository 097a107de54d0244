/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/causes.h"

#include <string.h>

#include "ref/io/json.h"
#include "verify/diagnose/case.h"

/* A row that says a cause: what the page shows of it, the sentence and, after a newline, what to look at. */
static json_t *row_json(const ari_cause *row, const char *section)
{
    return json_pack("{s:s, s:s, s:b, s:s?, s:s}", "cause", row->id, "section", section, "over_ranks",
                     (row->without & ARI_IF(LONE)) != 0, "passes", row->passes, "says", row->text);
}

int ari_command_causes(const ari_subcommand *all, int argc, char **argv)
{
    (void)all;
    (void)argc;
    (void)argv;
    json_t *rows = json_array();
    const char *section = "";
    const ari_cause *row;
    for (size_t i = 0; (row = ari_cause_at(i)) != NULL; i++) {
        if (row->id)
            json_array_append_new(rows, row_json(row, section));
        else if (row->looks[0])
            section = row->looks;
    }
    const ar_status st = ari_json_save(rows, "-");
    json_decref(rows);
    if (st != AR_OK)
        ari_print_error("causes", st);
    return ari_exit_code(st);
}
