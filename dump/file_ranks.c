/* SPDX-License-Identifier: Apache-2.0 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Whether two files name the same tensor. */
static ar_status names_repeat(bool *repeat, const ar_dump *d)
{
    const char **name = NULL;
    size_t most = 0, n = 0;
    for (size_t i = 0; i < d->files; i++)
        most += ari_dump_entries(&d->file[i]);
    AR_TRY(ari_alloc((void **)&name, most, sizeof *name, "names of a dump"));
    for (size_t i = 0; i < d->files; i++)
        for (size_t k = 0; k < ari_dump_entries(&d->file[i]); k++)
            name[n++] = ari_dump_entry(&d->file[i], k)->name;
    if (n > 1)
        qsort(name, n, sizeof *name, compare_names);
    *repeat = false;
    for (size_t i = 1; i < n; i++)
        *repeat = *repeat || strcmp(name[i - 1], name[i]) == 0;
    free(name);
    return AR_OK;
}

/* "rank-00003.safetensors", "mp_rank_03.safetensors": 3; PyTorch's "shard-00004-model-00001-of-00001.safetensors",
 * which counts from 1: 3. -1: it names none. */
static int rank_by_name(const char *name)
{
    const char *rank = strstr(name, "rank"), *shard = strncmp(name, "shard-", 6) == 0 ? name + 6 : NULL;
    const char *digits = rank != NULL ? rank + 4 : shard;
    if (digits == NULL)
        return -1;
    if (rank != NULL && (*digits == '-' || *digits == '_' || *digits == '.'))
        digits++;
    char *end = NULL;
    const long n = *digits >= '0' && *digits <= '9' ? strtol(digits, &end, 10) : -1;
    if (n < 0 || n >= INT_MAX || (rank != NULL && strpbrk(end, "0123456789") != NULL))
        return -1; /* further numbers are coordinates, which only a mapping tells apart */
    return rank == NULL && n > 0 ? (int)n - 1 : (int)n;
}

/* Files that do not tell their rank: by name where all of them have one in it, else in the order of names where no file
 * tells. */
static void tell_untold(ar_dump *d)
{
    bool named = true, told = false;
    for (size_t i = 0; i < d->files; i++) {
        told |= d->file[i].rank >= 0;
        named &= d->file[i].rank >= 0 || rank_by_name(d->file[i].name) >= 0;
    }
    for (size_t i = 0; i < d->files; i++)
        if (d->file[i].rank < 0)
            d->file[i].rank = named ? rank_by_name(d->file[i].name) : told ? -1 : (int)i;
}

static ar_status differ(const ar_dump *d, size_t a, size_t b, const char *what)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s and %s tell of different %s", ARI_SHOW(d->file[a].path),
                        ARI_SHOW(d->file[b].path), what);
}

/* The world and the mesh are the same to all that tell of them. */
static ar_status agree(ar_dump *d)
{
    size_t world = SIZE_MAX, mesh = SIZE_MAX;
    for (size_t i = 0; i < d->files; i++) {
        const ari_placement *p = &d->file[i].placement;
        if (p->world > 0 && world == SIZE_MAX)
            world = i;
        else if (p->world > 0 && p->world != d->file[world].placement.world)
            return differ(d, world, i, "numbers of ranks");
        if (p->dims > 0 && mesh == SIZE_MAX)
            mesh = i;
        else if (p->dims > 0 && (p->dims != d->file[mesh].placement.dims ||
                                 memcmp(p->mesh, d->file[mesh].placement.mesh, sizeof p->mesh) != 0))
            return differ(d, mesh, i, "meshes");
    }
    if (world != SIZE_MAX)
        d->world = d->file[world].placement.world;
    if (mesh != SIZE_MAX) {
        d->mesh_dims = d->file[mesh].placement.dims;
        memcpy(d->mesh, d->file[mesh].placement.mesh, sizeof d->mesh);
    }
    return AR_OK;
}

static int compare_files(const void *a, const void *b)
{
    const ari_dump_file *x = a, *y = b;
    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : strcmp(x->path, y->path);
}

/* Sorts the files by rank, and lists these. */
static ar_status list_ranks(ar_dump *d)
{
    AR_TRY(ari_alloc((void **)&d->rank, d->files, sizeof *d->rank, "ranks of a dump"));
    if (d->files > 1)
        qsort(d->file, d->files, sizeof *d->file, compare_files);
    for (size_t i = 0; i < d->files; i++)
        if (d->file[i].rank >= 0 && (d->ranks == 0 || d->rank[d->ranks - 1] != d->file[i].rank))
            d->rank[d->ranks++] = d->file[i].rank;
    if (d->world > 0 && d->ranks > 0 && d->rank[d->ranks - 1] >= d->world)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: a file of rank %d in a world of %d",
                            ARI_SHOW(d->path), d->rank[d->ranks - 1], d->world);
    return AR_OK;
}

/* A mapping that says whose a file is says how many there are. */
static ar_status check_mapped(const ar_dump *d)
{
    int missing = 0;
    if (d->ranks == d->world)
        return AR_OK;
    while (missing < d->ranks && d->rank[missing] == missing)
        missing++;
    return ar_error_set(AR_ERR_FORMAT,
                        "MissingShard: %s: files of %d ranks, the mapping's mesh has %d; none of rank %d",
                        ARI_SHOW(d->path), d->ranks, d->world, missing);
}

static ar_status tell_by_mapping(ar_dump *d)
{
    d->of_ranks = true;
    d->world = 1;
    for (size_t i = 0; i < d->mesh_dims; i++)
        d->world *= d->mesh[i].size; /* the mapping was checked to have no more than an int of ranks */
    AR_TRY(list_ranks(d));
    return check_mapped(d);
}

static void take_mesh(ar_dump *d, const ari_map *map)
{
    const ar_dump_dim *dims = NULL;
    const size_t n = map == NULL ? 0 : ari_map_mesh(map, &dims);
    if (n == 0)
        return;
    d->mesh_dims = n;
    memcpy(d->mesh, dims, n * sizeof *dims);
}

ar_status ari_dump_tell_ranks(ar_dump *d, const ari_map *map)
{
    if (d->files > INT_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: %zu files", ARI_SHOW(d->path), d->files);
    take_mesh(d, map);
    if (d->mapped)
        return tell_by_mapping(d);
    for (size_t i = 0; i < d->files; i++)
        d->of_ranks |= d->file[i].placed;
    if (!d->of_ranks)
        AR_TRY(names_repeat(&d->of_ranks, d));
    if (!d->of_ranks)
        return AR_OK;
    for (size_t i = 0; i < d->files; i++)
        d->file[i].rank = d->file[i].placed ? d->file[i].placement.rank : -1;
    tell_untold(d);
    AR_TRY(agree(d));
    return list_ranks(d);
}
