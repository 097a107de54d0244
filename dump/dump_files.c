/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "dump/dump.h"
#include "ref/core/out.h"
#include "ref/core/size.h"
#include "ref/io/safetensors.h"

static bool ends_in(const char *name, const char *end)
{
    const size_t n = strlen(name), m = strlen(end);
    return n > m && strcmp(name + n - m, end) == 0;
}

void ari_dump_close_file(ari_dump_file *f)
{
    ari_placement_fini(&f->placement);
    ar_st_close(f->owned);
    free(f->path);
}

size_t ari_dump_entries(const ari_dump_file *f)
{
    return f->st == NULL ? 1 : ar_st_count(f->st);
}

const ar_st_entry *ari_dump_entry(const ari_dump_file *f, size_t i)
{
    return f->st == NULL ? &f->array : ar_st_at(f->st, i);
}

/* A file of the list; its contents are the caller's to set. */
static ar_status add_file(ari_dump_file **added, ar_dump *d, const char *folder, const char *name)
{
    AR_TRY(ari_grow(&d->file, &d->cap_files, d->files, sizeof *d->file, "files of a dump"));
    ari_dump_file *f = &d->file[d->files];
    *f = (ari_dump_file){.rank = -1};
    if (folder == NULL)
        f->path = strdup(name);
    else if (asprintf(&f->path, "%s/%s", folder, name) < 0)
        f->path = NULL;
    if (f->path == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory for a file name", ARI_SHOW(d->path));
    const char *slash = strrchr(f->path, '/');
    f->name = slash == NULL ? f->path : slash + 1;
    d->files++;
    *added = f;
    return AR_OK;
}

static ar_status add_safetensors(ar_dump *d, const char *folder, const char *name)
{
    ari_dump_file *f = NULL;
    AR_TRY(add_file(&f, d, folder, name));
    AR_TRY(ar_st_open(&f->owned, f->path));
    f->st = f->owned;
    return AR_OK;
}

static ar_status add_model(ar_dump *d)
{
    for (size_t i = 0; i < ari_st_model_files(d->model); i++) {
        const char *path = NULL;
        const ar_st_file *st = ari_st_model_file(d->model, i, &path);
        ari_dump_file *f = NULL;
        AR_TRY(add_file(&f, d, NULL, path));
        f->st = st;
    }
    return AR_OK;
}

static int is_tensor_file(const struct dirent *entry)
{
    return ends_in(entry->d_name, ".safetensors") && entry->d_name[0] != '.';
}

/* What a file of a folder says of itself. */
static ar_status read_placement(ari_dump_file *f)
{
    const char *dcp = ar_st_metadata(f->st, ARI_DUMP_DCP), *own = ar_st_metadata(f->st, ARI_DUMP_PLACEMENT);
    f->placed = dcp != NULL || own != NULL;
    return f->placed ? ari_placement_parse(&f->placement, dcp, own, f->path) : AR_OK;
}

static ar_status open_folder(ar_dump *d)
{
    AR_TRY(ar_st_model_open(&d->model, d->path));
    if (d->model != NULL)
        return add_model(d);
    struct dirent **list = NULL;
    const int n = scandir(d->path, &list, is_tensor_file, alphasort);
    if (n < 0)
        return ari_out_fail("list", d->path);
    ar_status st = AR_OK;
    for (int i = 0; i < n; i++) {
        if (st == AR_OK)
            st = add_safetensors(d, d->path, list[i]->d_name);
        if (st == AR_OK)
            st = read_placement(&d->file[d->files - 1]);
        free(list[i]);
    }
    free(list);
    if (st == AR_OK && n == 0)
        st = ar_error_set(AR_ERR_IO, "%s: a folder without .safetensors files", ARI_SHOW(d->path));
    return st;
}

/* A file of full tensors may say in which order they were made. */
static ar_status read_order(ari_dump_file *f)
{
    const char *own = f->st ? ar_st_metadata(f->st, ARI_DUMP_PLACEMENT) : NULL;
    return own ? ari_placement_parse(&f->placement, NULL, own, f->path) : AR_OK;
}

ar_status ari_dump_open_files(ar_dump *d)
{
    struct stat info;
    if (stat(d->path, &info) == 0 && S_ISDIR(info.st_mode))
        return open_folder(d);
    if (ends_in(d->path, ".json")) {
        AR_TRY(ari_st_model_open_index(&d->model, d->path));
        return add_model(d);
    }
    AR_TRY(add_safetensors(d, NULL, d->path));
    return read_order(&d->file[0]);
}
