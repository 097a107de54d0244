/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/check_list.h"

#include "cli/command.h"
#include "cli/table.h"
#include "ref/io/json.h"
#include "ref/io/json_text.h"

typedef struct listing {
    ari_table *table;
    json_t *tensors;
} listing;

static ar_status add_tensor(void *user, const char *tensor, const char *pass, int ndim, const size_t *shape)
{
    const listing *l = user;
    char text[96];
    size_t at = 0;
    text[0] = '\0';
    for (int d = 0; d < ndim; d++)
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%zu", d ? ", " : "", shape[d]);
    ari_table_cell(l->table, "%s", tensor);
    ari_table_cell(l->table, "%s", pass);
    ari_table_cell(l->table, "[%s]", text);
    json_array_append_new(l->tensors, json_pack("{s:s, s:s, s:o}", "name", tensor, "pass", pass, "shape",
                                                ari_json_sizes(shape, (size_t)ndim)));
    return AR_OK;
}

ar_status ari_check_list(json_t **gives, FILE *to, const ar_check_options *o)
{
    static const ari_column columns[] = {{"name", ARI_LEFT}, {"pass", ARI_LEFT}, {"shape", ARI_LEFT}};
    listing l = {.tensors = json_array()};
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_table_create(&l.table, columns, sizeof columns / sizeof *columns));
    AR_TRY_TO(done, st, ar_check_tensors(o, add_tensor, &l));
    if (to) {
        fprintf(to, "\n%s, one step of %zu sequence%s of %zu token%s:\n", o->run.model, o->run.batch,
                o->run.batch == 1 ? "" : "s", o->run.seq, o->run.seq == 1 ? "" : "s");
        AR_TRY_TO(done, st, ari_table_print(l.table, to, 2));
        fprintf(to, "%zu tensors\n", json_array_size(l.tensors));
    }
    *gives = json_pack("{s:o, s:I, s:I, s:O}", "name", ari_json_text(o->run.model), "batch", (json_int_t)o->run.batch,
                       "seq", (json_int_t)o->run.seq, "tensors", l.tensors);
    if (*gives == NULL)
        st = ar_error_set(AR_ERR_MEMORY, "no memory for the list of tensors");
done:
    ari_table_destroy(l.table);
    json_decref(l.tensors);
    return st;
}

json_t *ari_check_list_json(json_t *models)
{
    json_t *o = ari_json_begin("check");
    if (json_object_set_new(o, "models", models) == 0)
        return o;
    json_decref(o);
    return NULL;
}
