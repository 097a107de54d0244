/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "anyrank/fault.h"
#include "cli/command.h"
#include "cli/main.h"
#include "cli/table.h"

typedef struct bugs_values {
    ari_common common;
} bugs_values;

static const ari_option options[] = {{.name = "run", .kind = ARI_OPT_LATER}, {0}};
static const ari_args_spec spec = {
    .command = "bugs",
    .summary = "Lists the mistakes that 'check --inject' can switch on.",
    .example = "anyrank bugs\nanyrank check --inject column_dx_not_reduced",
    .options = options,
    .common_at = offsetof(bugs_values, common),
};

static ar_status print(void)
{
    static const ari_column columns[] = {{"fault", ARI_LEFT}, {"what goes wrong", ARI_LEFT}};
    ari_table *t = NULL;
    AR_TRY(ari_table_create(&t, columns, 2));
    for (int i = 1; i < AR_FAULT_COUNT; i++) {
        ari_table_cell(t, "%s", ar_fault_name((ar_fault)i));
        ari_table_cell(t, "%s", ar_fault_text((ar_fault)i));
    }
    const ar_status st = ari_table_print(t, stdout, 0);
    ari_table_destroy(t);
    printf("\n%d faults; anyrank check --inject FAULT switches one on\n", AR_FAULT_COUNT - 1);
    return st;
}

static json_t *as_json(void)
{
    json_t *list = json_array(), *o = ari_json_begin("bugs");
    for (int i = 1; i < AR_FAULT_COUNT; i++)
        json_array_append_new(
            list, json_pack("{s:s, s:s}", "name", ar_fault_name((ar_fault)i), "text", ar_fault_text((ar_fault)i)));
    if (json_object_set_new(o, "faults", list) != 0) {
        json_decref(o);
        return NULL;
    }
    return o;
}

int ari_command_bugs(int argc, char **argv)
{
    bugs_values v = {0};
    int exit_code = ARI_EXIT_SAME;
    if (!ari_args_begin(&spec, argc, argv, &v, &exit_code))
        return exit_code;
    ar_status st = ari_wants_text(&v.common) ? print() : AR_OK;
    if (st == AR_OK)
        st = ari_json_end(as_json(), &v.common);
    if (st != AR_OK)
        ari_print_error("bugs", st);
    return ari_exit_code(st);
}
