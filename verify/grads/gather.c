/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/grads/gather.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dump/placement.h"
#include "ref/core/size.h"
#include "ref/io/hash.h"
#include "ref/io/safetensors.h"

ar_status ari_gather_want(ari_gatherer *g, const char *tap, char pass, const char *name, int ndim, const size_t *shape,
                          int file)
{
    AR_TRY(ari_grow(&g->list, &g->capacity, g->count, sizeof *g->list, "the list of outputs"));
    ari_gathered *t = &g->list[g->count];
    *t = (ari_gathered){.pass = pass, .file = file};
    snprintf(t->tap, sizeof t->tap, "%s", tap);
    AR_TRY(ari_full_tensor_init(&t->full, name, ndim, shape));
    g->count++;
    return AR_OK;
}

ar_status ari_gather_tap(void *user, const ar_tap_event *e)
{
    const ari_gatherer *g = user;
    if (e->layout->replica != 0)
        return AR_OK;
    for (size_t i = 0; i < g->count; i++) {
        ari_gathered *t = &g->list[i];
        if (t->pass != e->pass || strcmp(t->tap, e->name) != 0)
            continue;
        AR_TRY(ari_full_tensor_write(&t->full, 0, e->local, e->layout)); /* a tap does not know its rank */
    }
    return AR_OK;
}

ar_status ari_gather_check(const ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++)
        AR_TRY(ari_full_tensor_check(&g->list[i].full));
    return AR_OK;
}

void ari_gatherer_fini(ari_gatherer *g)
{
    for (size_t i = 0; i < g->count; i++)
        ari_full_tensor_fini(&g->list[i].full);
    free(g->list);
    *g = (ari_gatherer){0};
}

/* The tensors of files first .. end - 1. Gives; free(). */
static ar_status as_tensors(const ari_gatherer *g, int first, int end, ar_st_tensor **gives, size_t *n)
{
    AR_TRY(ari_alloc_zero((void **)gives, g->count, sizeof **gives, "a list of outputs"));
    *n = 0;
    for (size_t i = 0; i < g->count; i++) {
        const ari_gathered *t = &g->list[i];
        if (t->file >= first && t->file < end)
            (*gives)[(*n)++] = ari_full_tensor_entry(&t->full);
    }
    return AR_OK;
}

ar_status ari_gather_write(const ari_gatherer *g, int files, const char *const *path, const char *const *placement)
{
    ari_out *out[ARI_GATHER_FILES] = {NULL};
    ar_status st = AR_OK;
    for (int i = 0; i < files; i++) {
        const char *const metadata[] = {"format", "pt", ARI_DUMP_PLACEMENT, placement[i]};
        ar_st_tensor *list = NULL;
        size_t n = 0;
        AR_TRY_TO(done, st, as_tensors(g, i, i + 1, &list, &n));
        st = ari_st_write_uncommitted(&out[i], path[i], list, n, metadata, placement[i] ? 2 : 1);
        free(list);
        if (st != AR_OK)
            goto done;
    }
    return ari_out_commit_all(out, ARI_GATHER_FILES);
done:
    for (int i = 0; i < ARI_GATHER_FILES; i++)
        ari_out_discard(out[i]);
    return st;
}

ar_status ari_gather_hash(const ari_gatherer *g, int files, char hex[65])
{
    ar_st_tensor *list = NULL;
    size_t n = 0;
    AR_TRY(as_tensors(g, 0, files, &list, &n));
    const ar_status st = ari_tensors_hash(hex, list, n);
    free(list);
    return st;
}
