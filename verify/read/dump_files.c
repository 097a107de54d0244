/* SPDX-License-Identifier: Apache-2.0 */
#include "verify/read/dump.h"

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ref/core/text.h"
#include "ref/io/file.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"
#include "ref/placement/placement_private.h"

void ari_dump_close_file(ari_dump_file *f)
{
    ari_placement_fini(&f->placement);
    ari_st_close(f->owned);
    ari_npy_close(f->npy);
}

size_t ari_dump_entries(const ari_dump_file *f)
{
    return f->st == NULL ? 1 : ari_st_tensor_count(f->st);
}

const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i)
{
    return f->st == NULL ? &f->npy->entry : ari_st_at(f->st, i);
}

/* Adds a file to the list; the caller fills in its contents. */
static ar_status add_file(ari_dump_file **added, ar_dump *d, const char *folder, const char *name)
{
    AR_TRY(ARI_GROW_IN(&d->arena, &d->file, &d->cap_files, d->files, "files of a dump"));
    ari_dump_file *f = &d->file[d->files];
    *f = (ari_dump_file){.rank = -1};
    AR_TRY(ari_arena_path(&d->arena, &f->path, folder, name));
    const char *slash = strrchr(f->path, '/');
    f->name = slash == NULL ? f->path : slash + 1;
    d->files++;
    *added = f;
    return AR_OK;
}

static ar_status add_tensors(ari_dump_file **added, ar_dump *d, const char *folder, const char *name)
{
    ari_dump_file *f = NULL;
    AR_TRY(add_file(&f, d, folder, name));
    *added = f;
    if (ari_ends_in(name, ".npy"))
        return ari_npy_open(&f->npy, f->path);
    AR_TRY(ari_st_open(&f->owned, f->path));
    f->st = f->owned;
    return AR_OK;
}

/* Reads the metadata of a file in a folder. A file that states only an execution order does not belong to a rank. */
static ar_status read_placement(ari_dump_file *f)
{
    if (f->st == NULL)
        return AR_OK;
    const char *dcp = ari_st_metadata(f->st, ARI_DUMP_DCP),
               *placement_text = ari_st_metadata(f->st, ARI_DUMP_PLACEMENT);
    if (dcp == NULL && placement_text == NULL)
        return AR_OK;
    AR_TRY(ari_placement_parse(&f->placement, dcp, placement_text, f->path));
    f->placed = dcp != NULL || f->placement.rank >= 0 || f->placement.tensors > 0;
    return AR_OK;
}

/* Reads the execution order of a file that is opened alone. The file is used as it is, even if it belongs to a rank. */
static ar_status read_order(ari_dump_file *f)
{
    const char *placement_text = f->st == NULL ? NULL : ari_st_metadata(f->st, ARI_DUMP_PLACEMENT);
    if (placement_text == NULL)
        return AR_OK;
    AR_TRY(ari_placement_parse(&f->placement, NULL, placement_text, f->path));
    ari_placement_forget_tensors(&f->placement);
    return AR_OK;
}

/* Returns true if a file says that other files contain the rest of one of its tensors. */
static bool is_part(const ari_dump_file *f)
{
    for (size_t i = 0; i < f->placement.tensors; i++) {
        const ari_placed *t = &f->placement.tensor[i];
        const ar_st_entry *e = ari_st_find(f->st, t->name);
        for (int d = 0; d < t->ndim; d++) {
            if (t->offset[d] > 0 || (t->has_shape && e && d < e->ndim && t->shape[d] != e->shape[d]))
                return true;
        }
        if (t->boxes > 0)
            return true;
    }
    return false;
}

/* Reads a file that should be complete. If a writer of shards left it incomplete, the missing parts are reported by
 * name. */
static ar_status read_part(ari_dump_file *f)
{
    AR_TRY(read_placement(f));
    if (f->placed && !is_part(f)) {
        f->placed = false;
        ari_placement_forget_tensors(&f->placement);
    }
    return AR_OK;
}

static ar_status add_model(ar_dump *d)
{
    for (size_t i = 0; i < ari_st_model_files(d->model); i++) {
        const char *path = NULL;
        const ar_st_file *st = ari_st_model_file(d->model, i, &path);
        ari_dump_file *f = NULL;
        AR_TRY(add_file(&f, d, "", path));
        f->st = st;
        AR_TRY(read_part(f));
    }
    return AR_OK;
}

/* --- folders ------------------------------------------------------------------------------------------------------ */

/* Files of allowances from grads --sensitivity have the names of the tensors of neighbouring files, and are no
 * dumps. */
static bool is_allowances(const ari_dump_file *f)
{
    return f->st != NULL && ari_st_metadata(f->st, "anyrank.allows") != NULL;
}

static ar_status add_found(ar_dump *d, const ari_map *map, const char *name)
{
    ari_dump_file *f = NULL;
    int rank = -1;
    if (!ari_ends_in(name, ".safetensors") && !ari_ends_in(name, ".npy"))
        return AR_OK;
    if (d->mapped) {
        AR_TRY(ari_map_rank_of(map, name, &rank));
        if (rank < 0)
            return AR_OK;
    }
    AR_TRY(add_tensors(&f, d, d->path, name));
    if (!d->mapped && is_allowances(f)) {
        ari_dump_close_file(f);
        d->files--;
        return AR_OK;
    }
    f->rank = rank;
    AR_TRY(read_placement(f));
    if (d->mapped && f->placed && f->placement.rank >= 0 && f->placement.rank != rank)
        return ari_map_bad(map, NULL, "key 'files': file '%s' is rank %d by its name, rank %d by what it says itself",
                           ARI_SHOW(f->path), rank, f->placement.rank);
    return AR_OK;
}

static int is_shown(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static ar_status walk(ar_dump *d, const ari_map *map, const char *below, int depth);

/* Handles one entry of a folder `below` d->path: adds a file, or searches a folder. */
static ar_status visit_entry(ar_dump *d, const ari_map *map, const char *below, const char *name, int depth)
{
    char *path = NULL, *full = NULL;
    AR_TRY(ari_arena_path(&d->arena, &path, below, name));
    AR_TRY(ari_arena_path(&d->arena, &full, d->path, path));
    if (depth == 0)
        return add_found(d, map, path);
    return ari_is_folder(full) ? walk(d, map, path, depth - 1) : AR_OK;
}

/* Files `depth` folders below. */
static ar_status walk(ar_dump *d, const ari_map *map, const char *below, int depth)
{
    ARI_OWNED struct dirent **list = NULL;
    char *folder = NULL;
    AR_TRY(ari_arena_path(&d->arena, &folder, d->path, below));
    const int n = scandir(folder, &list, is_shown, alphasort);
    ar_status st = n < 0 ? ari_io_fail("list", folder) : AR_OK;
    for (int i = 0; i < n; i++) {
        if (st == AR_OK)
            st = visit_entry(d, map, below, list[i]->d_name, depth);
        free(list[i]);
    }
    return st;
}

static int is_partial(const struct dirent *entry)
{
    return ari_ends_in(entry->d_name, ".safetensors.part");
}

/* A checkpoint of training has the optimizer's state beside the model. */
static ar_status add_state(ar_dump *d)
{
    ari_dump_file *f = NULL;
    bool exists = false;
    AR_TRY(ari_file_is_in(&exists, d->path, ARI_DUMP_STATE));
    return exists ? add_tensors(&f, d, d->path, ARI_DUMP_STATE) : AR_OK;
}

/* Refuses a folder without any readable file. */
static ar_status refuse_folder(const ar_dump *d)
{
    const char *lacks = d->mapped ? "files of the mapping's pattern" : ".safetensors or .npy files";
    ARI_OWNED struct dirent **list = NULL;
    const int n = scandir(d->path, &list, is_partial, alphasort);
    ar_status st = ar_error_set(AR_ERR_IO, "%s: a folder without %s", ARI_SHOW(d->path), lacks);
    if (n > 0)
        st = ar_error_set(AR_ERR_IO, "%s: a folder without %s; %s is of a run that still goes on, or was killed",
                          ARI_SHOW(d->path), lacks, ARI_SHOW(list[0]->d_name));
    for (int i = 0; i < n; i++)
        free(list[i]);
    return st;
}

/* Finds the folder that contains the tensors. For checkpoints it is the one that `latest` names, resolved once, so that
 * a `latest` that changes meanwhile cannot mix two checkpoints. */
static ar_status find_folder(char **out, ari_arena *arena, const char *folder)
{
    char *latest = NULL, resolved[PATH_MAX];
    AR_TRY(ari_arena_path(arena, &latest, folder, "latest"));
    if (!ari_is_folder(latest))
        return ari_arena_text(arena, out, folder, "a file name");
    return realpath(latest, resolved) ? ari_arena_text(arena, out, resolved, "a file name")
                                      : ari_io_fail("find", folder);
}

static ar_status open_folder(ar_dump *d, const ari_map *map)
{
    d->mapped = map != NULL && map->files != NULL;
    if (!d->mapped) {
        AR_TRY(find_folder(&d->path, &d->arena, d->path));
        AR_TRY(ari_st_model_open(&d->model, d->path));
    }
    if (d->model != NULL) {
        AR_TRY(add_model(d));
        return add_state(d);
    }
    AR_TRY(walk(d, map, "", d->mapped ? map->depth : 0));
    if (d->files > 0)
        return AR_OK;
    AR_TRY(ari_unsupported_format_check_folder(d->path));
    return refuse_folder(d);
}

/* Refuses the name of a bundled model where a checkpoint is expected. */
static ar_status refuse_bundled(const char *path)
{
    for (const char *const *name = ari_model_names; *name; name++) {
        if (strcmp(path, *name) == 0 && access(path, F_OK) != 0)
            return ar_error_set(AR_ERR_IO,
                                "%s: no such file or folder, and the bundled model of this name has no weights: "
                                "expected a checkpoint or a dump, as a training run of that model saves one",
                                path);
    }
    return AR_OK;
}

static ar_status open_path(ar_dump *d, const ari_map *map)
{
    ari_dump_file *f = NULL;
    if (ari_is_folder(d->path))
        return open_folder(d, map);
    AR_TRY(refuse_bundled(d->path));
    if (ari_ends_in(d->path, ".json")) {
        AR_TRY(ari_st_model_open_index(&d->model, d->path));
        return add_model(d);
    }
    AR_TRY(add_tensors(&f, d, "", d->path));
    return read_order(f);
}

/* --- whose the files are ------------------------------------------------------------------------------------------ */
/* Returns true if two files contain a tensor with the same name, which files of one model do not. */
static ar_status names_repeat(bool *repeat, ar_dump *d)
{
    const char **name = NULL;
    size_t name_count = 0, n = 0;
    for (size_t i = 0; i < d->files; i++)
        name_count += ari_dump_entries(&d->file[i]);
    AR_TRY(ARI_TAKE(&name, &d->arena, name_count, "names of a dump"));
    for (size_t i = 0; i < d->files; i++)
        for (size_t k = 0; k < ari_dump_entries(&d->file[i]); k++)
            name[n++] = ari_dump_entry(&d->file[i], k)->name;
    const char *twice = ari_repeated_name(name, n);
    *repeat = twice != NULL;
    return twice && d->model
               ? ar_error_set(AR_ERR_FORMAT, "%s: two files have the tensor '%s'", ARI_SHOW(d->path), ARI_SHOW(twice))
               : AR_OK;
}

/* Returns the rank in a file's name: 3 for "rank-00003.safetensors" and "mp_rank_03.safetensors", and 3 for PyTorch's
 * "shard-00004-model-00001-of-00001.safetensors", which counts from 1. Returns -1 if the name has no rank. */
static int rank_by_name(const char *name)
{
    const char *rank = strstr(name, "rank"), *shard = strncmp(name, "shard-", 6) == 0 ? name + 6 : NULL;
    const char *digits = rank != NULL ? rank + 4 : shard;
    if (digits == NULL)
        return -1;
    if (rank != NULL && (*digits == '-' || *digits == '_' || *digits == '.'))
        digits++;
    uint64_t n = 0;
    const char *end = NULL;
    if (!ari_natural(&n, digits, &end) || n >= INT_MAX || (rank != NULL && strpbrk(end, "0123456789") != NULL))
        return -1; /* further numbers are mesh coordinates, which only a mapping can interpret */
    return rank == NULL && n > 0 ? (int)n - 1 : (int)n;
}

/* Assigns ranks to files that do not record theirs: by the number in their names if all names have one, otherwise by
 * the order of names if no file records a rank. */
static void assign_ranks(ar_dump *d)
{
    bool named = true, has_ranks = false;
    for (size_t i = 0; i < d->files; i++) {
        has_ranks |= d->file[i].rank >= 0;
        named &= d->file[i].rank >= 0 || rank_by_name(d->file[i].name) >= 0;
    }
    for (size_t i = 0; i < d->files; i++)
        if (d->file[i].rank < 0)
            d->file[i].rank = named ? rank_by_name(d->file[i].name) : has_ranks ? -1 : (int)i;
}

static ar_status differ(const ar_dump *d, size_t a, size_t b, const char *subject)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s and %s tell of different %s", ARI_SHOW(d->file[a].path),
                        ARI_SHOW(d->file[b].path), subject);
}

/* Checks that all files that state the world and the mesh agree. */
static ar_status agree_on_mesh(ar_dump *d)
{
    size_t world = SIZE_MAX, mesh = SIZE_MAX;
    for (size_t i = 0; i < d->files; i++) {
        const ari_placement *p = &d->file[i].placement;
        if (p->world > 0 && world == SIZE_MAX)
            world = i;
        else if (p->world > 0 && p->world != d->file[world].placement.world)
            return differ(d, world, i, "numbers of ranks");
        if (p->mesh.ndim > 0 && mesh == SIZE_MAX)
            mesh = i;
        else if (p->mesh.ndim > 0 && !ari_mesh_same(&p->mesh, &d->file[mesh].placement.mesh))
            return differ(d, mesh, i, "meshes");
    }
    if (world != SIZE_MAX)
        d->world = d->file[world].placement.world;
    if (mesh != SIZE_MAX)
        d->mesh = d->file[mesh].placement.mesh;
    return AR_OK;
}

static int compare_files(const void *a, const void *b)
{
    const ari_dump_file *x = a, *y = b;
    return x->rank != y->rank ? (x->rank < y->rank ? -1 : 1) : strcmp(x->path, y->path);
}

/* Sorts the files by rank and lists the ranks. */
static ar_status list_ranks(ar_dump *d)
{
    AR_TRY(ARI_TAKE(&d->rank, &d->arena, d->files, "ranks of a dump"));
    ARI_SORT(d->file, d->files, compare_files);
    for (size_t i = 0; i < d->files; i++)
        if (d->file[i].rank >= 0 && (d->ranks == 0 || d->rank[d->ranks - 1] != d->file[i].rank))
            d->rank[d->ranks++] = d->file[i].rank;
    if (d->world > 0 && d->ranks > 0 && d->rank[d->ranks - 1] >= d->world)
        return ar_error_set(AR_ERR_FORMAT, "InvalidPlacement: %s: a file of rank %d in a world of %d",
                            ARI_SHOW(d->path), d->rank[d->ranks - 1], d->world);
    return AR_OK;
}

static int compare_places(const void *a, const void *b)
{
    const ari_dump_file *x = *(const ari_dump_file *const *)a, *y = *(const ari_dump_file *const *)b;
    const ari_placement *p = &x->placement, *q = &y->placement;
    for (int i = 0; i < p->mesh.ndim && i < q->mesh.ndim; i++) {
        ARI_ASCENDING(p->coords[i], q->coords[i]);
    }
    return compare_files(x, y);
}

/* Checks that no two ranks have the same position in the mesh, and that no rank has two. */
static ar_status check_places(ar_dump *d)
{
    const ari_dump_file **placed = NULL;
    size_t n = 0;
    AR_TRY(ARI_TAKE(&placed, &d->arena, d->files, "places of ranks"));
    for (size_t i = 0; i < d->files; i++) {
        const ari_dump_file *f = &d->file[i];
        if (!f->placement.has_at || f->placement.mesh.ndim == 0)
            continue;
        if (n > 0 && placed[n - 1]->rank == f->rank &&
            memcmp(placed[n - 1]->placement.coords, f->placement.coords, sizeof f->placement.coords) != 0)
            return differ(d, (size_t)(placed[n - 1] - d->file), i, "places in the mesh for one rank");
        placed[n++] = f;
    }
    ARI_SORT(placed, n, compare_places);
    for (size_t i = 1; i < n; i++) {
        const ari_dump_file *a = placed[i - 1], *b = placed[i];
        if (a->rank != b->rank && memcmp(a->placement.coords, b->placement.coords, sizeof a->placement.coords) == 0)
            return ar_error_set(AR_ERR_FORMAT,
                                "InvalidPlacement: %s and %s: ranks %d and %d are at one place in the mesh",
                                ARI_SHOW(a->path), ARI_SHOW(b->path), a->rank, b->rank);
    }
    return AR_OK;
}

/* Checks the number of ranks against a mapping that assigns files to ranks. */
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

/* A mesh is told by the mapping, by files, or by both alike. */
static ar_status check_mesh(const ar_dump *d, const ari_map *map)
{
    for (size_t i = 0; i < d->files && map->mesh.ndim > 0; i++) {
        const ari_placement *p = &d->file[i].placement;
        if (p->mesh.ndim > 0 && !ari_mesh_same(&p->mesh, &map->mesh))
            return ari_map_bad(map, NULL, "key 'mesh': %s says that it is of another mesh", ARI_SHOW(d->file[i].path));
        if (p->world > 0 && p->world != map->ranks)
            return ari_map_bad(map, NULL, "key 'mesh': %d ranks, but %s says that there are %d", map->ranks,
                               ARI_SHOW(d->file[i].path), p->world);
    }
    return AR_OK;
}

static ar_status tell_by_mapping(ar_dump *d, const ari_map *map)
{
    d->of_ranks = true;
    d->world = map->ranks;
    AR_TRY(list_ranks(d));
    return check_mapped(d);
}

static ar_status tell_ranks(ar_dump *d, const ari_map *map)
{
    if (d->files > INT_MAX)
        return ar_error_set(AR_ERR_OVERFLOW, "%s: %zu files", ARI_SHOW(d->path), d->files);
    if (map != NULL) {
        AR_TRY(check_mesh(d, map));
        d->mesh = map->mesh;
    }
    if (d->mapped)
        return tell_by_mapping(d, map);
    for (size_t i = 0; i < d->files; i++)
        d->of_ranks |= d->file[i].placed;
    if (!d->of_ranks)
        AR_TRY(names_repeat(&d->of_ranks, d));
    if (!d->of_ranks)
        return AR_OK;
    for (size_t i = 0; i < d->files; i++)
        d->file[i].rank = d->file[i].placed ? d->file[i].placement.rank : -1;
    assign_ranks(d);
    AR_TRY(agree_on_mesh(d));
    AR_TRY(list_ranks(d));
    return check_places(d);
}

ar_status ari_dump_open_files(ar_dump *d, const ari_map *map)
{
    AR_TRY(open_path(d, map));
    return tell_ranks(d, map);
}
