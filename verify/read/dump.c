/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "ref/core/atomic_file.h"
#include "ref/core/text.h"
#include "ref/io/safetensors_private.h"

ARI_OWNER(ar_dump, ar_dump_close)

/* --- the execution order ------------------------------------------------------------------------------------------ */
/* Merges the execution orders of all ranks into one chain of tensors. A name that a rank lists for the first time is
 * inserted right after the name that precedes it on that rank. */
#define END SIZE_MAX

static size_t find_index(const ar_dump *d, const char *name)
{
    const ar_dump_tensor *t = ar_dump_find(d, name);
    return t == NULL ? END : (size_t)(t - d->tensor);
}

/* successor[d->tensors] is the first tensor of the chain */
static void chain_file(const ar_dump *d, const ari_placement *p, size_t *successor, bool *chained)
{
    size_t tail = d->tensors;
    for (size_t i = 0; i < p->ordered; i++) {
        const size_t k = find_index(d, p->order[i]);
        if (k == END)
            continue;
        if (!chained[k]) {
            successor[k] = successor[tail];
            successor[tail] = k;
            chained[k] = true;
        }
        tail = k;
    }
}

static ar_status set_order(ar_dump *d)
{
    size_t *successor = NULL;
    bool *chained = NULL;
    AR_TRY(ARI_TAKE(&successor, &d->arena, d->tensors + 1, "an execution order"));
    AR_TRY(ARI_TAKE(&chained, &d->arena, d->tensors, "an execution order"));
    successor[d->tensors] = END;
    for (size_t i = 0; i < d->files; i++) /* files are sorted by rank */
        chain_file(d, &d->file[i].placement, successor, chained);
    for (size_t k = successor[d->tensors], order = 0; k != END; k = successor[k])
        d->tensor[k].order = order++;
    return AR_OK;
}

/* --- opening ------------------------------------------------------------------------------------------------------ */
/* Creates a dump. The caller closes *out also after an error. */
static ar_status create(ar_dump **out, const char *path)
{
    AR_TRY(ARI_ALLOC_ZERO(out, 1, "a dump"));
    return ari_arena_text(&(*out)->arena, &(*out)->path, path, "a dump");
}

static ar_status open_all(ar_dump *d, ari_map *map)
{
    AR_TRY(ari_dump_open_files(d, map));
    AR_TRY(ari_dump_list_pieces(d, map));
    AR_TRY(ari_dump_make_tensors(d));
    AR_TRY(set_order(d));
    for (size_t i = 0; i < d->files; i++)
        ari_placement_fini(&d->file[i].placement);
    return AR_OK;
}

ar_status ar_dump_open(ar_dump **out, const char *path, const ar_dump_options *o)
{
    if (out == NULL || path == NULL)
        return ar_error_set(AR_ERR_ARG, "ar_dump_open: a path and a place for the dump are needed");
    *out = NULL;
    ARI_OWNED_BY(ar_dump_close) ar_dump *d = NULL;
    AR_TRY(create(&d, path));
    d->all_matched = o != NULL && o->all_matched;
    ARI_OWNED_BY(ari_map_free) ari_map *map = NULL;
    if (o != NULL && o->map != NULL)
        AR_TRY(ari_map_load(&map, o->map));
    AR_TRY(open_all(d, map));
    ARI_GIVE(out, d);
    return AR_OK;
}

void ar_dump_close(ar_dump *d)
{
    if (d == NULL)
        return;
    for (size_t i = 0; i < d->files; i++)
        ari_dump_close_file(&d->file[i]);
    ari_st_model_close(d->model);
    ari_arena_end(&d->arena, NULL);
    free(d);
}

const char *ar_dump_path(const ar_dump *d)
{
    return d->path;
}

size_t ar_dump_count(const ar_dump *d)
{
    return d->tensors;
}

const ar_dump_tensor *ar_dump_at(const ar_dump *d, size_t i)
{
    return i < d->tensors ? &d->tensor[i] : NULL;
}

const ar_dump_tensor *ar_dump_find(const ar_dump *d, const char *name)
{
    const ar_dump_tensor key = {.name = name};
    return d->tensors == 0 ? NULL : bsearch(&key, d->tensor, d->tensors, sizeof key, ari_by_name);
}

ar_status ari_dump_rename(ar_dump *d, const char *const *name)
{
    for (size_t i = 0; i < d->tensors; i++) {
        char *name_copy = NULL;
        AR_TRY(ari_arena_text(&d->arena, &name_copy, name[i], "a tensor's name"));
        d->tensor[i].name = name_copy;
    }
    ARI_SORT(d->tensor, d->tensors, ari_by_name);
    return AR_OK;
}

int ar_dump_ranks(const ar_dump *d)
{
    return d->ranks;
}

const ar_mesh *ar_dump_mesh(const ar_dump *d)
{
    return &d->mesh;
}

const char *ar_dump_metadata(const ar_dump *d, const char *key)
{
    const char *agreed = NULL;
    for (size_t i = 0; i < d->files; i++) {
        const char *value = d->file[i].st == NULL ? NULL : ari_st_metadata(d->file[i].st, key);
        if (value == NULL || (agreed != NULL && strcmp(agreed, value) != 0))
            return NULL;
        agreed = value;
    }
    return agreed;
}
