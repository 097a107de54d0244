/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ref/io/json.h"
#include "ref/io/safetensors.h"
#include "ref/io/safetensors_private.h"

ARI_OWNER(ar_st_model, ari_st_model_close)

typedef struct shard {
    const char *name; /* borrowed from the index */
    char *path;
    ar_st_file *file;
} shard;

struct ar_st_model {
    ar_st_file *single; /* a single file, or: */
    char *single_path;
    shard *shards;
    size_t n_shards;
    const ar_st_entry **entries; /* entries sorted by name */
    size_t n;
};

static ar_status bad_index(const char *path, const char *tensor, const char *problem, const char *detail)
{
    return ar_error_set(AR_ERR_FORMAT, "InvalidIndex: %s: tensor '%s': %s '%s'", ARI_SHOW(path), ARI_SHOW(tensor),
                        problem, ARI_SHOW(detail));
}

/* Lists the distinct file names of the map, sorted. They must stay inside the folder, because the index is
 * untrusted. */
static ar_status list_shards(ar_st_model *m, const json_t *map, const char *path)
{
    const char *tensor;
    json_t *value;
    AR_TRY(ARI_ALLOC_ZERO(&m->shards, json_object_size(map), "an index"));
    size_t n = 0;
    /* The macro needs a non-const object, which it only reads. */
    json_object_foreach((json_t *)(uintptr_t)map, tensor, value)
    {
        const char *name = json_string_value(value);
        if (name == NULL)
            return bad_index(path, tensor, "its file name is not a", "string");
        if (name[0] == '\0' || strchr(name, '/') != NULL || strstr(name, "..") != NULL || strcmp(name, ".") == 0)
            return bad_index(path, tensor, "a shard must be a plain file name in the same folder, not", name);
        m->shards[n++].name = name;
    }
    ARI_SORT(m->shards, n, ari_by_name);
    for (size_t i = 0; i < n; i++)
        if (m->n_shards == 0 || strcmp(m->shards[m->n_shards - 1].name, m->shards[i].name) != 0)
            m->shards[m->n_shards++].name = m->shards[i].name;
    return AR_OK;
}

static ar_status open_shards(ar_st_model *m, const char *folder)
{
    for (size_t i = 0; i < m->n_shards; i++) {
        AR_TRY(ari_file_path(&m->shards[i].path, folder, m->shards[i].name));
        AR_TRY(ari_st_open(&m->shards[i].file, m->shards[i].path));
    }
    return AR_OK;
}

/* Checks that every name in the map exists in its shard, and collects the names. */
static ar_status collect_names(ar_st_model *m, const json_t *map, const char *path)
{
    const char *tensor;
    json_t *value;
    AR_TRY(ARI_ALLOC_ZERO(&m->entries, json_object_size(map), "an index"));
    json_object_foreach((json_t *)(uintptr_t)map, tensor, value)
    {
        const shard probe = {json_string_value(value), NULL, NULL};
        const shard *s = bsearch(&probe, m->shards, m->n_shards, sizeof *m->shards, ari_by_name);
        const ar_st_entry *e = s == NULL ? NULL : ari_st_find(s->file, tensor);
        if (e == NULL)
            return ar_error_set(AR_ERR_FORMAT, "TensorNotFound: %s: tensor '%s' is not in its shard '%s'",
                                ARI_SHOW(path), ARI_SHOW(tensor), ARI_SHOW(probe.name));
        m->entries[m->n++] = e;
    }
    ARI_SORT(m->entries, m->n, ari_by_name_of);
    return AR_OK;
}

/* Checks that every tensor of every shard is the one in the map: none unlisted, no name in two shards. */
static ar_status check_shards(const ar_st_model *m, const json_t *map, const char *path)
{
    for (size_t i = 0; i < m->n_shards; i++)
        for (size_t k = 0; k < ari_st_tensor_count(m->shards[i].file); k++) {
            const char *tensor = ari_st_at(m->shards[i].file, k)->name;
            const char *listed = json_string_value(json_object_get(map, tensor));
            if (listed == NULL)
                return bad_index(path, tensor, "not listed, but found in the shard", m->shards[i].name);
            if (strcmp(listed, m->shards[i].name) != 0)
                return bad_index(path, tensor, "listed in another shard, but also found in", m->shards[i].name);
        }
    return AR_OK;
}

static ar_status open_index(ar_st_model *m, const char *folder, const char *path)
{
    json_auto_t *root = NULL;
    AR_TRY(ari_json_load(&root, path));
    if (!json_is_object(root))
        return ar_error_set(AR_ERR_FORMAT, "InvalidIndex: %s: expected an object", ARI_SHOW(path));
    const json_t *map = json_object_get(root, "weight_map");
    if (!json_is_object(map))
        return ar_error_set(AR_ERR_FORMAT, "InvalidIndex: %s: key 'weight_map' is missing or not an object",
                            ARI_SHOW(path));
    AR_TRY(list_shards(m, map, path));
    AR_TRY(open_shards(m, folder));
    AR_TRY(collect_names(m, map, path));
    AR_TRY(check_shards(m, map, path));
    for (size_t i = 0; i < m->n_shards; i++)
        m->shards[i].name = NULL; /* the index owned the names */
    return AR_OK;
}

/* Returns true also for a dangling link, which must be reported as an error and not as an absent file. */
static bool exists(const char *path)
{
    struct stat info;
    return lstat(path, &info) == 0;
}

ar_status ari_st_model_open(ar_st_model **out, const char *folder)
{
    struct stat info;
    ARI_OWNED char *single = NULL, *index = NULL;
    *out = NULL;
    if (folder == NULL || stat(folder, &info) != 0 || !S_ISDIR(info.st_mode))
        return ar_error_set(AR_ERR_IO, "%s: is not a folder", folder == NULL ? "(none)" : ARI_SHOW(folder));
    ARI_OWNED_BY(ari_st_model_close) ar_st_model *m = NULL;
    AR_TRY(ARI_ALLOC_ZERO(&m, 1, "a model's files"));
    AR_TRY(ari_file_path(&single, folder, ARI_ST_SINGLE));
    AR_TRY(ari_file_path(&index, folder, ARI_ST_INDEX));
    if (exists(single)) /* like the official loader, prefers a single file to an index */
        AR_TRY(ari_st_open(&m->single, single));
    else if (exists(index))
        AR_TRY(open_index(m, folder, index));
    else
        return AR_OK;
    m->single_path = m->single != NULL ? single : NULL;
    single = m->single != NULL ? NULL : single;
    ARI_GIVE(out, m);
    return AR_OK;
}

ar_status ari_st_model_open_index(ar_st_model **out, const char *path)
{
    const char *slash = strrchr(path, '/');
    ARI_OWNED char *folder = slash == NULL ? strdup(".") : strndup(path, (size_t)(slash - path) + 1);
    ARI_OWNED_BY(ari_st_model_close) ar_st_model *m = calloc(1, sizeof *m);
    if (folder == NULL || m == NULL)
        return ar_error_set(AR_ERR_MEMORY, "%s: no memory to open it", ARI_SHOW(path));
    AR_TRY(open_index(m, folder, path));
    ARI_GIVE(out, m);
    return AR_OK;
}

void ari_st_model_close(ar_st_model *m)
{
    if (m == NULL)
        return;
    ari_st_close(m->single);
    free(m->single_path);
    for (size_t i = 0; i < m->n_shards; i++) {
        ari_st_close(m->shards[i].file);
        free(m->shards[i].path);
    }
    free(m->shards);
    free(m->entries);
    free(m);
}

size_t ari_st_model_count(const ar_st_model *m)
{
    return m->single != NULL ? ari_st_tensor_count(m->single) : m->n;
}

const ar_st_entry *ari_st_model_at(const ar_st_model *m, size_t i)
{
    if (m->single != NULL)
        return ari_st_at(m->single, i);
    return i < m->n ? m->entries[i] : NULL;
}

const ar_st_entry *ari_st_model_find(const ar_st_model *m, const char *name)
{
    if (m->single != NULL)
        return ari_st_find(m->single, name);
    const ar_st_entry probe = {.name = name};
    const ar_st_entry *key = &probe;
    const ar_st_entry **found = bsearch(&key, m->entries, m->n, sizeof key, ari_by_name_of);
    return found == NULL ? NULL : *found;
}

size_t ari_st_model_files(const ar_st_model *m)
{
    return m->single != NULL ? 1 : m->n_shards;
}

const ar_st_file *ari_st_model_file(const ar_st_model *m, size_t i, const char **path)
{
    *path = m->single != NULL ? m->single_path : m->shards[i].path;
    return m->single != NULL ? m->single : m->shards[i].file;
}
