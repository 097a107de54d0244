/* SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dump/placement.h"
#include "ref/core/size.h"
#include "verify/writer/dump_ranks.h"

ar_status ari_dump_order_text(char **gives, const char *const *names, size_t n)
{
    json_t *order = json_array(), *all = json_pack("{s:i, s:o?}", "version", 1, "order", order);
    int failed = 0;
    for (size_t i = 0; i < n; i++)
        failed |= json_array_append_new(order, json_string(names[i]));
    *gives = failed ? NULL : json_dumps(all, JSON_COMPACT);
    json_decref(all);
    return *gives ? AR_OK : ar_error_set(AR_ERR_MEMORY, "no memory for an execution order");
}

typedef char tensor_name[ARI_REFERENCE_NAME];

static ar_st_tensor entry_of(const ari_ref_tensor *t, const char *name)
{
    ar_st_tensor e = {.name = name, .dtype = AR_F32, .ndim = t->ndim, .data = t->values};
    for (int d = 0; d < t->ndim; d++)
        e.shape[d] = t->shape[d];
    return e;
}

ar_status ari_dump_reference_write(const ari_reference *r, const char *path, const ari_dump_facts *f)
{
    tensor_name *name = NULL;
    const char **order = NULL;
    ar_st_tensor *tensor = NULL;
    char *text = NULL;
    ar_status st = AR_OK;
    AR_TRY_TO(done, st, ari_alloc((void **)&name, r->count, sizeof *name, "names of a dump"));
    AR_TRY_TO(done, st, ari_alloc((void **)&order, r->count, sizeof *order, "names of a dump"));
    AR_TRY_TO(done, st, ari_alloc((void **)&tensor, r->count, sizeof *tensor, "tensors of a dump"));
    for (size_t i = 0; i < r->count; i++) {
        ari_reference_name(name[i], &r->tensor[i]);
        order[i] = name[i];
        tensor[i] = entry_of(&r->tensor[i], name[i]);
    }
    AR_TRY_TO(done, st, ari_dump_order_text(&text, order, r->count));
    ari_dump_facts all = *f;
    ari_dump_fact(&all, "format", "pt");
    ari_dump_fact(&all, ARI_DUMP_PLACEMENT, text);
    st = ar_st_write(path, tensor, r->count, all.pair, all.n);
done:
    free(text);
    free(tensor);
    free(order);
    free(name);
    return st;
}
